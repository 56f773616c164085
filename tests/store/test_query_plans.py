"""Quick reads find their rows by an index, in its order; what cannot is read by the slow readers."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes.store.idempotency import Idempotency
from hermes.store.jobs import Jobs
from hermes.store.leases import Leases
from hermes.store.responses import ResponseStore
from hermes.store.runs import Runs
from hermes.store.sessions import SessionDB
from hermes.store.sign_ins import SignIns
from hermes.store.stores import Store, open_store
from hermes.store.usage_days import UsageDays

from .conftest import create_conversation
from .tools import Turn, look, raw, url

PARTS: dict[str, Any] = {
    "sessions": SessionDB,
    "runs": Runs,
    "leases": Leases,
    "idempotency": Idempotency,
    "jobs": Jobs,
    "sign_ins": SignIns,
    "usage_days": UsageDays,
    "responses": ResponseStore,
}
# They grow with everything that is said.
LARGE = {
    *("sessions", "messages", "runs", "run_log", "run_partials", "blobs", "message_blobs", "session_model_usage"),
    *("compactions", "idempotency", "responses", "response_items", "conversations", "conversation_items"),
}
Read = Callable[[Store], Any]


def options(**values: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Every combination of these; None is left out."""
    return [
        {name: value for name, value in zip(values, chosen, strict=True) if value is not None}
        for chosen in itertools.product(*values.values())
    ]


SESSION_FILTERS = options(
    owner=(None, "default", "guest"),
    source=(None, "cli"),
    pinned=(None, True),
    archived=(None, True, "all"),
    include_children=(None, True),
    session_key=(None, "k"),
)
SESSION_PAGES = options(order=("last_active", "started_at"), cursor=(None, "s1"))
RUN_FILTERS = options(
    owner=("default", "guest", None),
    session_id=(None, "s1"),
    statuses=(None, ["failed"], ["queued", "interrupted"]),
    kinds=(None, ["chat", "run"]),
    job_id=(None, "j"),
    before=(None, "latest"),
)


def run_id(store: Store) -> str:
    record = store.runs.newest("s1")
    assert record is not None
    return record


def run_page(filters: dict[str, Any]) -> Read:
    def read(store: Store) -> Any:
        place = {"before": store.runs.newest("g1" if filters.get("owner") == "guest" else "s1")}
        return store.runs.page(**{"owner": None, **filters, **(place if "before" in filters else {})}, limit=50)

    return read


