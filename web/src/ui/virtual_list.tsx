import type { ComponentChildren } from "preact";
import { memo } from "preact/compat";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

const ESTIMATE_PX = 110;
/** Rows are drawn this far outside of what is seen, and again when less than `NEAR_PX` of that is left. */
const MARGIN_PX = 1200;
const NEAR_PX = 700;
const EXTRA_ROWS_MAX = 30;
const BOTTOM_PX = 60;
const TOP_PX = 700;

interface Keyed {
  key: string;
}

interface Props<T extends Keyed> {
  items: T[];
  label: string;
  /** The same function as long as it draws the same: rows are not drawn again otherwise. */
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
  const lastTop = useRef(0);
  const drawn = useRef<Range>({ from: Math.max(0, items.length - 30), to: items.length });
  const [, redraw] = useState(0);
  const latest = useRef<{ items: T[]; tops: number[] }>({ items: [], tops: [0] });
  if (latest.current.items !== items) {
    drawn.current = moved(drawn.current, latest.current.items, items);
    latest.current = { items, tops: topsOf(items, heights.current) };
  }
  const tops = latest.current.tops;

  const look = useCallback(() => {
    const element = scroller.current;
    if (!element) return;
    const { items, tops } = latest.current;
    const top = element.scrollTop;
    const bottom = top + element.clientHeight;
    const rows = (margin: number): Range => ({
      from: locate(tops, top - margin),
      to: Math.min(items.length, locate(tops, bottom + margin) + 1),
    });
    const needed = rows(NEAR_PX);
    const wanted = rows(MARGIN_PX);
    const { from, to } = drawn.current;
    const enough = from <= needed.from && to >= needed.to;
    const tooMany = wanted.from - from > EXTRA_ROWS_MAX || to - wanted.to > EXTRA_ROWS_MAX;
    if (enough && !tooMany) return;
    drawn.current = wanted;
    redraw((count) => count + 1);
  }, []);

  /** Keep what is looked at where it is. */
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
    const { scrollTop, scrollHeight, clientHeight } = element;
    // What grows below the window is no reason to leave the end; whoever moves up is.
    if (scrollHeight - scrollTop - clientHeight < BOTTOM_PX) stuck.current = true;
    else if (scrollTop < lastTop.current - 1) stuck.current = false;
    lastTop.current = scrollTop;
    const index = Math.min(items.length - 1, locate(tops, scrollTop));
    const item = items[index];
    anchor.current = item ? { key: item.key, delta: (tops[index] ?? 0) - scrollTop } : null;
    onAway(!stuck.current);
    if (scrollTop < TOP_PX) onNearTop();
    look();
  };

  // The browser tells the heights of rows after it has laid them out and before they are seen. Rows that are not drawn
  // keep the height they had.
  const observer = useMemo(
    () =>
      new ResizeObserver((entries) => {
        let changed = false;
        for (const entry of entries) {
          const key = (entry.target as HTMLElement).dataset.key ?? "";
          const height = entry.borderBoxSize[0]?.blockSize ?? 0;
          if (height && heights.current.get(key) !== height) {
            heights.current.set(key, height);
            changed = true;
          }
        }
        if (!changed) return;
        latest.current.tops = topsOf(latest.current.items, heights.current);
        restore();
      }),
    [restore],
  );
  useEffect(() => () => observer.disconnect(), [observer]);
  useLayoutEffect(restore, [items, restore]);
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

  const from = Math.min(drawn.current.from, items.length);
  const to = Math.min(Math.max(drawn.current.to, from), items.length);
  return (
    <section class="messages" ref={scroller} onScroll={scrolled} aria-label={label} tabIndex={0}>
      <div style={{ height: `${tops[from] ?? 0}px` }} />
      {items.slice(from, to).map((item, index) => (
        <Row
          key={item.key}
          item={item}
          draw={draw as (item: Keyed) => ComponentChildren}
          observer={observer}
          last={from + index === items.length - 1}
        />
      ))}
      <div style={{ height: `${(tops[items.length] ?? 0) - (tops[to] ?? 0)}px` }} />
    </section>
  );
}

interface RowProps {
  item: Keyed;
  draw(item: Keyed): ComponentChildren;
  observer: ResizeObserver;
  last: boolean;
}

const Row = memo(({ item, draw, observer, last }: RowProps) => {
  const element = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const row = element.current;
    if (!row) return;
    observer.observe(row, { box: "border-box" });
    return () => observer.unobserve(row);
  }, [observer]);
  return (
    <div class={last ? "row last" : "row"} data-key={item.key} ref={element}>
      {draw(item)}
    </div>
  );
});

/** The same rows after items were put before them. */
function moved(range: Range, before: Keyed[], after: Keyed[]): Range {
  const first = before[range.from];
  const at = first ? after.findIndex((item) => item.key === first.key) : -1;
  return at < 0 ? range : { from: at, to: at + range.to - range.from };
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
