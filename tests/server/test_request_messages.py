"""What a chat request says is what the model gets: nothing of another conversation, nothing that its client took out."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from support.model_server import Call, Reply, Request

from .clients import Json, function, read_error, read_json, responses_tool, user
from .conftest import Api, Start

CHAT = "/v1/chat/completions"
LAMP = function("lamp", room={"type": "string"})
TODO = Call("todo", {"todos": [{"id": "1", "content": "tea", "status": "pending"}]}, id="call_todo")
HALL = Call("lamp", {"room": "hall"}, id="call_lamp")


def image(name: str) -> Json:
    data = base64.b64encode(f"not really a picture: {name}".encode()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def file(name: str, data: str, kind: str = "text/plain") -> Json:
    url = f"data:{kind};base64,{base64.b64encode(data.encode()).decode()}"
    return {"type": "file", "file": {"filename": name, "file_data": url}}


def text(message: str) -> Json:
    return {"type": "text", "text": message}


def chat_message(role: str, content: Any, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


def call(call_id: str, room: str = "hall", name: str = "lamp") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps({"room": room})}}


def calls(*tool_calls: Json, content: str | None = None) -> Json:
    return chat_message("assistant", content, tool_calls=list(tool_calls))


def output(call_id: str, content: Any) -> Json:
    return chat_message("tool", content, tool_call_id=call_id)


def model_messages(request: Request) -> list[Json]:
    """The messages that the model was given after the system prompt."""
    first, *rest = request.body["messages"]
    assert first["role"] == "system"
    return rest


async def ask(api: Api, *messages: Json, **fields: Any) -> tuple[Json, str]:
    """The message that answers, and the session it was recorded in."""
    headers = fields.pop("headers", {})
    async with api.post(CHAT, {"messages": list(messages), **fields}, headers=headers) as response:
        answer = await read_json(response)
        return answer["choices"][0]["message"], response.headers["X-Hermes-Session-Id"]


async def transcript(api: Api, session_id: str) -> list[tuple[str, Any]]:
    async with api.get(f"/api/sessions/{session_id}/messages") as response:
        return [(row["role"], row["content"]) for row in (await read_json(response))["data"]]


def always(api: Api, message: str = "ok") -> None:
    api.model.handler = lambda _: Reply(text=message, continues=False)


# ---- nothing comes from elsewhere


@pytest.mark.parametrize(
    ("first", "second", "removed"),
    [
        (image("cat"), image("dog"), image("cat")["image_url"]["url"]),
        (file("a.txt", "milk"), file("a.txt", "bread"), "milk"),
        (file("a.txt", "milk"), file("b.txt", "milk"), "a.txt"),
    ],
)
async def test_different_image_or_file_is_other_conversation(api: Api, first: Json, second: Json, removed: str) -> None:
    always(api)
    _, mine = await ask(api, chat_message("user", [text("What is this?"), first]))
    other = chat_message("user", [text("What is this?"), second])
    _, theirs = await ask(api, other, chat_message("assistant", "ok"), chat_message("user", "sure?"))
    assert theirs != mine
    messages = model_messages(api.model.requests[-1])
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert removed not in json.dumps(messages)


async def test_repeated_image_binds_session_and_is_sent_once(api: Api) -> None:
    always(api)
    question = chat_message("user", [text("What is this?"), image("cat")])
    _, first = await ask(api, question)
    _, second = await ask(api, question, chat_message("assistant", "ok"), chat_message("user", "sure?"))
    assert second == first
    assert model_messages(api.model.requests[-1]) == [
        question,
        chat_message("assistant", "ok"),
        chat_message("user", "sure?"),
    ]


async def test_redacted_tool_output_is_not_restored(api: Api) -> None:
    always(api)
    question, call_message = chat_message("user", "who?"), calls(call("c1"))
    _, first = await ask(api, question, call_message, output("c1", "Ada, 555-1234"), tools=[LAMP])
    rest = [chat_message("assistant", "ok"), chat_message("user", "and?")]
    _, second = await ask(api, question, call_message, output("c1", "[redacted]"), *rest, tools=[LAMP])
    assert second != first
    assert model_messages(api.model.requests[-1]) == [question, call_message, output("c1", "[redacted]"), *rest]


@pytest.mark.parametrize(
    "changed",
    [
        [chat_message("user", "hi"), chat_message("assistant", "ok")],
        [
            chat_message("user", "hi"),
            calls(call("c1"), content="one"),
            output("c1", "done"),
            chat_message("assistant", "ok"),
        ],
        [chat_message("user", "hi"), calls(call("c2")), output("c2", "done"), chat_message("assistant", "ok")],
        [
            chat_message("user", "hi"),
            calls(call("c1", "kitchen")),
            output("c1", "done"),
            chat_message("assistant", "ok"),
        ],
        [
            chat_message("user", "hi"),
            calls(call("c1", name="horn")),
            output("c1", "done"),
            chat_message("assistant", "ok"),
        ],
        [
            chat_message("user", "hi", name="bob"),
            calls(call("c1")),
            output("c1", "done"),
            chat_message("assistant", "ok"),
        ],
    ],
)
async def test_edited_history_is_used_as_sent(api: Api, changed: list[Json]) -> None:
    always(api)
    before = [chat_message("user", "hi"), calls(call("c1")), output("c1", "done")]
    _, first = await ask(api, *before, tools=[LAMP])
    _, same = await ask(api, *before, chat_message("assistant", "ok"), chat_message("user", "more"), tools=[LAMP])
    assert same == first
    _, other = await ask(api, *changed, chat_message("user", "more"), tools=[LAMP])
    assert other != first
    assert model_messages(api.model.requests[-1]) == [*changed, chat_message("user", "more")]


# ---- what the server did in between


async def test_server_calls_are_restored_for_unique_conversation(api: Api) -> None:
    api.model.script = [Reply(text="Let me see.", tool_calls=[TODO]), Reply(text="Tea."), Reply(text="Yes.")]
    answer, first = await ask(api, chat_message("user", "what?"))
    assert answer["content"] == "Tea."
    _, second = await ask(
        api, chat_message("user", "what?"), chat_message("assistant", "Tea."), chat_message("user", "sure?")
    )
    assert second == first
    messages = model_messages(api.model.requests[-1])
    assert [(m["role"], m["content"]) for m in messages if m["role"] != "tool"] == [
        ("user", "what?"),
        ("assistant", "Let me see."),
        ("assistant", "Tea."),
        ("user", "sure?"),
    ]
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ["call_todo"]


async def test_server_calls_are_not_restored_for_ambiguous_conversation(api: Api) -> None:
    api.model.script = [
        *[Reply(tool_calls=[TODO]), Reply(text="Tea."), Reply(tool_calls=[TODO]), Reply(text="Tea.")],
        Reply(text="Yes."),
    ]
    ids = [(await ask(api, chat_message("user", "what?")))[1] for _ in range(2)]
    messages = [chat_message("user", "what?"), chat_message("assistant", "Tea."), chat_message("user", "sure?")]
    _, third = await ask(api, *messages)
    assert third in ids
    assert model_messages(api.model.requests[-1]) == messages


@pytest.mark.parametrize("keys", [("anna", "ben"), (None, None)])
async def test_server_calls_of_unstored_turns_are_private(api: Api, keys: tuple[str | None, str | None]) -> None:
    api.model.script = [Reply(tool_calls=[TODO, HALL]), Reply(tool_calls=[HALL]), *[Reply(text="On.")] * 2]
    if keys[0] is None:  # both have a call of the server's, and nothing tells whose turn is meant
        api.model.script[1] = Reply(tool_calls=[TODO, HALL])
    headers = [{"X-Hermes-Session-Key": key} if key else {} for key in keys]
    for own in headers:
        answer, _ = await ask(api, chat_message("user", "light"), tools=[LAMP], store=False, headers=own)
    messages = [chat_message("user", "light"), answer, output("call_lamp", "on")]
    await ask(api, *messages, tools=[LAMP], store=False, headers=headers[1])
    assert "call_todo" not in str(model_messages(api.model.requests[-1]))
    if keys[0]:
        await ask(api, *messages, tools=[LAMP], store=False, headers=headers[0])
        assert "call_todo" in str(model_messages(api.model.requests[-1]))


async def test_resent_outputs_find_server_calls(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[TODO, HALL]), *[Reply(status=400)] * 2, Reply(text="Both done.")]
    question = chat_message("user", "tea and light")
    answer, _ = await ask(api, question, tools=[LAMP])
    body = {"messages": [question, answer, output("call_lamp", "on")], "tools": [LAMP]}
    for _ in range(2):
        async with api.post(CHAT, body) as response:
            assert response.status == 502
    answer, _ = await ask(api, *body["messages"], tools=[LAMP])
    assert answer["content"] == "Both done."
    for request in api.model.requests[1:]:
        assert [m["role"] for m in model_messages(request)] == ["user", "assistant", "tool", "tool"]
        assert [m["tool_call_id"] for m in model_messages(request)[2:]] == ["call_todo", "call_lamp"]


@pytest.mark.parametrize(
    "written",
    [
        Call("lamp", '{"room": "hall",}', id="call_lamp"),
        Call("lamp", '{"room": "hall"', id="call_lamp"),
        Call("lamp", json.dumps('{"room": "hall"}'), id="call_lamp"),
        Call("lamp", '{"room":\t"hall\nway"}', id="call_lamp"),
        Call("Lamp", '{"room": "hall"}', id="call_lamp"),
    ],
)
async def test_repaired_call_is_matched_by_shown_form(api: Api, written: Call) -> None:
    api.model.script = [Reply(tool_calls=[TODO, written]), Reply(text="Both done.")]
    question = chat_message("user", "tea and light")
    answer, first = await ask(api, question, tools=[LAMP])
    [call] = answer["tool_calls"]
    assert call["function"]["name"] == "lamp"
    assert "hall" in json.loads(call["function"]["arguments"])["room"]
    _, second = await ask(api, question, answer, output("call_lamp", "on"), tools=[LAMP])
    assert second == first
    _, message, *results = model_messages(api.model.requests[-1])
    assert [m["tool_call_id"] for m in results] == ["call_todo", "call_lamp"]
    assert message["tool_calls"][1] == call


async def test_non_json_number_in_arguments_is_rejected(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[Call("lamp", '{"room": NaN}', id="call_lamp")]), Reply(text="Sorry.")]
    answer, _ = await ask(api, chat_message("user", "light"), tools=[LAMP])
    assert answer["content"] == "Sorry."
    assert "not valid JSON" in model_messages(api.model.requests[-1])[-1]["content"]


async def test_other_session_key_never_binds_conversation(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[TODO]), Reply(text="Tea."), Reply(text="Yes.")]
    _, first = await ask(api, chat_message("user", "what?"), headers={"X-Hermes-Session-Key": "ada"})
    messages = [chat_message("user", "what?"), chat_message("assistant", "Tea."), chat_message("user", "sure?")]
    _, second = await ask(api, *messages, headers={"X-Hermes-Session-Key": "bob"})
    assert second != first
    assert model_messages(api.model.requests[-1]) == messages


# ---- orders of messages that are ordinary


@pytest.mark.parametrize(
    ("messages", "history"),
    [
        ([calls(call("c1")), output("c1", "on"), chat_message("user", "and?")], None),
        ([calls(call("c1")), output("c1", "on"), chat_message("user", "and?"), chat_message("user", "well?")], None),
        (
            [calls(call("c1")), chat_message("user", "and?"), output("c1", "on")],
            [calls(call("c1")), output("c1", "on"), chat_message("user", "and?")],
        ),
        ([chat_message("user", "and?")], None),
        ([chat_message("assistant", "a"), chat_message("assistant", "b"), chat_message("user", "and?")], None),
        (
            [
                calls(call("c1")),
                output("c1", "on"),
                calls(call("c1")),
                output("c1", "off"),
                chat_message("user", "and?"),
            ],
            None,
        ),
    ],
)
@pytest.mark.parametrize("store", [True, False])
async def test_usual_message_orders_are_accepted(
    api: Api, messages: list[Json], history: list[Json] | None, store: bool
) -> None:
    always(api)
    await ask(api, chat_message("user", "light"), *messages, tools=[LAMP], store=store)
    assert model_messages(api.model.requests[-1]) == [chat_message("user", "light"), *(history or messages)]


async def test_tool_result_and_user_message_together(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[TODO, HALL]), Reply(text="Done.")]
    question = chat_message("user", "light")
    answer, first = await ask(api, question, tools=[LAMP])
    more = [output("call_lamp", "on"), chat_message("user", "and be quick")]
    _, second = await ask(api, question, answer, *more, tools=[LAMP])
    assert second == first
    assert [m["role"] for m in model_messages(api.model.requests[-1])] == ["user", "assistant", "tool", "tool", "user"]


async def test_dropped_client_call_is_not_required(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[HALL]), Reply(text="Fine.")]
    _, first = await ask(api, chat_message("user", "light"), tools=[LAMP])
    _, second = await ask(api, chat_message("user", "light"), chat_message("user", "never mind"), tools=[LAMP])
    assert second != first
    assert model_messages(api.model.requests[-1]) == [chat_message("user", "light"), chat_message("user", "never mind")]


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        ([calls(call("c1")), chat_message("user", "so?")], "tool_output_missing"),
        ([calls(call("c1"), call("c2")), output("c1", "on"), chat_message("user", "so?")], "tool_output_missing"),
        ([output("c1", "on")], "tool_call_not_found"),
        ([chat_message("assistant", "a"), output("c1", "on")], "tool_call_not_found"),
    ],
)
@pytest.mark.parametrize("store", [True, False])
async def test_unmatched_calls_and_outputs_are_named(api: Api, rest: list[Json], code: str, store: bool) -> None:
    body = {"messages": [chat_message("user", "light"), *rest], "tools": [LAMP], "store": store}
    async with api.post(CHAT, body) as response:
        await read_error(response, 400, code, "tool_call_id")


async def test_named_session_accepts_known_history(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[HALL]), Reply(status=400), Reply(text="Fine.")]
    named = {"headers": {"X-Hermes-Session-Id": "hall"}, "tools": [LAMP]}
    question = chat_message("user", "light")
    answer, _ = await ask(api, question, **named)
    body = {"messages": [question, answer, output("call_lamp", "on")], "tools": [LAMP]}
    async with api.post(CHAT, body, headers=named["headers"]) as response:
        assert response.status == 502
    answer, _ = await ask(api, *body["messages"], chat_message("user", "and?"), **named)
    assert answer["content"] == "Fine."
    assert [m["role"] for m in model_messages(api.model.requests[-1])][:3] == ["user", "assistant", "tool"]
    assert model_messages(api.model.requests[-1])[-1] == chat_message("user", "and?")


# ---- every part of a message


async def test_files_of_earlier_messages_stay_in_place(api: Api) -> None:
    always(api)
    question = chat_message("user", [text("read"), file("a.txt", "milk"), file("b.bin", "\0x", "application/x-thing")])
    _, session_id = await ask(api, question, chat_message("assistant", "ok"), chat_message("user", "more"))
    message, *rest = model_messages(api.model.requests[-1])
    assert rest == [chat_message("assistant", "ok"), chat_message("user", "more")]
    texts = [part["text"] for part in message["content"]]
    assert texts[:2] == ["read", "File a.txt:\nmilk"]
    assert f"{session_id}/b.bin" in texts[2]


@pytest.mark.parametrize("name", ["n" * 300 + ".bin", "ä" * 200 + ".bin", "n." + "b" * 300])
async def test_long_file_name_is_shortened(api: Api, name: str) -> None:
    always(api)
    await ask(api, chat_message("user", [text("read"), file(name, "\0x", "application/x-thing")]))
    path = model_messages(api.model.requests[-1])[0]["content"][1]["text"].partition(" it is at ")[2].removesuffix(".")
    assert Path(path).read_bytes() == b"\0x"
    assert Path(path).suffix[:4] == name[name.rindex(".") :][:4]


async def test_resent_file_binds_session(api: Api) -> None:
    always(api)
    question = chat_message("user", [text("read"), file("a.txt", "milk"), file("b.bin", "\0x", "application/x-thing")])
    _, first = await ask(api, question)
    _, second = await ask(api, question, chat_message("assistant", "ok"), chat_message("user", "more"))
    assert second == first
    assert model_messages(api.model.requests[1])[0] == model_messages(api.model.requests[0])[0]
    assert [role for role, _ in await transcript(api, first)] == ["user", "assistant", "user", "assistant"]
    async with api.get(f"/api/sessions/{first}/files") as response:
        assert [item["name"] for item in (await read_json(response))["data"]] == ["b.bin"]


async def test_images_and_files_in_tool_outputs_reach_model(api: Api) -> None:
    always(api)
    content = [text("seen"), image("cat"), file("a.txt", "milk")]
    history = [chat_message("user", "look"), calls(call("c1"))]
    for rest in ([], [chat_message("assistant", "ok"), chat_message("user", "more")]):
        await ask(api, *history, output("c1", content), *rest, tools=[LAMP])
        question, _, result, pictures, *_ = model_messages(api.model.requests[-1])
        assert question == history[0]
        assert result == output("c1", "seen\nFile a.txt:\nmilk")
        assert pictures["role"] == "user"
        assert image("cat") in pictures["content"]


async def test_images_and_files_in_response_outputs_reach_model(api: Api) -> None:
    always(api)
    items: list[Json] = [
        {"role": "user", "content": [{"type": "input_text", "text": "look"}, input_file("z.txt", "bread")]},
        {"type": "function_call", "call_id": "c1", "name": "lamp", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [
                {"type": "input_text", "text": "seen"},
                {"type": "input_image", "image_url": image("cat")["image_url"]["url"]},
                input_file("a.txt", "milk"),
            ],
        },
    ]
    later = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
    for rest in ([], later):
        for store in (True, False):
            body = {"input": [*items, *rest], "tools": [responses_tool(LAMP)], "store": store}
            async with api.post("/v1/responses", body) as response:
                await read_json(response)
            question, _, result, pictures, *_ = model_messages(api.model.requests[-1])
            assert "bread" in json.dumps(question)
            assert result == output("c1", "seen\nFile a.txt:\nmilk")
            assert image("cat") in pictures["content"]


def input_file(name: str, data: str) -> Json:
    return {"type": "input_file", "filename": name, "file_data": file(name, data)["file"]["file_data"]}


async def test_message_names_and_reasoning_are_kept(api: Api) -> None:
    always(api)
    messages = [
        chat_message("user", "hi", name="ada"),
        chat_message("assistant", "hm", name="hal", reasoning_content="Let me think."),
        chat_message("user", "well?", name="bob"),
    ]
    _, session_id = await ask(api, *messages)
    assert model_messages(api.model.requests[-1]) == messages
    await ask(api, chat_message("user", "go on"), headers={"X-Hermes-Session-Id": session_id})
    assert model_messages(api.model.requests[-1]) == [
        *messages,
        chat_message("assistant", "ok"),
        chat_message("user", "go on"),
    ]


async def test_rejected_reasoning_is_dropped_and_named(api: Api) -> None:
    def answer(request: Request) -> Reply:
        if "reasoning_content" in json.dumps(request.body["messages"]):
            text = "Additional properties are not allowed ('reasoning_content' was unexpected) - 'messages.2'"
            return Reply(status=400, error={"message": text, "param": None, "code": None})
        return Reply(text="ok", continues=False)

    api.model.handler = answer
    body = {
        "messages": [
            chat_message("user", "hi"),
            chat_message("assistant", "hm", reasoning_content="so"),
            chat_message("user", "well?"),
        ]
    }
    async with api.post(CHAT, body) as response:
        await read_json(response)
        assert "reasoning_content" in response.headers["X-Hermes-Ignored"]


@pytest.mark.parametrize(
    ("model", "sent"), [("gpt-4o", [None, None]), ("deepseek-v4", ["so", " "]), ("kimi-k2", ["so", " "])]
)
async def test_reasoning_is_sent_to_providers_that_want_it(start: Start, model: str, sent: list[str | None]) -> None:
    api = await start(model_routes={model: {"model": model}})
    always(api)
    history = [
        chat_message("user", "a"),
        chat_message("assistant", "b", reasoning_content="so"),
        chat_message("user", "c"),
        chat_message("assistant", "d"),
    ]
    body = {"messages": [*history, chat_message("user", "e")], "model": model}
    async with api.post(CHAT, body) as response:
        await read_json(response)
        ignored = response.headers.get("X-Hermes-Ignored", "")
    assert [
        m.get("reasoning_content") for m in model_messages(api.model.requests[-1]) if m["role"] == "assistant"
    ] == sent
    assert ("messages.reasoning_content" in ignored) == (sent == [None, None])


WANTS_REASONING = ["deepseek-chat", "deepseek-reasoner", "kimi-k2-thinking", "moonshotai/Kimi-K2.5", "moonshot-v1-32k"]


def reasoning_sent(request: Request) -> list[str | None]:
    return [m.get("reasoning_content") for m in model_messages(request) if m["role"] == "assistant"]


@pytest.mark.parametrize("model", WANTS_REASONING)
async def test_replayed_answers_have_reasoning_or_space(start: Start, model: str) -> None:
    """In a stored session, after server tools and after a client's, and where the model did not reason."""
    api = await start(model_routes={"m": {"model": model}})
    api.model.script = [
        Reply(text="One.", reasoning="Hm."),
        Reply(tool_calls=[TODO], reasoning="Note it."),
        Reply(tool_calls=[HALL]),
        Reply(text="Three.", reasoning="Lit."),
        Reply(text="Four."),
    ]
    _, session_id = await ask(api, chat_message("user", "one"), model="m", tools=[LAMP])
    there = {"headers": {"X-Hermes-Session-Id": session_id}, "model": "m", "tools": [LAMP]}
    await ask(api, chat_message("user", "two"), **there)
    await ask(api, output("call_lamp", "on"), **there)
    await ask(api, chat_message("user", "four"), **there)
    assert [reasoning_sent(request) for request in api.model.requests] == [
        [],
        ["Hm."],
        ["Hm.", "Note it."],
        ["Hm.", "Note it.", " "],
        ["Hm.", "Note it.", " ", "Lit."],
    ]


