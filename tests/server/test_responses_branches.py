"""A response goes on from the one that its request names, whatever has been said in the session since."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hermes.core.spec import RunSpec
from hermes.server.response_record import level_revived
from support.model_server import Call, Reply
from support.waiting import DEADLINE_S

from .clients import HeldModel, Json, function, read_error, read_json, responses_tool
from .conftest import PROVIDER_KEY, Api, Start

PATH = "/v1/responses"
LAMP = responses_tool(function("lamp", room={"type": "string"}))
TODO = Call("todo", {"todos": [{"id": "1", "content": "tea", "status": "pending"}]}, id="call_todo")
HALL = Call("lamp", {"room": "hall"}, id="call_lamp")
OUTPUT = {"type": "function_call_output", "call_id": "call_lamp", "output": "on"}


async def ask(api: Api, input_items: Any, after: Json | None = None, status: int = 200, **fields: Any) -> Json:
    body = {"input": input_items, "tools": [LAMP], **({"previous_response_id": after["id"]} if after else {}), **fields}
    async with api.post(PATH, body) as response:
        return await read_json(response, status)


def roles(api: Api) -> list[str]:
    return [message["role"] for message in api.model.requests[-1].body["messages"][1:]]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def test_tool_output_can_be_resent_after_failure(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[TODO, HALL]), Reply(status=400), Reply(text="On."), Reply(text="Yes, on.")]
    first = await ask(api, "light")
    await ask(api, [OUTPUT], first, status=502)
    for answer in ("On.", "Yes, on."):
        response = await ask(api, [OUTPUT], first)
        assert answer in json.dumps(response["output"])
        assert roles(api) == ["user", "assistant", "tool", "tool"]


async def test_call_id_can_be_reused(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[HALL]), Reply(tool_calls=[HALL]), Reply(text="Off.")]
    second = await ask(api, [OUTPUT], await ask(api, "light"))
    await ask(api, [{**OUTPUT, "output": "off"}, user("and?")], second)
    assert roles(api) == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert api.model.requests[-1].body["messages"][-2]["content"] == "off"


async def test_call_of_chain_can_be_sent_with_its_output(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[TODO, HALL]), Reply(text="On."), Reply(text="Yes, on.")]
    first = await ask(api, "light")
    call = next(item for item in first["output"] if item["type"] == "function_call")
    for input_items in ([call, OUTPUT], [call, OUTPUT, user("and?")]):
        await ask(api, input_items, first)
        assert roles(api)[:4] == ["user", "assistant", "tool", "tool"]
        assert roles(api)[4:] == ["user"] * (len(input_items) - 2)


async def test_response_stored_late_has_the_history_of_its_own_turn(api: Api) -> None:
    """A server that starts completes the responses that it finds unfinished, maybe after their sessions have gone on."""
    api.model.script = [Reply(tool_calls=[TODO, HALL]), Reply(text="On."), Reply(text="Yes, on.")]
    first = await ask(api, "light")
    call = next(item for item in first["output"] if item["type"] == "function_call")
    await ask(api, [OUTPUT], first)
    await level_revived(api.context, first["id"])
    await ask(api, [call, OUTPUT, user("and?")], first)
    assert roles(api) == ["user", "assistant", "tool", "tool", "user"]


def named(way: str, item: Any, before: list[Json]) -> tuple[str, Json, Json]:
    """A request that says in one of several ways where it goes on: path, body, headers."""
    header = {"X-Hermes-Session-Id": "hall"}
    if way == "chat":
        output = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
        return "/v1/chat/completions", {"messages": [*before, output], "tools": [function("lamp")]}, header
    body = {"input": [item], "tools": [LAMP]}
    return PATH, body | ({"conversation": "hall"} if way == "conversation" else {}), header if way == "header" else {}


@pytest.mark.parametrize("way", ["chat", "header", "conversation"])
@pytest.mark.parametrize("ends", [Reply(status=400), Reply(text="Never read.", continues=False)])
async def test_outputs_can_be_resent_in_named_session(api: Api, way: str, ends: Reply) -> None:
    api.model.script = [
        Reply(tool_calls=[TODO, HALL]),
        ends,
        Reply(text="On."),
        Reply(text="Fine."),
        Reply(text="Bye."),
    ]
    fields: Json = {"conversation": "hall"} if way == "conversation" else {}
    headers = {} if way == "conversation" else {"X-Hermes-Session-Id": "hall"}
    async with api.post(PATH, {"input": "light", "tools": [LAMP], **fields}, headers=headers) as response:
        await read_json(response)
        session_id = response.headers["X-Hermes-Session-Id"]
    call = {"id": "call_lamp", "type": "function", "function": {"name": "lamp", "arguments": '{"room": "hall"}'}}
    before = [user("light"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    for output, status in (("on", ends.status if ends.status == 200 else 502), ("on", 200), ("dimmed", 200)):
        path, body, more = named(way, {**OUTPUT, "output": output}, before)
        async with api.post(path, body, headers=more) as response:
            await read_json(response, status)
            assert response.headers["X-Hermes-Session-Id"] == session_id
        assert roles(api) == ["user", "assistant", "tool", "tool"]
        assert api.model.requests[-1].body["messages"][-1]["content"] == output
    async with api.post(PATH, {"input": "thanks", **fields}, headers=headers) as response:
        await read_json(response)
    assert roles(api) == ["user", "assistant", "tool", "tool", "assistant", "user"]
    async with api.get(f"/api/sessions/{session_id}/messages") as response:
        contents = [row["content"] for row in (await read_json(response))["data"]]
    assert contents[-4:] == ["dimmed", "Fine.", "thanks", "Bye."]


@pytest.mark.parametrize("way", ["plain", "stream", "background", "websocket"])
@pytest.mark.parametrize("chained", ["conversation", "previous_response_id"])
async def test_outputs_can_be_resent_by_every_reference(api: Api, way: str, chained: str) -> None:
    api.model.script = [Reply(tool_calls=[HALL]), Reply(status=400), Reply(text="On.", continues=False)]
    first = await ask(api, "light", conversation="hall")
    names = {chained: "hall" if chained == "conversation" else first["id"]}
    await ask(api, [OUTPUT], **names, status=502)
    assert "On." in await root_spec(api, way, {"input": [OUTPUT], "tools": [LAMP], **names})
    assert roles(api) == ["user", "assistant", "tool"]


async def test_resent_outputs_may_be_partial(api: Api) -> None:
    other = Call("lamp", {"room": "attic"}, id="call_attic")
    api.model.script = [Reply(tool_calls=[HALL, other]), Reply(status=400), Reply(text="On.")]
    await ask(api, "light", conversation="hall")
    await ask(api, [OUTPUT, {**OUTPUT, "call_id": "call_attic", "output": "off"}], conversation="hall", status=502)
    await ask(api, [{**OUTPUT, "output": "dimmed"}], conversation="hall")
    assert [m["content"] for m in api.model.requests[-1].body["messages"][-2:]] == ["dimmed", "off"]


@pytest.mark.parametrize("store", [True, False])
async def test_outputs_can_be_resent_to_response_that_has_them(api: Api, store: bool) -> None:
    api.model.script = [Reply(tool_calls=[TODO, HALL]), Reply(text="On."), Reply(text="Yes.", continues=False)]
    first = await ask(api, "light")
    second = await ask(api, [OUTPUT], first)
    await ask(api, [OUTPUT], second, store=store)
    assert roles(api) == ["user", "assistant", "tool", "tool"]


async def test_outputs_cannot_be_resent_after_new_user_message(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[HALL]), Reply(text="On."), Reply(text="Fine.")]
    await ask(api, "light", conversation="hall")
    await ask(api, [OUTPUT], conversation="hall")
    await ask(api, "thanks", conversation="hall")
    async with api.post(PATH, {"input": [OUTPUT], "conversation": "hall", "tools": [LAMP]}) as response:
        await read_error(response, 400, "tool_call_not_found", "tool_call_id")


async def test_branch_ignores_calls_open_elsewhere(api: Api) -> None:
    api.model.script = [Reply(text="Hello."), Reply(tool_calls=[HALL]), Reply(text="Fine.")]
    first = await ask(api, "hi")
    await ask(api, "light", first)
    await ask(api, "how are you?", first)
    assert roles(api) == ["user", "assistant", "user"]


async def test_branch_does_not_wait_for_running_turn(start: Start) -> None:
    async with HeldModel(Reply(text="one", continues=False)) as slow:
        routes = {"slow": {"model": "slow", "base_url": f"{slow.url}/v1", "api_key": PROVIDER_KEY}}
        api = await start(Reply(text="Hello."), Reply(text="two"), session_wait_seconds=0, model_routes=routes)
        first = await ask(api, "hi")
        running = asyncio.create_task(ask(api, "a", first, model="slow"))
        await slow.wait_for_request()
        assert "two" in json.dumps((await ask(api, "b", first))["output"])
        assert roles(api) == ["user", "assistant", "user"]
        slow.release_all()
        assert "one" in json.dumps((await running)["output"])


@pytest.mark.parametrize("way", ["plain", "stream", "background", "websocket"])
async def test_branch_does_not_wait_for_unrecorded_turn(start: Start, way: str) -> None:
    hello, two = Reply(text="Hello.", continues=False), Reply(text="two", continues=False)
    api = await start(hello, two, session_wait_seconds=3600, run_queue_seconds=3600)
    first = await ask(api, "hi")
    [record] = await api.app.engine.list()
    other = RunSpec(user_message="a", session_id=record.spec.session_id)
    admission = await api.app.engine.admit(other)
    try:
        async with asyncio.timeout(DEADLINE_S):  # much less than a turn may wait for its session
            assert "two" in await root_spec(api, way, {"input": "b", "previous_response_id": first["id"]})
    finally:
        await admission.release()
    assert roles(api) == ["user", "assistant", "user"]
    runs = {run.spec.user_message: run.spec.session_id for run in await api.app.engine.list()}
    assert runs["hi"] != runs["b"]


async def test_branch_waits_only_for_its_own_response(start: Start) -> None:
    async with HeldModel(Reply(text="Hello.", continues=False)) as slow:
        routes = {"slow": {"model": "slow", "base_url": f"{slow.url}/v1", "api_key": PROVIDER_KEY}}
        api = await start(Reply(text="two", continues=False), model_routes=routes, session_wait_seconds=3600)
        first = await ask(api, "hi", model="slow", background=True)
        await slow.wait_for_request()
        [record] = await api.app.engine.list()
        other = RunSpec(user_message="a", session_id=record.spec.session_id)
        waiting = asyncio.create_task(api.app.engine.admit(other))
        branch = asyncio.create_task(ask(api, "b", first))
        slow.release_all()
        admission = await waiting  # the session's next turn, which does not end
        try:
            async with asyncio.timeout(DEADLINE_S):
                assert "two" in json.dumps((await branch)["output"])
        finally:
            await admission.release()
        assert roles(api) == ["user", "assistant", "user"]


async def root_spec(api: Api, way: str, body: Json) -> str:
    """The whole answer to a request for a response, as text."""
    if way == "websocket":
        async with api.client.ws_connect(f"{api.url}{PATH}") as socket:
            await socket.send_json({"type": "response.create", **body})
            events: list[Json] = []
            while not events or events[-1]["type"] not in ("response.completed", "response.failed", "error"):
                events.append(await socket.receive_json())
            return json.dumps(events[-1])
    async with api.post(PATH, {**body, **({way: True} if way != "plain" else {})}) as response:
        assert response.status == 200, await response.text()
        if way != "background":
            return str(await response.text())
        queued = await read_json(response)
    async with api.get(f"{PATH}/{queued['id']}?stream=true") as response:
        return str(await response.text())


@pytest.mark.parametrize("items", [[user("and?"), OUTPUT], [OUTPUT, user("and?")], [OUTPUT, user("so?"), user("and?")]])
async def test_user_message_may_precede_or_follow_outputs(api: Api, items: list[Json]) -> None:
    api.model.script = [Reply(tool_calls=[HALL]), Reply(text="On.")]
    first = await ask(api, "light")
    await ask(api, items, first)
    assert roles(api) == ["user", "assistant", "tool", *["user"] * (len(items) - 1)]


async def test_outputs_are_checked_against_referenced_response(api: Api) -> None:
    api.model.script = [Reply(text="Hello."), Reply(tool_calls=[HALL])]
    first = await ask(api, "hi")
    second = await ask(api, "light", first)
    for body, code in (
        ({"input": [OUTPUT], "previous_response_id": first["id"]}, "tool_call_not_found"),
        ({"input": "well?", "previous_response_id": second["id"]}, "tool_output_missing"),
        ({"input": [OUTPUT]}, "tool_call_not_found"),
    ):
        async with api.post(PATH, {**body, "tools": [LAMP]}) as response:
            await read_error(response, 400, code, "tool_call_id")
    wrong = {"input": [OUTPUT], "previous_response_id": first["id"], "background": True}
    async with api.post(PATH, wrong) as response:
        await read_error(response, 400, "tool_call_not_found", "tool_call_id")


async def test_background_branch_starts_at_referenced_response(api: Api) -> None:
    api.model.script = [Reply(text=text, continues=False) for text in ("Hello.", "one", "two")]
    first = await ask(api, "hi")
    await ask(api, "a", first)
    queued = await ask(api, "b", first, background=True)
    async with api.get(f"{PATH}/{queued['id']}?stream=true") as response:
        assert "two" in await response.text()
    assert roles(api) == ["user", "assistant", "user"]


async def test_superseded_response_is_kept_and_can_be_continued(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[HALL]), Reply(text="On."), Reply(text="Yes."), Reply(text="Bye.")]
    await ask(api, "light", conversation="hall")
    second = await ask(api, [OUTPUT], conversation="hall")
    await ask(api, [OUTPUT], conversation="hall")
    await ask(api, "thanks", second)
    assert roles(api) == ["user", "assistant", "tool", "assistant", "user"]
    assert api.model.requests[-1].body["messages"][-2]["content"] == "On."


async def compaction(api: Api) -> Json:
    api.model.script = [Reply(text="They spoke of tea.")]
    async with api.post(f"{PATH}/compact", {"model": "hermes-agent", "input": "tea?"}) as response:
        item: Json = (await read_json(response))["output"][0]
    return item


ORDERS = [
    "output user compaction reasoning reference",
    "user output reference compaction reasoning",
    "compaction reference output user reasoning",
    "reference reasoning user compaction output",
    "reasoning compaction reference user output",
    "output compaction",
    "compaction output",
]


@pytest.mark.parametrize("order", ORDERS)
async def test_any_items_may_surround_output(api: Api, order: str) -> None:
    summary = await compaction(api)
    api.model.script = [Reply(text="Kept.", continues=False), Reply(tool_calls=[HALL]), Reply(text="On.")]
    answer = await ask(api, [{"type": "message", "role": "user", "content": "earlier"}])
    async with api.get(f"{PATH}/{answer['id']}/input_items") as response:
        [item] = (await read_json(response))["data"]
    first = await ask(api, "light")
    items: dict[str, Json] = {
        "output": OUTPUT,
        "user": user("and?"),
        "compaction": summary,
        "reasoning": {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        "reference": {"type": "item_reference", "id": item["id"]},
    }
    await ask(api, [items[name] for name in order.split()], first)
    _, question, call, *rest = api.model.requests[-1].body["messages"]
    assert (question["content"], call["tool_calls"][0]["id"]) == ("light", "call_lamp")
    assert rest[0] == {"role": "tool", "tool_call_id": "call_lamp", "content": "on"}
    texts = {"user": "and?", "reference": "earlier", "compaction": "Summary of the conversation so far:"}
    expected = [texts[name] for name in order.split() if name in texts]
    assert [message["content"].partition("\n")[0] for message in rest[1:]] == expected


CALL = {"type": "function_call", "call_id": "c1", "name": "lamp", "arguments": "{}"}
ANSWER = {"role": "assistant", "content": "Hello."}


@pytest.mark.parametrize(
    "input_items", [[ANSWER], [user("hi"), ANSWER], [user("hi"), CALL], "summary", "summary after"]
)
async def test_input_without_user_message_is_rejected(api: Api, input_items: Any) -> None:
    if isinstance(input_items, str):
        summary = await compaction(api)
        input_items = [summary] if input_items == "summary" else [user("hi"), ANSWER, summary]
    async with api.post(PATH, {"input": input_items, "tools": [LAMP]}) as response:
        await read_error(response, 400, "missing_user_message", "input")
