import type { Signal } from "@preact/signals";
import type { Tokens } from "marked";
import { memo } from "preact/compat";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { CodeBlock } from "./code_block";
import { renderMath } from "./math";
import { type Block, BlockParser, html } from "./parse";
import { sanitized } from "./sanitize";

/** A growing text is drawn this often at most. */
const DRAW_MS = 80;

/** The text of a model, drawn block by block while it grows. */
export function Markdown({ text, done }: { text: Signal<string>; done: Signal<boolean> }) {
  const parser = useRef<BlockParser | null>(null);
  parser.current ??= new BlockParser();
  const [blocks, setBlocks] = useState<Block[]>(() => parser.current?.update(text.peek(), done.peek()) ?? []);
  useEffect(() => {
    let timer = 0;
    let drawn = text.peek();
    const draw = () => {
      timer = 0;
      drawn = text.peek();
      setBlocks(parser.current?.update(drawn, done.peek()) ?? []);
    };
    const changed = () => {
      if (text.peek() === drawn && !done.peek()) return;
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
      return <CodeBlock code={token.text} language={(token.lang ?? "").split(/[\s{]/)[0] ?? ""} done={done} />;
    }
    return <HtmlBlock source={html(block.token)} done={done} />;
  },
  (before, after) => before.raw === after.raw && before.done === after.done,
);

function HtmlBlock({ source, done }: { source: string; done: boolean }) {
  const target = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const element = target.current;
    if (!element) return;
    element.replaceChildren(sanitized(source));
    for (const child of element.children) child.setAttribute("dir", "auto");
    if (done) void renderMath(element);
  }, [source, done]);
  return <div class="block" ref={target} />;
}
