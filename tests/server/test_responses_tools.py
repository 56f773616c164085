"""Tools of Responses that are no plain functions: how the model is offered them, and as what items their calls travel."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from support.model_server import Call, ModelServer, Reply, Request

from .clients import Json, frames, function, read_json, responses_tool, sent_messages, system_of, tool_names
from .conftest import PROVIDER_KEY, Api, Start

PATH = "/v1/responses"
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /[a-z]+/"}
# tool; what the model is offered; what it calls that with; the item that the client gets; its output; what the model gets
CLIENT_TOOLS: list[tuple[str, Json, str, Json, Json, Json, str]] = [
    (
        "custom",
        {"type": "custom", "name": "poem", "description": "Writes.", "format": GRAMMAR},
        "poem",
        {"input": "größe\n"},
        {"type": "custom_tool_call", "call_id": "call_1", "name": "poem", "input": "größe\n"},
        {"type": "custom_tool_call_output", "output": "done"},
        "done",
    ),
    (
        "namespaced function",
        {"type": "namespace", "name": "home", "tools": [responses_tool(function("lamp", room={"type": "string"}))]},
        "home__lamp",
        {"room": "hall"},
        {"type": "function_call", "call_id": "call_1", "name": "lamp", "namespace": "home",
         "arguments": '{"room": "hall"}'},
        {"type": "function_call_output", "output": "on"},
        "on",
    ),
    (
        "namespaced custom",
        {"type": "namespace", "name": "home", "tools": [{"type": "custom", "name": "exec"}]},
        "home__exec",
        {"input": "x"},
        {"type": "custom_tool_call", "call_id": "call_1", "name": "exec", "namespace": "home", "input": "x"},
        {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "ran"}]},
        "ran",
    ),
    (
        "local_shell",
        {"type": "local_shell"},
        "local_shell",
        {"command": ["ls", "-l"], "timeout_ms": 5},
        {"type": "local_shell_call", "call_id": "call_1",
         "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5}},
        {"type": "local_shell_call_output", "id": "call_1", "output": "a.txt"},
        "a.txt",
    ),
    (
        "shell",
        {"type": "shell", "environment": {"type": "local"}},
        "shell",
        {"commands": ["ls", "pwd"]},
        {"type": "shell_call", "call_id": "call_1",
         "action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None}},
        {"type": "shell_call_output",
         "output": [{"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
        '[{"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]',
    ),
    (
        "apply_patch",
        {"type": "apply_patch"},
        "apply_patch",
        {"type": "create_file", "path": "a.txt", "diff": "+hey"},
        {"type": "apply_patch_call", "call_id": "call_1",
         "operation": {"type": "create_file", "path": "a.txt", "diff": "+hey"}},
        {"type": "apply_patch_call_output", "status": "failed", "output": "no such folder"},
        "no such folder",
    ),
    (
        "tool_search",
        {"type": "tool_search", "execution": "client", "description": "Searches.", "parameters":
         {"type": "object", "properties": {"query": {"type": "string"}}}},
        "tool_search",
        {"query": "lamps"},
        {"type": "tool_search_call", "call_id": "call_1", "execution": "client", "arguments": {"query": "lamps"}},
        {"type": "tool_search_output", "execution": "client", "tools": [responses_tool(function("lamp"))]},
        "These tools can be called now: lamp.",
    ),
]  # fmt: skip
rows = pytest.mark.parametrize(("tool", "name", "args", "item", "output", "result"), [row[1:] for row in CLIENT_TOOLS],
                               ids=[row[0] for row in CLIENT_TOOLS])  # fmt: skip


async def create(api: Api, input: Any = "hi", **fields: Any) -> Json:
    async with api.post(PATH, {"input": input, **fields}) as response:
        return await read_json(response)


async def ignored(api: Api, **body: Any) -> list[str]:
    """What the header names for a request that goes well."""
    async with api.post(PATH, body) as response:
        await read_json(response)
        return [name for name in response.headers.get("X-Hermes-Ignored", "").split(", ") if name]


def without_ids(item: Json) -> Json:
    """An item without what every item has."""
    return {key: value for key, value in item.items() if key not in ("id", "status")}


@rows
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "history"])
async def test_client_tool_items_by_type(
    api: Api, tool: Json, name: str, args: Json, item: Json, output: Json, result: str, chain: bool
) -> None:
    api.model.script = [Reply(tool_calls=[Call(name, args, id="call_1")]), Reply(text="Done.")]
    response = await create(api, tools=[tool])
    assert response["tools"][0]["type"] == tool["type"]
    assert name in tool_names(api.model.requests[0])
    (call,) = response["output"]
    assert (without_ids(call), call["status"]) == (item, "completed")
    answer = {"call_id": "call_1", **output}
    if chain:
        await create(api, [answer], tools=[tool], previous_response_id=response["id"])
    else:
        await create(api, [{"role": "user", "content": "hi"}, call, answer], tools=[tool], store=False)
    message, tool_result = api.model.requests[1].body["messages"][-2:]
    assert message["tool_calls"][0]["function"]["name"] == name
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == args
    assert (tool_result["tool_call_id"], tool_result["content"]) == ("call_1", result)


@rows
async def test_client_tool_call_stream_events_by_type(
    api: Api, tool: Json, name: str, args: Json, item: Json, output: Json, result: str
) -> None:
    api.model.script = [Reply(tool_calls=[Call(name, args, id="call_1")])]
    async with api.post(PATH, {"input": "hi", "tools": [tool], "stream": True}) as response:
        events = [frame.data for frame in frames(await response.text())[:-1]]
    kinds = [event["type"].removeprefix("response.") for event in events]
    texts = {"custom_tool_call": ("custom_tool_call_input", "input")}
    texts["function_call"] = ("function_call_arguments", "arguments")
    stem, field = texts.get(item["type"], ("", ""))
    between = [f"{stem}.delta", f"{stem}.done"] if stem else []
    assert kinds == ["created", "in_progress", "output_item.added", *between, "output_item.done", "completed"]
    if stem:
        assert events[3]["delta"] == events[4][field] == item[field]
    assert without_ids(events[-2]["item"]) == item
    response_object = events[-1]["response"]
    assert response_object["output"] == [events[-2]["item"]]
    async with api.get(f"{PATH}/{response_object['id']}?stream=true") as response:
        assert [frame.data for frame in frames(await response.text())[:-1]] == events


async def test_tools_found_by_search_are_offered_afterwards(api: Api) -> None:
    search, _, args, _, output, _ = CLIENT_TOOLS[-1][1:]
    api.model.script = [Reply(tool_calls=[Call("tool_search", args, id="call_1")]), Reply(text="a"), Reply(text="b")]
    response = await create(api, tools=[search])
    response = await create(api, [{"call_id": "call_1", **output}], tools=[search], previous_response_id=response["id"])
    await create(api, "on", tools=[search], previous_response_id=response["id"])
    assert ["lamp" in tool_names(request) for request in api.model.requests] == [False, True, True]


async def test_tools_and_system_text_of_input_persist_in_chain(api: Api) -> None:
    """A later definition takes the place of an earlier one."""
    api.model.script = [Reply(text="a"), Reply(text="b"), Reply(text="c")]
    first = {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "x"}]}
    response = await create(api, [first, {"role": "developer", "content": "Be brief."}, "hi"])
    response = await create(api, "more", previous_response_id=response["id"], tools=[{"type": "custom", "name": "y"}])
    again = {**first, "tools": [{"type": "custom", "name": "x", "description": "Another."}]}
    await create(api, [again, "and"], previous_response_id=response["id"])
    assert [set(tool_names(request)) & {"x", "y"} for request in api.model.requests] == [{"x"}, {"x", "y"}, {"x"}]
    assert all("Be brief." in system_of(request) for request in api.model.requests)
    described = {
        tool["function"]["name"]: tool["function"]["description"] for tool in api.model.requests[2].body["tools"]
    }
    assert described["x"] == "Another."


async def test_same_tools_in_every_turn_of_chain(api: Api) -> None:
    tools = [responses_tool(function(f"lamp_{number}")) for number in range(100)]
    added = {"type": "additional_tools", "role": "developer", "tools": tools}
    api.model.script = [Reply(text=str(number), continues=False) for number in range(3)]
    before: Json = {}
    for _ in range(3):
        response = await create(api, [added, {"role": "user", "content": "hi"}], **before)
        before = {"previous_response_id": response["id"]}
    assert sum(name.startswith("lamp_") for name in tool_names(api.model.requests[-1])) == 100


async def test_long_namespaced_tool_name_is_shortened_and_restored(api: Api) -> None:
    names = [f"{'x' * 40}_{end}" for end in "ab"]
    tool = {"type": "namespace", "name": "n" * 40, "tools": [{"type": "function", "name": name} for name in names]}

    def call_all(request: Request) -> Reply:
        names = [name for name in tool_names(request) if name.startswith("nnnn")]
        assert len(set(names)) == 2 and all(len(name) <= 64 for name in names)
        return Reply(tool_calls=[Call(name, {}, id=f"call_{at}") for at, name in enumerate(names)])

    api.model.handler = call_all
    calls = (await create(api, tools=[tool]))["output"]
    assert {(call["namespace"], call["name"]) for call in calls} == {("n" * 40, name) for name in names}


async def test_grammar_is_described_to_provider_without_support(api: Api) -> None:
    api.model.script = [Reply(text="a"), Reply(text="b")]
    tool = {"type": "custom", "name": "poem", "description": "Writes.", "format": GRAMMAR}
    assert await ignored(api, input="hi", tools=[tool]) == ["tools.format"]
    sent_tool = next(t for t in api.model.requests[0].body["tools"] if t["function"]["name"] == "poem")
    assert "start: /[a-z]+/" in sent_tool["function"]["description"]
    assert set(sent_tool["function"]) == {"name", "description", "parameters"}
    assert await ignored(api, input="hi", tools=[{**tool, "format": {"type": "text"}}]) == []


async def test_grammar_is_passed_to_supporting_model(start: Start) -> None:
    """The call arrives as text and is sent back as text."""
    call = Call("poem", "größe", id="call_1", custom=True)
    async with ModelServer(Reply(tool_calls=[call]), Reply(text="Done.")) as model:
        route = {"base_url": f"{model.url}/v1", "api_mode": "codex_responses", "api_key": PROVIDER_KEY}
        api = await start(settings={"model": {"default": "gpt-5.5", **route}})
        tool = {"type": "custom", "name": "poem", "description": "Writes.", "format": GRAMMAR}
        response = await create(api, tools=[tool], tool_choice={"type": "custom", "name": "poem"})
        assert without_ids(response["output"][0]) == {**CLIENT_TOOLS[0][4], "input": "größe"}
        output = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}
        again = {"input": [output], "tools": [tool], "previous_response_id": response["id"]}
        assert await ignored(api, **again) == []
    first, second = model.requests
    assert next(entry for entry in first.body["tools"] if entry["name"] == "poem") == tool
    assert first.body["tool_choice"] == {"type": "custom", "name": "poem"}
    told_call = {"type": "custom_tool_call", "call_id": "call_1", "name": "poem", "input": "größe"}
    assert second.body["input"][-2:] == [told_call, output]


CHOICES: list[tuple[list[Json], Any, Any]] = [
    ([{"type": "custom", "name": "a"}], {"type": "custom", "name": "a"}, "a"),
    ([{"type": "shell"}], {"type": "shell"}, "shell"),
    ([{"type": "apply_patch"}], {"type": "apply_patch"}, "apply_patch"),
    ([{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a"}]}],
     {"type": "function", "name": "a", "namespace": "n"}, "n__a"),
    ([{"type": "custom", "name": "a"}, {"type": "web_search"}], {"type": "web_search"}, None),
    ([{"type": "custom", "name": "a"}, {"type": "file_search"}],
     {"type": "allowed_tools", "mode": "required",
      "tools": [{"type": "custom", "name": "a"}, {"type": "file_search"}]}, "required"),
    ([{"type": "web_search"}], "required", None),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "choice", "wanted"), CHOICES)
async def test_tool_choice_of_any_type(api: Api, tools: list[Json], choice: Any, wanted: Any) -> None:
    api.model.script = [Reply(text="ok")]
    response = await create(api, tools=tools, tool_choice=choice)
    tool_choice = api.model.requests[0].body.get("tool_choice")
    assert (tool_choice["function"]["name"] if isinstance(tool_choice, dict) else tool_choice) in (
        wanted,
        "auto" if wanted is None else wanted,
    )
    assert response["tool_choice"] == choice


# ---- hosted tools


@asynccontextmanager
async def search_engine() -> AsyncIterator[str]:
    async def search(_: web.Request) -> web.Response:
        results = [{"title": "Tea", "url": "https://tea.example/", "content": "Tea is a drink."}]
        return web.json_response({"results": results})

    app = web.Application()
    app.router.add_get("/search", search)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_unsupported_hosted_tools_are_ignored_and_named(api: Api) -> None:
    api.model.script = [Reply(text="ok")]
    kinds = ["file_search", "image_generation", "mcp", "computer_use_preview", "web_search", "tool_search"]
    tools: list[Json] = [{"type": kind} for kind in kinds]
    tools.append({"type": "shell", "environment": {"type": "container_auto"}})
    named = await ignored(api, input="hi", tools=tools)
    assert named == [f"tools.{kind}" for kind in (*kinds, "shell")]
    assert not {*kinds, "shell"} & set(tool_names(api.model.requests[0]))


async def test_hosted_web_search_uses_server_tool(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with search_engine() as url:
        monkeypatch.setenv("SEARXNG_URL", url)
        api = await start(*[Reply(tool_calls=[Call("web_search", {"query": "tea"})]), Reply(text="A drink.")] * 2)
        tools = [{"type": "web_search", "external_web_access": False}]
        assert await ignored(api, input="hi", tools=tools) == []
        async with api.post(PATH, {"input": "hi", "tools": tools, "stream": True}) as response:
            events = [frame.data for frame in frames(await response.text())[:-1]]
        kinds = [event["type"].removeprefix("response.") for event in events]
        stages = [f"web_search_call.{stage}" for stage in ("in_progress", "searching", "completed")]
        assert kinds[2:7] == ["output_item.added", *stages, "output_item.done"]
        call = events[6]["item"]
        assert (call["type"], call["status"]) == ("web_search_call", "completed")
        assert call["action"] == {"type": "search", "query": "tea"}
        assert [item["type"] for item in events[-1]["response"]["output"]] == ["web_search_call", "message"]
        assert "Tea is a drink." in sent_messages(api.model.requests[1], "tool")[0][1]


@pytest.mark.parametrize("closed", ["header", "key"])
async def test_key_without_web_toolset_has_no_web_search(
    start: Start, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    monkeypatch.setenv("SEARXNG_URL", "http://nowhere.test")
    narrow = {"name": "carol", "key": "sk-carol-0123456789abcdef", "scopes": ["chat"], "toolsets": ["todo"]}
    api = await start(Reply(text="ok"), keys=[narrow])
    headers = {"X-Hermes-Toolsets": "todo"} if closed == "header" else {"Authorization": f"Bearer {narrow['key']}"}
    async with api.post(PATH, {"input": "hi", "tools": [{"type": "web_search"}]}, headers=headers) as response:
        await read_json(response)
        assert response.headers["X-Hermes-Ignored"] == "tools.web_search"
    assert "web_search" not in tool_names(api.model.requests[0])


@pytest.mark.parametrize("beside", [[], [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]])
async def test_hosted_code_interpreter_uses_server_tool(api: Api, beside: list[Json]) -> None:
    api.model.script = [Reply(tool_calls=[Call("execute_code", {"code": "print(6 * 7)"})]), Reply(text="42.")]
    response = await create(api, tools=[{"type": "code_interpreter", "container": {"type": "auto"}}, *beside])
    call, _ = response["output"]
    assert (call["type"], call["code"], call["status"]) == ("code_interpreter_call", "print(6 * 7)", "completed")
    assert "42" in call["outputs"][0]["logs"]


async def test_client_tool_hides_hosted_tool(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARXNG_URL", "http://nowhere.test")
    api = await start(Reply(tool_calls=[Call("web_search", {"query": "tea"}, id="call_1")]))
    response = await create(api, tools=[{"type": "web_search"}, responses_tool(function("web_search"))])
    assert [item["type"] for item in response["output"]] == ["function_call"]


HISTORIES: list[tuple[Json, list[tuple[str, str]], list[str]]] = [
    ({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "tea"}},
     [("web_search", '{"query": "tea"}')], []),
    ({"type": "web_search_call", "id": "ws_1", "action": {"type": "open_page", "url": "https://tea.example/"}},
     [("web_extract", '{"urls": ["https://tea.example/"]}')], []),
    ({"type": "web_search_call", "id": "ws_1"}, [("web_search", '{"query": ""}')], []),
    ({"type": "code_interpreter_call", "id": "ci_1", "code": "1", "outputs": [{"type": "logs", "logs": "42"}]},
     [("execute_code", '{"code": "1"}')], []),
    ({"type": "image_generation_call", "id": "ig_1", "result": "aGk="}, [], ["input.image_generation_call"]),
    ({"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "x", "tools": []}, [], ["input.mcp_list_tools"]),
]  # fmt: skip


@pytest.mark.parametrize(("item", "calls", "named"), HISTORIES)
async def test_hosted_calls_in_history_are_accepted(
    api: Api, item: Json, calls: list[tuple[str, str]], named: list[str]
) -> None:
    api.model.script = [Reply(text="ok")]
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A drink."}]}
    assert await ignored(api, input=["what is tea?", item, message, "thanks"]) == named
    pairs = [
        (call["function"]["name"], call["function"]["arguments"])
        for message in api.model.requests[0].body["messages"]
        for call in message.get("tool_calls") or ()
    ]
    assert pairs == calls
    assert sent_messages(api.model.requests[0], "user") == [("user", "what is tea?"), ("user", "thanks")]


async def test_client_metadata_is_ignored_and_named(start: Start) -> None:
    api = await start(Reply(text="ok"), strict_parameters=True)
    assert await ignored(api, input="hi", client_metadata={"thread_id": "1"}) == ["client_metadata"]


CALL = {
    "id": "item_1",
    "call_id": "call_1",
    "name": "lamp",
    "arguments": "{}",
    "input": "x",
    "action": {},
    "operation": {},
}
# item type; the field; whether the item is refused for it
ODD_ITEMS = [
    *(
        (kind, {"output": [value]}, False)
        for kind in ("function_call", "shell_call_output", "mcp_call", "computer_call_output", "reasoning")
        for value in (5, None, [1], {"type": []})
    ),
    ("tool_search_output", {"tools": [], "output": [5]}, False),
    ("tool_search_output", {"tools": 5}, True),
    ("mcp_call", {"output": {"content": [1, {"type": "text", "text": "x"}]}}, False),
    ("function_call_output", {"output": [5]}, True),
]


@pytest.mark.parametrize(("kind", "fields", "is_refused"), ODD_ITEMS)
async def test_unusual_item_fields_are_kept_or_rejected(api: Api, kind: str, fields: Json, is_refused: bool) -> None:
    item = {"type": kind, **CALL, **fields}
    async with api.post("/v1/conversations", {"items": [item]}) as response:
        body = await response.json()
        assert response.status == (400 if is_refused else 200), body
    if not is_refused:
        listed = await read_json(await api.get(f"/v1/conversations/{body['id']}/items"))
        assert {name: listed["data"][0][name] for name in fields} == fields
