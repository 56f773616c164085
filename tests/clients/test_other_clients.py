"""The turns of `test_turns` through further clients in JavaScript and Go, and what each of them does beside."""

from __future__ import annotations

from typing import Any

import pytest

from clients.drivers import Conversation, How, Refused
from clients.scenes import CITY, FOUND, HELLO, LOOKING, REFUSAL, THOUGHT, WEATHER
from clients.server import Hermes
from clients.test_turns import Turns, both_ways

PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
IT_IS = f"It is {WEATHER}."


class MoreTurns(Turns):
    # What the client calls the length that an answer may have.
    limit = "maxTokens"

    @both_ways
    def test_pictures_are_sent_with_every_question(self, conversation: Any, stream: bool) -> None:
        assert conversation.show("count pictures", PICTURE, How(stream=stream)) == "1 pictures."
        assert conversation.show("count pictures", PICTURE, How(stream=stream)) == "2 pictures."

    @both_ways
    def test_conversation_continues_after_failure(self, conversation: Conversation, stream: bool) -> None:
        how = How(stream=stream, tools=True)
        with pytest.raises(Refused, match=REFUSAL):
            conversation.ask("use my weather, break once", how)
        assert conversation.ask("use my weather", how).text == IT_IS

    def test_truncated_answer_is_no_error(self, conversation: Conversation) -> None:
        answer = conversation.ask("say too much", How(stream=True, options={self.limit: 5}))
        assert answer.text == "".join(HELLO)


class TestLangChainNode(MoreTurns):
    driver = "npm.LangChainNodeTalk"

    @both_ways
    def test_outputs_are_resent_after_failure(self, conversation: Any, stream: bool) -> None:
        for chain in (False, True) if conversation.api == "responses" else (False,):
            how = How(stream=stream, tools=True, chain=chain)
            with pytest.raises(Refused, match=REFUSAL):
                conversation.ask("use my weather, break once", how)
            assert conversation.send_again(how)["text"] == IT_IS

    @both_ways
    def test_image_result_of_function_reaches_model(self, conversation: Any, stream: bool) -> None:
        result = conversation.call(prompt="use my weather", picture=True, stream=stream, tools=True)
        assert result["text"] == IT_IS
        assert conversation.ask("count pictures", How(stream=stream)).text == "1 pictures."

    @both_ways
    @pytest.mark.parametrize("through", ["chat", "responses"])
    def test_agent_loop(self, hermes: Hermes, stream: bool, through: str) -> None:
        conversation: Any = self.begin(hermes, "agent", hermes.key)

        def ask(prompt: str) -> dict[str, Any]:
            result: dict[str, Any] = conversation.call(prompt=prompt, stream=stream, through=through, tools=True)
            assert result["streamed"] == (result["text"] if stream else "")
            return result

        first = ask("use your list")
        assert (first["text"].endswith("".join(FOUND)), first["calls"]) == (True, [])
        twice = ask("use my weather twice")
        assert (twice["calls"], twice["results"]) == ([["weather", CITY], ["weather", {"city": "Rome"}]], 2)
        assert ask("use both")["text"] == f"2 results: {WEATHER}."
        with pytest.raises(Refused, match=REFUSAL):
            ask("look, then break")
        assert ask("count")["text"] == "4 questions so far."

    @both_ways
    @pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "encrypted"])
    def test_reasoning_is_sent_back_with_history(self, hermes: Hermes, stream: bool, is_stored: bool) -> None:
        conversation = self.begin(hermes, "responses", hermes.key)
        how = How(stream=stream, tools=True, options={"reasoning": {"summary": "auto"}, "zdrEnabled": not is_stored})
        for prompt in ("think, then say hello", "use your list", "use both"):
            conversation.ask(prompt, how)
        assert conversation.ask("count", how).text == "4 questions so far."


class TestXsAI(MoreTurns):
    driver = "npm.XsAITalk"
    apis = ("chat",)

    @both_ways
    def test_image_result_of_function_reaches_model(self, conversation: Any, stream: bool) -> None:
        result = conversation.call(prompt="use my weather", picture=True, stream=stream, tools=True)
        assert result["text"] == IT_IS
        assert conversation.ask("count pictures", How(stream=stream)).text == "1 pictures."

    def test_truncated_answer_is_continued(self, conversation: Conversation) -> None:
        """Without a stream the client sends what it has got, and asks for the rest of it."""
        assert conversation.ask("say too much", How(options={"maxTokens": 5})).text.startswith("".join(HELLO))


class TestOpenAIFetch(MoreTurns):
    driver = "npm.OpenAIFetchTalk"
    apis = ("chat",)
    limit = "max_tokens"


