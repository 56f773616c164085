"""Chat completions with tools: the client's, the server's, and progress events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.model_server import Call, Reply

from .clients import Frame, Json, chat_text, function, read_error, read_json, sent_messages, stream_of, tool_names, user
from .conftest import Api, Start

CHAT = "/v1/chat/completions"
ROOM = {"room": {"type": "string"}}
LAMP, HORN = function("lamp", **ROOM), function("horn")
TODO = Call("todo", {"todos": [{"id": "1", "content": "tea", "status": "pending"}]}, id="call_todo")
HALL = Call("lamp", {"room": "hall"}, id="call_lamp")
PLAIN = {"User-Agent": "curl/8.0"}
KEPT_OR_NOT = pytest.mark.parametrize("store", [True, False])


async def ask(api: Api, body: Json, **headers: str) -> Json:
    """A plain answer."""
    async with api.post(
        CHAT, body, headers={name.replace("_", "-"): value for name, value in headers.items()}
    ) as response:
        return await read_json(response)


def message_and_finish(answer: Json) -> tuple[Json, str]:
    choice = answer["choices"][0]
    return choice["message"], choice["finish_reason"]


def tool_call(call_id: str, name: str, arguments: Json) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed(calls: list[Json]) -> list[Json]:
    return [tool_call(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def going_on(question: Json, answer: Json, **results: str) -> Json:
    """The question, the assistant's calls, and their results: what a client sends next."""
    rows = [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in results.items()]
    return {**question, "messages": [*question["messages"], message_and_finish(answer)[0], *rows]}


# ---- the client's tools


async def test_client_tool_call_ends_answer_and_result_continues(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[HALL]), Reply(text="It is on.")]
    question = user("light", tools=[LAMP])
    answer = await ask(api, question)
    message, finish = message_and_finish(answer)
    assert (message["content"], finish) == (None, "tool_calls")
    assert parsed(message["tool_calls"]) == [tool_call("call_lamp", "lamp", {"room": "hall"})]
    message, finish = message_and_finish(await ask(api, going_on(question, answer, call_lamp="done")))
    assert (message["content"], finish) == ("It is on.", "stop")
    assert sent_messages(api.model.requests[1]) == [("user", "light"), ("assistant", ""), ("tool", "done")]


async def test_text_beside_client_tool_call(api: Api) -> None:
    api.model.script = [Reply(text="One moment.", tool_calls=[HALL])]
    message, finish = message_and_finish(await ask(api, user("light", tools=[LAMP])))
    assert (message["content"], finish) == ("One moment.", "tool_calls")


@KEPT_OR_NOT
async def test_server_tool_calls_run_before_client_calls(api: Api, store: bool) -> None:
    api.model.script = [Reply(tool_calls=[TODO, HALL]), Reply(text="Both done.")]
    question = user("tea and light", tools=[LAMP], store=store)
    answer = await ask(api, question)
    assert [call["id"] for call in message_and_finish(answer)[0]["tool_calls"]] == ["call_lamp"]
    again = await ask(api, going_on(question, answer, call_lamp="done"))
    assert message_and_finish(again)[0]["content"] == "Both done."
    messages = api.model.requests[1].body["messages"]
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["call_todo", "call_lamp"]
    results = {message["tool_call_id"]: message["content"] for message in messages if message["role"] == "tool"}
    assert results["call_lamp"] == "done"
    assert json.loads(results["call_todo"])["todos"][0]["content"] == "tea"


