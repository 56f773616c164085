"""`make bench-guard`: how many instructions a token takes on its way through Hermes, against the figure on record.

Instructions are counted, not timed, so a busy machine does not matter: callgrind runs the way of a token with 1,000
chunks and with none, and the difference is what the chunks cost. `--update` puts a new figure on record.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parent / "guard.json"
CHUNKS, MORE_MAX = 1_000, 0.10
COUNTED = re.compile(rb"Collected\s*:\s*(\d+)")


async def way(chunks: int) -> int:
    """Every chunk on its own through frame, JSON, provider, assembler, log and bus to the bytes of a chat stream."""
    import msgspec

    from bench.provider import chunk_bytes, frames
    from hermes.agent.assembler import Assembler, TextDelta
    from hermes.bus.memory import MemoryBus
    from hermes.http import SseDecoder
    from hermes.providers.base import WireEvent
    from hermes.providers.registry import provider_for
    from hermes.runs.events import Event
    from hermes.runs.spec import RunSpec
    from hermes.runs.writer import RunWriter
    from hermes.server.render_chat import ChatRenderer
    from hermes.store.bundle import AsyncStore, Store

    frame, provider = frames([chunk_bytes()]), provider_for("chat_completions")
    store, bus = AsyncStore(Store(None)), MemoryBus()
    await store.runs.create(RunSpec("x", session_id="s", run_id="r"))
    renderer, written = ChatRenderer("chatcmpl-r", "bench", 0), 0

    def sink(event: Event) -> bool:
        nonlocal written
        written += len(renderer.feed([event]))
        return True

    reader = asyncio.ensure_future(bus.subscribe("r", sink).take())
    await asyncio.sleep(0)  # from here on the reader waits, and what comes goes to its sink
    # No window: what is joined by the clock is another number of deltas each time.
    writer = RunWriter("r", store.runs, bus, window_s=0.0, clock=lambda: 1_790_000_000.0)
    assembler, decoder = Assembler("r:1"), SseDecoder()
    for _ in range(chunks):
        for name, data in decoder.feed(frame):
            for part in provider.parts(WireEvent(name, msgspec.json.decode(data))):
                for delta in assembler.feed(part):
                    assert isinstance(delta, TextDelta)
                    writer.text("msg", delta.text)
    await writer.close()
    reader.cancel()
    return written


def counting(chunks: int) -> subprocess.Popen[bytes]:
    """The same under callgrind, begun."""
    fixed = [shutil.which("setarch") or "", "-R"] if shutil.which("setarch") else []
    command = [*fixed, "valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-m"]
    env = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    return subprocess.Popen(
        [*command, "bench.guard", "--chunks", str(chunks)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def instructions() -> int:
    """Instructions per chunk."""
    counted = []
    for process in [counting(CHUNKS), counting(0)]:
        said, told = process.communicate(timeout=600)
        found = COUNTED.search(told)
        if process.returncode or found is None:
            raise SystemExit(f"callgrind failed:\n{told.decode(errors='replace')[-2_000:]}")
        assert process.args[-1] == "0" or int(said) > 100 * CHUNKS, "the chunks did not get to the client"  # type: ignore[index]
        counted.append(int(found[1]))
    return round((counted[0] - counted[1]) / CHUNKS)


def main() -> int:
    """0 where the figure holds, 1 where it does not, 2 where it cannot be told."""
    parser = argparse.ArgumentParser(prog="bench.guard")
    parser.add_argument("--update", action="store_true", help="put the figure of now on record")
    parser.add_argument("--chunks", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.chunks is not None:
        print(asyncio.run(way(asked.chunks)))
        return 0
    kept = {} if asked.update else json.loads(FILE.read_text())
    minor = ".".join(platform.python_version_tuple()[:2])
    if shutil.which("valgrind") is None:
        print("Nothing was measured: valgrind is not installed.")
        return 2
    if kept and kept["python"] != minor:
        print(f"Nothing was measured: the figure on record is of Python {kept['python']}, and this is {minor}.")
        return 2
    now = instructions()
    if asked.update:
        FILE.write_text(json.dumps({"instructions_per_chunk": now, "python": minor}, indent=1) + "\n")
        print(f"{now:,} instructions per chunk are on record.")
        return 0
    before = kept["instructions_per_chunk"]
    print(f"{now:,} instructions per chunk; on record are {before:,} ({now / before - 1:+.1%}, at most {MORE_MAX:+.0%}).")
    return int(now > before * (1 + MORE_MAX))


if __name__ == "__main__":
    sys.exit(main())
