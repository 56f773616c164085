"""Sessions are listed by filters, page by page, the best match first."""

from __future__ import annotations

from typing import Any

import pytest

from hermes.store.sessions import SessionDB

from .conftest import create_conversation, raw, session_ids


@pytest.fixture
def many(db: SessionDB) -> SessionDB:
    """Six sessions of different kinds."""
    create_conversation(db, "a", "hi", source="cli", cwd="/work/one", owner="alice")
    create_conversation(db, "b", "hi", source="cron", cwd="/work", session_key="k1")
    create_conversation(db, "c", "hi", source="cli", cwd="/home", owner="bob", session_key="k1")
    create_conversation(db, "d", "hi", source="api_server", session_key="k2")
    create_conversation(db, "delegate", "hi", source="subagent", kind="delegate", parent_session_id="a", owner="alice")
    create_conversation(db, "old", "hi", source="cli")
    db.update_session("old", archived=True)
    return db


FILTERS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["a", "b", "c", "d"]),
    ({"source": "cli"}, ["a", "c"]),
    ({"source": "nobody"}, []),
    ({"cwd_prefix": "/work"}, ["a", "b"]),
    ({"cwd_prefix": "/work/"}, ["a"]),
    ({"cwd_prefix": "%"}, []),
    ({"cwd_prefix": "/w_rk"}, []),
    ({"owner": "alice"}, ["a"]),
    ({"owner": "default"}, ["b", "d"]),
    ({"session_key": "k1"}, ["b", "c"]),
    ({"session_key": "k1", "owner": "bob"}, ["c"]),
    ({"include_children": True}, ["a", "b", "c", "d", "delegate"]),
    ({"include_children": True, "owner": "alice"}, ["a", "delegate"]),
    ({"archived": True}, ["old"]),
    ({"archived": "all"}, ["a", "b", "c", "d", "old"]),
    ({"archived": "all", "include_children": True}, ["a", "b", "c", "d", "delegate", "old"]),
    ({"search": "b"}, ["b"]),
    ({"search": "d", "source": "cli"}, []),
]


@pytest.mark.parametrize(("filters", "expected"), FILTERS)
def test_list_filters_and_counts(many: SessionDB, filters: dict[str, Any], expected: list[str]) -> None:
    assert (sorted(session_ids(many, **filters)), many.count_sessions(**filters)) == (expected, len(expected))


def test_branch_is_listed_like_root(db: SessionDB) -> None:
    create_conversation(db, "s", "hi")
    fork = db.fork_session("s")
    assert (sorted(session_ids(db)), db.count_sessions()) == (sorted(["s", fork]), 2)


def test_empty_store_lists_nothing(db: SessionDB) -> None:
    assert (db.list_sessions(), db.count_sessions()) == ([], 0)


# ---- rows


def test_listed_row_has_preview_and_activity_but_no_prompts(db: SessionDB) -> None:
    create_conversation(db, "s", "hi", title="Plans", system_prompt="secret words", instructions="private words")
    [row] = db.list_sessions()
    assert (row["id"], row["title"], row["preview"], row["message_count"]) == ("s", "Plans", "hi", 1)
    assert row["last_active"] >= row["started_at"]
    assert "secret words" not in str(row)


def test_preview_is_at_most_60_characters(db: SessionDB) -> None:
    text = "".join(f"{n:02d} words " for n in range(50))
    create_conversation(db, "s", text, "an answer")
    [row] = db.list_sessions()
    assert (len(row["preview"]) <= 60, row["preview"][:50]) == (True, text[:50])


@pytest.mark.parametrize("letter", ["日", "é", "👍"])
def test_preview_length_counts_characters_in_any_script(db: SessionDB, letter: str) -> None:
    create_conversation(db, "s", letter * 200)
    preview = db.list_sessions()[0]["preview"]
    assert 50 <= preview.count(letter) <= 60
    assert len(preview) <= 60


def test_preview_of_multipart_message_is_its_text(db: SessionDB) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 5000}}
    create_conversation(db, "s", [image, {"type": "text", "text": "What is this?"}])
    preview = db.list_sessions()[0]["preview"]
    assert "What is this?" in preview
    assert "QUJD" not in preview


def test_preview_leaves_out_attached_files(db: SessionDB) -> None:
    create_conversation(
        db, "s", [{"type": "text", "text": "Read this"}, {"type": "text", "text": "File notes.txt:\nthe milk"}]
    )
    assert db.list_sessions()[0]["preview"] == "Read this"


def test_session_without_messages_has_no_preview(db: SessionDB) -> None:
    db.create_session("s", "cli")
    assert not db.list_sessions()[0]["preview"]


# ---- order and pages


