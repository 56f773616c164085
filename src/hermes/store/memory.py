"""The stores in memory: for runs that are not to be kept, and for programs without a database."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hermes.runs.events import Event, RunState
from hermes.runs.replay import replay
from hermes.runs.spec import RunSpec
from hermes.store.base import LeaseLost, Partial, Row, RunRecord, SessionRecord


@dataclass(slots=True)
class _Run:
    record: RunRecord
    events: list[Event] = field(default_factory=list)
    partials: dict[str, Partial] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)


class MemoryStore:
    """All stores of one process, kept in dictionaries. Every method is done when it returns."""

    def __init__(self) -> None:
        self.sessions = MemorySessions()
        self.leases = MemoryLeases()
        self.runs = MemoryRuns(self.sessions, self.leases)


class MemorySessions:
    """Conversations."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionRecord] = {}
        self._rows: dict[str, list[Row]] = {}
        self._last_id = 0

    async def get(self, session_id: str) -> SessionRecord | None:
        return self._sessions.get(session_id)

    async def messages(self, session_id: str) -> list[Row]:
        return _in_call_order([row for row in self._rows.get(session_id, ()) if row.active])

    async def update(self, session_id: str, **fields: Any) -> None:
        session = self._sessions[session_id]
        for name, value in fields.items():
            setattr(session, name, value)

    async def set_auto_title_if_empty(self, session_id: str, title: str) -> None:
        session = self._sessions.get(session_id)
        if session is not None and not session.title:
            session.title = title

    def open(self, session: SessionRecord) -> None:
        """Make the session, or fill what an existing one has left empty."""
        known = self._sessions.setdefault(session.id, session)
        known.last_active = time.time()
        for name in ("model", "instructions", "session_key", "parent_session_id"):
            if getattr(known, name) is None:
                setattr(known, name, getattr(session, name))

    def add(self, row: Row) -> None:
        """Put a row at the end of its session."""
        self._last_id += 1
        row.id = self._last_id
        self._rows.setdefault(row.session_id, []).append(row)

    def archive(self, session_id: str) -> None:
        """Take the live rows out of what the model sees."""
        for row in self._rows.get(session_id, ()):
            if row.active:
                row.active, row.compacted = False, True

    async def add_usage(self, session_id: str, usage: Mapping[str, Any]) -> None:
        session = self._sessions.get(session_id)
        if session is None:
            return
        numbers = {name: usage[name] or 0 for name in usage if name.endswith("_tokens")}
        places = [session.usage_by_model.setdefault((usage["model"], usage["provider"], usage["task"]), {})]
        if not usage["task"]:
            places.append(session.counts)
        for place in places:
            for name, number in {**numbers, "api_call_count": 1}.items():
                place[name] = place.get(name, 0) + number

    def forget(self, session_id: str) -> None:
        """Drop a session and its rows."""
        self._sessions.pop(session_id, None)
        self._rows.pop(session_id, None)


