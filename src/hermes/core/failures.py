"""Failures of a model call: the facts, the kind that follows from them, and the texts for it. Pure, and mostly tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hermes.core.limits import PROVIDER_WORDS_CHARS_MAX, REDACTED_AT_ONCE_CHARS_MAX
from hermes.core.stream_parts import FinishReason

Phase = Literal["connect", "headers", "stream", "body", "decode", "finish"]
Kind = Literal[
    "interrupted",
    "connect",
    "stream_lost",
    "stream_lost_text",
    "stream_lost_tool",
    "stale",
    "stream_unsupported",
    "option_rejected",
    "timeout",
    "overloaded",
    "server_error",
    "rate_limit",
    "billing",
    "auth",
    "forbidden",
    "model_not_found",
    "context_overflow",
    "payload_too_large",
    "image_rejected",
    "opaque_rejected",
    "policy_blocked",
    "filtered",
    "bad_request",
    "tls",
    "truncated_text",
    "truncated_tool",
    "answer_too_long",
    "bad_structure",
    "empty",
    "missing_call",
    "local_unavailable",
    "local_memory",
    "deadline",
    "unknown",
    "max_iterations",
    "invalid_calls",
    "session_busy",
    "server_restarted",
    "crash_loop",
    "store_unavailable",
]


@dataclass(frozen=True, slots=True)
class FailureFacts:
    """All that is known about a failed attempt.

    `exception` holds the class names of the exception, most specific first. The fields from `delivered` on describe the
    answer so far.
    """

    phase: Phase
    status: int | None = None
    code: str = ""
    param: str = ""
    exception: tuple[str, ...] = ()
    message: str = ""
    retry_after_s: float | None = None
    delivered: int = 0
    drafting: tuple[str, ...] = ()
    finish_reason: FinishReason | None = None
    has_calls: bool = False
    calls_cut: bool = False
    call_missing: bool = False
    structure_fault: str = ""
    stale: bool = False
    interrupted: bool = False
    deadline: bool = False

    def __post_init__(self) -> None:
        # Used on the event loop only.
        object.__setattr__(self, "message", self.message[:REDACTED_AT_ONCE_CHARS_MAX])


@dataclass(frozen=True, slots=True)
class Failure:
    """The message for the user: our sentence, then the provider's message, redacted."""

    kind: Kind
    status: int | None
    provider: str
    message: str
    retryable: bool
    code: str
    retry_after_s: float | None = None

    @property
    def partial_only(self) -> bool:
        return self.code in CUT_CODES


# --- what happened -------------------------------------------------------------------------------------------------

_CONNECT = {
    "ConnectFailed",
    "ConnectError",
    "ConnectTimeout",
    "ClientConnectorError",
    "ConnectionRefusedError",
    "gaierror",
    "APIConnectionError",
}
_LOST = {
    "StreamBroken",
    "RemoteProtocolError",
    "ReadError",
    "ReadTimeout",
    "WriteError",
    "CloseError",
    "NetworkError",
    "ClientPayloadError",
    "ServerDisconnectedError",
    "ClientOSError",
    "ConnectionResetError",
    "BrokenPipeError",
    "IncompleteReadError",
}
_TLS = {"TlsFailed", "SSLCertVerificationError", "ClientConnectorCertificateError"}
_TIMEOUT = {"RequestTimeout", "APITimeoutError"}

