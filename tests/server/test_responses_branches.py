"""A response goes on from the one that its request names, whatever has been said in the session since."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.model_server import Call, Reply

from .clients import HeldModel, Json, flat, function, refused, told
from .conftest import PROVIDER_KEY, Api, Start

PATH = "/v1/responses"
LAMP = flat(function("lamp", room={"type": "string"}))
TODO = Call("todo", {"todos": [{"id": "1", "content": "tea", "status": "pending"}]}, id="call_todo")
HALL = Call("lamp", {"room": "hall"}, id="call_lamp")
OUTPUT = {"type": "function_call_output", "call_id": "call_lamp", "output": "on"}


async def ask(api: Api, given: Any, after: Json | None = None, status: int = 200, **fields: Any) -> Json:
    body = {"input": given, "tools": [LAMP], **({"previous_response_id": after["id"]} if after else {}), **fields}
    async with api.post(PATH, body) as response:
        return await told(response, status)


def roles(api: Api) -> list[str]:
    return [message["role"] for message in api.model.requests[-1].body["messages"][1:]]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def test_the_output_of_a_call_may_be_sent_again_after_a_failure(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[TODO, HALL]), Reply(status=400), Reply(text="On."), Reply(text="Yes, on.")]
    first = await ask(api, "light")
    await ask(api, [OUTPUT], first, status=502)
    for answer in ("On.", "Yes, on."):
        response = await ask(api, [OUTPUT], first)
        assert answer in json.dumps(response["output"])
        assert roles(api) == ["user", "assistant", "tool", "tool"]


async def test_a_branch_is_free_of_calls_that_are_open_elsewhere(api: Api) -> None:
    api.model.script = [Reply(text="Hello."), Reply(tool_calls=[HALL]), Reply(text="Fine.")]
    first = await ask(api, "hi")
    await ask(api, "light", first)
    await ask(api, "how are you?", first)
    assert roles(api) == ["user", "assistant", "user"]


async def test_a_branch_does_not_wait_for_a_turn_that_runs(start: Start) -> None:
    async with HeldModel(Reply(text="one", continues=False)) as slow:
        routes = {"slow": {"model": "slow", "base_url": f"{slow.url}/v1", "api_key": PROVIDER_KEY}}
        api = await start(Reply(text="Hello."), Reply(text="two"), session_wait_seconds=0, model_routes=routes)
        first = await ask(api, "hi")
        running = asyncio.create_task(ask(api, "a", first, model="slow"))
        await slow.asked()
        assert "two" in json.dumps((await ask(api, "b", first))["output"])
        assert roles(api) == ["user", "assistant", "user"]
        slow.let_all()
        assert "one" in json.dumps((await running)["output"])


@pytest.mark.parametrize("given", [[user("and?"), OUTPUT], [OUTPUT, user("and?")], [OUTPUT, user("so?"), user("and?")]])
async def test_the_user_may_speak_before_or_after_the_outputs(api: Api, given: list[Json]) -> None:
    api.model.script = [Reply(tool_calls=[HALL]), Reply(text="On.")]
    first = await ask(api, "light")
    await ask(api, given, first)
    assert roles(api) == ["user", "assistant", "tool", *["user"] * (len(given) - 1)]


async def test_outputs_are_checked_against_what_the_request_names(api: Api) -> None:
    api.model.script = [Reply(text="Hello."), Reply(tool_calls=[HALL])]
    first = await ask(api, "hi")
    second = await ask(api, "light", first)
    for body, code in (
        ({"input": [OUTPUT], "previous_response_id": first["id"]}, "tool_call_not_found"),
        ({"input": "well?", "previous_response_id": second["id"]}, "tool_output_missing"),
        ({"input": [OUTPUT]}, "tool_call_not_found"),
    ):
        async with api.post(PATH, {**body, "tools": [LAMP]}) as response:
            await refused(response, 400, code, "tool_call_id")


async def test_a_branch_in_the_background_begins_where_it_is_said_to(api: Api) -> None:
    api.model.script = [Reply(text=text, continues=False) for text in ("Hello.", "one", "two")]
    first = await ask(api, "hi")
    await ask(api, "a", first)
    queued = await ask(api, "b", first, background=True)
    async with api.get(f"{PATH}/{queued['id']}?stream=true") as response:
        assert "two" in await response.text()
    assert roles(api) == ["user", "assistant", "user"]
