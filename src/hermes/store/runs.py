"""Runs and their logs on disk: what was committed is an event, what is growing is a partial, deltas are never rows."""

from __future__ import annotations

import builtins
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, NamedTuple, TypedDict, Unpack

from hermes.core.events import Cuts, Event, RunState
from hermes.core.json_types import JsonMapping
from hermes.core.limits import SWEEP_BATCH_ROWS
from hermes.core.processes import this_process
from hermes.core.spec import Control, RunSpec
from hermes.store import rows as messages
from hermes.store.base import EventsExpired, LeaseLost, Partial, Row, RunRecord, Tail
from hermes.store.codec import clean, pack, pack_or_none, unpack
from hermes.store.connections import Tx
from hermes.store.history_match import free_session_id
from hermes.store.leases import acquire, held, release
from hermes.store.prompts import put
from hermes.store.replay import closed_stream, joined, part_of, replay
from hermes.store.repository import Repository, blocks, reads, writes
from hermes.store.session_rows import check_owner, count_usage, exists, make_session, open_session, used

_PARTIAL = "INSERT INTO run_partials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
# What a spec says that has a column of its own; older rows have it in both places.
_SPEC_COLUMNS = ("run_id", "owner", "kind", "session_id", "response_id", "session_key", "source", "job_id")
_STATE = (
    "status, started_at, ended_at, last_event, last_seq, failure, error, usage, final_row, route, open, log_expired"
)
_HELD_STATE = (
    f"SELECT session_id, {_STATE}, (SELECT token FROM leases WHERE name = 'session:' || session_id) AS held FROM runs"
)
_HELD_STATE += " WHERE run_id = ?"
_KEPT = [
    "status",
    "ended_at",
    "started_at",
    "last_event",
    "last_seq",
    "failure",
    "error",
    "usage",
    "final_row",
    "route",
    "open",
    "updated_at",
]
# SQLite writes the indexes of every column that is set, changed or not: the first two are set when they change.
_PUT_STATE, _PUT_PROGRESS = (
    f"UPDATE runs SET {', '.join(f'{name} = ?' for name in names)}, resumes = resumes + ?, "
    "first_row = coalesce(first_row, ?) WHERE run_id = ?"
    for names in (_KEPT, _KEPT[2:])
)
_CREATE = (
    f"INSERT INTO runs ({', '.join(_SPEC_COLUMNS)}, created_at, holder, parent_run_id, parent_call_id, "
    f"instructions_sha256, spec, first_events, first_row, {', '.join(_KEPT)}) "
    f"VALUES ({', '.join('?' * (len(_SPEC_COLUMNS) + 8 + len(_KEPT)))})"
)
# A run with what it was told by its caller, which older rows have in their spec.
_WHOLE = "SELECT *, rowid, (SELECT text FROM prompts WHERE sha256 = instructions_sha256) AS instructions FROM runs"
_LIGHT = (
    f"{', '.join(_SPEC_COLUMNS)}, {_STATE}, created_at, updated_at, resumes, holder, NULL AS instructions, json_set(spec, '$.user_message', '', "
    "'$.history', json('null'), '$.results', json('[]'), '$.client_tools', json('[]')) AS spec"
)
_UNCLAIMED = "NOT EXISTS (SELECT 1 FROM idempotency i WHERE i.run_id = runs.run_id AND i.expires_at > ?)"
# A row may say that it is of a run; it is, if it stands in the run's own transcript.
_OWN = "run_id = ? AND {} IN (?, (SELECT session_id FROM runs WHERE run_id = ?))"
_CLOSING = ("message.completed", "reasoning.completed")


class AppendOptions(TypedDict, total=False):
    """What is written with the events of a run beside their rows.

    `session` is opened first, under a free id where the run `claims` (holder and seconds of its lease) a new one, `creates` is the run itself where nothing is on record of it, `replaces` makes the rows all
    that the model sees, `annotate` gives a row other words for the model, `closes` names streams that have ended, and
    `sync` makes the commit wait for the disk.
    """

    session: JsonMapping | None
    partials: Sequence[Partial]
    closes: Sequence[str]
    replaces: Sequence[int | None]
    annotate: tuple[int, str] | None
    sync: bool
    creates: RunSpec | None
    claims: tuple[str, float] | None