@KEPT_OR_NOT
async def test_server_tool_calls_are_not_shown(api: Api, store: bool) -> None:
    api.model.script = [Reply(tool_calls=[TODO]), Reply(tool_calls=[HALL]), Reply(text="Done.")]
    question = user("tea, then light", tools=[LAMP], store=store)
    answer = await ask(api, question)
    assert [call["id"] for call in message_and_finish(answer)[0]["tool_calls"]] == ["call_lamp"]
    await ask(api, going_on(question, answer, call_lamp="done"))
    roles = [message["role"] for message in api.model.requests[2].body["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]


async def test_client_tool_calls_are_streamed_by_index(api: Api) -> None:
    second = Call("horn", "{}", id="call_horn")
    hall = Call("lamp", ['{"room"', ': "ha', 'll"}'], id="call_lamp")
    api.model.script = [Reply(tool_calls=[hall, TODO, second])]
    async with api.post(CHAT, user("x", tools=[LAMP, HORN], stream=True), headers=PLAIN) as response:
        frames = await stream_of(response)
    deltas = [c["delta"] for f in frames[:-1] if f.event is None for c in f.data["choices"]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    first_pieces = [piece for piece in pieces if "id" in piece]
    assert first_pieces == [
        {"index": n, **tool_call(i, name, "")} for n, i, name in [(0, "call_lamp", "lamp"), (1, "call_horn", "horn")]
    ]
    whole = {n: "".join(p["function"].get("arguments", "") for p in pieces if p["index"] == n) for n in (0, 1)}
    assert {n: json.loads(text) for n, text in whole.items()} == {0: {"room": "hall"}, 1: {}}
    assert [set(p["function"]) for p in pieces if "id" not in p] == [{"arguments"}] * (len(pieces) - 2)
    ends = [c["finish_reason"] for f in frames[:-1] if f.event is None for c in f.data["choices"] if c["finish_reason"]]
    assert ends == ["tool_calls"]
    assert frames[-1].data == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_leaked_tool_call_becomes_tool_call(api: Api, stream: bool) -> None:
    text = 'One moment. <tool_call>{"name": "Lamp", "arguments": {"room": "hall"}}</tool_call>'
    api.model.script = [Reply(text=[*text])]
    async with api.post(CHAT, user("light", tools=[LAMP], stream=stream), headers=PLAIN) as response:
        answer = chat_message(await stream_of(response)) if stream else message_and_finish(await read_json(response))
    message, finish = answer
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("lamp", {"room": "hall"})
    assert (message["content"], finish) == ("One moment. ", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
async def test_json_answer_may_mention_tool_calls(api: Api, stream: bool) -> None:
    text = '{"a": "<tool_call>x</tool_call>"}'
    api.model.script = [Reply(text=[*text])]
    body = user("light", response_format={"type": "json_object"}, tools=[LAMP], stream=stream)
    async with api.post(CHAT, body, headers=PLAIN) as response:
        message, finish = (
            chat_message(await stream_of(response)) if stream else message_and_finish(await read_json(response))
        )
    assert (message["content"], finish, len(api.model.requests)) == (text, "stop", 1)


def chat_message(frames: list[Frame]) -> tuple[Json, str]:
    """The message that a stream makes up, and how it ended."""
    choices = [choice for frame in frames[:-1] for choice in frame.data["choices"]]
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", [])]
    calls: dict[int, Json] = {}
    for piece in pieces:
        function = calls.setdefault(piece["index"], {"function": {"name": "", "arguments": ""}})["function"]
        function["name"] += piece["function"].get("name", "")
        function["arguments"] += piece["function"].get("arguments", "")
    return {"content": chat_text(frames), "tool_calls": [*calls.values()]}, choices[-1]["finish_reason"]


async def test_client_tool_hides_server_tool_of_same_name(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[TODO])]
    answer = await ask(api, user("x", tools=[function("todo")]))
    assert [call["id"] for call in message_and_finish(answer)[0]["tool_calls"]] == ["call_todo"]
    assert tool_names(api.model.requests[0]).count("todo") == 1


async def test_tool_call_known_from_body_only(api: Api) -> None:
    api.model.script = [Reply(text="It is on.")]
    call = {"id": "c9", "type": "function", "function": {"name": "lamp", "arguments": '{"room": "hall"}'}}
    rows = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c9", "content": "ok"},
    ]
    answer = await ask(api, {"messages": [*user("light")["messages"], *rows], "tools": [LAMP]})
    assert message_and_finish(answer)[0]["content"] == "It is on."
    assert sent_messages(api.model.requests[0])[-1] == ("tool", "ok")


async def test_every_pending_tool_call_must_be_answered(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[HALL, Call("horn", id="call_horn")])]
    question = user("x", tools=[LAMP, HORN])
    answer = await ask(api, question)
    async with api.post(CHAT, going_on(question, answer, call_lamp="done")) as response:
        error = await read_error(response, 400, "tool_output_missing")
        assert "call_horn" in error["message"]
    stray = going_on(question, answer, call_lamp="done", call_horn="done", call_nobody="done")
    async with api.post(CHAT, stray) as response:
        error = await read_error(response, 400, "tool_call_not_found")
        assert "No tool call found" in error["message"]
        assert "call_nobody" in error["message"]
    api.model.script = [Reply(text="Done.")]
    again = await ask(api, going_on(question, answer, call_lamp="done", call_horn="done"))
    assert message_and_finish(again)[0]["content"] == "Done."


async def test_suspended_turn_releases_session(start: Start) -> None:
    api = await start(Reply(tool_calls=[HALL]), session_wait_seconds=0)
    async with api.post(CHAT, user("x", tools=[LAMP]), headers={"X-Hermes-Session-Id": "hall"}) as response:
        await read_json(response)
        run_id = response.headers["X-Hermes-Run-Id"]
    async with api.get(f"/v1/runs/{run_id}") as response:
        run = await read_json(response)
    assert (run["status"], run["completed"]) == ("completed", True)
    async with api.get("/api/sessions/hall") as response:
        assert (await read_json(response))["session"]["active_run_id"] is None


@pytest.mark.parametrize("broken", ['{"room": "hall",}', '{"room": "ha\nll"}', '{"room": "hall"'])
async def test_broken_arguments_are_never_forwarded(api: Api, broken: str) -> None:
    api.model.handler = lambda request: Reply(tool_calls=[Call("lamp", broken, id=f"call_{request.number}")])
    answer = await ask(api, user("x", tools=[LAMP]))
    for call in message_and_finish(answer)[0]["tool_calls"]:
        assert "hall" in json.loads(call["function"]["arguments"])["room"].replace("\n", "")


# ---- which tools the model may use


async def test_tool_choice_none_offers_no_tools(api: Api) -> None:
    api.model.script = [Reply(text="No tools.")]
    await ask(api, user("x", tools=[LAMP], tool_choice="none"))
    assert tool_names(api.model.requests[0]) == []


async def test_client_and_server_tools_are_offered_by_default(api: Api) -> None:
    api.model.script = [Reply(text="Hm.")]
    await ask(api, user("x", tools=[LAMP], tool_choice="auto"))
    assert {"lamp", "todo"} <= set(tool_names(api.model.requests[0]))


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "lamp"}}], ids=["any", "named"]
)
async def test_tool_choice_required_limits_first_step_to_client_tools(api: Api, choice: Any) -> None:
    api.model.script = [Reply(tool_calls=[HALL]), Reply(text="Done.")]
    question = user("x", tools=[LAMP, HORN])
    answer = await ask(api, {**question, "tool_choice": choice})
    first = api.model.requests[0]
    assert set(tool_names(first)) <= {"lamp", "horn"}
    assert "lamp" in tool_names(first)
    assert first.body["tool_choice"] == choice
    await ask(api, going_on(question, answer, call_lamp="done"))


