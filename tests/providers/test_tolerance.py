"""Whatever a server sends, translating it does not fail."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes.core.stream_parts import Part
from hermes.providers.base import WireEvent, refusal_facts
from hermes.providers.registry import provider_for

MODES = ("chat_completions", "codex_responses", "anthropic_messages")
WORDS = [
    "type",
    "text",
    "delta",
    "content",
    "choices",
    "message",
    "role",
    "index",
    "id",
    "name",
    "function",
    "arguments",
    "tool_calls",
    "input",
    "output",
    "item",
    "response",
    "usage",
    "error",
    "code",
    "status",
    "model",
    "finish_reason",
    "stop_reason",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
    "thinking",
    "signature",
    "content_block",
    "partial_json",
    "output_index",
    "summary",
    "summary_index",
    "input_tokens",
    "output_tokens",
    "prompt_tokens",
    "cost",
    "details",
    "cache_read_input_tokens",
    "prompt_tokens_details",
    "incomplete_details",
    "reason",
    "refusal",
    "extra_content",
    "model_extra",
    "object",
    "phase",
]
KINDS = [
    "text",
    "thinking",
    "tool_use",
    "redacted_thinking",
    "text_delta",
    "thinking_delta",
    "signature_delta",
    "input_json_delta",
    "message_start",
    "content_block_start",
    "content_block_delta",
    "message_delta",
    "message_stop",
    "error",
    "response.output_text.delta",
    "response.created",
    "response.output_item.added",
    "response.output_item.done",
    "response.function_call_arguments.delta",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.reasoning_summary_part.added",
    "response.reasoning_text.delta",
    "function_call",
    "reasoning",
    "message",
    "output_text",
    "reasoning.summary",
    "reasoning.text",
    "failed",
    "incomplete",
    "deepseek-v4",
    "stop",
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(KINDS)
)
keys = st.sampled_from(WORDS) | st.text(max_size=4)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5), max_leaves=25
)
objects = st.dictionaries(keys, anything, max_size=6)
# Close to the real shapes, so that the deeper branches are reached.
chunks = st.fixed_dictionaries(
    {
        "choices": st.lists(
            st.fixed_dictionaries({}, optional=dict.fromkeys(WORDS[2:7], objects | anything)), max_size=2
        )
    },
    optional={"usage": objects | anything, "error": anything, "model": anything},
)
events = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional=dict.fromkeys(
        ("delta", "item", "response", "message", "content_block", "usage", "error"), objects | anything
    ),
)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None)
@given(data=anything | objects | chunks | events, name=st.sampled_from(KINDS), whole=st.booleans())
def test_parts_tolerate_any_input_property(mode: str, data: Any, name: str, whole: bool) -> None:
    provider = provider_for(mode)
    event = WireEvent(name, data, whole)
    first = list(provider.parts(event))
    assert all(isinstance(part, Part) for part in first)
    assert repr(list(provider.parts(event))) == repr(first)


@settings(max_examples=100, deadline=None)
@given(status=st.integers(400, 599), body=st.binary(max_size=200) | objects.map(lambda o: repr(o).encode()))
def test_facts_tolerate_any_input_property(status: int, body: bytes) -> None:
    assert refusal_facts(status, {"Retry-After": "3"}, body).status == status
