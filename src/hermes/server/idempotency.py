"""Idempotency: equal requests in flight are merged, and those with the same Idempotency-Key get the same answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from hermes.core.limits import IDEMPOTENCY_KEY_CHARS_MAX
from hermes.core.spec import new_run_id
from hermes.runs.engine import Admission, Refused
from hermes.server.errors import ApiError, invalid
from hermes.server.headers import OPTION_HEADERS, RATE_HEADERS, request_id
from hermes.server.keys import caller_of
from hermes.server.outcome import refusal
from hermes.server.render_run import code_of
from hermes.server.request_bodies import read_object
from hermes.server.sse import ClientGone, EventStream
from hermes.store.base import StoreError

if TYPE_CHECKING:
    from hermes.app import App
    from hermes.server.context import ServerContext
    from hermes.store.idempotency import Claim

log = logging.getLogger(__name__)
Work = Callable[["ServerContext", web.Request], Awaitable[web.StreamResponse]]
_KEY = re.compile(rf"[\x21-\x7e]{{1,{IDEMPOTENCY_KEY_CHARS_MAX}}}")
_REPLAYED = "Idempotency-Replayed"
_POLL_S = 0.05


class _IdempotencyCache:
    """Merges equal requests in flight."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], asyncio.Future[Any]] = {}

    async def get_or_set(self, key: str, fingerprint: str, compute: Callable[[], Awaitable[Any]]) -> Any:
        """The result of the first caller's computation; a cancelled waiter does not cancel it."""
        work = self._under_way.get((key, fingerprint))
        if work is None:
            work = asyncio.ensure_future(compute())
            self._under_way[key, fingerprint] = work
            work.add_done_callback(lambda done: self._forget(key, fingerprint, done))
        return await asyncio.shield(work)

    def _forget(self, key: str, fingerprint: str, done: asyncio.Future[Any]) -> None:
        self._under_way.pop((key, fingerprint), None)
        if not done.cancelled():
            done.exception()  # marks it as retrieved: waiters have it, and without any it is not logged


# --- requests with an Idempotency-Key --------------------------------------------------------------------------------


@dataclass(slots=True)
class Recording:
    """A response as it is made, for everybody who asked the same."""

    fingerprint: str
    run_id: str
    created_at: float = 0.0
    resumed_admission: Admission | None = None
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    frames: list[bytes] = field(default_factory=list)
    streamed: bool = False
    ended: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, status: int, headers: Mapping[str, str], *, streamed: bool) -> None:
        self.status, self.streamed = status, streamed
        self.headers = {name: value for name, value in headers.items() if name.lower() not in _NOT_REPLAYED}
        self.change()

    def change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        await self._changed.wait()

    def packed(self) -> bytes:
        return msgspec.msgpack.encode((self.headers, self.streamed, b"".join(self.frames)))


# The recording of a request with an Idempotency-Key.
RECORDING: web.RequestKey[Recording] = web.RequestKey("recording")


def resumed_admission(request: web.Request) -> Admission | None:
    """The admission of the run that a previous process started under this Idempotency-Key, or None."""
    return recording.resumed_admission if (recording := request.get(RECORDING)) is not None else None


def idempotent_run_id(request: web.Request) -> str:
    return recording.run_id if (recording := request.get(RECORDING)) is not None else new_run_id()


def request_created_at(request: web.Request) -> float:
    """When this was first asked."""
    return recording.created_at if (recording := request.get(RECORDING)) is not None else time.time()


# Headers of one response only.
_NOT_REPLAYED = frozenset(RATE_HEADERS) | {
    *("x-request-id", "request-id", "date", "server", "content-length", "transfer-encoding", "retry-after")
}
_USER = "X-OpenWebUI-User-Id"
_RUN_ID, _COMPLETED = "X-Hermes-Run-Id", "X-Hermes-Completed"