async def test_disallowed_tools_are_rejected_to_model(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[Call("horn", id="call_horn")]), Reply(text="I may not.")]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "lamp"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = await ask(api, user("x", tools=[LAMP, HORN], tool_choice=choice))
    assert message_and_finish(answer) == (
        {"role": "assistant", "content": "I may not.", "refusal": None, "annotations": []},
        "stop",
    )
    (result,) = sent_messages(api.model.requests[1], "tool")
    assert "error" in result[1]


# ---- progress of the server's tools


async def progress(api: Api, fields: Json | None = None, **headers: str) -> list[Frame]:
    api.model.script = [Reply(text="Let me see.", tool_calls=[TODO]), Reply(text="Done.")]
    named = {**PLAIN, **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with api.post(CHAT, user(f"tea {headers}", stream=True, **(fields or {})), headers=named) as response:
        frames = await stream_of(response)
    assert chat_text(frames) == "Let me see.\n\nDone."
    return frames


def check_progress(items: list[Json]) -> None:
    started, ended = items
    assert {"tool", "emoji", "label", "toolCallId", "status"} <= set(started)
    assert (started["tool"], started["toolCallId"], started["status"]) == ("todo", "call_todo", "running")
    assert (ended["tool"], ended["toolCallId"], ended["status"]) == ("todo", "call_todo", "completed")
    assert ended["error"] is False
    assert ended["duration"] >= 0
    assert "label" in ended


async def test_tool_progress_events(api: Api) -> None:
    entries = await progress(api)
    events = [frame for frame in entries if frame.event is not None]
    assert {frame.event for frame in events} == {"hermes.tool.progress"}
    check_progress([frame.data for frame in events])


async def test_tool_progress_chunks(api: Api) -> None:
    entries = await progress(api, X_Hermes_Tool_Progress="chunk")
    assert {frame.event for frame in entries} == {None}
    marked = [frame.data for frame in entries[:-1] if "hermes" in frame.data]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in marked)
    assert [chunk["choices"][0]["delta"] for chunk in marked] == [{}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in marked] == [None, None]
    check_progress([chunk["hermes"]["tool_progress"] for chunk in marked])