class TestLibreChat(MoreTurns):
    driver = "npm.LibreChatTalk"
    # It asks for no schema.
    test_answer_follows_schema = None  # type: ignore[assignment]

    @both_ways
    def test_conversation_continues(self, conversation: Conversation, stream: bool) -> None:  # type: ignore[override]
        """An agent keeps its tools: without them it would tell of its earlier calls as a user."""
        for prompt in ("use your list", "use my weather"):
            conversation.ask(prompt, How(stream=stream, tools=True))
        assert conversation.ask("count", How(stream=stream, tools=True)).text == "3 questions so far."

    def test_title_generation(self, hermes: Hermes, conversation: Any) -> None:
        result = conversation.call(prompt="use my weather", stream=True, tools=True, title="say hello")
        assert (result["text"], result["title"]) == (IT_IS, {"title": "".join(HELLO)})


class TestGoOpenAI(MoreTurns):
    driver = "go_openai.GoOpenAITalk"
    apis = ("chat",)
    limit = "max_tokens"


# ---- UI messages of the package `ai`

apis = pytest.mark.parametrize("api", ["chat", "responses", "compatible"])
SHOWN = [CITY, "output-available", WEATHER]


class TestChatPage:
    def begin(self, hermes: Hermes, api: str) -> Any:
        from clients.drivers.npm import ChatPage

        return ChatPage(hermes.url, hermes.key, api)

    @apis
    def test_tools_in_server_page_and_route(self, hermes: Hermes, api: str) -> None:
        """In the server, in the page, and in the route behind it, with and without a person's consent."""
        page = self.begin(hermes, api)
        listed = page.call(prompt="use your list")
        assert "".join(listed["text"]).replace("\n", "") == "".join([*LOOKING, *FOUND])
        assert (listed["calls"], len(listed["others"])) == ([], 1 if api == "responses" else 0)
        for how in ({"place": "page"}, {"place": "route"}, {"place": "asking", "agree": True}):
            result = page.call(prompt="use my weather", **how)
            assert (result["text"][-1], result["calls"]) == (IT_IS, [SHOWN])
        denied = page.call(prompt="use my weather", place="asking", agree=False)
        assert denied["calls"] == [[CITY, "output-denied", None]] and "denied" in denied["text"][-1]
        twice = page.call(prompt="use my weather twice", place="page")
        assert twice["calls"] == [SHOWN, [{"city": "Rome"}, "output-available", WEATHER]]
        both = page.call(prompt="use both", place="page")
        assert (both["text"][-1], both["calls"]) == (f"2 results: {WEATHER}.", [SHOWN])
        assert page.call(prompt="count", place="page")["text"] == ["8 questions so far."]
        again = page.call(place="page")
        assert (again["text"], again["messages"]) == (["8 questions so far."], 16)

    @apis
    def test_pictures_stay_with_their_messages(self, hermes: Hermes, api: str) -> None:
        page = self.begin(hermes, api)
        for number in (1, 2):
            assert page.call(prompt="count pictures", image=PICTURE)["text"] == [f"{number} pictures."]

    def test_image_result_of_tool_reaches_model(self, hermes: Hermes) -> None:
        page = self.begin(hermes, "responses")
        assert page.call(prompt="use my weather", place="picture")["text"] == [IT_IS]
        assert page.call(prompt="count pictures", place="picture")["text"] == ["1 pictures."]

    @apis
    def test_failure_is_shown_and_chat_continues(self, hermes: Hermes, api: str) -> None:
        page = self.begin(hermes, api)
        for failing in ("be refused", "look, then break", "break off"):
            with pytest.raises(Refused, match=REFUSAL):
                page.call(prompt=failing)
        assert page.call(prompt="say hello")["text"] == ["".join(HELLO)]

    @apis
    def test_outputs_are_resent_after_failure(self, hermes: Hermes, api: str) -> None:
        page = self.begin(hermes, api)
        with pytest.raises(Refused, match=REFUSAL):
            page.call(prompt="use my weather, break once", place="page")
        result = page.call(place="page", again=True)
        assert (result["text"][-1], result["calls"]) == (IT_IS, [SHOWN])

    @pytest.mark.parametrize("store", [True, False], ids=["stored", "encrypted"])
    def test_reasoning_is_sent_back_with_history(self, hermes: Hermes, store: bool) -> None:
        page = self.begin(hermes, "responses")
        options = {"reasoning": {"store": store}}
        assert page.call(prompt="think, then say hello", **options)["reasoning"] == ["".join(THOUGHT)]
        page.call(prompt="use both", place="page", **options)
        assert page.call(prompt="count", **options)["text"] == ["3 questions so far."]
