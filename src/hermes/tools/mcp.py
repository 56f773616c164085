"""The MCP servers of a process: connected in the background, reconnected, and their tools offered to turns."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextvars import Context
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from hermes.core import limits
from hermes.core.ids import folder_name
from hermes.core.json_types import JsonObject
from hermes.core.tokens import estimate
from hermes.guards.secrets import Secrets
from hermes.guards.urls import UrlGuard
from hermes.sandbox import bubblewrap
from hermes.sandbox.bubblewrap import Bubblewrap
from hermes.sandbox.choose import child_env, real_path
from hermes.sandbox.mounts import Place
from hermes.sandbox.proxy import EgressProxy
from hermes.sandbox.quota import write_spill
from hermes.settings.check import secrets_inside
from hermes.tools import mcp_names as names
from hermes.tools.framework.registry import Answer, Args, Prepared, ToolContext, ToolDef, ToolError, object_schema
from hermes.tools.vision import data_url

if TYPE_CHECKING:
    from hermes.core.threads import RunBlocking
    from hermes.guards.network import Network
    from hermes.settings.config import Settings
    from hermes.settings.schema import McpServer
    from hermes.tools.mcp_link import Client

log = logging.getLogger(__name__)
State = Literal["connecting", "up", "waiting", "down"]
Notice = tuple[str, str]
PREFIX = "mcp:"
INSTALL = "The MCP client is not installed. Install it with: hermes install mcp"
_ERROR_CHARS_MAX = 300
_NAMED_MAX = 20
_FAILED_HINT = "Change the arguments, or go on without it and tell the user."


async def _any_host(_host: str, _port: int) -> bool:
    """The operator chose the program and so its hosts; the URL guard still applies."""
    return True


def _program_paths(command: str, args: Sequence[str]) -> list[Path]:
    """The folders that a program must see beside the system's: its own, and those that its arguments name."""
    program = shutil.which(os.path.expanduser(command)) or command
    folders = [Path(path).parent.parent for path in (program, os.path.realpath(program)) if os.path.isabs(path)]
    for path in (Path(arg).expanduser() for arg in args if arg.startswith(("/", "~/"))):
        if path.exists():
            alone = path.is_dir() or path.parent in (Path.home(), Path("/"), Path("/tmp"))  # noqa: S108
            folders.append(path if alone else path.parent)
    system = (Path("/"), Path("/usr"), Path("/usr/local"), Path.home())
    return [real_path(path) for path in folders if path not in system]


