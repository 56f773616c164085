"""Responses that the server keeps, with the official package: read and followed again, continued, deleted."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from clients.drivers import MODEL
from clients.drivers.openai_sdk import client
from clients.scenes import HELLO
from clients.server import Hermes

TEXT = "".join(HELLO)


@pytest.fixture
def sdk(hermes: Hermes) -> Iterator[openai.OpenAI]:
    with client(hermes.url, hermes.key) as sdk:
        yield sdk


def test_response_is_retrieved_streamed_and_deleted(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model=MODEL, input="say hello")
    assert sdk.responses.retrieve(response.id) == response
    (input_item,) = sdk.responses.input_items.list(response.id)
    assert input_item.type == "message" and input_item.content[0].text == "say hello"
    with sdk.responses.stream(response_id=response.id) as events:
        assert events.get_final_response().output_text == TEXT
    sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(response.id)


def test_background_response(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model=MODEL, input="use your list", background=True)
    assert response.status in ("queued", "in_progress")
    followed = list(sdk.responses.retrieve(response.id, stream=True))
    assert followed[-1].type == "response.completed"
    result = sdk.responses.retrieve(response.id)
    assert result.status == "completed" and result == followed[-1].response
    with pytest.raises(openai.ConflictError):
        sdk.responses.cancel(response.id)


def test_responses_in_conversation(sdk: openai.OpenAI) -> None:
    conversation = sdk.conversations.create(metadata={"about": "counting"})
    for number in (1, 2):
        response = sdk.responses.create(model=MODEL, input="count", conversation=conversation.id)
        assert response.output_text == f"{number} questions so far."
        assert response.conversation is not None and response.conversation.id == conversation.id
    assert len(list(sdk.conversations.items.list(conversation.id))) == 4
    assert sdk.conversations.delete(conversation.id).deleted


def test_responses_over_websocket(sdk: openai.OpenAI) -> None:
    with sdk.responses.connect() as connection:
        connection.response.create(model=MODEL, input="count", store=False)
        first = next(event.response for event in connection if event.type == "response.completed")
        connection.response.create(model=MODEL, input="count", store=False, previous_response_id=first.id)
        second = next(event.response for event in connection if event.type == "response.completed")
    assert second.output_text == "2 questions so far."


def test_input_tokens_count(sdk: openai.OpenAI) -> None:
    few = sdk.responses.input_tokens.count(model=MODEL, input="say hello")
    assert few.object == "response.input_tokens" and few.input_tokens > 0
    more = sdk.responses.input_tokens.count(model=MODEL, input="say hello " * 500, instructions="Be brief.")
    assert more.input_tokens > few.input_tokens + 500


def test_azure_api_key_header(hermes: Hermes) -> None:
    with openai.AzureOpenAI(base_url=f"{hermes.url}//", api_key=hermes.key, api_version="preview") as azure:
        assert azure.responses.create(model=MODEL, input="say hello").output_text == TEXT
    wrong = openai.AzureOpenAI(base_url=hermes.url, api_key="wrong", api_version="preview")
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.responses.create(model=MODEL, input="say hello")
