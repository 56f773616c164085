"""Sessions over HTTP: as resources, and turns of them, plain and streamed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes.store.sessions import SessionDB
from hermes.tools.framework.registry import Registry, ToolContext, ToolDef
from support.model_server import Call, Reply
from support.waiting import until

from .clients import (
    Frame,
    HeldModel,
    Json,
    Stream,
    read_error,
    read_json,
    sent_messages,
    stream_of,
    system_of,
)
from .conftest import Api, Start

SESSIONS = "/api/sessions"
FIELDS = {
    "id", "source", "user_id", "model", "title", "started_at", "ended_at", "end_reason", "message_count",
    "tool_call_count", "input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "reasoning_tokens",
    "estimated_cost_usd", "actual_cost_usd", "api_call_count", "parent_session_id", "forked_at_message_id",
    "has_system_prompt", "has_model_config", "archived", "last_active", "preview", "active_run_id",
    "pinned", "workdir", "toolsets", "max_iterations", "reasoning_effort",
}  # fmt: skip
MESSAGE = {
    "id", "session_id", "role", "content", "tool_call_id", "tool_calls", "tool_name", "timestamp", "token_count",
    "finish_reason", "synthetic", "run_id",
}  # fmt: skip


async def create_session(api: Api, **fields: Any) -> Json:
    async with api.post(SESSIONS, fields) as response:
        session: Json = (await read_json(response, 201))["session"]
        return session


async def get_json(api: Api, path: str, **more: Any) -> Json:
    async with api.get(path, **more) as response:
        return await read_json(response)


async def chat(api: Api, session_id: str, message: Any = "hi", **fields: Any) -> Json:
    async with api.post(f"{SESSIONS}/{session_id}/chat", {"message": message, **fields}) as response:
        return await read_json(response)


async def streamed(api: Api, session_id: str, message: Any = "hi", headers: Any = None, **fields: Any) -> list[Frame]:
    body = {"message": message, **fields}
    async with api.post(f"{SESSIONS}/{session_id}/chat/stream", body, headers=headers) as response:
        return await stream_of(response)


def names(frames: list[Frame]) -> list[str]:
    """The events of a stream, one of each that follow each other."""
    events = [str(item.event) for item in frames]
    return [name for at, name in enumerate(events) if at == 0 or events[at - 1] != name]


def event_data(frames: list[Frame], name: str) -> Json:
    [item] = [item.data for item in frames if item.event == name]
    return dict(item)


def db_of(api: Api) -> SessionDB:
    return api.app.store.blocking.sessions


def offer(api: Api, name: str, run: Any, **fields: Any) -> None:
    """A tool of this test's."""
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    tool = ToolDef(name=name, description=name, toolset="todo", parameters=parameters, run=run, **fields)
    registry = Registry([tool])
    api.app.services = replace(api.app.services, registry=lambda: registry)


# ---- one session


async def test_session_create_has_every_field(api: Api) -> None:
    session = await create_session(api, id="kitchen", title="  A\ttitle ", model="m", system_prompt="Be kind.")
    assert set(session) == FIELDS
    assert {name: session[name] for name in ("id", "title", "source", "model")} == {
        "id": "kitchen", "title": "A title", "source": "api_server", "model": "m",
    }  # fmt: skip
    assert session["has_system_prompt"] and not session["has_model_config"]
    assert session["estimated_cost_usd"] is None and session["active_run_id"] is None
    assert await get_json(api, f"{SESSIONS}/kitchen") == {"object": "hermes.session", "session": session}
    assert set(await create_session(api)) == FIELDS


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"id": "a/b"}, 400, "invalid_session_id"),
        ({"session_id": "search"}, 400, "invalid_session_id"),
        ({"id": 5}, 400, "invalid_session_id"),
        ({"id": ""}, 400, "invalid_session_id"),
        ({"id": "a", "session_id": "b"}, 400, "invalid_session_id"),
        ({"title": 5}, 400, "invalid_title"),
        ({"title": "x" * 101}, 400, "invalid_title"),
        ({"title": "Taken"}, 400, "invalid_title"),
        ({"system_prompt": ["x"]}, 400, "invalid_system_prompt"),
        ({"id": "taken"}, 409, "session_exists"),
    ],
)
async def test_rejected_session_create_leaves_nothing(api: Api, fields: Json, status: int, code: str) -> None:
    await create_session(api, id="taken", title="Taken")
    async with api.post(SESSIONS, fields) as response:
        await read_error(response, status, code)
    assert (await get_json(api, SESSIONS))["total"] == 1


