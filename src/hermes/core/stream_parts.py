"""The parts of a model's answer: what every provider's stream is translated into, and what the assembler reads."""

from __future__ import annotations

from typing import Literal

import msgspec

from hermes.core.json_types import JsonMapping, JsonObject

FinishReason = Literal["stop", "tool_calls", "length", "content_filter", "error", "unknown"]
ReasoningForm = Literal["raw", "summary"]


class Text(msgspec.Struct):
    text: str


class Reasoning(msgspec.Struct):
    """Reasoning text; a signature closes the block of reasoning since the last signature."""

    text: str
    form: ReasoningForm = "raw"
    signature: str = ""


class ToolDelta(msgspec.Struct):
    """A fragment of a tool call. With `whole`, `arguments` are all of them and replace the fragments so far."""

    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""
    extra: object = None
    whole: bool = False


class Opaque(msgspec.Struct):
    """Something the provider wants back, unread, on the next request. With `joins` it is a piece of one text."""

    kind: str
    data: object
    joins: bool = False


class Usage(msgspec.Struct):
    """Token counts; None is unknown. `input_tokens` includes cached prompt tokens."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost_usd: float | None = None

    def updated(self, later: Usage) -> Usage:
        """The later value wins, field by field."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(later), strict=True)
        return Usage(*(before if after is None else after for before, after in pairs))


class Model(msgspec.Struct):
    name: str


class Finish(msgspec.Struct):
    """The answer is complete; only usage may follow. `stop_sequence`: where it was stopped, if the provider says."""

    reason: FinishReason
    stop_sequence: str = ""


class ServerError(msgspec.Struct):
    """The provider sent an error inside the stream."""

    status: int | None
    code: str
    message: str


Part = Text | Reasoning | ToolDelta | Opaque | Usage | Model | Finish | ServerError


class ToolCall(msgspec.Struct):
    id: str
    name: str
    arguments: str
    extra: object = None

    @classmethod
    def from_dict(cls, call: JsonMapping) -> ToolCall:
        function = call["function"]
        return cls(call["id"], function["name"], function["arguments"], call.get("extra_content"))

    def as_dict(self) -> JsonObject:
        call: JsonObject = {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        if self.extra is not None:
            call["extra_content"] = self.extra
        return call


class Assembled(msgspec.Struct):
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = msgspec.field(default_factory=list)
    opaque: list[JsonObject] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    model: str = ""
    finish_reason: FinishReason = "unknown"
    complete: bool = False
    stop_sequence: str = ""
