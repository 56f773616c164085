import { useEffect, useRef, useState } from "preact/hooks";
import { IconButton } from "./button";
import { Icon, type IconName } from "./icons";

export interface MenuEntry {
  label: string;
  icon: IconName;
  danger?: boolean;
  run(): void;
}

/** A button with a list of things to do; arrow keys move in it. */
export function Menu({ label, entries, icon = "more" }: { label: string; entries: MenuEntry[]; icon?: IconName }) {
  const [open, setOpen] = useState(false);
  const root = useRef<HTMLDivElement>(null);
  const list = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (!open) return;
    place(root.current, list.current);
    list.current?.querySelector<HTMLElement>("button")?.focus();
    const leave = (event: Event) => {
      if (!root.current?.contains(event.target as Node)) setOpen(false);
    };
    document.addEventListener("pointerdown", leave);
    document.addEventListener("scroll", leave, true);
    return () => {
      document.removeEventListener("pointerdown", leave);
      document.removeEventListener("scroll", leave, true);
    };
  }, [open]);
  /** The focus goes back to the button, or it would be nowhere. */
  const close = () => {
    setOpen(false);
    root.current?.querySelector<HTMLElement>("button")?.focus();
  };
  const keys = (event: KeyboardEvent) => {
    const buttons = [...(list.current?.querySelectorAll<HTMLElement>("button") ?? [])];
    const at = buttons.indexOf(document.activeElement as HTMLElement);
    if (event.key === "Tab") return setOpen(false);
    if (event.key === "Escape") close();
    else if (event.key === "ArrowDown") buttons[(at + 1) % buttons.length]?.focus();
    else if (event.key === "ArrowUp") buttons[(at - 1 + buttons.length) % buttons.length]?.focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div class="menu" ref={root} onKeyDown={open ? keys : undefined}>
      <IconButton icon={icon} label={label} expanded={open} onClick={() => setOpen(!open)} />
      {open && (
        <div class="menu-list" role="menu" ref={list}>
          {entries.map((entry) => (
            <button
              type="button"
              role="menuitem"
              key={entry.label}
              class={entry.danger ? "danger" : ""}
              onClick={() => {
                close();
                entry.run();
              }}
            >
              <Icon name={entry.icon} size={16} />
              {entry.label}
            </button>
          ))}
        </div>
      )}
    </div>
  );
}

/** Put the list beside its button, inside the window. */
function place(root: HTMLElement | null, list: HTMLElement | null): void {
  if (!root || !list) return;
  const at = root.getBoundingClientRect();
  const size = list.getBoundingClientRect();
  const below = at.bottom + size.height + 8 < innerHeight;
  list.style.top = `${below ? at.bottom + 4 : Math.max(8, at.top - size.height - 4)}px`;
  list.style.left = `${Math.max(8, Math.min(at.right - size.width, innerWidth - size.width - 8))}px`;
}