async def test_missing_or_foreign_session_is_404(api: Api) -> None:
    db_of(api).create_session("theirs", "api_server", owner="tablet", title="Secret")
    for session_id in ("none", "theirs"):
        for method, path, body in (
            ("get", "", None), ("patch", "", {"title": "x"}), ("delete", "", None), ("get", "/messages", None),
            ("get", "/export", None), ("get", "/files", None), ("get", "/files/file_1", None), ("post", "/fork", {}),
            ("get", "/branches", None),
            ("post", "/chat", {"message": "x"}), ("post", "/chat/stream", {"message": "x"}),
        ):  # fmt: skip
            more = {} if body is None else {"json": body}
            async with getattr(api, method)(f"{SESSIONS}/{session_id}{path}", **more) as response:
                await read_error(response, 404, "session_not_found")
    assert (await get_json(api, SESSIONS))["data"] == []
    assert (await get_json(api, f"{SESSIONS}/search?q=secret"))["data"] == []
    assert db_of(api).get_session("theirs") is not None


async def test_session_update_is_atomic(api: Api) -> None:
    await create_session(api, id="a", title="First", system_prompt="x")
    await create_session(api, id="b", title="Second")
    for body, code, param in (
        ({"title": "Second", "archived": True}, "invalid_title", "title"),
        ({"archived": True, "end_reason": "x" * 201}, "invalid_value", "end_reason"),
        ({"archived": True, "colour": "red"}, "unsupported_session_field", "colour"),
        ({"archived": True, "id": "c"}, "unsupported_session_field", "id"),
    ):
        async with api.patch(f"{SESSIONS}/a", body) as response:
            await read_error(response, 400, code, param)
    session = (await get_json(api, f"{SESSIONS}/a"))["session"]
    assert (session["title"], session["archived"], session["end_reason"]) == ("First", False, None)

    body: Json = {"title": None, "archived": "true", "model": "m", "system_prompt": None, "end_reason": "done"}
    async with api.patch(f"{SESSIONS}/a", body) as response:
        session = (await read_json(response))["session"]
    visible = {name: session[name] for name in ("title", "archived", "model", "has_system_prompt", "end_reason")}
    assert visible == {"title": None, "archived": True, "model": "m", "has_system_prompt": False, "end_reason": "done"}
    async with api.patch(f"{SESSIONS}/a", {"end_reason": "again", "archived": None}) as response:
        session = (await read_json(response))["session"]
    assert session["end_reason"] == "done", "the first reason stands"
    assert session["archived"] is True


# ---- lists


async def test_session_list_pagination_has_no_gap_or_repetition(api: Api) -> None:
    ids = [(await create_session(api, title=f"t{n}"))["id"] for n in range(5)]
    texts: list[str] = []
    cursor = ""
    while True:
        page = await get_json(api, f"{SESSIONS}?limit=2{cursor}")
        assert page["object"] == "list" and page["total"] == 5 and page["limit"] == 2 and page["offset"] == 0
        texts += [session["id"] for session in page["data"]]
        assert page["has_more"] == (len(texts) < 5)
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert texts == ids[::-1]
    page = await get_json(api, f"{SESSIONS}?limit=2&offset=4")
    assert [session["id"] for session in page["data"]] == ids[:1] and not page["has_more"]


async def test_session_list_filters(api: Api) -> None:
    db = db_of(api)
    await create_session(api, id="plain")
    db.create_session("cli", "cli")
    db.create_session("sub", "subagent", kind="delegate", parent_session_id="plain")
    async with api.patch(f"{SESSIONS}/cli", {"archived": True}) as response:
        await read_json(response)
    async with api.post(f"{SESSIONS}/plain/fork") as response:
        fork = (await read_json(response, 201))["session"]["id"]
    for query, wanted in (
        ("", {"plain", fork}),
        ("?archived=true", {"cli"}),
        ("?archived=all", {"plain", fork, "cli"}),
        ("?archived=all&source=cli", {"cli"}),
        ("?include_children=true", {"plain", fork, "sub"}),
    ):
        page = await get_json(api, SESSIONS + query)
        assert {session["id"] for session in page["data"]} == wanted
        assert page["total"] == len(wanted)
        assert set(page["data"][0]) == FIELDS
    parents = {session["id"]: session["parent_session_id"] for session in (await get_json(api, SESSIONS))["data"]}
    assert parents == {"plain": None, fork: "plain"}


async def test_parent_of_other_owner_is_hidden(api: Api) -> None:
    db_of(api).create_session("theirs", "api_server", owner="tablet")
    db_of(api).create_session("mine", "api_server", parent_session_id="theirs")
    assert (await get_json(api, f"{SESSIONS}/mine"))["session"]["parent_session_id"] is None


# ---- messages


