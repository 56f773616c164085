import type { Signal } from "@preact/signals";
import type { Tokens } from "marked";
import { render } from "preact";
import { memo } from "preact/compat";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { CodeBlock } from "./code_block";
import { renderMath } from "./math";
import { type Block, BlockParser, html, languageOf } from "./parse";
import { Recent } from "./recent";
import { sanitized } from "./sanitize";

/** A growing text is drawn this often at most. */
const DRAW_MS = 80;

/** Texts that are complete, by themselves: a row that comes into view again is not parsed and sanitised again. */
const wholes = new Recent<Block[]>(200);
const fragments = new Recent<DocumentFragment>(600);

function wholeBlocks(text: string): Block[] {
  const known = wholes.get(text);
  if (known) return known;
  const blocks = new BlockParser().update(text, true);
  wholes.set(text, blocks);
  return blocks;
}

/** The text of a model, drawn block by block while it grows. */
export function Markdown({ text, done }: { text: Signal<string>; done: Signal<boolean> }) {
  const parser = useRef<BlockParser | null>(null);
  // What is drawn; the text may have grown since, before the effect below runs.
  const drawn = useRef({ text: "", done: false });
  const parse = () => {
    drawn.current = { text: text.peek(), done: done.peek() };
    if (drawn.current.done) return wholeBlocks(drawn.current.text);
    parser.current ??= new BlockParser();
    return parser.current.update(drawn.current.text, false);
  };
  const [blocks, setBlocks] = useState<Block[]>(parse);
  useEffect(() => {
    let timer = 0;
    const draw = () => {
      timer = 0;
      setBlocks(parse());
    };
    const changed = () => {
      if (text.peek() === drawn.current.text && done.peek() === drawn.current.done) return;
      if (!timer) timer = window.setTimeout(() => requestAnimationFrame(draw), DRAW_MS);
    };
    const stops = [text.subscribe(changed), done.subscribe(changed)];
    return () => {
      clearTimeout(timer);
      for (const stop of stops) stop();
    };
  }, [text, done]);
  const last = blocks.length - 1;
  const open = !done.value;
  return (
    <div class="prose" dir="auto">
      {blocks.map((block, index) => (
        <BlockView key={block.key} block={block} raw={block.token.raw} done={!open || index < last} />
      ))}
    </div>
  );
}

interface BlockProps {
  block: Block;
  raw: string;
  done: boolean;
}

const BlockView = memo(
  ({ block, done }: BlockProps) => {
    if (block.token.type === "code") {
      const token = block.token as Tokens.Code;
      return <CodeBlock code={token.text} language={languageOf(token.lang)} done={done} />;
    }
    return <HtmlBlock source={html(block.token)} done={done} />;
  },
  (before, after) => before.raw === after.raw && before.done === after.done,
);

function fragmentOf(source: string, done: boolean): DocumentFragment {
  const known = fragments.get(source);
  if (known) return known.cloneNode(true) as DocumentFragment;
  const fragment = sanitized(source);
  for (const child of fragment.children) child.setAttribute("dir", "auto");
  if (done) fragments.set(source, fragment.cloneNode(true) as DocumentFragment);
  return fragment;
}

function HtmlBlock({ source, done }: { source: string; done: boolean }) {
  const target = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const element = target.current;
    if (!element) return;
    element.replaceChildren(fragmentOf(source, done));
    if (!done) return;
    void renderMath(element);
    const places = [...element.querySelectorAll<HTMLElement>("pre[data-language]")].map(placeCode);
    return () => {
      for (const place of places) render(null, place);
    };
  }, [source, done]);
  return <div class="block" ref={target} />;
}

/** Code in a list or a quotation, with what other code has. */
function placeCode(plain: HTMLElement): HTMLElement {
  const place = document.createElement("div");
  const code = plain.textContent ?? "";
  plain.replaceWith(place);
  render(<CodeBlock code={code} language={plain.dataset.language ?? ""} done />, place);
  return place;
}
