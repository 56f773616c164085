"""A conversation that a client brings along finds the session that holds it, and no other."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hermes.core.limits import BOUND_TURN_ROWS_MAX
from hermes.store import history_match, rows
from hermes.store.rows import row_of_message
from hermes.store.sessions import SessionDB
from hermes.store.stores import Store

from .conftest import call, session_ids

BASE = "api-0123456789abcdef"


def turns(*texts: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def hold(db: SessionDB, *texts: Any, id: str = BASE, **fields: Any) -> str:
    """Make a session with a derived id that holds these turns."""
    db.create_session(id, "api_server", **{"base_id": BASE, **fields})
    for message in turns(*texts):
        db.append_message(id, **message)
    return id


def is_new(db: SessionDB, id: str) -> bool:
    return re.fullmatch(rf"{BASE}-\d+", id) is not None and db.get_session(id) is None


@pytest.fixture
def filled_db(db: SessionDB) -> SessionDB:
    hold(db, "hi", "hello", "how?", "so")
    return db


def test_first_conversation_gets_base_id(db: SessionDB) -> None:
    assert (db.bind_session(BASE, []), db.bind_session(BASE, turns("hi", "hello"))) == (BASE, BASE)


def test_binding_writes_nothing(filled_db: SessionDB) -> None:
    before = filled_db.export_session(BASE)
    for history in ([], turns("hi", "hello", "how?", "so"), turns("other", "one")):
        filled_db.bind_session(BASE, history)
    assert (session_ids(filled_db), filled_db.export_session(BASE)["messages"]) == ([BASE], before["messages"])


def test_bind_finds_session_of_continued_conversation(filled_db: SessionDB) -> None:
    assert filled_db.bind_session(BASE, turns("hi", "hello", "how?", "so")) == BASE


def test_bind_separates_equal_openings(db: SessionDB) -> None:
    first = hold(db, "hi", "hello there", id=db.bind_session(BASE, []))
    second = hold(db, "hi", "good day", id=db.bind_session(BASE, []))
    third = hold(db, "hi", "welcome", id=db.bind_session(BASE, []))
    assert (first, len({first, second, third})) == (BASE, 3)
    answers = {"hello there": first, "good day": second, "welcome": third}
    assert {text: db.bind_session(BASE, turns("hi", text)) for text in answers} == answers


def test_bind_separates_conversations_that_diverge_later(db: SessionDB) -> None:
    first = hold(db, "hi", "hello", "one", "1")
    second = hold(db, "hi", "hello", "two", "2", id=f"{BASE}-2")
    assert db.bind_session(BASE, turns("hi", "hello", "one", "1")) == first
    assert db.bind_session(BASE, turns("hi", "hello", "two", "2")) == second


@pytest.mark.parametrize(
    "history",
    [
        [],
        turns("hi", "hello"),
        turns("hi", "hello", "how?", "otherwise"),
        turns("hi", "edited", "how?", "so"),
        turns("edited", "hello", "how?", "so"),
        turns("hi", "hello", "how", "so"),
        turns("hi", "hello", "how?", "so", "and", "then"),
        turns("how?", "so"),
        turns("how?", "so", "hi", "hello"),
        turns("hihow?", "hello"),
        turns("hi", "hello\n\nhow?\n\nso"),
    ],
)
def test_bind_of_different_history_is_new_session(filled_db: SessionDB, history: list[dict[str, Any]]) -> None:
    assert is_new(filled_db, filled_db.bind_session(BASE, history))


def test_new_bound_ids_are_numbered_and_unique(filled_db: SessionDB) -> None:
    ids = [hold(filled_db, "x", str(n), id=filled_db.bind_session(BASE, [])) for n in range(3)]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(rf"{BASE}-\d+", id) for id in ids)


def test_bind_skips_id_numbers_already_taken(filled_db: SessionDB) -> None:
    for n in range(1, 6):
        filled_db.create_session(f"{BASE}-{n}", "cli", owner="bob")
    assert is_new(filled_db, filled_db.bind_session(BASE, []))


@pytest.mark.parametrize("who", [{"owner": "bob"}, {"session_key": "k2"}, {"session_key": None}])
def test_bind_never_returns_session_of_other_owner_or_key(db: SessionDB, who: dict[str, Any]) -> None:
    hold(db, "hi", "hello", owner="alice", session_key="k1")
    assert db.bind_session(BASE, turns("hi", "hello"), owner="alice", session_key="k1") == BASE
    assert is_new(db, db.bind_session(BASE, turns("hi", "hello"), **{"owner": "alice", "session_key": "k1", **who}))


# ---- what counts as the same answer


def with_tools(db: SessionDB) -> None:
    hold(db, "time?")
    db.append_message(BASE, "assistant", "Let me look.", tool_calls=[call("c1")])
    db.append_message(BASE, "tool", "12:00", tool_call_id="c1", tool_name="clock")
    db.append_message(BASE, "assistant", "", tool_calls=[call("c2")])
    db.append_message(BASE, "tool", "UTC", tool_call_id="c2", tool_name="clock")
    db.append_message(BASE, "assistant", "It is noon.")


@pytest.mark.parametrize(
    ("answer", "same"),
    [
        ("It is noon.", True),
        ("Let me look.\n\nIt is noon.", True),
        ("Let me look.", False),
        ("Let me look.\nIt is noon.", False),
        ("Let me look.It is noon.", False),
        ("It is noon", False),
        ("", False),
    ],
)
def test_bind_matches_final_answer_or_whole_turn_text(db: SessionDB, answer: str, same: bool) -> None:
    with_tools(db)
    bound = db.bind_session(BASE, turns("time?", answer))
    assert bound == BASE if same else is_new(db, bound)


def test_bind_matches_history_with_tool_messages(db: SessionDB) -> None:
    with_tools(db)
    assert db.bind_session(BASE, db.get_messages_as_conversation(BASE)) == BASE


def test_bind_matches_each_turn_in_either_form(db: SessionDB) -> None:
    with_tools(db)
    for role, text in (("user", "and now?"), ("assistant", "Later.")):
        db.append_message(BASE, role, text)
    for answer in ("It is noon.", "Let me look.\n\nIt is noon."):
        assert db.bind_session(BASE, turns("time?", answer, "and now?", "Later.")) == BASE
    assert is_new(db, db.bind_session(BASE, turns("time?", "It is one.", "and now?", "Later.")))


def test_bind_ignores_system_message(filled_db: SessionDB) -> None:
    history = [{"role": "system", "content": "Be kind."}, *turns("hi", "hello", "how?", "so")]
    assert filled_db.bind_session(BASE, history) == BASE


def test_bind_compares_multipart_messages(db: SessionDB) -> None:
    picture = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 3000}},
    ]
    hold(db, picture, "a cat")
    assert db.bind_session(BASE, turns(picture, "a cat")) == BASE
    assert is_new(db, db.bind_session(BASE, turns([{"type": "text", "text": "What?"}], "a cat")))


@pytest.mark.parametrize("text", ["a\ud800b", "a\x00b", " padded\r\n", "e\u0301", "日本", "x" * 100_000])
def test_bind_matches_text_of_any_kind(db: SessionDB, text: str) -> None:
    hold(db, text, f"{text}!", f"{text}?", text)
    assert db.bind_session(BASE, turns(text, f"{text}!", f"{text}?", text)) == BASE


@pytest.mark.parametrize(
    ("stored", "parts"), [(("ab", "c"), ("a", "bc")), (("a", ""), ("", "a")), (("a\n", "b"), ("a", "\nb"))]
)
def test_bind_distinguishes_text_split_elsewhere(
    db: SessionDB, stored: tuple[str, str], parts: tuple[str, str]
) -> None:
    hold(db, stored[0], "x", stored[1], "y")
    assert is_new(db, db.bind_session(BASE, turns(parts[0], "x", parts[1], "y")))


def test_bind_finds_match_among_many_equal_openings(db: SessionDB) -> None:
    ids = [hold(db, "hi", f"answer {n}", id=db.bind_session(BASE, [])) for n in range(16)]
    assert [db.bind_session(BASE, turns("hi", f"answer {n}")) for n in range(16)] == ids


# ---- complete content

CAT, DOG = (
    [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]
    for data in ("QUJD", "REVG")
)
FILE = [
    {"type": "file", "file": {"name": "a.txt", "data": "data:text/plain;base64,bWlsaw==", "media_type": "text/plain"}}
]


def lamp(call_id: str, name: str = "lamp", room: str = "hall") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": f'{{"room": "{room}"}}'}}


def exchange(
    question: Any = "light", output: Any = "on", tool_call: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """A client's own call and its output."""
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [tool_call or lamp("c1", "lamp", "hall")]},
        {"role": "tool", "content": output, "tool_call_id": "c1"},
        {"role": "assistant", "content": "Done."},
    ]


