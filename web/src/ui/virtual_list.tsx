import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

const ESTIMATE_PX = 110;
/** Rows are drawn this far outside of what is seen. */
const MARGIN_PX = 900;
const BOTTOM_PX = 60;
const TOP_PX = 700;

interface Keyed {
  key: string;
}

interface Props<T extends Keyed> {
  items: T[];
  label: string;
  draw(item: T): ComponentChildren;
  onNearTop(): void;
  /** A row to show; a new object shows it again. */
  target: { key: string } | null;
  onAway(away: boolean): void;
  /** Changes when the list is to go to its end. */
  toEnd: number;
}

interface Range {
  from: number;
  to: number;
}

/** A list of which only what is seen is drawn; it stays at its end while it grows, or at the row that is looked at. */
export function VirtualList<T extends Keyed>({ items, label, draw, onNearTop, target, onAway, toEnd }: Props<T>) {
  const scroller = useRef<HTMLElement>(null);
  const heights = useRef(new Map<string, number>());
  const anchor = useRef<{ key: string; delta: number } | null>(null);
  const stuck = useRef(true);
  const [range, setRange] = useState<Range>({ from: Math.max(0, items.length - 30), to: items.length });
  const latest = useRef({ items, tops: [0] });
  latest.current = { items, tops: topsOf(items, heights.current) };
  const tops = latest.current.tops;

  const look = useCallback(() => {
    const element = scroller.current;
    if (!element) return;
    const { items, tops } = latest.current;
    const top = element.scrollTop;
    const bottom = top + element.clientHeight;
    const from = Math.max(0, locate(tops, top - MARGIN_PX));
    const to = Math.min(items.length, locate(tops, bottom + MARGIN_PX) + 1);
    setRange((before) => (before.from === from && before.to === to ? before : { from, to }));
  }, []);

  const restore = useCallback(() => {
    const element = scroller.current;
    if (!element) return;
    const { items, tops } = latest.current;
    if (stuck.current) {
      element.scrollTop = element.scrollHeight;
    } else if (anchor.current) {
      const index = items.findIndex((item) => item.key === anchor.current?.key);
      const wanted = (tops[index] ?? 0) - anchor.current.delta;
      if (index >= 0 && Math.abs(element.scrollTop - wanted) > 1) element.scrollTop = wanted;
    }
    look();
  }, [look]);

  const scrolled = () => {
    const element = scroller.current;
    if (!element) return;
    const { items, tops } = latest.current;
    stuck.current = element.scrollHeight - element.scrollTop - element.clientHeight < BOTTOM_PX;
    const index = Math.min(items.length - 1, Math.max(0, locate(tops, element.scrollTop)));
    const item = items[index];
    anchor.current = item ? { key: item.key, delta: (tops[index] ?? 0) - element.scrollTop } : null;
    onAway(!stuck.current);
    if (element.scrollTop < TOP_PX) onNearTop();
    look();
  };

  /** Take the heights of rows; those that are not drawn keep the height they had. */
  const measured = useCallback((rows: Iterable<HTMLElement>) => {
    let changed = false;
    for (const row of rows) {
      const key = row.dataset.key ?? "";
      const height = row.offsetHeight;
      if (height && heights.current.get(key) !== height) {
        heights.current.set(key, height);
        changed = true;
      }
    }
    if (changed) latest.current.tops = topsOf(latest.current.items, heights.current);
    return changed;
  }, []);
  const observer = useMemo(
    () =>
      new ResizeObserver((entries) => {
        if (measured(entries.map((entry) => entry.target as HTMLElement))) restore();
      }),
    [measured, restore],
  );
  useEffect(() => () => observer.disconnect(), [observer]);
  // Whatever was drawn, the place that is looked at stays where it is.
  useLayoutEffect(() => {
    measured(scroller.current?.querySelectorAll<HTMLElement>(":scope > .row") ?? []);
    restore();
  });
  useEffect(() => {
    const element = scroller.current;
    if (!element) return;
    const resized = new ResizeObserver(restore);
    resized.observe(element);
    return () => resized.disconnect();
  }, [restore]);
  useLayoutEffect(() => {
    stuck.current = true;
    onAway(false);
    restore();
  }, [toEnd]);
  useLayoutEffect(() => {
    if (!target || !latest.current.items.some((item) => item.key === target.key)) return;
    stuck.current = false;
    anchor.current = { key: target.key, delta: 80 };
    restore();
  }, [target, restore]);

  const measure = useCallback(
    (element: HTMLElement | null) => {
      if (element) observer.observe(element, { box: "border-box" });
    },
    [observer],
  );
  const from = Math.min(range.from, items.length);
  const to = Math.min(Math.max(range.to, from), items.length);
  return (
    <section class="messages" ref={scroller} onScroll={scrolled} aria-label={label} tabIndex={0}>
      <div style={{ height: `${tops[from] ?? 0}px` }} />
      {items.slice(from, to).map((item) => (
        <div class="row" key={item.key} data-key={item.key} ref={measure}>
          {draw(item)}
        </div>
      ))}
      <div style={{ height: `${(tops[items.length] ?? 0) - (tops[to] ?? 0)}px` }} />
    </section>
  );
}

function topsOf(items: Keyed[], heights: Map<string, number>): number[] {
  const tops = new Array<number>(items.length + 1);
  let top = 0;
  items.forEach((item, index) => {
    tops[index] = top;
    top += heights.get(item.key) ?? ESTIMATE_PX;
  });
  tops[items.length] = top;
  return tops;
}

/** The row that a height is in. */
function locate(tops: number[], y: number): number {
  let low = 0;
  let high = tops.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((tops[middle] ?? 0) <= y) low = middle;
    else high = middle - 1;
  }
  return low;
}
