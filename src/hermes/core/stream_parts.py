"""The parts of a model's answer: what every provider's stream is translated into, and what the assembler reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

FinishReason = Literal["stop", "tool_calls", "length", "content_filter", "error", "unknown"]
ReasoningForm = Literal["raw", "summary"]


@dataclass(slots=True)
class Text:
    text: str


@dataclass(slots=True)
class Reasoning:
    """Reasoning text; a signature closes the block of reasoning since the last signature."""

    text: str
    form: ReasoningForm = "raw"
    signature: str = ""


@dataclass(slots=True)
class ToolDelta:
    """A fragment of a tool call. With `whole`, `arguments` are all of them and replace the fragments so far."""

    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""
    extra: Any = None
    whole: bool = False


@dataclass(slots=True)
class Opaque:
    """Something the provider wants back, unread, on the next request. With `joins` it is a piece of one text."""

    kind: str
    data: Any
    joins: bool = False


@dataclass(slots=True)
class Usage:
    """Token counts; None is "not said". `input_tokens` holds every prompt token, cached ones included."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost_usd: float | None = None

    def updated(self, later: Usage) -> Usage:
        """What was said last wins, count by count."""
        merged = {f.name: b if (b := getattr(later, f.name)) is not None else getattr(self, f.name) for f in _COUNTS}
        return Usage(**merged)


_COUNTS = fields(Usage)


@dataclass(slots=True)
class Model:
    name: str


@dataclass(slots=True)
class Finish:
    """The answer is whole; nothing of it follows but usage."""

    reason: FinishReason


@dataclass(slots=True)
class ServerError:
    """The provider broke off with words of its own inside the stream."""

    status: int | None
    code: str
    message: str


Part = Text | Reasoning | ToolDelta | Opaque | Usage | Model | Finish | ServerError


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    extra: Any = None

    @classmethod
    def from_dict(cls, call: Mapping[str, Any]) -> ToolCall:
        function = call["function"]
        return cls(call["id"], function["name"], function["arguments"], call.get("extra_content"))

    def as_dict(self) -> dict[str, Any]:
        call: dict[str, Any] = {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        if self.extra is not None:
            call["extra_content"] = self.extra
        return call


@dataclass(slots=True)
class Assembled:
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    opaque: list[dict[str, Any]] = field(default_factory=list)
    usage: Usage | None = None
    model: str = ""
    finish_reason: FinishReason = "unknown"
    complete: bool = False
