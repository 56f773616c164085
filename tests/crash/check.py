"""Invariants after a kill: everything reported is stored, and nothing is stored partially."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hermes.core.events import Event, fold
from hermes.store.responses import ResponseStore
from hermes.store.stores import open_store
from store.tools import Json, mode

from .writer import TRUNK, TRUNK_ROWS, digest

# The fields of events in which rows are announced.
ANNOUNCED = ("row", "user_row", "partial_row")


@dataclass
class Ledger:
    """What the writers have reported so far."""

    rows: dict[int, tuple[str, str]] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)
    events: dict[tuple[str, int], Json] = field(default_factory=dict)
    partials: dict[tuple[str, str], Json] = field(default_factory=dict)
    controls: set[tuple[str, str]] = field(default_factory=set)
    branches: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    deleted_sessions: set[str] = field(default_factory=set)
    deleted_runs: set[str] = field(default_factory=set)
    brief: dict[str, str] = field(default_factory=dict)
    summaries: set[tuple[str, str]] = field(default_factory=set)
    tokens: dict[str, int] = field(default_factory=dict)
    claims: dict[str, bool] = field(default_factory=dict)
    responses: dict[str, list[str]] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)

    def take(self, line: Json) -> None:
        """Note one line of a writer."""
        if line.get("doing") == "delete":
            self.leaving.add(line["session"])
            return
        getattr(self, f"_{line['did']}", lambda _: None)(line)

    def _message(self, line: Json) -> None:
        self.rows[line["row"]] = (line["session"], line["text"])

    def _lease(self, line: Json) -> None:
        self.tokens[line["name"]] = max(line["token"], self.tokens.get(line["name"], 0))

    def _run(self, line: Json) -> None:
        self.runs.add(line["run"])
        self.fresh.add(line["run"])

    def _event(self, line: Json) -> None:
        self.events[line["run"], line["seq"]] = line

    def _partial(self, line: Json) -> None:
        self.partials[line["run"], line["stream"]] = line

    def _control(self, line: Json) -> None:
        self.controls.add((line["run"], line["control"]))

    def _branch(self, line: Json) -> None:
        self.branches.add(line["session"])

    def _brief(self, line: Json) -> None:
        self.brief[line["session"]] = line["run"]

    def _delete(self, line: Json) -> None:
        self.deleted_sessions.add(line["session"])
        if line["session"] in self.brief:
            self.deleted_runs.add(self.brief[line["session"]])

    def _compact(self, line: Json) -> None:
        self.summaries.add((line["session"], line["text"]))

    def _claim(self, line: Json) -> None:
        self.claims[line["key"]] = False

    def _answer(self, line: Json) -> None:
        self.claims[line["key"]] = True

    def _response(self, line: Json) -> None:
        self.responses[line["id"]] = line["texts"]


def check(folder: Path, ledger: Ledger) -> None:
    """Open what a killed writer has left, and look at all of it."""
    path = folder / "state.db"
    if not path.exists():
        assert ledger == Ledger(), "something was told before there was a file"
        return
    with contextlib.closing(open_store(f"sqlite://{path}")) as store:
        assert store.sessions.notices == []
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            is_sound(db)
            if not db.execute("SELECT 1 FROM sessions WHERE id = ?", (TRUNK,)).fetchone():
                assert ledger == Ledger(), "something was told before the first session was there"
                return
            messages_are_there(db, ledger)
            logs_and_rows_agree(db, ledger)
            branches_are_whole(db, ledger)
            compactions_are_whole(db, ledger)
            claims_are_there(db, ledger)
        for run_id in ledger.fresh:
            replay_is_in_order(store, ledger, run_id)
        leases_have_lapsed(store, ledger)
        ledger.fresh.clear()
    responses_are_whole(folder / "response_store.db", ledger)
    assert {file.name: oct(mode(file)) for file in folder.iterdir() if mode(file) != 0o600} == {}


def is_sound(db: sqlite3.Connection) -> None:
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert db.execute("PRAGMA foreign_key_check").fetchall() == []
    db.execute("INSERT INTO messages_fts(messages_fts, rank) VALUES ('integrity-check', 1)")


def stored_rows(db: sqlite3.Connection, ids: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Session and digest of these rows, as far as they are there."""
    wanted = json.dumps(list(ids))
    rows = db.execute(
        "SELECT id, session_id, content FROM messages WHERE id IN (SELECT value FROM json_each(?))", (wanted,)
    )
    return {row: (session, digest(content)) for row, session, content in rows}


