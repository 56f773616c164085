"""In-process state of a session between turns: its shell, the files it has seen, and its grants.

`HostGrants` decides which hosts its sandboxed commands may reach, and who is asked about a new one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.core.limits import EGRESS_REFUSALS_SHOWN_MAX, SESSION_STATES_MAX
from hermes.guards.url_text import domain_suffix
from hermes.runs.writer import LogEnded
from hermes.sandbox.proxy import EgressProxy
from hermes.store.base import StoreError
from hermes.tools.framework import approvals

if TYPE_CHECKING:
    from hermes.guards.urls import UrlGuard
    from hermes.sandbox.shell import Shell
    from hermes.settings.config import Settings
    from hermes.tools.framework.registry import ToolContext
    from hermes.tools.framework.resources import RunResources


@dataclass(slots=True, eq=False)
class RunningCall:
    """A tool call while its commands run. `hosts` are granted for as long as it lasts, `refusals` is what the proxy told
    its clients meanwhile, and `connected` says that some host was reached."""

    ctx: ToolContext
    hosts: set[str] = field(default_factory=set)
    refusals: list[str] = field(default_factory=list)
    connected: bool = False
    questions: set[asyncio.Task[bool]] = field(default_factory=set)

    @property
    def hint(self) -> str:
        return " ".join(self.refusals)


class HostGrants:
    """The grants of one session. Questions go out on behalf of its newest running call; with none running, as for a
    background process between two turns, a host that is not granted is refused."""

    def __init__(self) -> None:
        self._calls: list[RunningCall] = []
        self._questions: dict[str, asyncio.Task[bool]] = {}
        self._denied: set[str] = set()
        self._turn_id = ""
        self._proxy: EgressProxy | None = None
        # Of the newest turn: they outlive it, for background processes.
        self._guard: UrlGuard | None = None
        self._settings: Settings | None = None
        self._granted: set[str] = set()

    def proxy(self, resources: RunResources) -> EgressProxy:
        """The proxy of the session's sandbox, updated to the guard and settings of this turn."""
        self._guard, self._settings = resources.command_urls, resources.settings
        self._granted = resources.session.granted
        if self._proxy is None:
            self._proxy = EgressProxy(self._current_guard, self.authorize, self._note_refusal)
        return self._proxy

    def is_granted(self, host: str) -> bool:
        if self._settings is None:
            return False
        if self._settings.terminal.network or approvals.HOST_KEY + host in self._granted:
            return True
        return f".{host}".endswith(tuple(map(domain_suffix, self._settings.terminal.allowed_hosts)))

    @asynccontextmanager
    async def call(self, ctx: ToolContext) -> AsyncIterator[RunningCall]:
        """Register a tool call while its commands run. Its open questions and its one-time grants end with it."""
        self.proxy(ctx.resources)
        turn_id = ctx.resources.engine.root_spec(ctx.resources.spec).run_id
        if turn_id != self._turn_id:
            self._turn_id, self._denied = turn_id, set()
        call = RunningCall(ctx)
        self._calls.append(call)
        try:
            yield call
        finally:
            self._calls.remove(call)
            for question in call.questions:
                question.cancel()
            await asyncio.gather(*call.questions, return_exceptions=True)

    async def authorize(self, host: str, port: int) -> bool:
        """Whether a host may be reached, after the user was asked where need be. All that want the same host wait for
        the same answer; a denial holds for the rest of the turn."""
        allowed = await self._is_allowed(host)
        if allowed and self._calls:
            self._calls[-1].connected = True
        return allowed

    async def _is_allowed(self, host: str) -> bool:
        if self.is_granted(host):
            return True
        if not self._calls or host in self._denied:
            return False
        if host in self._calls[-1].hosts:
            return True
        question = self._questions.get(host)
        if question is None:
            question = asyncio.create_task(self._ask(self._calls[-1], host))
            self._questions[host] = question
            self._calls[-1].questions.add(question)
            question.add_done_callback(lambda _: self._questions.pop(host, None))
        try:
            # A client's disconnect does not end the question: others wait for it, or the same client retries.
            return await asyncio.shield(question)
        except asyncio.CancelledError:
            if question.cancelled():  # its call has ended
                return False
            raise

    async def _ask(self, call: RunningCall, host: str) -> bool:
        try:
            await approvals.host(call.ctx, host)
        except approvals.Blocked:
            self._denied.add(host)
            return False
        except (LogEnded, StoreError):
            return False
        call.hosts.add(host)
        return True

    def _note_refusal(self, reason: str) -> None:
        refusals = self._calls[-1].refusals if self._calls else []
        if reason not in refusals and len(refusals) < EGRESS_REFUSALS_SHOWN_MAX:
            refusals.append(reason)

    def _current_guard(self) -> UrlGuard:
        assert self._guard is not None, "set before the proxy is made"
        return self._guard


_INHERITED = ("granted", "folders", "reserved", "hosts", "yolo")


@dataclass(slots=True)
class SessionState:
    """`seen` has the digest of each file as last read or written, by real path; `mcp_known` what was reported of MCP
    servers."""

    shell: Shell | None = None
    seen: dict[str, str] = field(default_factory=dict)
    granted: set[str] = field(default_factory=set)
    folders: list[Path] = field(default_factory=list)
    reserved: list[Path] = field(default_factory=list)
    hosts: HostGrants = field(default_factory=HostGrants)
    yolo: bool = False
    mcp_known: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


class SessionStates:
    """The states of the sessions in this process; the least recently used are dropped first."""

    def __init__(self) -> None:
        self._states: OrderedDict[tuple[str, str], SessionState] = OrderedDict()

    def notices(self, owner: str, session_id: str) -> list[str]:
        session = self._states.get((owner, session_id))
        return [] if session is None else session.notices

    def of(self, owner: str, session_id: str, parent_id: str | None = None) -> SessionState:
        """The state of a session. A child shares the grants of its parent, also those given later."""
        key = (owner, session_id)
        session = self._states.get(key)
        if session is None:
            parent = self._states.get((owner, parent_id)) if parent_id is not None else None
            inherited = {name: getattr(parent, name) for name in _INHERITED} if parent is not None else {}
            session = self._states[key] = SessionState(**inherited)
        self._states.move_to_end(key)
        while len(self._states) > SESSION_STATES_MAX:
            self._states.popitem(last=False)
        return session

    def drop(self, session_ids: Collection[str]) -> None:
        for key in [key for key in self._states if key[1] in session_ids] if self._states else ():
            del self._states[key]
