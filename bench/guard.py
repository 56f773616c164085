"""`make bench-guard`: how many instructions a token takes on its way through Hermes, against the figures on record.

Instructions are counted, not timed, so a busy machine does not matter: callgrind runs the way of a token with 1,000
chunks and with none, and the difference is what the chunks cost. It is run for each of the streams below. `--update` puts
new figures on record.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.provider import chunk_bytes, end_bytes, frames
from hermes.agent.assembler import Assembler, Delta, TextDelta
from hermes.agent.call import Caller
from hermes.bus.memory import MemoryBus
from hermes.core.events import Event
from hermes.core.spec import RunSpec
from hermes.http_client.exchange import Timeouts
from hermes.providers.base import WireRequest
from hermes.providers.registry import provider_for
from hermes.runs.commits import LogOutput
from hermes.runs.control import Stop
from hermes.runs.writer import RunWriter
from hermes.server.render_chat import ChatRenderer
from hermes.server.render_messages import MessagesRenderer
from hermes.store.stores import AsyncStore, Store

FILE = Path(__file__).parent / "guard.json"
CHUNKS, MORE_MAX = 1_000, 0.10
COUNTED = re.compile(rb"Collected\s*:\s*(\d+)")
STREAMS: dict[str, Callable[[], Any]] = {
    "chat": lambda: ChatRenderer("chatcmpl-r", "bench", 0),
    "messages": lambda: MessagesRenderer("msg_r", "bench", thinking=False),
}


class Replayed:
    """An answer of the model that is already here: so many chunks, one at a time, each to the sink first, and its end."""

    status, headers, is_stream, is_json = 200, {}, True, False  # type: ignore[var-annotated]
    sink: Callable[[bytes], bool] | None = None

    def __init__(self, chunks: int) -> None:
        self._packets = itertools.chain(itertools.repeat(frames([chunk_bytes()]), chunks), [end_bytes(chunks)])

    @contextlib.asynccontextmanager
    async def send(self, *_: object) -> AsyncIterator[Any]:
        yield self

    async def read(self) -> bytes:
        for packet in self._packets:
            if self.sink is None or not self.sink(packet):
                return packet
        return b""


async def way(stream: str, chunks: int) -> int:
    """Every chunk on its own from the model's bytes by way of the log and the bus to the bytes of a stream."""
    store, bus = AsyncStore(Store(None)), MemoryBus()
    await store.runs.create(RunSpec("x", session_id="s", run_id="r"))
    renderer, written = STREAMS[stream](), 0

    def sink(event: Event) -> bool:
        nonlocal written
        written += len(renderer.feed([event]))
        return True

    reader = asyncio.ensure_future(bus.subscribe("r", sink).take())
    await asyncio.sleep(0)  # from here on the reader waits, and what comes goes to its sink
    # No window: what the clock joins is another number of deltas each time.
    writer = RunWriter("r", store.runs, LogOutput(bus, window_s=0.0, clock=lambda: 1_790_000_000.0))

    def deliver(delta: Delta) -> None:
        assert isinstance(delta, TextDelta)
        writer.text("msg", delta.text)

    caller = Caller(Stop(), deliver, lambda _: None, joins=True, at_once=lambda _: True)
    asked = provider_for("chat_completions"), WireRequest("POST", "http://model", {}, {}), Timeouts(), Assembler("r:1")
    ended = await caller.ask(Replayed(chunks), *asked, streaming=True)
    assert ended.facts is None, ended.facts
    await writer.close()
    reader.cancel()
    return written


def instructions(stream: str, chunks: int) -> int:
    """How many the same takes, from the start of Python to its end."""
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    command = [*fixed, "valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable]
    env = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [*command, "-m", "bench.guard", stream, str(chunks)], env=env, capture_output=True, check=False
    )
    match = COUNTED.search(done.stderr)
    if done.returncode or match is None:
        raise SystemExit(f"callgrind failed:\n{done.stderr.decode(errors='replace')[-2_000:]}")
    assert int(done.stdout) >= 100 * chunks, "the chunks did not get to the client"
    return int(match[1])


def main(*asked: str) -> int:
    """0 where the figures hold, 1 where one does not, 2 where it cannot be told."""
    if len(asked) == 2:
        print(asyncio.run(way(asked[0], int(asked[1]))))
        return 0
    updates = asked == ("--update",)
    minor, recorded = ".".join(platform.python_version_tuple()[:2]), json.loads(FILE.read_text())
    if shutil.which("valgrind") is None:
        print("Nothing was measured: valgrind is not installed.")
        return 2
    if not updates and recorded["python"] != minor:
        print(f"Nothing was measured: the figures on record are of Python {recorded['python']}, and this is {minor}.")
        return 2
    figures, failed = {}, False
    for stream in STREAMS:
        with ThreadPoolExecutor() as both:
            many, none = both.map(instructions, (stream, stream), (CHUNKS, 0))
        now, before = round((many - none) / CHUNKS), recorded["instructions_per_chunk"].get(stream)
        figures[stream] = now
        if before is None:
            print(f"{stream}: {now:,} instructions per chunk; none on record")
            continue
        change = f"{now / before - 1:+.1%}, at most {MORE_MAX:+.0%}"
        print(f"{stream}: {now:,} instructions per chunk; on record {before:,} ({change})")
        failed |= now > before * (1 + MORE_MAX)
    if updates:
        FILE.write_text(json.dumps({"instructions_per_chunk": figures, "python": minor}, indent=1) + "\n")
    return int(failed and not updates)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