class Servers:
    """All servers that are configured, and those that single sessions have brought along. They belong to one event loop,
    and are closed with it."""

    def __init__(
        self,
        network: Network,
        secrets: Callable[[], Secrets],
        own_ports: Callable[[], Collection[int]],
        blocking: RunBlocking,
    ) -> None:
        self.network, self.secrets, self.own_ports, self.blocking = network, secrets, own_ports, blocking
        self.tool_names: dict[str, str] = {}
        self._servers: dict[str, Server] = {}
        # By session, and then by toolset: there they take the place of configured ones of the same name.
        self.of_sessions: dict[str, dict[str, Server]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def begin(self, settings: Settings) -> None:
        for name, config in settings.mcp_servers.items():
            if config.enabled and config.connect == "eager":
                self._server(name, settings)

    def _server(self, name: str, settings: Settings) -> Server | None:
        """A server whose configuration has changed is reconnected."""
        config = settings.mcp_servers.get(name)
        if name in self._servers and self._servers[name].config != config:
            self._retire(name)
        if config is None or not config.enabled:
            return None
        if name not in self._servers:
            self._servers[name] = Server(name, config, settings, self)
        return self._servers[name]

    def _retire(self, name: str) -> None:
        self._close(self._servers.pop(name))

    def _close(self, server: Server) -> None:
        task = asyncio.ensure_future(server.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def bring(self, session_id: str, configs: Mapping[str, McpServer], settings: Settings) -> None:
        """Connect servers for the turns of one session, in place of those that it has brought before."""
        self.take_away(session_id)
        if configs:
            self.of_sessions[session_id] = {
                f"{PREFIX}{name}": Server(name, config, settings, self, _digest(config))
                for name, config in configs.items()
            }

    def take_away(self, session_id: str) -> None:
        for server in self.of_sessions.pop(session_id, {}).values():
            self._close(server)

    def secrets_of(self, session_id: str) -> set[str]:
        """What the servers of a session were given that must never be shown."""
        configs = [server.config for server in self.of_sessions.get(session_id, {}).values()]
        return {text for config in configs for text in _secrets_of(config)}

    async def test(self, name: str, settings: Settings) -> JsonObject | None:
        """Connect a server anew, in whatever state it is, and return its new state; None if none has this name."""
        if name in self._servers:
            self._retire(name)
        if (server := self._server(name, settings)) is None:
            return None
        await asyncio.wait([server.tried])
        return next(state for state in self.states() if state["name"] == name)

    def tools_of(self, name: str) -> list[ToolDef]:
        return list(self._servers[name].tools.values())

    def states(self) -> list[JsonObject]:
        return [
            {"name": s.name, "state": s.state, "error": s.error, "tools": sorted(s.tools), "unfit": dict(s.unfit)}
            for s in self._servers.values()
        ]

    async def offered(
        self,
        tools: Mapping[str, ToolDef],
        sets: Collection[str],
        settings: Settings,
        window: int,
        reported: dict[str, str],
        session_id: str = "",
    ) -> tuple[dict[str, ToolDef], list[Notice]]:
        """The tools of a turn with as many of its servers' as fit, and notices for the user.

        A server that is being connected is waited for, until `mcp_discovery_timeout` has passed once. `reported` is what
        the session was told before, and is updated: each change is reported once.
        """
        own = self.of_sessions.get(session_id, {})
        chosen = (
            own.get(name) or self._server(name.removeprefix(PREFIX), settings)
            for name in sorted(sets)
            if name.startswith(PREFIX)
        )
        servers = [server for server in chosen if server is not None]
        if fresh := [server for server in servers if not server.tried.done()]:
            until = max(server.began for server in fresh) + settings.mcp_discovery_timeout
            await asyncio.wait([server.tried for server in fresh], timeout=max(0.0, until - time.monotonic()))
        offered = {tool.name: tool for server in servers for tool in server.tools.values() if tool.name not in tools}
        room = int(window * limits.MCP_WINDOW_SHARE) - sum(map(_size, tools.values()))
        fitting, left_out = names.fit_into_window(((name, _size(offered[name])) for name in sorted(offered)), room)
        offered = {name: offered[name] for name in fitting}
        notices = _new_notices(servers, offered, reported)
        if left_out:
            message = f"Too large for the window, and not offered: {_shorten_list(left_out)}."
            notices.append(("mcp_tools_left_out", message))
        return dict(sorted({**tools, **offered}.items())), notices

    async def close(self) -> None:
        for name in list(self._servers):
            self._retire(name)
        for session_id in list(self.of_sessions):
            self.take_away(session_id)
        if self._closing:
            await asyncio.wait(self._closing)


def _digest(config: McpServer) -> str:
    return hashlib.sha256(json.dumps(msgspec.to_builtins(config)).encode()).hexdigest()[:12]


def _secrets_of(config: McpServer) -> Iterator[str]:
    yield from secrets_inside(dict(config.env))
    yield from secrets_inside(dict(config.headers), is_secret=True)


def _size(tool: ToolDef) -> int:
    return estimate({"n": tool.name, "d": tool.description, "p": tool.parameters})


def _shorten_list(texts: list[str]) -> str:
    more = len(texts) - _NAMED_MAX
    return ", ".join(texts[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _new_notices(servers: list[Server], offered: Mapping[str, ToolDef], reported: dict[str, str]) -> list[Notice]:
    notices: list[Notice] = []
    for server in servers:
        error = server.error if server.state in ("waiting", "down") else ""
        if error and reported.get(f"server {server.name}", "") != error:
            notices.append(("mcp_unavailable", f"The MCP server {server.name!r} is not available: {error}"))
        reported[f"server {server.name}"] = error
        unfit = "; ".join(f"{tool}: {reason}" for tool, reason in server.unfit.items())
        if unfit and reported.get(f"unfit {server.name}") != unfit:
            notices.append(("mcp_tools_unfit", f"Not offered of {server.name!r}: {unfit[:1000]}."))
        reported[f"unfit {server.name}"] = unfit
    schemas = {name: json.dumps([tool.description, tool.parameters]) for name, tool in offered.items()}
    if changed := [name for name in sorted(schemas) if reported.get(name, schemas[name]) != schemas[name]]:
        notices.append(("mcp_tools_changed", f"Their servers have changed these tools: {_shorten_list(changed)}."))
    reported |= schemas
    return notices


class Server:
    def __init__(self, name: str, config: McpServer, settings: Settings, servers: Servers, digest: str = "") -> None:
        """`digest`: of the configuration of a server that is not in the settings. Its folder and what was allowed for good
        are those of this very configuration, not of whatever else has its name."""
        self.name, self.config = name, config
        self._identity = f"{name} {digest}" if digest else name
        self.state: State = "connecting"
        self.error = ""
        self.tools: dict[str, ToolDef] = {}
        self.unfit: dict[str, str] = {}
        self.began = time.monotonic()
        self.tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settings, self._servers = settings, servers
        self._client: Client | None = None
        self._up, self._changed = asyncio.Event(), asyncio.Event()
        self._lost = False
        self._last_note = ""
        self._served = False  # whether this connection has answered a call
        self._calls: set[asyncio.Task[Any]] = set()
        # It serves many turns, and belongs to none.
        self._task = asyncio.create_task(self._keep_up(), context=Context())

    async def close(self) -> None:
        for task in (self._task, *self._calls):
            task.cancel()
        await asyncio.wait([self._task, *self._calls])
        self.state = "down"

    # ---- the connection

    async def _keep_up(self) -> None:
        failures = 0
        while True:
            started_at, self._served = time.monotonic(), False
            try:
                await self._connect()
            except ImportError as error:
                self.error = INSTALL
                log.warning("no MCP server can be used: %s", error)
                failures = limits.MCP_FAILURES_MAX
            except Exception as error:  # noqa: BLE001  (whatever a server does only ends its connection)
                self.error = self._describe_error(error)
                log.warning("the MCP server %s was lost: %s", self.name, self.error)
            finally:
                self._client = None
                if not self.tried.done():
                    self.tried.set_result(None)
            failures = 1 if self._served or time.monotonic() - started_at > limits.MCP_STEADY_S else failures + 1
            if failures >= limits.MCP_FAILURES_MAX:
                self.state = "down"
                return
            self.state = "waiting"
            await asyncio.sleep(min(limits.MCP_WAIT_S_MAX, limits.MCP_WAIT_S_MIN * 2 ** (failures - 1)))

    async def _connect(self) -> None:
        link = await self._servers.blocking(_load_client)
        if self.config.sandbox and self.config.command:
            await self._servers.blocking(bubblewrap.probe)
        self._lost = False
        async with asyncio.timeout(self.config.timeout) as limit:
            async with link.connected(self._streams(link), self._changed.set, self._reconnect) as client:
                self._client = client
                await self._update_tools(await link.tools(client))
                limit.reschedule(None)
                self.state, self.error = "up", ""
                self._up.set()
                if not self.tried.done():
                    self.tried.set_result(None)
                watching = asyncio.create_task(link.watch(client))
                try:
                    while not self._lost:
                        self._changed.clear()
                        await self._changed.wait()
                        if not self._lost:
                            await self._update_tools(await link.tools(client))
                            # A server that reports changes constantly is not listed constantly.
                            await asyncio.sleep(limits.MCP_RELIST_S)
                finally:
                    self._up.clear()
                    watching.cancel()
                    await asyncio.wait([watching])
        raise link.Lost

    def _reconnect(self) -> None:
        self._lost = True
        self._up.clear()
        self._changed.set()

    def _streams(self, link: ModuleType) -> Any:
        command, url = self.config.command or "", self.config.url
        if bool(command) == bool(url):
            raise ValueError("Its settings need either `command` or `url`.")
        if url:
            return link.over_http(url, self.config.headers, self._guard(), self._note)
        env = child_env(self._settings, "local", self._settings.home.path, os.environ)
        sandbox = None
        if self.config.sandbox:
            sandbox = self._sandbox(command)
            env |= {"HOME": str(sandbox.place.private), "TMPDIR": "/tmp"}  # noqa: S108
        return link.over_pipes([command, *self.config.args], {**env, **self.config.env}, self._note, sandbox)

    def _sandbox(self, command: str) -> Bubblewrap:
        """A sandbox that sees the program and what its arguments name, read-only, and reaches public hosts."""
        if bubblewrap.probe():
            setting = (
                "terminal.backend: local" if self._identity != self.name else f"mcp_servers.{self.name}.sandbox: false"
            )
            raise ValueError(f"{bubblewrap.INSTALL_HINT} Without a sandbox: {setting}.")
        terminal, home = self._settings.terminal, self._settings.home
        private = home.sandbox / f"mcp-{folder_name(self._identity)}" / "home"
        place = Place(
            home,
            private,
            private,
            ro=(*map(real_path, terminal.sandbox_ro), *_program_paths(command, self.config.args)),
            rw=tuple(map(real_path, terminal.sandbox_rw)),
            memory_mb=terminal.container_memory,
            cpus=terminal.container_cpu,
        )
        sandbox, guard = Bubblewrap(place), self._guard()
        sandbox.egress = EgressProxy(lambda: guard, _any_host)
        return sandbox

    def _guard(self) -> UrlGuard:
        servers = self._servers
        return UrlGuard(servers.network, self._settings, servers.secrets(), servers.own_ports)

    def _note(self, text: str) -> None:
        if text:
            self._last_note = self._redact(text).splitlines()[-1][:_ERROR_CHARS_MAX]
        log.info("MCP server %s: %s", self.name, text)

    def _redact(self, text: str) -> str:
        return Secrets(_secrets_of(self.config)).mask(self._servers.secrets().redact(text))

    def _describe_error(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            return f"It gave no answer within {self.config.timeout:g} s."
        text = self._redact(str(error))
        if text in ("", "Connection closed", "Server returned an error response"):
            text = f"It has ended, or refuses. {self._last_note}"
        return " ".join(text.split())[:_ERROR_CHARS_MAX]

    async def _update_tools(self, listing: list[JsonObject]) -> None:
        chosen, registered = self.config.tools, self._servers.tool_names
        listing = [tool for tool in listing if chosen is None or tool["name"] in chosen]
        fit, self.unfit = await self._servers.blocking(partial(names.fit, self.name, listing))
        tools: list[ToolDef] = []
        if self._client is not None and self._client.server_capabilities.resources is not None:
            name = names.toolname(self.name, _RESOURCE.name, registered, "resource")
            tools.append(self._tool(name, _RESOURCE, self._read_resource))
        for tool in fit:
            name = names.toolname(self.name, tool.name, registered)
            tools.append(self._tool(name, tool, partial(self._call, tool.name)))
        self.tools = {tool.name: tool for tool in tools}

    def _tool(self, name: str, tool: names.Fit, run: Callable[[ToolContext, Args], Awaitable[Answer]]) -> ToolDef:
        return ToolDef(
            name=name,
            toolset=f"{PREFIX}{self.name}",
            description=tool.description,
            parameters=tool.parameters,
            run=run,
            effect=names.effect(tool.hints),
            scope=lambda _: frozenset({f"mcp:{self._identity}"}),
            timeout_s=self.config.timeout,
            foreign=True,
            prepare=partial(self._ask_approval, tool.name)
            if names.needs_approval(self.config.approval, tool.hints)
            else None,
        )

    # ---- calls

    async def _ask_approval(self, tool: str, ctx: ToolContext, args: Args) -> Prepared:
        from hermes.tools.framework import approvals

        reason = f"It calls a tool of the MCP server {self.name!r} that may change or delete something."
        subject = f"{self.name}: {tool} {json.dumps(args, ensure_ascii=False)}"
        await approvals.permission(ctx, "mcp", subject, reason, key=f"{self._identity} {tool}")
        return Prepared()

    async def _call(self, tool: str, ctx: ToolContext, args: Args) -> Answer:
        result = await self._request(lambda client: client.call_tool(tool, args))
        answer, blobs = names.answer(result["content"], result.get("structuredContent"))
        if result.get("isError"):
            text = str(answer.get("text") or answer.get("structured") or "it does not say why")
            raise ToolError(f"{tool} of {self.name!r} failed: {text[:10_000]}", "tool_crashed", _FAILED_HINT)
        return await _store_blobs(ctx, answer, blobs)

    async def _read_resource(self, ctx: ToolContext, args: Args) -> Answer:
        uri = args.get("uri")
        if not uri:
            listed = await self._request(lambda client: client.list_resources())
            answer, _ = names.answer(listed["resources"])
            return answer or {"resources": [], "note": "The server lists no resources."}
        result = await self._request(lambda client: client.read_resource(uri))
        return await _store_blobs(ctx, *names.answer(result["contents"]))

    async def _request(self, ask: Callable[[Client], Coroutine[Any, Any, Any]]) -> JsonObject:
        """The server's answer. A cancelled caller leaves at once; the server is told of it in the background."""
        client = await self._ready()
        link = await self._servers.blocking(_load_client)
        call = asyncio.create_task(ask(client))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait([call])
            result = call.result()
        except asyncio.CancelledError:
            call.cancel()
            raise
        except link.MCPError as error:
            message = self._describe_error(error)
            if error.code == link.CONNECTION_CLOSED or error.message == link.FORGOTTEN:
                self._reconnect()
                raise self._unavailable("was lost while it worked on this call, which may have taken effect") from None
            code = "invalid_arguments" if error.code == link.INVALID_PARAMS else "tool_crashed"
            message = f"The MCP server {self.name!r} refuses: {message}"
            raise ToolError(message, code, _FAILED_HINT, foreign=True) from None
        except Exception as error:  # noqa: BLE001  (a server that violates the protocol)
            log.warning(
                "the MCP server %s gave an answer that cannot be used: %s", self.name, self._describe_error(error)
            )
            raise self._unavailable("gave an answer that cannot be used") from None
        self._served = True
        dumped: JsonObject = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        return dumped

    async def _ready(self) -> Client:
        try:
            async with asyncio.timeout(0 if self.state == "down" else limits.MCP_READY_S_MAX):
                await self._up.wait()
        except TimeoutError:
            raise self._unavailable(f"is not available. {self.error}".strip(" .")) from None
        assert self._client is not None
        return self._client

    def _unavailable(self, problem: str) -> ToolError:
        hint = "Go on without it, or try once more later; tell the user if the work needs it."
        return ToolError(f"The MCP server {self.name!r} {problem}.", "mcp_unavailable", hint, foreign=True)


async def _store_blobs(ctx: ToolContext, answer: JsonObject, blobs: list[names.Blob]) -> Answer:
    """Write binary parts of an answer to files; images are shown to a model that sees them."""
    files: list[JsonObject] = []
    for number, blob in enumerate(blobs):
        kind = "".join(filter(str.isalnum, blob.media_type.partition("/")[2]))[:8] or "bin"
        call = "".join(char if char.isalnum() else "_" for char in ctx.call_id)[:64]
        path = ctx.resources.spill / f"{call}-{number}.{kind}"
        await ctx.blocking(partial(write_spill, path, blob.data))
        files.append({"path": str(path), "media_type": blob.media_type, "bytes": len(blob.data)})
        if ctx.sees_images and blob.media_type.startswith("image/") and len(ctx.images) < limits.MCP_IMAGES_MAX:
            with contextlib.suppress(ToolError):  # what cannot be shown lies in its file
                ctx.images.append(await ctx.blocking(partial(data_url, blob.data)))
                files[-1]["shown"] = True
    if files:
        answer["files"] = files
    return answer or {"note": "The tool has answered with nothing."}


def _load_client() -> ModuleType:
    return import_module("hermes.tools.mcp_link")


_RESOURCE = names.Fit(
    "read_resource",
    "Read a resource of this MCP server by its URI; without one, list those that there are.",
    object_schema({"uri": {"type": "string", "maxLength": 4096}}),
    {"readOnlyHint": True},
)