_BY_STATUS: dict[int, Kind] = {
    401: "auth",
    402: "billing",
    403: "forbidden",
    404: "model_not_found",
    408: "timeout",
    413: "payload_too_large",
    429: "rate_limit",
    503: "overloaded",
    504: "timeout",
    529: "overloaded",
}
_BY_CODE: dict[str, Kind] = {
    "insufficient_quota": "billing",
    "billing_error": "billing",
    "billing_hard_limit_reached": "billing",
    "invalid_api_key": "auth",
    "no_api_key": "auth",
    "authentication_error": "auth",
    "permission_error": "forbidden",
    "model_not_found": "model_not_found",
    "not_found_error": "model_not_found",
    "context_length_exceeded": "context_overflow",
    "request_too_large": "payload_too_large",
    "content_policy_violation": "policy_blocked",
    "content_filter": "policy_blocked",
    **dict.fromkeys(
        ("invalid_image", "invalid_image_format", "invalid_image_url", "image_parse_error", "image_too_large"),
        "image_rejected",
    ),
    "invalid_encrypted_content": "opaque_rejected",
    "rate_limit_error": "rate_limit",
    "rate_limit_exceeded": "rate_limit",
    "overloaded_error": "overloaded",
    "server_is_overloaded": "overloaded",
    "timeout_error": "timeout",
    "api_error": "server_error",
    "server_error": "server_error",
    "local_unavailable": "local_unavailable",
    "local_memory": "local_memory",
    "answer_too_long": "answer_too_long",
}
# Kinds by the error's text, whatever the status; the first match wins.
_WORDS: tuple[tuple[Kind, str], ...] = (
    (
        "context_overflow",
        r"context.{0,12}(length|window|size)|maximum (context|model length)|too many (input )?tokens|prompt is too long|"
        r"(exceeds?|larger than|longer than) .{0,40}(context|token limit|model length|maximum .{0,12}tokens)|"
        r"input is too long|tokens.{0,30} must be <=",
    ),
    (
        "image_rejected",
        r"(?<![a-z])(image|vision|multimodal).{0,60}(not supported|unsupported|not (allowed|enabled|valid)|cannot|too large|invalid|"
        r"could not (be )?process|exceed|only supported|may be provided|appears to be|does not represent)|"
        r"(not support|unsupported|invalid|(unable|failed|could not|cannot).{0,20}(process|decode|download|fetch|load|read|"
        r"open)|unknown variant).{0,40}(?<![a-z])(image|vision)|not a (multimodal|vision)|no endpoints.{0,40}image",
    ),
    (
        "opaque_rejected",
        r"(thought|thinking|reasoning).{0,40}signature|signature.{0,40}(thinking|invalid|mismatch|block)|"
        r"thinking.{0,60}(cannot be modified|must remain|unexpected)|"
        r"encrypted.{0,20}(content|reasoning).{0,40}(invalid|verif|decrypt|could not)",
    ),
    ("policy_blocked", r"content (management )?policy|safety system|moderation|flagged as|usage polic"),
    (
        "model_not_found",
        r"model.{0,80}(not found|does not exist|not available|unknown)|(unknown|no such|invalid) model|not a valid model",
    ),
    ("billing", r"credit balance|insufficient (funds|credits|quota|balance)|billing"),
)
_REFUSALS = tuple((kind, re.compile(pattern, re.I)) for kind, pattern in _WORDS)
# Statuses for which the text counts, and the kinds it may give; empty means all.
_TELLING: dict[int, frozenset[Kind]] = {
    **dict.fromkeys((400, 404, 409, 413, 422), frozenset()),
    403: frozenset({"policy_blocked", "billing"}),
    429: frozenset({"billing"}),
    500: frozenset({"image_rejected"}),
}
_NO_STREAM = re.compile(
    r"stream(ing)?\b.{0,40}(not|n't|un)\s?(be )?(supported|available|allowed|enabled)|"
    r"(not support|unsupported|does not allow).{0,40}\bstream(ing)?\b",
    re.I,
)
_CONNECTION_WORDS = re.compile(
    r"connection (was )?(lost|closed|reset|aborted|error|interrupted)|network (connection|error)|"
    r"(upstream|peer).{0,30}(closed|reset|disconnect)|premature|incomplete chunked",
    re.I,
)
_PROVIDER_EVENTS = {"APIError", "ServerErrorEvent"}

OPTIONS = (
    "stream_options",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_sequences",
    "logit_bias",
    "reasoning_effort",
    "reasoning_content",
    "reasoning",
    "thinking",
    "verbosity",
    "text",
    "service_tier",
    "prompt_cache_key",
    "parallel_tool_calls",
    "user",
    "metadata",
    "safety_identifier",
    "include",
    "cache_control",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "output_config",
    "response_format",
    "tool_choice",
)
_EVERYDAY = frozenset({"user", "text", "stop", "include", "reasoning", "seed", "thinking", "metadata"})
_OPTION_WORDS = re.compile(
    r"unsupported (parameter|value)|unrecogni[sz]ed|not (supported|permitted|allowed)|unknown (parameter|field|argument|name)|"
    r"unexpected (keyword|parameter|field|argument)|deprecated|extra (inputs|fields)|does(n't| not) support|not support|is unsupported",
    re.I,
)


def rejected_option(facts: FailureFacts) -> str | None:
    if facts.status not in (400, 422):
        return None
    param = re.split(r"[.\[]", facts.param)[0] if facts.param else ""
    says_so = facts.code in ("unsupported_parameter", "unknown_parameter", "unsupported_value") or bool(
        _OPTION_WORDS.search(facts.message)
    )
    if not says_so:
        return None
    if param in OPTIONS:
        return param
    # The first that is named is the one refused; a later one may be what to use instead.
    mentions = [(match.start(), -len(name), name) for name in OPTIONS if (match := _mention(name, facts.message))]
    return min(mentions)[2] if mentions else None


def _mention(name: str, text: str) -> re.Match[str] | None:
    """Where a parameter is named. Everyday words count only in quotes or in a path."""
    if name in _EVERYDAY:
        return re.search(
            rf"(?:[\"'`.]{name}[\"'`.\[]|^{name}:|\b(?:parameter|argument|field|property)s?:? {name}\b)", text
        )
    return re.search(rf"(?<!\w){name}(?!\w)", text)


