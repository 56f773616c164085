"""Sessions are made, filled, found, changed, ended, deleted and pruned; their ids and titles keep the rules."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hermes.core.events import Event
from hermes.core.spec import RunSpec
from hermes.store import session_rows
from hermes.store.base import Row, SessionBusy, SessionExists, StoreError
from hermes.store.sessions import SessionDB
from hermes.store.stores import Store

from .conftest import BAD_IDS, contents, create_conversation, raw, session_ids

FIELDS: dict[str, Any] = {
    "model": "big",
    "model_config": {"temperature": 0.5, "stop": ["a"]},
    "instructions": "Be brief.",
    "system_prompt": "You are Hermes.",
    "owner": "alice",
    "user_id": "u-1",
    "session_key": "key-1",
    "kind": "job",
    "cwd": "/work",
    "title": "Plans",
    "base_id": "api-1",
}


# ---- making and reading


def test_create_session_under_given_id(db: SessionDB) -> None:
    assert db.create_session("s", "cli", model="m") == "s"
    row = db.get_session("s")
    assert row is not None
    assert (row["id"], row["source"], row["model"]) == ("s", "cli", "m")


@pytest.mark.parametrize("field", FIELDS)
def test_session_field_round_trip(db: SessionDB, field: str) -> None:
    db.create_session("s", "cli", **{field: FIELDS[field]})
    assert db.get_session("s")[field] == FIELDS[field]


def test_session_field_defaults(db: SessionDB) -> None:
    before = time.time()
    db.create_session("s", "cli")
    row = db.get_session("s")
    plain = {"owner": "default", "kind": "root", "title": None, "parent_session_id": None, "end_reason": None}
    counters = ["message_count", "tool_call_count", "api_call_count", "input_tokens", "output_tokens"]
    assert {name: row[name] for name in plain} == plain
    assert [row[name] for name in counters] == [0] * len(counters)
    assert not row["archived"]
    assert before <= row["started_at"] <= row["last_active"] <= time.time()


def test_create_existing_session_fills_only_empty_fields(db: SessionDB) -> None:
    db.create_session("s", "cli", model="first")
    assert db.create_session("s", "cron", model="second", cwd="/w", instructions="x") == "s"
    row = db.get_session("s")
    assert [row[name] for name in ("source", "model", "cwd", "instructions")] == ["cli", "first", "/w", "x"]


def test_create_existing_session_can_be_rejected(db: SessionDB) -> None:
    db.create_session("s", "cli")
    with pytest.raises(SessionExists):
        db.create_session("s", "cli", exist_ok=False, model="m")
    assert db.get_session("s")["model"] is None


def test_unknown_session_is_none(db: SessionDB) -> None:
    assert db.get_session("s") is None


@pytest.mark.parametrize("id", BAD_IDS)
def test_invalid_session_id_is_rejected(db: SessionDB, id: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        db.create_session(id, "cli")
    assert db.count_sessions() == 0


@pytest.mark.parametrize("id", ["a", "x" * 256, "api-12ab", "a.b", "agent:main:7", "searches", "日本", "a b", "%", "'"])
def test_other_session_ids_are_accepted(db: SessionDB, id: str) -> None:
    create_conversation(db, id, "hello")
    assert (db.get_session(id)["id"], contents(db, id), db.resolve_session_id(id)) == (id, ["hello"], id)


@pytest.mark.parametrize("field", ["colour", "id", "title = 'x' --", "message_count"])
def test_unknown_or_read_only_field_is_rejected(db: SessionDB, field: str) -> None:
    db.create_session("s", "cli", title="Plans")
    before = db.get_session("s")
    with pytest.raises((ValueError, TypeError)):
        db.update_session("s", **{field: 1})
    with pytest.raises((ValueError, TypeError)):
        db.create_session("s", "cli", **{field: 1} if field != "id" else {"colour": 1})
    assert db.get_session("s") == before


@pytest.mark.parametrize("id", ["a\ud800", "\x00", "' or 1=1 --", "x" * 100_000])
def test_arbitrary_text_as_id_is_not_found(db: SessionDB, id: str) -> None:
    create_conversation(db, "s", "hi")
    assert (db.get_session(id), db.resolve_session_id(id), db.delete_session(id)) == (None, None, False)
    assert (db.get_messages(id), db.get_messages_as_conversation(id), session_ids(db, search=id)) == ([], [], [])
    assert contents(db, "s") == ["hi"]


def test_parent_cycle_is_tolerated(durable_db: SessionDB) -> None:
    for id in "abc":
        durable_db.create_session(id, "cli", kind="delegate")
    for id, parent in ("ab", "bc", "ca"):
        raw(durable_db, "update sessions set parent_session_id = ? where id = ?", parent, id)
    assert durable_db.delete_session("b") is True
    assert session_ids(durable_db, include_children=True) == []


# ---- finding


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alpha", "alpha"),
        ("alpha-1", "alpha-1"),
        ("b", "beta"),
        ("alpha-", None),
        ("My notes", "gamma"),
        ("My", None),
        ("my-", "alpha-2"),
        ("nothing", None),
        ("", None),
        ("%", None),
        ("_eta", None),
    ],
)
def test_resolve_session_by_id_prefix_or_title(db: SessionDB, text: str, expected: str | None) -> None:
    for id, title in {"alpha": None, "alpha-1": None, "alpha-2": "my-", "beta": None, "gamma": "My notes"}.items():
        db.create_session(id, "cli", title=title)
    assert db.resolve_session_id(text) == expected


def test_ambiguous_prefix_resolves_by_title(db: SessionDB) -> None:
    for id in ("note-1", "note-2"):
        db.create_session(id, "cli")
    db.create_session("other", "cli", title="note")
    assert db.resolve_session_id("note") == "other"


# ---- changing


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"model_config": {"top_p": 1}},
        {"instructions": "New."},
        {"instructions": None},
        {"cwd": "/elsewhere"},
        {"system_prompt": "Assembled.", "prompt_digest": "d1"},
        {"model": "other", "cwd": "/elsewhere"},
    ],
)
def test_update_session_changes_only_given_fields(db: SessionDB, change: dict[str, Any]) -> None:
    db.create_session("s", "cli", **FIELDS)
    before = db.get_session("s")
    db.update_session("s", **change)
    after = db.get_session("s")
    assert {k: v for k, v in after.items() if k != "last_active"} == {
        k: v for k, v in (before | change).items() if k != "last_active"
    }


def test_session_archive_and_unarchive(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.update_session("s", archived=True)
    archived = bool(db.get_session("s")["archived"])
    db.update_session("s", archived=False)
    assert (archived, bool(db.get_session("s")["archived"])) == (True, False)


# ---- ending


def test_first_end_reason_wins(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.end_session("s", "cli_close")
    first = db.get_session("s")
    db.end_session("s", "session_reset")
    assert first["end_reason"] == "cli_close"
    assert first["ended_at"] is not None
    assert db.get_session("s") == first


def test_reopened_session_can_end_again(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.end_session("s", "cli_close")
    db.reopen_session("s")
    row = db.get_session("s")
    assert (row["end_reason"], row["ended_at"]) == (None, None)
    db.end_session("s", "any words of mine")
    assert db.get_session("s")["end_reason"] == "any words of mine"


@pytest.mark.parametrize(("length", "is_valid"), [(200, True), (201, False)])
def test_end_reason_is_limited_to_200_characters(db: SessionDB, length: int, is_valid: bool) -> None:
    db.create_session("s", "cli")
    if not is_valid:
        with pytest.raises(ValueError, match="200"):
            db.end_session("s", "x" * length)
    else:
        db.end_session("s", "x" * length)
    assert (db.get_session("s")["end_reason"] is not None) == is_valid


def started(store: Store, session_id: str) -> RunSpec:
    """A turn that has begun on a session and holds no lease any more."""
    spec = RunSpec(user_message="hi", session_id=session_id)
    store.runs.create(spec)
    token = store.leases.acquire(f"session:{session_id}", "here", 60)
    session = {"id": session_id, "source": "cli"}
    row = Row(session_id, "user", "hi", run_id=spec.run_id)
    event = Event(spec.run_id, "run.started", data={"model": "m", "provider": "p"}, seq=1, ts=time.time())
    store.runs.append(spec.run_id, token, [event], [row], session=session)
    store.leases.release(f"session:{session_id}", token)
    return spec


def test_new_turn_reopens_ended_session(store: Store) -> None:
    store.sessions.create_session("s", "cli")
    store.sessions.end_session("s", "cli_close")
    started(store, "s")
    row = store.sessions.get_session("s")
    assert (row["end_reason"], row["ended_at"]) == (None, None)


# ---- deleting


def test_delete_session_removes_messages(db: SessionDB) -> None:
    create_conversation(db, "s", "apple", "pear")
    create_conversation(db, "other", "apple")
    assert db.delete_session("s") is True
    assert (db.get_session("s"), db.get_messages("s"), session_ids(db)) == (None, [], ["other"])
    assert [row["session_id"] for row in db.search_messages("apple")] == ["other"]


def test_delete_unknown_session_returns_false(db: SessionDB) -> None:
    assert db.delete_session("s") is False


def test_deleted_session_id_can_be_reused(db: SessionDB) -> None:
    create_conversation(db, "s", "old", title="Plans", model="m")
    db.delete_session("s")
    create_conversation(db, "s", "new", title="Plans")
    assert (contents(db, "s"), db.get_session("s")["model"]) == (["new"], None)


def test_delete_session_cascades_to_delegates_only(db: SessionDB) -> None:
    db.create_session("root", "cli")
    db.create_session("delegate", "subagent", kind="delegate", parent_session_id="root")
    create_conversation(db, "grandchild", "apple", kind="delegate", parent_session_id="delegate")
    db.create_session("branch", "cli", kind="branch", parent_session_id="root")
    db.create_session("branch-of-delegate", "cli", kind="branch", parent_session_id="grandchild")
    create_conversation(db, "kept", "apple", kind="delegate", parent_session_id="branch")
    db.delete_session("root")
    assert sorted(session_ids(db, include_children=True)) == ["branch", "branch-of-delegate", "kept"]
    parents = [db.get_session(id)["parent_session_id"] for id in ("branch", "branch-of-delegate", "kept")]
    assert parents == [None, None, "branch"]
    assert [row["session_id"] for row in db.search_messages("apple")] == ["kept"]


def test_delete_session_removes_files_and_usage(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.add_file("s", "a.txt", bytes=1, mime="text/plain", direction="in", path="/nowhere/a.txt")
    db.add_usage("s", {"input_tokens": 7}, "m", "p")
    db.delete_session("s")
    db.create_session("s", "cli")
    assert (db.list_files("s"), db.get_session("s")["input_tokens"], db.export_session("s")["usage"]) == ([], 0, [])


def test_delete_session_leaves_no_rows(durable_db: SessionDB) -> None:
    create_conversation(
        durable_db, "s", [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 2000}}]
    )
    durable_db.add_usage("s", {"input_tokens": 7}, "m", "p")
    durable_db.add_file("s", "a.txt", bytes=1, mime="text/plain", direction="in", path="/nowhere/a.txt")
    durable_db.put_pending_calls("s", "run_1", ["call_1"])
    durable_db.delete_session("s")
    tables = ("sessions", "messages", "blobs", "session_model_usage", "session_files", "pending_calls")
    assert {t: raw(durable_db, f"select count(*) from {t}")[0][0] for t in tables} == dict.fromkeys(tables, 0)


def test_delete_session_removes_home_files_only(home_folder: Path, tmp_path: Path) -> None:
    db = SessionDB()
    received, sandbox = home_folder / "uploads" / "s" / "a.txt", home_folder / "sandbox" / "s" / "home" / "b.txt"
    of_other, mine, linked = home_folder / "uploads" / "t" / "a.txt", tmp_path / "mine.txt", tmp_path / "dir" / "c.txt"
    for file in (received, sandbox, of_other, mine, linked):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    (received.parent / "link").symlink_to(linked.parent)
    for id, file in (("s", received), ("s", mine), ("t", of_other)):
        db.create_session(id, "cli")
        db.add_file(id, file.name, bytes=1, mime="text/plain", direction="in", path=str(file))
    db.delete_session("s")
    db.close()
    assert [received.exists(), sandbox.exists()] == [False, False]
    assert [of_other.exists(), mine.exists(), linked.exists()] == [True, True, True]


def test_deleted_session_text_is_erased_from_file(file_db: SessionDB) -> None:
    create_conversation(file_db, "s", "tellnobody " * 2000)
    file_db.delete_session("s")
    file_db.optimize()
    path = file_db.path
    file_db.close()
    assert b"tellnobody tellnobody" not in path.read_bytes()


def test_delete_of_leased_session_requires_force(store: Store) -> None:
    create_conversation(store.sessions, "s", "hi")
    store.leases.acquire("session:s", "somebody", 60)
    with pytest.raises(SessionBusy):
        store.sessions.delete_session("s")
    assert contents(store.sessions, "s") == ["hi"]
    assert (store.sessions.delete_session("s", force=True), store.sessions.get_session("s")) == (True, None)


def test_delete_after_lease_release(store: Store) -> None:
    store.sessions.create_session("s", "cli")
    token = store.leases.acquire("session:s", "somebody", 60)
    store.leases.release("session:s", token)
    assert store.sessions.delete_session("s") is True


def test_delete_with_live_run_requires_force(store: Store) -> None:
    run = started(store, "s").run_id
    assert store.leases.acquire("session:s", "somebody", 60)
    with pytest.raises(SessionBusy):
        store.sessions.delete_session("s")
    assert store.runs.get(run) is not None
    assert store.sessions.delete_session("s", force=True) is True
    assert (store.sessions.get_session("s"), store.runs.get(run), store.runs.read(run, 0, 10)) == (None, None, [])


def test_orphaned_run_does_not_block_deletion(store: Store) -> None:
    run = started(store, "s").run_id
    assert store.sessions.delete_session("s") is True
    assert store.runs.get(run) is None


def test_finished_run_is_deleted_with_session(store: Store) -> None:
    run = started(store, "s").run_id
    token = store.leases.acquire("session:s", "here", 60)
    event = Event(run, "run.completed", data={"usage": {}, "steps": 1}, seq=2, ts=time.time())
    store.runs.append(run, token, [event])
    store.leases.release("session:s", token)
    assert store.sessions.delete_session("s") is True
    assert (store.runs.get(run), store.runs.read(run, 0, 10)) == (None, [])


def test_busy_delegate_blocks_deletion_of_parent(store: Store) -> None:
    store.sessions.create_session("s", "cli")
    store.sessions.create_session("d", "subagent", kind="delegate", parent_session_id="s")
    store.leases.acquire("session:d", "somebody", 60)
    with pytest.raises(SessionBusy):
        store.sessions.delete_session("s")
    assert sorted(session_ids(store.sessions, include_children=True)) == ["d", "s"]


# ---- pruning


def ended_session(
    db: SessionDB, id: str, messages: int = 1, archived: bool = False, source: str = "cli", **fields: Any
) -> None:
    create_conversation(db, id, *["hi"] * messages, source=source, **fields)
    db.end_session(id, "cli_close")
    if archived:
        db.update_session(id, archived=True)


@pytest.mark.parametrize(
    ("chosen", "pruned"),
    [
        ({}, ["a", "b", "c"]),
        ({"source": "cron"}, ["b"]),
        ({"cwd_prefix": "/work"}, ["a"]),
        ({"title": "eek"}, ["b"]),
        ({"title": "%"}, []),
        ({"model": "ig"}, ["c"]),
        ({"max_messages": 1}, ["a", "b"]),
        ({"max_messages": 3}, ["a", "b", "c"]),
        ({"max_messages": 0}, []),
        ({"archived": True}, ["c"]),
        ({"archived": False}, ["a", "b"]),
        ({"source": "cli", "max_messages": 1}, ["a"]),
        ({"source": "nobody"}, []),
    ],
)
def test_prune_filters_ended_sessions(db: SessionDB, chosen: dict[str, Any], pruned: list[str]) -> None:
    ended_session(db, "a", cwd="/work/x", title="Daily", model="small")
    ended_session(db, "b", source="cron", cwd="/home/work", title="Weekly notes")
    ended_session(db, "c", messages=3, archived=True, model="a-big-one")
    create_conversation(db, "open", "hi", cwd="/work", title="Week", model="big")
    would = db.prune_sessions(older_than_days=0, dry_run=True, **chosen)
    untouched = db.count_sessions(archived="all")
    did = db.prune_sessions(older_than_days=0, **chosen)
    assert (sorted(would), untouched, sorted(did)) == (pruned, 4, pruned)
    assert sorted(session_ids(db, archived="all")) == sorted({"a", "b", "c", "open"} - set(pruned))


def test_prune_uses_last_activity(durable_db: SessionDB) -> None:
    for id, days in {"young": 1, "middle": 40, "old": 100}.items():
        ended_session(durable_db, id)
        raw(
            durable_db,
            "update sessions set started_at = 0, last_active = ? where id = ?",
            time.time() - days * 86400,
            id,
        )
    create_conversation(durable_db, "open", "hi")
    raw(durable_db, "update sessions set last_active = 0 where id = 'open'")
    by_default = durable_db.prune_sessions(dry_run=True)
    assert (by_default, sorted(durable_db.prune_sessions(older_than_days=30))) == (["old"], ["middle", "old"])
    assert sorted(session_ids(durable_db)) == ["open", "young"]


# ---- titles

LONG = "x" * 100


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("Plans", "Plans"),
        ("  Plans \n", "Plans"),
        ("My \t\n  plans", "My plans"),
        ("a\u2003\u00a0b", "a b"),
        ("Pl\u200ba\u200cn\u200ds\ufeff\u2060", "Plans"),
        ("\u202ePlans\u202c", "Plans"),
        ("\u2066Pl\u2069an\u200es\u200f", "Plans"),
        ("Pl\x00an\x1b\x07s\x7f\x85", "Plans"),
        ("日本の計画", "日本の計画"),
        ("مرحبا 🎉", "مرحبا 🎉"),
        (f"  {LONG}\u200b ", LONG),
        ("", None),
        (" \u200b\n ", None),
    ],
)
def test_titles_are_normalised(db: SessionDB, title: str, expected: str | None) -> None:
    db.create_session("a", "cli")
    assert db.set_session_title("a", title) is True
    db.create_session("b", "cli", title=title, owner="bob")
    assert (db.get_session("a")["title"], db.get_session("b")["title"]) == (expected, expected)


def test_title_over_100_characters_is_rejected(db: SessionDB) -> None:
    db.create_session("s", "cli", title="Old")
    with pytest.raises(ValueError, match="100"):
        db.set_session_title("s", "x" * 101)
    with pytest.raises(ValueError, match="100"):
        db.create_session("t", "cli", title="x" * 101)
    assert (db.get_session("s")["title"], db.get_session("t")) == ("Old", None)


def test_taken_title_is_rejected_and_names_holder(db: SessionDB) -> None:
    db.create_session("holder", "cli", title="Plans")
    db.create_session("s", "cli", title="Old")
    with pytest.raises(ValueError, match="holder"):
        db.set_session_title("s", " Plans ")
    with pytest.raises(ValueError, match="holder"):
        db.create_session("t", "cli", title="Plans")
    assert (db.get_session("s")["title"], db.get_session("t")) == ("Old", None)


def test_session_may_keep_its_own_title(db: SessionDB) -> None:
    db.create_session("s", "cli", title="Plans")
    assert db.set_session_title("s", "Plans") is True


def test_titles_are_unique_per_owner(db: SessionDB) -> None:
    for owner in ("alice", "bob"):
        db.create_session(owner, "cli", owner=owner, title="Plans")
    assert [db.get_session(owner)["title"] for owner in ("alice", "bob")] == ["Plans", "Plans"]


def test_empty_title_clears_and_frees_it(db: SessionDB) -> None:
    db.create_session("s", "cli", title="Plans")
    db.set_session_title("s", "")
    db.create_session("t", "cli", title="Plans")
    assert (db.get_session("s")["title"], db.get_session("t")["title"]) == (None, "Plans")


def test_set_title_of_unknown_session_returns_false(db: SessionDB) -> None:
    assert db.set_session_title("s", "Plans") is False


def test_auto_title_is_set_only_if_empty(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.create_session("t", "cli", title="Mine")
    for id in ("s", "t"):
        db.set_auto_title_if_empty(id, "  A\u200b  topic ")
    assert (db.get_session("s")["title"], db.get_session("t")["title"]) == ("A topic", "Mine")


def test_taken_auto_title_gets_next_number(db: SessionDB) -> None:
    for id in "abc":
        db.create_session(id, "cli")
        db.set_auto_title_if_empty(id, "Plans")
    assert [db.get_session(id)["title"] for id in "abc"] == ["Plans", "Plans #2", "Plans #3"]


def test_concurrent_auto_titles_are_unique(db: SessionDB) -> None:
    ids = [f"s{n}" for n in range(8)]
    for id in ids:
        db.create_session(id, "cli")
    threads = [threading.Thread(target=db.set_auto_title_if_empty, args=(id, "Plans")) for id in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {db.get_session(id)["title"] for id in ids} == {"Plans", *(f"Plans #{n}" for n in range(2, 9))}


def test_numbered_auto_title_stays_within_length_limit(db: SessionDB) -> None:
    for id in "ab":
        db.create_session(id, "cli")
        db.set_auto_title_if_empty(id, LONG)
    title = db.get_session("b")["title"]
    assert (len(title) <= 100, title.endswith(" #2")) == (True, True)


# ---- opening


def test_session_db_defaults_to_home_file(home_folder: Path) -> None:
    db = SessionDB()
    db.create_session("s", "cli")
    db.close()
    assert (home_folder / "state.db").exists()


def test_close_twice_loses_nothing(tmp_path: Path) -> None:
    db = SessionDB(tmp_path / "state.db")
    create_conversation(db, "s", "hello")
    db.close()
    db.close()
    again = SessionDB(tmp_path / "state.db")
    assert contents(again, "s") == ["hello"]
    again.close()


def test_session_dbs_on_same_path_share_writes(file_db: SessionDB) -> None:
    other = SessionDB(file_db.path)
    create_conversation(file_db, "s", "hello")
    assert contents(other, "s") == ["hello"]
    other.close()
    assert contents(file_db, "s") == ["hello"]


def test_in_memory_session_dbs_are_independent() -> None:
    first, other = SessionDB(":memory:"), SessionDB(":memory:")
    first.create_session("s", "cli")
    assert other.get_session("s") is None
    first.close()
    other.close()


def test_read_only_session_db(file_db: SessionDB, tmp_path: Path) -> None:
    create_conversation(file_db, "s", "hello")
    reader = SessionDB(file_db.path, read_only=True)
    assert contents(reader, "s") == ["hello"]
    with pytest.raises(Exception, match=r"\w"):
        reader.create_session("t", "cli")
    reader.close()
    with pytest.raises(Exception, match=r"\w"):
        SessionDB(tmp_path / "missing.db", read_only=True).get_session("s")
    assert (file_db.get_session("t"), (tmp_path / "missing.db").exists()) == (None, False)


def test_next_title_number_is_found_with_few_queries(db: SessionDB, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(200):
        db.create_session(f"n{number}", "cli")
        db.set_auto_title_if_empty(f"n{number}", "Plans")
    titles = {db.get_session(f"n{number}")["title"] for number in range(200)}  # type: ignore[index]
    assert titles == {"Plans", *(f"Plans #{number}" for number in range(2, 201))}
    texts: list[str] = []
    original = session_rows.title_holder
    monkeypatch.setattr(
        session_rows, "title_holder", lambda tx, owner, title: texts.append(title) or original(tx, owner, title)
    )
    db.create_session("last", "cli")
    db.set_auto_title_if_empty("last", "Plans")
    assert (db.get_session("last") or {})["title"] == "Plans #201" and len(texts) < 25


@pytest.mark.parametrize("session_id", [".", "..", "a/..", "a..b"])
def test_session_id_cannot_escape_its_upload_folder(file_db: SessionDB, session_id: str) -> None:
    assert file_db.path is not None
    others = file_db.path.parent / "uploads" / "other"
    others.mkdir(parents=True)
    with pytest.raises(ValueError, match="session id"):
        file_db.create_session(session_id, "cli")
    file_db.delete_session(session_id)
    assert others.exists()


def test_deleting_in_database_copy_keeps_home_folders(file_db: SessionDB) -> None:
    assert file_db.path is not None
    file_db.create_session("s", "cli")
    folder = file_db.path.parent / "uploads" / "s"
    folder.mkdir(parents=True)
    file_db.backup(file_db.path.with_name("copy.db"))
    with contextlib.closing(SessionDB(file_db.path.with_name("copy.db"))) as copy:
        assert copy.delete_session("s")
    assert folder.exists()


def test_prune_skips_busy_session(store: Store) -> None:
    db = store.sessions
    for name in ("a", "b", "c"):
        db.create_session(name, "cli")
        db.end_session(name, "cli_close")
    db.create_session("child", "subagent", kind="delegate", parent_session_id="b")
    db.engine.write(lambda tx: tx.execute("UPDATE sessions SET last_active = 1"))
    assert store.leases.acquire("session:child", "somebody", 60)
    assert db.prune_sessions() == ["a", "c"]
    with pytest.raises(SessionBusy):
        db.delete_session("b")


def test_optimize_in_transaction_is_rejected(store: Store) -> None:
    with pytest.raises(StoreError, match="transaction"):
        store.transaction(store.sessions.optimize)
