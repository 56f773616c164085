"""The agent's side of the Agent Client Protocol: its methods, and the sessions that an editor has open."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from acp import PROTOCOL_VERSION, RequestError
from acp.connection import Connection
from acp.schema import (
    AuthenticateRequest,
    CancelNotification,
    CloseSessionRequest,
    InitializeRequest,
    ListSessionsRequest,
    LoadSessionRequest,
    NewSessionRequest,
    PromptRequest,
    ResumeSessionRequest,
    SetSessionConfigOptionSelectRequest,
    SetSessionModeRequest,
)
from pydantic import BaseModel, ValidationError

import hermes
from hermes.cli.acp.client_servers import servers_of
from hermes.cli.acp.content import invalid
from hermes.cli.acp.session import AUTH_REQUIRED, EditorSession
from hermes.cli.acp.wire import INTERNAL_ERROR, Wire, protocol_pipes
from hermes.cli.acp_command import SETUP
from hermes.cli.conversation import Backend, note, opened
from hermes.cli.output import NoModel, NotFound, UsageError
from hermes.core.errors import ConfigError, HermesError
from hermes.core.formatting import one_line
from hermes.core.home import Home
from hermes.core.json_types import JsonObject
from hermes.core.limits import ACP_SESSIONS_PER_PAGE

log = logging.getLogger(__name__)
Method = Callable[["Agent", Any], Awaitable[JsonObject | None]]
INVALID_PARAMS, METHOD_NOT_FOUND, NOT_FOUND = -32602, -32601, -32002
_CODES: tuple[tuple[type[HermesError], int], ...] = (
    (NoModel, AUTH_REQUIRED),
    (ConfigError, AUTH_REQUIRED),
    (NotFound, NOT_FOUND),
    (UsageError, INVALID_PARAMS),
)
_METHOD = "setup"


async def serve(args: argparse.Namespace, home: Home) -> int:
    """Serve one editor until it closes our input, or the process is told to end."""
    with protocol_pipes() as pipes:
        async with opened(args, home, joins=False) as backend:
            wire = await Wire.over(*pipes)
            agent = Agent(backend, wire)
            loop, ending = asyncio.get_running_loop(), asyncio.ensure_future(agent.connection.main_loop())
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, ending.cancel)
            try:
                with suppress(asyncio.CancelledError):
                    await ending
            finally:
                await agent.close()
    return 0


class Agent:
    def __init__(self, backend: Backend, wire: Wire) -> None:
        self._backend, self._wire = backend, wire
        self.connection = Connection(self._handle, wire, listening=False)
        self._client: JsonObject = {}
        self._sessions: dict[str, EditorSession] = {}
        self._printing = asyncio.Lock()

    async def close(self) -> None:
        """End every turn, and the connection."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()), return_exceptions=True)
        await self.connection.close()

    async def _handle(self, method: str, params: Any, is_notification: bool) -> JsonObject | None:
        try:
            return await self._answer(method, params)
        except RequestError as error:
            if not is_notification:
                raise
            log.debug("the notification %s: %s", method, error)  # nobody waits for an answer
            return None

    async def _answer(self, method: str, params: Any) -> JsonObject | None:
        """The answer to a request. Every exception that leaves it is an error of the protocol."""
        if (known := _METHODS.get(method)) is None:
            raise RequestError(METHOD_NOT_FOUND, f"Method not found: {method}", {"method": method})
        model, work = known
        try:
            return await work(self, model.model_validate(params if params is not None else {}))
        except ValidationError as error:
            raise _invalid_params(error) from None
        except HermesError as error:
            code = next((code for kind, code in _CODES if isinstance(error, kind)), INTERNAL_ERROR)
            raise RequestError(code, str(error)) from None
        except RequestError:
            raise
        except Exception as error:  # noqa: BLE001  (a defect of ours ends one request, not the connection)
            log.error("%s", self._backend.app.secrets.redact(traceback.format_exc()))
            message = f"This is a defect of Hermes: {type(error).__name__}. See: hermes logs errors"
            raise RequestError(INTERNAL_ERROR, message) from None

    # --- beginning -----------------------------------------------------------------------------------------------------

    async def _initialize(self, request: InitializeRequest) -> JsonObject:
        # In place of capabilities that it cannot read the SDK has plain defaults, which are no models.
        sent = request.model_dump(by_alias=True, exclude_none=True, warnings=False)
        self._client = sent.get("clientCapabilities") or {}
        return {
            "protocolVersion": PROTOCOL_VERSION,
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {"image": True, "audio": False, "embeddedContext": True},
                "mcpCapabilities": {"http": not self._backend.remote, "sse": False},
                "sessionCapabilities": {"list": {}, "resume": {}, "close": {}},
            },
            "agentInfo": {"name": "hermes", "title": "Hermes", "version": hermes.__version__},
            "authMethods": [self._setup_method()],
        }

    def _setup_method(self) -> JsonObject:
        """There is nobody to sign in: what may be missing is a model. An editor with terminals runs the setup itself."""
        method = {"id": _METHOD, "name": "Choose a model", "description": "Run `hermes setup` in a terminal."}
        has_terminal = (self._client.get("auth") or {}).get("terminal")
        return {**method, "type": "terminal", "args": [SETUP]} if has_terminal else method

    async def _authenticate(self, request: AuthenticateRequest) -> JsonObject:
        if request.method_id != _METHOD:
            raise invalid("methodId", f"is {request.method_id!r}, and not {_METHOD!r}")
        self._backend.require_model()
        return {}

    # --- sessions ------------------------------------------------------------------------------------------------------

    async def _new(self, request: NewSessionRequest) -> JsonObject:
        session = self._open(request)
        return {"sessionId": session.talk.session_id, **await self._state(session)}

    async def _load(self, request: LoadSessionRequest) -> JsonObject:
        session = await self._reopen(request)
        await session.replay()
        return await self._state(session)

    async def _resume(self, request: ResumeSessionRequest) -> JsonObject:
        return await self._state(await self._reopen(request))

    async def _reopen(self, request: LoadSessionRequest | ResumeSessionRequest) -> EditorSession:
        talk = self._backend.conversation()
        stored = await talk.sessions.get_session(request.session_id) if talk.saved else None
        if stored is None or stored.get("source") in ("subagent",):
            raise NotFound(f"There is no session '{one_line(request.session_id)}'.")
        await talk.adopt(stored)
        if (before := self._sessions.pop(request.session_id, None)) is not None:
            await before.close()
        return self._open(request, request.session_id)

    def _open(
        self, request: NewSessionRequest | LoadSessionRequest | ResumeSessionRequest, session_id: str = ""
    ) -> EditorSession:
        self._backend.require_model()
        cwd, app = request.cwd, self._backend.app
        if not os.path.isabs(cwd) or not (self._backend.remote or os.path.isdir(cwd)):
            raise invalid("cwd", "is no absolute path of a folder")
        servers = servers_of(request.mcp_servers, app.settings)
        if servers and self._backend.remote:
            note("A server that is not of this home does not use MCP servers of the editor.")
        talk = self._backend.conversation()
        talk.folder, talk.session_id = cwd, session_id or talk.session_id
        if not self._backend.remote:
            app.services.mcp.bring(talk.session_id, servers, app.settings)
        session = EditorSession(talk, self._wire, self.connection, self._client)
        session.chat.printing = self._printing
        self._sessions[talk.session_id] = session
        return session

    async def _state(self, session: EditorSession) -> JsonObject:
        """The options of a session; its commands are sent behind the answer that names the session."""
        state: JsonObject = {"configOptions": await session.config_options()}
        if (modes := session.modes()) is not None:
            state["modes"] = modes
        asyncio.get_running_loop().call_soon(session.tell_commands)
        return state

    async def _list(self, request: ListSessionsRequest) -> JsonObject:
        talk = self._backend.conversation()
        if not talk.saved:
            return {"sessions": []}
        if talk.remote:
            page = await talk.sessions.list_sessions()
        else:
            filters = {"cwd_prefix": request.cwd} if request.cwd else {}
            try:
                page = await talk.sessions.list_sessions(
                    owner="default", limit=ACP_SESSIONS_PER_PAGE, cursor=request.cursor, **filters
                )
            except ValueError as error:
                raise invalid("cursor", f"cannot be used: {error}") from None
        listed = [self._described(one) for one in page if not request.cwd or one.get("cwd") in (request.cwd, None)]
        more = not talk.remote and len(page) == ACP_SESSIONS_PER_PAGE
        return {"sessions": listed} | ({"nextCursor": page[-1]["cursor"]} if more else {})

    def _described(self, session: JsonObject) -> JsonObject:
        """A session of another client has no folder: it works in that of the home."""
        updated = datetime.fromtimestamp(float(session["last_active"]), UTC).isoformat(timespec="seconds")
        entry = {"sessionId": session["id"], "cwd": session.get("cwd") or str(self._backend.app.home.workspace)}
        title = session.get("title") or session.get("preview")
        return {**entry, "updatedAt": updated} | ({"title": one_line(title)} if title else {})

    def _session(self, session_id: str) -> EditorSession:
        if (session := self._sessions.get(session_id)) is None:
            raise invalid("sessionId", f"is {one_line(session_id)!r}, which is not open here")
        return session

    async def _set_mode(self, request: SetSessionModeRequest) -> JsonObject:
        session = self._session(request.session_id)
        session.set_mode(request.mode_id)
        session.send({"sessionUpdate": "config_option_update", "configOptions": await session.config_options()})
        return {}

    async def _set_option(self, request: SetSessionConfigOptionSelectRequest) -> JsonObject:
        session = self._session(request.session_id)
        await session.set_option(request.config_id, request.value)
        if request.config_id == "mode":
            session.send({"sessionUpdate": "current_mode_update", "currentModeId": session.mode})
        return {"configOptions": await session.config_options()}

    async def _prompt(self, request: PromptRequest) -> JsonObject:
        return await self._session(request.session_id).prompt(request.prompt)

    async def _cancel(self, request: CancelNotification) -> None:
        await self._session(request.session_id).cancel()

    async def _close(self, request: CloseSessionRequest) -> JsonObject:
        session = self._session(request.session_id)
        await session.cancel()
        await session.close()
        self._sessions.pop(request.session_id, None)
        return {}


def _invalid_params(error: ValidationError) -> RequestError:
    """Names each field; nothing of what was sent is repeated."""
    faults = [
        {"field": ".".join(map(str, fault["loc"])), "message": fault["msg"]}
        for fault in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    shown = "; ".join(f"{fault['field'] or 'params'}: {fault['message']}" for fault in faults[:5])
    return RequestError(INVALID_PARAMS, f"Invalid params: {shown}", {"errors": faults})


_METHODS: dict[str, tuple[type[BaseModel], Method]] = {
    "initialize": (InitializeRequest, Agent._initialize),
    "authenticate": (AuthenticateRequest, Agent._authenticate),
    "session/new": (NewSessionRequest, Agent._new),
    "session/load": (LoadSessionRequest, Agent._load),
    "session/resume": (ResumeSessionRequest, Agent._resume),
    "session/list": (ListSessionsRequest, Agent._list),
    "session/close": (CloseSessionRequest, Agent._close),
    "session/set_mode": (SetSessionModeRequest, Agent._set_mode),
    "session/set_config_option": (SetSessionConfigOptionSelectRequest, Agent._set_option),
    "session/prompt": (PromptRequest, Agent._prompt),
    "session/cancel": (CancelNotification, Agent._cancel),
}