@pytest.mark.parametrize(
    ("stored", "history", "same"),
    [
        (turns(CAT, "A cat."), turns(CAT, "A cat."), True),
        (turns(CAT, "A cat."), turns(DOG, "A cat."), False),
        (turns(CAT, "A cat."), turns("What?", "A cat."), False),
        (turns(CAT, "A cat."), turns([*CAT, *CAT], "A cat."), False),
        (turns(FILE, "Milk."), turns(FILE, "Milk."), True),
        (exchange(), exchange(), True),
        (exchange(), exchange(output="off"), False),
        (exchange(), exchange(output=CAT), False),
        (exchange(output=CAT), exchange(output=CAT), True),
        (exchange(output=CAT), exchange(output=DOG), False),
        (exchange(), exchange(tool_call=lamp("c2", "lamp", "hall")), False),
        (exchange(), exchange(tool_call=lamp("c1", "horn", "hall")), False),
        (exchange(), exchange(tool_call=lamp("c1", "lamp", "kitchen")), False),
        (exchange(), turns("light", "Done."), False),
        (exchange(), exchange()[:2], False),
        (exchange(), [exchange()[0], *exchange()[3:]], False),
        (turns("light", "Done."), exchange(), False),
    ],
)
def test_bind_compares_every_part_of_message(db: SessionDB, stored: Any, history: Any, same: bool) -> None:
    db.create_session(BASE, "api_server", base_id=BASE)
    for message in stored:
        db.append_message(BASE, **message)
    session_id = db.bind_session(BASE, history)
    assert session_id == BASE if same else is_new(db, session_id)


