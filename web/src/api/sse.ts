/** Server-sent events of a response, as many at a time as have arrived; comments count as an empty batch. */
export async function* batches(response: Response): AsyncGenerator<string[]> {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const frames = rest.split("\n\n");
      rest = frames.pop() ?? "";
      yield frames.map(data).filter((text) => text !== "");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function data(frame: string): string {
  return frame
    .split("\n")
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).trimStart())
    .join("\n");
}