async def test_messages_pagination_latest_first_in_order(api: Api) -> None:
    await create_session(api, id="s")
    ids = [db_of(api).append_message("s", "user", f"m{n}") for n in range(6)]
    path = f"{SESSIONS}/s/messages"

    async def page(query: str) -> tuple[list[int], bool]:
        body = await get_json(api, path + query)
        assert body["session_id"] == "s" and body["total"] == 6
        listed = [message["id"] for message in body["data"]]
        assert (body["first_id"], body["last_id"]) == ((listed[0], listed[-1]) if listed else (None, None))
        return listed, body["has_more"]

    assert await page("") == (ids, False)
    assert await page("?limit=2") == (ids[4:], True)
    assert await page(f"?limit=2&before={ids[4]}") == (ids[2:4], True)
    assert await page(f"?limit=2&before={ids[2]}") == (ids[:2], False)
    assert await page(f"?limit=2&after={ids[1]}") == (ids[2:4], True)
    assert await page(f"?limit=4&after={ids[1]}") == (ids[2:], False)
    assert await page(f"?limit=2&order=desc&before={ids[4]}") == ([ids[3], ids[2]], True)
    assert await page(f"?after={ids[-1]}") == ([], False)
    for order in ("asc", "oldest"):
        assert await page(f"?limit=2&order={order}") == (ids[:2], True)
        assert await page(f"?limit=2&offset=4&order={order}") == (ids[4:], False)
        assert await page(f"?limit=2&order={order}&before={ids[4]}") == (ids[2:4], True)
        assert await page(f"?limit=2&order={order}&after={ids[0]}") == (ids[1:3], True)
    for order in ("desc", "latest"):
        assert await page(f"?limit=2&order={order}") == (ids[:3:-1], True)
        assert await page(f"?limit=2&offset=3&order={order}") == ([ids[2], ids[1]], True)
    assert await page("?limit=2&offset=2") == (ids[2:4], True)
    assert await page("?offset=6") == ([], False)


@pytest.mark.parametrize(
    ("query", "param"), [("order=newest", "order"), ("offset=-1", "offset"), ("offset=x", "offset")]
)
async def test_invalid_messages_page_is_rejected(api: Api, query: str, param: str) -> None:
    await create_session(api, id="s")
    async with api.get(f"{SESSIONS}/s/messages?{query}") as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, param)


async def test_messages_show_reasoning_and_hidden_rows_on_request(api: Api) -> None:
    await create_session(api, id="s")
    db = db_of(api)
    db.append_message("s", "user", "gone")
    target = db.append_message("s", "user", "taken back")
    db.rewind_to_message("s", target)
    db.append_message("s", "assistant", "answer", reasoning="because")
    plain = (await get_json(api, f"{SESSIONS}/s/messages"))["data"]
    assert [message["content"] for message in plain] == ["gone", "answer"]
    assert set(plain[0]) == MESSAGE
    rows = (await get_json(api, f"{SESSIONS}/s/messages", headers={"X-Hermes-Reasoning": "on"}))["data"]
    assert rows[1]["reasoning"] == rows[1]["reasoning_content"] == "because"
    everything = (await get_json(api, f"{SESSIONS}/s/messages?include_inactive=1"))["data"]
    assert [(m["content"], m["active"]) for m in everything] == [
        ("gone", True),
        ("taken back", False),
        ("answer", True),
    ]


async def test_messages_hide_compaction(api: Api) -> None:
    await create_session(api, id="s")
    db = db_of(api)
    ids = [db.append_message("s", "assistant" if n % 2 else "user", f"word{n}") for n in range(6)]
    messages = db.get_messages_as_conversation("s")
    for text in ("summary one", "summary two"):
        db.archive_and_compact("s", [messages[0], {"role": "user", "content": text}, messages[-1]])
    body = await get_json(api, f"{SESSIONS}/s/messages")
    assert [(m["id"], m["content"]) for m in body["data"]] == [(ids[n], f"word{n}") for n in range(6)]
    assert (body["total"], (await get_json(api, f"{SESSIONS}/s"))["session"]["message_count"]) == (6, 6)
    everything = (await get_json(api, f"{SESSIONS}/s/messages?include_inactive=1"))["data"]
    assert [m["content"] for m in everything if m["model_only"]] == ["summary one", "summary two"]
    assert [m["id"] for m in everything if not m["model_only"]] == ids
    exported = await get_json(api, f"{SESSIONS}/s/export")
    assert [m["id"] for m in exported["messages"]] == ids
    async with api.get(f"{SESSIONS}/s/export?format=markdown") as response:
        text = await response.text()
    assert [text.count(f"word{n}") for n in range(6)] == [2, 1, 1, 1, 1, 1]  # the first one is the heading too
    assert "summary" not in text
    hits = (await get_json(api, f"{SESSIONS}/search?q=word3+OR+summary"))["data"]
    assert [hit["message_id"] for hit in hits] == [ids[3]]


# ---- search


async def test_session_search_messages_and_titles_with_highlights(api: Api) -> None:
    await create_session(api, id="s", title="Apple pie")
    db_of(api).append_message("s", "user", ">>> print('apple') <<< and an apple")
    page = await get_json(api, f"{SESSIONS}/search?q=apple")
    assert page["object"] == "list" and page["complete"] is True and page["has_more"] is False and page["total"] == 2
    title, message = page["data"]
    assert (title["message_id"], title["snippet"], title["highlights"]) == (None, "Apple pie", [[0, 5]])
    assert message["object"] == "hermes.session.match" and message["role"] == "user" and message["title"] == "Apple pie"
    assert [message["snippet"][a:b] for a, b in message["highlights"]] == ["apple", "apple"]
    assert message["snippet"] == ">>> print('apple') <<< and an apple"