def test_list_order_defaults_to_last_active(db: SessionDB) -> None:
    for id in "abc":
        create_conversation(db, id, "hi")
    db.append_message("a", "assistant", "hello")
    assert (session_ids(db), session_ids(db, order="started_at")) == (["a", "c", "b"], ["c", "b", "a"])


def test_unknown_list_order_is_rejected(db: SessionDB) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        db.list_sessions(order="id; drop table sessions")


def test_list_limit_defaults_to_twenty(db: SessionDB) -> None:
    for n in range(22):
        db.create_session(f"s{n:02d}", "cli")
    newest = [f"s{n:02d}" for n in range(21, -1, -1)]
    assert session_ids(db) == newest[:20]
    assert session_ids(db, limit=5, offset=3) == newest[3:8]
    assert (session_ids(db, limit=100), session_ids(db, offset=22)) == (newest, [])


def pages(db: SessionDB, size: int, between: Any = lambda: None, **filters: Any) -> list[str]:
    """Every id, page by page."""
    ids: list[str] = []
    cursor = None
    while rows := db.list_sessions(limit=size, cursor=cursor, **filters):
        ids += [row["id"] for row in rows]
        cursor = rows[-1]["cursor"]
        between()
    return ids


@pytest.mark.parametrize("order", ["last_active", "started_at"])
@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_pagination_has_no_gap_or_repetition(db: SessionDB, order: str, size: int) -> None:
    for n in range(14):
        create_conversation(db, f"s{n}", "hi", source="cli" if n % 2 else "cron")
    db.append_message("s3", "user", "again")
    assert pages(db, size, order=order) == session_ids(db, limit=100, order=order)
    assert pages(db, size, order=order, source="cli") == session_ids(db, limit=100, order=order, source="cli")


def test_pagination_with_equal_timestamps(durable_db: SessionDB) -> None:
    for n in range(9):
        create_conversation(durable_db, f"s{n}", "hi")
    raw(durable_db, "update sessions set last_active = 1000, started_at = 1000")
    listed = pages(durable_db, 2)
    assert (sorted(listed), len(listed)) == ([f"s{n}" for n in range(9)], 9)


def test_pagination_is_stable_while_sessions_arrive(db: SessionDB) -> None:
    for n in range(9):
        create_conversation(db, f"s{n}", "hi")
    arrivals = iter(range(100))
    listed = pages(db, 2, between=lambda: create_conversation(db, f"new{next(arrivals)}", "hi"))
    assert listed == [f"s{n}" for n in range(8, -1, -1)]


@pytest.mark.parametrize("cursor", ["nonsense", "!", "0", "é", '{"a": 1}'])
def test_invalid_cursor_is_rejected(db: SessionDB, cursor: str) -> None:
    create_conversation(db, "s", "hi")
    with pytest.raises(ValueError, match=r"\w"):
        db.list_sessions(cursor=cursor)


# ---- search in titles and ids


def test_list_search_ranks_exact_then_prefix_then_substring(db: SessionDB) -> None:
    for id, title in [
        ("1", "plan"),
        ("2", "planning"),
        ("3", "my plan"),
        ("x-plan", None),
        ("plan-x", None),
        ("n", "no"),
    ]:
        db.create_session(id, "cli", title=title)
    for id in ("3", "x-plan"):
        db.append_message(id, "user", "the most recent")
    listed = session_ids(db, search="plan")
    assert (listed[0], set(listed[1:3]), set(listed[3:])) == ("1", {"2", "plan-x"}, {"3", "x-plan"})
    assert db.count_sessions(search="plan") == 5


@pytest.mark.parametrize("size", [1, 2, 3])
def test_list_search_pagination_has_no_gap_or_repetition(db: SessionDB, size: int) -> None:
    for n, title in enumerate(["plan", "my plan", "planning", "a plan b", "plans", "no", "the plan"]):
        db.create_session(f"s{n}", "cli", title=title)
    assert pages(db, size, search="plan") == session_ids(db, search="plan")


def test_list_search_ranks_exact_id_first(db: SessionDB) -> None:
    db.create_session("plan", "cli")
    db.create_session("x", "cli", title="plan to do")
    assert session_ids(db, search="plan") == ["plan", "x"]


@pytest.mark.parametrize(
    ("text", "expected"), [("100%", ["p"]), ("a_b", ["u"]), ("%", ["p"]), ("_", ["u"]), ("\\", [])]
)
def test_list_search_escapes_wildcards(db: SessionDB, text: str, expected: list[str]) -> None:
    for id, title in {"p": "100% sure", "u": "a_b", "n": "axb 1000"}.items():
        db.create_session(id, "cli", title=title)
    assert session_ids(db, search=text) == expected
