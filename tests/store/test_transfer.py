"""Sessions leave as plain data and come back the same; bad data brings nothing in; a copy is made while others write."""

from __future__ import annotations

import copy
import json
import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hermes.core.spec import RunSpec
from hermes.store.base import StoreError
from hermes.store.sessions import SessionDB
from hermes.store.stores import Store

from .conftest import BAD_IDS, call, contents, create_conversation, session_ids

URL = "data:image/png;base64," + "QUJD" * 5000
PICTURE = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": URL}}]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[SessionDB]:
    """A second, empty store."""
    db = SessionDB(tmp_path / "other.db")
    yield db
    db.close()


def rich(db: SessionDB, id: str = "s") -> None:
    """A session that has everything a session can have."""
    db.create_session(
        *(id, "cli"),
        model="m",
        model_config={"temperature": 0.5},
        instructions="Be brief.",
        system_prompt="You are.",
        owner="alice",
        user_id="u",
        session_key="k",
        cwd="/work",
        title=f"Plans of {id}",
        base_id="api-1",
    )
    db.append_message(id, "user", "old question", timestamp=10.5)
    db.archive_and_compact(id, [{"role": "user", "content": "summary"}])
    db.append_message(id, "user", PICTURE, token_count=9, api_content="for the model", run_id="run_1")
    db.append_message(id, "assistant", None, tool_calls=[call("c1")], reasoning="hm", opaque={"x": [1]})
    db.append_message(id, "tool", "noon", tool_call_id="c1", tool_name="clock")
    db.append_message(id, "assistant", "北京 noon", finish_reason="stop")
    hidden = db.append_message(id, "user", "never mind")
    db.append_message(id, "assistant", "[Stopped.]", synthetic=True)
    db.rewind_to_message(id, hidden)
    db.add_usage(id, {"input_tokens": 10, "output_tokens": 2, "cost_usd": 0.5}, "m", "p")
    db.add_usage(id, {"input_tokens": 4}, "small", "p", task="compression")
    db.update_session(id, archived=True)
    db.end_session(id, "cli_close")


# What a document does not decide about a session.
NOT_BROUGHT = {"owner": "default", **dict.fromkeys(("session_key", "cwd", "instructions", "system_prompt"))}


def plain(export: dict[str, Any]) -> dict[str, Any]:
    """An export without what another store numbers anew."""
    out = copy.deepcopy(export)
    out.pop("exported_at", None)
    for row in [*out["messages"], *out["model_messages"]]:
        row.pop("id", None)
    return out


def renamed(export: dict[str, Any], id: Any, **fields: Any) -> dict[str, Any]:
    """An export under another id, without a title."""
    return copy.deepcopy(export) | {"id": id, "title": None, **fields}


# ---- out and in


def test_export_import_round_trip(db: SessionDB, other: SessionDB) -> None:
    rich(db)
    create_conversation(other, "before", "so that rows have other numbers")
    export = db.export_session("s")
    assert export["format"] == "hermes.session/1"
    report = other.import_sessions([json.loads(json.dumps(export))])
    assert (report["ok"], report["errors"]) == (True, [])
    assert plain(other.export_session("s")) == plain(export) | NOT_BROUGHT
    same = db.get_session("s") | NOT_BROUGHT
    assert {k: v for k, v in other.get_session("s").items() if k in same} == same
    assert other.get_messages_as_conversation("s") == db.get_messages_as_conversation("s")


def test_export_includes_inactive_rows_with_flags(db: SessionDB, other: SessionDB) -> None:
    rich(db)
    other.import_sessions([db.export_session("s")])
    visible_rows = [row for row in other.get_messages("s", include_inactive=True) if not row["model_only"]]
    for rows in (db.export_session("s")["messages"], visible_rows):
        flags = [(bool(row["active"]), bool(row["compacted"])) for row in rows]
        assert flags == [(False, True), *[(True, False)] * 4, (False, False), (False, False)]
        assert [bool(row["synthetic"]) for row in rows[1:]] == [False] * 5 + [True]


def test_export_separates_transcript_and_model_messages(db: SessionDB) -> None:
    ids = create_conversation(db, "s", *"abcd")
    messages = db.get_messages_as_conversation("s")
    for text in ("one", "two"):
        db.archive_and_compact("s", [messages[0], {"role": "user", "content": text}, *messages[2:]])
    export = db.export_session("s")
    assert [(row["id"], row["content"]) for row in export["messages"]] == list(zip(ids, "abcd", strict=True))
    assert [(row["content"], row["active"]) for row in export["model_messages"]] == [("one", False), ("two", True)]


