"""A conversation as the command line holds it: its settings and session, the turns it asks for, and its end."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hermes import local
from hermes.app import App
from hermes.cli.agents import LocalAgent, RemoteSessions, ServerAgent
from hermes.cli.output import (
    EXIT_DEADLINE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NO_MODEL,
    EXIT_REFUSED,
    NoModel,
    NotFound,
    UsageError,
    check_toolsets,
    near,
    resolve_name,
)
from hermes.cli.session_maintenance import find
from hermes.core.errors import ConfigError, HermesError
from hermes.core.formatting import words
from hermes.core.home import Home, is_served, tighten
from hermes.core.json_types import JsonObject
from hermes.core.limits import BUSY_SHOWN_AFTER_S, CLOSE_S_MAX
from hermes.core.result import Result
from hermes.core.spec import Content, RouteChoice, RunSpec
from hermes.guards.injection import fenced
from hermes.logs import logging_to
from hermes.sandbox.base import SandboxError
from hermes.sandbox.choose import workspace_of
from hermes.server import status
from hermes.services import models
from hermes.services.housekeeping import sweep_if_due
from hermes.services.models import Route
from hermes.services.skills import Skill, find_skills, skill_text
from hermes.settings import config
from hermes.store.base import StoreError
from hermes.store.sessions import new_session_id, remove_folders
from hermes.tools.framework.registry import redaction
from hermes.tools.framework.toolsets import DEFAULTS, enabled_toolsets
from hermes.tools.mcp import PREFIX as SERVER_PREFIX

if TYPE_CHECKING:
    from hermes.core.events import Event
    from hermes.runs.live_run import LiveRun

_EXITS = {"turn_timeout": EXIT_DEADLINE, "provider_auth_failed": EXIT_NO_MODEL}
_UNSAFE = frozenset({"memory", "skills"})
# Toolsets whose tools write what outlives a conversation.
_KEEPING = frozenset({"memory", "skills", "cronjob"})
_OWNER = "default"
Show = Callable[[JsonObject], None]
_BUSY = {
    "event": "warning",
    "level": "warn",
    "code": "session_busy",
    "message": "This session is in use elsewhere; waiting for its turn to end.",
}


class Conversation:
    """One conversation, from its first turn to its end; what can be changed about its turns is an attribute.

    With a `server` its turns run there. A `remote` server has a home of its own, so sessions too are those of the
    server; the server of this home shares the store with this process.
    """

    def __init__(
        self, args: argparse.Namespace, app: App, server: ServerAgent | None, *, saved: bool, remote: bool
    ) -> None:
        self.args, self.app, self.server, self.saved, self.remote = args, app, server, saved, remote
        self.home, self.local = app.home, LocalAgent(app)
        self.sessions: Any = RemoteSessions(server) if server and remote else app.store.sessions
        self.answerable = False
        self.folder = here()
        self.session_id = new_session_id()
        self.model: str | None = args.model
        self.provider: str | None = args.provider
        self.toolsets = self._named_toolsets(words(args.toolsets)) if args.toolsets else None
        if args.safe_mode:
            self.toolsets = (self.toolsets or self.default_toolsets()) - _UNSAFE
        self.skills = [self.skill(name) for name in words(args.skills or "")]
        self.effort: str | None = None
        self.memory = not args.safe_mode
        self.yolo = args.yolo or self.app.services.outside.yolo
        # The mode of approvals; None: that of the settings.
        self.approvals: str | None = None
        self.run_id: str | None = None
        self._agent: LocalAgent | ServerAgent = self.local
        # Clear only while a run has been asked for and has no id yet.
        self._started = asyncio.Event()
        self._started.set()
        self.result: Result | None = None
        # Is told of each event, for who does not look at the screen.
        self.watch: Show = lambda _: None
        # The messages of a conversation that is not stored.
        self.history: list[JsonObject] = []
        self.refused = False
        # Whether a call was denied because nobody could be asked.
        self.unapproved = False

    @property
    def settings(self) -> config.Settings:
        return self.app.settings

    @property
    def place(self) -> str:
        """Where turns run, in words."""
        if self.server is None:
            return "in this process"
        return f"at {self.server.address()}" if self.remote else "in the server of this home"

    async def route(self) -> Route:
        """The route that the next turn asks first."""
        choice = self._choice() or models.of_session(self.settings, await self.session())
        return models.primary(self.settings, choice or RouteChoice())

    async def window(self) -> int:
        """The context window of the next turn's model, in tokens; the list of its provider is waited for."""
        route = await self.route()
        return await self.app.services.model_lists.fetched_window(route) or models.window_of(route)

    async def model_name(self) -> str:
        """The model of the next turn, as far as this process knows it."""
        if self.remote:
            return "/".join(filter(None, (self.provider, self.model or (await self.session()).get("model"))))
        route = await self.route()
        return f"{route.provider}/{route.model}"

    async def session(self) -> JsonObject:
        """The session as it is stored; nothing before its first turn."""
        return (await self.sessions.get_session(self.session_id) if self.saved else None) or {}

    # --- turns ------------------------------------------------------------------------------------------------------

    def _choice(self) -> RouteChoice | None:
        return RouteChoice(model=self.model, provider=self.provider) if self.model or self.provider else None

    def spec(self, content: Content, **more: Any) -> RunSpec:
        args = self.args
        redact = redaction(self.app.secrets, self.settings)
        skills = [fenced(redact(skill_text(skill.path)), f"the skill {skill.name}") for skill in self.skills]
        return RunSpec(
            user_message=content,
            session_id=self.session_id,
            kind="cli",
            source="cli",
            history=None if self.saved else list(self.history),
            instructions="\n\n".join(skills) or None,
            route=self._choice(),
            reasoning={"enabled": self.effort != "none", "effort": self.effort} if self.effort else None,
            toolsets=self.toolsets,
            disabled_toolsets=_KEEPING if args.no_save else frozenset(),
            approvals="off" if self.yolo else self.approvals,
            answerable=self.answerable,
            max_iterations=args.max_turns,
            deadline_seconds=args.deadline,
            on_detach="cancel",
            persist=self.saved,
            context_files=not args.safe_mode,
            memory=self.memory,
            workdir=self.folder,
            **more,
        )

    async def ask(self, content: Content, show: Show, *, log: bool = False, **more: Any) -> Result:
        """A turn; its events are shown, or with `log` those of its log itself, and its result is given back."""
        self._started, self.refused = asyncio.Event(), False
        show_busy = partial(note, _BUSY["message"]) if log else partial(show, _BUSY)
        late = asyncio.ensure_future(self._show_when_busy(show_busy))
        event: JsonObject = {}
        try:
            spec, agent = await self._assigned(self.spec(content, **more))
            self._agent, self.run_id = agent, await agent.start(spec)
            self._started.set()
            async for event in self.local.log(self.run_id) if log and not self.remote else agent.events(self.run_id):
                if log or event["event"] != "run.queued":
                    late.cancel()
                kind = event.get("event", event.get("type"))
                if kind in ("tool.completed", "tool.finished"):
                    self.refused = event["status"] == "blocked"
                elif kind in ("approval.responded", "approval.resolved"):
                    self.unapproved |= (event["choice"], event["by"]) == ("deny", "rule")
                show(event)
                self.watch(event)
            self.result = await (agent if self.remote else self.local).result(self.run_id)
        except BaseException:
            if self.run_id is not None:  # nobody is there any more for whom it works
                with suppress(HermesError):
                    await self._agent.control(self.run_id, "interrupt")
            raise
        finally:
            late.cancel()
            self.run_id = None
            self._started.set()
        if self.remote:
            self.result["pending_steer"] = event.get("pending_steer")
        self.history = self.result["messages"]
        return self.result

    async def _show_when_busy(self, show: Callable[[], None]) -> None:
        """Say that another turn of the session is waited for; one that begins slowly is no such turn."""
        await asyncio.sleep(BUSY_SHOWN_AFTER_S)
        with suppress(HermesError):
            others = [] if self.remote or not self.saved else await self.app.store.runs.unfinished(self.session_id)
            started_ids = [one.spec.run_id for one in others if one.state.started_at is not None]
            if self.remote or any(run_id != self.run_id for run_id in started_ids):
                show()

    async def _assigned(self, spec: RunSpec) -> tuple[RunSpec, LocalAgent | ServerAgent]:
        """A turn and who runs it. What a server does not take by its API is done here, where the store is the same."""
        remote, limit = self.remote, self.settings.agent.max_turns
        route = models.primary(self.settings, spec.route) if spec.route and not remote else None
        takes = spec.compact is None and spec.approvals is None and spec.memory and (spec.max_iterations or 0) <= limit
        takes &= not self._brought  # they are connected to this process
        takes &= spec.answerable or self.settings.approvals.unattended == "deny"
        takes &= route is None or models.of_provider(self.settings, route.provider, route.model) is not None
        if remote and not takes:
            raise UsageError("A server that is not of this home does not take this.", hint="hermes without --server")
        if self.server is None or not takes or not (remote or await self.server.answers()):
            return spec, self.local
        workdir = None if remote or not shares_folder(self.app, self.folder) else spec.workdir
        if not remote:
            await self.sessions.create_session(self.session_id, "cli", cwd=self.folder)
            spec = spec.replace(toolsets=spec.toolsets if spec.toolsets is not None else self.default_toolsets())
        if route is not None:
            spec = spec.replace(route=RouteChoice(model=route.model, provider=route.provider))
        return spec.replace(workdir=workdir), self.server

    async def control(self, kind: Any, **data: str) -> bool:
        """Tell the turn under way something. False: there is none, or it does not concern it any more."""
        await self._started.wait()
        return self.run_id is not None and await self._agent.control(self.run_id, kind, **data)

    # --- what turns are offered ---------------------------------------------------------------------------------------

    def default_toolsets(self) -> frozenset[str]:
        return frozenset(enabled_toolsets(self.settings, "cli")) | self._brought

    @property
    def _brought(self) -> frozenset[str]:
        """The toolsets of MCP servers that this session alone has."""
        return frozenset(self.app.services.mcp.of_sessions.get(self.session_id, ()))

    def _named_toolsets(self, names: list[str]) -> frozenset[str]:
        known = [*DEFAULTS, *(f"{SERVER_PREFIX}{name}" for name in self.settings.mcp_servers), *self._brought]
        check_toolsets(names, known)
        return frozenset(names)

    def change_toolsets(self, names: list[str], *, on: bool) -> None:
        chosen = self._named_toolsets(names)
        now = self.default_toolsets() if self.toolsets is None else self.toolsets
        self.toolsets = now | chosen if on else now - chosen

    def skill(self, name: str) -> Skill:
        skills = {} if self.args.safe_mode else {skill.name: skill for skill in find_skills(self.settings)}
        if name not in skills:
            raise UsageError(f"There is no skill '{name}'.{near(name, skills)}", hint="hermes skills list")
        return skills[name]

    # --- which session ------------------------------------------------------------------------------------------------

    async def resume(self, text: str) -> None:
        """Go on with the session that is meant, by its id, the beginning of it, or its title."""
        if not self.remote:
            [session] = await self.blocking(partial(find, self.app.store.blocking.sessions, self.home, text))
        elif (session := await self.sessions.get_session(text)) is None:
            listed = {one["id"]: one for one in await self.sessions.list_sessions()}
            titled = [name for name, one in listed.items() if one["title"] == text]
            session = listed[titled[0] if len(titled) == 1 else resolve_name(text, listed, "session", "/sessions")]
        await self.adopt(session)

    async def resume_newest(self, name: str) -> None:
        """Go on with the newest session of this folder, or of a name."""
        cursor, candidates = None, list[JsonObject]()
        if self.remote:
            candidates = [one for one in await self.sessions.list_sessions() if not name or _is_titled(one, name)]
        while (
            not candidates
            and not self.remote
            and (
                page := await self.sessions.list_sessions(
                    **({"search": name} if name else {"cwd_prefix": here()}), owner=_OWNER, limit=100, cursor=cursor
                )
            )
        ):
            candidates = [one for one in page if (_is_titled(one, name) if name else one["cwd"] == here())]
            cursor = page[-1]["cursor"]
        if not candidates:
            where = f"with the name '{name}'" if name else "of this folder"
            raise NotFound(f"There is no session {where}.", hint="hermes sessions list")
        await self.adopt(max(candidates, key=lambda one: float(one["last_active"])))

    async def end_lost_turn(self) -> bool:
        """Put an end to a turn whose process was killed; what it had said is kept. False: there is none."""
        if not self.saved or self.remote:
            return False
        store = self.app.store
        holder = await store.leases.holder(f"session:{self.session_id}")
        lost = [record.spec.run_id for record in await store.runs.unfinished(self.session_id) if holder is None]
        with suppress(TimeoutError):  # the next turn does it, too
            async with asyncio.timeout(CLOSE_S_MAX):
                for run_id in lost:
                    await self.app.engine.recovery.resume(run_id)
                    async for _ in self.local.log(run_id):  # to its end
                        pass
        return bool(lost)

    async def adopt(self, session: JsonObject) -> None:
        """Go on with a stored session. Raises NotFound where it is of another owner."""
        if session.get("owner", _OWNER) != _OWNER and not self.remote:
            raise NotFound(f"There is no session '{session['id']}'.", hint="hermes sessions list")
        self.session_id = session["id"]
        if not self.saved:  # it is gone on with, and stays as it was
            self.history = await self.sessions.get_messages_as_conversation(self.session_id)

    async def blocking(self, work: Callable[[], Any]) -> Any:
        return await self.app.services.files.call(work)

    async def end(self, session_id: str = "") -> None:
        session_id = session_id or self.session_id
        if self.saved and await self.sessions.get_session(session_id):
            await self.sessions.end_session(session_id, "cli_close")

    async def close(self, *, aloud: bool) -> None:
        """End the conversation and sweep the store; `aloud`: a failure is reported, as nothing has failed before."""
        if not self.saved:
            return
        try:
            await self.end()
            if self.server is None:
                sweep = partial(sweep_if_due, self.app.store.blocking, self.settings, every_s=86_400.0)
                await self.blocking(sweep)
        except HermesError as error:
            if aloud:
                note(str(error))