def refuses_streaming(message: str) -> bool:
    return bool(_NO_STREAM.search(message))


def classify(facts: FailureFacts) -> Kind:
    if facts.interrupted:
        return "interrupted"
    if facts.deadline:
        return "deadline"
    if facts.stale:
        return "stale"
    if facts.phase == "finish":
        return _classify_answer(facts)
    names = set(facts.exception)
    if names & _TLS:
        return "tls"
    if facts.status is not None and facts.status >= 300:
        return _classify_status(facts)
    if facts.code in _BY_CODE:
        return _BY_CODE[facts.code]
    if refuses_streaming(facts.message):
        return "stream_unsupported"
    if names & _TIMEOUT:
        return "timeout"
    if names & _CONNECT and facts.phase in ("connect", "headers"):
        return "connect"
    broken = bool(names & (_LOST | _CONNECT)) or facts.phase == "decode"
    if broken or (names & _PROVIDER_EVENTS and _CONNECTION_WORDS.search(facts.message)):
        return lost(facts.delivered, facts.drafting)
    return "unknown"


def lost(delivered: int, drafting: tuple[str, ...]) -> Kind:
    """Which kind of lost stream it is, by what had been received."""
    if drafting:
        return "stream_lost_tool"
    return "stream_lost_text" if delivered else "stream_lost"


def _classify_answer(facts: FailureFacts) -> Kind:
    if facts.finish_reason == "content_filter":
        return "filtered"
    if facts.calls_cut or (facts.finish_reason == "length" and facts.has_calls):
        return "truncated_tool"
    if facts.finish_reason == "length":
        return "truncated_text"
    if facts.structure_fault:
        return "bad_structure"
    if not facts.delivered and not facts.has_calls:
        return "empty"
    return "missing_call" if facts.call_missing else "unknown"


def _classify_status(facts: FailureFacts) -> Kind:
    status = facts.status or 0
    if (kind := _BY_CODE.get(facts.code, "server_error")) != "server_error":
        return kind
    if refuses_streaming(facts.message) and rejected_option(facts) is None:
        return "stream_unsupported"
    if (telling := _TELLING.get(status)) is not None:
        for kind, pattern in _REFUSALS:
            if (not telling or kind in telling) and pattern.search(facts.message):
                return kind
        if rejected_option(facts):
            return "option_rejected"
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return "server_error" if status >= 500 else "bad_request"


# --- what to say about it ------------------------------------------------------------------------------------------


class ErrorCode(NamedTuple):
    """What an error code of the API means in each format.

    `status` is that of an answer without text; `alone` is the code that such an answer has instead. `incomplete_reason`
    and `response_error` are for `/v1/responses`.
    """

    status: int = 502
    finish_reason: Literal["stop", "length", "content_filter", "error"] = "error"
    alone: str = ""
    incomplete_reason: str = ""
    response_error: str = "server_error"


CODES: dict[str, ErrorCode] = {
    "output_truncated": ErrorCode(
        finish_reason="length", alone="agent_incomplete", incomplete_reason="max_output_tokens"
    ),
    "max_iterations": ErrorCode(finish_reason="length", alone="agent_incomplete", incomplete_reason="max_iterations"),
    "content_filter": ErrorCode(
        finish_reason="content_filter", alone="content_policy_violation", incomplete_reason="content_filter"
    ),
    "interrupted": ErrorCode(finish_reason="stop", alone="turn_cancelled"),
    "turn_cancelled": ErrorCode(409),
    "session_busy": ErrorCode(409),
    "context_length_exceeded": ErrorCode(400, response_error="invalid_prompt"),
    "content_policy_violation": ErrorCode(400, response_error="invalid_prompt"),
    "provider_rejected_request": ErrorCode(response_error="invalid_prompt"),
    "model_not_allowed": ErrorCode(403),
    "agent_error": ErrorCode(500),
    "rate_limit_exceeded": ErrorCode(response_error="rate_limit_exceeded"),
    "provider_rate_limited": ErrorCode(503, response_error="rate_limit_exceeded"),
    "server_restarted": ErrorCode(503),
    "server_shutdown": ErrorCode(503),
    "session_db_unavailable": ErrorCode(503),
    "local_unavailable": ErrorCode(503),
    "provider_timeout": ErrorCode(504),
    "turn_timeout": ErrorCode(504),
}
_OTHER_CODE = ErrorCode()
# The answer was cut rather than failed: its text stands.
CUT_CODES = frozenset(code for code, row in CODES.items() if row.incomplete_reason)


def error_code(code: str) -> ErrorCode:
    return CODES.get(code, _OTHER_CODE)


