"""A model that repeats itself is stopped, and the answer says so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from multidict import CIMultiDict

from hermes.http_client.exchange import Answer
from hermes.local.client import _REPEATS, _RewrittenAnswer

LOOP = "Monday: pasta with tomatoes. "


class Endless(Answer):
    """The stream of a model that writes the same for ever."""

    def __init__(self, head: str) -> None:
        self.status, self.headers, self.is_stream, self.is_json = 200, CIMultiDict[str](), True, False
        self._head = head
        self.count = 0

    async def read(self) -> bytes:
        self.count += 1
        text = self._head if self.count == 1 else LOOP
        chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("chooses", "head", "begins"),
    [
        ("", "", LOOP),
        ("all", '{"answer": "', LOOP),
        ("rest", "day. ", "day. "),
        ("all", '{"tool": "write_file", "arguments": {"path": "plan.txt", "content": "', "\n\n["),
    ],
    ids=["free text", "answer", "rest of an answer", "call"],
)
async def test_loop_ends_answer_with_a_word_on_it(chooses: str, head: str, begins: str) -> None:
    notices: list[tuple[str, str]] = []
    stream = Endless(head)
    answer = _RewrittenAnswer(stream, chooses, lambda code, message: notices.append((code, message)))
    frames: list[Any] = []
    while data := await answer.read():
        frames += [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    assert frames.pop() == b"[DONE]" and stream.count < 100
    choices = [json.loads(frame)["choices"][0] for frame in frames]
    assert not any("tool_calls" in choice["delta"] for choice in choices)
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text.startswith(begins) and text.endswith(f"\n\n[{_REPEATS}]")
    assert choices[-1]["finish_reason"] == "stop" and notices == [("model_repeats", _REPEATS)]
