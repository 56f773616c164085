"""The result of a turn."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from hermes.core.failures import Kind
from hermes.core.json_types import Message


class UsageDetails(TypedDict):
    cache_read_tokens: int | None
    cache_write_tokens: int | None
    reasoning_tokens: int | None
    cost_usd: float | None


class Result(TypedDict):
    """Every ending has every key. A dict, because the contract's `run_conversation` returns one.

    `prompt_tokens` is there when only they were asked for, `stop_sequence` where the answer is known to be stopped at one.
    """

    final_response: str
    last_reasoning: str | None
    messages: list[Message]
    api_calls: int
    completed: bool
    partial: bool
    failed: bool
    interrupted: bool
    error: str | None
    error_code: str | None
    failure: Kind | None
    retry_after_s: float | None
    run_id: str
    session_id: str
    model: str
    provider: str
    pending_calls: list[Message]
    pending_steer: str | None
    ignored_options: list[str]
    warnings: list[dict[str, str]]
    input_tokens: int
    output_tokens: int
    total_tokens: int
    usage_details: UsageDetails
    prompt_tokens: NotRequired[int]
    stop_sequence: NotRequired[str]