QUICK: dict[str, list[Read]] = {
    "sessions.get_session": [lambda s: s.sessions.get_session("s1")],
    "sessions.list_sessions": [
        lambda s, filters={**filters, **page}: s.sessions.list_sessions(**filters)
        for filters in SESSION_FILTERS
        for page in SESSION_PAGES
    ],
    "sessions.count_sessions": [
        lambda s, filters=params: s.sessions.count_sessions(**filters) for params in SESSION_FILTERS
    ],
    "sessions.session_page": [
        lambda s, filters={**filters, **page}: s.sessions.session_page(
            **{"cursor": None, **filters}, limit=51, offset=0
        )
        for filters in SESSION_FILTERS
        if "session_key" not in filters
        for page in SESSION_PAGES
    ],
    "sessions.message_page": [lambda s: s.sessions.message_page("s1", limit=5, order="desc")],
    "sessions.around_sessions": [lambda s: s.sessions.around_sessions(["s1", "s2"])],
    "sessions.get_messages": [
        lambda s, options=window: s.sessions.get_messages("s1", **options)
        for window in options(
            include_inactive=(False, True),
            limit=(None, 5),
            before_id=(None, 9),
            after_id=(None, 1),
            order=("asc", "desc"),
        )
    ],
    "sessions.count_messages": [lambda s, all=all: s.sessions.count_messages("s1", all) for all in (False, True)],
    "sessions.get_messages_around": [lambda s: s.sessions.get_messages_around("s1", 1)],
    "sessions.get_messages_as_conversation": [lambda s: s.sessions.get_messages_as_conversation("s1")],
    "sessions.conversation_until": [lambda s: s.sessions.conversation_until("s1", "r", with_it=True)],
    "sessions.find_compaction": [lambda s: s.sessions.find_compaction("default", ["d"])],
    "sessions.bind_session": [lambda s: s.sessions.bind_session("b", [{"role": "user", "content": "hi"}])],
    "sessions.get_usage": [lambda s: s.sessions.get_usage("s1")],
    "sessions.list_files": [lambda s: s.sessions.list_files("s1")],
    "sessions.get_file": [lambda s: s.sessions.get_file("s1", "f")],
    "sessions.pending_calls": [lambda s: s.sessions.pending_calls(["c"])],
    "sessions.get_meta": [lambda s: s.sessions.get_meta("m")],
    "sessions._is_recorded": [lambda s: s.sessions._is_recorded("x")],
    "runs.read": [lambda s: s.runs.read(run_id(s), 0, 1), lambda s: s.runs.read(run_id(s), 0, 100)],
    "runs.durable": [lambda s: s.runs.durable("r")],
    "runs.partials": [lambda s: s.runs.partials("r")],
    "runs.rows": [lambda s: s.runs.rows("r")],
    "runs.row": [lambda s: s.runs.row("r", 1)],
    "runs.get": [lambda s: s.runs.get("r")],
    "runs.list": [
        lambda s, options=filters: s.runs.list(**options)
        for filters in options(
            owner=(None, "default"),
            session_id=(None, "s1"),
            status=(None, "failed"),
            kind=(None, "run"),
            before=(None, "r"),
        )
    ],
    "runs.newest": [lambda s: s.runs.newest("s1")],
    "runs.page": [run_page(filters) for filters in RUN_FILTERS],
    "runs.unfinished": [lambda s: s.runs.unfinished(), lambda s: s.runs.unfinished("s1")],
    "runs.carrier": [lambda s: s.runs.carrier(run_id(s))],
    "runs.controlled": [lambda s: s.runs.controlled(["r", "q"])],
    "leases.holder": [lambda s: s.leases.holder("session:s1")],
    "jobs.get": [lambda s: s.jobs.get("j")],
    "jobs.list": [lambda s: s.jobs.list(), lambda s: s.jobs.list(owner="default", include_disabled=False)],
    "jobs.due": [lambda s: s.jobs.due(1.0)],
    "sign_ins.get": [lambda s: s.sign_ins.get("t")],
    "responses.known": [lambda s: s.responses.known(["resp_1", "resp_2"])],
    "responses.get_conversation": [lambda s: s.responses.get_conversation("c", "default")],
    "responses.get_conversation_object": [lambda s: s.responses.get_conversation_object("c", "default")],
    "responses.conversation_items": [lambda s: s.responses.conversation_items("c", "default")],
    "responses.conversation_items_since": [lambda s: s.responses.conversation_items_since("c", "default", "r")],
    "responses.suspended": [lambda s: s.responses.suspended("c", "default")],
}
SLOW: dict[str, list[Read]] = {
    "sessions.branches": [lambda s: s.sessions.branches("s1")],
    "usage_days.sums": [lambda s: s.usage_days.sums(0, ["day"])],
    "sessions.count_turns": [lambda s: s.sessions.count_turns(["s1"])],
    "sessions.search_page": [lambda s: s.sessions.search_page("hi")],
    "sessions.search_messages": [lambda s: s.sessions.search_messages("hi")],
    "sessions.count_matches": [lambda s: s.sessions.count_matches("hi")],
    "sessions.search_titles": [lambda s: s.sessions.search_titles("hi")],
    "sessions.list_sessions": [
        lambda s: s.sessions.list_sessions(search="hi"),
        lambda s: s.sessions.list_sessions(None, "/work"),
    ],
    "sessions.count_sessions": [
        lambda s: s.sessions.count_sessions(search="hi"),
        lambda s: s.sessions.count_sessions(cwd_prefix="/work"),
    ],
    "sessions.resolve_session_id": [lambda s: s.sessions.resolve_session_id("s")],
    "sessions.export_session": [lambda s: s.sessions.export_session("s1")],
    "runs.unfinished_counts": [lambda s: s.runs.unfinished_counts()],
    "runs.any_queued": [lambda s: s.runs.any_queued()],
    "runs.queued": [lambda s: s.runs.queued(1e12)],
    "runs.left_behind": [lambda s: s.runs.left_behind()],
    "leases.holders": [lambda s: s.leases.holders()],
    "sessions._ids": [lambda s: s.sessions._ids(None, None)],
    "sessions.stateless_sessions": [lambda s: s.sessions.stateless_sessions(1e12)],
    "sessions._unused": [lambda s: s.sessions._unused(1e12)],
    "sessions._prunable": [lambda s: s.sessions._prunable("1", [])],
    "responses.unfinished": [lambda s: s.responses.unfinished()],
    "responses.find_items": [lambda s: s.responses.find_items(["i"], "default")],
}


