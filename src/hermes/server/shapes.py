"""What answers look like, as types: those of turns. The API's description of them is made of these."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from hermes.core.json_types import JsonObject

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "error"]


class Usage(Struct, kw_only=True):
    """Tokens of a turn; those that came from a cache are among the input tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: JsonObject | UnsetType = UNSET
    output_tokens_details: JsonObject | UnsetType = UNSET


class ChatUsage(Struct, kw_only=True):
    """Tokens of a turn, as chat completions name them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: JsonObject
    completion_tokens_details: JsonObject


class ChatAnswer(Struct, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    annotations: list[Any]
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[JsonObject] | UnsetType = UNSET


class Choice(Struct, kw_only=True):
    index: int
    message: ChatAnswer
    logprobs: None
    finish_reason: FinishReason


class ChatCompletion(Struct, kw_only=True):
    """A chat completion. `hermes` is there only when the turn did not end well, or is not kept."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: str
    choices: list[Choice]
    usage: ChatUsage
    hermes: JsonObject | UnsetType = UNSET


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]


class MessageUsage(Struct, kw_only=True):
    """Tokens of a turn, as the Messages protocol counts them: what came from a cache is not among the input tokens."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class MessageAnswer(Struct, kw_only=True):
    """A message of the Messages protocol. `hermes` is there only when the turn did not end well, or is not kept."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[JsonObject]
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    usage: MessageUsage
    hermes: JsonObject | UnsetType = UNSET


class TokenCount(Struct, kw_only=True):
    input_tokens: int


class Response(Struct, kw_only=True):
    """A response: what was asked for, and the items that came of it. `hermes` is there only where it is not kept."""

    id: str
    object: Literal["response"]
    created_at: float
    completed_at: float | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    incomplete_details: JsonObject | None
    error: JsonObject | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[JsonObject]
    tools: list[JsonObject]
    tool_choice: str | JsonObject
    parallel_tool_calls: bool
    max_tool_calls: int | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    text: JsonObject
    reasoning: JsonObject
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None
    usage: Usage
    hermes: JsonObject | UnsetType = UNSET
    conversation: JsonObject | UnsetType = UNSET
    user: str | UnsetType = UNSET


class ResponseDeleted(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(Struct, kw_only=True, tag_field="object", tag="list"):
    data: list[JsonObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Struct, kw_only=True):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Compaction(Struct, kw_only=True):
    """A conversation made short: an item that stands for it as input."""

    id: str
    object: Literal["response.compaction"]
    created_at: float
    output: list[JsonObject]
    usage: Usage


class SessionCompacted(Struct, kw_only=True):
    """What a compaction came to; the counts of tokens are missing where there was nothing to make shorter."""

    object: Literal["hermes.session.compaction"]
    session_id: str
    run_id: str
    compacted: bool
    messages_archived: int
    tokens_before: int | None
    tokens_after: int | None
    usage: JsonObject


class SessionTurn(Struct, kw_only=True):
    object: Literal["hermes.session.chat.completion"]
    session_id: str
    run_id: str
    message: JsonObject
    usage: Usage
    completed: bool
    partial: bool
    interrupted: bool
    hermes: JsonObject | UnsetType = UNSET
