import type { ComponentChildren } from "preact";
import { useId, useLayoutEffect, useRef } from "preact/hooks";
import { t } from "../state/language";
import { IconButton } from "./button";

interface DialogProps {
  title: string;
  onClose(): void;
  children: ComponentChildren;
  class?: string;
  hideTitle?: boolean;
}

/** A modal window: the browser keeps the focus inside and closes it on Escape. */
export function Dialog({ title, onClose, children, class: extra, hideTitle }: DialogProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useId();
  useLayoutEffect(() => {
    const before = document.activeElement;
    dialog.current?.showModal();
    return () => {
      if (before instanceof HTMLElement) before.focus();
    };
  }, []);
  // A click belongs to what its beginning and end have in common: text that is selected beyond the edge does not close it.
  const pressedOutside = useRef(false);
  const press = (event: PointerEvent) => {
    pressedOutside.current = event.target === dialog.current;
  };
  const outside = (event: MouseEvent) => {
    if (event.target === dialog.current && pressedOutside.current) onClose();
  };
  return (
    <dialog
      ref={dialog}
      class={`dialog ${extra ?? ""}`}
      aria-labelledby={id}
      onClose={onClose}
      onPointerDown={press}
      onClick={outside}
    >
      <div class="dialog-body">
        <header class={hideTitle ? "visually-hidden" : "dialog-head"}>
          <h2 id={id}>{title}</h2>
          {!hideTitle && <IconButton icon="close" label={t("close")} onClick={onClose} />}
        </header>
        {children}
      </div>
    </dialog>
  );
}