class ClaimedSession(NamedTuple):
    """The session that a run was put on record with, and the token of its lease while the run has no end."""

    session_id: str
    token: int | None


class RunFilters(TypedDict, total=False):
    session_id: str | None
    statuses: Sequence[str]
    kinds: Sequence[str]
    job_id: str | None


class Runs(Repository):
    """Runs, each with its one writer: whoever holds the lease of its session."""

    # --- writing ------------------------------------------------------------------------------------------------

    @writes
    def create(self, tx: Tx, spec: RunSpec) -> None:
        _create(tx, spec)

    @writes
    def adopt(self, tx: Tx, run_id: str, holder: str) -> bool:
        """Make a run that its process has left one's own. False: somebody else was quicker."""
        sql = "UPDATE runs SET holder = ? WHERE run_id = ? AND holder = ? AND ended_at IS NULL"
        return tx.execute(sql, (this_process(), run_id, holder)) > 0

    @writes
    def append(
        self,
        tx: Tx,
        run_id: str,
        token: int | None,
        events: Sequence[Event],
        rows: Sequence[Row] = (),
        **more: Unpack[AppendOptions],
    ) -> ClaimedSession | None:
        """One transaction: the events and the rows they announce. A last event gives the session's lease back."""
        session, creates, replaces = more.get("session"), more.get("creates"), more.get("replaces")
        claims, usage = more.get("claims"), None
        if creates is not None and session is not None and claims is not None:
            state, session_id = RunState(), free_session_id(tx, creates.session_id)
            creates, session = creates.replace(session_id=session_id), {**session, "id": session_id}
            _set_session_id(session_id, events, rows)
            usage = used([event.data for event in events if event.type == "usage"])
        elif creates is not None:
            state, session_id = RunState(), creates.session_id
            _check_held(run_id, token, held(tx, f"session:{session_id}"))
        else:
            run = _checked(tx, run_id, token)
            state, session_id = _state_of(run), run["session_id"]
        made = session is not None and _open_session(tx, session, rows, usage)
        if replaces and rows:
            messages.archive(tx, rows[0].session_id, rows, replaces)
        elif rows:
            messages.add(tx, rows, counted=made)
        if (annotate := more.get("annotate")) is not None:
            messages.set_api_content(tx, *annotate)
        for row in rows:
            for event, name in row.announced_in:
                event.data[name] = row.id
        if events:
            if state.ended_at is not None or events[0].seq <= state.last_seq:
                raise LeaseLost(f"The log of {run_id} was gone on with by somebody else.")
            for event in events:
                state.apply(event)
                if event.type == "usage" and usage is None:
                    data = event.data
                    count_usage(
                        tx,
                        session_id,
                        data,
                        data.get("model", ""),
                        data.get("provider", ""),
                        data.get("task", ""),
                    )
            log, first_row = _pack_events(events), rows[0].id if rows else None
            if creates is not None:
                _create(tx, creates, state, log, events[-1].ts, first_row, opened=session is not None)
            else:
                moved = state.status != run["status"] or state.ended
                _put_state(tx, run_id, state, events, first_row, moved=moved)
                tx.execute("INSERT INTO run_log VALUES (?, ?, ?)", (run_id, state.last_seq, log))
            if state.ended and creates is None:  # nobody will take what was left for it
                sql = "UPDATE run_controls SET taken_at = ? WHERE run_id = ? AND taken_at IS NULL"
                tx.execute(sql, (state.ended_at, run_id))
            if token is not None and (state.ended or state.status == "interrupted"):
                release(tx, f"session:{session_id}", token)
        elif creates is not None:
            _create(tx, creates)
        for stream_id in more.get("closes", ()):
            tx.execute("DELETE FROM run_partials WHERE run_id = ? AND stream_id = ?", (run_id, stream_id))
        _put(tx, run_id, more.get("partials", ()))
        if claims is None:
            return None
        new_token = None if state.ended else acquire(tx, f"session:{session_id}", *claims, free=True)
        return ClaimedSession(session_id, new_token)

    @writes
    def put_partials(self, tx: Tx, run_id: str, token: int | None, partials: Sequence[Partial]) -> None:
        _checked(tx, run_id, token)
        _put(tx, run_id, partials)

    @writes
    def put_grown(self, tx: Tx, grown: Sequence[tuple[str, int | None, Sequence[Partial]]]) -> None:
        """The same for several runs, each with its token; those that have lost their session are left out."""
        for run_id, token, partials in grown:
            with suppress(LeaseLost):
                _checked(tx, run_id, token)
                _put(tx, run_id, partials)

    @writes
    def absorb(self, tx: Tx, tails: Mapping[str, Sequence[Tail]]) -> None:
        """Keep what a process that is gone has left of the open streams of its runs."""
        for run_id, own in tails.items():
            found = tx.row("SELECT ended_at FROM runs WHERE run_id = ?", (run_id,))
            if found is None or found["ended_at"] is not None:
                continue
            closed = {closed_stream(event) for event in _events(tx, run_id)}
            known = _partials(tx, run_id)
            fresh = [one for one in joined(known, own) if one not in known and part_of(one) not in closed]
            _put(tx, run_id, fresh)

    @writes
    def discard(self, tx: Tx, run_id: str) -> None:
        """Forget a run and, if it kept its rows under its own id, those too."""
        tx.execute("DELETE FROM runs WHERE run_id = ?", (run_id,))
        tx.execute("DELETE FROM sessions WHERE id = ?", (run_id,))

    # --- reading ------------------------------------------------------------------------------------------------

    @reads
    def read(
        self,
        tx: Tx,
        run_id: str,
        after: int,
        limit: int,
        *,
        streams: Sequence[Partial] | None = None,
        tails: Sequence[Tail] = (),
    ) -> list[Event]:
        """A page of the log behind `after`, with the deltas of its texts put in between again.

        `streams` are the open ones where they are known; otherwise what is stored of them is used, with the `tails`
        that a journal has.
        """
        limit = max(1, limit)
        expired = tx.value("SELECT log_expired FROM runs WHERE run_id = ?", (run_id,))
        if expired:
            raise EventsExpired(f"The events of {run_id} are no longer kept.")
        following = (event for event in _events(tx, run_id, after) if event.seq > after)
        page = list(islice(following, limit))
        # A message that is completed behind this page may have begun in it.
        behind = list(islice((event for event in following if event.type in _CLOSING), 2))
        wanted = [e.data["row"] for e in (*page, *behind) if e.type == "message.completed"]
        marks = ", ".join("?" * len(wanted))
        texts = {row.id: row for row in messages.read(tx, f"id IN ({marks})", wanted)} if wanted else {}
        if streams is None:
            streams = joined(_partials(tx, run_id), tails)
        return list(islice(replay(run_id, page, texts.get, streams, after, behind), limit))

    @reads
    def durable(self, tx: Tx, run_id: str) -> list[Event]:
        return list(_events(tx, run_id))

    @reads
    def partials(self, tx: Tx, run_id: str) -> list[Partial]:
        return _partials(tx, run_id)

    @reads
    def rows(self, tx: Tx, run_id: str) -> list[Row]:
        """The messages of the run that are live, in order; of one that it went on with, its own part."""
        own = f"{_OWN.format('session_id')} AND id >= (SELECT coalesce(first_row, 0) FROM runs WHERE run_id = ?)"
        found = messages.read(tx, f"{own} AND (active OR {messages.REST})", (run_id,) * 4)
        return list(messages.in_call_order(sorted(found, key=messages.model_place)))

    @reads
    def row(self, tx: Tx, run_id: str, row_id: int) -> Row | None:
        found = messages.read(tx, f"{_OWN.format('+session_id')} AND id = ?", (run_id, run_id, run_id, row_id))
        return found[0] if found else None

    @reads
    def get(self, tx: Tx, run_id: str) -> RunRecord | None:
        found = tx.row(f"{_WHOLE} WHERE run_id = ?", (run_id,))
        return _record_of(found) if found else None

    @reads
    def carrier(self, tx: Tx, run_id: str) -> str | None:
        """The process that carries on a run; None where the run has an end, or waits for the next server."""
        leased = "(SELECT holder FROM leases WHERE name = 'session:' || session_id AND until > ?)"
        sql = f"SELECT iif(started_at IS NULL, holder, coalesce({leased}, holder)) FROM runs"
        sql += " WHERE run_id = ? AND ended_at IS NULL AND status <> 'interrupted'"
        found: str | None = tx.value(sql, (time.time(), run_id))
        return found

    @reads
    def list(
        self,
        tx: Tx,
        *,
        owner: str | None = None,
        session_id: str | None = None,
        status: str | None = None,
        kind: str | None = None,
        limit: int | None = None,
        before: str | None = None,
    ) -> builtins.list[RunRecord]:
        where, params = "1", []
        for sql, value in (
            ("owner = ?", owner),
            ("session_id = ?", session_id),
            ("status = ?", status),
            ("kind = ?", kind),
        ):
            if value is not None:
                where += f" AND {sql}"
                params.append(value)
        by, order = _listed_by(owner, session_id)
        if before is not None:
            where += f" AND ({order}) < (SELECT {order} FROM runs WHERE run_id = ?)"
            params.append(before)
        sql = f"{_WHOLE} {by} WHERE {where} ORDER BY {_descending(order)} LIMIT ?"
        return [_record_of(row) for row in tx.rows(sql, [*params, -1 if limit is None else limit])]

    @reads
    def newest(self, tx: Tx, session_id: str) -> str | None:
        sql = "SELECT run_id FROM runs WHERE session_id = ? ORDER BY created_at DESC, rowid DESC LIMIT 1"
        found: str | None = tx.value(sql, (session_id,))
        return found

    @reads
    def page(
        self,
        tx: Tx,
        *,
        owner: str | None,
        limit: int,
        before: str | None = None,
        **filters: Unpack[RunFilters],
    ) -> tuple[builtins.list[RunRecord], dict[int | None, str | None], int]:
        """Runs, newest first and without what was said in them, the texts they ended with, and how many there are.

        An unknown `before` is a `KeyError`.
        """
        where, params = ("1", []) if owner is None else ("owner = ?", [owner])
        session_id, job_id = filters.get("session_id"), filters.get("job_id")
        chosen: dict[str, Sequence[str]] = {
            "session_id": [session_id] if session_id else (),
            "job_id": [job_id] if job_id else (),
            "status": filters.get("statuses", ()),
            "kind": filters.get("kinds", ()),
        }
        for name, values in chosen.items():
            if values:
                where += f" AND {name} IN ({', '.join('?' * len(values))})"
                params += values
        by, order = _listed_by(owner, session_id or None)
        counted_by = "INDEXED BY runs_session" if session_id else "INDEXED BY runs_owner"
        total = int(tx.value(f"SELECT count(*) FROM runs {counted_by} WHERE {where}", params))
        if before is not None:
            last = tx.row(f"SELECT owner, {order} FROM runs WHERE run_id = ?", (before,))
            if last is None or owner not in (None, last["owner"]):
                raise KeyError(before)
            place = last[1:]
            where += f" AND ({order}) < ({', '.join('?' * len(place))})"
            params += place
        sql = f"SELECT {_LIGHT} FROM runs {by} WHERE {where} ORDER BY {_descending(order)} LIMIT ?"
        found = [_record_of(row) for row in tx.rows(sql, [*params, limit])]
        rows = [record.state.final_row for record in found if record.state.final_row is not None]
        marks = ", ".join("?" * len(rows))
        texts = tx.rows(f"SELECT id, content FROM messages WHERE id IN ({marks})", rows) if rows else []
        return found, {row["id"]: row["content"] for row in texts}, total

    @writes
    def remove(self, tx: Tx, run_id: str) -> bool:
        """Forget a run that has ended, and its log. What was said stays in its session. False: it has no end yet."""
        return tx.execute("DELETE FROM runs WHERE run_id = ? AND ended_at IS NOT NULL", (run_id,)) > 0

    @reads
    def unfinished(self, tx: Tx, session_id: str | None = None) -> builtins.list[RunRecord]:
        where, params = ("AND session_id = ?", [session_id]) if session_id is not None else ("", [])
        # There are few of them: they are put in order here.
        sql = f"{_WHOLE} INDEXED BY runs_unfinished WHERE ended_at IS NULL {where}"
        found = sorted(tx.rows(sql, params), key=lambda row: (row["created_at"], row["rowid"]))
        return [_record_of(row) for row in found]

    # --- controls from elsewhere --------------------------------------------------------------------------------

    @writes
    def add_control(self, tx: Tx, run_id: str, control: Control) -> bool:
        """Leave a control for whoever holds the run. False: it was left before, or there is no such run any more."""
        if tx.value("SELECT 1 FROM runs WHERE run_id = ? AND ended_at IS NULL", (run_id,)) is None:
            return False
        who = {"by": control.by, "surface": control.surface, "credential": control.credential}
        data = pack({"data": dict(control.data), **who})
        values = (control.control_id, run_id, control.control, data, time.time())
        return tx.execute("INSERT INTO run_controls VALUES (?, ?, ?, ?, ?, NULL) ON CONFLICT DO NOTHING", values) > 0

    @reads
    def controlled(self, tx: Tx, run_ids: Sequence[str]) -> builtins.list[str]:
        """Which of these runs have controls that nobody has taken."""
        marks = ", ".join("?" * len(run_ids))
        sql = f"SELECT DISTINCT run_id FROM run_controls WHERE taken_at IS NULL AND run_id IN ({marks})"
        return [row[0] for row in tx.rows(sql, run_ids)]

    @writes
    def take_controls(self, tx: Tx, run_id: str) -> builtins.list[Control]:
        """The controls that nobody has taken yet, oldest first; they are taken now."""
        sql = "SELECT * FROM run_controls WHERE run_id = ? AND taken_at IS NULL ORDER BY created_at, control_id"
        found = tx.rows(sql, (run_id,))
        if found:
            tx.execute(
                "UPDATE run_controls SET taken_at = ? WHERE run_id = ? AND taken_at IS NULL", (time.time(), run_id)
            )
        return [Control(row["control"], control_id=row["control_id"], **unpack(row["data"])) for row in found]

    # --- retention ----------------------------------------------------------------------------------------------

    @blocks
    def sweep(
        self,
        run_days: Mapping[str, float],
        log_hours: Mapping[str, float],
        max_stored: int,
        now: float | None = None,
    ) -> dict[str, int]:
        """Let go of what was kept long enough, a few hundred at a time.

        Both tables are by kind. `run_days` has `""` for all others; a kind without hours keeps its log as long as the
        run. Of each owner and kind the newest `max_stored` stay. A run with an unexpired idempotency record stays.
        """
        now = time.time() if now is None else now
        done = {"logs": 0, "runs": 0}
        for kind, hours in log_hours.items():
            while count := self._expire_logs(kind, now - hours * 3600, now):
                done["logs"] += count
        kinds = tuple(kind for kind in run_days if kind)
        for kind, days in run_days.items():
            while count := self._drop_runs(kind, kinds, now - days * 86_400, now):
                done["runs"] += count
        while count := self._drop_surplus(max_stored, now):
            done["runs"] += count
        return done

    @writes
    def _expire_logs(self, tx: Tx, kind: str, before: float, now: float) -> int:
        found = tx.rows(
            f"SELECT run_id FROM runs WHERE kind = ? AND ended_at < ? AND NOT log_expired AND {_UNCLAIMED} LIMIT ?",
            (kind, before, now, SWEEP_BATCH_ROWS),
        )
        for (run_id,) in found:
            tx.execute("DELETE FROM run_log WHERE run_id = ?", (run_id,))
            tx.execute("DELETE FROM run_partials WHERE run_id = ?", (run_id,))
            tx.execute("UPDATE runs SET log_expired = 1, first_events = NULL WHERE run_id = ?", (run_id,))
        return len(found)

    @writes
    def _drop_runs(self, tx: Tx, kind: str, named: tuple[str, ...], before: float, now: float) -> int:
        which = "kind = ?" if kind else f"kind NOT IN ({', '.join('?' * len(named))})"
        return tx.execute(
            "DELETE FROM runs WHERE run_id IN "
            f"(SELECT run_id FROM runs WHERE {which} AND ended_at < ? AND {_UNCLAIMED} LIMIT ?)",
            (*((kind,) if kind else named), before, now, SWEEP_BATCH_ROWS),
        )

    @writes
    def _drop_surplus(self, tx: Tx, max_stored: int, now: float) -> int:
        return tx.execute(
            "DELETE FROM runs WHERE run_id IN (SELECT run_id FROM (SELECT run_id, ended_at, row_number() OVER "
            "(PARTITION BY owner, kind ORDER BY created_at DESC, rowid DESC) AS place FROM runs) AS runs "
            f"WHERE place > ? AND ended_at IS NOT NULL AND {_UNCLAIMED} LIMIT ?)",
            (max_stored, now, SWEEP_BATCH_ROWS),
        )


