import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

interface Props {
  label: string;
  columns: string[];
  children: ComponentChildren;
}

/** A table that scrolls sideways where it has to; on a phone each row is a block, and each cell says its column. */
export function Table({ label, columns, children }: Props) {
  const body = useRef<HTMLTableSectionElement>(null);
  useLayoutEffect(() => {
    for (const row of body.current?.rows ?? []) {
      [...row.cells].forEach((cell, index) => {
        cell.dataset.label = columns[index] ?? "";
      });
    }
  });
  return (
    <section class="table-place" aria-label={label} tabIndex={0}>
      <table class="table">
        <thead>
          <tr>
            {columns.map((column) => (
              <th key={column} scope="col">
                {column}
              </th>
            ))}
          </tr>
        </thead>
        <tbody ref={body}>{children}</tbody>
      </table>
    </section>
  );
}