def messages_are_there(db: sqlite3.Connection, ledger: Ledger) -> None:
    rows = stored_rows(db, ledger.rows)
    lost = {row: stored for row, stored in ledger.rows.items() if rows.get(row) != stored}
    assert lost == {}, "rows that were told are not there, or are others"
    counted = db.execute(
        "SELECT sessions.id, message_count, total(NOT messages.model_only AND (messages.active OR messages.compacted))"
        " FROM sessions LEFT JOIN messages ON session_id = sessions.id GROUP BY sessions.id"
    ).fetchall()
    assert [row for row in counted if row[1] != row[2]] == [], "a count and its rows differ"


def logs_and_rows_agree(db: sqlite3.Connection, ledger: Ledger) -> None:
    events: dict[str, list[Event]] = defaultdict(list)
    announced: set[tuple[str, int]] = set()
    completed: set[tuple[str, str]] = set()
    for run, seq, ts, kind, step, data in db.execute("SELECT run_id, seq, ts, type, step, data FROM run_events"):
        event = Event(run, kind, step, json.loads(data), seq, ts)
        events[run].append(event)
        announced |= {(run, event.data[name]) for name in ANNOUNCED if event.data.get(name) is not None}
        if kind == "message.completed":
            completed.add((run, event.data["message_id"]))
    rows = set(db.execute("SELECT run_id, id FROM messages WHERE run_id IS NOT NULL"))
    assert announced == rows, "an event without its row, or a row without its event"

    runs = dict(db.execute("SELECT run_id, status FROM runs"))
    assert set(events) <= set(runs)
    assert ledger.runs <= set(runs), "a run that was told is not there"
    folded = {run: fold(sorted(events[run], key=lambda event: event.seq)).status for run in runs}
    assert runs == folded, "a status is not the fold of its log"

    numbers = {(event.run_id, event.seq): event for log in events.values() for event in log}
    for key, recorded in ledger.events.items():
        assert key in numbers, f"an event that was told is not there: {recorded}"
        data = numbers[key].data
        assert numbers[key].type == recorded["type"]
        assert recorded["row"] in (None, data.get("row"), data.get("user_row"))
    texts = {event["row"]: event["text"] for event in ledger.events.values() if event["row"] is not None}
    assert {row: text for row, (_, text) in stored_rows(db, texts).items()} == texts

    partials = {
        (run, stream): (seq, text)
        for run, stream, seq, text in db.execute("SELECT run_id, stream_id, last_seq, text FROM run_partials")
    }
    assert not set(partials) & completed, "text is open and complete at once"
    for key, recorded in ledger.partials.items():
        if key not in completed:
            assert partials.get(key) == (recorded["seq"], recorded["text"]), "open text that was told is not there"
    controls = set(db.execute("SELECT run_id, control_id FROM run_controls"))
    assert ledger.controls <= controls


def branches_are_whole(db: sqlite3.Connection, ledger: Ledger) -> None:
    counts = dict(
        db.execute(
            "SELECT sessions.id, count(messages.id) FROM sessions LEFT JOIN messages ON session_id = sessions.id"
            " WHERE kind = 'branch' GROUP BY sessions.id"
        )
    )
    assert set(counts.values()) <= {TRUNK_ROWS}, "a fork has a part of its rows"
    assert ledger.branches - ledger.leaving <= set(counts), "a fork that was told is not there"
    sessions = {row[0] for row in db.execute("SELECT id FROM sessions")}
    assert not ledger.deleted_sessions & sessions, "what was deleted is there again"
    for table, column in (("messages", "session_id"), ("runs", "session_id")):
        remaining = {row[0] for row in db.execute(f"SELECT DISTINCT {column} FROM {table}")}
        assert not ledger.deleted_sessions & remaining, f"what was deleted has left something in {table}"
    logs = {row[0] for row in db.execute("SELECT DISTINCT run_id FROM run_events")}
    assert not ledger.deleted_runs & logs


