"""The same turns through every client: nothing crashes, no text is lost, no tool of the server is taken for the client's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from clients.drivers import MODEL, Conversation, How, Refused
from clients.scenes import CITY, FOUND, HELLO, LOOKING, PERSON, REFUSAL, TOKENS, WEATHER
from clients.server import Hermes

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
# A failure before anything was shown has a status of its own, one behind it is a part of the stream.
failing_both_ways = pytest.mark.parametrize(
    ("failing", "steps", "stream"),
    [("be refused", 1, False), ("be refused", 1, True), ("look, then break", 2, True)],
    ids=["plain", "stream", "late"],
)


def every_entrance(test: Any) -> Any:
    """A test for further entrances of a client too, which read answers and failures with code of their own."""
    test.every_entrance = True
    return test


class Turns:
    """What is asked of every client, through each protocol that it speaks. What a server makes of a request is the business
    of `tests/server`; here is what a client makes of the answer."""

    # Imported by the first test: some libraries take seconds.
    driver: str
    apis: tuple[str, ...] = ("chat", "responses")
    # Further entrances to one of these protocols.
    entrances: tuple[str, ...] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "api" in metafunc.fixturenames:
            everywhere = hasattr(metafunc.function, "every_entrance")
            metafunc.parametrize("api", self.apis + (self.entrances if everywhere else ()))

    def begin(self, hermes: Hermes, api: str, key: str) -> Conversation:
        module, name = self.driver.split(".")
        conversation: Conversation = getattr(import_module(f"clients.drivers.{module}"), name)(hermes.url, key, api)
        return conversation

    @pytest.fixture
    def conversation(self, hermes: Hermes, api: str) -> Iterator[Conversation]:
        conversation = self.begin(hermes, api, hermes.key)
        yield conversation
        conversation.close()

    @every_entrance
    @both_ways
    def test_text_is_complete(self, conversation: Conversation, stream: bool) -> None:
        answer = conversation.ask("say hello slowly", How(stream=stream))
        assert (answer.text, answer.calls, answer.tokens) == ("".join(HELLO), [], TOKENS)
        assert not (stream and conversation.shows_pieces) or answer.pieces > 1

    @both_ways
    @pytest.mark.parametrize(
        ("using", "tools"), [("use your list", False), ("misuse your list", True)], ids=["alone", "beside-its-own"]
    )
    def test_server_tool_is_not_treated_as_client_tool(
        self, hermes: Hermes, conversation: Conversation, stream: bool, tools: bool, using: str
    ) -> None:
        before = len(hermes.model.requests)
        answer = conversation.ask(using, How(stream=stream, tools=tools))
        assert answer.calls == []
        assert answer.text.endswith("".join(FOUND))
        # A plain chat completion has room for the final text only.
        assert answer.text.startswith("".join(LOOKING)) or (conversation.api != "responses" and not stream)
        assert len(hermes.model.requests) - before == 2

    def test_instructions_reach_model(self, hermes: Hermes, conversation: Conversation) -> None:
        conversation.ask("say hello", How(system="Speak like a sailor."))
        assert "Speak like a sailor." in hermes.model.requests[-1].turns[0].text

    @every_entrance
    @both_ways
    def test_client_function_is_called_twice_in_one_step(self, conversation: Conversation, stream: bool) -> None:
        answer = conversation.ask("use my weather twice", How(stream=stream, tools=True))
        assert answer.text == f"{WEATHER} and {WEATHER}"
        assert answer.calls == [("weather", CITY), ("weather", {"city": "Rome"})]

    @both_ways
    def test_client_and_server_tools_in_one_step(self, conversation: Conversation, stream: bool) -> None:
        """Chat clients never saw the server's own result: it is put back. What a client of the other protocol was shown
        and does not send again is left out."""
        answer = conversation.ask("use both", How(stream=stream, tools=True))
        results = 2 if conversation.api != "responses" or conversation.returns_server_items else 1
        assert (answer.text, answer.calls) == (f"{results} results: {WEATHER}.", [("weather", CITY)])

    @both_ways
    def test_answer_follows_schema(self, conversation: Conversation, stream: bool) -> None:
        assert conversation.ask("name a person", How(stream=stream, schema=True)).value == PERSON

    @both_ways
    @pytest.mark.parametrize("chain", [False, True], ids=["history", "chain"])
    def test_conversation_continues(self, conversation: Conversation, stream: bool, chain: bool) -> None:
        """The second question comes with the history as the client keeps it, tool items and all."""
        if chain and not (conversation.chains and conversation.api == "responses"):
            pytest.skip("this client always sends the history")
        conversation.ask("use your list", How(stream=stream, chain=chain))
        conversation.ask("use my weather", How(stream=stream, chain=chain, tools=True))
        assert conversation.ask("count", How(stream=stream, chain=chain)).text == "3 questions so far."

    def test_wrong_key_is_reported(self, api: str, hermes: Hermes) -> None:
        conversation = self.begin(hermes, api, key="wrong")
        with pytest.raises(Refused, match="Incorrect API key provided") as refused:
            conversation.ask("say hello")
        assert refused.value.status == 401

    def test_invalid_field_is_reported(self, conversation: Conversation) -> None:
        name, value = conversation.bad_option
        with pytest.raises(Refused, match=name.removeprefix("max_")) as refused:
            conversation.ask("say hello", How(stream=True, options={name: value}))
        assert refused.value.status == 400

    @every_entrance
    @failing_both_ways
    def test_model_failure_is_reported_and_not_retried(
        self, hermes: Hermes, conversation: Conversation, stream: bool, failing: str, steps: int
    ) -> None:
        before = len(hermes.model.requests)
        with pytest.raises(Refused, match=REFUSAL) as refused:
            conversation.ask(failing, How(stream=stream))
        # A stream has no status of its own; some clients make one up.
        assert refused.value.status in ((None, 500) if stream else (502,))
        assert len(hermes.model.requests) - before == steps

    def test_broken_stream_is_an_error(self, conversation: Conversation) -> None:
        with pytest.raises(Refused, match=REFUSAL):
            conversation.ask("break off", How(stream=True))


class TestOpenAI(Turns):
    driver = "openai_sdk.OpenAITalk"


class TestOpenAINode(Turns):
    driver = "node.OpenAINodeTalk"

    def test_response_is_stored(self, hermes: Hermes) -> None:
        conversation: Any = self.begin(hermes, "keep", hermes.key)
        result = conversation.call()
        assert result["texts"] == ["".join(HELLO)] * 3
        assert result["given"] == ["say hello"]
        assert result["after"] == 404
        assert result["models"] == [MODEL]


class TestAnthropic(Turns):
    driver = "anthropic_sdk.AnthropicTalk"
    apis = ("messages", "runner")
    entrances = ("async",)


class TestAnthropicNode(Turns):
    driver = "node.AnthropicNodeTalk"
    apis = ("messages",)


class TestOllama(Turns):
    driver = "ollama_sdk.OllamaTalk"
    apis = ("chat",)
    entrances = ("async",)

    @both_ways
    def test_client_and_server_tools_in_one_step(self, conversation: Conversation, stream: bool) -> None:
        """Calls have no ids in this protocol, so what the server did beside them is not found again."""
        answer = conversation.ask("use both", How(stream=stream, tools=True))
        assert (answer.text, answer.calls) == (f"1 results: {WEATHER}.", [("weather", CITY)])


class TestVercel(Turns):
    driver = "node.VercelTalk"
    apis = ("chat", "responses", "compatible")


class TestAgents(Turns):
    driver = "agents_sdk.AgentsTalk"


class TestLiteLLM(Turns):
    driver = "litellm_sdk.LiteLLMTalk"

    def test_response_is_stored(self, hermes: Hermes) -> None:
        conversation: Any = self.begin(hermes, "responses", hermes.key)
        conversation.ask("say hello")
        assert conversation.text_of(conversation.last) == "".join(HELLO)
        assert conversation.delete(conversation.last)
        with pytest.raises(Refused):
            conversation.text_of(conversation.last)


class TestLangChain(Turns):
    driver = "langchain_sdk.LangChainTalk"


class TestPydanticAI(Turns):
    driver = "pydantic_ai_sdk.PydanticAITalk"


class TestLLM(Turns):
    driver = "llm_command.LLMTalk"

    def test_command_line_client(self, hermes: Hermes) -> None:
        conversation: Any = self.begin(hermes, "chat", hermes.key)
        command = [sys.executable, "-m", "llm", "-m", "chat", "--key", hermes.key, "say hello"]
        result = subprocess.run(
            command, env=os.environ | conversation.environment, capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stdout, result.stderr) == (0, "".join(HELLO) + "\n", "")