def test_import_of_older_export_version_has_no_duplicates(db: SessionDB) -> None:
    """An older export holds copies of the rows that a compaction kept, and the summary among them."""
    messages = [{"role": "user", "content": text, "active": False, "compacted": True} for text in "abcd"]
    messages += [{"role": "user", "content": "a", "copy_of": 0}, {"role": "user", "content": "sum", "synthetic": True}]
    messages += [{"role": "user", "content": "d", "copy_of": 3, "api_content": "D"}, {"role": "user", "content": "e"}]
    report = db.import_sessions([{"format": "hermes.session/1", "id": "s", "messages": messages}])
    assert report["ok"]
    assert contents(db, "s") == list("abcde")
    assert sorted(contents(db, "s", include_inactive=True)) == ["a", "b", "c", "d", "e", "sum"]
    assert [m["content"] for m in db.get_messages_as_conversation("s")] == ["a", "sum", "D", "e"]
    assert db.get_session("s")["message_count"] == 5


def test_export_inlines_blobs(db: SessionDB, other: SessionDB) -> None:
    rich(db)
    export = db.export_session("s")
    assert URL in json.dumps(export)
    other.import_sessions([export])
    assert PICTURE in contents(other, "s")


def test_export_import_includes_usage(db: SessionDB, other: SessionDB) -> None:
    rich(db)
    export = db.export_session("s")
    assert sorted((row["model"], row["task"], row["input_tokens"]) for row in export["usage"]) == [
        ("m", "", 10),
        ("small", "compression", 4),
    ]
    other.import_sessions([export])
    assert other.export_session("s")["usage"] == export["usage"]
    assert other.get_session("s")["input_tokens"] == 10


def test_imported_messages_are_searchable(db: SessionDB, other: SessionDB) -> None:
    rich(db)
    other.import_sessions([db.export_session("s")])
    assert [len(other.search_messages(query)) for query in ("question", "北京", "mind", "stopped")] == [1, 1, 0, 0]


def test_imported_conversation_can_be_bound(db: SessionDB, other: SessionDB) -> None:
    create_conversation(db, "api-1", "hi", "hello", base_id="api-1")
    other.import_sessions([db.export_session("api-1")])
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert other.bind_session("api-1", history) == "api-1"
    assert other.bind_session("api-1", [*history[:1], {"role": "assistant", "content": "no"}]) != "api-1"


def test_imported_conversation_can_continue(db: SessionDB, other: SessionDB) -> None:
    rich(db)
    other.import_sessions([db.export_session("s")])
    other.append_message("s", "user", "next")
    assert contents(other, "s")[-1] == "next"


def test_import_does_not_touch_rows_of_other_sessions(db: SessionDB) -> None:
    rich(db)
    export = db.export_session("s")
    create_conversation(db, "t", "mine")
    before = db.get_messages("s", include_inactive=True)
    assert db.import_sessions([renamed(export, "copy")])["ok"] is True
    assert (db.get_messages("s", include_inactive=True), contents(db, "t")) == (before, ["mine"])
    assert db.get_messages_as_conversation("copy") == db.get_messages_as_conversation("s")


def test_export_all_streams_every_session(db: SessionDB, other: SessionDB) -> None:
    create_conversation(db, "a", "1", source="cli", session_key="k")
    create_conversation(db, "b", "2", source="cron", session_key="k")
    create_conversation(db, "c", "3", source="cli")
    create_conversation(db, "d", "4", source="cli", kind="delegate", parent_session_id="c")
    stream = db.export_all()
    assert iter(stream) is iter(stream)
    assert {item["id"] for item in stream} == {"a", "b", "c", "d"}
    assert {item["id"] for item in db.export_all(source="cron")} == {"b"}
    assert {item["id"] for item in db.export_all(session_key="k")} == {"a", "b"}
    assert {item["id"] for item in db.export_all(source="cli", session_key="k")} == {"a"}
    other.import_sessions(list(db.export_all()))
    assert other.count_sessions(include_children=True) == 4


