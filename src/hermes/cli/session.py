"""A conversation as the command line holds it: its settings and session, the turns it asks for, and its end."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from hermes import local
from hermes.app import App
from hermes.cli.door import Door, Json, open_door
from hermes.cli.output import NotFound, UsageError
from hermes.cli.session_maintenance import find
from hermes.core.errors import ConfigError, HermesError
from hermes.core.formatting import words
from hermes.core.home import Home, tighten
from hermes.core.limits import BUSY_SHOWN_AFTER_S
from hermes.core.spec import Content, RouteChoice, RunSpec
from hermes.guards.injection import fenced
from hermes.logs import logging_to
from hermes.providers import routes
from hermes.providers.base import Route
from hermes.runs.engine import Result
from hermes.services.housekeeping import sweep_if_due
from hermes.settings import config
from hermes.store.base import StoreError
from hermes.store.sessions import new_session_id
from hermes.tools.framework.registry import redaction
from hermes.tools.framework.toolsets import DEFAULTS, enabled_toolsets
from hermes.tools.mcp import PREFIX as SERVER_PREFIX
from hermes.tools.skill_files import Skill, find_skills, skill_text

EXIT_FAILED, EXIT_NO_MODEL, EXIT_REFUSED, EXIT_DEADLINE, EXIT_INTERRUPTED = 1, 3, 6, 124, 130
_EXITS = {"turn_timeout": EXIT_DEADLINE, "provider_auth_failed": EXIT_NO_MODEL}
_UNSAFE = frozenset({"memory", "skills"})
_OWNER = "default"
Show = Callable[[Json], None]
_BUSY = {
    "event": "warning",
    "level": "warn",
    "code": "session_busy",
    "message": "This session is in use elsewhere; waiting for its turn to end.",
}


class NoModel(HermesError):
    """There is nothing to ask."""

    exit_code = EXIT_NO_MODEL


class Conversation:
    """One conversation, from its first turn to its end; what can be changed about its turns is an attribute."""

    def __init__(self, args: argparse.Namespace, home: Home, door: Door, *, saved: bool, answerable: bool) -> None:
        self.args, self.home, self.door, self.saved, self.answerable = args, home, door, saved, answerable
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
        self.run_id: str | None = None
        self._asked = door
        # Clear only while a run has been asked for and has no id yet.
        self._begun = asyncio.Event()
        self._begun.set()
        self.result: Result | None = None
        # What is kept nowhere is remembered here.
        self.history: list[Json] = []
        self.refused = False

    @property
    def app(self) -> App:
        """The parts of the agent in this process."""
        return self.door.app

    @property
    def settings(self) -> config.Settings:
        """The settings as they stand."""
        return self.app.settings

    @property
    def db(self) -> Any:
        """The sessions, to be awaited."""
        return self.app.store.sessions

    async def route(self) -> Route:
        """The route that the next turn asks first."""
        named = RouteChoice(model=self.model, provider=self.provider) if self.model or self.provider else None
        return routes.primary(
            self.settings, named or routes.of_session(self.settings, await self.session()) or RouteChoice()
        )

    async def session(self) -> Json:
        """The session as it is stored; nothing before its first turn."""
        return (await self.db.get_session(self.session_id) if self.saved else None) or {}

    # --- turns ------------------------------------------------------------------------------------------------------

    def spec(self, content: Content, **more: Any) -> RunSpec:
        """A turn of this conversation."""
        args = self.args
        redact = redaction(self.app.secrets, self.settings)
        told = [fenced(redact(skill_text(skill.path)), f"the skill {skill.name}") for skill in self.skills]
        return RunSpec(
            user_message=content,
            session_id=self.session_id,
            kind="cli",
            source="cli",
            history=None if self.saved else list(self.history),
            instructions="\n\n".join(told) or None,
            route=RouteChoice(model=self.model, provider=self.provider) if self.model or self.provider else None,
            reasoning={"enabled": self.effort != "none", "effort": self.effort} if self.effort else None,
            toolsets=self.toolsets,
            approvals="off" if self.yolo else None,
            answerable=self.answerable,
            max_iterations=args.max_turns,
            deadline_seconds=args.deadline,
            on_detach="cancel",
            persist=self.saved,
            context_files=not args.safe_mode,
            memory=self.memory,
            workdir=here(),
            **more,
        )

    async def ask(self, content: Content, show: Show, *, log: bool = False) -> Result:
        """A turn; what it tells is shown, or with `log` its log itself, and what it came to is given back."""
        if not await self.door.answers():  # the server has gone since
            self.door = Door(self.app)
            self.app.engine.start_background_tasks(resume=False)
        return await self.follow(self.door, self.spec(content), show, log=log)

    async def follow(self, door: Door, spec: RunSpec, show: Show, *, log: bool = False) -> Result:
        """A run from its beginning to its end."""
        self._begun, self._asked, self.refused = asyncio.Event(), door, False
        told = partial(note, _BUSY["message"]) if log else partial(show, _BUSY)
        late = asyncio.get_running_loop().call_later(BUSY_SHOWN_AFTER_S, told)
        try:
            self.run_id = await door.start(spec)
            self._begun.set()
            async for event in (door.log if log else door.events)(self.run_id):
                if log or event["event"] != "run.queued":
                    late.cancel()
                if event.get("event", event.get("type")) in ("tool.completed", "tool.finished"):
                    self.refused = event["status"] == "blocked"
                show(event)
            self.result = await door.result(self.run_id)
        except BaseException:
            if self.run_id is not None:  # nobody is there any more for whom it works
                with suppress(HermesError):
                    await door.control(self.run_id, "interrupt")
            raise
        finally:
            late.cancel()
            self.run_id = None
            self._begun.set()
        self.history = self.result["messages"]
        return self.result

    async def control(self, kind: Any, **data: str) -> bool:
        """Tell the turn under way something. False: there is none, or it does not concern it any more."""
        await self._begun.wait()
        return self.run_id is not None and await self._asked.control(self.run_id, kind, **data)

    # --- what turns are offered ---------------------------------------------------------------------------------------

    def default_toolsets(self) -> frozenset[str]:
        """The toolsets that the settings name for the command line."""
        return frozenset(enabled_toolsets(self.settings, "cli"))

    def _named_toolsets(self, names: list[str]) -> frozenset[str]:
        known = [*DEFAULTS, *(f"{SERVER_PREFIX}{name}" for name in self.settings.mcp_servers)]
        for name in names:
            if name not in known:
                raise UsageError(f"There is no toolset '{name}'.{near(name, known)}", hint="hermes tools list")
        return frozenset(names)

    def change_toolsets(self, names: list[str], *, on: bool) -> None:
        """Offer these from now on, or do not."""
        chosen = self._named_toolsets(names)
        now = self.default_toolsets() if self.toolsets is None else self.toolsets
        self.toolsets = now | chosen if on else now - chosen

    def skill(self, name: str) -> Skill:
        """A skill by its name."""
        found = {} if self.args.safe_mode else {skill.name: skill for skill in find_skills(self.settings)}
        if name not in found:
            raise UsageError(f"There is no skill '{name}'.{near(name, found)}", hint="hermes skills list")
        return found[name]

    # --- which session ------------------------------------------------------------------------------------------------

    async def resume(self, text: str) -> Json:
        """Go on with the session that is meant."""
        db = self.app.store.blocking.sessions
        [session] = await self.blocking(partial(find, db, self.home, text))
        return await self._take(session)

    async def resume_newest(self, name: str) -> Json:
        """Go on with the newest session of this folder, or of a name."""
        cursor = None
        while page := await self.db.list_sessions(
            **({"search": name} if name else {"cwd_prefix": here()}), owner=_OWNER, limit=100, cursor=cursor
        ):
            # A title that was taken has a number behind it.
            candidates = [one for one in page if (one["title"] or "").partition(" #")[0] == name.partition(" #")[0]]
            found = candidates if name else [one for one in page if one["cwd"] == here()]
            if found:
                return await self._take(max(found, key=lambda one: float(one["last_active"])))
            cursor = page[-1]["cursor"]
        where = f"with the name '{name}'" if name else "of this folder"
        raise NotFound(f"There is no session {where}.", hint="hermes sessions list")

    async def _take(self, session: Json) -> Json:
        if session["owner"] != _OWNER:
            raise NotFound(f"There is no session '{session['id']}'.", hint="hermes sessions list")
        self.session_id = session["id"]
        if not self.saved:  # it is gone on with, and stays as it was
            self.history = await self.db.get_messages_as_conversation(self.session_id)
        return session

    async def blocking(self, work: Callable[[], Any]) -> Any:
        """What blocks, beside the loop."""
        return await self.app.services.files.call(work)

    async def end(self, session_id: str = "") -> None:
        """The session is over, if there was one."""
        session_id = session_id or self.session_id
        if self.saved and await self.db.get_session(session_id):
            await self.db.end_session(session_id, "cli_close")

    async def close(self) -> None:
        """The conversation is over; what was kept long enough is let go of."""
        if not self.saved:
            return
        try:
            await self.end()
            if self.door.kind == "here":
                sweep = partial(sweep_if_due, self.app.store.blocking, self.settings, every_s=86_400.0)
                await self.blocking(sweep)
        except StoreError as error:
            note(str(error))


@asynccontextmanager
async def conversation(
    args: argparse.Namespace, home: Home, *, answerable: bool, aloud: bool = True
) -> AsyncIterator[Conversation]:
    """The conversation that the command line asks for. Bad settings, or no model to ask, end the command here."""
    for change in tighten(home):
        done = "is now" if change.now != change.was else "could not be made"
        note(f"{change.path} was open to others ({change.was:o}) and {done} private.")
    settings = config.load(home, {"terminal.backend": args.sandbox}, safe_mode=args.safe_mode)
    settings.require_valid()
    _check_route(settings, args)
    with logging_to(home, settings, verbose=args.debug or (False if aloud else None)):
        app = App(home, settings)
        door = Door(app)
        try:
            saved = not args.no_save and await _opens(app)
            door = await open_door(app, home, here=not saved or args.safe_mode or args.sandbox is not None)
            if door.kind == "here":
                _check_key(settings, args)
            talk = Conversation(args, home, door, saved=saved, answerable=answerable)
            if args.resume:
                await talk.resume(args.resume)
            elif args.go_on is not None:
                await talk.resume_newest(args.go_on)
            try:
                yield talk
            finally:
                await talk.close()
        finally:
            await door.close()


def _check_route(settings: config.Settings, args: argparse.Namespace) -> Route:
    route = routes.routes(settings, RouteChoice(model=args.model, provider=args.provider))[0]
    if route.api_mode == "local" and (problem := local.status(settings.home, settings)["problem"]):
        raise NoModel(f"No model is configured. {problem}", hint="hermes setup")
    return route


def _check_key(settings: config.Settings, args: argparse.Namespace) -> None:
    """A key that is missing here may be known to the server, which is then the one who asks."""
    route, file = _check_route(settings, args), settings.home.env_file
    if variable := routes.missing_key(settings, route):
        raise ConfigError(
            f"the provider {route.provider} needs a key in {variable}, and that is not set.",
            where=str(file),
            hint=f"put {variable}=… into {file}",
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
    """What a finished turn means to a shell."""
    if result["interrupted"]:
        return EXIT_INTERRUPTED
    if result["failed"] or result["error"]:
        return _EXITS.get(result["error_code"] or "", EXIT_FAILED)
    return EXIT_REFUSED if refused else 0


def here() -> str:
    """The folder that the user is in."""
    try:
        return os.getcwd()
    except OSError:
        raise UsageError("This folder is gone.", hint="cd") from None


def near(name: str, names: Any) -> str:
    """What may have been meant, as a sentence."""
    found = difflib.get_close_matches(name, [*names], n=3, cutoff=0.5)
    return f" Did you mean {', '.join(found)}?" if found else ""


def note(text: str) -> None:
    """Something beside the result, for whoever looks."""
    with suppress(BrokenPipeError):
        print(f"hermes: {text}", file=sys.stderr)
