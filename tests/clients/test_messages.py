"""What only the Messages and Ollama protocols have: pictures, documents, thinking, token counts, models, resumed streams."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import anthropic
import httpx2 as httpx
import ollama
import pytest
from anthropic.types.beta import BetaContentBlockParam

from clients.drivers import MODEL
from clients.scenes import HELLO, THOUGHT
from clients.server import Hermes

PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


@pytest.fixture
def sdk(hermes: Hermes) -> anthropic.Anthropic:
    url = hermes.url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=url, api_key=hermes.key, _strict_response_validation=True)


def messages_body(content: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 1000, "messages": [{"role": "user", "content": content}]}


def test_thinking_is_streamed_and_sent_back(sdk: anthropic.Anthropic) -> None:
    question = messages_body("think, then say hello")
    thinking: Any = {"type": "adaptive"}
    with sdk.messages.stream(**question, thinking=thinking) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert {"thinking", "text", "message_stop"} <= set(kinds)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "".join(THOUGHT)  # type: ignore[union-attr]
    assert sdk.messages.create(**question, thinking=thinking).content[0].type == "thinking"
    history: Any = [*question["messages"], {"role": "assistant", "content": message.content}]
    again = sdk.messages.create(**{**question, "messages": [*history, {"role": "user", "content": "count"}]})
    assert again.content[0].text == "2 questions so far."  # type: ignore[union-attr]


def test_max_tokens_is_a_stop_reason(sdk: anthropic.Anthropic) -> None:
    assert sdk.messages.create(**messages_body("say too much")).stop_reason == "max_tokens"


def test_pictures_and_documents(sdk: anthropic.Anthropic) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
    text_block = {"type": "text", "text": "count pictures"}
    message = sdk.messages.create(**messages_body([picture, picture, text_block]))
    assert message.content[0].text == "2 pictures."  # type: ignore[union-attr]


def _example(hint: Any) -> Any:
    """A value of a type of the package: of an object what it must have, of several types the first."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return inside[0]
    if origin in (typing.Required, typing.NotRequired, typing.Annotated, typing.Union, types.UnionType):
        return _example(next(kind for kind in inside if kind is not type(None)))
    if _is_object(hint):
        fields = typing.get_type_hints(hint, include_extras=True).items()
        return {name: _example(kind) for name, kind in fields if typing.get_origin(kind) is typing.Required}
    if origin is not None and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        return [_example(inside[0])]
    simple = {str: "x", int: 1, float: 1.0, bool: False}
    return simple.get(hint, {})


def _is_object(hint: Any) -> bool:
    return hasattr(hint, "__required_keys__")


_BLOCKS = [block for block in typing.get_args(BetaContentBlockParam) if _is_object(block)]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_every_content_block_type_is_accepted_or_rejected_by_name(sdk: anthropic.Anthropic, role: Any) -> None:
    types = set()
    for kind in _BLOCKS:
        block = _example(kind)
        result = [{"type": "tool_result", "tool_use_id": block["id"]}] if block["type"] == "tool_use" else "go on"
        turns: Any = [("user", "hi"), (role, [block]), ("user", result)]
        messages: Any = [{"role": speaker, "content": content} for speaker, content in turns]
        try:
            sdk.messages.count_tokens(model=MODEL, messages=messages)
            types.add(block["type"])
        except anthropic.BadRequestError as refused:
            error: Any = refused.body
            assert error["error"]["param"].startswith("messages[1].content[0]"), error
    usual = {"text", "search_result"} if role == "user" else {"text", "thinking", "redacted_thinking", "tool_use"}
    assert usual <= types


def test_tokens_are_counted(sdk: anthropic.Anthropic) -> None:
    counted = sdk.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert counted.input_tokens > 100  # with the agent's own prompt


def test_models_are_listed(sdk: anthropic.Anthropic) -> None:
    [model] = list(sdk.models.list())
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert sdk.models.retrieve(MODEL) == model
    with pytest.raises(anthropic.NotFoundError):
        sdk.models.retrieve("gone")


def test_request_id_is_known(sdk: anthropic.Anthropic) -> None:
    message = sdk.messages.create(**messages_body("say hello"))
    assert message._request_id is not None
    with pytest.raises(anthropic.BadRequestError) as refused:
        sdk.messages.create(**messages_body(" "))
    assert refused.value.request_id is not None
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]


def test_stream_resumes_after_last_event_id(hermes: Hermes, sdk: anthropic.Anthropic) -> None:
    with sdk.messages.with_streaming_response.create(**messages_body("say hello slowly"), stream=True) as response:
        events = list(anthropic.Stream.raw_events(response.http_response))
    numbered = [event for event in events if event.id]
    message_id = json.loads(numbered[0].data)["message"]["id"]
    headers = {"x-api-key": hermes.key, "Last-Event-ID": str(numbered[2].id)}
    with httpx.Client() as plain, plain.stream("GET", f"{hermes.url}/messages/{message_id}", headers=headers) as again:
        rest = [event for event in anthropic.Stream.raw_events(again) if event.id]
    assert [(event.event, event.data) for event in rest] == [(event.event, event.data) for event in numbered[3:]]


def test_ollama_finds_the_model(hermes: Hermes) -> None:
    headers = {"Authorization": f"Bearer {hermes.key}"}
    client = ollama.Client(host=hermes.url.removesuffix("/v1"), headers=headers, trust_env=False)
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    model_info = client.show(MODEL)
    assert model_info.capabilities is not None and "tools" in model_info.capabilities
    completion = client.generate(model=MODEL, prompt="say hello")
    assert completion.response == "".join(HELLO)
    pieces = [part.response for part in client.generate(model=MODEL, prompt="say hello", stream=True)]
    assert "".join(pieces) == "".join(HELLO)
    thought = client.chat(model=MODEL, messages=[{"role": "user", "content": "think, then say hello"}], think=True)
    assert thought.message.thinking == "".join(THOUGHT)
    question = {"role": "user", "content": "count pictures", "images": [PICTURE]}
    assert client.chat(model=MODEL, messages=[question]).message.content == "1 pictures."