# What libraries send that leave the header to their runtime: go-openai, xsai, openai-fetch.
RUNTIMES = ["Go-http-client/1.1", "Go-http-client/2.0", "node", "node-fetch/1.0", "undici", "Bun/1.2.3", "Deno/2.1.4"]
STRICT = [
    {"X_Stainless_Lang": "python"},
    {"User_Agent": "OpenAI/Python 1.2"},
    {"User_Agent": "AsyncOpenAI/Python 1.2"},
    {"User_Agent": "node ai-sdk/openai/2.0"},
    {"User_Agent": "langchain-x"},
    {"User_Agent": "openai-fetch"},
    *({"User_Agent": agent} for agent in RUNTIMES),
    {"X_OpenWebUI_User_Id": "ann"},
]
LENIENT = ["curl/8.0", "Mozilla/5.0 (X11) nodes", "python-requests/2", "Abundant/1.0", "my-go-http-client/1"]


@pytest.mark.parametrize("client", STRICT)
async def test_strict_clients_get_no_tool_progress_by_default(api: Api, client: dict[str, str]) -> None:
    entries = await progress(api, **client)
    assert all(frame.event is None for frame in entries)
    assert not any("hermes" in frame.data for frame in entries[:-1])
    requested = await progress(api, X_Hermes_Tool_Progress="event", **client)
    assert sum(frame.event == "hermes.tool.progress" for frame in requested) == 2


@pytest.mark.parametrize("agent", LENIENT)
async def test_other_clients_get_tool_progress(api: Api, agent: str) -> None:
    assert sum(frame.event is not None for frame in await progress(api, User_Agent=agent)) == 2


@pytest.mark.parametrize(("setting", "header", "events"), [("off", None, 0), ("off", "event", 2), ("event", "off", 0)])
async def test_tool_progress_header_overrides_setting(
    start: Start, setting: str, header: str | None, events: int
) -> None:
    api = await start(tool_progress=setting)
    entries = await progress(api, **({"X_Hermes_Tool_Progress": header} if header else {}))
    assert sum(frame.event is not None for frame in entries) == events


async def test_strict_clients_setting(start: Start) -> None:
    api = await start(strict_clients=["^curl/"])
    assert all(frame.event is None for frame in await progress(api))


async def test_failing_tool_progress_has_error(api: Api) -> None:
    bad = Call("todo", {"todos": [{"id": "1", "content": "a", "status": "pending"}] * 2}, id="call_bad")
    api.model.script = [Reply(tool_calls=[bad]), Reply(text="Sorry.")]
    async with api.post(CHAT, user("x", stream=True), headers=PLAIN) as response:
        frames = await stream_of(response)
    ended = [frame.data for frame in frames if frame.event and frame.data["status"] == "completed"]
    assert [entry["error"] for entry in ended] == [True]


# ---- structured output

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
STRICTLY = {"type": "json_schema", "json_schema": {"name": "number", "strict": True, "schema": SCHEMA}}
LOOSELY = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}
OBJECT = {"type": "json_object"}


@pytest.mark.parametrize(
    ("form", "texts", "content"),
    [
        (STRICTLY, ['{"n": 5}'], '{"n": 5}'),
        (STRICTLY, ['{"n": "five"}', '{"n": 5}'], '{"n": 5}'),
        (STRICTLY, ["five", '{"n": 5}'], '{"n": 5}'),
        (LOOSELY, ['{"n": "five"}'], '{"n": "five"}'),
        (OBJECT, ["five", '{"a": 1}'], '{"a": 1}'),
        ({"type": "text"}, ["five"], "five"),
    ],
)
async def test_response_format_is_checked_and_repaired_once(
    api: Api, form: Json, texts: list[str], content: str
) -> None:
    api.model.script = [Reply(text=text, continues=False) for text in texts]
    answer = await ask(api, user("a number", response_format=form))
    assert message_and_finish(answer) == (
        {"role": "assistant", "content": content, "refusal": None, "annotations": []},
        "stop",
    )
    assert len(api.model.requests) == len(texts)


@pytest.mark.parametrize("form", [STRICTLY, OBJECT])
async def test_unmet_response_format_fails_turn(api: Api, form: Json) -> None:
    api.model.script = [Reply(text="five", continues=False), Reply(text="still five", continues=False)]
    async with api.post(CHAT, user("a number", response_format=form)) as response:
        answer = await read_json(response)
        assert response.headers["X-Hermes-Completed"] == "false"
    # The model did write something, so this is a failure with text.
    assert message_and_finish(answer)[1] == "error"
    assert answer["hermes"]["failed"] is True
    assert answer["hermes"]["error_code"] == "structured_output_failed"
    assert len(api.model.requests) == 2
