"""The turns of `test_turns` as a client in Go takes them."""

from __future__ import annotations

from clients.test_turns import Turns


class TestGoOpenAI(Turns):
    driver = "go_openai.GoOpenAITalk"
    apis = ("chat",)
