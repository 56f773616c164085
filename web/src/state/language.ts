import { computed, signal } from "@preact/signals";
import en from "../locales/en.json";
import { kept } from "./preferences";

export type Key = keyof typeof en;
type Texts = Record<Key, string>;

/** Further languages come when they are wanted. */
const OTHERS: Record<string, () => Promise<{ default: Texts }>> = {
  de: () => import("../locales/de.json"),
};

export const LANGUAGES = ["en", ...Object.keys(OTHERS)];
export const chosenLanguage = kept<string>("language", "");
const texts = signal<Texts>(en);

export const language = computed(() => {
  const wanted = chosenLanguage.value ? [chosenLanguage.value] : navigator.languages;
  for (const name of wanted) {
    const short = name.slice(0, 2).toLowerCase();
    if (LANGUAGES.includes(short)) return short;
  }
  return "en";
});

export async function loadLanguage(): Promise<void> {
  const load = OTHERS[language.value];
  texts.value = load ? (await load()).default : en;
  document.documentElement.lang = language.value;
}

export async function chooseLanguage(name: string): Promise<void> {
  chosenLanguage.value = name;
  await loadLanguage();
}

/** The text of a key; `{name}` stands for a value, and `one|many` is chosen by the value `n`. */
export function t(key: Key, values: Record<string, string | number> = {}): string {
  let text = texts.value[key];
  if ("n" in values && text.includes("|")) {
    const [one, many] = text.split("|");
    text = (values.n === 1 ? one : many) ?? text;
  }
  return text.replace(/\{(\w+)\}/g, (whole, name: string) => String(values[name] ?? whole));
}

/** The text of a key that may not be there: what the server names, and what to show where we have no word for it. */
export function named(key: string, otherwise: string): string {
  return key in en ? t(key as Key) : otherwise;
}

const locale = computed(() => chosenLanguage.value || navigator.language || "en");

const DOLLARS = { style: "currency", currency: "USD", currencyDisplay: "narrowSymbol" } as const;

/** Making a formatter takes far longer than using it. */
const formatters = computed(() => ({
  number: new Intl.NumberFormat(locale.value),
  dollars: new Intl.NumberFormat(locale.value, DOLLARS),
  cents: new Intl.NumberFormat(locale.value, { ...DOLLARS, maximumFractionDigits: 4 }),
  tenths: new Intl.NumberFormat(locale.value, { minimumFractionDigits: 1, maximumFractionDigits: 1 }),
  time: new Intl.DateTimeFormat(locale.value, { hour: "2-digit", minute: "2-digit" }),
  moment: new Intl.DateTimeFormat(locale.value, { dateStyle: "medium", timeStyle: "short" }),
  day: new Intl.DateTimeFormat(locale.value, { weekday: "long", day: "numeric", month: "long" }),
  month: new Intl.DateTimeFormat(locale.value, { month: "long", year: "numeric" }),
}));

export const formatNumber = (value: number): string => formatters.value.number.format(value);
export const formatTime = (seconds: number): string => formatters.value.time.format(seconds * 1000);
export const formatMoment = (seconds: number): string => formatters.value.moment.format(seconds * 1000);
export const formatDay = (seconds: number): string => formatters.value.day.format(seconds * 1000);
export const formatMonth = (seconds: number): string => formatters.value.month.format(seconds * 1000);

export function formatDuration(seconds: number): string {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${formatters.value.tenths.format(seconds)} s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  const [large, small] = minutes < 60 ? [minutes, whole % 60] : [Math.floor(minutes / 60), minutes % 60];
  const [unit, part] = minutes < 60 ? ["min", "s"] : ["h", "min"];
  return `${large} ${unit}${small ? ` ${small} ${part}` : ""}`;
}

/** Dollars; of less than one, parts of a cent too. */
export function formatCost(value: number): string {
  return (value < 1 ? formatters.value.cents : formatters.value.dollars).format(value);
}

export function formatBytes(bytes: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let value = bytes;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit++;
  }
  return `${unit ? formatters.value.tenths.format(value) : value} ${units[unit]}`;
}