def _listed_by(owner: str | None, session_id: str | None) -> tuple[str, str]:
    """The index that has runs in the order of their beginning, and that order."""
    if session_id is not None:
        return "INDEXED BY runs_session", "created_at, rowid"
    if owner is not None:
        return "INDEXED BY runs_owner", "created_at, run_id"
    return "NOT INDEXED", "rowid"  # that of all runs is the order they were added in


def _descending(order: str) -> str:
    return ", ".join(f"{name} DESC" for name in order.split(", "))


# --- the fold and its columns ----------------------------------------------------------------------------------------


def _create(
    tx: Tx,
    spec: RunSpec,
    state: RunState | None = None,
    first_events: str | None = None,
    updated_at: float | None = None,
    first_row: int | None = None,
    *,
    opened: bool = False,
) -> None:
    """Put a run on record; `opened`: the owner of its session has been checked."""
    if not opened:
        check_owner(tx, spec.session_id, spec.owner)
    now = time.time()
    parent = spec.parent or (None, None)
    if state is not None and state.ended:  # nobody takes it up again: what was said is in its session
        spec = spec.replace(history=spec.history and [], results=())
    rest = {name: value for name, value in spec.stored().items() if name not in _SPEC_COLUMNS}
    instructions = clean(rest.pop("instructions")) if spec.instructions else ""
    values = (
        *(getattr(spec, name) for name in _SPEC_COLUMNS),
        now,
        this_process(),
        *parent,
        put(tx, instructions) if instructions else None,
        pack(rest),
        first_events,
        first_row,
        *_columns(state or RunState(), updated_at or now),
    )
    tx.execute(_CREATE, values)