def _is_titled(session: JsonObject, name: str) -> bool:
    """A title that was taken has a number behind it."""
    return (session["title"] or "").partition(" #")[0] == name.partition(" #")[0]


class Backend(NamedTuple):
    """What the conversations of a command share: the app, and the server that runs their turns, if one does."""

    args: argparse.Namespace
    app: App
    server: ServerAgent | None
    saved: bool
    remote: bool

    def require_model(self) -> None:
        """Raises HermesError where there is no model to ask, as far as that is known here."""
        if self.remote:
            return
        route = _check_route(self.app.settings, self.args)
        if self.server is None:
            _check_key(self.app.settings, route)

    def conversation(self) -> Conversation:
        return Conversation(self.args, self.app, self.server, saved=self.saved, remote=self.remote)


@asynccontextmanager
async def opened(
    args: argparse.Namespace, home: Home, *, aloud: bool = True, joins: bool = True
) -> AsyncIterator[Backend]:
    """The parts that conversations need. With `joins` a server of the home is used that nobody has named. Bad settings
    end the command here."""
    for change in tighten(home):
        done = "is now" if change.now != change.was else "could not be made"
        note(f"{change.path} was open to others ({change.was:o}) and {done} private.")
    settings = config.load(home, {"terminal.backend": args.sandbox}, safe_mode=args.safe_mode)
    settings.require_valid()
    remote = args.server is not None and args.server.rstrip("/") != status.local_url(home)
    if args.no_save and args.server is not None:
        raise UsageError("A server keeps conversations: --server cannot go with --no-save.", hint="hermes --no-save")
    with logging_to(home, settings, verbose=args.debug or (False if aloud else None)):
        app = App(home, settings)
        server: ServerAgent | None = None
        unsaved: dict[str, str] = {}
        app.engine.listeners.append(partial(_note_unsaved, unsaved))
        try:
            saved = remote or (not args.no_save and await _opens(app))
            if joins or args.server is not None:
                server = await _server(args, app, remote=remote, saved=saved)
            yield Backend(args, app, server, saved, remote)
        finally:
            if server is not None:
                await server.close()
            await app.close()
            remove_folders(home.path, {*unsaved.values()}, unsaved)


