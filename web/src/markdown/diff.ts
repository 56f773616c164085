export interface DiffLine {
  kind: "add" | "remove" | "same" | "hunk" | "file";
  text: string;
}

/** The last newline ends a line; it does not begin another. */
const linesOf = (text: string): string[] => text.replace(/\n$/, "").split("\n");

/** The lines of a unified diff by what they say. */
export function diffLines(diff: string): DiffLine[] {
  return linesOf(diff).map((line): DiffLine => {
    if (line.startsWith("+++") || line.startsWith("---")) return { kind: "file", text: line };
    if (line.startsWith("@@")) return { kind: "hunk", text: line };
    if (line.startsWith("+")) return { kind: "add", text: line };
    if (line.startsWith("-")) return { kind: "remove", text: line };
    return { kind: "same", text: line };
  });
}

/** The changes that a call of a file tool has made or is about to make; null for other tools. */
export function diffOf(tool: string, args: Record<string, unknown>, result: string | null): DiffLine[] | null {
  if (result?.startsWith("{")) {
    try {
      const told = JSON.parse(result) as { diff?: unknown };
      if (typeof told.diff === "string" && told.diff) return diffLines(told.diff);
    } catch {
      // Cut short: the arguments have to do.
    }
  }
  if (tool === "write_file" && typeof args.content === "string") {
    return linesOf(args.content).map((line) => ({ kind: "add", text: `+${line}` }));
  }
  if (tool === "patch" && typeof args.patch === "string") return diffLines(args.patch);
  if (tool === "patch" && typeof args.old_string === "string" && typeof args.new_string === "string") {
    return [
      ...linesOf(args.old_string).map((line): DiffLine => ({ kind: "remove", text: `-${line}` })),
      ...linesOf(args.new_string).map((line): DiffLine => ({ kind: "add", text: `+${line}` })),
    ];
  }
  return null;
}
