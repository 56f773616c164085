"""The scripted model server, seen by the real client libraries and by bare sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from support.model_server import Call, ModelServer, Protocol, Reply, Request, body_bytes, event_count
from support.ports import reserved_port
from support.wire import already_said, turns

PROTOCOLS: list[Protocol] = ["chat", "responses", "anthropic"]
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}
ASK = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": ASK, "stream": True, "stream_options": {"include_usage": True}},
    "responses": {"model": "m", "input": "hi", "stream": True},
    "anthropic": {"model": "m", "messages": ASK, "max_tokens": 100, "stream": True},
}
FULL = Reply(
    text=["Grüße, ", "Welt ", "🙂"],
    reasoning=["first ", "then"],
    tool_calls=[Call("look", ['{"a"', ": 1}"]), Call("list", '{"b":"ü"}', id="given")],
    usage={"input": 100, "output": 20, "cached": 60, "cache_write": 10, "reasoning": 7},
    signature="signed",
    encrypted="sealed",
)
TEXT, THOUGHT = "Grüße, Welt 🙂", "first then"
SHORT = Reply(text=["Hé", "llo"])


@pytest.fixture
async def server(caplog: pytest.LogCaptureFixture) -> AsyncIterator[ModelServer]:
    async with ModelServer() as model:
        yield model
    assert [record for record in caplog.records if record.name.startswith(("aiohttp", "asyncio"))] == []


@pytest.fixture
async def gpt(server: ModelServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sk-secret", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(server: ModelServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="sk-secret", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(server: ModelServer) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": "Bearer sk-secret"}
    async with aiohttp.ClientSession(base_url=server.url, headers=headers) as client:
        yield client


async def fetch(http: aiohttp.ClientSession, protocol: Protocol, **more: Any) -> tuple[int, bytes]:
    async with http.post(PATHS[protocol], json={**BODIES[protocol], **more}) as response:
        return response.status, await response.read()


async def fetch_broken(http: aiohttp.ClientSession, protocol: Protocol) -> bytes:
    """What arrives before the transfer breaks, which it must."""
    received = b""
    with pytest.raises(aiohttp.ClientPayloadError):
        async with http.post(PATHS[protocol], json=BODIES[protocol]) as response:
            async for data, _ in response.content.iter_chunks():
                received += data
    return received


def events_of(body: bytes) -> list[tuple[str, Any]]:
    """The name and the parsed data of each event."""
    events = []
    for block in body.decode().strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        events.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


# --- The libraries parse it --------------------------------------------------------------------------------------


async def test_chat_streamed(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [FULL]
    stream = await gpt.chat.completions.create(
        model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert [delta.content for delta in deltas if delta.content] == FULL.text
    assert [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")] == FULL.reasoning
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls if call.function.name] == [(0, "look"), (1, "list")]
    assert "".join(call.function.arguments for call in calls if call.index == 0) == '{"a": 1}'
    assert calls[0].id.startswith("call_") and calls[3].id == "given"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (100, 20, 120)
    assert usage.prompt_tokens_details.cached_tokens == 60
    assert usage.completion_tokens_details.reasoning_tokens == 7


async def test_chat_stream_helper(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [FULL]
    async with gpt.chat.completions.stream(model="m", messages=ASK) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == TEXT
    assert [call.function.arguments for call in message.tool_calls] == ['{"a": 1}', '{"b":"ü"}']


async def test_chat_streams_usage_only_on_request(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [FULL]
    stream = await gpt.chat.completions.create(model="m", messages=ASK, stream=True)
    assert [chunk async for chunk in stream if not chunk.choices or chunk.usage is not None] == []


async def test_chat_plain(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [FULL]
    response = await gpt.chat.completions.create(model="asked", messages=ASK)
    message = response.choices[0].message
    assert (response.model, message.content, message.reasoning_content) == ("asked", TEXT, THOUGHT)
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("look", '{"a": 1}'),
        ("list", '{"b":"ü"}'),
    ]
    assert response.choices[0].finish_reason == "tool_calls"
    assert response.usage.prompt_tokens_details.cached_tokens == 60


async def test_chat_extra_content(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    extra = {"google": {"thought_signature": "s"}}
    server.script = [Reply(tool_calls=[Call("look", {"a": 1}, extra_content=extra)])] * 2
    response = await gpt.chat.completions.create(model="m", messages=ASK)
    assert response.choices[0].message.content is None
    assert response.choices[0].message.tool_calls[0].extra_content == extra
    stream = await gpt.chat.completions.create(model="m", messages=ASK, stream=True)
    calls = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert [getattr(call, "extra_content", None) for call in calls] == [extra, None]


async def test_responses_streamed(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [FULL]
    stream = await gpt.responses.create(model="m", input="hi", stream=True, include=["reasoning.encrypted_content"])
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output[0].encrypted_content == "sealed"
    assert final.output_text == TEXT


async def test_responses_stream_helper(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [FULL]
    async with gpt.responses.stream(model="m", input="hi") as stream:
        final = await stream.get_final_response()
    assert final.output_text == TEXT
    assert final.output[0].summary[0].text == THOUGHT
    assert [(item.name, item.arguments) for item in final.output[2:]] == [("look", '{"a": 1}'), ("list", '{"b":"ü"}')]
    usage = final.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (100, 20, 120)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (60, 7)


async def test_responses_plain(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [FULL, Reply(text="half", finish="length")]
    response = await gpt.responses.create(model="m", input="hi")
    assert (response.status, response.output_text, response.output[3].call_id) == ("completed", TEXT, "given")
    assert response.output[0].encrypted_content is None, "it is only sent when the request includes it"
    short = await gpt.responses.create(model="m", input="hi")
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_anthropic_plain(server: ModelServer, claude: anthropic.AsyncAnthropic) -> None:
    server.script = [FULL]
    response = await claude.messages.create(model="m", max_tokens=100, messages=ASK)
    thought, text, first, second = response.content
    assert (thought.thinking, thought.signature, text.text) == (THOUGHT, "signed", TEXT)
    assert (first.name, first.input, second.id, second.input) == ("look", {"a": 1}, "given", {"b": "ü"})
    assert first.id.startswith("toolu_") and response.stop_reason == "tool_use"
    usage = response.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (30, 60, 10)
    assert (usage.output_tokens, usage.output_tokens_details.thinking_tokens) == (20, 7)


async def test_anthropic_streamed(server: ModelServer, claude: anthropic.AsyncAnthropic) -> None:
    server.script = [FULL]
    stream = await claude.messages.create(model="m", max_tokens=100, messages=ASK, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas == [
        *["thinking_delta"] * 2,
        "signature_delta",
        *["text_delta"] * 3,
        *["input_json_delta"] * 5,
    ]


async def test_anthropic_stream_helper(server: ModelServer, claude: anthropic.AsyncAnthropic) -> None:
    server.script = [FULL]
    async with claude.messages.stream(model="m", max_tokens=100, messages=ASK) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (final.content[0].thinking, final.content[0].signature) == (THOUGHT, "signed")
    assert (final.content[2].input, final.content[3].input) == ({"a": 1}, {"b": "ü"})
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens, final.usage.output_tokens) == (30, 60, 20)
    assert final.stop_reason == "tool_use"


async def test_anthropic_path_prefix(server: ModelServer) -> None:
    server.script = [SHORT]
    async with anthropic.AsyncAnthropic(base_url=f"{server.url}/anthropic", api_key="k") as claude:
        response = await claude.messages.create(model="m", max_tokens=100, messages=ASK)
    assert response.content[0].text == "Héllo"
    assert (server.requests[0].path, server.requests[0].key) == ("/anthropic/v1/messages", "k")


@pytest.mark.parametrize(
    ("finish", "chat", "claude"),
    [
        ("stop", "stop", "end_turn"),
        ("length", "length", "max_tokens"),
        ("content_filter", "content_filter", "refusal"),
        ("pause_turn", "pause_turn", "pause_turn"),
    ],
)
async def test_finish_reason_per_protocol(
    server: ModelServer, http: aiohttp.ClientSession, finish: str, chat: str, claude: str
) -> None:
    server.script = [Reply(text="t", finish=finish)] * 2
    _, body = await fetch(http, "chat", stream=False)
    assert json.loads(body)["choices"][0]["finish_reason"] == chat
    _, body = await fetch(http, "anthropic", stream=False)
    assert json.loads(body)["stop_reason"] == claude


# --- The script --------------------------------------------------------------------------------------------------


async def test_script_order_and_exhaustion(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [Reply(text="one"), Reply(text="two")]
    for expected in ("one", "two"):
        response = await gpt.chat.completions.create(model="m", messages=ASK)
        assert response.choices[0].message.content == expected
    with pytest.raises(openai.InternalServerError, match="the script is exhausted: request 3"):
        await gpt.chat.completions.create(model="m", messages=ASK)


async def test_last_reply_repeats(server: ModelServer, http: aiohttp.ClientSession) -> None:
    server.repeat = True
    server.script = [Reply(text="one"), Reply(text="two")]
    bodies = [await fetch(http, "chat") for _ in range(3)]
    assert [b"two" in body for _, body in bodies] == [False, True, True]


async def test_handlers(server: ModelServer, http: aiohttp.ClientSession) -> None:
    def plain(request: Request) -> Reply:
        return Reply(text=f"to {request.turns[-1].text}")

    async def later(request: Request) -> Reply:
        return plain(request)

    def failing(request: Request) -> Reply:
        raise LookupError(request.model)

    for handler in (plain, later):
        server.handler = handler
        assert b"to hi" in (await fetch(http, "responses"))[1]
    server.handler = failing
    status, body = await fetch(http, "anthropic")
    assert status == 500 and b"LookupError('m')" in body


async def test_requests_are_recorded(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [SHORT]
    await gpt.chat.completions.create(model="m", messages=ASK, extra_headers={"X-Own": "1"})
    [request] = server.requests
    assert (request.number, request.path, request.protocol) == (1, "/v1/chat/completions", "chat")
    assert request.headers["x-own"] == "1"
    assert (request.body, request.key) == ({"model": "m", "messages": ASK}, "sk-secret")
    assert request.reply is SHORT and request.sent > 0
    assert not request.stream and not request.closed_early


async def test_invalid_json_body_is_400(server: ModelServer, http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/messages", data=b"[") as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_body_bytes_is_what_is_sent(server: ModelServer, http: aiohttp.ClientSession, protocol: Protocol) -> None:
    server.script = [FULL]
    _, body = await fetch(http, protocol)
    assert body == body_bytes(protocol, FULL, BODIES[protocol])
    assert len(events_of(body)) == event_count(protocol, FULL, BODIES[protocol])


# --- Errors ------------------------------------------------------------------------------------------------------

STATUSES = [400, 401, 402, 403, 404, 408, 413, 422, 429, 500, 502, 503, 504, 529]


@pytest.mark.parametrize("status", STATUSES)
async def test_statuses(
    server: ModelServer, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, status: int
) -> None:
    server.script = [Reply(status=status, error="no", headers={"Retry-After": "7"})] * 3
    with pytest.raises(openai.APIStatusError) as chat:
        await gpt.chat.completions.create(model="m", messages=ASK, stream=True)
    with pytest.raises(openai.APIStatusError) as responses:
        await gpt.responses.create(model="m", input="hi")
    with pytest.raises(anthropic.APIStatusError) as messages:
        await claude.messages.create(model="m", max_tokens=9, messages=ASK, stream=True)
    for error in (chat.value, responses.value, messages.value):
        assert error.status_code == status
        assert error.response.headers["retry-after"] == "7"
        assert error.request_id.startswith("req_")
    assert chat.value.body["message"] == responses.value.body["message"] == "no"
    assert {"message", "type", "param", "code"} == chat.value.body.keys()
    assert messages.value.body["error"]["message"] == "no" and messages.value.body["type"] == "error"


async def test_error_fields(server: ModelServer, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic) -> None:
    server.script = [Reply(status=400, error={"code": "context_length_exceeded", "message": "too long"})]
    with pytest.raises(openai.BadRequestError, match="too long") as raised:
        await gpt.chat.completions.create(model="m", messages=ASK)
    assert (raised.value.code, raised.value.type) == ("context_length_exceeded", "invalid_request_error")
    server.script = [Reply(status=529)]
    with pytest.raises(anthropic.OverloadedError):
        await claude.messages.create(model="m", max_tokens=9, messages=ASK)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_key_is_quoted(server: ModelServer, http: aiohttp.ClientSession, protocol: Protocol) -> None:
    server.script = [Reply(status=401, quote_key=True), Reply(error_event={}, quote_key=True), Reply(status=401)]
    assert [b"sk-secret" in (await fetch(http, protocol))[1] for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_streaming_refused(server: ModelServer, http: aiohttp.ClientSession, protocol: Protocol) -> None:
    server.script = [Reply(text="plain", refuse_stream=True)] * 2
    status, body = await fetch(http, protocol)
    assert status == 400 and b"streaming is not supported" in body
    status, body = await fetch(http, protocol, stream=False)
    assert status == 200 and b"plain" in body


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_option_rejected(server: ModelServer, http: aiohttp.ClientSession, protocol: Protocol) -> None:
    server.script = [Reply(text="fine", reject_option="temperature")] * 2
    status, body = await fetch(http, protocol, temperature=1)
    assert status == 400 and "temperature" in json.loads(body)["error"]["message"]
    assert (await fetch(http, protocol))[0] == 200
    server.script = [Reply(reject_option="metadata.user")] * 2
    assert (await fetch(http, protocol, metadata={"user": "u"}))[0] == 400
    assert (await fetch(http, protocol, metadata={}))[0] == 200


async def test_error_events(server: ModelServer, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic) -> None:
    server.script = [Reply(text=["a", "b"], error_event={"message": "broke"})] * 3
    stream = await gpt.chat.completions.create(model="m", messages=ASK, stream=True)
    contents = [(await anext(stream)).choices[0].delta.content for _ in range(3)]
    assert contents == ["", "a", "b"]
    with pytest.raises(openai.APIError, match="broke"):
        await anext(stream)
    events = [event async for event in await gpt.responses.create(model="m", input="hi", stream=True)]
    assert [event.type for event in events[-3:]] == ["response.output_text.delta", "error", "response.failed"]
    assert events[-2].message == events[-1].response.error.message == "broke"
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        async for _ in await claude.messages.create(model="m", max_tokens=9, messages=ASK, stream=True):
            pass


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_error_event_in_a_plain_answer(
    server: ModelServer, http: aiohttp.ClientSession, protocol: Protocol
) -> None:
    server.script = [Reply(text="t", error_event={"message": "broke"})]
    status, body = await fetch(http, protocol, stream=False)
    assert status == 200 and json.loads(body)["error"]["message"] == "broke"


# --- Transfers that go wrong -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_cut_at_every_byte(server: ModelServer, http: aiohttp.ClientSession, protocol: Protocol) -> None:
    whole = body_bytes(protocol, SHORT, BODIES[protocol])
    for offset in range(len(whole) + 1):
        server.script = [Reply(text=SHORT.text, cut_at=offset)]
        assert await fetch_broken(http, protocol) == whole[:offset]
    assert not any(request.closed_early for request in server.requests)
    assert server.requests[-1].sent == len(whole)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_cut_stream_is_an_error_in_libraries(
    server: ModelServer, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, protocol: Protocol
) -> None:
    server.script = [Reply(text=SHORT.text, cut_at=100)]
    with pytest.raises(Exception, match=r"Connection error|incomplete chunked read"):
        if protocol == "chat":
            async for _ in await gpt.chat.completions.create(model="m", messages=ASK, stream=True):
                pass
        elif protocol == "responses":
            async for _ in await gpt.responses.create(model="m", input="hi", stream=True):
                pass
        else:
            async for _ in await claude.messages.create(model="m", max_tokens=9, messages=ASK, stream=True):
                pass


async def test_large_body_is_cut_exactly(server: ModelServer, http: aiohttp.ClientSession) -> None:
    # More than the sockets buffer, so the cut has to wait for the client.
    reply = Reply(text=["x" * 1_000_000] * 12, cut_at=11_000_000)
    server.script = [reply]
    broken = await fetch_broken(http, "chat")
    assert broken == body_bytes("chat", reply, BODIES["chat"])[:11_000_000]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_clean_cut(server: ModelServer, http: aiohttp.ClientSession, protocol: Protocol) -> None:
    whole = body_bytes(protocol, SHORT, BODIES[protocol])
    for offset in (0, 1, 100, len(whole)):
        server.script = [Reply(text=SHORT.text, cut_at=offset, cut_clean=True)]
        assert (await fetch(http, protocol))[1] == whole[:offset]


async def test_plain_answer_is_cut(server: ModelServer, http: aiohttp.ClientSession) -> None:
    server.script = [Reply(text="t", as_json=True, cut_at=20)]
    broken = await fetch_broken(http, "chat")
    assert len(broken) == 20 and broken.startswith(b'{"id":')


@pytest.mark.parametrize("offset", [0, 1, 150])
async def test_stall(server: ModelServer, http: aiohttp.ClientSession, offset: int) -> None:
    server.script = [Reply(text=SHORT.text, stall_at=offset)]
    async with http.post(PATHS["chat"], json=BODIES["chat"]) as response:
        received = await response.content.readexactly(offset)
        assert received == body_bytes("chat", SHORT, BODIES["chat"])[:offset]
        # On a slow machine what should not come might come later than this: the test can only pass too easily.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(response.content.readany(), 0.05)
        assert server.open_streams == 1
        response.close()
    await server.until(lambda: server.open_streams == 0)
    assert server.requests[0].closed_early and server.requests[0].sent == offset


async def test_stall_with_comments(server: ModelServer, http: aiohttp.ClientSession) -> None:
    server.script = [Reply(text=SHORT.text, stall_at=10, comments=True)]
    async with http.post(PATHS["chat"], json=BODIES["chat"]) as response:
        lines = [await response.content.readline() for _ in range(6)]
        response.close()
    assert lines[0].startswith(b"data: {") and lines[0].endswith(b"}\n"), "a comment never splits an event"
    assert lines[1:] == [b"\n", b": ping\n", b"\n", b": ping\n", b"\n"]
    await server.until(lambda: server.open_streams == 0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("packets", [1, 3, [1, 50, 2]])
async def test_packets_reassemble(
    server: ModelServer, http: aiohttp.ClientSession, protocol: Protocol, packets: int | list[int]
) -> None:
    server.script = [Reply(text=SHORT.text, packets=packets)]
    assert (await fetch(http, protocol))[1] == body_bytes(protocol, SHORT, BODIES[protocol])


async def test_packets_arrive_one_by_one(server: ModelServer) -> None:
    server.script = [Reply(text=SHORT.text, packets=1)]
    body = json.dumps(BODIES["chat"]).encode()
    head = f"POST {PATHS['chat']} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head.encode() + body)
    await reader.readuntil(b"\r\n\r\n")
    reads = 0
    while await reader.read(1 << 16):
        reads += 1
    writer.close()
    await writer.wait_closed()
    assert reads > len(body_bytes("chat", SHORT, BODIES["chat"])) // 2


async def test_libraries_survive_single_bytes(
    server: ModelServer, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    server.script = [Reply(text=FULL.text, packets=1, crlf=True)] * 2
    async with gpt.responses.stream(model="m", input="hi") as stream:
        assert (await stream.get_final_response()).output_text == TEXT
    async with claude.messages.stream(model="m", max_tokens=9, messages=ASK) as messages:
        assert await messages.get_final_text() == TEXT


async def test_delay_and_gap(server: ModelServer, http: aiohttp.ClientSession) -> None:
    server.script = [Reply(text=["a", "b", "c"], delay_s=0.02, gap_s=0.02)]
    started_at = asyncio.get_running_loop().time()
    async with http.post(PATHS["chat"], json=BODIES["chat"]) as response:
        assert asyncio.get_running_loop().time() - started_at >= 0.019
        await response.read()
    assert asyncio.get_running_loop().time() - started_at >= 0.059


async def test_reset_before_headers(server: ModelServer, http: aiohttp.ClientSession) -> None:
    server.script = [Reply(reset_before_headers=True), SHORT]
    with pytest.raises(aiohttp.ClientOSError, match="reset by peer"):
        await fetch(http, "chat")
    assert (await fetch(http, "chat"))[0] == 200
    assert not server.requests[0].closed_early


async def test_client_disconnect_during_delay(server: ModelServer, http: aiohttp.ClientSession) -> None:
    server.script = [Reply(delay_s=60)]
    asking = asyncio.create_task(fetch(http, "chat"))
    await server.until(lambda: server.open_streams == 1)
    asking.cancel()
    await server.until(lambda: server.open_streams == 0)
    assert server.requests[0].closed_early


# --- Bodies that go wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_malformed_events(server: ModelServer, http: aiohttp.ClientSession, protocol: Protocol) -> None:
    count = event_count(protocol, SHORT, BODIES[protocol])
    whole = body_bytes(protocol, SHORT, BODIES[protocol]).split(b"\n\n")
    for number in range(count):
        server.script = [Reply(text=SHORT.text, malformed_at=number)]
        parts = (await fetch(http, protocol))[1].split(b"\n\n")
        assert [index for index in range(count) if parts[index] != whole[index]] == [number]
        with pytest.raises(ValueError, match=r".+"):
            json.loads(parts[number].split(b"data: ")[1])


async def test_malformed_event_breaks_the_library(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [Reply(text=SHORT.text, malformed_at=1)]
    with pytest.raises(json.JSONDecodeError):
        async for _ in await gpt.chat.completions.create(model="m", messages=ASK, stream=True):
            pass


@pytest.mark.parametrize(
    ("fault", "indexes", "ids"),
    [
        ({"duplicate_index": True}, [0, 0, 0, 0], ["a", None, "b", None]),
        ({"missing_index": True}, [None] * 4, ["a", None, "b", None]),
        ({"missing_id": True}, [0, 0, 1, 1], [None] * 4),
    ],
)
async def test_faulty_call_deltas(
    server: ModelServer, http: aiohttp.ClientSession, fault: dict[str, bool], indexes: list[Any], ids: list[Any]
) -> None:
    server.script = [Reply(tool_calls=[Call("x", id="a"), Call("y", id="b")], **fault)]
    chunks = [data for _, data in events_of((await fetch(http, "chat"))[1]) if data != "[DONE]" and data["choices"]]
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [call.get("index") for call in calls] == indexes
    assert [call.get("id") for call in calls] == ids


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_without_usage_and_done(server: ModelServer, http: aiohttp.ClientSession, protocol: Protocol) -> None:
    server.script = [Reply(text="t", no_usage=True, no_done=True)] * 2
    _, body = await fetch(http, protocol)
    assert b"[DONE]" not in body and b"_tokens" not in body
    assert b"_tokens" not in (await fetch(http, protocol, stream=False))[1]


async def test_crlf(server: ModelServer, http: aiohttp.ClientSession) -> None:
    server.script = [Reply(text="t", crlf=True)]
    _, body = await fetch(http, "anthropic")
    assert body.count(b"\n") == body.count(b"\r\n") > 0
    assert body.replace(b"\r\n", b"\n") == body_bytes("anthropic", Reply(text="t"), BODIES["anthropic"])


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_json_in_place_of_a_stream(server: ModelServer, http: aiohttp.ClientSession, protocol: Protocol) -> None:
    server.script = [Reply(text="whole", as_json=True)]
    async with http.post(PATHS[protocol], json=BODIES[protocol]) as response:
        assert response.content_type == "application/json"
        assert "whole" in json.dumps(await response.json())


async def test_raw_body(server: ModelServer, http: aiohttp.ClientSession) -> None:
    server.script = [Reply(status=502, raw="<h1>Bad Gateway</h1>"), Reply(raw=b"")]
    assert await fetch(http, "chat") == (502, b"<h1>Bad Gateway</h1>")
    assert await fetch(http, "chat") == (200, b"")


# --- Going on after a cut ----------------------------------------------------------------------------------------

GO_ON = {"role": "user", "content": "go on"}


def assistant_message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def conversation(protocol: Protocol, *messages: dict[str, Any]) -> dict[str, Any]:
    return {"input" if protocol == "responses" else "messages": [*ASK, *messages]}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("asks_to_continue", [False, True])
async def test_text_is_continued(
    server: ModelServer, http: aiohttp.ClientSession, protocol: Protocol, asks_to_continue: bool
) -> None:
    reply = Reply(text=["one ", "two ", "three"], reasoning="hm", tool_calls=[Call("act")])
    server.script = [reply]
    more = conversation(protocol, assistant_message("one t"), *([GO_ON] if asks_to_continue else []))
    _, body = await fetch(http, protocol, **more)
    rest = Reply(text=["wo ", "three"], tool_calls=[Call("act")], continues=False)
    plain = [(name, strip_ids(data)) for name, data in events_of(body)]
    expected = events_of(body_bytes(protocol, rest, {**BODIES[protocol], **more}))
    assert plain == [(name, strip_ids(data)) for name, data in expected]


def strip_ids(data: Any) -> Any:
    """The same without what is made from the reply's own words."""
    if isinstance(data, dict):
        return {name: strip_ids(value) for name, value in data.items() if name not in ("id", "item_id", "call_id")}
    return [strip_ids(value) for value in data] if isinstance(data, list) else data


