"""The tool `session_search`: whose conversations it finds, and what it shows of them."""

from __future__ import annotations

from typing import Any

import pytest

from agent.harness import Harness, Json
from hermes.tools import session_search
from hermes.tools.session_search import TOOL
from support.model_server import ModelServer

from .turns import tool_answers

SAID = [("user", "Where is the red fox?"), ("assistant", "In the wood."), ("user", "Thank you."), ("assistant", "Bye.")]


async def add_session(harness: Harness, session_id: str, *messages: tuple[str, str], **fields: Any) -> list[int]:
    """A conversation of the past; the ids of its messages."""
    sessions = harness.app.store.sessions
    await sessions.create_session(session_id, "cli", **fields)
    return [await sessions.append_message(session_id, role, text) for role, text in messages or SAID]


async def search(harness: Harness, server: ModelServer, *arguments: Json, **fields: Any) -> list[Json]:
    return await tool_answers(harness, server, TOOL, *arguments, **fields)


async def test_session_search_hits_with_context(harness: Harness, server: ModelServer) -> None:
    ids = await add_session(harness, "past", title="Foxes")
    await add_session(harness, "other", ("user", "Nothing of the kind."))
    [answer] = await search(harness, server, {"query": "wood"})
    [hit] = answer["hits"]
    assert (hit["session_id"], hit["title"], hit["message_id"], hit["role"]) == ("past", "Foxes", ids[1], "assistant")
    assert "wood" in hit["snippet"]
    assert [near["content"] for near in hit["context"]] == ["Where is the red fox?", "Thank you."]
    assert answer["complete"] is True


@pytest.mark.parametrize("persist", [True, False])
async def test_session_search_excludes_running_session(harness: Harness, server: ModelServer, persist: bool) -> None:
    await add_session(harness, "past")
    await add_session(harness, "now")
    hits, mine, recent = await search(
        harness, server, {"query": "fox"}, {"session_id": "now"}, {}, session_id="now", persist=persist, history=None
    )
    assert [hit["session_id"] for hit in hits["hits"]] == ["past"]
    assert mine["code"] == "not_found"
    assert [session["session_id"] for session in recent["sessions"]] == ["past"]


SCOPES = [("default", None), ("default", "room-1"), ("default", "room-2"), ("ada", None), ("ada", "room-1")]


@pytest.mark.parametrize(("owner", "key"), SCOPES)
async def test_session_search_is_scoped_to_owner(
    harness: Harness, server: ModelServer, owner: str, key: str | None
) -> None:
    ids = {}
    for number, (owner_name, where) in enumerate(SCOPES):
        ids[owner_name, where] = await add_session(harness, f"s{number}", owner=owner_name, session_key=where)
    mine = f"s{SCOPES.index((owner, key))}"
    calls: list[Json] = [{"query": "fox"}, {}, {"session_id": mine, "around_message_id": ids[owner, key][1]}]
    for number, scope in enumerate(SCOPES):
        calls += [{"session_id": f"s{number}"}, {"session_id": f"s{number}", "query": "fox"}]
        calls += [{"session_id": f"s{number}", "around_message_id": ids[scope][0]}]
    # The id of a message of another session is no way to it either.
    calls += [{"session_id": mine, "around_message_id": ids[scope][0]} for scope in SCOPES if scope != (owner, key)]
    hits, recent, window, *others = await search(harness, server, *calls, owner=owner, session_key=key)
    assert {hit["session_id"] for hit in hits["hits"]} == {mine}
    assert [session["session_id"] for session in recent["sessions"]] == [mine]
    assert len(window["messages"]) == 4
    indexes = [n for n, answer in enumerate(others) if "error" not in answer]
    assert indexes == [3 * SCOPES.index((owner, key)) + n for n in range(3)]
    assert {answer["code"] for answer in others if "error" in answer} == {"not_found"}


