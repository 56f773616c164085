"""The client of the local model: starts its worker when first needed and again when it has died."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hermes import local
from hermes.core.home import make_private_folder
from hermes.core.json_types import JsonObject
from hermes.core.limits import LOCAL_CONTEXT_TOKENS_MIN, LOCAL_END_S_MAX, LOCAL_START_S_MAX
from hermes.core.unix_sockets import reachable
from hermes.http_client.client import HttpClient
from hermes.http_client.exchange import Answer, Timeouts, TransportError
from hermes.http_client.sse import SseDecoder
from hermes.local.prefix_state import PrefixState
from hermes.local.reading import Reading, Repetition
from hermes.local.worker import TAKEN
from hermes.sandbox.piped import piped_process

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.settings.config import Settings

log = logging.getLogger(__name__)
_WORKER = str(Path(__file__).with_name("worker.py"))
_POLL_S = 0.05
_NO_MEMORY = ("allocate", "memory", "bad_alloc")
_REPEATS = "The model began to repeat itself and was stopped."
Tell = Callable[[str, str], None]


class LocalUnavailable(TransportError):
    code = "local_unavailable"


class LocalMemory(TransportError):
    code = "local_memory"


class WorkerDied(TransportError):
    code = "local_unavailable"


class LocalModel:
    """The model of one home. Its worker belongs to this process, or to another one of the same home."""

    def __init__(self, home: Home, settings: Callable[[], Settings]) -> None:
        self._home, self._settings = home, settings
        self._starting = asyncio.Lock()
        self._worker = AsyncExitStack()
        self._process: asyncio.subprocess.Process | None = None
        self._http: HttpClient | None = None
        self._turns: asyncio.Semaphore | None = None
        self._waiting = 0
        self._halved = 0
        self._options: JsonObject = {}
        self._prefix: PrefixState | None = None
        self._error_lines: list[str] = []

    def telling(self, tell: Tell) -> _QueuedClient:
        return _QueuedClient(self, tell)

    def halve(self) -> None:
        self._halved += 1

    async def ready(self, tell: Tell) -> HttpClient:
        async with self._starting:
            options = self._worker_options()
            if options != self._options:
                await self._stop()
                self._options = options
                self._prefix = None
            if self._http is None or not await self._is_healthy():
                await self._start(tell)
            assert self._http is not None
            return self._http

    def _worker_options(self) -> JsonObject:
        settings = self._settings()
        if problem := local.status(self._home, settings)["problem"]:
            raise LocalUnavailable(problem)
        layers, cores = settings.local.gpu_layers, os.cpu_count() or 2
        # At every word the threads wait for each other: one that shares its core with another program stops them all. Such
        # pauses matter less while reading.
        threads = (max(1, cores - 1), cores) if settings.local.threads == "auto" else (settings.local.threads,) * 2
        model = local.model_file(self._home, settings)
        assert model is not None
        options = {
            "path": str(model),
            "states": str(local.state_folder(self._home, model)),
            "context": max(LOCAL_CONTEXT_TOKENS_MIN, local.context(settings) >> self._halved),
            "parallel": settings.local.parallel,
            "threads": threads,
            "gpu_layers": None if layers == "auto" else layers,
            "idle_seconds": int(settings.local.idle_unload_seconds) or -1,
        }
        digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]
        return {**options, "name": f"model-{digest}"}

    async def _is_healthy(self) -> bool:
        assert self._http is not None
        with suppress(TransportError):
            limits = Timeouts(LOCAL_END_S_MAX, LOCAL_END_S_MAX)
            async with self._http.send("GET", "http://local/health", {}, b"", limits) as answer:
                await answer.body()
                return answer.status == 200
        return False

    async def _start(self, tell: Tell) -> None:
        folder = self._home.run_folder
        make_private_folder(folder)
        await self._stop()
        self._prefix = PrefixState(self._options)
        path = self._worker.enter_context(reachable(folder / f"{self._options['name']}.sock"))
        self._http = HttpClient(unix=path)
        self._worker.push_async_callback(self._http.close)
        if await self._is_healthy():  # another process of this home has it
            return
        tell("model_loading", f"Loading the local model {Path(self._options['path']).stem}.")
        env = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        self._error_lines = []
        argv = [sys.executable, "-I", _WORKER, json.dumps(self._options)]
        self._process = await self._worker.enter_async_context(
            piped_process(argv, env, self._error_lines.append, cwd=folder, line_bytes_max=65_536, end_s=LOCAL_END_S_MAX)
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(LOCAL_START_S_MAX):
                if await self._process.stdout.readline():
                    return
                await self._process.wait()
                while self._process.returncode == TAKEN and not await self._is_healthy():  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise LocalUnavailable(f"The local model was not loaded within {LOCAL_START_S_MAX:g} s.") from None
        if self._process.returncode != TAKEN:
            raise self._failure()

    def _failure(self) -> TransportError:
        message = " ".join(self._error_lines)[-500:]
        code = self._process.returncode if self._process else None
        log.warning("the local model's worker ended with %s: %s", code, message)
        if code == 137 or any(word in message.lower() for word in _NO_MEMORY):
            return LocalMemory("The local model does not fit into memory.")
        return LocalUnavailable(f"The local model could not be loaded from {self._options['path']}.")

    async def read_prefix(self, http: HttpClient, messages: list[JsonObject], tell: Tell) -> None:
        if self._prefix is not None:
            message = "The local model reads how to use its tools; this is done once and kept."
            await self._prefix.prepare(http, messages, lambda: tell("model_reading", message))

    @asynccontextmanager
    async def turn(self, tell: Tell) -> AsyncIterator[None]:
        if self._turns is None:
            self._turns = asyncio.Semaphore(self._settings().local.parallel)
        if self._turns.locked():
            self._waiting += 1
            tell("model_queue", f"The local model is busy; {self._waiting} waiting.")
            try:
                await self._turns.acquire()
            finally:
                self._waiting -= 1
        else:
            await self._turns.acquire()
        try:
            yield
        finally:
            self._turns.release()

    async def died(self) -> bool:
        if self._process is not None and self._process.returncode != TAKEN:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOCAL_END_S_MAX / 5):
                    await self._process.wait()
            return self._process.returncode is not None
        return self._http is None or not await self._is_healthy()

    async def _stop(self) -> None:
        worker, self._worker, self._process, self._http = self._worker, AsyncExitStack(), None, None
        await worker.aclose()

    async def close(self) -> None:
        async with self._starting:
            await self._stop()


class _QueuedClient:
    def __init__(self, model: LocalModel, tell: Tell) -> None:
        self._model, self._tell = model, tell

    @asynccontextmanager
    async def send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeouts: Timeouts
    ) -> AsyncIterator[Answer]:
        async with self._model.turn(self._tell):
            http = await self._model.ready(self._tell)
            try:
                if count := headers.get(local.PREFIX):
                    messages = json.loads(body)["messages"][: int(count)]
                    await self._model.read_prefix(http, messages, self._tell)
                async with http.send(method, url, headers, body, timeouts) as answer:
                    chooses = headers.get(local.CHOOSES, "")
                    yield _RewrittenAnswer(answer, chooses, self._tell) if answer.is_stream else answer
            except TransportError as error:
                if await self._model.died():
                    raise WorkerDied("The local model's worker has died.", answered=error.answered) from error
                raise


class _RewrittenAnswer(Answer):
    """The model's stream with its object read, which ends when the model repeats itself."""

    def __init__(self, answer: Answer, chooses: str, tell: Tell) -> None:
        self._answer, self.status, self.headers = answer, answer.status, answer.headers
        self.is_stream, self.is_json = True, False
        self._tell = tell
        self._frames = SseDecoder()
        self._reading = Reading(f"call_{secrets.token_hex(8)}", continues=chooses == "rest") if chooses else None
        self._repetition = Repetition()
        self._ended = False

    async def read(self) -> bytes:
        """The next rewritten data; empty at the end."""
        while not self._ended and (data := await self._answer.read()):
            if out := b"".join(b"data: " + frame + b"\n\n" for frame in self._rewritten(data)):
                return out
        return b""

    def _rewritten(self, data: bytes) -> list[bytes]:
        out: list[bytes] = []
        for _, frame in self._frames.feed(data):
            chunk = json.loads(frame) if frame != b"[DONE]" else {}
            choice = next(iter(chunk.get("choices") or ()), None)
            if choice is None:
                out.append(frame)
                continue
            text = (choice.get("delta") or {}).get("content") or ""
            if self._repetition.feed(text):
                self._ended = True
                self._tell("model_repeats", _REPEATS)
                end = [{"content": f"\n\n[{_REPEATS}]"}, {}]
                return [*out, *(_frame(chunk, delta, None if delta else "stop") for delta in end), b"[DONE]"]
            if self._reading is None:
                out.append(frame)
                continue
            deltas = list(self._reading.feed(text))
            reason = choice.get("finish_reason")
            if reason:
                deltas += [*self._reading.finish(), {}]
            for delta in deltas:
                ended = None if delta else "tool_calls" if self._reading.called and reason == "stop" else reason
                out.append(_frame(chunk, delta, ended))
        return out


def _frame(chunk: JsonObject, delta: JsonObject, reason: str | None) -> bytes:
    return json.dumps({**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}).encode()