def test_partial_export_all_leaves_store_usable(db: SessionDB) -> None:
    for n in range(5):
        create_conversation(db, f"s{n}", "hi")
    stream = iter(db.export_all())
    next(stream)
    create_conversation(db, "new", "hi")
    assert db.delete_session("s3") is True
    assert sum(1 for _ in stream) >= 3


# ---- lineage


def family(db: SessionDB) -> list[dict[str, Any]]:
    create_conversation(db, "root", "a", "b", title="Plans")
    db.fork_session("root", "fork")
    create_conversation(db, "delegate", "x", kind="delegate", parent_session_id="fork")
    return [db.export_session(id) for id in ("delegate", "fork", "root")]


def test_import_keeps_lineage_in_any_order(db: SessionDB, other: SessionDB) -> None:
    report = other.import_sessions(family(db))
    assert (report["imported"], report["detached"]) == (3, 0)
    rows = [other.get_session(id) for id in ("root", "fork", "delegate")]
    assert [(row["kind"], row["parent_session_id"]) for row in rows] == [
        ("root", None),
        ("branch", "root"),
        ("delegate", "fork"),
    ]


def test_import_detaches_session_without_parent(db: SessionDB, other: SessionDB) -> None:
    report = other.import_sessions(family(db)[:2])
    assert (report["ok"], report["imported"], report["detached"]) == (True, 2, 1)
    assert [other.get_session(id)["parent_session_id"] for id in ("fork", "delegate")] == [None, "fork"]


def test_import_links_existing_parent(db: SessionDB, other: SessionDB) -> None:
    _, fork, root = family(db)
    other.import_sessions([root])
    assert other.import_sessions([fork])["detached"] == 0
    assert other.get_session("fork")["parent_session_id"] == "root"


# ---- conflicts and bad data


def test_import_skips_existing_session(db: SessionDB, other: SessionDB) -> None:
    create_conversation(db, "s", "theirs", model="theirs")
    create_conversation(db, "t", "new")
    create_conversation(other, "s", "mine")
    report = other.import_sessions([db.export_session("s"), db.export_session("t")])
    assert (report["ok"], report["imported"], report["skipped"]) == (True, 1, 1)
    assert (contents(other, "s"), contents(other, "t"), other.get_session("s")["model"]) == (["mine"], ["new"], None)


def test_import_is_idempotent(db: SessionDB, other: SessionDB) -> None:
    rich(db)
    export = db.export_session("s")
    other.import_sessions([export])
    report = other.import_sessions([export])
    assert (report["imported"], report["skipped"]) == (0, 1)
    assert plain(other.export_session("s")) == plain(export) | NOT_BROUGHT


def test_import_of_empty_list(db: SessionDB) -> None:
    report = db.import_sessions([])
    assert (report["ok"], report["imported"], report["errors"]) == (True, 0, [])


def test_import_does_not_take_over_existing_title(db: SessionDB, other: SessionDB) -> None:
    create_conversation(db, "s", "hi", title="Plans")
    other.create_session("holder", "cli", title="Plans")
    other.import_sessions([db.export_session("s")])
    assert other.get_session("holder")["title"] == "Plans"
    assert [row["id"] for row in other.list_sessions() if row["title"] == "Plans"] == ["holder"]


def test_import_keeps_duplicate_titles_unique(db: SessionDB, other: SessionDB) -> None:
    create_conversation(db, "s", "hi", title="Plans")
    export = db.export_session("s")
    report = other.import_sessions([export, export | {"id": "t"}])
    titles = [row["title"] for row in other.list_sessions()]
    assert (report["imported"], titles.count("Plans") <= 1) == (len(titles), True)


def test_import_of_duplicate_id_creates_one_session(db: SessionDB, other: SessionDB) -> None:
    create_conversation(db, "s", "hi")
    report = other.import_sessions([db.export_session("s")] * 2)
    assert report["imported"] == other.count_sessions()
    assert contents(other, "s") in ([], ["hi"])


def test_import_tolerates_parent_cycle(db: SessionDB, other: SessionDB) -> None:
    create_conversation(db, "s", "hi")
    export = db.export_session("s")
    links = {"a": "b", "b": "a", "c": "c"}
    other.import_sessions([renamed(export, id, kind="delegate", parent_session_id=up) for id, up in links.items()])
    for id in links:
        other.delete_session(id)
    assert other.count_sessions(include_children=True) == 0


