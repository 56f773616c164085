"""A fork is a copy that goes its own way; a refused one leaves no trace."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from hermes.store.base import SessionExists
from hermes.store.sessions import SessionDB

from .conftest import BAD_IDS, call, contents, create_conversation, session_ids


def with_tools(db: SessionDB) -> list[int]:
    """Two turns, the first with two tool results."""
    ids = create_conversation(db, "s", "time?")
    ids.append(db.append_message("s", "assistant", "let me see", tool_calls=[call("c1"), call("c2")]))
    ids += [db.append_message("s", "tool", id, tool_call_id=id, tool_name="clock") for id in ("c1", "c2")]
    ids += [db.append_message("s", *row) for row in (("assistant", "noon"), ("user", "thanks"), ("assistant", "bye"))]
    return ids


def everything(db: SessionDB) -> list[Any]:
    sessions = sorted(session_ids(db, limit=100, include_children=True, archived="all"))
    return [(db.get_session(id), db.get_messages(id, include_inactive=True)) for id in sessions]


def test_fork_copies_conversation_into_own_rows(db: SessionDB) -> None:
    ids = with_tools(db)
    fork = db.fork_session("s")
    assert db.get_messages_as_conversation(fork) == db.get_messages_as_conversation("s")
    assert not set(ids) & {row["id"] for row in db.get_messages(fork)}
    assert {row["session_id"] for row in db.get_messages(fork)} == {fork}


def test_fork_records_parent_and_message(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "a", "b", "c", "d")
    assert db.fork_session("s", "f", at_message_id=ids[1]) == "f"
    row = db.get_session("f")
    assert (row["kind"], row["parent_session_id"], row["forked_at_message_id"]) == ("branch", "s", ids[1])
    assert row["message_count"] == 2


def test_fork_inherits_instructions_prompt_and_model(db: SessionDB) -> None:
    same = {
        "instructions": "Be brief.",
        "system_prompt": "You are.",
        "model": "m",
        "model_config": {"a": 1},
        "owner": "o",
    }
    create_conversation(db, "s", "a", **same)
    row = db.get_session(db.fork_session("s"))
    assert {name: row[name] for name in same} == same


def test_fork_fields_can_be_overridden(db: SessionDB) -> None:
    create_conversation(db, "s", "a", model="m", cwd="/a")
    row = db.get_session(db.fork_session("s", model="other", cwd="/b"))
    assert (row["model"], row["cwd"], row["parent_session_id"]) == ("other", "/b", "s")


def test_forks_without_id_get_unique_ids(db: SessionDB) -> None:
    create_conversation(db, "s", "a")
    forks = {db.fork_session("s") for _ in range(5)}
    assert len(forks | {"s"}) == 6


def test_fork_ends_source_as_branched(db: SessionDB) -> None:
    create_conversation(db, "s", "a")
    fork = db.fork_session("s")
    assert (db.get_session("s")["end_reason"], db.get_session(fork)["end_reason"]) == ("branched", None)


def test_fork_keeps_end_reason_of_ended_source(db: SessionDB) -> None:
    create_conversation(db, "s", "a")
    db.end_session("s", "cli_close")
    before = db.get_session("s")
    db.fork_session("s")
    assert db.get_session("s") == before


@pytest.mark.parametrize(
    ("at", "copied"),
    [(0, 1), (1, 4), (2, 4), (3, 4), (4, 5), (5, 6), (6, 7), (None, 7)],
)
def test_fork_at_message_completes_cut_tool_sequence(db: SessionDB, at: int | None, copied: int) -> None:
    ids = with_tools(db)
    fork = db.fork_session("s", at_message_id=None if at is None else ids[at])
    assert db.get_messages_as_conversation(fork) == db.get_messages_as_conversation("s")[:copied]


def test_fork_includes_out_of_order_tool_results(db: SessionDB) -> None:
    create_conversation(db, "s", "go")
    db.append_message("s", "assistant", None, tool_calls=[call("c1"), call("c2")])
    first = db.append_message("s", "tool", "two", tool_call_id="c2")
    db.append_message("s", "tool", "one", tool_call_id="c1")
    db.append_message("s", "assistant", "done")
    fork = db.fork_session("s", at_message_id=first)
    assert [m["content"] for m in db.get_messages_as_conversation(fork)] == ["go", None, "one", "two"]


def test_fork_copies_transcript_and_compacted_view(db: SessionDB) -> None:
    create_conversation(db, "s", "a", "b")
    db.archive_and_compact("s", [{"role": "user", "content": "summary"}])
    hidden = db.append_message("s", "user", "c")
    db.rewind_to_message("s", hidden)
    fork = db.fork_session("s")
    assert (contents(db, fork), contents(db, fork, include_inactive=True)) == (["a", "b"], ["a", "b", "summary"])
    assert [m["content"] for m in db.get_messages_as_conversation(fork)] == ["summary"]


@pytest.mark.parametrize(
    ("at", "texts"),
    [
        (0, ["a"]),
        (1, ["a", "b"]),
        (2, ["a", "b", "c"]),  # the summary tells of `d` too
        (3, ["a", "b", "summary"]),
        (4, ["a", "b", "summary", "e"]),
        (6, ["a", "b", "summary", "e", "f", "g"]),
    ],
)
def test_fork_at_any_message_of_compacted_session(db: SessionDB, at: int, texts: list[str]) -> None:
    ids = create_conversation(db, "s", *"abcdef")
    messages = db.get_messages_as_conversation("s")
    db.archive_and_compact("s", [*messages[:2], {"role": "user", "content": "summary"}, *messages[4:]])
    ids.append(db.append_message("s", "user", "g"))
    fork = db.fork_session("s", at_message_id=ids[at])
    assert contents(db, fork) == list("abcdefg"[: at + 1])
    assert [m["content"] for m in db.get_messages_as_conversation(fork)] == texts
    assert db.get_session(fork)["message_count"] == at + 1
    db.append_message(fork, "user", "h")
    assert [m["content"] for m in db.get_messages_as_conversation(fork)] == [*texts, "h"]


def test_fork_copies_api_content(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.append_message("s", "user", "a", api_content="a, really", reasoning="r", token_count=5, timestamp=7.0)
    fork = db.fork_session("s")
    [row] = db.get_messages(fork)
    assert db.get_messages_as_conversation(fork) == [{"role": "user", "content": "a, really"}]
    assert (row["content"], row["reasoning"], row["token_count"], row["timestamp"]) == ("a", "r", 5, 7.0)


# ---- titles


def test_fork_title_gets_next_free_number(db: SessionDB) -> None:
    create_conversation(db, "s", "a", title="Plans")
    db.create_session("taken", "cli", title="Plans #3")
    titles = [db.get_session(db.fork_session("s"))["title"] for _ in range(3)]
    assert titles == ["Plans #2", "Plans #4", "Plans #5"]


def test_forks_of_forks_have_unique_titles(db: SessionDB) -> None:
    create_conversation(db, "s", "a", title="Plans")
    second = db.fork_session("s")
    titles = {db.get_session(db.fork_session(id))["title"] for id in (second, second, "s")}
    assert len(titles | {"Plans", "Plans #2"}) == 5
    assert all(re.fullmatch(r"Plans( #\d+)+", title) for title in titles)


def test_fork_title_stays_within_length_limit(db: SessionDB) -> None:
    create_conversation(db, "s", "a", title="x" * 100)
    title = db.get_session(db.fork_session("s"))["title"]
    assert (len(title) <= 100, title.endswith(" #2")) == (True, True)


def test_fork_with_own_title(db: SessionDB) -> None:
    create_conversation(db, "s", "a", title="Plans")
    assert db.get_session(db.fork_session("s", title="  Other\u200b plans "))["title"] == "Other plans"


def test_fork_of_untitled_session_has_no_title(db: SessionDB) -> None:
    create_conversation(db, "s", "a")
    assert db.get_session(db.fork_session("s"))["title"] is None


def test_concurrent_forks_are_independent(db: SessionDB) -> None:
    create_conversation(db, "s", "a", "b", title="Plans")
    forks: list[str] = []
    threads = [threading.Thread(target=lambda: forks.append(db.fork_session("s"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({db.get_session(id)["title"] for id in forks}) == 8
    assert [contents(db, id) for id in forks] == [["a", "b"]] * 8


# ---- refusals


@pytest.mark.parametrize("id", BAD_IDS)
def test_fork_with_invalid_id_leaves_no_trace(db: SessionDB, id: str) -> None:
    create_conversation(db, "s", "a", "b", title="Plans")
    before = everything(db)
    with pytest.raises(ValueError, match=r"\w"):
        db.fork_session("s", id)
    assert everything(db) == before


@pytest.mark.parametrize("title", ["x" * 101, "Taken", " Taken\u200b", "Plans"])
def test_fork_with_invalid_title_leaves_no_trace(db: SessionDB, title: str) -> None:
    create_conversation(db, "s", "a", "b", title="Plans")
    db.create_session("t", "cli", title="Taken")
    before = everything(db)
    with pytest.raises(ValueError, match=r"\w"):
        db.fork_session("s", "f", title=title)
    assert everything(db) == before


@pytest.mark.parametrize("id", ["s", "t"])
def test_fork_with_taken_id_leaves_no_trace(db: SessionDB, id: str) -> None:
    create_conversation(db, "s", "a", "b", title="Plans")
    create_conversation(db, "t", "c")
    before = everything(db)
    with pytest.raises(SessionExists):
        db.fork_session("s", id)
    assert everything(db) == before


def test_fork_at_foreign_message_leaves_no_trace(db: SessionDB) -> None:
    create_conversation(db, "s", "a", "b")
    [foreign] = create_conversation(db, "t", "c")
    before = everything(db)
    for id in (foreign, 999_999, 0, -1):
        with pytest.raises((KeyError, ValueError)):
            db.fork_session("s", at_message_id=id)
    assert everything(db) == before


def test_fork_of_unknown_session_raises(db: SessionDB) -> None:
    with pytest.raises(KeyError):
        db.fork_session("s", "f")
    assert db.get_session("f") is None


# ---- going its own way


def test_source_and_fork_diverge_independently(db: SessionDB) -> None:
    create_conversation(db, "s", "a", "b", title="Plans")
    fork = db.fork_session("s")
    db.append_message("s", "user", "in the source")
    db.append_message(fork, "user", "in the fork")
    assert (contents(db, "s"), contents(db, fork)) == (["a", "b", "in the source"], ["a", "b", "in the fork"])
    assert (db.resolve_session_id("s"), db.resolve_session_id("Plans")) == ("s", "s")


def test_fork_survives_deletion_of_source(db: SessionDB) -> None:
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 5000}}]
    create_conversation(db, "s", picture, "nice")
    fork = db.fork_session("s")
    db.delete_session("s")
    assert (contents(db, fork), db.get_session(fork)["parent_session_id"]) == ([picture, "nice"], None)


def test_search_finds_source_and_fork(db: SessionDB) -> None:
    create_conversation(db, "s", "apple")
    fork = db.fork_session("s")
    assert {row["session_id"] for row in db.search_messages("apple")} == {"s", fork}


def test_fork_before_a_message(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "one", "two", "three", "four")
    assert contents(db, db.fork_session("s", before_message_id=ids[2])) == ["one", "two"]
    first = db.fork_session("s", before_message_id=ids[0])
    assert contents(db, first) == []
    row = db.get_session(first)
    assert row is not None
    assert (row["parent_session_id"], row["forked_at_message_id"], row["message_count"]) == ("s", None, 0)
    with pytest.raises(KeyError, match="no message"):
        db.fork_session("s", before_message_id=9_999)


def test_fork_before_an_answer_of_a_tool_leaves_its_call_out(db: SessionDB) -> None:
    create_conversation(db, "s", "What time is it?")
    db.append_message("s", "assistant", "", tool_calls=[call("c1"), call("c2")])
    answers = [db.append_message("s", "tool", "noon", tool_call_id=c, tool_name="clock") for c in ("c1", "c2")]
    assert contents(db, db.fork_session("s", before_message_id=answers[1])) == ["What time is it?"]


def test_branches_are_the_whole_family(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "one", "two", "three", "four")
    create_conversation(db, "other", "one")
    db.fork_session("s", "a", before_message_id=ids[2])
    db.fork_session("s", "b", before_message_id=ids[0])
    db.append_message("a", "user", "three, otherwise")
    db.fork_session("a", "c")
    db.create_session("helper", "subagent", parent_session_id="s", kind="delegate")
    for session_id in ("s", "a", "b", "c"):
        rows = [(row["id"], row["parent_session_id"], shared) for row, shared in db.branches(session_id)]
        assert rows == [("s", None, 0), ("a", "s", 2), ("b", "s", 0), ("c", "a", 3)]
    assert [(row["id"], shared) for row, shared in db.branches("other")] == [("other", 0)]
    db.delete_session("s")
    assert [row["id"] for row, _ in db.branches("c")] == ["a", "c"]