async def test_session_search_hits_of_others_do_not_hide_own(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_search.limits, "RECALL_BATCH", 4)
    for number in range(6):
        await add_session(harness, f"keyed-{number}", ("user", "fox fox fox"), session_key="k")
    await add_session(
        harness, "mine", ("user", "There was once a very small fox in a very large wood, and nobody saw it.")
    )
    [hits, recent] = await search(harness, server, {"query": "fox"}, {})
    assert [hit["session_id"] for hit in hits["hits"]] == ["mine"] and hits["complete"]
    assert [session["session_id"] for session in recent["sessions"]] == ["mine"]
    monkeypatch.setattr(session_search.limits, "RECALL_BATCHES_MAX", 1)
    [hits] = await search(harness, server, {"query": "fox"})
    assert (hits["hits"], hits["complete"]) == ([], False)


async def test_session_search_windows(harness: Harness, server: ModelServer) -> None:
    ids = await add_session(harness, "past", *[("user", f"line {n}") for n in range(60)])
    calls: list[Json] = [
        {"around_message_id": ids[30]},
        {"around_message_id": ids[30], "window": 1},
        {"around_message_id": ids[0], "window": 20},
        {"window": 2},
        {"around_message_id": 10**9},
    ]
    results = await search(harness, server, *({"session_id": "past", **call} for call in calls))
    lines = [[int(m["content"].split()[1]) for m in answer.get("messages", [])] for answer in results]
    assert lines == [list(range(25, 36)), [29, 30, 31], list(range(21)), [55, 56, 57, 58, 59], []]
    assert results[-1]["code"] == "not_found"


async def test_session_search_truncates_messages_and_names_calls(harness: Harness, server: ModelServer) -> None:
    await add_session(harness, "past", ("user", "x" * 2001))
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    await harness.app.store.sessions.append_message("past", "assistant", "", tool_calls=calls)
    [answer] = await search(harness, server, {"session_id": "past"})
    first, second = answer["messages"]
    assert first["content"].startswith("x" * 2000) and "1 more" in first["content"]
    assert second["calls"] == ["look"]


async def test_session_search_sort_and_role_filter(harness: Harness, server: ModelServer) -> None:
    for number in range(3):
        await add_session(harness, f"s{number}", ("user", "fox one"), ("assistant", "fox two"), ("tool", "fox three"))
    newest, oldest, users, two, odd = await search(
        harness,
        server,
        {"query": "fox", "sort": "newest", "limit": 1},
        {"query": "fox", "sort": "oldest", "limit": 1},
        {"query": "fox", "role_filter": "user", "limit": 10},
        {"query": "fox", "role_filter": "user, assistant", "limit": 10},
        {"query": "fox", "role_filter": "nobody"},
    )
    assert (newest["hits"][0]["session_id"], oldest["hits"][0]["session_id"]) == ("s2", "s0")
    assert [hit["role"] for hit in users["hits"]] == ["user"] * 3
    assert sorted(hit["role"] for hit in two["hits"]) == ["assistant"] * 3 + ["user"] * 3
    assert odd["code"] == "invalid_arguments"


async def test_session_search_recent_sessions(harness: Harness, server: ModelServer) -> None:
    for number in range(12):
        await add_session(harness, f"s{number:02}", title=f"Talk {number}")
    few, many = await search(harness, server, {}, {"limit": 10, "query": "  "})
    assert [session["title"] for session in few["sessions"]] == ["Talk 11", "Talk 10", "Talk 9"]
    assert len(many["sessions"]) == 10
    assert few["sessions"][0]["messages"] == 4 and few["sessions"][0]["preview"] == "Where is the red fox?"


@pytest.mark.parametrize(
    ("arguments", "good"),
    [
        ({"query": "x" * 2048}, True),
        ({"query": "x" * 2049}, False),
        ({"limit": 10}, True),
        ({"limit": 11}, False),
        ({"limit": 0}, False),
        ({"session_id": "past", "window": 20}, True),
        ({"session_id": "past", "window": 21}, False),
        ({"session_id": "past", "window": 0}, False),
        ({"around_message_id": 1}, False),
        ({"query": "x", "sort": "random"}, False),
        ({"query": 'NOT ( "* AND'}, True),
    ],
)
async def test_session_search_limits(harness: Harness, server: ModelServer, arguments: Json, good: bool) -> None:
    await add_session(harness, "past")
    [answer] = await search(harness, server, arguments)
    assert answer.get("code") == (None if good else "invalid_arguments")