def _checked(tx: Tx, run_id: str, token: int | None) -> sqlite3.Row:
    run = tx.row(_HELD_STATE, (run_id,))
    if run is None:
        raise LeaseLost(f"There is no run {run_id} any more.")
    _check_held(run_id, token, run["held"])
    return run


def _check_held(run_id: str, token: int | None, held: int | None) -> None:
    if token is not None and token != held:
        raise LeaseLost(f"The turn of {run_id} no longer holds its session.")


def _set_session_id(session_id: str, events: Sequence[Event], rows: Sequence[Row]) -> None:
    for row in rows:
        row.session_id = session_id
    for event in events:
        if event.type == "run.started":
            event.data["session_id"] = session_id


def _open_session(tx: Tx, session: JsonMapping, rows: Sequence[Row], usage: JsonMapping | None) -> bool:
    """The session of a turn; True: it was made, and begins with these rows. One with `usage` is known to be new."""
    fields = {name: value for name, value in session.items() if name not in ("id", "source")}
    parent = fields.get("parent_session_id")
    if parent is not None and not exists(tx, parent):
        del fields["parent_session_id"]
    counted = messages.tally([row for row in rows if row.session_id == session["id"]])
    if usage is not None:
        make_session(tx, session["id"], session["source"], fields, counted={**counted, **usage})
        return True
    check_owner(tx, session["id"], fields.get("owner") or "default")
    if open_session(tx, session["id"], session["source"], fields, reopen=True, counted=counted):
        return True
    if not rows:
        tx.execute("UPDATE sessions SET last_active = max(last_active, ?) WHERE id = ?", (time.time(), session["id"]))
    return False