@pytest.mark.parametrize(
    ("protocol", "body", "expected"),
    [
        ("chat", conversation("chat"), ""),
        ("chat", conversation("chat", assistant_message("other"), GO_ON), ""),
        ("chat", conversation("chat", assistant_message("one"), GO_ON, GO_ON), ""),
        ("chat", conversation("chat", assistant_message("one"), {"role": "tool", "content": "r"}), ""),
        ("chat", conversation("chat", assistant_message("one"), {"role": "system", "content": "s"}, GO_ON), "one"),
        ("chat", conversation("chat", assistant_message("on"), GO_ON, assistant_message("e t"), GO_ON), "one t"),
        ("chat", conversation("chat", assistant_message("one two"), GO_ON), "one two"),
        (
            "anthropic",
            conversation("anthropic", {"role": "assistant", "content": [{"type": "text", "text": "o"}]}),
            "o",
        ),
        (
            "anthropic",
            conversation(
                "anthropic",
                assistant_message("one"),
                {"role": "user", "content": [{"type": "tool_result", "content": "r"}]},
            ),
            "",
        ),
        (
            "responses",
            conversation(
                "responses",
                {"type": "reasoning", "summary": []},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one "}]},
            ),
            "one ",
        ),
        (
            "responses",
            conversation("responses", assistant_message("one"), {"type": "function_call_output", "output": "r"}),
            "",
        ),
    ],
)
def test_repeated_prefix_is_found(protocol: Protocol, body: dict[str, Any], expected: str) -> None:
    assert already_said("one two", turns(protocol, body)) == expected