class MemoryRuns:
    """Runs and their logs."""

    def __init__(self, sessions: MemorySessions, leases: MemoryLeases) -> None:
        self._runs: dict[str, _Run] = {}
        self._sessions = sessions
        self._leases = leases

    async def create(self, spec: RunSpec) -> None:
        self._runs[spec.run_id] = _Run(RunRecord(spec, RunState(), time.time()))

    async def append(
        self,
        run_id: str,
        token: int | None,
        events: Sequence[Event],
        rows: Sequence[Row] = (),
        *,
        session: SessionRecord | None = None,
        partials: Sequence[Partial] = (),
        closes: Sequence[str] = (),
        replaces: bool = False,
        annotate: tuple[int, str] | None = None,
        sync: bool = False,
    ) -> None:
        run = self._checked(run_id, token)
        if session is not None:
            self._sessions.open(session)
        if replaces and rows:
            self._sessions.archive(rows[0].session_id)
        if annotate is not None and annotate[0] in run.rows:
            run.rows[annotate[0]].api_content = annotate[1]
        for row in rows:
            self._sessions.add(row)
            run.rows[row.id or 0] = row
            for event, name in row.told:
                event.data[name] = row.id
            row.told = ()
        for event in events:
            run.events.append(event)
            run.record.state.apply(event)
            if event.type == "usage":
                await self._sessions.add_usage(run.record.spec.session_id, event.data)
        for stream_id in closes:
            run.partials.pop(stream_id, None)
        self._put(run, partials)

    async def put_partials(self, run_id: str, token: int | None, partials: Sequence[Partial]) -> None:
        self._put(self._checked(run_id, token), partials)

    async def read(self, run_id: str, after: int, limit: int) -> list[Event]:
        run = self._runs.get(run_id)
        if run is None:
            return []
        everything = replay(run_id, run.events, run.rows.get, run.partials.values(), after)
        return list(islice(everything, limit))

    async def row(self, run_id: str, row_id: int) -> Row | None:
        run = self._runs.get(run_id)
        return run.rows.get(row_id) if run else None

    async def get(self, run_id: str) -> RunRecord | None:
        run = self._runs.get(run_id)
        return run.record if run else None

    async def list(
        self,
        *,
        owner: str | None = None,
        session_id: str | None = None,
        status: str | None = None,
        kind: str | None = None,
    ) -> list[RunRecord]:
        wanted = {"owner": owner, "session_id": session_id, "kind": kind}

        def fits(record: RunRecord) -> bool:
            same = all(value is None or getattr(record.spec, name) == value for name, value in wanted.items())
            return same and status in (None, record.state.status)

        return [run.record for run in reversed(self._runs.values()) if fits(run.record)]

    async def discard(self, run_id: str) -> None:
        run = self._runs.pop(run_id, None)
        for session_id in {row.session_id for row in run.rows.values()} if run else ():
            self._sessions.forget(session_id)

    def _checked(self, run_id: str, token: int | None) -> _Run:
        run = self._runs[run_id]
        if token is not None and not self._leases.current(f"session:{run.record.spec.session_id}", token):
            raise LeaseLost(f"The turn of {run_id} no longer holds its session.")
        return run

    @staticmethod
    def _put(run: _Run, partials: Sequence[Partial]) -> None:
        for partial in partials:
            run.partials[partial.stream_id] = partial


class MemoryLeases:
    """Leases with growing tokens."""

    def __init__(self) -> None:
        self._leases: dict[str, tuple[str, int, float]] = {}
        self._last_token = 0

    async def acquire(self, name: str, holder: str, ttl_s: float) -> int | None:
        held = self._leases.get(name)
        if held is not None and held[2] > time.monotonic():
            return None
        self._last_token += 1
        token = self._last_token
        self._leases[name] = (holder, token, time.monotonic() + ttl_s)
        return token

    async def renew(self, name: str, token: int, ttl_s: float) -> bool:
        if not self.current(name, token):
            return False
        self._leases[name] = (self._leases[name][0], token, time.monotonic() + ttl_s)
        return True

    async def release(self, name: str, token: int) -> None:
        if self.current(name, token):
            del self._leases[name]

    async def holder(self, name: str) -> str | None:
        held = self._leases.get(name)
        return held[0] if held and held[2] > time.monotonic() else None

    def current(self, name: str, token: int) -> bool:
        """Whether this token is the one that may write."""
        held = self._leases.get(name)
        return held is not None and held[1] == token


def _in_call_order(rows: list[Row]) -> list[Row]:
    """Results in the order of the calls they answer, whatever order they were stored in."""
    return list(_ordered(rows))


def _ordered(rows: list[Row]) -> Iterator[Row]:
    at = 0
    while at < len(rows):
        row = rows[at]
        at += 1
        yield row
        if row.role != "assistant" or not row.tool_calls:
            continue
        end = at
        while end < len(rows) and rows[end].role == "tool":
            end += 1
        place = {call["id"]: i for i, call in enumerate(row.tool_calls)}
        yield from sorted(rows[at:end], key=lambda r: place.get(r.tool_call_id or "", len(place)))
        at = end