def assert_rejected(db: SessionDB, items: list[Any]) -> None:
    """None of these gets in, and the report says why."""
    before = sorted(session_ids(db, limit=1000, include_children=True, archived="all"))
    report = db.import_sessions(items)
    assert (report["ok"], report["imported"]) == (False, 0)
    assert report["errors"]
    assert sorted(session_ids(db, limit=1000, include_children=True, archived="all")) == before


@pytest.mark.parametrize("id", [*BAD_IDS, None, 7, ["s"]])
def test_import_with_invalid_id_is_rejected_as_a_whole(db: SessionDB, id: Any) -> None:
    create_conversation(db, "here", "hi")
    good = db.export_session("here")
    assert_rejected(db, [renamed(good, "new"), renamed(good, id)])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda item: None,
        lambda item: "a line of text",
        lambda item: [],
        lambda item: {},
        lambda item: {k: v for k, v in item.items() if k != "format"},
        lambda item: item | {"format": "hermes.session/2"},
        lambda item: item | {"format": None},
        lambda item: item | {"messages": "none"},
        lambda item: item | {"messages": {"a": 1}},
        lambda item: item | {"messages": [None]},
        lambda item: item | {"messages": ["hi"]},
        lambda item: item | {"messages": [{}]},
        lambda item: item | {"messages": [item["messages"][0] | {"role": "wizard"}]},
        lambda item: item | {"messages": [item["messages"][0] | {"role": None}]},
        lambda item: item | {"messages": [item["messages"][0] | {"content": 7}]},
        lambda item: item | {"messages": [item["messages"][0] | {"content": {"a": 1}}]},
        lambda item: item | {"messages": [item["messages"][0] | {"timestamp": "yesterday"}]},
        lambda item: item | {"messages": [item["messages"][0] | {"tool_calls": "all"}]},
        lambda item: renamed(item, "new2", title="x" * 101),
        lambda item: renamed(item, "new2", title=["x"]),
        lambda item: renamed(item, "new2", kind="king"),
        lambda item: renamed(item, "new2", source=None),
        lambda item: renamed(item, "new2", started_at="yesterday"),
        lambda item: renamed(item, "new2", parent_session_id=["x"]),
        lambda item: item | {"usage": "much"},
        lambda item: item | {"usage": [None]},
        lambda item: item | {"usage": [{"model": "m", "provider": "p", "task": "", "input_tokens": "many"}]},
    ],
)
def test_import_with_invalid_data_is_rejected_as_a_whole(db: SessionDB, spoil: Any) -> None:
    create_conversation(db, "here", "hi")
    good = renamed(db.export_session("here"), "new")
    assert_rejected(db, [good, spoil(renamed(good, "bad"))])
    assert_rejected(db, [spoil(renamed(good, "bad")), good])


def test_import_error_names_session_index(db: SessionDB) -> None:
    create_conversation(db, "here", "hi")
    good = renamed(db.export_session("here"), "new")
    [error] = db.import_sessions([good, renamed(good, "a/b")])["errors"]
    assert error["index"] == 1
    assert error["message"]


@pytest.mark.parametrize("what", ["sessions", "rows", "bytes"])
def test_import_over_limits_is_rejected(db: SessionDB, what: str) -> None:
    create_conversation(db, "here", "hi")
    good = renamed(db.export_session("here"), "new")
    [row] = good["messages"]
    items = {
        "sessions": [renamed(good, f"n{n}") for n in range(501)],
        "rows": [good | {"messages": [row | {"id": n} for n in range(10_001)]}],
        "bytes": [good | {"messages": [row | {"content": "x" * (26 << 20)}]}],
    }
    assert_rejected(db, items[what])


def test_import_at_limits_is_accepted(db: SessionDB) -> None:
    create_conversation(db, "here", "hi")
    good = renamed(db.export_session("here"), "new")
    report = db.import_sessions([renamed(good, f"n{n}") for n in range(500)])
    assert (report["ok"], report["imported"]) == (True, 500)


# ---- secrets