@pytest.mark.parametrize("model", WANTS_REASONING)
async def test_response_chain_replays_reasoning(start: Start, model: str) -> None:
    api = await start(model_routes={"m": {"model": model}})
    api.model.script = [Reply(text="One."), Reply(text="Two.", reasoning="Hm."), Reply(text="Three.")]
    before = None
    for question in ("one", "two", "three"):
        body = {"input": question, "model": "m", "previous_response_id": before}
        async with api.post("/v1/responses", body) as response:
            before = (await read_json(response))["id"]
    assert [reasoning_sent(request) for request in api.model.requests] == [[], [" "], [" ", "Hm."]]


@pytest.mark.parametrize("model", WANTS_REASONING)
async def test_client_history_with_tools_gets_reasoning_everywhere(start: Start, model: str) -> None:
    api = await start(model_routes={"m": {"model": model}})
    always(api)
    call_message = {**calls(call("c1")), "reasoning_content": "Light it."}
    history = [
        chat_message("user", "a"),
        call_message,
        output("c1", "on"),
        chat_message("assistant", "b"),
        chat_message("user", "c"),
    ]
    await ask(api, *history, model="m", tools=[LAMP])
    assert reasoning_sent(api.model.requests[-1]) == ["Light it.", " "]


async def test_session_starts_with_its_client_history(api: Api) -> None:
    always(api)
    picture = chat_message("user", [text("look"), image("cat")])
    _, session_id = await ask(api, picture, chat_message("assistant", "A cat."), chat_message("user", "sure?"))
    assert await transcript(api, session_id) == [
        ("user", picture["content"]),
        ("assistant", "A cat."),
        ("user", "sure?"),
        ("assistant", "ok"),
    ]


