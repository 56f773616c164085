"""CrewAI: an agent that uses its tool until its limit of iterations, and is then made to answer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

from clients.drivers import MODEL
from clients.scenes import WEATHER
from clients.server import Hermes
from support.model_server import Call, Reply, Request

LIMIT = 3
FORCED = "MUST give your absolute best final answer"
ANSWER = f"It is {WEATHER}."
ways = pytest.mark.parametrize(
    "way", [{}, {"stream": True}, {"api": "responses"}], ids=["chat", "chat-stream", "responses"]
)


@tool("weather")
def weather(city: str) -> str:
    """The weather in a city."""
    return WEATHER


@pytest.fixture
def model(hermes: Hermes) -> Iterator[Any]:
    """The model, to be given an answer for one test."""
    before = hermes.model.handler
    yield hermes.model
    hermes.model.handler = before


@pytest.fixture(autouse=True)
def home(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps data of its own in the folder for applications."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))


def kickoff(hermes: Hermes, way: dict[str, Any], **more: Any) -> str:
    """Have a crew of one do its task."""
    llm = LLM(model=f"openai/{MODEL}", base_url=hermes.url, api_key=hermes.key, max_retries=0, **way)
    for name, value in more.items():
        object.__setattr__(llm, name, value)
    agent = Agent(
        role="Forecaster",
        goal="Tell the weather",
        backstory="You look out of the window.",
        llm=llm,
        tools=[weather],
        max_iter=LIMIT,
    )
    task = Task(description="What is the weather in Paris?", expected_output="A sentence.", agent=agent)
    return str(Crew(agents=[agent], tasks=[task]).kickoff().raw)


def asked_last(request: Request) -> str:
    return request.turns[-1].text


@ways
def test_crew_reaches_iteration_limit(hermes: Hermes, model: Any, way: dict[str, Any]) -> None:
    """The model never stops by itself; the last request has no functions and every call and result of before."""

    def reply(request: Request) -> Reply:
        if FORCED in asked_last(request):
            return Reply(text=ANSWER, continues=False)
        return Reply(
            tool_calls=[Call("weather", {"city": "Paris"}, id=f"call_{secrets.token_hex(8)}")], continues=False
        )

    model.handler = reply
    before = len(model.requests)
    assert kickoff(hermes, way) == ANSWER
    assert len(model.requests) - before == LIMIT + 1
    roles = [turn.role for turn in model.requests[-1].turns if turn.role != "system"]
    assert roles == ["user", *["assistant", "tool"] * LIMIT, "user"]


@ways
def test_crew_answers_before_limit(hermes: Hermes, model: Any, way: dict[str, Any]) -> None:
    def reply(request: Request) -> Reply:
        if request.turns[-1].role == "tool":
            return Reply(text=ANSWER, continues=False)
        return Reply(
            tool_calls=[Call("weather", {"city": "Paris"}, id=f"call_{secrets.token_hex(8)}")], continues=False
        )

    model.handler = reply
    assert kickoff(hermes, way) == ANSWER


@pytest.mark.parametrize("way", [{}, {"stream": True}], ids=["plain", "stream"])
def test_crew_without_function_calling_uses_text_format(hermes: Hermes, model: Any, way: dict[str, Any]) -> None:
    """For models without functions calls are lines of text, and their results are lines of the assistant's own."""

    def reply(request: Request) -> Reply:
        if FORCED in asked_last(request):
            return Reply(text=f"Thought: Enough.\nFinal Answer: {ANSWER}", continues=False)
        return Reply(text='Thought: Look.\nAction: weather\nAction Input: {"city": "Paris"}\n', continues=False)

    model.handler = reply
    assert kickoff(hermes, way, supports_function_calling=lambda: False) == ANSWER
    texts = [turn.text for turn in model.requests[-1].turns]
    assert any(f"Observation: {WEATHER}" in text for text in texts)