def test_export_redacts_known_secrets(db: SessionDB) -> None:
    db.create_session("s", "cli", instructions="use sk-known", system_prompt="sk-known", title="about sk-known")
    db.append_message("s", "user", "my key is sk-known", api_content="sk-known", reasoning="sk-known")
    db.append_message("s", "assistant", [{"type": "text", "text": "sk-known"}])
    db.append_message(
        "s", "assistant", None, tool_calls=[call("c", arguments='{"key": "sk-known"}')], opaque={"x": "sk-known"}
    )

    def redact(text: str) -> str:
        return text.replace("sk-known", "[redacted]")

    text = json.dumps(db.export_session("s", redact=redact))
    [of_all] = [json.dumps(item) for item in db.export_all(redact=redact)]
    assert ["sk-known" in text, "[redacted]" in text, "sk-known" in of_all] == [False, True, False]
    assert "sk-known" in json.dumps(db.get_messages("s"))


# ---- copies


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_backup_is_private_and_complete(file_db: SessionDB, tmp_path: Path, umask: int) -> None:
    db = file_db
    rich(db)
    before = os.umask(umask)
    try:
        db.backup(tmp_path / "copy.db")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "copy.db").stat().st_mode) == 0o600
    restored = SessionDB(tmp_path / "copy.db")
    assert restored.export_session("s")["messages"] == db.export_session("s")["messages"]
    assert len(restored.search_messages("北京")) == 1
    restored.close()


def test_backup_during_writes_is_consistent(file_db: SessionDB, tmp_path: Path) -> None:
    db = file_db
    create_conversation(db, "s", *["words " * 50] * 200)
    finished = threading.Event()
    written: list[int] = []

    def write() -> None:
        while not finished.is_set():
            written.append(db.append_message("s", "user", f"number {len(written)} 北京"))

    writer = threading.Thread(target=write)
    writer.start()
    for n in range(3):
        db.backup(tmp_path / f"copy{n}.db")
    finished.set()
    writer.join()
    for n in range(3):
        with closing(sqlite3.connect(tmp_path / f"copy{n}.db", isolation_level=None)) as copy:
            assert copy.execute("pragma integrity_check").fetchall() == [("ok",)]
            copy.execute("insert into messages_fts (messages_fts, rank) values ('integrity-check', 1)")
            [[stored]] = copy.execute("select count(*) from messages")
            [[counted]] = copy.execute("select message_count from sessions")
        assert stored == counted
        assert 200 <= stored <= 200 + len(written)
    assert db.get_session("s")["message_count"] == 200 + len(written)


def test_backup_over_itself_is_rejected(file_db: SessionDB, tmp_path: Path) -> None:
    rich(file_db)
    (tmp_path / "link.db").symlink_to(tmp_path / "state.db")
    for path in (tmp_path / "state.db", tmp_path / "link.db"):
        with pytest.raises((StoreError, ValueError, OSError)):
            file_db.backup(path)
    assert file_db.check(deep=True) == []
    assert len(file_db.get_messages("s")) == 5


def test_imported_row_does_not_join_foreign_run(store: Store) -> None:
    spec = RunSpec("hi", "mine", run_id="run_1")
    store.runs.create(spec)
    store.sessions.create_session("mine", "cli")
    store.sessions.append_message("mine", "user", "hello", run_id="run_1")
    foreign = {"role": "assistant", "content": "INJECTED", "run_id": "run_1"}
    report = store.sessions.import_sessions([{"format": "hermes.session/1", "id": "other", "messages": [foreign]}])
    assert report["imported"] == 1
    assert [row.content for row in store.runs.rows("run_1")] == ["hello"]


@pytest.mark.parametrize(
    "fields",
    [
        {"message_count": 2**70},
        {"started_at": float("nan")},
        {"started_at": float("inf")},
        {"last_active": -5.0},
        {"end_reason": "x" * 5000},
        {"messages": [{"role": "user", "content": "x", "token_count": 2**65}]},
        {"usage": [{"model": "m", "calls": 2**64}]},
    ],
)
def test_import_rejects_out_of_range_numbers(db: SessionDB, fields: dict[str, Any]) -> None:
    report = db.import_sessions([{"format": "hermes.session/1", "id": "s", **fields}])
    assert report["ok"] is False and report["errors"][0]["index"] == 0
    assert db.get_session("s") is None


def test_import_detaches_session_that_is_its_own_parent(db: SessionDB) -> None:
    report = db.import_sessions([{"format": "hermes.session/1", "id": "s", "parent_session_id": "s"}])
    assert (report["imported"], report["detached"]) == (1, 1)