def _state_of(run: sqlite3.Row) -> RunState:
    route, waiting = unpack(run["route"]) or {}, unpack(run["open"]) or {}
    return RunState(
        status=run["status"],
        stopping=bool(waiting.get("stopping")),
        approvals=waiting.get("approvals", {}),
        questions=waiting.get("questions", {}),
        controls=set(waiting.get("controls", ())),
        started_at=run["started_at"],
        ended_at=run["ended_at"],
        last_event=run["last_event"],
        last_seq=run["last_seq"],
        model=route.get("model", ""),
        provider=route.get("provider", ""),
        failure=run["failure"] or "",
        code=waiting.get("code", ""),
        error=run["error"] or "",
        usage=unpack(run["usage"]) or {},
        final_row=run["final_row"],
    )


def _put_state(
    tx: Tx, run_id: str, state: RunState, events: Sequence[Event], first_row: int | None, *, moved: bool
) -> None:
    """Keep the state; `moved`: its status or its end is another than before."""
    resumes = sum(event.type == "run.resumed" for event in events)
    columns = _columns(state, events[-1].ts)
    values = (*(columns if moved else columns[2:]), resumes, first_row, run_id)
    tx.execute(_PUT_STATE if moved else _PUT_PROGRESS, values)


def _columns(state: RunState, updated_at: float) -> tuple[Any, ...]:
    waiting = {
        "stopping": state.stopping,
        "approvals": state.approvals,
        "questions": state.questions,
        "controls": sorted(state.controls),
        "code": state.code,
    }
    return (
        state.status,
        state.ended_at,
        state.started_at,
        state.last_event,
        state.last_seq,
        state.failure or None,
        clean(state.error) or None,
        pack_or_none(state.usage),
        state.final_row,
        pack_or_none({"model": state.model, "provider": state.provider} if state.model or state.provider else None),
        pack(waiting) if any(waiting.values()) else None,
        updated_at,
    )


