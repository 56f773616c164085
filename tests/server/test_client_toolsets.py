"""Which server tools the model is offered when the client brings tools of its own."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hermes.runs.jobs import spec_of
from hermes.tools.framework.toolsets import builtin
from support.model_server import Call, Reply

from .clients import Json, function, read_json, tool_names, user
from .conftest import Api, Start
from .test_keys import ALL, bearer

NARROW = "sk-narrow-0123456789abcdef"
LAMP = function("lamp")
RESPONSES_LAMP = {"type": "function", "name": "lamp", "parameters": {"type": "object", "properties": {}}}
ROUTES = ("chat", "responses", "websocket")
TOOLSETS = {tool.name: tool.toolset for tool in builtin().all()}
OF_THE_HOST = {"terminal", "file", "code_execution"}


async def ask(api: Api, route: str, *, tools: bool = True, **headers: str) -> set[str]:
    """The toolsets that the model is offered for one request."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    api.model.script = [Reply(text="Hi.")]
    api.model.requests.clear()
    body: Json = {"input": "hi", **({"tools": [RESPONSES_LAMP]} if tools else {})}
    if route == "chat":
        async with api.post(
            "/v1/chat/completions", user("hi", **({"tools": [LAMP]} if tools else {})), headers=named
        ) as response:
            await read_json(response)
    elif route == "responses":
        async with api.post("/v1/responses", body, headers=named) as response:
            await read_json(response)
    else:
        async with api.client.ws_connect(f"{api.url}/v1/responses", headers=named) as socket:
            await socket.send_json({"type": "response.create", **body})
            while (event := await socket.receive_json())["type"] not in ("response.completed", "error"):
                pass
            assert event["type"] == "response.completed", event
    names = tool_names(api.model.requests[0])
    assert ("lamp" in names) is tools
    return {TOOLSETS[name] for name in names if name != "lamp"}


@pytest.mark.parametrize("route", ROUTES)
async def test_client_tools_disable_host_toolsets(api: Api, route: str) -> None:
    without = await ask(api, route, tools=False)
    assert without >= {*OF_THE_HOST, "todo", "memory", "skills"}
    assert await ask(api, route) == without - OF_THE_HOST


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("header", "expected"),
    [("file", {"file"}), ("terminal,code_execution,todo", {"terminal", "code_execution", "todo"}), ("none", set())],
)
async def test_toolsets_header_requests_server_tools(api: Api, route: str, header: str, expected: set[str]) -> None:
    assert await ask(api, route, X_Hermes_Toolsets=header) == expected


@pytest.mark.parametrize(
    ("ceiling", "header", "expected"),
    [
        (["todo", "file"], {}, {"todo", "file"}),
        (["todo", "file"], {"X_Hermes_Toolsets": "file,terminal"}, {"file"}),
        (["todo"], {}, {"todo"}),
        (["todo"], {"X_Hermes_Toolsets": "terminal"}, set()),
    ],
)
async def test_key_with_toolsets_requests_server_tools(
    start: Start, ceiling: list[str], header: Json, expected: set[str]
) -> None:
    api = await start(keys=[{"name": "narrow", "key": NARROW, "scopes": ALL, "toolsets": ceiling}])
    for route in ROUTES:
        assert await ask(api, route, **bearer(NARROW), **header) == expected


async def test_subagent_and_job_do_not_gain_tools_of_turn(api: Api) -> None:
    job: Any = Call("cronjob", {"action": "create", "schedule": "every 1h", "prompt": "hi"})
    api.model.script = [
        Reply(tool_calls=[Call("delegate_task", {"goal": "look"})]),
        *[Reply(text="Looked.")],
        Reply(tool_calls=[job]),
        *[Reply(text="Done.")] * 2,
    ]
    async with api.post("/v1/chat/completions", user("hi", tools=[LAMP])) as response:
        await read_json(response)
    child = tool_names(api.model.requests[1])
    assert child and not {TOOLSETS[name] for name in child} & OF_THE_HOST
    [stored_job] = await api.app.store.jobs.list()
    await api.app.engine.run(spec_of(stored_job, time.time()))
    names = {TOOLSETS[name] for name in tool_names(api.model.requests[-1])}
    assert names and not names & OF_THE_HOST