async def test_session_search_pagination(api: Api) -> None:
    for n in range(3):
        await create_session(api, id=f"s{n}", title=f"pear {n}")
        for at in range(3):
            db_of(api).append_message(f"s{n}", "user" if at else "assistant", f"pear number {at} of {n}")
    pairs: list[Any] = []
    cursor = ""
    while True:
        page = await get_json(api, f"{SESSIONS}/search?q=pear&limit=5&sort=newest{cursor}")
        assert page["total"] == 12
        pairs += [(hit["session_id"], hit["message_id"]) for hit in page["data"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert len(pairs) == len(set(pairs)) == 12
    assert [hit for hit in pairs if hit[1] is None] == pairs[:3], "titles stand before messages"
    texts = [hit[1] for hit in pairs[3:]]
    assert texts == sorted(texts, reverse=True)
    for query, count in (("role=assistant", 3), ("session_id=s1", 4), ("source=cli", 0)):
        assert len((await get_json(api, f"{SESSIONS}/search?q=pear&{query}"))["data"]) == count


@pytest.mark.parametrize(
    ("query", "titles"),
    [
        ("green OR blue", {"a", "b"}),
        ("tea NOT green", {"b", "c"}),
        ('"green tea"', {"a"}),
        ("te* (green OR blue)", {"a", "b"}),
        ("100%25", {"c"}),
        ("NOT", set()),
        ('"', set()),
    ],
)
async def test_session_search_titles_like_messages(api: Api, query: str, titles: set[str]) -> None:
    for name, title in (("a", "Green tea"), ("b", "Blue tea"), ("c", "tea 100% pure")):
        await create_session(api, id=name, title=title)
    page = await get_json(api, f"{SESSIONS}/search?q={query}")
    assert {hit["session_id"] for hit in page["data"]} == titles


async def test_session_search_snippet_is_short(api: Api) -> None:
    await create_session(api, id="s")
    db_of(api).append_message("s", "user", f"{'x' * 400} needle {'y' * 400} 苹果 is an apple")
    for query, word in (("needle", "needle"), ("苹果", "苹果")):
        [hit] = (await get_json(api, f"{SESSIONS}/search?q={query}"))["data"]
        assert len(hit["snippet"]) <= 300
        assert [hit["snippet"][a:b] for a, b in hit["highlights"]] == [word]


# ---- export, import, files


async def test_session_export_import_round_trip(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    await create_session(api, id="s", title="Greeting", system_prompt="Be kind.")
    await chat(api, "s", "hi")
    async with api.get(f"{SESSIONS}/s/export") as response:
        item = json.loads(await response.read())
        assert response.headers["Content-Disposition"].startswith('attachment; filename="s.json"')
    async with api.get(f"{SESSIONS}/s/export?format=jsonl") as response:
        assert json.loads(await response.text()) == item and (await response.text()).count("\n") == 1
    async with api.get(f"{SESSIONS}/s/export?format=markdown") as response:
        assert response.headers["Content-Type"] == "text/markdown; charset=utf-8"
        assert (await response.text()).startswith("# Greeting\n")
    async with api.delete(f"{SESSIONS}/s") as response:
        await read_json(response)
    bad = {**item, "id": "t", "messages": [{"role": "nobody"}]}
    for sessions, imported, skipped, errors in (([item, bad], 0, 0, 1), ([item], 1, 0, 0), ([item], 0, 1, 0)):
        async with api.post(f"{SESSIONS}/import", {"sessions": sessions}) as response:
            body = await read_json(response)
        assert (body["object"], body["imported"], body["skipped"]) == ("hermes.session.import", imported, skipped)
        assert [error["index"] for error in body["errors"]] == [1] * errors
    messages = (await get_json(api, f"{SESSIONS}/s/messages"))["data"]
    assert [(m["role"], m["content"]) for m in messages] == [("user", "hi"), ("assistant", "Hello.")]


async def test_imported_sessions_belong_to_importer(api: Api) -> None:
    item = {"format": "hermes.session/1", "id": "s", "owner": "tablet"}
    async with api.post(f"{SESSIONS}/import", {"sessions": [item]}) as response:
        assert (await read_json(response))["imported"] == 1
    assert (await get_json(api, f"{SESSIONS}/s"))["session"]["id"] == "s"


async def test_session_files_list_and_download(api: Api, tmp_path: Path) -> None:
    await create_session(api, id="s")
    path = tmp_path / "note"
    path.write_bytes(b"\x00milk" * 100_000)
    size = path.stat().st_size
    add = db_of(api).add_file
    file_id = add("s", 'Einkauf "ä".txt', bytes=size, mime="text/plain", direction="in", path=path)
    lost = add("s", "lost", bytes=1, mime="text/plain", direction="out", path=tmp_path / "none")
    page = await get_json(api, f"{SESSIONS}/s/files")
    assert page["total"] == 2 and not page["has_more"]
    assert set(page["data"][0]) == {"id", "name", "bytes", "mime", "created_at", "direction"}
    async with api.get(f"{SESSIONS}/s/files/{file_id}") as response:
        assert response.status == 200 and await response.read() == path.read_bytes()
        assert response.headers["Content-Type"] == "text/plain"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        name = response.headers["Content-Disposition"]
        assert name == "attachment; filename=\"Einkauf ___.txt\"; filename*=UTF-8''Einkauf%20%22%C3%A4%22.txt"
    async with api.client.head(f"{api.url}{SESSIONS}/s/files/{file_id}") as response:
        assert response.status == 200 and response.headers["Content-Length"] == str(size)
    await create_session(api, id="other")
    for path_of in (f"s/files/{lost}", "s/files/file_none", f"other/files/{file_id}"):
        async with api.get(f"{SESSIONS}/{path_of}") as response:
            await read_error(response, 404, "file_not_found")


# ---- forks


async def test_session_fork(api: Api) -> None:
    await create_session(api, id="s", title="Trip", system_prompt="Be kind.")
    ids = [db_of(api).append_message("s", role, text) for role, text in (("user", "a"), ("assistant", "b"))]
    db_of(api).append_message("s", "user", "c")
    async with api.post(f"{SESSIONS}/s/fork", {"at_message_id": ids[1]}) as response:
        fork = (await read_json(response, 201))["session"]
    assert (fork["title"], fork["parent_session_id"], fork["forked_at_message_id"]) == ("Trip #2", "s", ids[1])
    assert fork["has_system_prompt"] and fork["message_count"] == 2
    source = (await get_json(api, f"{SESSIONS}/s"))["session"]
    assert (source["end_reason"], source["message_count"]) == ("branched", 3)
    for body, status, code in (
        ({"at_message_id": 10**9}, 404, "message_not_found"),
        ({"id": "s"}, 409, "session_exists"),
        ({"id": "../s"}, 400, "invalid_session_id"),
        ({"title": "Trip"}, 400, "invalid_title"),
    ):
        async with api.post(f"{SESSIONS}/s/fork", body) as response:
            await read_error(response, status, code)
    assert (await get_json(api, SESSIONS))["total"] == 2


async def test_session_fork_before_a_message_and_its_branches(api: Api) -> None:
    await create_session(api, id="s", reasoning_effort="low", toolsets=["todo"])
    ids = [db_of(api).append_message("s", role, text) for role, text in (("user", "a"), ("assistant", "b"))]
    async with api.post(f"{SESSIONS}/s/fork", {"id": "f", "before_message_id": ids[1]}) as response:
        fork = (await read_json(response, 201))["session"]
    assert (fork["message_count"], fork["reasoning_effort"], fork["toolsets"]) == (1, "low", ["todo"])
    async with api.post(f"{SESSIONS}/f/fork", {"id": "g", "before_message_id": ids[0]}) as response:
        await read_error(response, 404, "message_not_found", "before_message_id")  # it is of another session
    async with api.post(f"{SESSIONS}/s/fork", {"id": "g", "before_message_id": ids[0]}) as response:
        assert (await read_json(response, 201))["session"]["message_count"] == 0
    for session_id in ("s", "f", "g"):
        branches = (await get_json(api, f"{SESSIONS}/{session_id}/branches"))["data"]
        assert [(branch["id"], branch["parent_session_id"], branch["shared_messages"]) for branch in branches] == [
            ("s", None, 0), ("f", "s", 1), ("g", "s", 0),
        ]  # fmt: skip
        assert all(set(branch) == FIELDS | {"shared_messages"} for branch in branches)
    for body, code, param in (
        ({"at_message_id": ids[0], "before_message_id": ids[0]}, "invalid_value", "before_message_id"),
        ({"before_message_id": "x"}, "invalid_type", "before_message_id"),
    ):
        async with api.post(f"{SESSIONS}/s/fork", body) as response:
            await read_error(response, 400, code, param)


async def test_session_fork_copies_finished_turns_only(start: Start) -> None:
    held_model = HeldModel(Reply(text="One."), Reply(text=["Two", "."]))
    await held_model.start()
    api = await start(settings=held_model.settings)
    await create_session(api, id="s")
    held_model.release_all()
    await chat(api, "s", "first")
    held_model._open = False
    held_model._gate = asyncio.Semaphore(0)
    turn = asyncio.create_task(chat(api, "s", "second"))
    await held_model.wait_for_request(2)
    async with api.post(f"{SESSIONS}/s/fork") as response:
        fork = (await read_json(response, 201))["session"]["id"]
    running = (await get_json(api, f"{SESSIONS}/s"))["session"]["active_run_id"]
    assert running.startswith("run_")
    held_model.release_all()
    assert (await turn)["run_id"] == running
    copied = (await get_json(api, f"{SESSIONS}/{fork}/messages"))["data"]
    assert [message["content"] for message in copied] == ["first", "One."]
    await held_model.stop()


# ---- turns


async def test_session_chat_uses_stored_history(api: Api) -> None:
    api.model.script = [Reply(text="One."), Reply(text="Two.")]
    await create_session(api, id="s", system_prompt="Speak plainly.")
    first = await chat(api, "s", "first")
    assert first["object"] == "hermes.session.chat.completion" and first["session_id"] == "s"
    assert first["message"] == {"role": "assistant", "content": "One."}
    assert (first["completed"], first["partial"], first["interrupted"]) == (True, False, False)
    assert first["usage"]["total_tokens"] == 15
    async with api.post(f"{SESSIONS}/s/chat", {"input": "second", "instructions": "In short."}) as response:
        second = await read_json(response)
        assert response.headers["X-Hermes-Run-Id"] == second["run_id"]
        assert response.headers["X-Hermes-Session-Id"] == "s"
        assert response.headers["X-Hermes-History"] == "stored; messages=2; ignored=0"
    request = api.model.requests[1]
    assert sent_messages(request) == [("user", "first"), ("assistant", "One."), ("user", "second")]
    assert "Speak plainly." in system_of(request) and "In short." in system_of(request)
    session = (await get_json(api, f"{SESSIONS}/s"))["session"]
    assert session["message_count"] == 4 and session["active_run_id"] is None and session["api_call_count"] == 2


async def test_session_chat_reopens_session(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    await create_session(api, id="s")
    async with api.patch(f"{SESSIONS}/s", {"end_reason": "done"}) as response:
        await read_json(response)
    await chat(api, "s")
    assert (await get_json(api, f"{SESSIONS}/s"))["session"]["ended_at"] is None


async def test_session_model_is_alias_or_default(start: Start) -> None:
    api = await start(
        *[Reply(text="Hello.", continues=False)] * 4,
        model_routes={"fast": {"model": "small"}, "slow": {"model": "large"}},
    )
    await create_session(api, id="fast", model="fast")
    await create_session(api, id="other", model="hermes-agent")
    await chat(api, "fast")
    await chat(api, "fast", model="slow")
    await chat(api, "fast", model="hermes-agent")
    await chat(api, "other")
    assert [request.model for request in api.model.requests] == ["small", "large", "small", "test-model"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "missing_message"),
        ({"message": ""}, "empty_message"),
        ({"message": None, "input": []}, "empty_message"),
        ({"message": "x", "system_message": ["x"]}, "invalid_system_message"),
        ({"message": "x", "instructions": 5}, "invalid_system_message"),
        ({"message": [{"type": "input_audio"}]}, "unsupported_content_type"),
        ({"message": "x", "temperature": 3}, "invalid_value"),
    ],
)
async def test_invalid_session_chat_is_rejected(api: Api, body: Json, code: str) -> None:
    await create_session(api, id="s")
    for path in ("chat", "chat/stream"):
        async with api.post(f"{SESSIONS}/s/{path}", body) as response:
            await read_error(response, 400, code)
    assert (await get_json(api, f"{SESSIONS}/s"))["session"]["message_count"] == 0


async def test_failed_session_chat_is_reported(api: Api) -> None:
    api.model.script = [Reply(status=401, error="bad key"), Reply(text="Half an ans", finish="length")]
    await create_session(api, id="s")
    async with api.post(f"{SESSIONS}/s/chat", {"message": "hi"}) as response:
        error = await read_error(response, 502, "provider_auth_failed")
        assert error["hermes"]["failed"] is True
        assert response.headers["X-Hermes-Completed"] == "false" and response.headers["x-should-retry"] == "false"
    cut = await chat(api, "s", "again", max_tokens=5)
    assert cut["message"]["content"] == "Half an ans" and cut["hermes"]["error_code"] == "output_truncated"
    assert (cut["completed"], cut["partial"], cut["interrupted"]) == (False, True, False)


async def test_busy_session_is_not_deleted_and_takes_no_second_turn(start: Start) -> None:
    held_model = HeldModel(Reply(text="Hello."))
    await held_model.start()
    api = await start(settings=held_model.settings, session_wait_seconds=0)
    await create_session(api, id="s")
    turn = asyncio.create_task(chat(api, "s"))
    await held_model.wait_for_request()
    async with api.delete(f"{SESSIONS}/s") as response:
        await read_error(response, 409, "session_busy")
        assert response.headers["Retry-After"] == "1"
        running = response.headers["X-Hermes-Run-Id"]
    async with api.post(f"{SESSIONS}/s/chat", {"message": "me too"}) as response:
        await read_error(response, 409, "session_busy")
        assert response.headers["X-Hermes-Run-Id"] == running
    async with api.patch(f"{SESSIONS}/s", {"title": "Meanwhile"}) as response:
        await read_json(response)
    held_model.release_all()
    assert (await turn)["run_id"] == running
    async with api.delete(f"{SESSIONS}/s") as response:
        assert await read_json(response) == {"object": "hermes.session.deleted", "id": "s", "deleted": True}
    async with api.get(f"/v1/runs/{running}") as response:
        await read_error(response, 404, "run_not_found")
    await held_model.stop()


# ---- streams


async def test_session_stream_event_order(api: Api) -> None:
    todo = {"todos": [{"id": "1", "content": "milk", "status": "pending"}]}
    api.model.script = [
        Reply(text=["Let me", " see."], tool_calls=[Call("todo", todo, id="call_1")]),
        Reply(text=["All", " done."]),
    ]
    await create_session(api, id="s")
    events = await streamed(api, "s", "shopping")
    assert names(events) == [
        "run.started", "message.started", "assistant.delta", "tool.started", "tool.completed", "assistant.delta",
        "assistant.completed", "run.completed", "done",
    ]  # fmt: skip
    assert [item.data["seq"] for item in events] == list(range(1, len(events) + 1))
    run_id = events[0].data["run_id"]
    assert {(item.data["session_id"], item.data["run_id"]) for item in events} == {("s", run_id)}
    assert all(isinstance(item.data["ts"], float) and item.id is None for item in events)
    assert event_data(events, "run.started")["user_message"] == {"role": "user", "content": "shopping"}
    message = event_data(events, "message.started")["message"]
    assert message["role"] == "assistant"
    deltas = [item.data for item in events if item.event == "assistant.delta"]
    assert "".join(delta["delta"] for delta in deltas) == "Let me see.\n\nAll done."
    assert {delta["message_id"] for delta in deltas} == {message["id"]}
    started, finished = event_data(events, "tool.started"), event_data(events, "tool.completed")
    assert (started["tool_name"], started["tool_call_id"], started["args"]) == ("todo", "call_1", todo)
    assert {name: finished[name] for name in ("args", "preview", "error")} == {
        "args": todo, "preview": started["preview"], "error": False,
    }  # fmt: skip
    assert "milk" in finished["result"] and finished["duration"] >= 0
    whole = event_data(events, "assistant.completed")
    assert (whole["content"], whole["completed"], whole["interrupted"]) == ("All done.", True, False)
    event = event_data(events, "run.completed")
    assert [m["role"] for m in event["messages"]] == ["assistant", "tool", "assistant"]
    assert [m["content"] for m in event["messages"]][::2] == ["Let me see.", "All done."]
    assert event["messages"][0]["tool_calls"][0]["function"]["name"] == "todo"
    assert event["messages"][1]["tool_call_id"] == "call_1"
    assert event["usage"]["total_tokens"] == 30
    async with api.get(f"/v1/runs/{run_id}") as response:
        run = await read_json(response)
    assert (run["kind"], run["status"], run["output"]) == ("session", "completed", "All done.")


async def test_session_stream_reasoning_when_shown(api: Api) -> None:
    api.model.script = [Reply(text="Yes.", reasoning=["Let me ", "think."], continues=False)] * 2
    await create_session(api, id="s")
    assert "tool.progress" not in names(await streamed(api, "s"))
    thought = event_data(await streamed(api, "s", headers={"X-Hermes-Reasoning": "on"}), "tool.progress")
    assert (thought["tool_name"], thought["delta"]) == ("_thinking", "Let me think.")


async def test_session_stream_first_events_are_immediate(start: Start) -> None:
    held_model = HeldModel(Reply(text=["He", "llo."]))
    await held_model.start()
    api = await start(settings=held_model.settings)
    await create_session(api, id="s")
    async with api.post(f"{SESSIONS}/s/chat/stream", {"message": "hi"}) as response:
        stream = Stream(response)
        assert [(await stream.next()).event for _ in range(2)] == ["run.started", "message.started"]
        held_model.release_all()
        assert (await stream.rest())[-1].event == "done"
    await held_model.stop()


async def test_session_stream_failure_ends_with_error(api: Api) -> None:
    api.model.script = [Reply(status=401, error="bad key"), Reply(text="Half an ans", finish="length")]
    await create_session(api, id="s")
    events = await streamed(api, "s")
    assert names(events)[-4:] == ["assistant.completed", "error", "run.failed", "done"]
    assert (
        event_data(events, "error")["code"] == event_data(events, "run.failed")["error_code"] == "provider_auth_failed"
    )
    assert event_data(events, "error")["message"] == event_data(events, "run.failed")["error"]
    assert event_data(events, "run.failed")["messages"] == []
    events = await streamed(api, "s", max_tokens=5)
    assert event_data(events, "assistant.completed")["content"] == "Half an ans"
    assert event_data(events, "run.failed")["error_code"] == "output_truncated"
    assert [m["content"] for m in event_data(events, "run.failed")["messages"]] == ["Half an ans"]


async def test_session_stream_interrupt_ends_as_cancelled(start: Start) -> None:
    held_model = HeldModel(Reply(text=["Hel", "lo", "."]))
    await held_model.start()
    api = await start(settings=held_model.settings)
    await create_session(api, id="s")
    async with api.post(f"{SESSIONS}/s/chat/stream", {"message": "hi"}) as response:
        stream = Stream(response)
        held_model.release(2)
        frames = await stream.until(lambda item: item.event == "assistant.delta")
        async with api.post(f"/v1/runs/{frames[0].data['run_id']}/stop") as stopped:
            assert (await read_json(stopped))["status"] == "stopping"
        frames += await stream.rest()
    assert names(frames)[-3:] == ["assistant.completed", "run.cancelled", "done"]
    assert event_data(frames, "run.cancelled")["reason"] == "stop"
    whole = event_data(frames, "assistant.completed")
    assert whole["interrupted"] and not whole["completed"] and whole["content"].startswith("Hel")
    assert [m["content"] for m in event_data(frames, "run.cancelled")["messages"]] == [whole["content"]]
    held_model.release_all()
    await held_model.stop()


async def test_session_stream_clarify_is_answered_through_run(api: Api) -> None:
    ask = Call("clarify", {"question": "Which?", "choices": ["red", "blue"]}, id="call_1")
    api.model.script = [Reply(tool_calls=[ask]), Reply(text="Red it is.")]
    await create_session(api, id="s")
    async with api.post(f"{SESSIONS}/s/chat/stream", {"message": "paint it"}) as response:
        stream = Stream(response)
        frames = await stream.until(lambda item: item.event == "clarify.request")
        request = frames[-1].data
        assert (request["question"], request["choices"], request["tool_call_id"]) == (
            "Which?",
            ["red", "blue"],
            "call_1",
        )
        async with api.get(f"/v1/runs/{request['run_id']}") as looked:
            run = await read_json(looked)
        assert run["status"] == "waiting_for_input" and run["pending_question"]["request_id"] == request["request_id"]
        async with api.post(f"/v1/runs/{request['run_id']}/clarify", {"answer": "red"}) as clarify_response:
            assert await read_json(clarify_response) == {
                "object": "hermes.run.clarify_response", "run_id": request["run_id"], "request_id": request["request_id"],
            }  # fmt: skip
        frames += await stream.rest()
    assert event_data(frames, "clarify.responded")["answered"] is True
    assert '"red"' in event_data(frames, "tool.completed")["result"]


async def test_session_stream_tool_output(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.tools.framework.result_limits._SHARE_OF_WINDOW", 1.0)

    async def work(ctx: ToolContext, args: Json) -> Json:
        ctx.emit("stdout", "half way\n")
        return {"text": "x" * 22_000}

    offer(api, "work", work)
    api.model.script = [Reply(tool_calls=[Call("work", id="call_1")]), Reply(text="Done.")]
    await create_session(api, id="s")
    events = await streamed(api, "s")
    output = event_data(events, "tool.output")
    assert (output["tool_call_id"], output["offset"], output["text"]) == ("call_1", 0, "half way\n")
    assert len(event_data(events, "tool.completed")["result"]) == 20_000


@pytest.mark.parametrize("path", ["chat", "chat/stream"])
async def test_session_chat_continues_after_disconnect(start: Start, path: str) -> None:
    held_model = HeldModel(Reply(text=["Hel", "lo."]))
    await held_model.start()
    api = await start(settings=held_model.settings)
    await create_session(api, id="s")
    request = asyncio.create_task(api.post(f"{SESSIONS}/s/{path}", {"message": "hi"}).__aenter__())
    await held_model.wait_for_request()
    if path == "chat":
        request.cancel()
    else:
        (await request).close()
    held_model.release_all()

    async def rows() -> list[Json]:
        data: list[Json] = (await get_json(api, f"{SESSIONS}/s/messages"))["data"]
        return data

    result = await until(rows, lambda value: len(value) == 2)
    assert result[1]["content"] == "Hello." and result[1]["finish_reason"] == "stop"
    async with api.get(f"/v1/runs/{result[1]['run_id']}") as response:
        run = await until(lambda: get_json(api, f"/v1/runs/{result[1]['run_id']}"), lambda run: run["finished_at"])
        assert response.status == 200 and run["status"] == "completed"
    await held_model.stop()


async def test_session_stream_of_resumable_turn_has_no_end(start: Start) -> None:
    held_model = HeldModel(Reply(text=["Hel", "lo", "."]))
    await held_model.start()
    api = await start(settings=held_model.settings)
    await create_session(api, id="s")
    async with api.post(f"{SESSIONS}/s/chat/stream", {"message": "hi"}) as response:
        stream = Stream(response)
        held_model.release(1)
        frames = await stream.until(lambda item: item.event == "assistant.delta")
        run_id = frames[0].data["run_id"]
        async with api.get(f"/v1/runs/{run_id}/events") as following:
            await api.app.engine.drain(0.0)
            frames += await stream.rest()
            assert ": stream closed" not in await following.text()
    assert {item.event for item in frames} == {"run.started", "message.started", "assistant.delta"}
    run = await get_json(api, f"/v1/runs/{run_id}")
    assert (run["status"], run["finished_at"]) == ("queued", None)
    held_model.release_all()
    await held_model.stop()


async def test_sessions_without_database_are_503(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    api = await start()
    monkeypatch.setattr(api.context, "session_db", None)
    monkeypatch.setattr("hermes.store.sessions.SessionDB.__init__", lambda *_: (_ for _ in ()).throw(OSError("no")))
    for path in ("", "/s", "/s/messages"):
        async with api.get(SESSIONS + path) as response:
            await read_error(response, 503, "session_db_unavailable")