def _note_unsaved(unsaved: dict[str, str], live: LiveRun, event: Event) -> None:
    """Note each run that is not stored, and under what its files lie."""
    if not live.spec.persist:
        unsaved.setdefault(live.spec.run_id, live.spec.folder_id)


@asynccontextmanager
async def conversation(
    args: argparse.Namespace, home: Home, *, answerable: bool, aloud: bool = True
) -> AsyncIterator[Conversation]:
    """The conversation that the command line asks for. Bad settings, or no model to ask, end the command here."""
    async with opened(args, home, aloud=aloud) as backend:
        backend.require_model()
        talk = backend.conversation()
        talk.answerable = answerable
        if args.resume:
            await talk.resume(args.resume)
        elif args.go_on is not None:
            await talk.resume_newest(args.go_on)
        failed = True
        try:
            yield talk
            failed = False
        finally:
            await talk.close(aloud=not failed)


async def _server(args: argparse.Namespace, app: App, *, remote: bool, saved: bool) -> ServerAgent | None:
    """The server that is named; else that of the home, where one runs and its API takes what is wanted: turns that are
    stored, with the settings as they are, in a folder of `terminal.workspaces`."""
    if remote:
        url, key = args.server.rstrip("/"), app.settings.variable("HERMES_API_KEY") or ""
        return ServerAgent(lambda: url, key)
    special = not saved or args.safe_mode or args.sandbox is not None or args.yolo or app.store.blocking.path is None
    if args.server is None and (special or not is_served(app.home) or not shares_folder(app, here())):
        return None
    server = ServerAgent(partial(status.local_url, app.home), app.settings.api_server.key)
    if args.server is not None or await server.answers():
        return server
    await server.close()
    return None


