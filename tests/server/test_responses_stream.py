"""Streamed responses: what comes in which order, that it agrees with the object, and that it can be taken up again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hermes.agent import decisions
from hermes.core.events import Event
from hermes.core.spec import RunSpec
from hermes.runs.engine import Refused
from hermes.server.render_responses import ResponseRenderer, VisibleItems
from hermes.server.response_record import ResponseRecord
from support.model_server import Call, Reply, Request
from support.waiting import until
from support.wire import body_bytes

from .clients import (
    Frame,
    HeldModel,
    Json,
    Stream,
    check_envelope,
    frames,
    function,
    read_error,
    read_json,
    responses_tool,
    stream_of,
)
from .conftest import Api, Start

PATH = "/v1/responses"
LAMP = responses_tool(function("lamp", room={"type": "string"}))
TODO = Call("todo", {"todos": [{"id": "1", "content": "tea", "status": "pending"}]}, id="call_todo")
HALL = Call("lamp", ['{"room": ', '"hall"}'], id="call_lamp")
LIVES = ("created", "queued", "in_progress", "completed", "failed", "incomplete")
ENDS = ("response.completed", "response.failed", "response.incomplete")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits between attempts, and a lost connection is not tried again."""
    monkeypatch.setattr(decisions, "RETRY_WAIT_S_MAX", 0.01)
    monkeypatch.setenv("HERMES_STREAM_RETRIES", "0")


async def streamed(api: Api, input: Any = "hi", headers: dict[str, str] | None = None, **fields: Any) -> list[Json]:
    """The events of a stream, read strictly."""
    async with api.post(PATH, {"input": input, "stream": True, **fields}, headers=headers) as response:
        return events(await stream_of(response))


def events(frames: list[Frame], first: int = 0) -> list[Json]:
    """The payloads of frames that are numbered without a gap and end as they should."""
    assert frames[-1].data == "[DONE]"
    assert frames[-1].event is None
    events = [frame.data for frame in frames[:-1]]
    assert [frame.event for frame in frames[:-1]] == [event["type"] for event in events]
    assert [frame.id for frame in frames] == [None] * len(frames)
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    return events