def test_bind_replaces_history_hash_of_older_version(db: SessionDB) -> None:
    hold(db, CAT, "A cat.")
    db.transaction(lambda: db.engine.write(lambda tx: tx.execute("UPDATE sessions SET transcript_digest = 'ab12'")))
    assert is_new(db, db.bind_session(BASE, turns(DOG, "A cat.")))
    assert db.bind_session(BASE, turns(CAT, "A cat.")) == BASE
    for message in turns("more", "yes"):
        db.append_message(BASE, **message)
    row = db.get_session(BASE)
    assert row is not None
    assert row["transcript_digest"].startswith("2:")
    assert db.bind_session(BASE, turns(CAT, "A cat.", "more", "yes")) == BASE


# ---- compaction, rewinding, forks


@pytest.mark.parametrize(
    "live",
    [
        turns("[summary]", "Noted."),
        [*turns("[summary]", "Noted."), *turns("how?", "so")],
        [{"role": "user", "content": "[summary]"}],
    ],
)
def test_bind_finds_compacted_session(filled_db: SessionDB, live: list[dict[str, Any]]) -> None:
    history = turns("hi", "hello", "how?", "so")
    filled_db.archive_and_compact(BASE, live)
    assert filled_db.bind_session(BASE, history) == BASE
    for message in turns("more", "yes"):
        filled_db.append_message(BASE, **message)
    assert filled_db.bind_session(BASE, history + turns("more", "yes")) == BASE
    assert is_new(filled_db, filled_db.bind_session(BASE, history + turns("more", "no")))
    assert is_new(filled_db, filled_db.bind_session(BASE, turns("hi", "other", "how?", "so", "more", "yes")))


def test_bind_finds_rewound_session_by_remaining_history(filled_db: SessionDB) -> None:
    filled_db.rewind_to_message(BASE, filled_db.get_messages(BASE)[2]["id"])
    assert filled_db.bind_session(BASE, turns("hi", "hello")) == BASE
    for message in turns("why?", "because"):
        filled_db.append_message(BASE, **message)
    assert filled_db.bind_session(BASE, turns("hi", "hello", "why?", "because")) == BASE


def test_bind_prefers_source_over_fork(filled_db: SessionDB) -> None:
    filled_db.fork_session(BASE, "fork")
    assert filled_db.bind_session(BASE, turns("hi", "hello", "how?", "so")) == BASE


# ---- leases and chosen ids


def test_bind_skips_session_leased_by_other_turn(store: Store) -> None:
    hold(store.sessions, "hi", "hello")
    token = store.leases.acquire(f"session:{BASE}", "somebody", 60)
    assert is_new(store.sessions, store.sessions.bind_session(BASE, turns("hi", "hello")))
    store.leases.release(f"session:{BASE}", token)
    assert store.sessions.bind_session(BASE, turns("hi", "hello")) == BASE


def test_bind_skips_leased_id_without_session(store: Store) -> None:
    store.leases.acquire(f"session:{BASE}", "somebody", 60)
    assert is_new(store.sessions, store.sessions.bind_session(BASE, []))


def test_bind_ignores_session_with_explicit_id(db: SessionDB) -> None:
    hold(db, "hi", "hello", id="mine", base_id=None)
    assert db.bind_session(BASE, turns("hi", "hello")) == BASE


def test_bind_ignores_explicit_id_that_looks_derived(db: SessionDB) -> None:
    hold(db, "hi", "hello", base_id=None)
    assert is_new(db, db.bind_session(BASE, turns("hi", "hello")))


# ---- what looking costs


def test_bind_compares_limited_rows_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    plain = history_match._text
    monkeypatch.setattr(history_match, "_text", lambda content: compared.append(content) or plain(content))
    rows = [row_of_message("", {"role": "assistant", "content": f"step {n}"}) for n in range(3 * BOUND_TURN_ROWS_MAX)]
    assert history_match.match([{"role": "assistant", "content": "never said"}], rows) is None
    assert len(compared) <= BOUND_TURN_ROWS_MAX + 1


def test_bind_shares_row_budget_over_sessions(db: SessionDB, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(6):
        hold(db, "hi", f"hello {n}", id=f"{BASE}-{n}")
    read: list[str] = []
    plain = rows.conversation_rows
    monkeypatch.setattr(rows, "conversation_rows", lambda tx, id, *more: read.append(id) or plain(tx, id, *more))
    monkeypatch.setattr(history_match, "BOUND_ROWS_MAX", 4, raising=False)
    assert db.get_session(db.bind_session(BASE, turns("hi", "other"))) is None
    assert len(read) == 2