def shares_folder(app: App, folder: str) -> bool:
    """Whether a server of this home may work in a folder."""
    with suppress(SandboxError):
        workspace_of(app.home, app.settings, _OWNER, None, folder)
        return True
    return False


def _check_route(settings: config.Settings, args: argparse.Namespace) -> Route:
    route = models.routes(settings, RouteChoice(model=args.model, provider=args.provider))[0]
    if route.api_mode == "local" and (problem := local.status(settings.home, settings)["problem"]):
        raise NoModel(f"No model is configured. {problem}", hint="hermes setup")
    return route


def _check_key(settings: config.Settings, route: Route) -> None:
    """A key that is missing here may be known to the server, which is then the one who asks."""
    if variable := models.missing_key(settings, route):
        raise ConfigError(
            f"the provider {route.provider} needs a key in {variable}, and that is not set.",
            where=str(settings.home.env_file),
            hint=f"put {variable}=… into {settings.home.env_file}",
        )


async def _opens(app: App) -> bool:
    """Whether there is a store to keep the conversation in; without, it goes on all the same."""
    try:
        await app.services.files.call(app.store.blocking.open)
    except StoreError as error:
        note(f"this conversation is not kept: {error}")
        return False
    return True


def exit_code(result: Result, *, refused: bool = False) -> int:
    if result["interrupted"]:
        return EXIT_INTERRUPTED
    if result["failed"] or result["error"]:
        return _EXITS.get(result["error_code"] or "", EXIT_FAILED)
    return EXIT_REFUSED if refused else 0


def here() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise UsageError("This folder is gone.", hint="cd") from None


def note(text: str) -> None:
    with suppress(BrokenPipeError):
        print(f"hermes: {text}", file=sys.stderr)