def _record_of(found: sqlite3.Row) -> RunRecord:
    spec = {**{name: found[name] for name in _SPEC_COLUMNS}, **unpack(found["spec"])}
    if found["instructions"] is not None:
        spec["instructions"] = found["instructions"]
    return RunRecord(
        RunSpec.from_stored(spec),
        _state_of(found),
        found["created_at"],
        found["updated_at"],
        found["resumes"],
        bool(found["log_expired"]),
        found["holder"],
    )


# --- events and partials ---------------------------------------------------------------------------------------------


def _pack_events(events: Sequence[Event]) -> str:
    text = pack([(event.seq, event.ts, event.type, event.step, event.data) for event in events])
    if "\ufffd" in text:  # what is shown is what is stored
        for event, (*_, data) in zip(events, unpack(text), strict=True):
            event.data = data
    return text


def _events(tx: Tx, run_id: str, after: int = 0) -> Iterator[Event]:
    """The log from the commit on that leads beyond `after`."""
    first = tx.rows("SELECT first_events FROM runs WHERE run_id = ?", (run_id,))
    rest = "SELECT events FROM run_log WHERE run_id = ? AND last_seq > ? ORDER BY last_seq"
    for (events,) in chain(first, tx.each(rest, (run_id, after))):
        for seq, ts, kind, step, data in unpack(events) or ():
            yield Event(run_id, kind, step, data, seq, ts)