async def test_continuation_can_be_disabled(server: ModelServer, http: aiohttp.ClientSession) -> None:
    server.script = [Reply(text="same", continues=False)]
    assert b"same" in (await fetch(http, "chat", messages=[*ASK, assistant_message("same"), GO_ON]))[1]


@pytest.mark.long
async def test_answer_cut_anywhere_can_be_finished(server: ModelServer, http: aiohttp.ClientSession) -> None:
    whole = body_bytes("chat", SHORT, BODIES["chat"])
    for offset in range(len(whole) + 1):
        server.script = [Reply(text=SHORT.text, cut_at=offset), SHORT]
        text = text_of(await fetch_broken(http, "chat"))
        more = [assistant_message(text), GO_ON] if text else []
        _, rest = await fetch(http, "chat", messages=[*ASK, *more])
        assert text + text_of(rest) == "Héllo"


def text_of(body: bytes) -> str:
    """The text of the whole events in a chat body that may end anywhere."""
    blocks = body.split(b"\n\n")[:-1]
    chunks = [json.loads(block[6:]) for block in blocks if block != b"data: [DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


# --- Starting and stopping ---------------------------------------------------------------------------------------


async def test_stop_leaves_nothing_running() -> None:
    before = asyncio.all_tasks()
    server = await ModelServer(Reply(text="t", stall_at=5), Reply(delay_s=60), SHORT).start()
    async with aiohttp.ClientSession(base_url=server.url) as http:
        idle = await asyncio.open_connection("127.0.0.1", server.port)
        asking = [asyncio.create_task(fetch(http, "chat")) for _ in range(3)]
        await server.until(lambda: len(server.requests) == 3 and server.open_streams == 2)
        await server.stop()
        assert asyncio.all_tasks() - before - set(asking) == set()
        results = await asyncio.gather(*asking, return_exceptions=True)
        idle[1].close()
        await idle[1].wait_closed()
    assert sorted(isinstance(result, aiohttp.ClientError) for result in results) == [False, True, True]
    assert server.open_streams == 0
    assert not any(request.closed_early for request in server.requests)
    await server.stop()


async def test_stopped_server_restarts_on_same_port() -> None:
    with reserved_port() as port:
        server = await ModelServer(SHORT).start(port)
        await server.stop()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        await server.start(port)
        async with aiohttp.ClientSession(base_url=server.url) as http:
            assert (await fetch(http, "chat"))[0] == 200
        await server.stop()


async def test_server_binds_loopback_only(server: ModelServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}"
    with pytest.raises(OSError, match=r".+"):
        await asyncio.open_connection("127.0.0.2", server.port)
