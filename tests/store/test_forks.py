"""A fork is a copy that goes its own way; a refused one leaves no trace."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from hermes.store.base import SessionExists
from hermes.store.sessions import SessionDB

from .conftest import BAD_IDS, call, contents, listed, talk


def with_tools(db: SessionDB) -> list[int]:
    """Two turns, the first with two tool results."""
    ids = talk(db, "s", "time?")
    ids.append(db.append_message("s", "assistant", "let me see", tool_calls=[call("c1"), call("c2")]))
    ids += [db.append_message("s", "tool", id, tool_call_id=id, tool_name="clock") for id in ("c1", "c2")]
    ids += [db.append_message("s", *row) for row in (("assistant", "noon"), ("user", "thanks"), ("assistant", "bye"))]
    return ids


def everything(db: SessionDB) -> list[Any]:
    sessions = sorted(listed(db, limit=100, include_children=True, archived="all"))
    return [(db.get_session(id), db.get_messages(id, include_inactive=True)) for id in sessions]


def test_a_fork_has_the_same_conversation_in_its_own_rows(db: SessionDB) -> None:
    ids = with_tools(db)
    fork = db.fork_session("s")
    assert db.get_messages_as_conversation(fork) == db.get_messages_as_conversation("s")
    assert not set(ids) & {row["id"] for row in db.get_messages(fork)}
    assert {row["session_id"] for row in db.get_messages(fork)} == {fork}


def test_a_fork_knows_where_it_comes_from(db: SessionDB) -> None:
    ids = talk(db, "s", "a", "b", "c", "d")
    assert db.fork_session("s", "f", at_message_id=ids[1]) == "f"
    row = db.get_session("f")
    assert (row["kind"], row["parent_session_id"], row["forked_at_message_id"]) == ("branch", "s", ids[1])
    assert row["message_count"] == 2


def test_a_fork_takes_instructions_prompt_and_model_along(db: SessionDB) -> None:
    same = {
        "instructions": "Be brief.",
        "system_prompt": "You are.",
        "model": "m",
        "model_config": {"a": 1},
        "owner": "o",
    }
    talk(db, "s", "a", **same)
    row = db.get_session(db.fork_session("s"))
    assert {name: row[name] for name in same} == same


def test_a_fork_can_be_given_other_fields(db: SessionDB) -> None:
    talk(db, "s", "a", model="m", cwd="/a")
    row = db.get_session(db.fork_session("s", model="other", cwd="/b"))
    assert (row["model"], row["cwd"], row["parent_session_id"]) == ("other", "/b", "s")


def test_forks_without_an_id_get_their_own(db: SessionDB) -> None:
    talk(db, "s", "a")
    made = {db.fork_session("s") for _ in range(5)}
    assert len(made | {"s"}) == 6


def test_the_source_ends_as_branched(db: SessionDB) -> None:
    talk(db, "s", "a")
    fork = db.fork_session("s")
    assert (db.get_session("s")["end_reason"], db.get_session(fork)["end_reason"]) == ("branched", None)


def test_a_source_that_had_ended_keeps_its_reason(db: SessionDB) -> None:
    talk(db, "s", "a")
    db.end_session("s", "cli_close")
    before = db.get_session("s")
    db.fork_session("s")
    assert db.get_session("s") == before


@pytest.mark.parametrize(
    ("at", "copied"),
    [(0, 1), (1, 4), (2, 4), (3, 4), (4, 5), (5, 6), (6, 7), (None, 7)],
)
def test_a_fork_ends_at_the_message_and_completes_a_cut_tool_sequence(
    db: SessionDB, at: int | None, copied: int
) -> None:
    ids = with_tools(db)
    fork = db.fork_session("s", at_message_id=None if at is None else ids[at])
    assert db.get_messages_as_conversation(fork) == db.get_messages_as_conversation("s")[:copied]


def test_results_stored_in_another_order_are_all_taken_along(db: SessionDB) -> None:
    talk(db, "s", "go")
    db.append_message("s", "assistant", None, tool_calls=[call("c1"), call("c2")])
    first = db.append_message("s", "tool", "two", tool_call_id="c2")
    db.append_message("s", "tool", "one", tool_call_id="c1")
    db.append_message("s", "assistant", "done")
    fork = db.fork_session("s", at_message_id=first)
    assert [m["content"] for m in db.get_messages_as_conversation(fork)] == ["go", None, "one", "two"]


def test_what_was_said_is_copied_and_what_the_model_sees_of_it(db: SessionDB) -> None:
    talk(db, "s", "a", "b")
    db.archive_and_compact("s", [{"role": "user", "content": "summary"}])
    hidden = db.append_message("s", "user", "c")
    db.rewind_to_message("s", hidden)
    fork = db.fork_session("s")
    assert (contents(db, fork), contents(db, fork, include_inactive=True)) == (["a", "b"], ["a", "b", "summary"])
    assert [m["content"] for m in db.get_messages_as_conversation(fork)] == ["summary"]


@pytest.mark.parametrize(
    ("at", "seen"),
    [
        (0, ["a"]),
        (1, ["a", "b"]),
        (2, ["a", "b", "c"]),  # the summary tells of `d` too
        (3, ["a", "b", "summary"]),
        (4, ["a", "b", "summary", "e"]),
        (6, ["a", "b", "summary", "e", "f", "g"]),
    ],
)
def test_a_fork_at_any_message_of_a_compacted_session(db: SessionDB, at: int, seen: list[str]) -> None:
    ids = talk(db, "s", *"abcdef")
    said = db.get_messages_as_conversation("s")
    db.archive_and_compact("s", [*said[:2], {"role": "user", "content": "summary"}, *said[4:]])
    ids.append(db.append_message("s", "user", "g"))
    fork = db.fork_session("s", at_message_id=ids[at])
    assert contents(db, fork) == list("abcdefg"[: at + 1])
    assert [m["content"] for m in db.get_messages_as_conversation(fork)] == seen
    assert db.get_session(fork)["message_count"] == at + 1
    db.append_message(fork, "user", "h")
    assert [m["content"] for m in db.get_messages_as_conversation(fork)] == [*seen, "h"]


def test_the_words_for_the_model_are_copied(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.append_message("s", "user", "a", api_content="a, really", reasoning="r", token_count=5, timestamp=7.0)
    fork = db.fork_session("s")
    [row] = db.get_messages(fork)
    assert db.get_messages_as_conversation(fork) == [{"role": "user", "content": "a, really"}]
    assert (row["content"], row["reasoning"], row["token_count"], row["timestamp"]) == ("a", "r", 5, 7.0)


# ---- titles


def test_a_fork_gets_the_next_free_number(db: SessionDB) -> None:
    talk(db, "s", "a", title="Plans")
    db.create_session("taken", "cli", title="Plans #3")
    titles = [db.get_session(db.fork_session("s"))["title"] for _ in range(3)]
    assert titles == ["Plans #2", "Plans #4", "Plans #5"]


def test_forks_of_forks_keep_their_titles_apart(db: SessionDB) -> None:
    talk(db, "s", "a", title="Plans")
    second = db.fork_session("s")
    titles = {db.get_session(db.fork_session(id))["title"] for id in (second, second, "s")}
    assert len(titles | {"Plans", "Plans #2"}) == 5
    assert all(re.fullmatch(r"Plans( #\d+)+", title) for title in titles)


def test_a_number_does_not_make_the_title_of_a_fork_too_long(db: SessionDB) -> None:
    talk(db, "s", "a", title="x" * 100)
    title = db.get_session(db.fork_session("s"))["title"]
    assert (len(title) <= 100, title.endswith(" #2")) == (True, True)


def test_a_fork_can_have_a_title_of_its_own(db: SessionDB) -> None:
    talk(db, "s", "a", title="Plans")
    assert db.get_session(db.fork_session("s", title="  Other\u200b plans "))["title"] == "Other plans"


def test_a_fork_of_a_session_without_title_has_none(db: SessionDB) -> None:
    talk(db, "s", "a")
    assert db.get_session(db.fork_session("s"))["title"] is None


def test_forks_at_the_same_time_stay_apart(db: SessionDB) -> None:
    talk(db, "s", "a", "b", title="Plans")
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.append(db.fork_session("s"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({db.get_session(id)["title"] for id in made}) == 8
    assert [contents(db, id) for id in made] == [["a", "b"]] * 8


# ---- refusals


@pytest.mark.parametrize("id", BAD_IDS)
def test_a_bad_id_is_refused_and_leaves_nothing(db: SessionDB, id: str) -> None:
    talk(db, "s", "a", "b", title="Plans")
    before = everything(db)
    with pytest.raises(ValueError, match=r"\w"):
        db.fork_session("s", id)
    assert everything(db) == before


@pytest.mark.parametrize("title", ["x" * 101, "Taken", " Taken\u200b", "Plans"])
def test_a_refused_title_leaves_nothing(db: SessionDB, title: str) -> None:
    talk(db, "s", "a", "b", title="Plans")
    db.create_session("t", "cli", title="Taken")
    before = everything(db)
    with pytest.raises(ValueError, match=r"\w"):
        db.fork_session("s", "f", title=title)
    assert everything(db) == before


@pytest.mark.parametrize("id", ["s", "t"])
def test_a_taken_id_is_refused_and_leaves_nothing(db: SessionDB, id: str) -> None:
    talk(db, "s", "a", "b", title="Plans")
    talk(db, "t", "c")
    before = everything(db)
    with pytest.raises(SessionExists):
        db.fork_session("s", id)
    assert everything(db) == before


def test_a_message_that_is_not_in_the_source_is_refused_and_leaves_nothing(db: SessionDB) -> None:
    talk(db, "s", "a", "b")
    [foreign] = talk(db, "t", "c")
    before = everything(db)
    for id in (foreign, 999_999, 0, -1):
        with pytest.raises((KeyError, ValueError)):
            db.fork_session("s", at_message_id=id)
    assert everything(db) == before


def test_an_unknown_source_is_an_error(db: SessionDB) -> None:
    with pytest.raises(KeyError):
        db.fork_session("s", "f")
    assert db.get_session("f") is None


# ---- going its own way


def test_source_and_fork_go_their_own_ways(db: SessionDB) -> None:
    talk(db, "s", "a", "b", title="Plans")
    fork = db.fork_session("s")
    db.append_message("s", "user", "in the source")
    db.append_message(fork, "user", "in the fork")
    assert (contents(db, "s"), contents(db, fork)) == (["a", "b", "in the source"], ["a", "b", "in the fork"])
    assert (db.resolve_session_id("s"), db.resolve_session_id("Plans")) == ("s", "s")


def test_a_fork_outlives_its_source(db: SessionDB) -> None:
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 5000}}]
    talk(db, "s", picture, "nice")
    fork = db.fork_session("s")
    db.delete_session("s")
    assert (contents(db, fork), db.get_session(fork)["parent_session_id"]) == ([picture, "nice"], None)


def test_both_are_found_by_their_words(db: SessionDB) -> None:
    talk(db, "s", "apple")
    fork = db.fork_session("s")
    assert {row["session_id"] for row in db.search_messages("apple")} == {"s", fork}
