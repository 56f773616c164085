"""Runs and their logs: events are stored when committed, growing texts as partials, deltas never as rows."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, NamedTuple, TypedDict, Unpack

from hermes.core.events import Cuts, Event, RunState
from hermes.core.json_types import JsonMapping
from hermes.core.limits import RUN_INPUT_SHOWN_CHARS, SQL_ROWS_MAX, SWEEP_BATCH_ROWS
from hermes.core.processes import host_of, this_process
from hermes.core.spec import Control, RunSpec
from hermes.store import rows as messages
from hermes.store.base import EventsExpired, LeaseLost, Partial, Row, RunRecord, Tail
from hermes.store.codec import clean, pack, pack_or_none, unpack
from hermes.store.dialect import (
    CLOCK,
    FOR_SHARE,
    FOR_UPDATE,
    FOR_UPDATE_SKIP_LOCKED,
    all_of,
    either,
    index_hint,
    not_indexed,
    placeholders,
)
from hermes.store.engine import Record, Tx
from hermes.store.history_match import FreeSession, find_free_session
from hermes.store.leases import acquire_free, current_token, release
from hermes.store.owner_limits import check_places
from hermes.store.prompts import put
from hermes.store.replay import closed_stream, joined, part_of, replay
from hermes.store.repository import Repository, blocks, reads, reads_slowly, writes
from hermes.store.session_rows import (
    check_owner,
    count_usage,
    exists,
    make_session,
    open_session,
    prefetch_titles,
    prefetch_usage,
    used,
)

# A save that failed may have been carried out; what is saved next begins where that did.
_PARTIAL = (
    "INSERT INTO run_partials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
    'ON CONFLICT (run_id, stream_id, "offset") DO UPDATE SET '
    + ", ".join(f"{name} = excluded.{name}" for name in ("last_seq", "cuts", "text"))
)
# Fields of a spec with columns of their own; older rows have them in both places.
_SPEC_COLUMNS = ("run_id", "owner", "kind", "session_id", "response_id", "session_key", "source", "job_id")
_STATE_COLUMNS = (
    *("status", "ended_at", "started_at", "last_event", "last_seq", "failure"),
    *("error", "usage", "final_row", "route", "open", "updated_at"),
)
_STATE = ", ".join(_STATE_COLUMNS)
_LEASED_STATE = (
    f"SELECT session_id, {_STATE}, (SELECT token FROM leases WHERE name = 'session:' || session_id {FOR_SHARE}) "
    f"AS lease_token FROM runs WHERE run_id = ? {FOR_UPDATE}"
)
# SQLite updates the indexes of every column that is set, changed or not: the first two are set only when they change.
_PUT_STATE, _PUT_PROGRESS = (
    f"UPDATE runs SET {', '.join(f'{name} = ?' for name in names)}, resumes = resumes + ?, "
    "first_row = coalesce(first_row, ?) WHERE run_id = ?"
    for names in (_STATE_COLUMNS, _STATE_COLUMNS[2:])
)
_CREATE = (
    f"INSERT INTO runs ({', '.join(_SPEC_COLUMNS)}, created_at, holder, parent_run_id, parent_call_id, "
    f"instructions_sha256, spec, first_events, first_row, {_STATE}) "
    f"VALUES ({', '.join('?' * (len(_SPEC_COLUMNS) + 8 + len(_STATE_COLUMNS)))})"
)
# A run with its instructions, which older rows have in their spec.
_SELECT = "SELECT *, rowid, (SELECT text FROM prompts WHERE sha256 = instructions_sha256) AS instructions FROM runs"
# The beginning of the first text of the user's message, without the other long fields.
_BEGINNING = (
    "substr(CASE json_type(spec, '$.user_message') WHEN 'text' THEN json_extract(spec, '$.user_message') "
    f"ELSE coalesce(json_extract(spec, '$.user_message[0].text'), '') END, 1, {RUN_INPUT_SHOWN_CHARS})",
    "left(CASE json_typeof(spec->'user_message') WHEN 'string' THEN spec->>'user_message' "
    f"ELSE coalesce(spec->'user_message'->0->>'text', '') END, {RUN_INPUT_SHOWN_CHARS})",
)
_SUMMARY_COLUMNS = (
    f"{', '.join(_SPEC_COLUMNS)}, {_STATE}, log_expired, created_at, resumes, holder, NULL AS instructions, "
    + either(
        f"json_set(spec, '$.user_message', {_BEGINNING[0]}, '$.history', json('null'), '$.results', json('[]'), "
        "'$.client_tools', json('[]'))",
        """(spec::jsonb || '{"history": null, "results": [], "client_tools": []}' """
        f"|| jsonb_build_object('user_message', {_BEGINNING[1]}))::text",
    )
    + " AS spec"
)
_UNCLAIMED = "NOT EXISTS (SELECT 1 FROM idempotency i WHERE i.run_id = runs.run_id AND i.expires_at > ?)"
_QUEUED = "ended_at IS NULL AND started_at IS NULL AND holder = '' AND status = 'queued'"
_QUEUED_RUN = _QUEUED.replace("holder", "runs.holder")
# A row belongs to a run if it names the run and is in the run's own transcript.
_OF_RUN = "run_id = ? AND {} IN (?, (SELECT session_id FROM runs WHERE run_id = ?))"
_CLOSING = ("message.completed", "reasoning.completed")


class AppendOptions(TypedDict, total=False):
    """What is written together with the events and rows of a run. `session`: opened first; with `claims` (holder and
    seconds of the lease) a new one under a free id. `creates`: the run itself if it is not stored yet; with `owner_max`
    only if its owner has fewer unfinished runs. `replaces`: the rows replace what the model sees; the numbers are their
    positions in what it saw before. `annotate`: a row id and the text that the model sees instead of the row's own.
    `closes`: streams that have ended. `sync`: the commit waits for the disk."""

    session: JsonMapping | None
    partials: Sequence[Partial]
    closes: Sequence[str]
    replaces: Sequence[int | None]
    annotate: tuple[int, str] | None
    sync: bool
    creates: RunSpec | None
    claims: tuple[str, float] | None
    owner_max: int


class ClaimedSession(NamedTuple):
    """The session that a run was created with, and its lease token while the run is unfinished."""

    session_id: str
    token: int | None


class RunFilters(TypedDict, total=False):
    session_id: str | None
    statuses: Sequence[str]
    kinds: Sequence[str]
    job_id: str | None


class Runs(Repository):
    """Runs; the only writer of a run is the holder of its session's lease."""

    # --- writing ------------------------------------------------------------------------------------------------

    @writes
    def create(self, tx: Tx, spec: RunSpec) -> None:
        _create(tx, spec)

    @writes
    def adopt(self, tx: Tx, run_id: str, holder: str) -> bool:
        """Take over a run of a dead process. False: another process was quicker."""
        sql = "UPDATE runs SET holder = ? WHERE run_id = ? AND holder = ? AND ended_at IS NULL"
        return tx.change(sql, (this_process(), run_id, holder)) > 0

    @writes
    def append(
        self,
        tx: Tx,
        run_id: str,
        token: int | None,
        events: Sequence[Event],
        rows: Sequence[Row] = (),
        **options: Unpack[AppendOptions],
    ) -> ClaimedSession | None:
        """One transaction: the events and the rows they announce. A terminal event releases the session's lease."""
        session, creates, replaces = options.get("session"), options.get("creates"), options.get("replaces")
        claims, usage = options.get("claims"), None
        free: FreeSession | None = None
        messages.prefetch_ids(tx, 0 if replaces else len(rows))
        if creates is not None and claims is not None:
            if session is not None and tx.backend == "postgres":
                prefetch_titles(tx, session)
            free = find_free_session(tx, creates.session_id)
            state, session_id = RunState(), free.id
            creates = creates.replace(session_id=session_id)
            set_session_id(session_id, events, rows)
            if session is not None:
                session = {**session, "id": session_id}
                usage = used([event.data for event in events if event.type == "usage"])
        elif creates is not None:
            state, session_id = RunState(), creates.session_id
            _check_token(run_id, token, current_token(tx, f"session:{session_id}"))
            if owner_max := options.get("owner_max"):
                check_places(tx, creates.owner, owner_max)
        else:
            if rows and sum(event.type == "usage" for event in events) == 1:
                prefetch_usage(tx, rows[0].session_id)
            run = _leased_run(tx, run_id, token)
            state, session_id = _state_of(run), run["session_id"]
        created = session is not None and _open_session(tx, session, rows, usage)
        if replaces and rows:
            messages.archive(tx, rows[0].session_id, rows, replaces)
        elif rows:
            messages.add(tx, rows, counted=created)
        if (annotate := options.get("annotate")) is not None:
            messages.set_api_content(tx, *annotate)
        for row in rows:
            for event, name in row.announced_in:
                event.data[name] = row.id
        if events:
            if state.ended_at is not None or events[0].seq <= state.last_seq:
                raise LeaseLost(f"The log of {run_id} was continued by another process.")
            for event in events:
                state.apply(event)
                if event.type == "usage" and usage is None:
                    identity = (event.data.get(name, "") for name in ("model", "provider", "task"))
                    count_usage(tx, session_id, event.data, *identity)
            log, first_row = _pack_events(events), rows[0].id if rows else None
            if creates is not None:
                _create(tx, creates, state, log, events[-1].ts, first_row, opened=session is not None)
            else:
                status_changed = state.status != run["status"] or state.ended
                _put_state(tx, run_id, state, events, first_row, status_changed=status_changed)
                tx.execute("INSERT INTO run_log VALUES (?, ?, ?)", (run_id, state.last_seq, log))
            if state.ended and creates is None:  # nobody will take its pending controls
                sql = "UPDATE run_controls SET taken_at = ? WHERE run_id = ? AND taken_at IS NULL"
                tx.execute(sql, (state.ended_at, run_id))
            if token is not None and (state.ended or state.status == "interrupted"):
                release(tx, f"session:{session_id}", token)
        elif creates is not None:
            _create(tx, creates)
        if not state.ended:
            for stream_id in options.get("closes", ()):
                tx.execute("DELETE FROM run_partials WHERE run_id = ? AND stream_id = ?", (run_id, stream_id))
            _put(tx, run_id, options.get("partials", ()))
        elif creates is None:  # also what an interrupted tool has left
            tx.execute("DELETE FROM run_partials WHERE run_id = ?", (run_id,))
        if claims is None:
            return None
        if state.ended or free is None:
            return ClaimedSession(session_id, None)
        return ClaimedSession(session_id, acquire_free(tx, f"session:{session_id}", *claims, free.next_token))

    @writes
    def put_partials(self, tx: Tx, run_id: str, token: int | None, partials: Sequence[Partial]) -> None:
        _leased_run(tx, run_id, token)
        _put(tx, run_id, partials)

    @writes
    def put_grown(self, tx: Tx, grown: Sequence[tuple[str, int | None, Sequence[Partial]]]) -> None:
        """`put_partials` for several runs, each with its token; runs that have lost their session are skipped."""
        for run_id, token, partials in grown:
            with suppress(LeaseLost):
                _leased_run(tx, run_id, token)
                _put(tx, run_id, partials)

    @writes
    def absorb(self, tx: Tx, tails: Mapping[str, Sequence[Tail]]) -> None:
        """Store what a dead process has left of the open streams of its runs."""
        for run_id, run_tails in tails.items():
            run = tx.row(f"SELECT ended_at FROM runs WHERE run_id = ? {FOR_UPDATE}", (run_id,))
            if run is None or run["ended_at"] is not None:
                continue
            closed = {closed_stream(event) for event in _events(tx, run_id)}
            stored = _partials(tx, run_id)
            new_partials = [
                partial
                for partial in joined(stored, run_tails)
                if partial not in stored and part_of(partial) not in closed
            ]
            _put(tx, run_id, new_partials)

    @writes
    def discard(self, tx: Tx, run_id: str) -> None:
        """Delete a run of this process, and its rows if they are stored under its own id."""
        if tx.change("DELETE FROM runs WHERE run_id = ? AND holder = ?", (run_id, this_process())):
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
        """A page of the log after `after`, with the deltas of its texts between the events. `streams` are the open ones
        if known; otherwise the stored ones are used, with the `tails` from a journal."""
        limit = max(1, limit)
        expired = tx.value("SELECT log_expired FROM runs WHERE run_id = ?", (run_id,))
        if expired:
            raise EventsExpired(f"The events of {run_id} are no longer stored.")
        following = (event for event in _events(tx, run_id, after) if event.seq > after)
        page = list(islice(following, limit))
        # A message that is completed after this page may have started in it.
        later = list(islice((event for event in following if event.type in _CLOSING), 2))
        row_ids = [e.data["row"] for e in (*page, *later) if e.type == "message.completed"]
        texts = (
            {row.id: row for row in messages.read(tx, f"id IN ({placeholders(row_ids)})", row_ids)} if row_ids else {}
        )
        if streams is None:
            streams = joined(_partials(tx, run_id), tails)
        return list(islice(replay(run_id, page, texts.get, streams, after, later), limit))

    @reads
    def durable(self, tx: Tx, run_id: str) -> list[Event]:
        return list(_events(tx, run_id))

    @reads
    def partials(self, tx: Tx, run_id: str) -> list[Partial]:
        return _partials(tx, run_id)

    @reads
    def rows(self, tx: Tx, run_id: str) -> list[Row]:
        """The live messages of the run, in order; of a message that it continued, its own part."""
        condition = (
            f"{_OF_RUN.format('session_id')} AND id >= (SELECT coalesce(first_row, 0) FROM runs WHERE run_id = ?)"
        )
        rows = messages.read(tx, f"{condition} AND (active OR {messages.CONTINUATION})", (run_id,) * 4)
        return list(messages.in_call_order(sorted(rows, key=messages.model_position)))

    @reads
    def row(self, tx: Tx, run_id: str, row_id: int) -> Row | None:
        rows = messages.read(
            tx, f"{_OF_RUN.format(not_indexed('session_id'))} AND id = ?", (run_id, run_id, run_id, row_id)
        )
        return rows[0] if rows else None

    @reads
    def get(self, tx: Tx, run_id: str) -> RunRecord | None:
        row = tx.row(f"{_SELECT} WHERE run_id = ?", (run_id,))
        return _record_of(row) if row else None

    @reads
    def carrier(self, tx: Tx, run_id: str) -> str | None:
        """The process that works on a run; None if the run has ended or waits for the next server."""
        leased = f"(SELECT holder FROM leases WHERE name = 'session:' || session_id AND until > {CLOCK})"
        sql = f"SELECT CASE WHEN started_at IS NULL THEN holder ELSE coalesce({leased}, holder) END FROM runs"
        sql += " WHERE run_id = ? AND ended_at IS NULL AND status <> 'interrupted'"
        holder: str | None = tx.value(sql, (run_id,))
        return holder

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
        index, order = _listed_by(owner, session_id)
        where, params = all_of(
            *(("owner = ?", owner), ("session_id = ?", session_id), ("status = ?", status), ("kind = ?", kind)),
            (f"({order}) < (SELECT {order} FROM runs WHERE run_id = ?)", before),
        )
        sql = f"{_SELECT} {index} WHERE {where} ORDER BY {_descending(order)} LIMIT ?"
        return [_record_of(row) for row in tx.rows(sql, [*params, SQL_ROWS_MAX if limit is None else limit])]

    @reads
    def newest(self, tx: Tx, session_id: str) -> str | None:
        sql = "SELECT run_id FROM runs WHERE session_id = ? ORDER BY created_at DESC, rowid DESC LIMIT 1"
        run_id: str | None = tx.value(sql, (session_id,))
        return run_id

    @reads
    def page(
        self, tx: Tx, *, owner: str | None, limit: int, before: str | None = None, **filters: Unpack[RunFilters]
    ) -> tuple[builtins.list[RunRecord], dict[int | None, str | None], int]:
        """Runs, newest first, with the beginning of their input; their final texts; and the total. An unknown `before`
        is a `KeyError`."""
        where, params = ("TRUE", []) if owner is None else ("owner = ?", [owner])
        session_id, job_id = filters.get("session_id"), filters.get("job_id")
        chosen: dict[str, Sequence[str]] = {
            "session_id": [session_id] if session_id else (),
            "job_id": [job_id] if job_id else (),
            "status": filters.get("statuses", ()),
            "kind": filters.get("kinds", ()),
        }
        for name, values in chosen.items():
            if values:
                where += f" AND {name} IN ({placeholders(values)})"
                params += values
        index, order = _listed_by(owner, session_id or None)
        counted_by = index_hint("runs_session" if session_id else "runs_owner")
        total = int(tx.value(f"SELECT count(*) FROM runs {counted_by} WHERE {where}", params))
        if before is not None:
            last = tx.row(f"SELECT owner, {order} FROM runs WHERE run_id = ?", (before,))
            if last is None or owner not in (None, last["owner"]):
                raise KeyError(before)
            position = last[1:]
            where += f" AND ({order}) < ({placeholders(position)})"
            params += position
        sql = f"SELECT {_SUMMARY_COLUMNS} FROM runs {index} WHERE {where} ORDER BY {_descending(order)} LIMIT ?"
        records = [_record_of(row) for row in tx.rows(sql, [*params, limit])]
        rows = [record.state.final_row for record in records if record.state.final_row is not None]
        texts = tx.rows(f"SELECT id, content FROM messages WHERE id IN ({placeholders(rows)})", rows) if rows else []
        return records, {row["id"]: row["content"] for row in texts}, total

    @writes
    def remove(self, tx: Tx, run_id: str) -> bool:
        """Delete a finished run and its log; its messages stay in the session. False: it is not finished."""
        return tx.change("DELETE FROM runs WHERE run_id = ? AND ended_at IS NOT NULL", (run_id,)) > 0

    @reads
    def unfinished(self, tx: Tx, session_id: str | None = None) -> builtins.list[RunRecord]:
        where, params = ("AND session_id = ?", [session_id]) if session_id is not None else ("", [])
        # There are few of them: they are sorted here.
        sql = f"{_SELECT} {index_hint('runs_unfinished')} WHERE ended_at IS NULL {where}"
        rows = sorted(tx.rows(sql, params), key=lambda row: (row["created_at"], row["rowid"]))
        return [_record_of(row) for row in rows]

    # --- runs that any replica may take: their holder is empty ---------------------------------------------------

    @writes
    def offer(self, tx: Tx, run_id: str) -> None:
        """Let any replica take a queued run of this process."""
        sql = "UPDATE runs SET holder = '' WHERE run_id = ? AND holder = ? AND started_at IS NULL AND ended_at IS NULL"
        tx.execute(sql, (run_id, this_process()))

    @writes
    def take_queued(self, tx: Tx) -> RunRecord | None:
        """Take a queued run: the first of a session that is free, of the owner with the fewest active runs, the oldest
        first."""
        at_work = (
            "(SELECT count(*) FROM runs o WHERE o.owner = runs.owner AND o.ended_at IS NULL AND o.holder <> ''"
            " AND o.status <> 'interrupted')"
        )
        is_free = f"NOT EXISTS (SELECT 1 FROM leases WHERE name = 'session:' || session_id AND until > {CLOCK})"
        # An earlier run may have been taken without having its session's lease yet.
        is_first = (
            "NOT EXISTS (SELECT 1 FROM runs e WHERE e.session_id = runs.session_id AND e.ended_at IS NULL"
            " AND (e.created_at, e.run_id) < (runs.created_at, runs.run_id))"
        )
        where = f"{_QUEUED} AND {is_free} AND {is_first}"
        sql = f"SELECT run_id FROM runs WHERE {where} ORDER BY {at_work}, created_at, run_id LIMIT 10"
        for row in tx.rows(f"{sql} {FOR_UPDATE_SKIP_LOCKED}"):
            adopt = "UPDATE runs SET holder = ? WHERE run_id = ? AND holder = '' AND ended_at IS NULL"
            if tx.change(adopt, (this_process(), row["run_id"])) > 0:
                return _record_of(tx.rows(f"{_SELECT} WHERE run_id = ?", (row["run_id"],))[0])
        return None

    @reads_slowly
    def unfinished_counts(self, tx: Tx) -> dict[str, tuple[int, int]]:
        """Unfinished runs by owner, and how many of them are queued and not taken."""
        queued = f"sum(CASE WHEN {_QUEUED} THEN 1 ELSE 0 END)"
        sql = f"SELECT owner, count(*) AS runs, {queued} AS queued FROM runs WHERE ended_at IS NULL GROUP BY owner"
        return {row["owner"]: (row["runs"], row["queued"]) for row in tx.rows(sql, ())}

    @reads_slowly
    def any_queued(self, tx: Tx) -> bool:
        return tx.value(f"SELECT 1 FROM runs WHERE {_QUEUED} LIMIT 1") is not None

    @reads_slowly
    def queued(self, tx: Tx, before: float) -> builtins.list[str]:
        """The ids of queued runs that nobody has taken and that were submitted before a time, oldest first."""
        sql = f"SELECT run_id FROM runs WHERE {_QUEUED} AND created_at < ? ORDER BY created_at, run_id"
        return [row["run_id"] for row in tx.rows(sql, (before,))]

    @reads_slowly
    def left_behind(self, tx: Tx) -> builtins.list[tuple[str, str | None]]:
        """Unfinished runs outside the queue that may have no process, each with the holder of its session's unexpired
        lease. Only processes of this host are known to be dead: runs held from another host are left out."""
        host = f"{host_of(this_process())}:"
        leased = f"leases.name = 'session:' || runs.session_id AND leases.until > {CLOCK}"
        columns = "runs.run_id AS run_id, leases.holder AS leased_by"
        sql = (
            f"SELECT {columns} FROM runs LEFT JOIN leases ON {leased} WHERE runs.ended_at IS NULL AND NOT ({_QUEUED_RUN})"
            " AND (leases.holder IS NULL OR substr(leases.holder, 1, ?) = ?) ORDER BY runs.created_at, runs.run_id"
        )
        return [(row["run_id"], row["leased_by"]) for row in tx.rows(sql, (len(host), host))]

    # --- controls from elsewhere --------------------------------------------------------------------------------

    @writes
    def add_control(self, tx: Tx, run_id: str, control: Control) -> bool:
        """Leave a control for the holder of the run. False: it was left before, or the run has ended."""
        if tx.value("SELECT 1 FROM runs WHERE run_id = ? AND ended_at IS NULL", (run_id,)) is None:
            return False
        origin = {"by": control.by, "surface": control.surface, "credential": control.credential}
        data = pack({"data": dict(control.data), **origin})
        values = (control.control_id, run_id, control.control, data, time.time())
        return tx.change("INSERT INTO run_controls VALUES (?, ?, ?, ?, ?, NULL) ON CONFLICT DO NOTHING", values) > 0

    @reads
    def controlled(self, tx: Tx, run_ids: Sequence[str]) -> builtins.list[str]:
        """Which of these runs have controls that nobody has taken."""
        sql = f"SELECT DISTINCT run_id FROM run_controls WHERE taken_at IS NULL AND run_id IN ({placeholders(run_ids)})"
        return [row[0] for row in tx.rows(sql, run_ids)]

    @writes
    def take_controls(self, tx: Tx, run_id: str) -> builtins.list[Control]:
        """Take the pending controls, oldest first."""
        sql = "UPDATE run_controls SET taken_at = ? WHERE run_id = ? AND taken_at IS NULL RETURNING *"
        rows = sorted(tx.rows(sql, (time.time(), run_id)), key=lambda row: (row["created_at"], row["control_id"]))
        return [Control(row["control"], control_id=row["control_id"], **unpack(row["data"])) for row in rows]

    # --- retention ----------------------------------------------------------------------------------------------

    @blocks
    def sweep(
        self, run_days: Mapping[str, float], log_hours: Mapping[str, float], max_stored: int, now: float | None = None
    ) -> dict[str, int]:
        """Delete what has passed its retention time, a few hundred rows at a time. Both tables are by kind. `run_days`
        has `""` for all others; a kind without hours keeps its log as long as the run. The newest `max_stored` of each
        owner and kind stay, as do runs with an unexpired idempotency record."""
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
        expired = tx.rows(
            f"SELECT run_id FROM runs WHERE kind = ? AND ended_at < ? AND NOT log_expired AND {_UNCLAIMED} LIMIT ?",
            (kind, before, now, SWEEP_BATCH_ROWS),
        )
        for (run_id,) in expired:
            tx.execute("DELETE FROM run_log WHERE run_id = ?", (run_id,))
            tx.execute("DELETE FROM run_partials WHERE run_id = ?", (run_id,))
            tx.execute("UPDATE runs SET log_expired = TRUE, first_events = NULL WHERE run_id = ?", (run_id,))
        return len(expired)

    @writes
    def _drop_runs(self, tx: Tx, kind: str, other_kinds: tuple[str, ...], before: float, now: float) -> int:
        condition = "kind = ?" if kind else f"kind NOT IN ({placeholders(other_kinds)})"
        return tx.change(
            "DELETE FROM runs WHERE run_id IN "
            f"(SELECT run_id FROM runs WHERE {condition} AND ended_at < ? AND {_UNCLAIMED} LIMIT ?)",
            (*((kind,) if kind else other_kinds), before, now, SWEEP_BATCH_ROWS),
        )

    @writes
    def _drop_surplus(self, tx: Tx, max_stored: int, now: float) -> int:
        return tx.change(
            "DELETE FROM runs WHERE run_id IN (SELECT run_id FROM (SELECT run_id, ended_at, row_number() OVER "
            "(PARTITION BY owner, kind ORDER BY created_at DESC, rowid DESC) AS place FROM runs) AS runs "
            f"WHERE place > ? AND ended_at IS NOT NULL AND {_UNCLAIMED} LIMIT ?)",
            (max_stored, now, SWEEP_BATCH_ROWS),
        )


def _listed_by(owner: str | None, session_id: str | None) -> tuple[str, str]:
    """The index to list runs by, and its order."""
    if session_id is not None:
        return index_hint("runs_session"), "created_at, rowid"
    if owner is not None:
        return index_hint("runs_owner"), "created_at, run_id"
    return index_hint(""), "rowid"  # rowid is the order of insertion


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
    """`opened`: the owner of its session has been checked."""
    if not opened:
        check_owner(tx, spec.session_id, spec.owner)
    now = time.time()
    parent = spec.parent or (None, None)
    if state is not None and state.ended:  # it is never resumed, and its messages are in its session
        spec = spec.replace(history=spec.history and [], results=())
    fields = {name: value for name, value in spec.stored().items() if name not in _SPEC_COLUMNS}
    instructions = clean(fields.pop("instructions")) if spec.instructions else ""
    values = (
        *(getattr(spec, name) for name in _SPEC_COLUMNS),
        now,
        this_process(),
        *parent,
        put(tx, instructions) if instructions else None,
        pack(fields),
        first_events,
        first_row,
        *_columns(state or RunState(), updated_at or now),
    )
    tx.execute(_CREATE, values)


def _leased_run(tx: Tx, run_id: str, token: int | None) -> Record:
    run = tx.row(_LEASED_STATE, (run_id,))
    if run is None:
        raise LeaseLost(f"There is no run {run_id} any more.")
    _check_token(run_id, token, run["lease_token"])
    return run


def _check_token(run_id: str, token: int | None, current: int | None) -> None:
    if token is not None and token != current:
        raise LeaseLost(f"The turn of {run_id} no longer holds its session.")


def set_session_id(session_id: str, events: Sequence[Event], rows: Sequence[Row]) -> None:
    for row in rows:
        row.session_id = session_id
    for event in events:
        if event.type == "run.started":
            event.data["session_id"] = session_id


def _open_session(tx: Tx, session: JsonMapping, rows: Sequence[Row], usage: JsonMapping | None) -> bool:
    """Open the session of a turn; True if it was created, beginning with these rows. With `usage` it is known to be
    new."""
    fields = {name: value for name, value in session.items() if name not in ("id", "source")}
    parent = fields.get("parent_session_id")
    if parent is not None and not exists(tx, parent):
        del fields["parent_session_id"]
    counters = messages.tally([row for row in rows if row.session_id == session["id"]])
    if usage is not None:
        make_session(tx, session["id"], session["source"], fields, counters={**counters, **usage})
        return True
    check_owner(tx, session["id"], fields.get("owner") or "default")
    if open_session(tx, session["id"], session["source"], fields, reopen=True, counters=counters):
        return True
    if not rows:
        messages.touch_session(tx, session["id"])
    return False


def _state_of(run: Record) -> RunState:
    route, open_state = unpack(run["route"]) or {}, unpack(run["open"]) or {}
    return RunState(
        status=run["status"],
        stopping=bool(open_state.get("stopping")),
        approvals=open_state.get("approvals", {}),
        questions=open_state.get("questions", {}),
        controls=set(open_state.get("controls", ())),
        started_at=run["started_at"],
        ended_at=run["ended_at"],
        last_event=run["last_event"],
        last_seq=run["last_seq"],
        model=route.get("model", ""),
        provider=route.get("provider", ""),
        failure=run["failure"] or "",
        code=open_state.get("code", ""),
        error=run["error"] or "",
        usage=unpack(run["usage"]) or {},
        final_row=run["final_row"],
    )


def _put_state(
    tx: Tx, run_id: str, state: RunState, events: Sequence[Event], first_row: int | None, *, status_changed: bool
) -> None:
    """`status_changed`: the status or the end differs from the stored one."""
    resumes = sum(event.type == "run.resumed" for event in events)
    columns = _columns(state, events[-1].ts)
    values = (*(columns if status_changed else columns[2:]), resumes, first_row, run_id)
    tx.execute(_PUT_STATE if status_changed else _PUT_PROGRESS, values)


def _columns(state: RunState, updated_at: float) -> tuple[Any, ...]:
    open_state = {
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
        pack(open_state) if any(open_state.values()) else None,
        updated_at,
    )


def _record_of(row: Record) -> RunRecord:
    spec = {**{name: row[name] for name in _SPEC_COLUMNS}, **unpack(row["spec"])}
    if row["instructions"] is not None:
        spec["instructions"] = row["instructions"]
    return RunRecord(
        RunSpec.from_stored(spec),
        _state_of(row),
        row["created_at"],
        row["updated_at"],
        row["resumes"],
        bool(row["log_expired"]),
        row["holder"],
    )


# --- events and partials ---------------------------------------------------------------------------------------------


def _pack_events(events: Sequence[Event]) -> str:
    text = pack([(event.seq, event.ts, event.type, event.step, event.data) for event in events])
    if "\ufffd" in text:  # what is shown is what is stored
        for event, (*_, data) in zip(events, unpack(text), strict=True):
            event.data = data
    return text


def _events(tx: Tx, run_id: str, after: int = 0) -> Iterator[Event]:
    """The log, starting with the commit that goes beyond `after`."""
    first = tx.rows("SELECT first_events FROM runs WHERE run_id = ?", (run_id,))
    sql = "SELECT events FROM run_log WHERE run_id = ? AND last_seq > ? ORDER BY last_seq"
    for (events,) in chain(first, tx.each(sql, (run_id, after))):
        for seq, ts, kind, step, data in unpack(events) or ():
            yield Event(run_id, kind, step, data, seq, ts)


def _partials(tx: Tx, run_id: str) -> list[Partial]:
    """The open streams, joined from their pieces, in the order of their last deltas."""
    pieces_by_stream: dict[str, list[Any]] = {}
    for row in tx.rows('SELECT * FROM run_partials WHERE run_id = ? ORDER BY stream_id, "offset"', (run_id,)):
        pieces_by_stream.setdefault(row["stream_id"], []).append(row)
    partials = [
        Partial(
            stream_id,
            pieces[0]["kind"],
            pieces[0]["step"],
            "".join(piece["text"] for piece in pieces),
            Cuts.join([piece["cuts"] for piece in pieces]),
            pieces[-1]["last_seq"],
            pieces[0]["form"],
        )
        for stream_id, pieces in pieces_by_stream.items()
    ]
    return sorted(partials, key=lambda partial: partial.last_seq)


def _put(tx: Tx, run_id: str, partials: Sequence[Partial]) -> None:
    """Write pieces. One at offset 0 replaces what is stored of its stream."""
    for p in partials:
        if not p.offset:
            tx.execute("DELETE FROM run_partials WHERE run_id = ? AND stream_id = ?", (run_id, p.stream_id))
    tx.many(
        _PARTIAL,
        [(run_id, p.stream_id, p.offset, p.kind, p.step, p.form, p.last_seq, p.cuts, clean(p.text)) for p in partials],
    )