async def test_explicit_session_id_is_never_bound_again(api: Api) -> None:
    always(api)
    await ask(api, chat_message("user", "hi"), headers={"X-Hermes-Session-Id": "mine"})
    _, session_id = await ask(
        api, *user("hi")["messages"], chat_message("assistant", "ok"), chat_message("user", "more")
    )
    assert session_id != "mine"


# ---- long histories


async def test_long_history_is_compacted_once_and_rows_stay(start: Start) -> None:
    def answer(request: Request) -> Reply:
        summary = "Write notes that let the assistant go on" in json.dumps(request.body["messages"])
        return Reply(text="NOTES" if summary else "ok", continues=False)

    api = await start(handler=answer)
    history = [chat_message("user", "begin")]
    for n in range(40):
        history += [
            chat_message("assistant", f"answer {n} " + "x" * 3000),
            chat_message("user", f"question {n} " + "y" * 3000),
        ]
    _, first = await ask(api, *history)
    summaries = [r for r in api.model.requests if "Write notes" in json.dumps(r.body["messages"])]
    assert summaries
    count = len(summaries)
    assert len(await transcript(api, first)) == len(history) + 1
    _, second = await ask(api, *history, chat_message("assistant", "ok"), chat_message("user", "go on"))
    assert second == first
    summaries = [r for r in api.model.requests if "Write notes" in json.dumps(r.body["messages"])]
    assert len(summaries) == count
    assert "NOTES" in json.dumps(model_messages(api.model.requests[-1]))
    # Another beginning is another conversation, and gets notes of its own.
    await ask(api, chat_message("user", "other"), *history[1:])
    assert len([r for r in api.model.requests if "Write notes" in json.dumps(r.body["messages"])]) > count