class FailureKind(NamedTuple):
    """The API's code for a kind of failure, whether to retry, and our sentence."""

    code: str
    retryable: bool
    sentence: str


KINDS: dict[Kind, FailureKind] = {
    "interrupted": FailureKind("interrupted", False, "The turn was stopped."),
    "connect": FailureKind("provider_unavailable", True, "The model provider could not be reached."),
    "stream_lost": FailureKind("provider_unavailable", True, "The connection to the model provider broke off."),
    "stream_lost_text": FailureKind(
        "provider_unavailable", True, "The connection to the model provider broke off mid-answer."
    ),
    "stream_lost_tool": FailureKind(
        "provider_unavailable", True, "The connection to the model provider broke off mid tool call."
    ),
    "stale": FailureKind("provider_timeout", True, "The model provider went silent."),
    "stream_unsupported": FailureKind("provider_rejected_request", False, "The model provider does not stream."),
    "option_rejected": FailureKind("provider_rejected_request", False, "The model provider refused a parameter."),
    "timeout": FailureKind("provider_timeout", True, "The model provider took too long."),
    "overloaded": FailureKind("provider_unavailable", True, "The model provider is overloaded."),
    "server_error": FailureKind("provider_unavailable", True, "The model provider had an internal error."),
    "rate_limit": FailureKind("provider_rate_limited", True, "The model provider's rate limit is reached."),
    "billing": FailureKind("provider_quota_exceeded", False, "The model provider's quota or credit is used up."),
    "auth": FailureKind("provider_auth_failed", False, "The API key for the model provider is missing or was refused."),
    "forbidden": FailureKind("provider_rejected_request", False, "The model provider does not allow this request."),
    "model_not_found": FailureKind("provider_model_not_found", False, "The model provider does not know this model."),
    "context_overflow": FailureKind("context_length_exceeded", False, "The conversation is too long for the model."),
    "payload_too_large": FailureKind(
        "context_length_exceeded", False, "The request is too large for the model provider."
    ),
    "image_rejected": FailureKind("provider_rejected_request", False, "The model does not take the image."),
    "opaque_rejected": FailureKind(
        "provider_rejected_request", False, "The model provider refused its own replayed items."
    ),
    "policy_blocked": FailureKind(
        "content_policy_violation", False, "The model provider's moderation refused the request."
    ),
    "filtered": FailureKind("content_filter", False, "The model provider's filter cut the answer."),
    "bad_request": FailureKind("provider_rejected_request", False, "The model provider refused the request."),
    "tls": FailureKind("provider_rejected_request", False, "The model provider's certificate could not be verified."),
    "truncated_text": FailureKind("output_truncated", False, "The answer was truncated at the output limit."),
    "truncated_tool": FailureKind(
        "output_truncated", False, "A tool call was truncated at the output limit and was not executed."
    ),
    "answer_too_long": FailureKind("output_truncated", False, "The answer was truncated at agent.max_answer_chars."),
    "bad_structure": FailureKind(
        "structured_output_failed", False, "The answer does not fit the format that was asked for."
    ),
    "empty": FailureKind("agent_incomplete", True, "The model gave an empty answer."),
    "missing_call": FailureKind("agent_incomplete", True, "The model announced a tool call and sent none."),
    "local_unavailable": FailureKind(
        "provider_unavailable",
        False,
        "No model is configured and none is installed; run `hermes setup`, or set `model` in config.yaml.",
    ),
    "local_memory": FailureKind("provider_unavailable", False, "The local model does not fit into memory."),
    "deadline": FailureKind("turn_timeout", False, "The time allowed for this turn is used up."),
    "unknown": FailureKind("agent_incomplete", True, "The model call failed."),
    "max_iterations": FailureKind("max_iterations", False, "The steps allowed for this turn are used up."),
    "invalid_calls": FailureKind(
        "agent_incomplete", False, "The model kept calling tools that do not exist or with bad arguments."
    ),
    "session_busy": FailureKind("session_busy", True, "Another turn of this session is still running."),
    "server_restarted": FailureKind("server_restarted", True, "The server was restarted while this turn ran."),
    "crash_loop": FailureKind("server_restarted", False, "The turn was taken up three times without getting further."),
    "store_unavailable": FailureKind("session_db_unavailable", True, "The store cannot be written to."),
}


def explain(
    kind: Kind, provider: str, *, status: int | None = None, message: str = "", has_text: bool, own_limit: bool = False
) -> Failure:
    """`words` is the provider's message, already redacted."""
    code, retryable, sentence = KINDS[kind]
    if code in CUT_CODES and not has_text and not own_limit:
        code = CODES[code].alone
    clean = re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", message).strip()[:PROVIDER_WORDS_CHARS_MAX]
    return Failure(kind, status, provider, f"{sentence} {clean}".strip(), retryable, code)
