"""The MCP servers of a process: connected in the background, kept up, and their tools offered to the turns that want them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextvars import Context
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from hermes.core import limits
from hermes.core.ids import folder_name
from hermes.core.json_types import JsonObject
from hermes.core.tokens import estimate
from hermes.guards.urls import UrlGuard
from hermes.sandbox import bubblewrap
from hermes.sandbox.bubblewrap import Bubblewrap
from hermes.sandbox.choose import child_env
from hermes.sandbox.mounts import Place
from hermes.sandbox.proxy import EgressProxy
from hermes.sandbox.quota import write_spill
from hermes.tools import mcp_names as names
from hermes.tools.framework.registry import Answer, Args, Prepared, ToolContext, ToolDef, ToolError, object_schema
from hermes.tools.vision import data_url

if TYPE_CHECKING:
    from hermes.core.threads import RunBlocking
    from hermes.guards.network import Network
    from hermes.guards.secrets import Secrets
    from hermes.settings.config import Settings
    from hermes.settings.schema import McpServer
    from hermes.tools.mcp_link import Client

log = logging.getLogger(__name__)
State = Literal["connecting", "up", "waiting", "down"]
Notice = tuple[str, str]
PREFIX = "mcp:"
INSTALL = "The MCP client is not installed. Install it with: pip install 'hermes[mcp]'"
_WORDS_CHARS_MAX = 300
_NAMED_MAX = 20
_OTHERWISE = "Change the arguments, or go on without it and tell the user."


async def _any_host(_host: str, _port: int) -> bool:
    """The operator has chosen the program, and so where it goes; the URL guard still applies."""
    return True


def _expanded(path: str) -> Path:
    return Path(os.path.realpath(Path(path).expanduser()))


def _program_paths(command: str, args: Sequence[str]) -> list[Path]:
    """What a program needs to see beside the system: where it is installed, and what its arguments name."""
    program = shutil.which(os.path.expanduser(command)) or command
    seen = [Path(place).parent.parent for place in (program, os.path.realpath(program)) if os.path.isabs(place)]
    for path in (Path(arg).expanduser() for arg in args if arg.startswith(("/", "~/"))):
        if path.exists():
            alone = path.is_dir() or path.parent in (Path.home(), Path("/"), Path("/tmp"))  # noqa: S108
            seen.append(path if alone else path.parent)
    system = (Path("/"), Path("/usr"), Path("/usr/local"), Path.home())
    return [Path(os.path.realpath(path)) for path in seen if path not in system]


class Servers:
    """All servers that are configured. They belong to one event loop, and are closed with it."""

    def __init__(
        self,
        network: Network,
        secrets: Callable[[], Secrets],
        own_ports: Callable[[], Collection[int]],
        blocking: RunBlocking,
    ) -> None:
        self.network, self.secrets, self.own_ports, self.blocking = network, secrets, own_ports, blocking
        self.taken: dict[str, str] = {}
        self._servers: dict[str, Server] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def begin(self, settings: Settings) -> None:
        for name, wanted in settings.mcp_servers.items():
            if wanted.enabled and wanted.connect == "eager":
                self._server(name, settings)

    def _server(self, name: str, settings: Settings) -> Server | None:
        """The server, as it is configured now: another configuration is another connection."""
        wanted = settings.mcp_servers.get(name)
        known = self._servers.get(name)
        if known is not None and known.wanted != wanted:
            self._retire(name)
        if wanted is None or not wanted.enabled:
            return None
        if name not in self._servers:
            self._servers[name] = Server(name, wanted, settings, self)
        return self._servers[name]

    def _retire(self, name: str) -> None:
        task = asyncio.ensure_future(self._servers.pop(name).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def test(self, name: str, settings: Settings) -> JsonObject | None:
        """Connect a server anew, whatever has become of it, and say how it stands; None: there is none."""
        if name in self._servers:
            self._retire(name)
        server = self._server(name, settings)
        if server is None:
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
        known: dict[str, str],
    ) -> tuple[dict[str, ToolDef], list[Notice]]:
        """The tools of a turn with those of its servers, as many as fit, and what is to be said about them.

        A server that is being connected is waited for, but only until it has had its time once. `known` is what the
        session has been told before: of a change it is told once.
        """
        wanted = (self._server(name.removeprefix(PREFIX), settings) for name in sorted(sets) if name.startswith(PREFIX))
        servers = [server for server in wanted if server is not None]
        until = settings.mcp_discovery_timeout
        if fresh := {server.tried: server.began + until for server in servers if not server.tried.done()}:
            await asyncio.wait(fresh, timeout=max(0.0, max(fresh.values()) - time.monotonic()))
        offered = {tool.name: tool for server in servers for tool in server.tools.values() if tool.name not in tools}
        room = int(window * limits.MCP_WINDOW_SHARE) - sum(map(_size, tools.values()))
        fitting, left_out = names.fit_into_window(((name, _size(offered[name])) for name in sorted(offered)), room)
        notices = _new_notices(servers, {name: offered[name] for name in fitting}, known)
        if left_out:
            notices.append(
                ("mcp_tools_left_out", f"Too large for the window, and not offered: {_shorten_list(left_out)}.")
            )
        every = {**tools, **{name: offered[name] for name in fitting}}
        return dict(sorted(every.items())), notices

    async def close(self) -> None:
        for name in list(self._servers):
            self._retire(name)
        if self._closing:
            await asyncio.wait(self._closing)


def _size(tool: ToolDef) -> int:
    return estimate({"n": tool.name, "d": tool.description, "p": tool.parameters})


def _shorten_list(texts: list[str]) -> str:
    more = len(texts) - _NAMED_MAX
    return ", ".join(texts[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _new_notices(servers: list[Server], offered: Mapping[str, ToolDef], known: dict[str, str]) -> list[Notice]:
    notices: list[Notice] = []
    for server in servers:
        failed = server.error if server.state in ("waiting", "down") else ""
        if known.get(f"server {server.name}", "") != failed and failed:
            notices.append(("mcp_unavailable", f"The MCP server {server.name!r} is not available: {failed}"))
        known[f"server {server.name}"] = failed
        unfit = "; ".join(f"{tool}: {why}" for tool, why in server.unfit.items())
        if unfit and known.get(f"unfit {server.name}") != unfit:
            notices.append(("mcp_tools_unfit", f"Not offered of {server.name!r}: {unfit[:1000]}."))
        known[f"unfit {server.name}"] = unfit
    now = {name: json.dumps([tool.description, tool.parameters]) for name, tool in offered.items()}
    changed = [name for name in sorted(now) if known.get(name, now[name]) != now[name]]
    if changed:
        notices.append(("mcp_tools_changed", f"Their servers have changed these tools: {_shorten_list(changed)}."))
    known |= now
    return notices


class Server:
    def __init__(self, name: str, wanted: McpServer, settings: Settings, servers: Servers) -> None:
        self.name, self.wanted = name, wanted
        self.state: State = "connecting"
        self.error = ""
        self.tools: dict[str, ToolDef] = {}
        self.unfit: dict[str, str] = {}
        self.began = time.monotonic()
        self.tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settings, self._servers = settings, servers
        self._client: Client | None = None
        self._up, self._news = asyncio.Event(), asyncio.Event()
        self._lost = False
        self._said = ""
        self._served = False
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
            began, self._served = time.monotonic(), False
            try:
                await self._connect()
            except ImportError as error:
                self.error = INSTALL
                log.warning("no MCP server can be used: %s", error)
                failures = limits.MCP_FAILURES_MAX
            except Exception as error:  # noqa: BLE001  (whatever a server does, it is its connection's end only)
                self.error = self._words(error)
                log.warning("the MCP server %s was lost: %s", self.name, self.error)
            finally:
                self._client = None
                if not self.tried.done():
                    self.tried.set_result(None)
            failures = 1 if self._served or time.monotonic() - began > limits.MCP_STEADY_S else failures + 1
            if failures >= limits.MCP_FAILURES_MAX:
                self.state = "down"
                return
            self.state = "waiting"
            await asyncio.sleep(min(limits.MCP_WAIT_S_MAX, limits.MCP_WAIT_S_MIN * 2 ** (failures - 1)))

    async def _connect(self) -> None:
        link = await self._servers.blocking(_load_client)
        if self.wanted.sandbox and self.wanted.command:
            await self._servers.blocking(bubblewrap.probe)
        self._lost = False
        async with asyncio.timeout(self.wanted.timeout) as limit:
            async with link.connected(self._streams(link), self._news.set, self._leave) as client:
                self._client = client
                await self._take(await link.tools(client))
                limit.reschedule(None)
                self.state, self.error = "up", ""
                self._up.set()
                if not self.tried.done():
                    self.tried.set_result(None)
                watching = asyncio.create_task(link.watch(client))
                try:
                    while not self._lost:
                        self._news.clear()
                        await self._news.wait()
                        if not self._lost:
                            await self._take(await link.tools(client))
                            await asyncio.sleep(
                                limits.MCP_RELIST_S
                            )  # who changes all the time is not asked all the time
                finally:
                    self._up.clear()
                    watching.cancel()
                    await asyncio.wait([watching])
        raise link.Lost

    def _leave(self) -> None:
        self._lost = True
        self._up.clear()
        self._news.set()

    def _streams(self, link: ModuleType) -> Any:
        command, url = self.wanted.command or "", self.wanted.url
        if bool(command) == bool(url):
            raise ValueError("Its settings need either `command` or `url`.")
        if url:
            servers = self._servers
            guard = UrlGuard(servers.network, self._settings, servers.secrets(), servers.own_ports)
            return link.over_http(url, self.wanted.headers, guard, self._note)
        env = child_env(self._settings, "local", self._settings.home.path, os.environ)
        sandbox = None
        if self.wanted.sandbox:
            sandbox = self._sandbox(command)
            env |= {"HOME": str(sandbox.place.private), "TMPDIR": "/tmp"}  # noqa: S108
        return link.over_pipes([command, *self.wanted.args], {**env, **self.wanted.env}, self._note, sandbox)

    def _sandbox(self, command: str) -> Bubblewrap:
        """A sandbox of its own. It sees the program, and what its arguments name, read-only; and public hosts."""
        if bubblewrap.probe():
            raise ValueError(f"{bubblewrap.INSTALL_HINT} Without a sandbox: mcp_servers.{self.name}.sandbox: false.")
        terminal, home, servers = self._settings.terminal, self._settings.home, self._servers
        private = home.sandbox / f"mcp-{folder_name(self.name)}" / "home"
        place = Place(
            home,
            private,
            private,
            ro=(*map(_expanded, terminal.sandbox_ro), *_program_paths(command, self.wanted.args)),
            rw=tuple(map(_expanded, terminal.sandbox_rw)),
            memory_mb=terminal.container_memory,
            cpus=terminal.container_cpu,
        )
        made = Bubblewrap(place)
        guard = UrlGuard(servers.network, self._settings, servers.secrets(), servers.own_ports)
        made.egress = EgressProxy(lambda: guard, _any_host)
        return made

    def _note(self, text: str) -> None:
        self._said = self._servers.secrets().redact(text).splitlines()[-1][:_WORDS_CHARS_MAX] if text else self._said
        log.info("MCP server %s: %s", self.name, text)

    def _words(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            return f"It gave no answer within {self.wanted.timeout:g} s."
        text = self._servers.secrets().redact(str(error))
        if text in ("", "Connection closed", "Server returned an error response"):
            text = f"It has ended, or refuses. {self._said}"
        return " ".join(text.split())[:_WORDS_CHARS_MAX]

    async def _take(self, listing: list[JsonObject]) -> None:
        chosen, taken = self.wanted.tools, self._servers.taken
        listing = [tool for tool in listing if chosen is None or tool["name"] in chosen]
        fit, self.unfit = await self._servers.blocking(partial(names.fit, self.name, listing))
        made: list[ToolDef] = []
        if self._client is not None and self._client.server_capabilities.resources is not None:
            name = names.toolname(self.name, _RESOURCE.name, taken, "resource")
            made.append(self._tool(name, _RESOURCE, self._read_resource))
        made += (self._tool(names.toolname(self.name, t.name, taken), t, partial(self._call, t.name)) for t in fit)
        self.tools = {tool.name: tool for tool in made}

    def _tool(self, name: str, tool: names.Fit, run: Callable[[ToolContext, Args], Awaitable[Answer]]) -> ToolDef:
        return ToolDef(
            name=name,
            toolset=f"{PREFIX}{self.name}",
            description=tool.description,
            parameters=tool.parameters,
            run=run,
            effect=names.effect(tool.hints),
            scope=lambda _: frozenset({f"mcp:{self.name}"}),
            timeout_s=self.wanted.timeout,
            foreign=True,
            prepare=partial(self._ask, tool.name) if names.needs_approval(self.wanted.approval, tool.hints) else None,
        )

    # ---- calls

    async def _ask(self, raw: str, ctx: ToolContext, args: Args) -> Prepared:
        from hermes.tools.framework import approvals

        reason = f"It calls a tool of the MCP server {self.name!r} that may change or delete something."
        subject = f"{self.name}: {raw} {json.dumps(args, ensure_ascii=False)}"
        await approvals.permission(ctx, "mcp", subject, reason, key=f"{self.name} {raw}")
        return Prepared()

    async def _call(self, raw: str, ctx: ToolContext, args: Args) -> Answer:
        result = await self._asked(lambda client: client.call_tool(raw, args))
        answer, blobs = names.answer(result["content"], result.get("structuredContent"))
        if result.get("isError"):
            text = str(answer.get("text") or answer.get("structured") or "it does not say why")
            raise ToolError(f"{raw} of {self.name!r} failed: {text[:10_000]}", "tool_crashed", _OTHERWISE)
        return await _store_blobs(ctx, answer, blobs)

    async def _read_resource(self, ctx: ToolContext, args: Args) -> Answer:
        uri = args.get("uri")
        if not uri:
            listed = await self._asked(lambda client: client.list_resources())
            answer, _ = names.answer(listed["resources"])
            return answer or {"resources": [], "note": "The server lists no resources."}
        result = await self._asked(lambda client: client.read_resource(uri))
        return await _store_blobs(ctx, *names.answer(result["contents"]))

    async def _asked(self, ask: Callable[[Client], Coroutine[Any, Any, Any]]) -> JsonObject:
        """What the server answers. Who waits for it may leave at once; the server is told so behind his back."""
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
            message = self._words(error)
            if error.code == link.CONNECTION_CLOSED or error.message == link.FORGOTTEN:
                self._leave()
                raise self._unavailable("was lost while it worked on this call, which may have taken effect") from None
            code = "invalid_arguments" if error.code == link.INVALID_PARAMS else "tool_crashed"
            raise ToolError(
                f"The MCP server {self.name!r} refuses: {message}", code, _OTHERWISE, foreign=True
            ) from None
        except Exception as error:  # noqa: BLE001  (a server that does not keep to the protocol)
            log.warning("the MCP server %s gave an answer that cannot be used: %s", self.name, self._words(error))
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
    """The answer, with what is no text in files beside it; the model is shown what it can see of that."""
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