def _partials(tx: Tx, run_id: str) -> list[Partial]:
    """The open streams, each put together from its pieces, in the order of their last deltas."""
    found: dict[str, list[Any]] = {}
    for row in tx.rows("SELECT * FROM run_partials WHERE run_id = ? ORDER BY stream_id, offset", (run_id,)):
        found.setdefault(row["stream_id"], []).append(row)
    whole = [
        Partial(
            stream_id,
            pieces[0]["kind"],
            pieces[0]["step"],
            "".join(piece["text"] for piece in pieces),
            Cuts.join([piece["cuts"] for piece in pieces]),
            pieces[-1]["last_seq"],
            pieces[0]["form"],
        )
        for stream_id, pieces in found.items()
    ]
    return sorted(whole, key=lambda partial: partial.last_seq)


def _put(tx: Tx, run_id: str, partials: Sequence[Partial]) -> None:
    """Write pieces. One that begins a stream takes the place of all that is there of it."""
    for p in partials:
        if not p.offset:
            tx.execute("DELETE FROM run_partials WHERE run_id = ? AND stream_id = ?", (run_id, p.stream_id))
    tx.many(
        _PARTIAL,
        [(run_id, p.stream_id, p.offset, p.kind, p.step, p.form, p.last_seq, p.cuts, clean(p.text)) for p in partials],
    )
