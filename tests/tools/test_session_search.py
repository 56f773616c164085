"""The tool `session_search`: whose conversations it finds, and what it shows of them."""

from __future__ import annotations

from typing import Any

import pytest

from agent.house import House, Json
from hermes.tools import session_search
from hermes.tools.session_search import TOOL
from support.model_server import ModelServer

from .turns import asked

SAID = [("user", "Where is the red fox?"), ("assistant", "In the wood."), ("user", "Thank you."), ("assistant", "Bye.")]


async def held(house: House, session_id: str, *said: tuple[str, str], **fields: Any) -> list[int]:
    """A conversation of the past; the ids of its messages."""
    sessions = house.app.store.sessions
    await sessions.create_session(session_id, "cli", **fields)
    return [await sessions.append_message(session_id, role, text) for role, text in said or SAID]


async def search(house: House, server: ModelServer, *arguments: Json, **fields: Any) -> list[Json]:
    return await asked(house, server, TOOL, *arguments, **fields)


async def test_session_search_hits_with_context(house: House, server: ModelServer) -> None:
    ids = await held(house, "past", title="Foxes")
    await held(house, "other", ("user", "Nothing of the kind."))
    [answer] = await search(house, server, {"query": "wood"})
    [hit] = answer["hits"]
    assert (hit["session_id"], hit["title"], hit["message_id"], hit["role"]) == ("past", "Foxes", ids[1], "assistant")
    assert "wood" in hit["snippet"]
    assert [near["content"] for near in hit["context"]] == ["Where is the red fox?", "Thank you."]
    assert answer["complete"] is True


@pytest.mark.parametrize("persist", [True, False])
async def test_session_search_excludes_running_session(house: House, server: ModelServer, persist: bool) -> None:
    await held(house, "past")
    await held(house, "now")
    found, mine, recent = await search(
        house, server, {"query": "fox"}, {"session_id": "now"}, {}, session_id="now", persist=persist, history=None
    )
    assert [hit["session_id"] for hit in found["hits"]] == ["past"]
    assert mine["code"] == "not_found"
    assert [session["session_id"] for session in recent["sessions"]] == ["past"]


SCOPES = [("default", None), ("default", "room-1"), ("default", "room-2"), ("ada", None), ("ada", "room-1")]


@pytest.mark.parametrize(("owner", "key"), SCOPES)
async def test_session_search_is_scoped_to_owner(
    house: House, server: ModelServer, owner: str, key: str | None
) -> None:
    ids = {}
    for number, (whose, where) in enumerate(SCOPES):
        ids[whose, where] = await held(house, f"s{number}", owner=whose, session_key=where)
    mine = f"s{SCOPES.index((owner, key))}"
    calls: list[Json] = [{"query": "fox"}, {}, {"session_id": mine, "around_message_id": ids[owner, key][1]}]
    for number, scope in enumerate(SCOPES):
        calls += [{"session_id": f"s{number}"}, {"session_id": f"s{number}", "query": "fox"}]
        calls += [{"session_id": f"s{number}", "around_message_id": ids[scope][0]}]
    # The id of a message of another session is no way to it either.
    calls += [{"session_id": mine, "around_message_id": ids[scope][0]} for scope in SCOPES if scope != (owner, key)]
    found, recent, window, *others = await search(house, server, *calls, owner=owner, session_key=key)
    assert {hit["session_id"] for hit in found["hits"]} == {mine}
    assert [session["session_id"] for session in recent["sessions"]] == [mine]
    assert len(window["messages"]) == 4
    seen = [n for n, answer in enumerate(others) if "error" not in answer]
    assert seen == [3 * SCOPES.index((owner, key)) + n for n in range(3)]
    assert {answer["code"] for answer in others if "error" in answer} == {"not_found"}


async def test_session_search_hits_of_others_do_not_hide_own(
    house: House, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_search.limits, "RECALL_BATCH", 4)
    for number in range(6):
        await held(house, f"keyed-{number}", ("user", "fox fox fox"), session_key="k")
    await held(house, "mine", ("user", "There was once a very small fox in a very large wood, and nobody saw it."))
    [found, recent] = await search(house, server, {"query": "fox"}, {})
    assert [hit["session_id"] for hit in found["hits"]] == ["mine"] and found["complete"]
    assert [session["session_id"] for session in recent["sessions"]] == ["mine"]
    monkeypatch.setattr(session_search.limits, "RECALL_BATCHES_MAX", 1)
    [found] = await search(house, server, {"query": "fox"})
    assert (found["hits"], found["complete"]) == ([], False)


async def test_session_search_windows(house: House, server: ModelServer) -> None:
    ids = await held(house, "past", *[("user", f"line {n}") for n in range(60)])
    calls: list[Json] = [
        {"around_message_id": ids[30]},
        {"around_message_id": ids[30], "window": 1},
        {"around_message_id": ids[0], "window": 20},
        {"window": 2},
        {"around_message_id": 10**9},
    ]
    told = await search(house, server, *({"session_id": "past", **call} for call in calls))
    lines = [[int(m["content"].split()[1]) for m in answer.get("messages", [])] for answer in told]
    assert lines == [list(range(25, 36)), [29, 30, 31], list(range(21)), [55, 56, 57, 58, 59], []]
    assert told[-1]["code"] == "not_found"


async def test_session_search_truncates_messages_and_names_calls(house: House, server: ModelServer) -> None:
    await held(house, "past", ("user", "x" * 2001))
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    await house.app.store.sessions.append_message("past", "assistant", "", tool_calls=calls)
    [answer] = await search(house, server, {"session_id": "past"})
    first, second = answer["messages"]
    assert first["content"].startswith("x" * 2000) and "1 more" in first["content"]
    assert second["calls"] == ["look"]


async def test_session_search_sort_and_role_filter(house: House, server: ModelServer) -> None:
    for number in range(3):
        await held(house, f"s{number}", ("user", "fox one"), ("assistant", "fox two"), ("tool", "fox three"))
    newest, oldest, users, two, odd = await search(
        house,
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


async def test_session_search_recent_sessions(house: House, server: ModelServer) -> None:
    for number in range(12):
        await held(house, f"s{number:02}", title=f"Talk {number}")
    few, many = await search(house, server, {}, {"limit": 10, "query": "  "})
    assert [session["title"] for session in few["sessions"]] == ["Talk 11", "Talk 10", "Talk 9"]
    assert len(many["sessions"]) == 10
    assert few["sessions"][0]["messages"] == 4 and few["sessions"][0]["preview"] == "Where is the red fox?"


@pytest.mark.parametrize(
    ("given", "good"),
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
async def test_session_search_limits(house: House, server: ModelServer, given: Json, good: bool) -> None:
    await held(house, "past")
    [answer] = await search(house, server, given)
    assert answer.get("code") == (None if good else "invalid_arguments")
