"""What a tool step costs: the model asks for one file, its content goes back, and the model goes on."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from bench.provider import CHUNK, Answering, frames, stream_bytes
from bench.results import keep
from hermes import config
from hermes.app import App, new_loop
from hermes.home import Home
from hermes.http import HttpClient, Timeouts
from hermes.runs.spec import RouteChoice, RunSpec

STEPS, TURNS = 20, 10
LIMIT_MS = 5.0


class Reading(Answering):
    """Asks for a file until the conversation holds as many results as the model it plays says, then answers."""

    def answer(self, body: bytes) -> bytes:
        done = body.count(b'"role":"tool"')
        wanted = STEPS if b'"bench-tools"' in body else 0
        return super().answer(body) if done >= wanted else self.headed(_call(done))


def _call(step: int) -> bytes:
    arguments = json.dumps({"path": "notes.txt", "offset": step + 1})
    call = {"index": 0, "id": f"call_{step}", "type": "function"}
    call["function"] = {"name": "read_file", "arguments": arguments}
    begun = {**CHUNK, "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}
    ended = {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    return frames(json.dumps(chunk).encode() for chunk in (begun, ended))


async def measure(folder: Path) -> dict[str, float]:
    """Seconds that a step adds: with the durable store, the default sandbox, and all tools offered."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Reading(stream_bytes(1)), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    home = Home(folder)
    app = App(home, config.load(home))
    (home.path / "workspace").mkdir(parents=True)
    (home.path / "workspace/notes.txt").write_text("".join(f"line {n} of the notes\n" for n in range(60)))

    async def turn(model: str) -> float:
        route = RouteChoice(model=model, base_url=url, api_mode="chat_completions")
        spec = RunSpec("read it", session_id=f"s{time.monotonic_ns()}", route=route)
        began = time.perf_counter()
        result = await app.engine.run(spec)
        assert not result["failed"], result["error"]
        return time.perf_counter() - began

    async def bare(client: HttpClient, body: bytes) -> float:
        began = time.perf_counter()
        async with client.send("POST", f"{url}/chat/completions", {}, body, Timeouts()) as answer:
            await answer.body()
        return time.perf_counter() - began

    client = HttpClient(app.services.files.submit)
    body = json.dumps({"model": "bench", "messages": [{"role": "user", "content": "x" * 40_000}]}).encode()
    await turn("bench-tools")
    with_tools = [await turn("bench-tools") for _ in range(TURNS)]
    without = [await turn("bench") for _ in range(TURNS)]
    asking = [await bare(client, body) for _ in range(TURNS)]
    await client.close()
    await app.close()
    server.close()
    step = (statistics.median(with_tools) - statistics.median(without)) / STEPS
    return {"tool_step": step, "tool_step_model": statistics.median(asking)}


def run() -> None:
    """Measure, print and keep."""
    with tempfile.TemporaryDirectory() as folder:
        loop = new_loop()
        figures = loop.run_until_complete(measure(Path(folder)))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    added = (figures["tool_step"] - figures["tool_step_model"]) * 1e3
    print(f"{'a step with one read_file call, added':44}{added:8.2f} ms   (at most {LIMIT_MS:g})")
    keep({**figures, "tool_step_added": added / 1e3})