@pytest.fixture(scope="module", params=["new", "analyzed"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Sessions of one owner and a few of another; with statistics, the planner knows that."""
    folder = tmp_path_factory.mktemp("home")
    with contextlib.closing(open_store(url(folder / "state.db"))) as store:
        for n in range(200):
            create_conversation(store.sessions, f"s{n}", "hi", "hello", title=f"title {n}")
        for n in range(3):
            create_conversation(store.sessions, f"g{n}", "hi", owner="guest")
        for session_id, owner in [*((f"s{n % 12}", "default") for n in range(60)), ("g1", "guest")]:
            turn = Turn(store, session_id, owner=owner)
            turn.begin()
            turn.complete("m", "Noon.")
            turn.end()
        store.responses.put("resp_1", {"response": {"status": "completed"}, "conversation_history": []})
    if request.param == "analyzed":
        for name in ("state.db", "response_store.db"):
            with raw(folder / name) as db:
                db.execute("ANALYZE")
    with contextlib.closing(open_store(url(folder / "state.db"))) as store:
        yield store


def statements(store: Store, read: Read) -> tuple[list[tuple[Path, str]], list[tuple[Path, str]]]:
    """What a read asks of the databases, by quick readers and by slow ones."""
    quick: list[tuple[Path, str]] = []
    slow: list[tuple[Path, str]] = []
    with contextlib.ExitStack() as stack:
        for engine in (store.engine, store.responses.engine):
            assert engine.path is not None
            for readers, statements in ((engine._readers, quick), (engine._slow_readers, slow)):
                with readers.connection():  # there is an idle one from here on
                    pass
                [connection] = readers.idle

                def note(sql: str, recorded: list[tuple[Path, str]] = statements, path: Path = engine.path) -> None:
                    recorded.append((path, sql))

                connection.set_trace_callback(note)
                stack.callback(connection.set_trace_callback, None)
        read(store)
    return tuple(
        [statement for statement in group if statement[1].startswith(("SELECT", "WITH"))] for group in (quick, slow)
    )  # type: ignore[return-value]


def faults(path: Path, sql: str) -> list[str]:
    """What of a statement's plan grows with the database."""
    plan = [row[3] for row in look(path, f"EXPLAIN QUERY PLAN {sql}")]
    scanned = [line for line in plan if (match := re.match(r"SCAN (\w+)", line)) and match[1] in LARGE]
    by_rowid = " LIMIT " in sql and "ORDER BY rowid DESC" in sql
    # A page of a list is a part of its index, a total may be all of it; runs without an end are few.
    bad = [
        line
        for line in scanned
        if not ("COVERING INDEX" in line and "count(*)" in sql)
        and not ("USING INDEX" in line and (" LIMIT " in sql or "runs_unfinished" in line))
        and not by_rowid
    ]
    sorts = [line for line in plan if "TEMP B-TREE" in line and LARGE & set(re.findall(r"\w+", sql))]
    totals = [line for line in plan if "SELECT count(*) FROM sessions" in sql and "COVERING" not in line]
    totals += [
        line
        for line in plan
        if "SELECT count(*) FROM runs" in sql and "COVERING" not in line and "(session_id=?)" not in line
    ]
    return [f"{fault} in {sql}" for fault in (*bad, *sorts, *totals)]


@pytest.mark.parametrize("name", QUICK)
def test_quick_read_neither_scans_nor_sorts_a_large_table(store: Store, name: str) -> None:
    for read in QUICK[name]:
        quick, slow = statements(store, read)
        assert quick, "this read was not done by a quick reader"
        assert slow == []
        assert [fault for path, sql in quick for fault in faults(path, sql)] == []


@pytest.mark.parametrize("name", SLOW)
def test_slow_read_takes_no_quick_reader(store: Store, name: str) -> None:
    for read in SLOW[name]:
        quick, slow = statements(store, read)
        assert (quick, bool(slow)) == ([], True)


def test_query_plan_test_covers_every_read() -> None:
    reads = {
        f"{part}.{name}"
        for part, kind in PARTS.items()
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if "read_soon" in getattr(getattr(method, "soon", None), "__code__", reads_nothing.__code__).co_names
    }
    assert reads == QUICK.keys() | SLOW.keys()


def reads_nothing() -> None:
    """What a method has that is not read by a transaction of its own."""


def test_quick_readers_never_run_full_text_search(store: Store) -> None:
    for name, reads in QUICK.items():
        for path, sql in statements(store, reads[0])[0]:
            assert not re.search(r"\b(MATCH|LIKE|messages_fts)\b", sql), (name, path)


def test_number_of_indexes_is_fixed(store: Store) -> None:
    """Each is written for every new row: a new one takes the place of another."""
    assert store.path is not None
    counts = look(store.path, "SELECT tbl_name, count(*) FROM sqlite_master WHERE type = 'index' GROUP BY 1")
    assert {name: count for name, count in counts if name in ("sessions", "messages", "runs")} == {
        "sessions": 7,
        "messages": 1,
        "runs": 4,
    }


def test_run_list_pagination_order_is_independent_of_filters(store: Store) -> None:
    def pages(**filters: Any) -> list[str]:
        ids: list[str] = []
        while True:
            before = {"before": ids[-1]} if ids else {}
            records, _, total = store.runs.page(**{"owner": None, **filters, **before}, limit=7)
            ids += [record.spec.run_id for record in records]
            if not records:
                assert len(ids) == total
                return ids

    everybody, mine = pages(), pages(owner="default")
    assert [run_id for run_id in everybody if run_id in mine] == mine
    assert len(everybody) == len(mine) + 1 == 61
    assert pages(owner="default", session_id="s3") == [run_id for run_id in mine if run_id in pages(session_id="s3")]
    assert pages(session_id="s3")[0] == store.runs.newest("s3")


def test_run_progress_updates_no_indexed_column(tmp_path: Path) -> None:
    """SQLite writes an index again for every update that sets one of its columns, even to what it was."""
    statements_run: list[str] = []
    with contextlib.closing(open_store(url(tmp_path / "state.db"))) as store:
        turn = Turn(store, "s")
        turn.begin()
        store.engine.exclusive(lambda db: db.set_trace_callback(statements_run.append))
        turn.complete("m", "Noon.")
        [update] = [sql for sql in statements_run if sql.startswith("UPDATE runs")]
        assert not re.search(r"\b(status|ended_at|owner|created_at|session_id|kind|job_id) =", update)
        turn.end()
        record = store.runs.get(turn.run_id)
    assert record is not None
    assert (record.state.status, record.state.ended_at is not None) == ("completed", True)
