/** Drawn with one stroke on a grid of 24. */
const PATHS = {
  plus: "M12 5v14M5 12h14",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM20 20l-4-4",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  pencil: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  retry: "M20 12a8 8 0 1 1-2.6-5.9M20 4v4h-4",
  more: "M5.3 12a.7.7 0 1 0 1.4 0a.7.7 0 1 0-1.4 0M11.3 12a.7.7 0 1 0 1.4 0a.7.7 0 1 0-1.4 0M17.3 12a.7.7 0 1 0 1.4 0a.7.7 0 1 0-1.4 0",
  pin: "M9 4h6l-1 6 3 3v2H7v-2l3-3zM12 15v5",
  archive: "M4 5h16v4H4zM6 9v10h12V9M10 13h4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  paperclip: "M19 11l-7.5 7.5a4 4 0 0 1-6-6L13 5a2.7 2.7 0 0 1 4 4l-7.5 7.5a1.3 1.3 0 0 1-2-2L14 8",
  chevron: "M9 6l6 6-6 6",
  left: "M15 6l-6 6 6 6",
  down: "M6 9l6 6 6-6",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M19 5l-1.4 1.4M6.4 17.6L5 19",
  moon: "M20 14.5A8 8 0 1 1 9.5 4a6.5 6.5 0 0 0 10.5 10.5z",
  system: "M4 5h16v11H4zM9 20h6M12 16v4",
  info: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16zM12 11v5M12 8h.01",
  warn: "M12 4l9 16H3zM12 10v4M12 17h.01",
  tool: "M14.5 6.5a4 4 0 0 0-5 5L4 17l3 3 5.5-5.5a4 4 0 0 0 5-5L15 12l-3-3z",
  terminal: "M4 5h16v14H4zM8 9l3 3-3 3M13 15h4",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  globe: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16zM4 12h16M12 4c3 3 3 13 0 16M12 4c-3 3-3 13 0 16",
  question: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16zM10 10a2 2 0 1 1 3 1.7c-.7.4-1 .8-1 1.6M12 16h.01",
  shield: "M12 3l7 3v6c0 4-3 7-7 9-4-2-7-5-7-9V6z",
  spark: "M12 4v16M4 12h16M6.5 6.5l11 11M17.5 6.5l-11 11",
  clock: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16zM12 8v4l3 2",
  chart: "M5 19V11M10 19V5M15 19v-9M20 19v-5",
  book: "M5 4h10a3 3 0 0 1 3 3v13H8a3 3 0 0 1-3-3zM5 17a3 3 0 0 1 3-3h10",
  key: "M8 12a4 4 0 1 0 0 .01M11.5 12H21M17 12v4M20 12v3",
  plug: "M9 4v5M15 4v5M7 9h10v3a5 5 0 0 1-10 0zM12 17v4",
  gear: "M12 9a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM12 3v3M12 18v3M3 12h3M18 12h3M5.6 5.6l2.2 2.2M16.2 16.2l2.2 2.2M18.4 5.6l-2.2 2.2M7.8 16.2l-2.2 2.2",
  pulse: "M3 12h4l2-6 4 12 2.5-6H21",
  exit: "M14 4h5v16h-5M4 12h10M10 8l4 4-4 4",
  play: "M8 5l11 7-11 7z",
  pause: "M9 5v14M15 5v14",
  branch: "M7 4v16M7 14c6 0 10-2 10-7M17 7V4",
  steer: "M5 20c0-8 4-10 13-10M14 6l4 4-4 4",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name, size = 18 }: { name: IconName; size?: number }) {
  return (
    <svg class="icon" width={size} height={size} viewBox="0 0 24 24" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}
