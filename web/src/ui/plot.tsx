import { useEffect, useRef } from "preact/hooks";
import type uPlot from "uplot";
import { language, t } from "../state/language";
import { systemDark, theme } from "../state/preferences";

export interface Series {
  label: string;
  /** A variable of the style sheet. */
  color: string;
  values: (number | null)[];
}

interface Props {
  title: string;
  days: number[];
  series: Series[];
  bars?: boolean;
  /** The figures are counts: the axis has no parts of them. */
  whole?: boolean;
  format(value: number): string;
}

const HALF_DAY_S = 43_200;
const LABEL_PX = 80;
const WHOLE = Array.from({ length: 36 }, (_, index) => ([1, 2, 5][index % 3] as number) * 10 ** Math.floor(index / 3));

/** As many days, counted back from the last, as there is room for. */
function labelled(days: number[], width: number): number[] {
  const step = Math.ceil((days.length * LABEL_PX) / Math.max(width, 2 * LABEL_PX));
  return days.filter((_, index) => (days.length - 1 - index) % step === 0);
}

/** Figures by day; the library comes with the first plot. */
export function Plot({ title, days, series, bars, whole, format }: Props) {
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    let plot: uPlot | null = null;
    let closed = false;
    const resized = new ResizeObserver(() => plot?.setSize({ width: element.clientWidth, height: 170 }));
    void Promise.all([import("uplot"), import("uplot/dist/uPlot.min.css")]).then(([{ default: UPlot }]) => {
      if (closed) return;
      const style = getComputedStyle(element);
      const color = (name: string) => resolved(element, style, name);
      const axis = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
      plot = new UPlot(
        {
          width: element.clientWidth,
          height: 170,
          cursor: { y: false },
          legend: { live: true },
          scales: {
            x: { time: true, range: (_self, low, high) => [low - HALF_DAY_S, high + HALF_DAY_S] },
            y: { range: (_self, _low, high) => [0, high > 0 ? high * 1.1 : 1] },
          },
          axes: [
            { ...axis, splits: () => labelled(days, element.clientWidth), values: (_self, ticks) => ticks.map(day) },
            { ...axis, size: 80, incrs: whole ? WHOLE : undefined, values: (_self, ticks) => ticks.map(format) },
          ],
          series: [
            { label: t("usage.day"), value: (_self, value) => (value === null ? "" : day(value)) },
            ...series.map((one) => ({
              label: one.label,
              stroke: color(one.color),
              fill: bars ? color(one.color) : undefined,
              width: bars ? 0 : 2,
              points: { show: !bars, size: 6 },
              paths: bars ? UPlot.paths.bars?.({ size: [0.6, 24] }) : undefined,
              value: (_self: uPlot, value: number | null) => (value === null ? "–" : format(value)),
            })),
          ],
        },
        [days, ...series.map((one) => one.values)] as uPlot.AlignedData,
        element,
      );
      resized.observe(element);
    });
    return () => {
      closed = true;
      resized.disconnect();
      plot?.destroy();
    };
  }, [days, series, bars, whole, format, theme.value, systemDark.value, language.value]);
  return (
    <figure class="plot">
      <figcaption>{title}</figcaption>
      <div ref={place} role="img" aria-label={title} />
    </figure>
  );
}

const day = (seconds: number): string =>
  new Intl.DateTimeFormat(language.value, { day: "numeric", month: "short", timeZone: "UTC" }).format(seconds * 1000);

/** A canvas knows neither variables nor `light-dark()`, so the browser computes the colour. */
function resolved(element: HTMLElement, style: CSSStyleDeclaration, name: string): string {
  const before = element.style.color;
  element.style.color = `var(${name})`;
  const color = style.color;
  element.style.color = before;
  return color;
}
