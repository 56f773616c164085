"""The single calls of the façade, which embedding programs make on a vendor's own client: a real client here."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from run_agent import AIAgent
from support.model_server import Call, ModelServer, Reply

from .harness import KEY, cut_after, in_thread, scripted

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def agent_for(server: ModelServer, **fields: Any) -> AIAgent:
    return AIAgent(base_url=f"{server.url}/v1", model="m", api_key=KEY, **fields)


async def call(agent: AIAgent, **more: Any) -> Any:
    return await in_thread(lambda: agent._interruptible_streaming_api_call({**ASK, **more}))


async def test_streamed_answer_is_reported_in_parts_and_returned_whole(server: ModelServer) -> None:
    calls = [Call("look", ['{"a"', ': "x"}'], id="c1")]
    server.script = [Reply(text=["Once ", "upon"], reasoning=["h", "m"], tool_calls=calls)]
    texts: list[str] = []
    thought: list[str] = []
    agent = agent_for(server, stream_delta_callback=texts.append, reasoning_callback=thought.append)
    first: list[int] = []
    touched: list[str] = []
    agent._touch_activity = touched.append  # type: ignore[method-assign,assignment]
    answer = await in_thread(
        lambda: agent._interruptible_streaming_api_call(ASK, on_first_delta=lambda: first.append(1))
    )
    message = answer.choices[0].message
    assert (texts, thought, first) == (["Once ", "upon"], ["h", "m"], [1])
    assert (message.content, message.reasoning_content) == ("Once upon", "hm")
    assert [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls] == [("c1", "look", '{"a": "x"}')]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert touched.count("receiving stream response") == 9


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, openai.AuthenticationError), (429, openai.RateLimitError), (400, openai.BadRequestError)],
)
async def test_rejection_before_text_propagates(server: ModelServer, status: int, error: type[Exception]) -> None:
    server.repeat, server.script = True, [Reply(status=status)]
    with pytest.raises(error):
        await call(agent_for(server))
    assert len(server.requests) == 1


async def test_lost_connection_is_retried_as_configured_by_environment(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script = [Reply(reset_before_headers=True), Reply(reset_before_headers=True), Reply(text="Done.")]
    assert (await call(agent_for(server))).choices[0].message.content == "Done."
    monkeypatch.setenv("HERMES_STREAM_RETRIES", "0")
    server.script = [Reply(reset_before_headers=True), Reply(text="Done.")]
    with pytest.raises(openai.APIConnectionError):
        await call(agent_for(server))


async def test_streaming_rejection_is_remembered_until_next_turn(server: ModelServer) -> None:
    server.script = [Reply(refuse_stream=True), Reply(text="Done.")]
    agent = agent_for(server, enabled_toolsets=[])
    with pytest.raises(openai.BadRequestError):
        await call(agent)
    assert agent._disable_streaming is True
    await agent.arun_conversation("hi")
    assert agent._disable_streaming is False


async def test_stream_cut_after_text_returns_partial_answer(server: ModelServer) -> None:
    server.handler = scripted(cut_after("a time", Reply(text=["Once ", "upon ", "a time"])))
    answer = await call(agent_for(server))
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("Once upon ", None, "length")


async def test_stream_cut_in_tool_call_warns_and_drops_call(server: ModelServer) -> None:
    reply = Reply(text="Wait.", tool_calls=[Call("look", ['{"a": "FIRST', 'SECOND"}'])])
    server.handler = scripted(cut_after("SECOND", reply))
    texts: list[str] = []
    answer = await call(agent_for(server, stream_delta_callback=texts.append))
    message = answer.choices[0].message
    warning = "Stream stalled mid tool-call (look); the call was not executed."
    assert message.content.startswith("Wait.")
    assert message.content.endswith(warning)
    assert message.tool_calls is None
    assert "".join(texts) == message.content


async def test_external_interrupt_ends_call(server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]
    agent = agent_for(server)
    agent.stream_delta_callback = lambda _: threading.Timer(0.01, agent.interrupt).start()
    try:
        answer = await call(agent)
    except InterruptedError:
        pass
    else:
        assert answer.choices[0].message.content == "Once "
    await server.until(lambda: server.open_streams == 0)
