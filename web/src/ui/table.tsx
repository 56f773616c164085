import type { ComponentChildren } from "preact";

interface Props {
  label: string;
  columns: string[];
  children: ComponentChildren;
}

/** A table that scrolls sideways where it has to. */
export function Table({ label, columns, children }: Props) {
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
        <tbody>{children}</tbody>
      </table>
    </section>
  );
}
