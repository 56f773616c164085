"""What a failure is, what is done about it, and what is said about it, row by row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes.agent.call import facts_of
from hermes.agent.decisions import ENDS, Action, CallState, decide
from hermes.core.failures import (
    KINDS,
    FailureFacts,
    Kind,
    classify,
    explain,
    rejected_option,
)
from hermes.http_client.exchange import ConnectFailed, RequestTimeout, StaleStream, StreamBroken, TlsFailed
from hermes.providers.base import refusal_facts

# --- classify: what the servers say ----------------------------------------------------------------------------------


def openai(
    message: str, code: str | None = None, type_: str = "invalid_request_error", param: str | None = None
) -> Any:
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def anthropic(message: str, type_: str = "invalid_request_error") -> Any:
    return {"type": "error", "error": {"type": type_, "message": message}, "request_id": "req_011"}


def vllm(message: str, code: int = 400, type_: str = "BadRequestError") -> Any:
    return {"object": "error", "message": message, "type": type_, "param": None, "code": code}


def google(message: str, code: int, status: str) -> Any:
    return {"error": {"code": code, "message": message, "status": status}}


def openrouter(message: str, code: int, raw: str) -> Any:
    return {"error": {"message": message, "code": code, "metadata": {"provider_name": "X", "raw": raw}}}


REFUSALS: list[tuple[Kind, int, Any]] = [
    # context_overflow: code or text about the window
    (
        "context_overflow",
        400,
        openai(
            "This model's maximum context length is 128000 tokens. However, your messages resulted in 130112 tokens.",
            "context_length_exceeded",
            param="messages",
        ),
    ),
    (
        "context_overflow",
        400,
        openai("Your input exceeds the context window of this model. Please adjust your input and try again."),
    ),
    ("context_overflow", 400, anthropic("prompt is too long: 205123 tokens > 200000 maximum")),
    (
        "context_overflow",
        400,
        anthropic("input length and `max_tokens` exceed context limit: 199000 + 8192 > 200000, decrease input length"),
    ),
    (
        "context_overflow",
        400,
        vllm(
            "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4000 in the "
            "messages, 1000 in the completion). Please reduce the length of the messages or completion."
        ),
    ),
    (
        "context_overflow",
        400,
        vllm("The decoder prompt (length 9001) is longer than the maximum model length of 8192."),
    ),
    (
        "context_overflow",
        400,
        google(
            "The input token count (1250000) exceeds the maximum number of tokens allowed (1048576).",
            400,
            "INVALID_ARGUMENT",
        ),
    ),
    (
        "context_overflow",
        400,
        {
            "error": {
                "code": 400,
                "message": "the request exceeds the available context size, try increasing it",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 9000,
                "n_ctx": 4096,
            }
        },
    ),
    (
        "context_overflow",
        400,
        openrouter("Provider returned error", 400, '{"error":{"message":"prompt is too long: 9 tokens > 8 maximum"}}'),
    ),
    ("context_overflow", 413, anthropic("Prompt is too long")),
    (
        "context_overflow",
        422,
        {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 `inputs` tokens"},
    ),
    # payload_too_large
    ("payload_too_large", 413, anthropic("Request exceeds the maximum size", "request_too_large")),
    ("payload_too_large", 413, "<html><head><title>413 Request Entity Too Large</title></head></html>"),
    # option_rejected: 400/422 naming an optional parameter
    (
        "option_rejected",
        400,
        openai(
            "Unsupported parameter: 'temperature' is not supported with this model.",
            "unsupported_parameter",
            param="temperature",
        ),
    ),
    (
        "option_rejected",
        400,
        openai(
            "Unsupported value: 'temperature' does not support 0.2 with this model. Only the default (1) value is "
            "supported.",
            "unsupported_value",
            param="temperature",
        ),
    ),
    (
        "option_rejected",
        400,
        openai(
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
            "unsupported_parameter",
            param="max_tokens",
        ),
    ),
    ("option_rejected", 400, openai("Unknown parameter: 'reasoning.effort'.", "unknown_parameter", param="reasoning.effort")),
    ("option_rejected", 400, openai("Unrecognized request argument supplied: stream_options")),
    ("option_rejected", 400, openai("'stream_options' is not supported by this model")),
    ("option_rejected", 400, openai("Stream options are not supported.", param="stream_options")),
    ("option_rejected", 400, openai("unknown field: parallel_tool_calls")),
    ("option_rejected", 400, anthropic("`temperature` is deprecated for this model.")),
    ("option_rejected", 400, anthropic("top_p: Extra inputs are not permitted")),
    ("option_rejected", 400, anthropic("thinking: Extra inputs are not permitted")),
    ("option_rejected", 400, anthropic("system.0.cache_control: Extra inputs are not permitted")),
    (
        "option_rejected",
        422,
        {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted", "input": 1}]},
    ),
    (
        "option_rejected",
        400,
        vllm(
            "[{'type': 'extra_forbidden', 'loc': ('body', 'stream_options'), 'msg': 'Extra inputs are not permitted', "
            "'input': {'include_usage': True}}]"
        ),
    ),
    (
        "option_rejected",
        400,
        google(
            'Invalid JSON payload received. Unknown name "frequency_penalty": Cannot find field.', 400, "INVALID_ARGUMENT"
        ),
    ),
    ("option_rejected", 400, openai("property 'reasoning' is unsupported")),
    # stream_unsupported
    ("stream_unsupported", 400, openai("This model does not support streaming.")),
    ("stream_unsupported", 400, openai("Streaming is not supported for this model", param="stream")),
    (
        "stream_unsupported",
        400,
        openai("Unsupported value: 'stream' does not support true with this model.", "unsupported_value", param="stream"),
    ),
    ("stream_unsupported", 400, vllm("Streaming isn't supported by this deployment")),
    ("stream_unsupported", 422, {"error": "stream=true is not allowed for this endpoint"}),
    # timeout, overloaded, server_error
    ("timeout", 408, "Request Timeout"),
    ("timeout", 504, "<html>504 Gateway Time-out</html>"),
    ("overloaded", 503, openai("The engine is currently overloaded, please try again later", type_="server_error")),
    ("overloaded", 503, google("The model is overloaded. Please try again later.", 503, "UNAVAILABLE")),
    ("overloaded", 529, anthropic("Overloaded", "overloaded_error")),
    ("server_error", 500, openai("The server had an error while processing your request.", type_="server_error")),
    ("server_error", 500, anthropic("Internal server error", "api_error")),
    ("server_error", 502, "<html><h1>502 Bad Gateway</h1></html>"),
    ("server_error", 520, "error code: 520"),
    ("server_error", 500, vllm("The model context length could not be read", 500, "InternalServerError")),
    # rate_limit and billing
    (
        "rate_limit",
        429,
        openai("Rate limit reached for m in organization org-x on tokens per min (TPM).", "rate_limit_exceeded", "tokens"),
    ),
    (
        "rate_limit",
        429,
        anthropic("This request would exceed your organization's rate limit of 40,000 input tokens per minute.", "rate_limit_error"),
    ),
    ("rate_limit", 429, openrouter("Provider returned error", 429, "m is temporarily rate-limited upstream.")),
    ("rate_limit", 429, ""),
    (
        "billing",
        429,
        openai(
            "You exceeded your current quota, please check your plan and billing details.",
            "insufficient_quota",
            "insufficient_quota",
        ),
    ),
    ("billing", 429, {"error": {"message": "Your account has insufficient balance.", "type": "exceeded_current_quota_error"}}),
    ("billing", 402, openrouter("Insufficient credits", 402, "")),
    ("billing", 402, {"error": {"message": "Insufficient Balance", "type": "unknown_error", "code": "invalid_request_error"}}),
    (
        "billing",
        400,
        anthropic("Your credit balance is too low to access the API. Please go to Plans & Billing to upgrade."),
    ),
    ("billing", 403, openai("Your account is not active, please check your billing details.", "billing_not_active")),
    # auth, forbidden, model_not_found
    ("auth", 401, openai("Incorrect API key provided: sk-***.", "invalid_api_key")),
    ("auth", 401, anthropic("invalid x-api-key", "authentication_error")),
    ("auth", 401, ""),
    ("forbidden", 403, anthropic("Your API key does not have permission to use the specified resource.", "permission_error")),
    ("forbidden", 403, openai("Country, region, or territory not supported", "unsupported_country_region_territory")),
    ("model_not_found", 404, openai("The model `m` does not exist or you do not have access to it.", "model_not_found")),
    ("model_not_found", 404, anthropic("model: claude-x", "not_found_error")),
    ("model_not_found", 404, vllm("The model `m` does not exist.", 404, "NotFoundError")),
    ("model_not_found", 404, {"error": {"message": "model 'llama9' not found, try pulling it first", "type": "api_error"}}),
    ("model_not_found", 400, openrouter("m/x is not a valid model ID", 400, "")),
    ("model_not_found", 400, openai("invalid model ID")),
    # image_rejected
    ("image_rejected", 400, openai("Invalid content type. image_url is only supported by certain models.")),
    ("image_rejected", 404, openrouter("No endpoints found that support image input", 404, "")),
    ("image_rejected", 400, anthropic("messages.0.content.1.image.source.base64: image exceeds 5 MB maximum: 6 MB > 5 MB")),
    ("image_rejected", 400, anthropic("Could not process image")),
    ("image_rejected", 400, vllm("m is not a multimodal model")),
    ("image_rejected", 400, openai("You uploaded an unsupported image. Please make sure your image is valid.", "image_parse_error")),
    ("image_rejected", 400, openai("This model does not support image inputs.")),
    ("image_rejected", 400, openai("Invalid image data.", "invalid_image")),
    ("image_rejected", 400, openai("Error while downloading https://example.com/a.png.", "invalid_image_url")),
    ("image_rejected", 400, openai("The image data you provided does not represent a valid image.")),
    ("image_rejected", 400, openai("Unable to process input image. Please retry.")),
    ("image_rejected", 400, openai("Failed to deserialize: messages[1]: unknown variant `image_url`, expected `text`")),
    ("image_rejected", 400, vllm("At most 1 image(s) may be provided in one request.")),
    ("image_rejected", 400, anthropic("At least one of the image dimensions exceed max allowed size: 8000 pixels")),
    ("image_rejected", 400, anthropic("messages.0.content.1.image.source.base64.data: The image was specified using the image/jpeg media type, but the image appears to be a image/png image")),
    ("bad_request", 400, openai("Invalid value: the revision is not provisioned.")),
    ("image_rejected", 500, vllm("image input is not supported - hint: if this is unexpected, you may need to provide the mmproj", 500, "server_error")),
    # opaque_rejected
    ("opaque_rejected", 400, anthropic("messages.1.content.0: Invalid `signature` in `thinking` block")),
    (
        "opaque_rejected",
        400,
        anthropic(
            "messages.3.content.0: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be "
            "modified. These blocks must remain as they were in the original response."
        ),
    ),
    (
        "opaque_rejected",
        400,
        openai("The encrypted content gAAA... could not be verified.", "invalid_encrypted_content"),
    ),
    (
        "opaque_rejected",
        400,
        google("Corrupted thought signature.", 400, "INVALID_ARGUMENT"),
    ),
    # policy_blocked
    (
        "policy_blocked",
        400,
        openai(
            "The response was filtered due to the prompt triggering Azure OpenAI's content management policy.",
            "content_filter",
            param="prompt",
        ),
    ),
    ("policy_blocked", 400, openai("Your request was rejected as a result of our safety system.", "content_policy_violation")),
    ("policy_blocked", 403, openrouter("m requires moderation. Your input was flagged for \"violence\"", 403, "")),
    ("policy_blocked", 400, openai("Invalid prompt: your prompt was flagged as potentially violating our usage policy.", "invalid_prompt")),
    # bad_request: other 400, 409, 422
    ("bad_request", 400, openai("We could not parse the JSON body of your request.")),
    ("bad_request", 409, anthropic("The request conflicts with the current state", "conflict_error")),
    ("bad_request", 422, {"detail": [{"type": "missing", "loc": ["body", "messages"], "msg": "Field required"}]}),
    ("bad_request", 400, openai("Invalid schema for function 'f': None is not of type 'object'.", "invalid_function_parameters", param="tools[0].function.parameters")),
    ("bad_request", 400, anthropic("messages: roles must alternate between \"user\" and \"assistant\"")),
    ("bad_request", 400, openai("An assistant message with 'tool_calls' must be followed by tool messages.", param="messages.[2].role")),
    ("bad_request", 400, anthropic("messages.2: `tool_use` ids were found without `tool_result` blocks immediately after")),
    ("bad_request", 418, "I'm a teapot"),
]  # fmt: skip


def refusal_facts_of(status: int, body: Any, **headers: str) -> FailureFacts:
    data = body if isinstance(body, str) else json.dumps(body)
    return refusal_facts(status, headers, data.encode())


@pytest.mark.parametrize(
    ("kind", "status", "body"), REFUSALS, ids=[f"{k}-{s}-{i}" for i, (k, s, _) in enumerate(REFUSALS)]
)
def test_classify_by_status_and_text(kind: Kind, status: int, body: Any) -> None:
    assert classify(refusal_facts_of(status, body)) == kind


OPTIONS_NAMED = [
    (openai("Unsupported parameter: 'temperature'", "unsupported_parameter", param="temperature"), "temperature"),
    (openai("Unknown parameter: 'reasoning.effort'.", "unknown_parameter", param="reasoning.effort"), "reasoning"),
    (openai("Unrecognized request argument supplied: stream_options"), "stream_options"),
    (openai("'reasoning_effort' does not support 'minimal' with this model", "unsupported_value"), "reasoning_effort"),
    (anthropic("top_p: Extra inputs are not permitted"), "top_p"),
    (anthropic("`temperature` is deprecated for this model."), "temperature"),
    ({"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}, "seed"),
    (openai("Unsupported parameter: 'messages'", "unsupported_parameter", param="messages"), None),
    (openai("temperature must be between 0 and 2", param="temperature"), None),
]


@pytest.mark.parametrize(("body", "option"), OPTIONS_NAMED)
def test_rejected_option_is_extracted(body: Any, option: str | None) -> None:
    assert rejected_option(refusal_facts_of(400, body)) == option
    assert rejected_option(refusal_facts_of(500, body)) is None


# --- classify: what the transport says -------------------------------------------------------------------------------

REQUEST = httpx.Request("POST", "https://host.test/v1")
TRANSPORT: list[tuple[Kind, Exception]] = [
    ("connect", ConnectFailed("Connection refused")),
    ("connect", httpx.ConnectError("All connection attempts failed")),
    ("connect", httpx.ConnectTimeout("timed out")),
    ("connect", ConnectionRefusedError(111, "Connection refused")),
    ("stream_lost", StreamBroken("cut", answered=True)),
    ("stream_lost", httpx.RemoteProtocolError("peer closed connection without sending complete message body")),
    ("stream_lost", httpx.ReadError("")),
    ("stream_lost", httpx.ReadTimeout("timed out")),
    ("stream_lost", ConnectionResetError(104, "Connection reset by peer")),
    ("stream_lost", BrokenPipeError(32, "Broken pipe")),
    ("stale", StaleStream("Nothing came for 180 s.", answered=True)),
    ("timeout", RequestTimeout("The exchange took longer than 1800 s.")),
    ("tls", TlsFailed("The certificate could not be verified.")),
    ("unknown", RuntimeError("something")),
    ("unknown", RuntimeError("connection lost")),
    ("unknown", ValueError("HTTP 429 rate limit, context length exceeded")),
    ("stream_unsupported", RuntimeError("streaming is not supported by this model")),
    ("stream_unsupported", Exception("Stream not supported")),
]


@pytest.mark.parametrize(("kind", "error"), TRANSPORT, ids=[f"{k}-{type(e).__name__}" for k, e in TRANSPORT])
def test_classify_by_exception(kind: Kind, error: Exception) -> None:
    assert classify(facts_of(error)) == kind


VENDOR: list[tuple[Kind, Callable[[Any], Exception]]] = [
    ("connect", lambda sdk: sdk.APIConnectionError(request=REQUEST)),
    ("timeout", lambda sdk: sdk.APITimeoutError(request=REQUEST)),
    ("stream_lost", lambda sdk: sdk.APIError("Network connection lost.", request=REQUEST, body=None)),
    ("unknown", lambda sdk: sdk.APIError("Invalid model configuration.", request=REQUEST, body=None)),
    ("rate_limit", lambda sdk: _status_error(sdk, "RateLimitError", 429, "slow down")),
    ("auth", lambda sdk: _status_error(sdk, "AuthenticationError", 401, "bad key")),
    ("bad_request", lambda sdk: _status_error(sdk, "BadRequestError", 400, "nonsense")),
    ("server_error", lambda sdk: _status_error(sdk, "InternalServerError", 500, "oops")),
]


def _status_error(sdk: Any, name: str, status: int, message: str) -> Exception:
    response = httpx.Response(status, request=REQUEST)
    return getattr(sdk, name)(message, response=response, body=None)  # type: ignore[no-any-return]


@pytest.mark.parametrize("library", ["openai", "anthropic"])
@pytest.mark.parametrize(("kind", "make"), VENDOR, ids=[str(i) + k for i, (k, _) in enumerate(VENDOR)])
def test_classify_vendor_library_exceptions(library: str, kind: Kind, make: Callable[[Any], Exception]) -> None:
    assert classify(facts_of(make(pytest.importorskip(library)))) == kind


ANSWERED = FailureFacts("stream", exception=("StreamBroken", "TransportError"), message="cut")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("stream_lost", {}),
        ("stream_lost_text", {"delivered": 3}),
        ("stream_lost_tool", {"drafting": ("f",)}),
        ("stream_lost_tool", {"delivered": 3, "drafting": ("f",)}),
        ("stale", {"stale": True, "delivered": 3}),
        ("interrupted", {"interrupted": True}),
        ("interrupted", {"interrupted": True, "status": 500}),
        ("deadline", {"deadline": True, "status": 500}),
    ],
)
def test_classify_lost_stream_by_progress(kind: Kind, changes: dict[str, Any]) -> None:
    assert classify(replace(ANSWERED, **changes)) == kind


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("stream_lost", {"message": "Network connection lost."}),
        ("stream_lost", {"message": "upstream connection was closed prematurely"}),
        ("rate_limit", {"status": 429, "message": "slow down"}),
        ("rate_limit", {"code": "rate_limit_exceeded"}),
        ("overloaded", {"status": 529, "code": "overloaded_error", "message": "Overloaded"}),
        ("server_error", {"code": "server_error"}),
        ("context_overflow", {"code": "context_length_exceeded", "message": "too long"}),
        ("billing", {"code": "insufficient_quota"}),
        ("local_unavailable", {"code": "local_unavailable"}),
        ("local_memory", {"code": "local_memory"}),
        ("unknown", {"message": "something else"}),
    ],
)
def test_classify_error_event_in_stream(kind: Kind, fields: dict[str, Any]) -> None:
    assert classify(FailureFacts("stream", exception=("ServerErrorEvent",), **fields)) == kind


def test_classify_non_json_event_as_lost_stream() -> None:
    assert classify(FailureFacts("decode", message="not valid JSON")) == "stream_lost"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("filtered", {"finish_reason": "content_filter", "delivered": 5}),
        ("truncated_text", {"finish_reason": "length", "delivered": 5}),
        ("truncated_text", {"finish_reason": "length"}),
        ("truncated_tool", {"finish_reason": "length", "has_calls": True}),
        ("truncated_tool", {"finish_reason": "tool_calls", "has_calls": True, "calls_cut": True}),
        ("bad_structure", {"finish_reason": "stop", "delivered": 5, "structure_fault": "no JSON"}),
        ("empty", {"finish_reason": "stop"}),
        ("empty", {"finish_reason": "tool_calls"}),
        ("empty", {"finish_reason": "tool_calls", "call_missing": True}),
        ("missing_call", {"finish_reason": "stop", "delivered": 3, "call_missing": True}),
        ("truncated_text", {"finish_reason": "length", "delivered": 3, "call_missing": True}),
    ],
)
def test_classify_useless_complete_answer(kind: Kind, fields: dict[str, Any]) -> None:
    assert classify(FailureFacts("finish", **fields)) == kind


@given(
    st.builds(
        FailureFacts,
        st.sampled_from(["connect", "headers", "stream", "body", "decode", "finish"]),
        status=st.none() | st.integers(100, 599),
        code=st.sampled_from(["", "server_error", "x"]),
        exception=st.just(()) | st.just(("Exception",)),
        message=st.text(max_size=80),
        delivered=st.integers(0, 3),
    )
)
@settings(deadline=None)
def test_every_failure_is_classified_property(facts: FailureFacts) -> None:
    assert classify(facts) in get_args(Kind)


# --- decide ----------------------------------------------------------------------------------------------------------

ALL: frozenset[Action] = frozenset(
    {
        "unstream",
        "drop_option",
        "compact",
        "shrink_images",
        "describe_images",
        "drop_opaque",
        "raise_output",
        "halve_context",
    }
)


def walk(kind: Kind, *, keys: int = 1, routes: int = 2, possible: frozenset[Action] = ALL, **fields: Any) -> list[str]:
    """The actions of a failure that happens again after each of them, to the end."""
    tried: Counter[Action] = Counter()
    actions: list[str] = []
    while True:
        remaining: set[Action] = {"rotate"} if tried["rotate"] < keys else set()
        remaining |= {"fallback"} if tried["fallback"] < routes else set()
        decision = decide(kind, CallState(tried=dict(tried), possible=possible | remaining, **fields))
        actions.append(decision.action)
        if decision.action in ENDS:
            return actions
        tried[decision.action] += 1
        assert len(actions) < 50


def row(text: str) -> list[str]:
    """`"reconnect*2 fallback give_up"` as a list."""
    out: list[str] = []
    for step in text.split():
        name, _, count = step.partition("*")
        out += [name] * int(count or 1)
    return out


# One key and two routes to spare, everything possible, nothing delivered, R 2, N 3.
ROWS: dict[Kind, str] = {
    "interrupted": "keep_partial",
    "connect": "reconnect*2 retry*3 fallback*2 give_up",
    "stream_lost": "reconnect*2 retry*3 fallback*2 give_up",
    "stale": "reconnect*2 retry*3 fallback*2 give_up",
    "stream_unsupported": "unstream give_up",
    "option_rejected": "drop_option*4 give_up",
    "timeout": "retry fallback*2 give_up",
    "overloaded": "retry fallback*2 retry*2 give_up",
    "server_error": "retry*3 fallback*2 give_up",
    "rate_limit": "rotate fallback*2 retry*3 give_up",
    "billing": "rotate fallback*2 give_up",
    "auth": "rotate fallback*2 give_up",
    "forbidden": "fallback*2 give_up",
    "model_not_found": "fallback*2 give_up",
    "context_overflow": "compact*3 give_up",
    "payload_too_large": "shrink_images compact*3 describe_images give_up",
    "image_rejected": "shrink_images describe_images give_up",
    "opaque_rejected": "drop_opaque give_up",
    "policy_blocked": "fallback*2 give_up",
    "filtered": "give_up",
    "bad_request": "give_up",
    "tls": "give_up",
    "truncated_text": "continue*3 give_up",
    "truncated_tool": "raise_output*2 nudge give_up",
    "answer_too_long": "give_up",
    "bad_structure": "repair give_up",
    "empty": "nudge retry*2 fallback*2 give_up",
    "missing_call": "nudge accept",
    "local_unavailable": "fallback*2 give_up",
    "local_memory": "halve_context fallback*2 give_up",
    "deadline": "give_up",
    "unknown": "retry fallback*2 give_up",
}
# The same after three characters of delivered text, where that makes a difference.
ROWS_WITH_TEXT: dict[Kind, str] = {
    "stream_lost_text": "continue*3 fallback*2 keep_partial",
    "stream_lost_tool": "continue*2 fallback*2 keep_partial",
    "stale": "continue*3 fallback*2 keep_partial",
    "filtered": "keep_partial",
    "truncated_text": "continue*3 keep_partial",
    "truncated_tool": "raise_output*2 nudge keep_partial",
    "answer_too_long": "keep_partial",
    "deadline": "keep_partial",
    "interrupted": "keep_partial",
}


@pytest.mark.parametrize(("kind", "expected"), ROWS.items())
def test_recovery_decisions_per_kind(kind: Kind, expected: str) -> None:
    assert walk(kind) == row(expected)


@pytest.mark.parametrize(("kind", "expected"), ROWS_WITH_TEXT.items())
def test_recovery_decisions_after_delivered_text(kind: Kind, expected: str) -> None:
    assert walk(kind, delivered=3) == row(expected)


def test_recovery_tables_cover_every_kind() -> None:
    turn_kinds = {"max_iterations", "invalid_calls", "session_busy", "server_restarted", "crash_loop"}
    turn_kinds.add("store_unavailable")
    assert set(ROWS) | set(ROWS_WITH_TEXT) == set(get_args(Kind)) - turn_kinds


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        # a call begun
        ("stream_lost_tool", {"drafting": ("f",)}, "reconnect*2 fallback*2 give_up"),
        ("stale", {"drafting": ("f",)}, "reconnect*2 fallback*2 give_up"),
        ("stale", {"drafting": ("f",), "delivered": 3}, "continue*2 fallback*2 keep_partial"),
        # R and N
        ("connect", {"reconnects_max": 0, "retries_max": 1}, "retry fallback*2 give_up"),
        ("connect", {"reconnects_max": 5, "retries_max": 0}, "reconnect*5 fallback*2 give_up"),
        ("stream_lost_tool", {"delivered": 1, "reconnects_max": 0}, "fallback*2 keep_partial"),
        ("overloaded", {"retries_max": 1}, "retry fallback*2 give_up"),
        # nothing left to fall back to
        ("connect", {"routes": 0}, "reconnect*2 retry*3 give_up"),
        ("stream_lost_text", {"routes": 0, "delivered": 3}, "continue*3 keep_partial"),
        ("overloaded", {"routes": 0}, "retry*3 give_up"),
        ("rate_limit", {"routes": 0, "keys": 0}, "retry*3 give_up"),
        ("auth", {"routes": 0, "keys": 3}, "rotate*3 give_up"),
        ("billing", {"routes": 1, "keys": 0}, "fallback give_up"),
        # a short Retry-After is worth waiting for
        ("rate_limit", {"retry_after_s": 10.0}, "rotate retry*3 give_up"),
        ("rate_limit", {"retry_after_s": 10.1}, "rotate fallback*2 retry*3 give_up"),
        ("rate_limit", {"retry_after_s": 601.0}, "rotate fallback*2 give_up"),
        # what is not possible is passed over
        ("context_overflow", {"larger_window": True, "routes": 1}, "compact*3 fallback give_up"),
        ("context_overflow", {"larger_window": True, "routes": 1, "possible": frozenset()}, "fallback give_up"),
        ("payload_too_large", {"possible": frozenset({"compact"})}, "compact*3 give_up"),
        ("payload_too_large", {"possible": frozenset({"shrink_images"})}, "shrink_images give_up"),
        ("image_rejected", {"possible": frozenset({"describe_images"})}, "describe_images give_up"),
        ("stream_unsupported", {"possible": frozenset()}, "give_up"),
        ("option_rejected", {"possible": frozenset()}, "give_up"),
        ("opaque_rejected", {"possible": frozenset()}, "give_up"),
        ("truncated_tool", {"possible": frozenset(), "delivered": 3}, "nudge keep_partial"),
        ("local_memory", {"possible": frozenset(), "routes": 0}, "give_up"),
        # an answer that is reasoning alone
        ("empty", {"possible": frozenset({"excerpt"}), "routes": 1}, "nudge retry*2 fallback excerpt"),
        ("truncated_text", {"possible": frozenset({"excerpt"})}, "continue*3 excerpt"),
        ("truncated_text", {"possible": frozenset({"excerpt"}), "own_limit": True}, "keep_partial"),
        # the caller's own limit
        ("truncated_text", {"own_limit": True, "delivered": 3}, "keep_partial"),
        ("truncated_text", {"own_limit": True}, "keep_partial"),
        # a worker that died is started once more
        ("local_unavailable", {"worker_died": True, "routes": 1}, "reconnect fallback give_up"),
        # a stop wins over every row
        ("connect", {"interrupted": True}, "keep_partial"),
        ("stream_lost_text", {"interrupted": True, "delivered": 3}, "keep_partial"),
        ("bad_request", {"interrupted": True}, "keep_partial"),
    ],
)
def test_recovery_skips_unavailable_actions(kind: Kind, fields: dict[str, Any], expected: str) -> None:
    assert walk(kind, **fields) == row(expected)


@pytest.mark.parametrize("kind", sorted(set(ROWS) | set(ROWS_WITH_TEXT)))
@pytest.mark.parametrize("delivered", [0, 3])
def test_recovery_stops_at_deadline(kind: Kind, delivered: int) -> None:
    (end,) = walk(kind, time_left_s=0.0, delivered=delivered)
    assert end == walk(kind, delivered=delivered)[-1]


@pytest.mark.parametrize(
    ("kind", "remaining", "expected"),
    [
        ("connect", 1.0, "reconnect*2 fallback*2 give_up"),
        ("connect", 3.0, "reconnect*2 retry fallback*2 give_up"),
        ("connect", 0.01, "fallback*2 give_up"),
        ("stream_lost_text", 0.01, "fallback*2 keep_partial"),
        ("server_error", 5.0, "retry*2 fallback*2 give_up"),
        ("unknown", 1.0, "fallback*2 give_up"),
        ("auth", 0.01, "rotate fallback*2 give_up"),
    ],
)
def test_retry_wait_past_deadline_is_not_started(kind: Kind, remaining: float, expected: str) -> None:
    delivered = 3 if kind == "stream_lost_text" else 0
    assert walk(kind, time_left_s=remaining, delivered=delivered) == row(expected)


def test_retry_after_past_deadline_is_not_waited_for() -> None:
    assert walk("rate_limit", routes=0, keys=0, retry_after_s=5.0, time_left_s=4.0) == ["give_up"]
    assert walk("rate_limit", routes=0, keys=0, retry_after_s=5.0, time_left_s=6.0) == row("retry*3 give_up")


@given(st.floats(0, 1), st.integers(0, 9))
def test_backoff_grows_with_jitter(jitter: float, before: int) -> None:
    state = CallState(tried={"retry": before}, retries_max=99, jitter=jitter)
    base = min(60, 2 ** (before + 1))
    assert base <= decide("server_error", state).wait_seconds <= 1.5 * base
    assert 0.05 <= decide("connect", CallState(jitter=jitter)).wait_seconds <= 0.3


@pytest.mark.parametrize("seconds", [0.0, 0.5, 7.0, 61.0, 600.0])
def test_retry_after_is_obeyed(seconds: float) -> None:
    decision = decide("rate_limit", CallState(retry_after_s=seconds, jitter=0.9))
    assert (decision.action, decision.wait_seconds) == ("retry", seconds)


@pytest.mark.parametrize("action", ["rotate", "fallback", "compact", "unstream", "nudge", "repair"])
def test_request_changing_actions_do_not_wait(action: Action) -> None:
    kinds: dict[str, Kind] = {
        "rotate": "auth",
        "fallback": "forbidden",
        "compact": "context_overflow",
        "unstream": "stream_unsupported",
        "nudge": "empty",
        "repair": "bad_structure",
    }
    decision = decide(kinds[action], CallState(possible=ALL | {"rotate", "fallback"}, jitter=1.0))
    assert (decision.action, decision.wait_seconds) == (action, 0.0)


def test_decision_note_names_skipped_actions() -> None:
    decision = decide("connect", CallState(tried={"reconnect": 2, "retry": 3}))
    assert decision.action == "give_up"
    assert all(action in decision.note for action in ("reconnect", "retry", "fallback"))


# --- explain ---------------------------------------------------------------------------------------------------------


def explained(kind: Kind, message: str = "", *, has_text: bool = False, own_limit: bool = False) -> Any:
    return explain(kind, status=400, provider="p", message=message, has_text=has_text, own_limit=own_limit)


CODES: dict[Kind, str] = {
    "auth": "provider_auth_failed",
    "billing": "provider_quota_exceeded",
    "rate_limit": "provider_rate_limited",
    "model_not_found": "provider_model_not_found",
    "timeout": "provider_timeout",
    "stale": "provider_timeout",
    "bad_request": "provider_rejected_request",
    "forbidden": "provider_rejected_request",
    "tls": "provider_rejected_request",
    "image_rejected": "provider_rejected_request",
    "option_rejected": "provider_rejected_request",
    "opaque_rejected": "provider_rejected_request",
    "context_overflow": "context_length_exceeded",
    "payload_too_large": "context_length_exceeded",
    "policy_blocked": "content_policy_violation",
    "bad_structure": "structured_output_failed",
    "deadline": "turn_timeout",
    "connect": "provider_unavailable",
    "stream_lost": "provider_unavailable",
    "stream_lost_text": "provider_unavailable",
    "stream_lost_tool": "provider_unavailable",
    "overloaded": "provider_unavailable",
    "server_error": "provider_unavailable",
    "local_unavailable": "provider_unavailable",
    "local_memory": "provider_unavailable",
    "server_restarted": "server_restarted",
    "crash_loop": "server_restarted",
    "store_unavailable": "session_db_unavailable",
    "session_busy": "session_busy",
    "empty": "agent_incomplete",
    "missing_call": "agent_incomplete",
    "invalid_calls": "agent_incomplete",
    "unknown": "agent_incomplete",
    "interrupted": "interrupted",
}
# kind: (code with text, code without)
CUT: dict[Kind, tuple[str, str]] = {
    "truncated_text": ("output_truncated", "agent_incomplete"),
    "truncated_tool": ("output_truncated", "agent_incomplete"),
    "answer_too_long": ("output_truncated", "agent_incomplete"),
    "max_iterations": ("max_iterations", "agent_incomplete"),
    "filtered": ("content_filter", "content_policy_violation"),
}


@pytest.mark.parametrize(("kind", "code"), CODES.items())
@pytest.mark.parametrize("has_text", [False, True])
def test_error_code_of_kind(kind: Kind, code: str, has_text: bool) -> None:
    failure = explained(kind, has_text=has_text)
    assert (failure.kind, failure.code, failure.partial_only) == (kind, code, False)


@pytest.mark.parametrize(("kind", "codes"), CUT.items())
def test_error_code_of_truncation(kind: Kind, codes: tuple[str, str]) -> None:
    assert (explained(kind, has_text=True).code, explained(kind).code) == codes
    assert explained(kind, has_text=True).partial_only


def test_truncation_by_own_limit_without_text_is_output_truncated() -> None:
    assert explained("truncated_text", own_limit=True).code == "output_truncated"


def test_every_kind_has_code_and_sentence() -> None:
    assert set(CODES) | set(CUT) | {"stream_unsupported"} == set(get_args(Kind))
    assert explained("stream_unsupported").code in ("provider_unavailable", "provider_rejected_request")
    for kind in get_args(Kind):
        assert KINDS[kind].sentence.endswith(".") and explained(kind).message == KINDS[kind].sentence


@pytest.mark.parametrize("kind", ["truncated_text", "truncated_tool"])
def test_truncation_sentences_say_truncated(kind: Kind) -> None:
    assert "truncated" in explained(kind).message


def test_missing_local_model_error_suggests_setup() -> None:
    assert "hermes setup" in explained("local_unavailable").message


def test_error_message_puts_own_sentence_before_provider_text() -> None:
    assert explained("overloaded", "Try later.").message == f"{KINDS['overloaded'].sentence} Try later."


@given(st.text(max_size=700) | st.text(alphabet="a\x00\x1b\x7f\x85\n\t ", max_size=700))
def test_provider_text_in_error_is_short_and_printable(text: str) -> None:
    message = explained("unknown", text).message
    assert message.startswith(KINDS["unknown"].sentence)
    assert len(message) <= len(KINDS["unknown"].sentence) + 1 + 500
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in message)


def test_short_provider_text_is_not_truncated() -> None:
    assert explained("unknown", "x" * 500).message.endswith(" " + "x" * 500)


# --- rejected options ------------------------------------------------------------------------------------------------


OPTION_REJECTIONS = [
    (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
        "max_tokens",
    ),
    (
        "Unsupported parameter: 'max_completion_tokens' is not supported here; use 'max_tokens' instead.",
        "max_completion_tokens",
    ),
    ("'temperature' is not supported with this model; set 'reasoning_effort' instead.", "temperature"),
    ("tool_choice 'required' is not supported when thinking is enabled", "tool_choice"),
    ("This model does not support tools; send user messages only", None),
    ("This model does not support tools, text only", None),
    ("Your request asks for something that is not supported; stop sending it", None),
    ("This endpoint does not support files; include a link", None),
    ("Images are not supported with reasoning models", None),
    ("Unsupported parameter: 'user' is not supported with this model.", "user"),
    ("`stop` is not supported with this model", "stop"),
    ('"reasoning" is not supported with this model', "reasoning"),
    ("Unsupported parameter: 'text' is not supported with this model.", "text"),
    ("Unsupported value: 'include' does not support this", "include"),
]


@pytest.mark.parametrize(("message", "option"), OPTION_REJECTIONS)
def test_rejected_option_is_distinguished_from_mentioned_ones(message: str, option: str | None) -> None:
    facts = FailureFacts("headers", status=400, message=message)
    assert rejected_option(facts) == option
    assert (classify(facts) == "option_rejected") == (option is not None)


def test_rejected_option_from_param_field_wins() -> None:
    text = "Unsupported parameter: use 'max_completion_tokens' instead of what you sent."
    facts = FailureFacts("headers", status=400, code="unsupported_parameter", param="user", message=text)
    assert rejected_option(facts) == "user"
