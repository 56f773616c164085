import { Marked, type Token, type Tokens } from "marked";

export interface Block {
  key: number;
  token: Token;
}

const escaped = (text: string): string => text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

/** HTML that a text may hold as it is: tags without attributes. Anything else is shown as it was written. */
const PLAIN_TAG =
  /^<\/?(?:abbr|b|br|dd|del|details|dl|dt|em|hr|i|ins|kbd|mark|p|q|s|samp|small|strong|sub|summary|sup|u|var|wbr)\s*\/?>$/i;

const plainTags = (text: string): string =>
  text.replace(/<[^<>]*>|[<>]/g, (found) => (PLAIN_TAG.test(found) ? found : escaped(found)));

const mathHtml = (token: Tokens.Generic): string =>
  `<span data-tex="${escaped(String(token.tex))}"${token.display ? ' data-display="1"' : ""}>${escaped(token.raw)}</span>`;

export const languageOf = (info: string | undefined): string => (info ?? "").split(/[\s{]/)[0] ?? "";

const rule = (name: string, level: "block" | "inline", start: RegExp, whole: RegExp, display: boolean) => ({
  name,
  level,
  start: (text: string) => start.exec(text)?.index,
  tokenizer(text: string): Tokens.Generic | undefined {
    const found = whole.exec(text);
    const tex = found?.slice(1).find((group) => group !== undefined);
    return found && tex !== undefined ? { type: name, raw: found[0], tex: tex.trim(), display } : undefined;
  },
  renderer: mathHtml,
});

const marked = new Marked({
  gfm: true,
  extensions: [
    rule("displayMath", "block", /\$\$|\\\[/, /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n+|$)/, true),
    rule("inlineDisplayMath", "inline", /\$\$|\\\[/, /^(?:\$\$([^$]+?)\$\$|\\\[([\s\S]+?)\\\])/, true),
    rule(
      "inlineMath",
      "inline",
      /\$|\\\(/,
      /^(?:\$(?![\s$])((?:\\.|[^\\\n$])+?)(?<![\s\\])\$(?![\d$])|\\\(([\s\S]+?)\\\))/,
      false,
    ),
  ],
  renderer: {
    html({ text }) {
      return plainTags(text);
    },
    // Code by itself is drawn without this; that in a list or a quotation is given its frame later.
    code({ text, lang }) {
      return `<pre data-language="${escaped(languageOf(lang))}"><code>${escaped(text)}</code></pre>\n`;
    },
    // The page's own heading is the first.
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 1);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    checkbox({ checked }) {
      return `<span data-task="${checked ? "done" : "open"}">${checked ? "☑" : "☐"}</span> `;
    },
    table(token) {
      const cell = (one: Tokens.TableCell, tag: string) =>
        `<${tag}${one.align ? ` align="${one.align}"` : ""}>${this.parser.parseInline(one.tokens)}</${tag}>`;
      const head = token.header.map((one) => cell(one, "th")).join("");
      const body = token.rows.map((row) => `<tr>${row.map((one) => cell(one, "td")).join("")}</tr>`).join("");
      return `<div data-scroll="1"><table><thead><tr>${head}</tr></thead><tbody>${body}</tbody></table></div>`;
    },
  },
});

/** Text as it was written. Nothing that is in a text may keep the rest of a conversation from being shown. */
const verbatim = (raw: string): Token => ({ type: "text", raw, text: raw, escaped: false });

/** The tokens of a text; one that is nested too deeply to be read is plain text. */
function tokensOf(text: string): Token[] {
  try {
    return marked.lexer(text);
  } catch {
    return [verbatim(text)];
  }
}

const rendered = new WeakMap<Token, string>();

export function html(token: Token): string {
  let source = rendered.get(token);
  if (source === undefined) {
    try {
      source = marked.parser([token]);
    } catch {
      source = `<p>${escaped(token.raw)}</p>`;
    }
    rendered.set(token, source);
  }
  return source;
}

/** The blocks of a text that may still grow: what is behind a later block is settled and not read again. */
export class BlockParser {
  private settled: Block[] = [];
  private offset = 0;
  private text = "";
  private whole = false;

  update(given: string, done: boolean): Block[] {
    const text = given.replace(/\r\n?/g, "\n");
    if (done && this.whole && text === this.text) return this.settled;
    // References may be defined after their use, so a text that is complete is read once as a whole.
    if (done || !text.startsWith(this.text.slice(0, this.offset)) || text.length < this.offset) this.reset();
    this.text = text;
    this.whole = done;
    const tokens = tokensOf(text.slice(this.offset));
    const fresh = tokens.filter((token) => token.type !== "space" && token.type !== "def");
    const blocks = fresh.map((token, index) => ({ key: this.settled.length + index, token }));
    if (done) {
      this.settled = blocks;
      return blocks;
    }
    const all = [...this.settled, ...blocks];
    this.settle(tokens, fresh);
    return all;
  }

  private settle(tokens: Token[], fresh: Token[]): void {
    const last = fresh[fresh.length - 1];
    if (!last) return;
    let length = 0;
    for (const token of tokens) {
      if (token === last) break;
      length += token.raw.length;
    }
    if (this.text.slice(this.offset, this.offset + length).length !== length) return;
    const count = fresh.length - 1;
    this.settled = [
      ...this.settled,
      ...fresh.slice(0, count).map((token, index) => ({ key: this.settled.length + index, token })),
    ];
    this.offset += length;
  }

  private reset(): void {
    this.settled = [];
    this.offset = 0;
  }
}
