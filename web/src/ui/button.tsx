import type { ComponentChildren } from "preact";
import { Icon, type IconName } from "./icons";

interface IconButtonProps {
  icon: IconName;
  label: string;
  onClick?: (event: MouseEvent) => void;
  class?: string;
  disabled?: boolean;
  pressed?: boolean;
  expanded?: boolean;
  size?: number;
}

/** A button that shows a picture and says a word. */
export function IconButton({ icon, label, onClick, class: extra, disabled, pressed, expanded, size }: IconButtonProps) {
  return (
    <button
      type="button"
      class={`icon-button ${extra ?? ""}`}
      aria-label={label}
      title={label}
      aria-pressed={pressed}
      aria-expanded={expanded}
      disabled={disabled}
      onClick={onClick}
    >
      <Icon name={icon} size={size} />
    </button>
  );
}

interface ButtonProps {
  children: ComponentChildren;
  onClick?: (event: MouseEvent) => void;
  kind?: "plain" | "primary" | "danger" | "quiet";
  icon?: IconName;
  type?: "button" | "submit";
  disabled?: boolean;
}

export function Button({ children, onClick, kind = "plain", icon, type = "button", disabled }: ButtonProps) {
  return (
    <button type={type} class={`button ${kind}`} onClick={onClick} disabled={disabled}>
      {icon && <Icon name={icon} size={16} />}
      {children}
    </button>
  );
}
