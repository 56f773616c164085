import { useEffect, useRef } from "preact/hooks";
import type uPlot from "uplot";
import { language, t } from "../state/language";
import { theme } from "../state/preferences";

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
  format(value: number): string;
}

/** Figures by day; the library comes with the first plot. */
export function Plot({ title, days, series, bars, format }: Props) {
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
          scales: { x: { time: true }, y: { range: (_self, _low, high) => [0, high > 0 ? high * 1.1 : 1] } },
          axes: [
            { ...axis, values: (_self, ticks) => ticks.map((tick) => day(tick)) },
            { ...axis, size: 64, values: (_self, ticks) => ticks.map(format) },
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
  }, [days, series, bars, format, theme.value, language.value]);
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
