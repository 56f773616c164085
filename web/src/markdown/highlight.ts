import type { HLJSApi, LanguageFn } from "highlight.js";
import { Recent } from "./recent";

type Loaded = Promise<{ default: LanguageFn }>;

/** Each language is a file of its own, loaded with the first code in it. */
const LANGUAGES: Record<string, () => Loaded> = {
  bash: () => import("highlight.js/lib/languages/bash"),
  c: () => import("highlight.js/lib/languages/c"),
  cpp: () => import("highlight.js/lib/languages/cpp"),
  csharp: () => import("highlight.js/lib/languages/csharp"),
  css: () => import("highlight.js/lib/languages/css"),
  diff: () => import("highlight.js/lib/languages/diff"),
  dockerfile: () => import("highlight.js/lib/languages/dockerfile"),
  go: () => import("highlight.js/lib/languages/go"),
  ini: () => import("highlight.js/lib/languages/ini"),
  java: () => import("highlight.js/lib/languages/java"),
  javascript: () => import("highlight.js/lib/languages/javascript"),
  json: () => import("highlight.js/lib/languages/json"),
  kotlin: () => import("highlight.js/lib/languages/kotlin"),
  lua: () => import("highlight.js/lib/languages/lua"),
  makefile: () => import("highlight.js/lib/languages/makefile"),
  php: () => import("highlight.js/lib/languages/php"),
  python: () => import("highlight.js/lib/languages/python"),
  r: () => import("highlight.js/lib/languages/r"),
  ruby: () => import("highlight.js/lib/languages/ruby"),
  rust: () => import("highlight.js/lib/languages/rust"),
  scss: () => import("highlight.js/lib/languages/scss"),
  sql: () => import("highlight.js/lib/languages/sql"),
  swift: () => import("highlight.js/lib/languages/swift"),
  typescript: () => import("highlight.js/lib/languages/typescript"),
  xml: () => import("highlight.js/lib/languages/xml"),
  yaml: () => import("highlight.js/lib/languages/yaml"),
};
const ALIASES: Record<string, string> = {
  sh: "bash",
  shell: "bash",
  zsh: "bash",
  console: "bash",
  "c++": "cpp",
  cs: "csharp",
  patch: "diff",
  toml: "ini",
  js: "javascript",
  jsx: "javascript",
  mjs: "javascript",
  make: "makefile",
  kt: "kotlin",
  py: "python",
  rb: "ruby",
  rs: "rust",
  ts: "typescript",
  tsx: "typescript",
  html: "xml",
  svg: "xml",
  yml: "yaml",
};
const HIGHLIGHT_MAX = 60_000;

const known = new Recent<string>(300);

/** The same where it was made before. */
export function knownHighlight(code: string, name: string): string | undefined {
  return known.get(`${name}\n${code}`);
}

let core: Promise<{ default: HLJSApi }> | null = null;

/** The code as HTML with classes, made by the highlighter from escaped text; null where it is unknown or too long. */
export async function highlighted(code: string, name: string): Promise<string | null> {
  const wanted = name.toLowerCase();
  const language = ALIASES[wanted] ?? wanted;
  const load = LANGUAGES[language];
  if (!load || code.length > HIGHLIGHT_MAX) return null;
  core ??= import("highlight.js/lib/core");
  const [{ default: hljs }, { default: grammar }] = await Promise.all([core, load()]);
  if (!hljs.getLanguage(language)) hljs.registerLanguage(language, grammar);
  const html = hljs.highlight(code, { language, ignoreIllegals: true }).value;
  known.set(`${name}\n${code}`, html);
  return html;
}