def types(events: list[Json]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def object_of(events: list[Json]) -> Json:
    return dict(events[-1]["response"])


def plainly(response: Json) -> Json:
    """A streamed object as JSON shows it: results of tools are text there."""
    output = []
    for item in response["output"]:
        if item["type"] == "function_call_output":
            (part,) = item["output"]
            assert part["type"] == "input_text"
            item = {**item, "output": part["text"]}
        output.append(item)
    return {**response, "output": output}


async def fetch(api: Api, response_id: str) -> Json:
    async with api.get(f"{PATH}/{response_id}") as response:
        return await read_json(response)


TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done"]  # fmt: skip
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
RESULT = ["output_item.added", "output_item.done"]
THOUGHT = ["output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
           "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"]  # fmt: skip
MCP = ["output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done",
       "mcp_call.completed", "output_item.done"]  # fmt: skip

GRAMMAR: list[tuple[str, list[Reply], Json, dict[str, str], list[str]]] = [
    ("text", [Reply(text="Done.")], {}, {}, TEXT),
    ("tool", [Reply(text="Hm.", tool_calls=[TODO]), Reply(text="Done.")], {}, {}, [*TEXT, *CALL, *RESULT, *TEXT]),
    ("mcp", [Reply(tool_calls=[TODO]), Reply(text="Done.")], {}, {"X-Hermes-Tool-Items": "mcp"}, [*MCP, *TEXT]),
    ("no items", [Reply(tool_calls=[TODO]), Reply(text="Done.")], {}, {"X-Hermes-Tool-Items": "none"}, TEXT),
    ("client tool", [Reply(tool_calls=[HALL])], {"tools": [LAMP]}, {}, CALL),
    ("thought", [Reply(text="4.", reasoning="2+2")], {"reasoning": {"summary": "auto"}}, {}, [*THOUGHT, *TEXT]),
    ("hidden thought", [Reply(text="4.", reasoning="2+2")], {}, {}, TEXT),
]


@pytest.mark.parametrize(
    ("script", "fields", "headers", "body"), [row[1:] for row in GRAMMAR], ids=[r[0] for r in GRAMMAR]
)
async def test_stream_events_are_ordered_and_match_object(
    api: Api, script: list[Reply], fields: Json, headers: dict[str, str], body: list[str]
) -> None:
    api.model.script = script
    events = await streamed(api, headers=headers, **fields)
    kinds = types(events)
    # Text and arguments may come in any number of pieces.
    folded = [kind for at, kind in enumerate(kinds) if not (kind.endswith(".delta") and kinds[at - 1] == kind)]
    assert folded == ["created", "in_progress", *body, "completed"]
    check_items(events)
    final = object_of(events)
    assert await fetch(api, final["id"]) == plainly(final)
    assert events[0]["response"]["status"] == "in_progress"
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    assert set(events[0]["response"]) == set(final)


def check_items(events: list[Json]) -> None:
    """Every item is opened, filled and closed under its own index and id, and is what the object holds."""
    final = object_of(events)
    opened: dict[int, Json] = {}
    result: dict[int, Json] = {}
    text: dict[str, str] = {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind in LIVES or kind == "error":
            continue
        index = event["output_index"]
        if kind == "output_item.added":
            assert index == len(opened)
            assert event["item"]["status"] == "in_progress"
            assert not (
                event["item"]["type"] == "message"
                and "message" in [i["type"] for n, i in opened.items() if n not in result]
            )
            opened[index] = event["item"]
            continue
        assert index in opened
        assert index not in result
        if kind == "output_item.done":
            result[index] = event["item"]
            assert event["item"]["id"] == opened[index]["id"]
            assert event["item"]["type"] == opened[index]["type"]
            continue
        assert event["item_id"] == opened[index]["id"]
        if kind.endswith(".delta"):
            text[event["item_id"]] = text.get(event["item_id"], "") + event["delta"]
        elif kind.endswith(("_text.done", "_arguments.done")):
            assert event.get("text", event.get("arguments")) == text[event["item_id"]]
        if kind.startswith("output_text"):
            assert event["logprobs"] == []
        if kind == "function_call_arguments.done":
            assert event["name"] == opened[index]["name"]
    assert list(result.values()) == final["output"]


async def test_response_stream_is_incremental(start: Start) -> None:
    async with HeldModel(Reply(text=["Hello", " there", ", you."])) as model:
        api = await start(settings=model.settings)
        async with api.post(PATH, {"input": "hi", "stream": True}) as response:
            stream = Stream(response)
            frames = await stream.until(lambda frame: frame.event == "response.in_progress")
            stored = await fetch(api, frames[0].data["response"]["id"])
            assert stored["status"] == "in_progress"
            deltas = []
            for _ in range(3):
                model.release()
                frames_read = await stream.until(lambda frame: frame.event == "response.output_text.delta")
                deltas.append(frames_read[-1].data["delta"])
            assert deltas == ["Hello", " there", ", you."]
            rest = await stream.rest()
    assert rest[-1].data == "[DONE]"


async def test_tool_result_is_list_on_the_wire(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[TODO]), Reply(text="Done.")]
    events = await streamed(api)
    (item,) = [
        e["item"] for e in events if e["type"].endswith("item.done") and e["item"]["type"] == "function_call_output"
    ]
    assert [part["type"] for part in item["output"]] == ["input_text"]


# ---- ends that are not good


async def test_stream_failure_is_error_and_failed_response(api: Api) -> None:
    api.model.handler = lambda _: Reply(status=401, error="no")
    events = await streamed(api)
    assert types(events)[-2:] == ["error", "failed"]
    error = events[-2]
    assert set(error) == {"type", "sequence_number", "code", "message", "param", "error"}
    assert check_envelope(502, error)["code"] == error["code"] == "provider_auth_failed"
    final = object_of(events)
    assert (final["status"], final["error"]["code"], final["error"]["type"]) == (
        "failed",
        "server_error",
        "provider_auth_failed",
    )
    assert await fetch(api, final["id"]) == final


async def test_stream_failure_after_text_closes_item_first(api: Api) -> None:
    reply = Reply(text=["Half an answer ", "and more"])

    def handle(request: Request) -> Reply:
        if request.number > 1:
            return Reply(status=500, error="gone")
        body = body_bytes(request.protocol, reply, request.body, request.key)
        return Reply(text=reply.text, cut_at=body.index(b"and more") - 60)

    api.model.handler = handle
    events = await streamed(api)
    check_items(events)
    final = object_of(events)
    assert (events[-1]["type"], final["status"]) == ("response.failed", "failed")
    assert final["output"][0]["content"][0]["text"] == "Half an answer "
    assert final["output"][0]["status"] == "incomplete"


async def test_truncated_stream_ends_incomplete(api: Api) -> None:
    api.model.script = [Reply(text="Half", finish="length")]
    events = await streamed(api, max_output_tokens=20)
    check_items(events)
    assert events[-1]["type"] == "response.incomplete"
    assert object_of(events)["incomplete_details"] == {"reason": "max_output_tokens"}
    assert object_of(events)["output"][-1]["status"] == "incomplete"


async def test_agent_exception_ends_stream_in_order(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(**_: Any) -> Any:
        raise RuntimeError("it broke")

    monkeypatch.setattr(api.adapter, "_run_agent", broken)
    events = await streamed(api)
    assert types(events)[-2:] == ["error", "failed"]
    assert "it broke" in events[-2]["message"]
    assert object_of(events)["status"] == "failed"


@pytest.mark.parametrize("way", ["cancel", "stop"])
async def test_interrupted_response_is_cancelled(start: Start, way: str) -> None:
    async with HeldModel(Reply(text=["Half", " an answer."])) as model:
        api = await start(settings=model.settings)
        async with api.post(PATH, {"input": "hi", "stream": True}) as response:
            stream = Stream(response)
            model.release()
            frames = await stream.until(lambda frame: frame.event == "response.output_text.delta")
            response_id = frames[0].data["response"]["id"]
            place = {
                "cancel": f"{PATH}/{response_id}/cancel",
                "stop": f"/v1/runs/{response.headers['X-Hermes-Run-Id']}/stop",
            }
            async with api.post(place[way]) as stopped:
                answer = await read_json(stopped)
            stream_events = events([*frames, *await stream.rest()])
        if way == "cancel":
            assert (answer["id"], answer["status"]) == (response_id, "cancelled")
        final = object_of(stream_events)
        assert (stream_events[-1]["type"], final["status"]) == ("response.incomplete", "cancelled")
        assert final["incomplete_details"] == {"reason": "cancelled"}
        assert final["output"][0]["content"][0]["text"] == "Half"
        assert (await fetch(api, response_id))["status"] == "cancelled"
        async with api.post(f"{PATH}/{response_id}/cancel") as again:
            assert (await read_json(again))["status"] == "cancelled"


@pytest.mark.parametrize(("tool_items", "last"), [("mcp", "incomplete"), ("function", "completed")])
def test_call_without_result_is_closed_once(tool_items: str, last: str) -> None:
    """A call that is open when its response ends: an MCP call gets its end then, a function call has it already."""
    sent: list[tuple[str, Json]] = []

    def frame(kind: str, payload: Json) -> bytes:
        sent.append((kind, json.loads(json.dumps(payload))))
        return b""

    template = {"id": "resp_1", "object": "response", "status": "in_progress", "output": [], "usage": None}
    renderer = ResponseRenderer(template, VisibleItems(tool_items=tool_items), frame=frame)
    call = {"id": "call_1", "name": "todo", "arguments": "{}"}
    message = {"message_id": "msg_1", "text": "", "tool_calls": [call], "partial": False}
    renderer.feed(
        [
            Event("run_1", "message.completed", 1, message, 1),
            Event("run_1", "run.cancelled", 1, {"reason": "stop", "usage": {}}, 2),
        ]
    )
    kinds = [kind.removeprefix("response.") for kind, _ in sent]
    assert kinds.count("mcp_call.failed") == (tool_items == "mcp")
    assert [payload["item"]["status"] for kind, payload in sent if kind.endswith("output_item.done")] == [last]
    assert kinds[-1] == "incomplete" and [item["status"] for item in renderer.response["output"]] == [last]


async def test_finished_response_cannot_be_cancelled(api: Api) -> None:
    api.model.script = [Reply(text="Done.")]
    final = object_of(await streamed(api))
    async with api.post(f"{PATH}/{final['id']}/cancel") as response:
        await read_error(response, 409, "response_not_cancellable")


# ---- in the background


async def finished(api: Api, response_id: str) -> Json:
    return await until(lambda: fetch(api, response_id), lambda value: value["status"] not in ("queued", "in_progress"))


async def test_background_response_is_polled(start: Start) -> None:
    async with HeldModel(Reply(text="Done.")) as model:
        api = await start(settings=model.settings)
        async with api.post(PATH, {"input": "hi", "background": True}) as response:
            body = await read_json(response)
        assert (body["status"], body["background"], body["output"]) == ("queued", True, [])
        await model.wait_for_request()
        await until(lambda: fetch(api, body["id"]), lambda value: value["status"] == "in_progress")
        model.release_all()
        result = await finished(api, body["id"])
    assert result["status"] == "completed"
    assert result["output"][0]["content"][0]["text"] == "Done."


async def test_response_is_kept_when_another_replica_started_its_run(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas are asked under one key: the run of one is refused, the response is that of the other."""
    async with HeldModel(Reply(text="Done.")) as model:
        api = await start(settings=model.settings)
        engine, run_ids = api.app.engine, list[str]()
        submit = engine.submit

        async def refuse_after_submit(spec: RunSpec, **options: Any) -> str:
            run_ids.append(await submit(spec, **options))
            raise Refused("session_db_unavailable", "There is a run of this number.")

        monkeypatch.setattr(engine, "submit", refuse_after_submit)
        async with api.post(PATH, {"input": "hi", "background": True}) as response:
            await read_error(response, 503, "session_db_unavailable")
        assert (await fetch(api, run_ids[0].replace("run_", "resp_")))["status"] in ("queued", "in_progress")
        model.release_all()


async def test_background_response_cancel_and_delete(start: Start) -> None:
    async with HeldModel(Reply(text="Done."), Reply(text="Done.")) as model:
        api = await start(settings=model.settings)
        async with api.post(PATH, {"input": "hi", "background": True}) as response:
            first = await read_json(response)
        await model.wait_for_request()
        async with api.post(f"{PATH}/{first['id']}/cancel") as response:
            assert (await read_json(response))["status"] == "cancelled"
        async with api.post(PATH, {"input": "hi", "background": True}) as response:
            second = await read_json(response)
        await model.wait_for_request(2)
        async with api.delete(f"{PATH}/{second['id']}") as response:
            assert (await read_json(response))["deleted"] is True
        async with api.get(f"{PATH}/{second['id']}") as response:
            await read_error(response, 404, "response_not_found")
        await model.until(lambda: model.open_streams == 0)
        assert all(request.closed_early for request in model.requests)


async def test_disconnect_does_not_stop_background_response(start: Start) -> None:
    async with HeldModel(Reply(text=["Half", " an answer."])) as model:
        api = await start(settings=model.settings)
        async with api.post(PATH, {"input": "hi", "background": True, "stream": True}) as response:
            stream = Stream(response)
            model.release()
            frames = await stream.until(lambda frame: frame.event == "response.output_text.delta")
        assert "queued" in types([frame.data for frame in frames])
        model.release_all()
        result = await finished(api, frames[0].data["response"]["id"])
        assert result["status"] == "completed"
        assert result["output"][0]["content"][0]["text"] == "Half an answer."


# ---- taken up again


async def replayed(api: Api, response_id: str, after: int | None = None) -> list[Frame]:
    more = "" if after is None else f"&starting_after={after}"
    async with api.get(f"{PATH}/{response_id}?stream=true{more}") as response:
        return await stream_of(response)


@pytest.mark.parametrize("made_by", ["stream", "json", "background"])
async def test_response_replay_from_any_sequence_number(api: Api, made_by: str) -> None:
    api.model.script = [Reply(text="Let me see.", tool_calls=[TODO]), Reply(text=["Do", "ne."])]
    fields: Json = {"stream": {"stream": True}, "json": {}, "background": {"background": True}}[made_by]
    async with api.post(PATH, {"input": "hi", **fields}) as response:
        if made_by == "stream":
            whole = frames(await response.text())
            response_id = whole[0].data["response"]["id"]
        else:
            response_id = (await read_json(response))["id"]
            await finished(api, response_id)
            whole = await replayed(api, response_id)
    stream_events = events(whole)
    check_items(stream_events)
    assert object_of(stream_events)["status"] == "completed"
    assert await replayed(api, response_id) == whole
    for after in (0, 1, len(stream_events) // 2, len(stream_events) - 2):
        assert await replayed(api, response_id, after) == whole[after + 1 :]
    for after in (len(stream_events) - 1, len(stream_events) + 100):
        assert [frame.data for frame in await replayed(api, response_id, after)] == ["[DONE]"]


async def test_readers_join_running_response(start: Start) -> None:
    async with HeldModel(Reply(text=["one ", "two ", "three."])) as model:
        api = await start(settings=model.settings)
        async with api.post(PATH, {"input": "hi", "stream": True}) as response:
            stream = Stream(response)
            model.release()
            frames = await stream.until(lambda frame: frame.event == "response.output_text.delta")
            response_id = frames[0].data["response"]["id"]
            readers = [
                asyncio.create_task(replayed(api, response_id, after)) for after in (None, 2, len(frames) - 1, 3)
            ]
            await until(lambda: len(api.context.metrics.streams) == 1 + len(readers))
            model.release_all()
            whole = [*frames, *await stream.rest()]
            results = await asyncio.gather(*readers)
    events(whole)
    assert results == [whole, whole[3:], whole[len(frames) :], whole[4:]]


@pytest.mark.parametrize("after", ["x", "-2", "1.5"])
async def test_invalid_starting_after_is_rejected(api: Api, after: str) -> None:
    api.model.script = [Reply(text="Done.")]
    final = object_of(await streamed(api))
    async with api.get(f"{PATH}/{final['id']}?stream=true&starting_after={after}") as response:
        await read_error(response, 400, "invalid_value", "starting_after")


async def test_response_visibility_is_fixed_at_creation(api: Api) -> None:
    api.model.script = [Reply(reasoning="Hm.", tool_calls=[TODO]), Reply(text="Done.")]
    streamed_events = await streamed(api, headers={"X-Hermes-Tool-Items": "mcp"}, reasoning={"summary": "auto"})
    response_id = object_of(streamed_events)["id"]
    headers = {"X-Hermes-Tool-Items": "none", "X-Hermes-Reasoning": "off"}
    async with api.get(f"{PATH}/{response_id}?stream=true", headers=headers) as response:
        assert events(await stream_of(response)) == streamed_events


async def test_final_event_is_sent_after_store(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    holding = asyncio.Event()
    save = ResponseRecord.save

    async def late(self: ResponseRecord, adapter: Any, response: Json, ended: Any = None) -> None:
        task = asyncio.current_task()
        # The follower that works for nobody is a moment behind.
        if response["status"] == "completed" and task is not None and "_alone" in repr(task.get_coro()):
            await holding.wait()
        await save(self, adapter, response, ended)

    monkeypatch.setattr(ResponseRecord, "save", late)
    api.model.script = [Reply(text="Done.")]
    async with api.post("/v1/responses", {"input": "x", "background": True}) as response:
        body = await response.json()
    async with api.get(f"/v1/responses/{body['id']}?stream=true") as response:
        assert "response.completed" in await response.text()
    async with api.get(f"/v1/responses/{body['id']}") as response:
        assert (await response.json())["status"] == "completed"
    holding.set()


# ---- lines that are not too long

LIMIT = 14_000
NOTES = [
    Call("todo", {"todos": [{"id": "1", "content": f"{c}é" * 500, "status": "pending"}]}, id=f"c{c}") for c in "abcd"
]
LIFE = {"response.created", "response.in_progress", "response.completed", "response.failed", "response.incomplete"}


def outputs(response: Json) -> list[str]:
    """What the server's tools gave, in order."""
    items = [item for item in response["output"] if item["type"] in ("function_call_output", "mcp_call")]
    return [item["output"] if isinstance(item["output"], str) else item["output"][0]["text"] for item in items]


def check_lines(frames: list[Json], limit: int) -> Json:
    """All life-cycle events fit; the others tell everything. The last object."""
    for event in frames:
        size = len(json.dumps(event, ensure_ascii=False).encode())
        assert event["type"] not in LIFE or size < limit, (event["type"], size)
    result = [event["item"] for event in frames if event["type"] == "response.output_item.done"]
    assert not any("truncated" in item for item in result)
    last = dict(frames[-1]["response"])
    whole, shortened = outputs({"output": result}), outputs(last)
    assert len(whole) == 4
    for before, after in zip(whole, shortened, strict=True):
        assert before.startswith(after)
    marked = [item.get("truncated") for item in last["output"] if item["type"] in ("function_call_output", "mcp_call")]
    assert marked == [True if before != after else None for before, after in zip(whole, shortened, strict=True)]
    assert True in marked
    untouched = ("message", "function_call")
    items = [item for item in result if item["type"] in untouched]
    assert [item for item in last["output"] if item["type"] in untouched] == items
    return last


@pytest.mark.parametrize("expected", ["function", "mcp"])
async def test_outputs_in_lifecycle_events_are_shortened_to_max_event_bytes(start: Start, expected: str) -> None:
    api = await start(Reply(tool_calls=NOTES), Reply(text="Done. " * 200), max_event_bytes=LIMIT)
    streamed_events = await streamed(api, headers={"X-Hermes-Tool-Items": expected})
    last = check_lines(streamed_events, LIMIT)
    body = await fetch(api, last["id"])
    assert min(map(len, outputs(body))) > 1000
    assert "truncated" not in json.dumps(body)
    async with api.get(f"{PATH}/{last['id']}", params={"stream": "true"}) as response:
        assert events(await stream_of(response)) == streamed_events, "a replay tells the same"


async def test_code_interpreter_logs_are_shortened(start: Start) -> None:
    prints = [Call("execute_code", {"code": f"print('{c}' * 5000)"}, id=f"c{c}") for c in "abcd"]
    api = await start(Reply(tool_calls=prints), Reply(text="Done."), max_event_bytes=LIMIT)
    events = await streamed(api, tools=[{"type": "code_interpreter", "container": {"type": "auto"}}])
    last = object_of(events)
    assert len(json.dumps(events[-1], ensure_ascii=False).encode()) < LIMIT
    items = [item for item in last["output"] if item["type"] == "code_interpreter_call"]
    whole = [item for item in (await fetch(api, last["id"]))["output"] if item["type"] == "code_interpreter_call"]
    assert [item.get("truncated") for item in items] == [True] * 4
    for before, after in zip(whole, items, strict=True):
        assert len(before["outputs"][0]["logs"]) > 5000
        assert before["outputs"][0]["logs"].startswith(after["outputs"][0]["logs"])


async def test_websocket_respects_max_event_bytes(start: Start) -> None:
    api = await start(Reply(tool_calls=NOTES), Reply(text="Done."), max_event_bytes=LIMIT)
    async with api.client.ws_connect(api.url + PATH) as socket:
        await socket.send_json({"type": "response.create", "input": "hi"})
        items: list[Json] = []
        while not items or items[-1]["type"] != "response.completed":
            items.append(await socket.receive_json())
    check_lines(items, LIMIT)


async def test_text_and_arguments_are_never_shortened(start: Start) -> None:
    api = await start(Reply(tool_calls=NOTES), Reply(text="x" * 9000), max_event_bytes=4000)
    last = object_of(await streamed(api))
    assert last["output"][-1]["content"][0]["text"] == "x" * 9000
    assert [item["output"][0]["text"] for item in last["output"] if item["type"] == "function_call_output"] == [""] * 4
    arguments = [item["arguments"] for item in last["output"] if item["type"] == "function_call"]
    assert [json.loads(argument) for argument in arguments] == [note.arguments for note in NOTES]


async def test_events_that_fit_are_unchanged(start: Start) -> None:
    api = await start(Reply(tool_calls=NOTES), Reply(text="Done."))
    last = object_of(await streamed(api))
    assert "truncated" not in json.dumps(last)
    assert plainly(last)["output"] == (await fetch(api, last["id"]))["output"]


async def test_unstored_run_is_available_to_its_stream(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the run has ended before its stream begins."""
    api = await start(Reply(text="Hello.", reasoning="A greeting will do."))
    begin = ResponseRecord.try_insert

    async def late(record: ResponseRecord, *arguments: Any) -> None:
        await begin(record, *arguments)

        await until(lambda: api.model.requests and not api.app.engine.kinds)

    monkeypatch.setattr(ResponseRecord, "try_insert", late)
    body = {"input": "hi", "store": False, "stream": True, "reasoning": {"summary": "auto"}}
    async with api.post(PATH, body) as response:
        stream = await stream_of(response)
    assert [frame.data["text"] for frame in stream if frame.event == "response.reasoning_summary_text.done"] == [
        "A greeting will do."
    ]
    assert not api.app.engine._ephemeral_ids
