"""Chat completions: the answer, the stream, what reaches the model, and which session a turn belongs to."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from support.model_server import Call, Reply
from support.waiting import until

from .clients import (
    Frame,
    HeldModel,
    Json,
    Stream,
    chat_text,
    function,
    read_error,
    read_json,
    sent_messages,
    stream_of,
    system_of,
    user,
)
from .conftest import Api, Start

CHAT = "/v1/chat/completions"
COUNTED = {"input": 120, "output": 30, "cached": 100, "reasoning": 12}
SHOWN = {
    "prompt_tokens": 120,
    "completion_tokens": 30,
    "total_tokens": 150,
    "prompt_tokens_details": {"cached_tokens": 100, "cache_write_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 12},
}
BAD_ENDS = ["X-Hermes-Completed", "X-Hermes-Partial", "X-Hermes-Error"]
TODO = Call("todo", {"todos": [{"id": "1", "content": "tea", "status": "pending"}]})


async def ask(api: Api, body: Json, **headers: str) -> tuple[Json, Any]:
    """A plain answer and its headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with api.post(CHAT, body, headers=named) as response:
        return await read_json(response), response.headers


async def streamed(api: Api, body: Json, **headers: str) -> list[Frame]:
    """All frames of a streamed answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with api.post(CHAT, {**body, "stream": True}, headers=named) as response:
        return await stream_of(response)


def chunks(frames: list[Frame]) -> list[Json]:
    """The chunks of a stream that ends as streams do."""
    assert frames[-1].data == "[DONE]"
    assert [item.id for item in frames] == [None] * len(frames)
    return [item.data for item in frames[:-1] if item.event is None]


# ---- the plain answer


async def test_chat_completion_shape(api: Api) -> None:
    api.model.script = [Reply(text=["Two ", "files."], usage=COUNTED)]
    body, headers = await ask(api, user(model="my-model"))
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", body.pop("id"))
    assert body.pop("created") > 1_700_000_000
    message = {"role": "assistant", "content": "Two files.", "refusal": None, "annotations": []}
    assert body == {
        "object": "chat.completion",
        "model": "my-model",
        "service_tier": "default",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": SHOWN,
    }
    assert headers["X-Hermes-Model"].endswith("/test-model")
    assert headers["X-Hermes-History"] == "request; messages=0; ignored=0"
    assert headers["X-Hermes-Run-Id"].startswith("run_")
    assert [name for name in BAD_ENDS if name in headers] == []


async def test_default_model_name_is_advertised_one(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    assert (await ask(api, user()))[0]["model"] == "hermes-agent"


async def test_usage_sums_all_calls_of_turn(api: Api) -> None:
    usage = {"input": 100, "output": 10, "cached": 80, "reasoning": 4}
    api.model.script = [Reply(tool_calls=[TODO], usage=usage), Reply(text="Done.", usage=usage)]
    body, _ = await ask(api, user())
    assert body["usage"]["prompt_tokens"] == 200
    assert body["usage"]["total_tokens"] == 220
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 160
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8


async def test_content_is_final_answer_only(api: Api) -> None:
    api.model.script = [Reply(text="Let me see.", tool_calls=[TODO]), Reply(text="Done.")]
    body, _ = await ask(api, user())
    assert body["choices"][0]["message"]["content"] == "Done."
    assert "tool_calls" not in body["choices"][0]["message"]


async def test_reasoning_is_shown_on_request_only(start: Start) -> None:
    thinking = Reply(text="Four.", reasoning=["Two and ", "two."], continues=False)
    api = await start(*[thinking] * 5)
    assert "reasoning_content" not in (await ask(api, user("a")))[0]["choices"][0]["message"]
    for number, (fields, headers) in enumerate([({"include_reasoning": True}, {}), ({}, {"X_Hermes_Reasoning": "on"})]):
        body, _ = await ask(api, user(f"b{number}", **fields), **headers)
        message = body["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Four.", "Two and two.")


async def test_header_can_hide_reasoning(start: Start) -> None:
    api = await start(Reply(text="Four.", reasoning="Hm."), show_reasoning=True)
    body, _ = await ask(api, user(), X_Hermes_Reasoning="off")
    assert "reasoning_content" not in body["choices"][0]["message"]


# ---- the stream


async def test_chat_stream_chunk_order(api: Api) -> None:
    api.model.script = [Reply(text=["Two ", "files."], usage=COUNTED)]
    stream_chunks = chunks(await streamed(api, user(model="my-model")))
    assert {chunk["object"] for chunk in stream_chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream_chunks}) == 1
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", stream_chunks[0]["id"])
    assert stream_chunks[0]["model"] == "my-model"
    choices = [chunk["choices"][0] for chunk in stream_chunks]
    assert all(set(choice) == {"index", "delta", "logprobs", "finish_reason"} for choice in choices)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == "Two files."
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "stop")
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert not any("error" in chunk or "hermes" in chunk for chunk in stream_chunks)


async def test_chat_stream_is_incremental(start: Start) -> None:
    async with HeldModel(Reply(text=["Hello", " there", ", you."])) as model:
        api = await start(settings=model.settings)
        async with api.post(CHAT, user(stream=True)) as response:
            stream = Stream(response)
            # The role comes before the provider has said anything.
            assert (await stream.next()).data["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            deltas = []
            for _ in range(3):
                model.release()
                deltas.append((await stream.next()).data["choices"][0]["delta"])
            assert deltas == [{"content": "Hello"}, {"content": " there"}, {"content": ", you."}]
            rest = await stream.rest()
    assert rest[-1].data == "[DONE]"


async def test_chat_stream_separates_text_around_tools_by_blank_line(api: Api) -> None:
    api.model.script = [Reply(text="Let me see.", tool_calls=[TODO]), Reply(text="Done.")]
    assert chat_text(await streamed(api, user())) == "Let me see.\n\nDone."


@pytest.mark.parametrize(("wanted", "last", "finish"), [(True, SHOWN, None), (False, None, None), (None, None, SHOWN)])
async def test_chat_stream_include_usage(api: Api, wanted: bool | None, last: Any, finish: Any) -> None:
    api.model.script = [Reply(text="Two files.", usage=COUNTED)]
    options = {} if wanted is None else {"stream_options": {"include_usage": wanted}}
    stream_chunks = chunks(await streamed(api, user(**options)))
    ending = next(chunk for chunk in stream_chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"])
    assert ending.get("usage") == finish
    if last is None:
        assert all(chunk["choices"] for chunk in stream_chunks)
        return
    assert (stream_chunks[-1]["choices"], stream_chunks[-1]["usage"]) == ([], SHOWN)
    assert [chunk["usage"] for chunk in stream_chunks[:-1]] == [None] * (len(stream_chunks) - 1)


async def test_chat_stream_reasoning_on_request_only(start: Start) -> None:
    api = await start(*[Reply(text="Four.", reasoning=["Two and ", "two."], continues=False)] * 3, show_reasoning=False)
    events = await streamed(api, user("a"))
    assert chat_text(events, "reasoning_content") == ""
    assert "reasoning_content" not in str(events)
    events = await streamed(api, user("b", include_reasoning=True))
    assert chat_text(events, "reasoning_content") == "Two and two."
    assert chat_text(events) == "Four."
    for chunk in chunks(events):
        for choice in chunk["choices"]:
            assert len({"content", "reasoning_content"} & set(choice["delta"])) <= 1
            assert choice["delta"].get("content", "") is not None


async def test_show_reasoning_setting(start: Start) -> None:
    api = await start(Reply(text="Four.", reasoning="Hm."), show_reasoning=True)
    assert chat_text(await streamed(api, user()), "reasoning_content") == "Hm."


# ---- what reaches the model

PASSED: list[tuple[Json, Json]] = [
    ({"temperature": 0.3, "top_p": 0.9}, {"temperature": 0.3, "top_p": 0.9}),
    ({"presence_penalty": -1, "frequency_penalty": 1.5}, {"presence_penalty": -1, "frequency_penalty": 1.5}),
    ({"seed": 7}, {"seed": 7}),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"logit_bias": {"50256": -100}}, {"logit_bias": {"50256": -100}}),
    ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
    ({"verbosity": "low"}, {"verbosity": "low"}),
    ({"service_tier": "flex"}, {"service_tier": "flex"}),
    ({"prompt_cache_key": "k"}, {"prompt_cache_key": "k"}),
    ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
    ({"safety_identifier": "who"}, {"safety_identifier": "who"}),
    ({"temperature": 0}, {"temperature": 0}),
]


ALWAYS_PASSED = {"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop"}


@pytest.mark.parametrize(("parameters", "passed"), PASSED, ids=[",".join(parameters) for parameters, _ in PASSED])
async def test_sampling_parameters_reach_every_model_call(api: Api, parameters: Json, passed: Json) -> None:
    api.model.script = [Reply(tool_calls=[TODO]), Reply(text="Done.")]
    _, headers = await ask(api, user(**parameters))
    ignored = [name.strip() for name in headers.get("X-Hermes-Ignored", "").split(",")]
    assert not set(ignored) & ALWAYS_PASSED
    assert len(api.model.requests) == 2
    for request in api.model.requests:
        # What the provider cannot take is named, never dropped in silence.
        told_or_passed = {name: request.body.get(name) for name in passed if name not in ignored}
        assert told_or_passed == {name: value for name, value in passed.items() if name not in ignored}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_under_either_name(api: Api, name: str) -> None:
    api.model.script = [Reply(text="Hello.")]
    await ask(api, user(**{name: 77}))
    body = api.model.requests[0].body
    assert 77 in (body.get("max_tokens"), body.get("max_completion_tokens"))


async def test_unsupported_parameters_are_dropped_and_named(start: Start) -> None:
    api = await start()
    api.model.handler = lambda _: Reply(text="Hello.", reject_option="seed")
    _, headers = await ask(api, user(seed=7))
    assert "seed" in headers["X-Hermes-Ignored"]
    assert "seed" not in api.model.requests[-1].body


async def test_message_roles_reach_model(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": "ok"},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "three"},
    ]
    _, headers = await ask(api, {"messages": messages})
    request = api.model.requests[0]
    assert sent_messages(request) == [("user", "one\ntwo"), ("assistant", "ok"), ("user", "three")]
    assert "Be brief.\nBe kind." in system_of(request)
    assert headers["X-Hermes-History"] == "request; messages=2; ignored=0"


async def test_image_reaches_vision_model(start: Start) -> None:
    png = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    api = await start(Reply(text="A dot."), settings={"models": {"test-model": {"vision": True}}})
    await ask(api, user([{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": png}}]))
    content = api.model.requests[-1].body["messages"][-1]["content"]
    assert "look" in str(content)


async def test_text_file_is_inlined_into_message(api: Api) -> None:
    api.model.script = [Reply(text="Read.")]
    part = {"type": "file", "file": {"filename": "list.txt", "file_data": "data:text/plain;base64,bWlsaw=="}}
    await ask(api, user([part, {"type": "text", "text": "what is in it?"}]))
    (_, text), *_ = sent_messages(api.model.requests[0])
    assert "list.txt" in text
    assert "milk" in text


async def test_past_tool_calls_are_kept(api: Api) -> None:
    api.model.script = [Reply(text="Off.")]
    call = {"id": "c1", "type": "function", "function": {"name": "lamp", "arguments": '{"on": true}'}}
    messages = [
        {"role": "user", "content": "light"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "it is on"},
        {"role": "assistant", "content": "On."},
        {"role": "user", "content": "and off"},
    ]
    await ask(api, {"messages": messages, "tools": [function("lamp")]})
    roles = [message["role"] for message in api.model.requests[0].body["messages"]]
    assert roles[1:] == ["user", "assistant", "tool", "assistant", "user"]
    assert api.model.requests[0].body["messages"][3]["tool_call_id"] == "c1"


@pytest.mark.parametrize(("model", "strict", "model_name"), [("fast", False, "small"), ("other", False, "test-model")])
async def test_model_alias_uses_its_route(start: Start, model: str, strict: bool, model_name: str) -> None:
    api = await start(Reply(text="Hello."), model_routes={"fast": {"model": "small"}}, strict_models=strict)
    body, headers = await ask(api, user(model=model))
    assert body["model"] == model
    assert headers["X-Hermes-Model"].endswith(f"/{model_name}")
    assert api.model.requests[0].model == model_name


async def test_strict_models_reject_unknown(start: Start) -> None:
    api = await start(Reply(text="Hello."), strict_models=True)
    async with api.post(CHAT, user(model="other")) as response:
        await read_error(response, 404, "model_not_found", "model")
    await ask(api, user(model="hermes-agent"))


async def test_toolsets_can_be_narrowed(api: Api) -> None:
    api.model.script = [Reply(text="a", continues=False), Reply(text="b", continues=False)]
    await ask(api, user("one"), X_Hermes_Toolsets="todo")
    await ask(api, user("two"), X_Hermes_Toolsets="none")
    names = [[tool["function"]["name"] for tool in r.body.get("tools") or []] for r in api.model.requests]
    assert names == [["todo"], []]


# ---- sessions


async def test_named_session_uses_stored_history_and_names_ignored(api: Api) -> None:
    api.model.script = [Reply(text="Hello."), Reply(text="You said hi.")]
    await ask(api, user("hi"), X_Hermes_Session_Id="kitchen")
    body = {
        "messages": [*user("made up")["messages"], {"role": "assistant", "content": "x"}, *user("who?")["messages"]]
    }
    _, headers = await ask(api, body, X_Hermes_Session_Id="kitchen")
    assert headers["X-Hermes-Session-Id"] == "kitchen"
    assert headers["X-Hermes-History"] == "stored; messages=2; ignored=2"
    assert sent_messages(api.model.requests[1]) == [("user", "hi"), ("assistant", "Hello."), ("user", "who?")]


async def test_empty_named_session_is_seeded_once(api: Api) -> None:
    api.model.script = [Reply(text="one"), Reply(text="two")]
    earlier = [*user("a")["messages"], {"role": "assistant", "content": "b"}]
    for last in ("c", "d"):
        body = {"messages": [*earlier, *user(last)["messages"]]}
        await ask(api, body, X_Hermes_Session_Id="garden", X_Hermes_Seed_History="true")
    assert sent_messages(api.model.requests[0]) == [("user", "a"), ("assistant", "b"), ("user", "c")]
    expected = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "one"), ("user", "d")]
    assert sent_messages(api.model.requests[1]) == expected


async def test_open_server_accepts_session_id_but_not_session_key(start: Start) -> None:
    api = await start(Reply(text="Hello."), key="")
    _, headers = await ask(api, user(), X_Hermes_Session_Id="hall")
    assert headers["X-Hermes-Session-Id"] == "hall"
    async with api.post(CHAT, user(), headers={"X-Hermes-Session-Key": "me"}) as response:
        error = await read_error(response, 403, "session_key_requires_api_key")
        assert "X-Hermes-Session-Key requires API key" in error["message"]


async def test_conversation_keeps_session_over_turns(api: Api) -> None:
    api.model.script = [Reply(text="Hello."), Reply(text="Fine.")]
    _, first = await ask(api, user("hi"))
    longer = {
        "messages": [*user("hi")["messages"], {"role": "assistant", "content": "Hello."}, *user("ok?")["messages"]]
    }
    _, second = await ask(api, longer)
    assert first["X-Hermes-Session-Id"].startswith("api-")
    assert second["X-Hermes-Session-Id"] == first["X-Hermes-Session-Id"]
    async with api.get(f"/api/sessions/{first['X-Hermes-Session-Id']}/messages") as response:
        rows = (await read_json(response))["data"]
    assert [row["content"] for row in rows] == ["hi", "Hello.", "ok?", "Fine."]


async def test_equal_openings_do_not_share_session(api: Api) -> None:
    api.model.script = [Reply(text=text, continues=False) for text in ("Hello.", "Hi you.", "Fine.", "So so.")]
    first = [(await ask(api, user("hi")))[1]["X-Hermes-Session-Id"] for _ in range(2)]
    assert first[0] != first[1]
    assert first[1].startswith(f"{first[0]}-")
    for answer, session in zip(("Hello.", "Hi you."), first, strict=True):
        body = {"messages": [*user("hi")["messages"], {"role": "assistant", "content": answer}, *user("?")["messages"]]}
        _, headers = await ask(api, body)
        assert headers["X-Hermes-Session-Id"] == session
    assert [sent_messages(r)[1][1] for r in api.model.requests[2:]] == ["Hello.", "Hi you."]


async def test_concurrent_equal_openings_do_not_wait(start: Start) -> None:
    async with HeldModel(*[Reply(text="Hello.", continues=False)] * 3) as model:
        api = await start(settings=model.settings)
        turns = [asyncio.create_task(ask(api, user("hi"))) for _ in range(3)]
        await model.wait_for_request(3)
        model.release_all()
        ids = {headers["X-Hermes-Session-Id"] for _, headers in await asyncio.gather(*turns)}
    assert len(ids) == 3


# ---- one turn at a time, and not too many


async def test_busy_session_is_409_with_run_id(start: Start) -> None:
    async with HeldModel(Reply(text="Hello.")) as model:
        api = await start(settings=model.settings, session_wait_seconds=0)
        async with api.post(CHAT, user(stream=True), headers={"X-Hermes-Session-Id": "hall"}) as holder:
            assert holder.status == 200, await holder.text()
            await model.wait_for_request()
            async with api.post(CHAT, user(), headers={"X-Hermes-Session-Id": "hall"}) as response:
                await read_error(response, 409, "session_busy")
                assert int(response.headers["Retry-After"]) >= 1
                assert response.headers["x-should-retry"] == "true"
                assert response.headers["X-Hermes-Run-Id"] == holder.headers["X-Hermes-Run-Id"]
            model.release_all()
            await holder.read()


async def test_free_session_is_not_busy_with_slow_store(start: Start) -> None:
    api = await start(Reply(text="Hello."), Reply(text="Fine."), Reply(text="Named."), session_wait_seconds=0)
    _, first = await ask(api, user("hi"))
    longer = [*user("hi")["messages"], {"role": "assistant", "content": "Hello."}, *user("ok?")["messages"]]
    _, second = await ask(api, {"messages": longer})
    assert second["X-Hermes-Session-Id"] == first["X-Hermes-Session-Id"]
    await ask(api, user("hi"), X_Hermes_Session_Id="hall")


async def test_second_turn_waits_and_sees_first(start: Start) -> None:
    async with HeldModel(Reply(text="Hello."), Reply(text="Again.")) as model:
        api = await start(settings=model.settings)
        first = asyncio.create_task(ask(api, user("one"), X_Hermes_Session_Id="hall"))
        await model.wait_for_request()
        second = asyncio.create_task(ask(api, user("two"), X_Hermes_Session_Id="hall"))
        await until(lambda: api.app.engine.admissions.leases.waiting("hall") == 2)
        model.release_all()
        await asyncio.gather(first, second)
    assert sent_messages(model.requests[1]) == [("user", "one"), ("assistant", "Hello."), ("user", "two")]


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, user("x")), (CHAT, user("x", stream=True)), ("/v1/responses", {"input": "x"}), ("/v1/runs", {"input": "x"}),
     ("/v1/responses", {"input": "x", "background": True}), ("/api/sessions/s1/chat", {"message": "x"}),
     ("/api/sessions/s1/chat/stream", {"message": "x"})],
)  # fmt: skip
async def test_concurrency_cap_on_every_route(start: Start, path: str, body: Json) -> None:
    async with HeldModel(*[Reply(text="Hello.", continues=False)] * 2) as model:
        api = await start(settings=model.settings, max_concurrent_runs=1)
        if "s1" in path:
            await read_json(await api.post("/api/sessions", {"id": "s1"}), 201)
        first = asyncio.create_task(ask(api, user("first")))
        await model.wait_for_request()
        async with api.post(path, body) as response:
            await read_error(response, 429, "rate_limit_exceeded")
            assert int(response.headers["Retry-After"]) >= 1
            assert response.headers["x-should-retry"] == "true"
        model.release_all()
        await first
        async with api.post(path, body) as response:
            assert response.status in (200, 202)
            await response.read()


async def test_draining_server_rejects_new_turns(api: Api) -> None:
    await api.app.engine.drain(0)
    for path, body in ((CHAT, user()), ("/v1/responses", {"input": "x"}), ("/v1/runs", {"input": "x"})):
        async with api.post(path, body) as response:
            await read_error(response, 503, "gateway_draining")
            assert int(response.headers["Retry-After"]) >= 1
    async with api.get("/v1/models") as response:
        await read_json(response)


# ---- what is not to be kept


@pytest.mark.parametrize("stream", [False, True])
async def test_store_false_leaves_nothing(api: Api, stream: bool) -> None:
    api.model.script = [Reply(text="a", continues=False)] * 3
    for _ in range(2):
        async with api.post(CHAT, user("strawberries", store=False, stream=stream)) as response:
            assert response.status == 200 and "X-Hermes-Ignored" not in response.headers
            run_id = response.headers["X-Hermes-Run-Id"]
            await response.read()
        async with api.get(f"/v1/runs/{run_id}") as response:
            await read_error(response, 404, "run_not_found")
    assert [sent_messages(request) for request in api.model.requests] == [[("user", "strawberries")]] * 2
    for path in ("/api/sessions", "/v1/runs", "/api/sessions/search?q=strawberries"):
        async with api.get(path) as response:
            assert (await read_json(response))["data"] == [], path
    headers = {"X-Hermes-Session-Id": "hall"}
    async with api.post(CHAT, user("strawberries", store=False, stream=stream), headers=headers) as response:
        assert response.status == 200
        await response.read()
    async with api.get("/api/sessions") as response:
        assert [session["id"] for session in (await read_json(response))["data"]] == ["hall"]


async def test_store_false_client_call_leaves_nothing(api: Api, home_folder: Path) -> None:
    api.model.script = [Reply(tool_calls=[Call("lamp", id="call_lamp")])]
    await api.ask("strawberries", store=False, tools=[function("lamp")])
    # The rollback journal of a database that is being created comes and goes.
    paths = [path for path in home_folder.glob("*.db*") if not path.name.endswith("-journal")]
    data = b"".join(path.read_bytes() for path in paths)
    assert data and b"strawberries" not in data


async def test_concurrent_store_false_requests_do_not_wait(start: Start) -> None:
    async with HeldModel(Reply(text="a"), Reply(text="a")) as held_model:
        api = await start(settings=held_model.settings, session_wait_seconds=0)
        asking = [asyncio.create_task(api.ask("hi", store=False)) for _ in range(2)]
        await held_model.wait_for_request(2)
        held_model.release_all()
        await asyncio.gather(*asking)
