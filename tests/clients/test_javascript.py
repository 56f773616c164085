"""The turns of `test_turns` through further JavaScript clients, and what each of them does beside."""

from __future__ import annotations

from clients.drivers import How, Talk
from clients.test_turns import Turns, both_ways


class TestLangChainNode(Turns):
    driver = "npm.LangChainNodeTalk"


class TestXsAI(Turns):
    driver = "npm.XsAITalk"
    apis = ("chat",)


class TestOpenAIFetch(Turns):
    driver = "npm.OpenAIFetchTalk"
    apis = ("chat",)


class TestLibreChat(Turns):
    driver = "npm.LibreChatTalk"
    # It asks for no schema.
    test_an_answer_follows_a_schema = None  # type: ignore[assignment]

    @both_ways
    def test_a_talk_goes_on(self, talk: Talk, stream: bool) -> None:  # type: ignore[override]
        """An agent keeps its tools: without them it would tell of its earlier calls as a user."""
        for prompt in ("use your list", "use my weather"):
            talk.ask(prompt, How(stream=stream, tools=True))
        assert talk.ask("count", How(stream=stream, tools=True)).text == "3 questions so far."
