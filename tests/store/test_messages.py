"""Messages come back as they went in, in order, in windows, and in the shape a model is given."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.store.base import LeaseLost
from hermes.store.rows import archive, row_of_message
from hermes.store.sessions import SessionDB
from hermes.store.stores import Store

from .conftest import call, contents, create_conversation, raw

PARTS = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "low"}},
]

FIELDS: dict[str, Any] = {
    "tool_name": "clock",
    "tool_calls": [call("c1", arguments='{"zone": "UTC"}'), call("c2")],
    "tool_call_id": "c1",
    "token_count": 12,
    "finish_reason": "stop",
    "reasoning": "Let me think.",
    "timestamp": 1_700_000_000.25,
    "run_id": "run_1",
    "synthetic": True,
}

ROW_KEYS = {
    "id",
    "session_id",
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "tool_name",
    "timestamp",
    "token_count",
    "finish_reason",
    "reasoning",
    "active",
    "compacted",
    "model_only",
    "synthetic",
    "run_id",
}


def data_url(size: int, letter: str = "A", media: str = "image/png") -> str:
    """A data URL of exactly this many characters."""
    head = f"data:{media};base64,"
    return head + letter * (size - len(head))


def picture(url: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]


def blobs(db: SessionDB) -> int:
    return int(raw(db, "select count(*) from blobs")[0][0])


# ---- appending


@pytest.mark.parametrize("field", FIELDS)
def test_message_field_round_trip(db: SessionDB, field: str) -> None:
    db.create_session("s", "cli")
    db.append_message("s", "assistant", "x", **{field: FIELDS[field]})
    assert db.get_messages("s")[0][field] == FIELDS[field]


def test_text_message_has_every_key(db: SessionDB) -> None:
    before = time.time()
    [id] = create_conversation(db, "s", "hello")
    [row] = db.get_messages("s")
    assert row.keys() >= ROW_KEYS
    assert (row["id"], row["session_id"], row["role"], row["content"]) == (id, "s", "user", "hello")
    assert (bool(row["active"]), bool(row["compacted"]), bool(row["synthetic"])) == (True, False, False)
    assert before <= row["timestamp"] <= time.time()
    assert not row["tool_calls"]


def test_message_ids_increase_across_sessions(db: SessionDB) -> None:
    ids = [
        *create_conversation(db, "a", "1", "2"),
        *create_conversation(db, "b", "3"),
        db.append_message("a", "user", "4"),
    ]
    assert ids == sorted(set(ids))


def test_append_to_unknown_session_raises(db: SessionDB) -> None:
    with pytest.raises(KeyError):
        db.append_message("s", "user", "hello")
    assert (db.get_session("s"), db.get_messages("s")) == (None, [])


@pytest.mark.parametrize("role", ["", "wizard"])
def test_append_rejects_unknown_role(db: SessionDB, role: str) -> None:
    db.create_session("s", "cli")
    with pytest.raises(ValueError, match=r"\w"):
        db.append_message("s", role, "hello")
    assert db.get_messages("s") == []


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "text",
        " \r\n\t ",
        "[]",
        '[{"type": "text", "text": "x"}]',
        "null",
        [],
        PARTS,
        [{"type": "text", "text": ""}],
        [{"type": "thing", "n": 2**70, "f": 1e300}],
        [{"type": "thing", "n": 1, "f": 1.5, "deep": {"a": [None, True, "ä"]}}],
        "日本語のテキスト",
        "a\u200bb",
        "👩‍👩‍👧 e\u0301",
    ],
)
def test_content_round_trip(db: SessionDB, content: Any) -> None:
    create_conversation(db, "s", content)
    assert contents(db, "s") == [content]
    assert db.get_messages_as_conversation("s") == [{"role": "user", "content": content}]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), max_size=5))
def test_any_text_round_trip(texts: list[str]) -> None:
    db = SessionDB(":memory:")
    create_conversation(db, "s", *texts)
    assert contents(db, "s") == texts
    db.close()


@pytest.mark.parametrize("bad", ["a\ud800b", "a\udfffb", "a\x00b", "a\udc00\ud800b", "\x00", "\ud83d"])
@pytest.mark.parametrize("field", ["content", "reasoning", "api_content", "tool_name", "tool_call_id", "finish_reason"])
def test_unstorable_characters_are_replaced(db: SessionDB, field: str, bad: str) -> None:
    db.create_session("s", "cli")
    db.append_message("s", "tool", **({"content": "x"} | {field: bad}))
    content = (
        db.get_messages_as_conversation("s")[0]["content"] if field == "api_content" else db.get_messages("s")[0][field]
    )
    assert "\x00" not in content
    assert content.encode()
    assert (content[0], content[-1]) == ("a", "b") if bad[0] == "a" else content


@pytest.mark.parametrize("bad", ["a\ud800b", "a\x00b"])
@pytest.mark.parametrize(
    "fields",
    [
        {"content": [{"type": "text", "text": "BAD"}]},
        {"content": [{"BAD": 1}]},
        {"content": "x", "tool_calls": [call("BAD", arguments="BAD")]},
        {"content": "x", "opaque": {"chat_completions": {"note": "BAD"}}},
        {"content": "x", "api_content": [{"type": "text", "text": "BAD"}]},
    ],
)
def test_append_accepts_any_structure(db: SessionDB, fields: dict[str, Any], bad: str) -> None:
    def corrupt(value: Any) -> Any:
        if isinstance(value, dict):
            return {corrupt(key): corrupt(item) for key, item in value.items()}
        if isinstance(value, list):
            return [corrupt(item) for item in value]
        return bad if value == "BAD" else value

    db.create_session("s", "cli")
    db.append_message("s", "assistant", **corrupt(fields))
    assert json.dumps(db.get_messages_as_conversation("s"), ensure_ascii=False).encode()
    assert json.dumps(db.get_messages("s"), ensure_ascii=False).encode()


@pytest.mark.parametrize("field", ["content", "api_content", "opaque"])
def test_deeply_nested_structure_round_trip(db: SessionDB, field: str) -> None:
    deep = json.loads('{"a":' * 800 + "1" + "}" * 800)
    db.create_session("s", "cli")
    db.append_message("s", "user", **({"content": "x"} | {field: deep if field == "opaque" else [deep]}))
    assert len(db.get_messages_as_conversation("s")) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"content": 7},
        {"content": {"type": "text"}},
        {"timestamp": float("nan")},
        {"timestamp": "yesterday"},
        {"token_count": 2**70},
        {"tool_calls": "all"},
    ],
    ids=str,
)
def test_append_rejects_argument_of_wrong_type(db: SessionDB, wrong: dict[str, Any]) -> None:
    db.create_session("s", "cli")
    with pytest.raises(ValueError, match=r"\w"):
        db.append_message("s", "user", **({"content": "x"} | wrong))
    assert (db.get_messages("s"), db.get_session("s")["message_count"]) == ([], 0)


def test_titles_and_prompts_accept_any_text(db: SessionDB) -> None:
    db.create_session("s", "cli\ud800", instructions="a\x00\ud800b", system_prompt="\x00", cwd="/\udcff")
    db.set_session_title("s", "a\ud800b")
    assert json.dumps(db.get_session("s"), ensure_ascii=False).encode()


def test_fifty_megabyte_message_round_trip(db: SessionDB) -> None:
    text = "Fifty megabytes of text. " * 2_000_000
    create_conversation(db, "s", text)
    assert contents(db, "s") == [text]


# ---- large data


def test_large_data_url_is_deduplicated_and_restored(file_db: SessionDB) -> None:
    url = data_url(50_000)
    create_conversation(file_db, "a", picture(url), "nice", picture(url))
    create_conversation(file_db, "b", [*picture(url), *picture(url)])
    assert (blobs(file_db), contents(file_db, "a")) == (1, [picture(url), "nice", picture(url)])
    assert contents(file_db, "b") == [[*picture(url), *picture(url)]]
    [[longest]] = raw(file_db, "select max(length(coalesce(parts, '')) + length(coalesce(content, ''))) from messages")
    assert longest < 2000


@pytest.mark.parametrize(("size", "blob_count"), [(4096, 0), (4097, 1)])
def test_data_url_over_4096_characters_is_stored_as_blob(durable_db: SessionDB, size: int, blob_count: int) -> None:
    create_conversation(durable_db, "s", picture(data_url(size)))
    assert (blobs(durable_db), contents(durable_db, "s")) == (blob_count, [picture(data_url(size))])


@pytest.mark.parametrize(
    "url",
    [
        data_url(10_001),
        data_url(10_003, "/"),
        data_url(10_000) + "==",
        data_url(9_998) + "B==",
        data_url(10_000, "é"),
        data_url(10_000, "%41"),
        data_url(5_000) + "\n" + "A" * 5_000,
        data_url(10_000, media="IMAGE/PNG"),
        data_url(10_000, media="text/plain;charset=utf-8"),
        data_url(10_000, media=""),
        "data:image/svg+xml;utf8," + "<svg/>" * 2000,
        "data:," + "x" * 10_000,
        "data:" + "x" * 10_000,
        "DATA:image/png;base64," + "AAAA" * 2500,
    ],
)
def test_data_urls_of_every_kind_round_trip(db: SessionDB, url: str) -> None:
    create_conversation(db, "s", picture(url), url, f"before {url} after\n![x]({url})")
    assert contents(db, "s") == [picture(url), url, f"before {url} after\n![x]({url})"]


def test_blobs_are_restored_in_every_field(db: SessionDB) -> None:
    url = data_url(20_000)
    arguments = json.dumps({"image": url})
    db.create_session("s", "cli")
    db.append_message("s", "user", "x", api_content=picture(url))
    db.append_message("s", "assistant", None, tool_calls=[call("c", arguments=arguments)])
    db.append_message("s", "tool", url, tool_call_id="c")
    assert db.get_messages_as_conversation("s") == [
        {"role": "user", "content": picture(url)},
        {"role": "assistant", "content": None, "tool_calls": [call("c", arguments=arguments)]},
        {"role": "tool", "content": url, "tool_call_id": "c"},
    ]


def test_blob_is_deleted_with_its_last_row(durable_db: SessionDB) -> None:
    url = data_url(50_000)
    for id in ("a", "b"):
        create_conversation(durable_db, id, picture(url), "ok", picture(url))
    durable_db.delete_session("a")
    between = (blobs(durable_db), contents(durable_db, "b"))
    durable_db.delete_session("b")
    assert between == (1, [picture(url), "ok", picture(url)])
    assert blobs(durable_db) == 0


def test_blob_of_hidden_row_is_kept(durable_db: SessionDB) -> None:
    url = data_url(50_000)
    ids = create_conversation(durable_db, "s", "hi", "hello", picture(url), "nice")
    durable_db.rewind_to_message("s", ids[2])
    durable_db.archive_and_compact("s", [{"role": "user", "content": "summary"}])
    assert contents(durable_db, "s", include_inactive=True)[2] == picture(url)


PLACES: dict[str, dict[str, Any]] = {
    "a part": {"content": picture(data_url(20_000))},
    "two parts": {"content": picture(data_url(20_000)) * 2},
    "text": {"content": data_url(20_000)},
    "within text": {"content": f"see {data_url(20_000)} and {data_url(20_000)}"},
    "words for the model": {"content": "x", "api_content": picture(data_url(20_000))},
    "arguments": {"content": None, "tool_calls": [call("c", arguments=json.dumps({"image": data_url(20_000)}))]},
    "opaque": {"content": "x", "opaque": {"x": {"image": data_url(20_000)}}},
}


@pytest.mark.parametrize("place", PLACES)
def test_no_orphaned_blobs(durable_db: SessionDB, place: str) -> None:
    durable_db.create_session("s", "cli")
    for _ in range(2):
        durable_db.append_message("s", "assistant", **PLACES[place])
    fork = durable_db.fork_session("s")
    durable_db.delete_session("s")
    messages = durable_db.get_messages_as_conversation(fork)
    durable_db.archive_and_compact(fork, messages)
    assert durable_db.get_messages_as_conversation(fork) == messages
    assert data_url(20_000) in json.dumps(messages)
    durable_db.delete_session(fork)
    assert blobs(durable_db) == 0


def test_forged_blob_reference_reads_no_foreign_data(file_db: SessionDB) -> None:
    create_conversation(file_db, "alice", picture(data_url(50_000)), data_url(50_000), owner="alice")
    columns = raw(file_db, "select parts, content from messages where session_id = 'alice'")
    stored = [text for row in columns for text in row if text]
    messages = [*stored, *([{"type": "text", "text": text}] for text in stored)]
    messages += [json.loads(text) for text in stored if text.startswith("[")]
    create_conversation(file_db, "bob", *messages, owner="bob")
    assert contents(file_db, "bob") == messages


# ---- counters


def test_session_counters_follow_messages(db: SessionDB) -> None:
    create_conversation(db, "s", "What time is it?")
    db.append_message("s", "assistant", None, tool_calls=[call("c1"), call("c2")])
    db.append_message("s", "tool", "1", tool_call_id="c1")
    db.append_message("s", "tool", "2", tool_call_id="c2")
    row = db.get_session("s")
    assert (row["message_count"], row["tool_call_count"]) == (4, 2)


def test_append_updates_last_active(db: SessionDB) -> None:
    db.create_session("s", "cli")
    before = time.time()
    db.append_message("s", "user", "hello")
    assert before <= db.get_session("s")["last_active"] <= time.time()


# ---- windows


@pytest.mark.parametrize(
    ("window", "numbers"),
    [
        ({}, "0123456789"),
        ({"limit": 3}, "012"),
        ({"limit": 0}, ""),
        ({"limit": 100}, "0123456789"),
        ({"offset": 7}, "789"),
        ({"offset": 2, "limit": 3}, "234"),
        ({"offset": 10}, ""),
        ({"after": 6}, "789"),
        ({"after": 6, "limit": 2}, "78"),
        ({"after": 9}, ""),
        ({"before": 3}, "012"),
        ({"before": 0}, ""),
        ({"after": 2, "before": 6}, "345"),
        ({"order": "desc"}, "9876543210"),
        ({"order": "desc", "limit": 3}, "987"),
        ({"order": "desc", "limit": 2, "offset": 3}, "65"),
        ({"order": "desc", "before": 5, "limit": 3}, "432"),
        ({"order": "desc", "after": 6}, "987"),
        ({"order": "asc", "after": 3, "limit": 2, "offset": 1}, "56"),
    ],
)
def test_get_messages_windows(db: SessionDB, window: dict[str, Any], numbers: str) -> None:
    db.create_session("s", "cli")
    db.create_session("noise", "cli")
    ids = []
    for number in range(10):
        ids.append(db.append_message("s", "user", str(number)))
        db.append_message("noise", "user", "noise")
    bounds = {f"{name}_id": ids[window[name]] for name in ("before", "after") if name in window}
    rest = {name: value for name, value in window.items() if name not in ("before", "after")}
    assert "".join(contents(db, "s", **bounds, **rest)) == numbers


def test_unknown_message_order_is_rejected(db: SessionDB) -> None:
    create_conversation(db, "s", "hi")
    with pytest.raises(ValueError, match=r"\w"):
        db.get_messages("s", order="sideways; drop table messages")


@pytest.mark.parametrize(
    ("at", "window", "numbers"),
    [
        (7, None, "23456789ABC"),
        (7, 2, "56789"),
        (7, 0, "7"),
        (0, 3, "0123"),
        (14, 3, "BCDE"),
        (7, 100, "0123456789ABCDE"),
    ],
)
def test_messages_around_anchor(db: SessionDB, at: int, window: int | None, numbers: str) -> None:
    db.create_session("s", "cli")
    db.create_session("noise", "cli")
    ids = []
    for number in "0123456789ABCDE":
        ids.append(db.append_message("s", "user", number))
        db.append_message("noise", "user", "noise")
    around = db.get_messages_around("s", ids[at], **({} if window is None else {"window": window}))
    assert "".join(row["content"] for row in around) == numbers


# ---- for the model


def test_conversation_contains_only_model_fields(db: SessionDB) -> None:
    opaque = {"codex_responses": [{"type": "reasoning", "encrypted_content": "x"}]}
    db.create_session("s", "cli")
    db.append_message("s", "user", "hi", timestamp=5.0, token_count=3, run_id="run_1")
    db.append_message(
        "s", "assistant", "", tool_calls=[call("c1")], reasoning="hm", opaque=opaque, finish_reason="stop"
    )
    db.append_message("s", "tool", "12:00", tool_call_id="c1", tool_name="clock")
    db.append_message("s", "assistant", "Noon.", synthetic=True)
    assert db.get_messages_as_conversation("s") == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call("c1")], "opaque": opaque},
        {"role": "tool", "content": "12:00", "tool_call_id": "c1", "tool_name": "clock"},
        {"role": "assistant", "content": "Noon."},
    ]


def test_api_content_replaces_content_for_model(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.append_message("s", "user", "hi", api_content="hi\n\n[context]")
    db.append_message("s", "assistant", PARTS, api_content="")
    db.append_message("s", "user", "plain", api_content=PARTS)
    assert [m["content"] for m in db.get_messages_as_conversation("s")] == ["hi\n\n[context]", "", PARTS]
    assert contents(db, "s") == ["hi", PARTS, "plain"]


def test_unknown_session_is_empty_conversation(db: SessionDB) -> None:
    assert db.get_messages_as_conversation("s") == []


def test_tool_results_follow_order_of_calls(db: SessionDB) -> None:
    db.create_session("s", "cli")
    for turn in ("x", "y"):
        db.append_message("s", "user", turn)
        db.append_message("s", "assistant", None, tool_calls=[call("c1"), call("c2"), call("c3")])
        for id in ("c3", "c1", "c2"):
            db.append_message("s", "tool", f"{turn}-{id}", tool_call_id=id)
        db.append_message("s", "assistant", f"{turn}-done")
    assert [m["content"] for m in db.get_messages_as_conversation("s")] == [
        *["x", None, "x-c1", "x-c2", "x-c3", "x-done"],
        *["y", None, "y-c1", "y-c2", "y-c3", "y-done"],
    ]


def test_conversation_is_not_repaired_or_merged(db: SessionDB) -> None:
    db.create_session("s", "cli")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": None, "tool_calls": [call("c1"), call("c2")]},
        {"role": "tool", "content": "only one", "tool_call_id": "c2"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "nobody asked", "tool_call_id": "c9"},
    ]
    for message in messages:
        db.append_message("s", **message)
    assert db.get_messages_as_conversation("s") == messages


# ---- leases


def test_append_with_lost_lease_is_rejected(store: Store) -> None:
    db = store.sessions
    create_conversation(db, "s", "hi")
    old = store.leases.acquire("session:s", "one", 60)
    db.append_message("s", "assistant", "hello", lease_token=old)
    store.leases.release("session:s", old)
    new = store.leases.acquire("session:s", "two", 60)
    with pytest.raises(LeaseLost):
        db.append_message("s", "assistant", "late", lease_token=old)
    db.append_message("s", "assistant", "in time", lease_token=new)
    assert contents(db, "s") == ["hi", "hello", "in time"]
    assert db.get_session("s")["message_count"] == 3


@pytest.mark.parametrize("token", [0, 1, 99, -1])
def test_append_with_unknown_lease_token_is_rejected(store: Store, token: int) -> None:
    create_conversation(store.sessions, "s", "hi")
    with pytest.raises(LeaseLost):
        store.sessions.append_message("s", "user", "x", lease_token=token)


def test_append_with_lease_of_other_session_is_rejected(store: Store) -> None:
    create_conversation(store.sessions, "s", "hi")
    store.leases.acquire("session:s", "one", 60)
    store.leases.release("session:other", store.leases.acquire("session:other", "one", 60))
    token = store.leases.acquire("session:other", "one", 60)
    with pytest.raises(LeaseLost):
        store.sessions.append_message("s", "user", "x", lease_token=token)


# ---- compaction

SUMMARY = [{"role": "user", "content": "[summary]"}, {"role": "assistant", "content": "Noted."}]


def flags(db: SessionDB, session_id: str) -> list[tuple[Any, bool, bool]]:
    rows = db.get_messages(session_id, include_inactive=True)
    return [(row["content"], bool(row["active"]), bool(row["compacted"])) for row in rows]


def test_compaction_replaces_live_rows_and_archives_old(db: SessionDB) -> None:
    create_conversation(db, "s", "apple", "pear")
    create_conversation(db, "other", "plum")
    assert isinstance(db.archive_and_compact("s", SUMMARY), int)
    assert db.get_messages_as_conversation("s") == SUMMARY
    assert flags(db, "s") == [
        ("apple", False, True),
        ("pear", False, True),
        ("[summary]", True, False),
        ("Noted.", True, False),
    ]
    assert contents(db, "other") == ["plum"]


def test_compaction_keeps_every_field_of_new_rows(db: SessionDB) -> None:
    rows: list[dict[str, Any]] = [
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": None, "tool_calls": [call("c1")], "opaque": {"x": 1}},
        {"role": "tool", "content": "12:00", "tool_call_id": "c1", "tool_name": "clock"},
    ]
    create_conversation(db, "s", "apple")
    db.archive_and_compact("s", rows)
    assert db.get_messages_as_conversation("s") == rows


def test_conversation_continues_after_several_compactions(db: SessionDB) -> None:
    create_conversation(db, "s", "one")
    for text in ("two", "three"):
        db.archive_and_compact("s", SUMMARY)
        db.append_message("s", "user", text)
    assert contents(db, "s") == ["one", "two", "three"]
    assert [m["content"] for m in db.get_messages_as_conversation("s")] == ["[summary]", "Noted.", "three"]
    assert [row for row, active, _ in flags(db, "s") if not active] == ["one", "two"]


def test_compaction_keeps_identity_of_retained_rows(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "a", "b", "c", "d", "e", "f")
    for number in range(3):
        messages = db.get_messages_as_conversation("s")
        db.archive_and_compact("s", [messages[0], {"role": "user", "content": f"summary {number}"}, *messages[-2:]])
        ids.append(db.append_message("s", "user", f"more {len(ids)}"))
        assert [row["id"] for row in db.get_messages("s")] == ids
        assert db.get_session("s")["message_count"] == db.count_messages("s") == len(ids)
    rows = db.get_messages("s", include_inactive=True)
    assert len({row["id"] for row in rows}) == len(rows)
    assert [row["content"] for row in rows if row["model_only"]] == ["summary 0", "summary 1", "summary 2"]
    assert sorted(row["id"] for row in rows if not row["model_only"]) == ids


def test_compaction_shortens_result_only_for_model(db: SessionDB) -> None:
    create_conversation(db, "s", "go")
    db.append_message("s", "assistant", None, tool_calls=[call("c1"), call("c2")])
    ids = [db.append_message("s", "tool", f"{id} said much", tool_call_id=id) for id in ("c2", "c1")]
    messages = db.get_messages_as_conversation("s")
    rows = [row_of_message("s", {**m, "content": "[left out]"} if m["role"] == "tool" else m) for m in messages]
    db._engine.write(lambda tx: archive(tx, "s", rows, range(4)))
    assert [m["content"] for m in db.get_messages_as_conversation("s")] == ["go", None, "[left out]", "[left out]"]
    visible_rows = db.get_messages("s", include_inactive=True)
    assert [(row["id"], row["content"]) for row in visible_rows[2:]] == [
        (ids[0], "c2 said much"),
        (ids[1], "c1 said much"),
    ]


def test_rejected_compaction_changes_nothing(db: SessionDB) -> None:
    create_conversation(db, "s", "apple", "pear")
    with pytest.raises(ValueError, match=r"\w"):
        db.archive_and_compact("s", [*SUMMARY, {"role": "wizard", "content": "x"}])
    assert flags(db, "s") == [("apple", True, False), ("pear", True, False)]


def test_compaction_does_not_archive_rewound_rows(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "apple", "pear", "plum", "fig")
    db.rewind_to_message("s", ids[2])
    db.archive_and_compact("s", SUMMARY)
    assert [f[1:] for f in flags(db, "s")[:4]] == [(False, True), (False, True), (False, False), (False, False)]


# ---- rewinding


def test_rewind_hides_message_and_later_ones(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "a", "b", "c", "d", "e", "f")
    create_conversation(db, "other", "x", "y")
    result = db.rewind_to_message("s", ids[2])
    assert (result["rewound_count"], result["target_message"]["content"], result["new_head_id"]) == (4, "c", ids[1])
    assert (contents(db, "s"), contents(db, "other")) == (["a", "b"], ["x", "y"])
    assert flags(db, "s")[2:] == [(text, False, False) for text in "cdef"]


def test_rewind_to_first_message_leaves_empty_conversation(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "a", "b")
    result = db.rewind_to_message("s", ids[0])
    assert (result["rewound_count"], result["new_head_id"], contents(db, "s")) == (2, None, [])
    assert db.get_messages_as_conversation("s") == []


def test_conversation_continues_after_rewind(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "a", "b", "c", "d")
    db.rewind_to_message("s", ids[2])
    db.append_message("s", "user", "C")
    assert contents(db, "s") == ["a", "b", "C"]


def test_rewind_requires_user_message_of_same_session(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "a", "b")
    tool = db.append_message("s", "tool", "t", tool_call_id="c")
    [other] = create_conversation(db, "other", "x")
    for target in (ids[1], tool, other, 999_999, 0, -1):
        with pytest.raises(ValueError, match=r"\w"):
            db.rewind_to_message("s", target)
    assert (contents(db, "s"), contents(db, "other")) == (["a", "b", "t"], ["x"])


def test_rewind_after_compaction_restores_no_old_row(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "a", "b", "c", "d")
    db.archive_and_compact("s", [*SUMMARY, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}])
    db.append_message("s", "user", "e")
    result = db.rewind_to_message("s", ids[2])
    assert (result["rewound_count"], result["new_head_id"], contents(db, "s")) == (3, ids[1], ["a", "b"])
    assert db.get_messages_as_conversation("s") == SUMMARY
    assert flags(db, "s")[:2] == [("a", False, True), ("b", False, True)]
    assert sorted(flags(db, "s"))[-3:] == [(text, False, False) for text in "cde"]


def test_rewind_into_compacted_part_restores_original_rows(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "a", "b", "c", "d", "e")
    db.archive_and_compact("s", [*SUMMARY, {"role": "user", "content": "e"}])
    db.rewind_to_message("s", ids[2])
    db.append_message("s", "user", "C")
    assert contents(db, "s") == ["a", "b", "C"]
    assert [m["content"] for m in db.get_messages_as_conversation("s")] == ["a", "b", "C"]


# ---- all together

KINDS = ["say", "say", "say", "use a tool", "compact", "compact", "rewind", "fork"]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 40)), max_size=25))
def test_transcript_and_model_view_stay_consistent_property(
    changes: list[tuple[str, int]],
) -> None:
    db = SessionDB(":memory:")
    db.create_session("s", "cli")
    session, contents, told_by = "s", list[str](), dict[str, set[str]]()
    ids: list[int] = []
    for number, (kind, choice) in enumerate(changes):
        new: list[dict[str, Any]] = []
        if kind == "say":
            new = [{"role": "user", "content": f"u{number} 北"}, {"role": "assistant", "content": f"a{number}"}]
        elif kind == "use a tool":
            calls = [f"{number}-1", f"{number}-2"]
            new = [{"role": "assistant", "content": f"calls {number}", "tool_calls": [call(id) for id in calls]}]
            new += [{"role": "tool", "content": id, "tool_call_id": id} for id in calls]
        elif kind == "compact":
            messages = db.get_messages_as_conversation(session)
            start = min(choice % 5, len(messages))
            end = max(start, len(messages) - choice // 5)
            middle = [message["content"] for message in messages[start:end]]
            summary = f"summary {number}"
            told_by[summary] = {text for content in middle for text in told_by.get(content, {content})}
            db.archive_and_compact(session, [*messages[:start], {"role": "user", "content": summary}, *messages[end:]])
        elif kind == "rewind":
            rows = db.get_messages(session)
            if users := [at for at, row in enumerate(rows) if row["role"] == "user"]:
                at = users[choice % len(users)]
                db.rewind_to_message(session, rows[at]["id"])
                contents, ids = contents[:at], ids[:at]
        elif kind == "fork":
            rows = db.get_messages(session)
            at = choice % len(rows) if rows else None
            session = db.fork_session(session, at_message_id=None if at is None else rows[at]["id"])
            while at is not None and at + 1 < len(rows) and rows[at + 1]["role"] == "tool":
                at += 1
            contents = contents[: 0 if at is None else at + 1]
            ids = [row["id"] for row in db.get_messages(session)]
        ids += [db.append_message(session, **message) for message in new]
        contents += [message["content"] for message in new]
        visible_rows = db.get_messages(session)
        assert ([row["content"] for row in visible_rows], [row["id"] for row in visible_rows]) == (contents, ids)
        assert db.get_session(session)["message_count"] == len(contents)
        everything = [row["content"] for row in db.get_messages(session, include_inactive=True)]
        assert len(everything) == len(set(everything))
        messages = [message["content"] for message in db.get_messages_as_conversation(session)]
        assert [text for text in messages if text not in told_by] == [
            text for text in contents if text in set(messages)
        ]
        covered = [text for content in messages for text in told_by.get(content, {content})]
        assert sorted(covered) == sorted(contents)
    assert db.check(deep=True) == []
    db.close()


def test_rewind_hides_later_compaction_summary(db: SessionDB) -> None:
    db.create_session("s", "cli", base_id="api-1")
    for number in range(1, 11):
        db.append_message("s", "user" if number % 2 else "assistant", f"word{number}")
    messages = db.get_messages_as_conversation("s")
    db.archive_and_compact("s", [*messages[:4], {"role": "user", "content": "a summary"}, *messages[8:]])
    target = next(row for row in db.get_messages("s") if row["content"] == "word3")
    db.rewind_to_message("s", target["id"])
    assert [row["content"] for row in db.get_messages("s")] == ["word1", "word2"]
    numbers = [n for n in range(1, 11) if db.search_messages(f"word{n}")]
    assert numbers == [1, 2]
    history = [{"role": "user", "content": "word1"}, {"role": "assistant", "content": "word2"}]
    assert db.bind_session("api-1", history) == "s"


def test_compaction_matches_repeated_rows_correctly(db: SessionDB) -> None:
    db.create_session("s", "cli")
    ids = [
        db.append_message("s", role, text)
        for role, text in zip(("user", "assistant") * 2, ("yes", "A", "yes", "B"), strict=True)
    ]
    messages = db.get_messages_as_conversation("s")
    db.archive_and_compact("s", [{"role": "user", "content": "a summary"}, *messages[2:]])
    db.rewind_to_message("s", ids[2])
    assert {hit["id"] for hit in db.search_messages("yes OR A OR B")} == set(ids[:2])


@pytest.mark.parametrize(
    "fields",
    [
        {"content": [{"type": "text", "text": "a\x00", "x": float("nan")}]},
        {"tool_calls": [{"id": [1]}]},
        {},
    ],
    ids=["nan", "list as id", "deeply nested"],
)
def test_unusual_content_is_readable(db: SessionDB, fields: dict[str, Any]) -> None:
    if not fields:
        value: Any = 1
        for _ in range(5000):
            value = [value]
        fields = {"content": [{"type": "text", "text": "x", "deep": value}]}
    db.create_session("s", "cli")
    db.append_message("s", "assistant", **fields)
    db.append_message("s", "tool", "x", tool_call_id="1")
    assert len(db.get_messages("s")) == len(db.get_messages_as_conversation("s")) == 2
