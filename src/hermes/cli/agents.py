"""Where turns run: in this process, or at a server over its public API. Both give the same run events."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from urllib.parse import quote, urlencode

from hermes.app import App
from hermes.cli.output import NotFound
from hermes.core.errors import HermesError
from hermes.core.events import FINAL
from hermes.core.json_types import JsonObject
from hermes.core.limits import SERVER_BACK_S_MAX, SERVER_HEALTH_S_MAX, SERVER_POLL_S
from hermes.core.result import Result
from hermes.core.spec import Content, Control, ControlKind, RunSpec
from hermes.core.threads import Threads
from hermes.http_client.client import Exchange, HttpClient
from hermes.http_client.exchange import Timeouts, TransportError
from hermes.http_client.sse import SseDecoder
from hermes.runs.engine import LiveRun, Refused
from hermes.server.render_run import ROWS, THOUGHTS, RunRenderer
from hermes.server.sse import run_events
from hermes.server.stored_result import stored_result
from hermes.store.base import RunRecord, SessionBusy, StoreError

_MESSAGES_PER_PAGE = 2_000
# A control: the route that takes it, and the names of its data there.
_ROUTES: dict[ControlKind, tuple[str, dict[str, str]]] = {
    "interrupt": ("stop", {}),
    "steer": ("steer", {"text": "text"}),
    "approve": ("approval", {"id": "approval_id", "choice": "choice", "comment": "comment"}),
    "answer": ("clarify", {"id": "request_id", "answer": "answer"}),
}


class ServerLost(HermesError):
    exit_code = 69


class ServerRefusal(HermesError):
    def __init__(self, status: int, document: JsonObject) -> None:
        error = document.get("error") or {}
        self.status, code = status, str(error.get("code"))
        message = error.get("message") or f"The server answers {status}."
        hint = "export HERMES_API_KEY=…" if status == 401 else ""
        super().__init__(f"The server refuses the key. {message}" if status == 401 else message, hint=hint)
        self.exit_code = {"session_busy": SessionBusy.exit_code, "session_not_found": NotFound.exit_code}.get(code, 1)


class LocalAgent:
    """The agent in this process, and what the home's store holds of runs wherever they ran."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._live: dict[str, LiveRun] = {}
        app.engine.limit(session_wait_s=None, submitted_wait_s=None)

    async def start(self, spec: RunSpec) -> str:
        """Ask for a run; its id. It begins when its session is free."""
        self.app.engine.start_background_tasks(resume=False)
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

    async def events(self, run_id: str) -> AsyncIterator[JsonObject]:
        engine, decoder, live = self.app.engine, SseDecoder(), self._live[run_id]
        renderer = RunRenderer(
            RunRecord(live.spec, live.log.state, 0.0), self.app.secrets.redact, names=False, reasoning=True
        )
        async with contextlib.aclosing(run_events(engine, run_id, ROWS | THOUGHTS)) as batches:
            async for batch in batches:
                for _, data in decoder.feed(renderer.feed(batch)):
                    yield json.loads(data)

    async def log(self, run_id: str) -> AsyncIterator[JsonObject]:
        async with contextlib.aclosing(self.app.engine.batches(run_id)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event.as_dict()

    async def control(self, run_id: str, kind: ControlKind, **data: str) -> bool:
        """Tell a run something. False: it does not concern it any more."""
        control = Control(kind, data, surface="cli", credential="default")
        return await self.app.engine.control(run_id, control) == "applied"

    async def result(self, run_id: str) -> Result:
        live = self._live.pop(run_id, None)
        if live is not None and live.task is not None:
            with contextlib.suppress(Exception):  # a defect of ours, which is on record as the run's end
                return await live.task
        return await stored_result(self.app.store, run_id)


class ServerAgent:
    """The agent of a server. `address` is asked before every request: a server that is started again may listen
    elsewhere; it is empty while there is none."""

    def __init__(self, address: Callable[[], str], key: str) -> None:
        self.address, self._key = address, key
        self._threads = Threads(1)
        self._http = HttpClient(self._threads.submit)

    async def answers(self) -> bool:
        """Whether the server is there and takes the key."""
        try:
            brief = Timeouts(SERVER_HEALTH_S_MAX, SERVER_HEALTH_S_MAX)
            async with self._send("GET", "/v1/models", timeouts=brief) as answer:
                return answer.status == 200
        except (TransportError, OSError):
            return False

    async def call(self, method: str, path: str, body: JsonObject | None = None, **headers: str) -> JsonObject:
        """The document that the server answers; its errors are raised."""
        try:
            async with self._send(method, path, body, headers) as answer:
                document = _document(await answer.body())
        except (TransportError, OSError) as error:
            message = f"The server at {self.address()} does not answer: {str(error).rstrip('.')}."
            raise ServerLost(message, hint="hermes gateway status") from error
        if answer.status >= 400:
            raise ServerRefusal(answer.status, document)
        return document

    async def messages(self, path: str, body: JsonObject, headers: dict[str, str]) -> AsyncIterator[JsonObject]:
        """The messages of JSON-RPC that the server answers one with: none, one, or those of a stream."""
        sent = {"Accept": "application/json, text/event-stream", **headers}
        try:
            async with self._send("POST", path, body, sent) as answer:
                if not answer.headers.get("Content-Type", "").startswith("text/event-stream"):
                    document = _document(await answer.body())
                    if "jsonrpc" in document:
                        yield document
                    elif answer.status >= 400:
                        raise ServerRefusal(answer.status, document)
                    return
                decoder = SseDecoder()
                while chunk := await answer.read():
                    for _, data in decoder.feed(chunk):
                        yield json.loads(data)
        except (TransportError, OSError) as error:
            raise ServerLost("The server does not answer.", hint="hermes gateway status") from error

    async def start(self, spec: RunSpec) -> str:
        headers = {"X-Hermes-Approvals": "wait" if spec.answerable else "deny"}
        headers |= {"X-Hermes-Timeout": str(spec.deadline_seconds)} if spec.deadline_seconds else {}
        return str((await self.call("POST", "/v1/runs", _body(spec), **headers))["run_id"])

    async def events(self, run_id: str) -> AsyncIterator[JsonObject]:
        """Over as many connections as it takes: a server that goes is waited for."""
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

    async def _stream(self, run_id: str, last: int) -> AsyncGenerator[JsonObject, None]:
        decoder, headers = SseDecoder(), {"Last-Event-ID": str(last), "X-Hermes-Reasoning": "true"}
        async with self._send("GET", f"/v1/runs/{run_id}/events", headers=headers) as answer:
            if answer.status != 200:
                raise ServerRefusal(answer.status, _document(await answer.body()))
            while chunk := await answer.read():
                for _, data in decoder.feed(chunk):
                    yield json.loads(data)

    async def _come_back(self, run_id: str) -> None:
        until = time.monotonic() + SERVER_BACK_S_MAX
        while not await self.answers():
            if time.monotonic() > until:
                message = f"The server has not come back within {SERVER_BACK_S_MAX:g} s; it continues the turn then."
                raise ServerLost(message, hint=f"hermes gateway run, then hermes runs show {run_id}")
            await asyncio.sleep(SERVER_POLL_S)

    async def control(self, run_id: str, kind: ControlKind, **data: str) -> bool:
        path, names = _ROUTES[kind]
        body = {names[name]: value for name, value in data.items() if name in names}
        try:
            await self.call("POST", f"/v1/runs/{run_id}/{path}", body)
        except ServerRefusal as refusal:
            if refusal.status != 409:
                raise
            return False
        return True

    async def result(self, run_id: str) -> Result:
        """What the API tells of a run that has ended."""
        run = await self.call("GET", f"/v1/runs/{run_id}")
        usage = run["usage"] or {}
        inputs, outputs = usage.get("input_tokens_details") or {}, usage.get("output_tokens_details") or {}
        return {
            "final_response": run["output"] or "",
            "last_reasoning": None,
            "messages": [],
            "api_calls": 0,
            "completed": run["completed"],
            "partial": run["partial"],
            "failed": run["status"] == "failed" and not run["partial"],
            "interrupted": run["interrupted"],
            "error": run["error"],
            "error_code": run["error_code"],
            "failure": None,
            "retry_after_s": None,
            "run_id": run_id,
            "session_id": run["session_id"],
            "model": run["model"],
            "provider": "",
            "pending_calls": [],
            "pending_steer": None,
            "ignored_options": [],
            "warnings": [],
            "input_tokens": usage.get("input_tokens") or 0,
            "output_tokens": usage.get("output_tokens") or 0,
            "total_tokens": usage.get("total_tokens") or 0,
            "usage_details": {
                "cache_read_tokens": inputs.get("cached_tokens"),
                "cache_write_tokens": inputs.get("cache_write_tokens"),
                "reasoning_tokens": outputs.get("reasoning_tokens"),
                "cost_usd": None,
            },
        }

    def _send(
        self,
        method: str,
        path: str,
        body: JsonObject | None = None,
        headers: dict[str, str] | None = None,
        timeouts: Timeouts | None = None,
    ) -> Exchange:
        if not (address := self.address()):
            raise ConnectionError("There is no server.")
        own = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = b"" if body is None else json.dumps(body).encode()
        return self._http.send(method, address + path, own | (headers or {}), data, timeouts or Timeouts(1e9, 120))

    async def close(self) -> None:
        await self._http.close()
        self._threads.close()


class RemoteSessions:
    """The sessions of a server that has a home of its own: those methods of the session store that a chat uses."""

    def __init__(self, server: ServerAgent) -> None:
        self._server = server

    async def get_session(self, session_id: str) -> JsonObject | None:
        try:
            session: JsonObject = (await self._server.call("GET", _path(session_id)))["session"]
        except ServerRefusal as refusal:
            if refusal.status != 404:
                raise
            return None
        return session

    async def list_sessions(self, search: str = "") -> list[JsonObject]:
        """The latest, with a part of their title or id."""
        page: list[JsonObject] = (await self._server.call("GET", "/api/sessions?limit=200"))["data"]
        wanted = search.casefold()
        return [one for one in page if wanted in f"{one['id']} {one['title'] or ''} {one['preview'] or ''}".casefold()]

    async def create_session(self, session_id: str, source: str, *, title: str | None = None, **_: object) -> None:
        body = {"id": session_id} | ({"title": title} if title else {})
        try:
            await self._change("POST", "/api/sessions", body)
        except ServerRefusal as refusal:
            if refusal.status != 409:  # it is there already
                raise

    async def set_session_title(self, session_id: str, title: str) -> None:
        await self._change("PATCH", _path(session_id), {"title": title})

    async def update_session(self, session_id: str, *, model: str) -> None:
        await self._change("PATCH", _path(session_id), {"model": model})

    async def end_session(self, session_id: str, reason: str) -> None:
        await self._change("PATCH", _path(session_id), {"end_reason": reason})

    async def delete_session(self, session_id: str, force: bool) -> None:
        await self._change("DELETE", _path(session_id))

    async def fork_session(self, session_id: str, *, title: str | None = None, at: int | None = None) -> str:
        body = {"title": title, "at_message_id": at}
        given = {name: value for name, value in body.items() if value is not None}
        return str((await self._change("POST", _path(session_id, "fork"), given))["session"]["id"])

    async def get_messages(self, session_id: str) -> list[JsonObject]:
        messages: list[JsonObject] = []
        query: JsonObject = {"limit": _MESSAGES_PER_PAGE, "order": "asc"}
        while True:
            page = await self._server.call("GET", f"{_path(session_id, 'messages')}?{urlencode(query)}")
            messages += page["data"]
            if not page["has_more"]:
                return messages
            query["after"] = page["last_id"]

    async def get_usage(self, session_id: str) -> list[JsonObject]:
        session = await self.get_session(session_id)
        return [{**session, "provider": "", "task": "", "calls": session["api_call_count"]}] if session else []

    async def _change(self, method: str, path: str, body: JsonObject | None = None) -> JsonObject:
        try:
            return await self._server.call(method, path, body)
        except ServerRefusal as refusal:
            if refusal.status == 400:  # as the store refuses a title
                raise ValueError(refusal.message) from refusal
            raise


def _path(session_id: str, *more: str) -> str:
    return "/".join(["/api/sessions", quote(session_id, safe=""), *more])


def _body(spec: RunSpec) -> JsonObject:
    body = {
        "input": [{"role": "user", "content": _content(spec.user_message)}],
        "session_id": spec.session_id,
        "instructions": spec.instructions,
        "workdir": spec.workdir,
        "toolsets": None if spec.toolsets is None else sorted(spec.toolsets),
        "max_iterations": spec.max_iterations,
        "reasoning_effort": (spec.reasoning or {}).get("effort"),
        "model": spec.route.model if spec.route else None,
        "provider": spec.route.provider if spec.route else None,
    }
    return {name: value for name, value in body.items() if value is not None}


def _content(content: Content) -> str | list[JsonObject]:
    if isinstance(content, str):
        return content
    return [_input_file(part["file"]) if part["type"] == "file" else part for part in content]


def _input_file(file: JsonObject) -> JsonObject:
    data = base64.b64encode(file["data"]).decode()
    return {"type": "input_file", "filename": file["name"], "file_data": f"data:{file['media_type']};base64,{data}"}


def _document(body: bytes) -> JsonObject:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