class RecordedStream(EventStream):
    """A stream into a recording."""

    def __init__(self, recording: Recording, request: web.Request, headers: Mapping[str, str]) -> None:
        super().__init__(request, headers, keepalive_s=0, stall_s=0)
        self._recording = recording

    async def __aenter__(self) -> RecordedStream:
        if self._held is None:
            self._recording.begin(200, self.response.headers, streamed=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        """The stream ends with the work."""

    async def release(self) -> None:
        if self._held is not None:
            self._recording.begin(200, self.response.headers, streamed=True)
            data, self._held = b"".join(self._held), None
            await self.write(data)

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Yields to the loop, so that readers can catch up."""
        if self._held is not None:
            self._held.append(data)
            if last:
                await self.release()
            return
        self._recording.frames.append(data)
        self._recording.change()
        await asyncio.sleep(0)


class IdempotentExecutor:
    """Does work once per key and answers repeated requests alike."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._under_way: dict[tuple[str, str], Recording] = {}
        self._claiming: Counter[tuple[str, str]] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def answer(self, request: web.Request, key: str, work: Work) -> web.StreamResponse:
        """The response: made now, in progress, or stored."""
        if not _KEY.fullmatch(key):
            message = f"An idempotency key is 1 to {IDEMPOTENCY_KEY_CHARS_MAX} visible ASCII characters."
            raise invalid("Idempotency-Key", message, "invalid_idempotency_key")
        place = f"{caller_of(request).owner} {request.method} {request.path}", key
        fingerprint = await self._fingerprint(request)
        recording, again = self._under_way.get(place), True
        if recording is None:
            # A disconnect meanwhile must not leave a claim that nobody works on.
            claim = await asyncio.shield(self._spawn(self._claim(request, place, fingerprint, work)))
            if isinstance(claim, web.Response):
                return claim
            recording, again = claim
        if recording.fingerprint != fingerprint:
            raise _conflict()
        return await self._follow(request, recording, again=again)

    async def _claim(
        self, request: web.Request, place: tuple[str, str], fingerprint: str, work: Work
    ) -> tuple[Recording, bool] | web.Response:
        """The stored response, or the recording and whether it was in progress already."""
        app = self._context.app
        ttl = self._context.options.idempotency.ttl_hours * 3600
        run_id = new_run_id()
        claim = await self._claimed_here(app, place, fingerprint, ttl, run_id)
        # Another worker may be about to start it: wait for its run or its answer.
        while (
            claim.state == "running"
            and place not in self._under_way
            and any((await app.engine.peers.ask_all("claimed", *place)).values())
            and await app.engine.get(claim.run_id or "") is None
        ):
            await asyncio.sleep(_POLL_S)
            claim = await self._claimed_here(app, place, fingerprint, ttl, run_id)
        if claim.state == "conflict":
            raise _conflict()
        if claim.state == "done":
            headers, _, text = msgspec.msgpack.decode(claim.body or b"", type=tuple[dict[str, str], bool, bytes])
            return web.Response(status=claim.status or 200, headers=headers | {_REPLAYED: "true"}, body=text)
        cut_off = claim.state == "running" and place not in self._under_way
        earlier = await self._rejoined(claim.run_id or "") if cut_off else None
        recording = self._under_way.get(place)
        if recording is not None:
            return recording, True
        # The first claimant may still start it, unseen: of two, the run id lets one through.
        recording = Recording(fingerprint, claim.run_id or run_id, claim.created_at, earlier)
        self._under_way[place] = recording
        self._begin(request, place, recording, work)
        return recording, earlier is not None

    async def _claimed_here(self, app: App, place: tuple[str, str], fingerprint: str, ttl: float, run_id: str) -> Claim:
        self._claiming[place] += 1
        try:
            claim: Claim = await app.store.idempotency.claim(*place, fingerprint, ttl, run_id)
            return claim
        finally:
            self._claiming[place] -= 1
            if not self._claiming[place]:
                del self._claiming[place]

    async def claimed(self, scope: str, key: str) -> bool:
        """Whether this process works on this, or may be about to."""
        return (scope, key) in self._under_way or (scope, key) in self._claiming

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved

    async def _fingerprint(self, request: web.Request) -> str:
        body = await read_object(self._context, request)
        headers = {name: request.headers.get(name) for name in OPTION_HEADERS}
        if _USER in request.headers:  # only then, so that records of earlier versions stay valid
            headers[_USER] = request.headers[_USER]
        parts = [body, headers, sorted(request.query.items())]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _begin(self, request: web.Request, place: tuple[str, str], recording: Recording, work: Work) -> None:
        """Do the work in its own task, which outlives the client."""

        async def record() -> None:
            request[RECORDING] = recording
            answer = await work(self._context, request)
            if isinstance(answer, web.Response):
                recording.begin(answer.status, answer.headers, streamed=False)
                recording.frames.append(bytes(answer.body or b""))  # type: ignore[arg-type]

        self._spawn(self._to_its_end(request, record(), place, recording))

    async def _to_its_end(
        self, request: web.Request, work: Coroutine[Any, Any, None], place: tuple[str, str], recording: Recording
    ) -> None:
        app = self._context.app
        store = app.store.idempotency
        try:
            await work
            # A request refused before it started may be retried; a refusal may name the run that blocks it.
            started = recording.status < 400 or {_RUN_ID, _COMPLETED} <= recording.headers.keys()
            run = await app.engine.get(recording.run_id)
            if started and (run is None or run.state.status != "interrupted"):  # else the next server answers
                await store.finish(*place, recording.status, recording.packed())
            elif run is None:
                await store.release(*place)
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001  (an internal error: logged, and every waiter gets a 500)
            log.error("%s: %s", request_id(request), self._context.redact(traceback.format_exc()))
            with contextlib.suppress(StoreError):
                if await app.engine.get(recording.run_id) is None:
                    await store.release(*place)
        finally:
            self._under_way.pop(place, None)
            recording.ended = True
            recording.change()

    async def _follow(self, request: web.Request, recording: Recording, *, again: bool) -> web.StreamResponse:
        while not recording.status and not recording.ended:
            await recording.changed()
        extra = {_REPLAYED: "true"} if again else {}
        if not recording.status:
            raise ApiError(500, "The server had an internal error; nothing was kept under this key.", "internal_error")
        if not recording.streamed:
            while not recording.ended:
                await recording.changed()
            return web.Response(
                status=recording.status, headers=recording.headers | extra, body=b"".join(recording.frames)
            )
        stream = self._context.socket_stream(request, recording.headers | extra)
        at = 0
        with contextlib.suppress(ClientGone):
            async with stream:
                while True:
                    if at < len(recording.frames):
                        frames, at = recording.frames[at:], len(recording.frames)
                        await stream.write(b"".join(frames))
                    elif recording.ended:
                        break
                    else:
                        await recording.changed()
        return stream.response

    async def _rejoined(self, run_id: str) -> Admission | None:
        """The run that an earlier server started for this, or None; refused where it ended with the server."""
        app = self._context.app
        try:
            admission = await app.engine.join(run_id)
        except Refused as error:
            raise refusal(error) from None
        record = await app.engine.get(run_id)
        if admission is None or record is None:
            return None
        if code_of(record.state.code) == "server_restarted":
            message = f"The server was restarted while it worked on this; what became of it is in the run {run_id}."
            headers = {_RUN_ID: run_id, _REPLAYED: "true", "x-should-retry": "false"}
            raise ApiError(503, message, "server_restarted", headers=headers)
        return admission


def _conflict() -> ApiError:
    message = "This idempotency key was used for another request."
    return ApiError(409, message, "idempotency_key_conflict", "Idempotency-Key")
