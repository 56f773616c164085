"""Clients of the agent: in this process, or over HTTP to the server of the home. Both give the same run events."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from hermes.app import App
from hermes.cli.output import NotFound
from hermes.core.errors import HermesError
from hermes.core.events import FINAL
from hermes.core.home import Home, is_served
from hermes.core.limits import SERVER_BACK_S_MAX, SERVER_HEALTH_S_MAX, SERVER_POLL_S
from hermes.core.spec import Content, Control, ControlKind, RunSpec
from hermes.core.threads import Threads
from hermes.http_client.client import Exchange, HttpClient
from hermes.http_client.exchange import Timeouts, TransportError
from hermes.http_client.sse import SseDecoder
from hermes.runs.engine import LiveRun, Refused, Result
from hermes.server import status
from hermes.server.render_run import ROWS, THOUGHTS, RunRenderer
from hermes.server.sse import run_events
from hermes.server.stored_result import stored_result
from hermes.store.base import RunRecord, SessionBusy, StoreError

Json = dict[str, Any]
_ROWS = ROWS | THOUGHTS
_ANYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  (asked on this machine)
# A control: the route that takes it, and the names of its data there.
_ROUTES: dict[ControlKind, tuple[str, dict[str, str]]] = {
    "interrupt": ("stop", {}),
    "steer": ("steer", {"text": "text"}),
    "approve": ("approval", {"id": "approval_id", "choice": "choice"}),
    "answer": ("clarify", {"id": "request_id", "answer": "answer"}),
}


class ServerLost(HermesError):
    """The server has gone in the middle of a turn, and has not come back."""

    exit_code = 69


class Door:
    """The agent in this process."""

    kind = "here"

    def __init__(self, app: App) -> None:
        self.app = app
        self._live: dict[str, LiveRun] = {}
        app.engine.limit(session_wait_s=None, submitted_wait_s=None)

    async def answers(self) -> bool:
        """Whether it can be asked."""
        return True

    async def start(self, spec: RunSpec) -> str:
        """Ask for a run; its id. It begins when its session is free."""
        try:
            run_id = await self.app.engine.submit(spec)
        except Refused as error:
            if error.code == "session_not_found":
                raise NotFound(str(error), hint="hermes sessions list --all") from error
            kind = StoreError if error.code == "session_db_unavailable" else SessionBusy
            raise kind(str(error)) from error
        live = self.app.engine.live(run_id)
        assert live is not None, "a run that was just asked for"
        self._live[run_id] = live
        return run_id

    async def events(self, run_id: str) -> AsyncIterator[Json]:
        """What the run tells, to its end."""
        engine, decoder, live = self.app.engine, SseDecoder(), self._live[run_id]
        renderer = RunRenderer(
            RunRecord(live.spec, live.log.state, 0.0), self.app.secrets.redact, names=False, reasoning=True
        )
        async with contextlib.aclosing(run_events(engine, run_id, _ROWS)) as batches:
            async for batch in batches:
                for _, data in decoder.feed(renderer.feed(batch)):
                    yield json.loads(data)

    async def control(self, run_id: str, kind: ControlKind, **data: str) -> bool:
        """Tell a run something. False: it does not concern it any more."""
        return (
            await self.app.engine.control(run_id, Control(kind, data, surface="cli", credential="default")) == "applied"
        )

    async def log(self, run_id: str) -> AsyncIterator[Json]:
        """The run's log itself, to its end."""
        async with contextlib.aclosing(self.app.engine.batches(run_id)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event.as_dict()

    async def result(self, run_id: str) -> Result:
        """What a run that has ended came to."""
        live = self._live.pop(run_id, None)
        if live is not None and live.task is not None:
            with contextlib.suppress(Exception):  # a defect of ours, which is on record as the run's end
                return await live.task
        return await stored_result(self.app.store, run_id)

    async def close(self) -> None:
        """Leave nothing running."""
        await self.app.close()


class ServerDoor(Door):
    """The agent in the server of the home. What is stored is read and changed here as there: both have one store."""

    kind = "server"

    def __init__(self, app: App, home: Home) -> None:
        super().__init__(app)
        self._home = home
        self._threads = Threads(1)
        self._http = HttpClient(self._threads.submit)

    async def start(self, spec: RunSpec) -> str:
        try:
            async with self._send("POST", "/v1/runs", _body(spec)) as answer:
                told = _told(await answer.body())
        except (TransportError, OSError) as error:
            raise _lost() from error
        if answer.status != 202:
            raise _refusal(answer.status, told)
        return str(told["run_id"])

    async def events(self, run_id: str) -> AsyncIterator[Json]:
        last, lost = 0, False
        while True:
            with contextlib.suppress(TransportError, OSError):
                async with contextlib.aclosing(self._stream(run_id, last)) as stream:
                    async for event in stream:
                        lost, last = False, event["seq"]
                        yield event
                        if event["event"] in FINAL:
                            return
            if not lost:
                lost = True
                message = "The server has gone. Waiting for it to come back; Ctrl-C ends the waiting."
                yield {"event": "warning", "level": "warn", "code": "server_lost", "message": message}
            await asyncio.sleep(SERVER_POLL_S)
            await self._come_back(run_id)

    async def _stream(self, run_id: str, last: int) -> AsyncGenerator[Json, None]:
        decoder = SseDecoder()
        more = {"Last-Event-ID": str(last), "X-Hermes-Reasoning": "true"}
        async with self._send("GET", f"/v1/runs/{run_id}/events", None, more) as answer:
            if answer.status != 200:
                raise _refusal(answer.status, _told(await answer.body()))
            while chunk := await answer.read():
                for _, data in decoder.feed(chunk):
                    yield json.loads(data)

    async def _come_back(self, run_id: str) -> None:
        """Wait for the server; one that does not come back soon is not waited for."""
        until = time.monotonic() + SERVER_BACK_S_MAX
        while not await self.answers():
            if time.monotonic() > until:
                message = f"The server has not come back within {SERVER_BACK_S_MAX:g} s; it goes on with the turn then."
                raise ServerLost(message, hint=f"hermes gateway run, then hermes runs show {run_id}")
            await asyncio.sleep(SERVER_POLL_S)

    async def answers(self) -> bool:
        if (status.read_runtime_status(self._home) or {}).get("gateway_state") != "running":
            return False
        try:
            async with self._send("GET", "/health", None, timeouts=Timeouts(*(SERVER_HEALTH_S_MAX,) * 2)) as answer:
                return answer.status == 200
        except (TransportError, OSError):
            return False

    async def control(self, run_id: str, kind: ControlKind, **data: str) -> bool:
        path, names = _ROUTES[kind]
        body = {names[name]: value for name, value in data.items() if name in names}
        try:
            async with self._send("POST", f"/v1/runs/{run_id}/{path}", body) as answer:
                return answer.status < 300
        except (TransportError, OSError) as error:
            raise _lost() from error

    def _send(
        self, method: str, path: str, body: Json | None, more: Json | None = None, timeouts: Timeouts | None = None
    ) -> Exchange:
        """One exchange with the server, wherever it listens now."""
        state = status.read_runtime_status(self._home) or {}
        if not state.get("port"):
            raise ConnectionError("There is no server.")
        host = str(state.get("host") or "")
        address = status._address({**state, "host": _ANYWHERE.get(host, host)})
        key = self.app.settings.api_server.key
        headers = {"X-Hermes-Door": self._home.door_file.read_text(), "Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        data = b"" if body is None else json.dumps(body).encode()
        return self._http.send(
            method, address + path, {**headers, **(more or {})}, data, timeouts or Timeouts(1e9, 120)
        )

    async def hang_up(self) -> None:
        """Ask the server no more."""
        await self._http.close()
        self._threads.close()

    async def close(self) -> None:
        await self.hang_up()
        await super().close()


async def open_door(app: App, home: Home, *, here: bool) -> Door:
    """The way through the server where one runs and answers, unless the run must be here."""
    if not here and app.store.blocking.path is not None and is_served(home):
        door = ServerDoor(app, home)
        if await door.answers():
            return door
        await door.hang_up()
    app.engine.start_background_tasks(resume=False)
    return Door(app)


def _body(spec: RunSpec) -> Json:
    """A spec as a request of this user's command line."""
    route, reasoning = spec.route, spec.reasoning or {}
    cli = {
        "model": route.model if route else None,
        "provider": route.provider if route else None,
        "answerable": spec.answerable,
        "yolo": spec.approvals == "off",
        "memory": spec.memory,
        "max_turns": spec.max_iterations,
        "deadline_seconds": spec.deadline_seconds,
    }
    body = {
        "input": [{"role": "user", "content": _sent(spec.user_message)}],
        "session_id": spec.session_id,
        "instructions": spec.instructions,
        "workdir": spec.workdir,
        "toolsets": None if spec.toolsets is None else sorted(spec.toolsets),
        "reasoning_effort": reasoning.get("effort"),
        "cli": cli,
    }
    return {name: value for name, value in body.items() if value is not None}


def _sent(content: Content) -> Any:
    """A message in the form of the API."""
    if isinstance(content, str):
        return content
    return [_sent_file(part["file"]) if part["type"] == "file" else part for part in content]


def _sent_file(file: Json) -> Json:
    data = base64.b64encode(file["data"]).decode()
    return {
        "type": "input_file",
        "filename": file["name"],
        "file_data": f"data:{file['media_type']};base64,{data}",
    }


def _told(body: bytes) -> Json:
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _lost() -> ServerLost:
    return ServerLost("The server does not answer.", hint="hermes gateway status")


def _refusal(answered: int, told: Json) -> HermesError:
    error = told.get("error") or {}
    message = error.get("message") or f"The server answers {answered}."
    if answered == 401:
        return HermesError(f"The server refuses the key of this home. {message}", hint="hermes gateway restart")
    return SessionBusy(message) if error.get("code") == "session_busy" else HermesError(message)
