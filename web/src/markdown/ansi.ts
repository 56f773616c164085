/** Text of a terminal in pieces of one look. */
export interface Piece {
  text: string;
  classes: string;
  color: string;
}

const SEQUENCE = /\x1b\[([0-9;]*)m|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])/g;

interface Look {
  front: string;
  bold: boolean;
  dim: boolean;
  italic: boolean;
  underline: boolean;
  color: string;
}

const PLAIN: Look = { front: "", bold: false, dim: false, italic: false, underline: false, color: "" };

/** Lines as they stand in the end: what a carriage return lets be overwritten is left out, but for its colours. */
function overwritten(text: string): string {
  if (!text.includes("\r")) return text;
  return text
    .split("\n")
    .map((line) => {
      const shown = line.replace(/\r+$/, "");
      const start = shown.lastIndexOf("\r") + 1;
      return start ? (shown.slice(0, start).match(SEQUENCE) ?? []).join("") + shown.slice(start) : shown;
    })
    .join("\n");
}

export function pieces(output: string): Piece[] {
  const text = overwritten(output);
  const found: Piece[] = [];
  let look = PLAIN;
  let from = 0;
  const push = (end: number) => {
    if (end > from) found.push({ text: text.slice(from, end), classes: classesOf(look), color: look.color });
  };
  for (const match of text.matchAll(SEQUENCE)) {
    push(match.index);
    from = match.index + match[0].length;
    if (match[1] !== undefined) look = changed(look, match[1]);
  }
  push(text.length);
  return found;
}

function classesOf(look: Look): string {
  return [
    look.front && `ansi-${look.front}`,
    look.bold && "ansi-bold",
    look.dim && "ansi-dim",
    look.italic && "ansi-italic",
    look.underline && "ansi-underline",
  ]
    .filter(Boolean)
    .join(" ");
}

function changed(before: Look, codes: string): Look {
  const numbers = codes.split(";").map(Number);
  let look = { ...before };
  for (let at = 0; at < numbers.length; at++) {
    const code = numbers[at] ?? 0;
    if (code === 0) look = { ...PLAIN };
    else if (code === 1) look.bold = true;
    else if (code === 2) look.dim = true;
    else if (code === 3) look.italic = true;
    else if (code === 4) look.underline = true;
    else if (code === 22) look.bold = look.dim = false;
    else if (code === 23) look.italic = false;
    else if (code === 24) look.underline = false;
    else if (code === 39) look.front = look.color = "";
    else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) {
      look.front = String(code >= 90 ? code - 60 : code);
      look.color = "";
    } else if (code === 38 && numbers[at + 1] === 5) {
      const index = numbers[at + 2] ?? 0;
      look.front = index < 16 ? String(30 + (index % 8)) : "";
      look.color = index < 16 ? "" : indexed(index);
      at += 2;
    } else if (code === 38 && numbers[at + 1] === 2) {
      look.front = "";
      look.color = `rgb(${numbers[at + 2] ?? 0} ${numbers[at + 3] ?? 0} ${numbers[at + 4] ?? 0})`;
      at += 4;
    } else if (code === 48) at += numbers[at + 1] === 5 ? 2 : 4;
  }
  return look;
}

function indexed(index: number): string {
  if (index >= 232) {
    const grey = 8 + (index - 232) * 10;
    return `rgb(${grey} ${grey} ${grey})`;
  }
  const level = (value: number) => (value ? 55 + value * 40 : 0);
  const cube = index - 16;
  return `rgb(${level(Math.floor(cube / 36))} ${level(Math.floor(cube / 6) % 6)} ${level(cube % 6)})`;
}