def compactions_are_whole(db: sqlite3.Connection, ledger: Ledger) -> None:
    pairs: set[tuple[str, str]] = set()
    sessions: dict[str, list[Any]] = defaultdict(list)
    for session, *row in db.execute(
        "SELECT session_id, id, content, active, compacted, model_only FROM messages"
        " WHERE session_id GLOB 'compacted-*' ORDER BY coalesce(position, id)"
    ):
        sessions[session].append(row)
    for session, rows in sessions.items():
        summaries = {row[0]: row[1] for row in rows if row[1].startswith("summary ")}
        pairs |= {(session, digest(text)) for text in summaries.values()}
        last = max(summaries, default=0)
        begins = [summaries[last], "Yes."] if summaries else []
        later = [row[1] for row in rows if not row[4] and row[0] > last]
        assert [row[1] for row in rows if row[2]] == [*begins, *later], "a compaction has a part of its rows"
        texts = [row for row in rows if not row[4]]
        assert all(row[2:4] == [int(row[0] > last), int(row[0] < last)] for row in texts), (
            "a row is gone, or twice there"
        )
    assert ledger.summaries <= pairs


def claims_are_there(db: sqlite3.Connection, ledger: Ledger) -> None:
    bodies = dict(db.execute("SELECT key, body FROM idempotency"))
    for key, is_answered in ledger.claims.items():
        assert key in bodies
        assert bodies[key] in ((key.encode(),) if is_answered else (None, b"", key.encode()))


def replay_is_in_order(store: Any, ledger: Ledger, run_id: str) -> None:
    """The log as a reader gets it: in order, whole, and the texts rebuilt from their deltas."""
    events = store.runs.read(run_id, 0, 1000)
    assert all(a.seq < b.seq for a, b in pairwise(events))
    seqs = {event.seq for event in events}
    assert {seq for run, seq in ledger.events if run == run_id} <= seqs
    texts: dict[str, str] = defaultdict(str)
    for event in events:
        if event.type == "text.delta":
            assert event.data["offset"] == len(texts[event.data["message_id"]])
            texts[event.data["message_id"]] += event.data["text"]
        if event.type == "message.completed":
            assert event.data["text_length"] == len(texts[event.data["message_id"]])
    for (run, stream), partial in ledger.partials.items():
        if run == run_id:
            assert texts[stream] == partial["text"]
    half = events[len(events) // 2].seq if events else 0
    assert [e.as_dict() for e in store.runs.read(run_id, half, 1000)] == [e.as_dict() for e in events if e.seq > half]


def leases_have_lapsed(store: Any, ledger: Ledger) -> None:
    """The killed process holds nothing, and no token is given twice."""
    for name in ledger.tokens:
        assert store.leases.holder(name) is None
        token = store.leases.acquire(name, "check", 60)
        assert token > ledger.tokens[name]
        store.leases.release(name, token)
        ledger.tokens[name] = token


def responses_are_whole(path: Path, ledger: Ledger) -> None:
    if not path.exists():
        assert not ledger.responses
        return
    with contextlib.closing(ResponseStore(max_size=40, db_path=str(path))) as store:
        len(store)  # the file is opened, and made whole, by the first who asks something of it
        with contextlib.closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            ids = [row[0] for row in db.execute("SELECT id FROM responses ORDER BY used")]
            item_count = db.execute("SELECT count(*) FROM response_items").fetchone()[0]
            named = {row[0] for row in db.execute("SELECT response_id FROM conversations")}
        assert named <= set(ids), "a name leads nowhere"
        items: set[str] = set()
        for name in ids:
            record = store.get(name)
            assert record is not None, store.notices
            texts = [digest(item["content"]) for item in record["conversation_history"]]
            assert texts == ledger.responses.get(name, texts)
            items.update(texts)
        assert len(items) == item_count, "an item is kept for nobody"
        assert store.notices == []
        assert len(ids) <= 40
        if ledger.responses:
            assert next(reversed(ledger.responses)) in ids, "the response told last is not there"
