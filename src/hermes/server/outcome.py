"""How a turn ended: its flags, code, finish reason, and the status of an answer without text. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hermes.core.failures import error_code
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import OUTCOME_CHARS_MAX
from hermes.runs.engine import Refused
from hermes.server.errors import ApiError, error_body, refused
from hermes.server.shapes import ChatUsage, FinishReason
from hermes.store.base import StoreError

_ADMISSION = {
    "rate_limit_exceeded": 429,
    "gateway_draining": 503,
    "session_busy": 409,
    "session_not_found": 404,
    "session_db_unavailable": 503,
}
_TOKENS = ("input_tokens", "output_tokens", "total_tokens")


@dataclass(slots=True)
class Outcome:
    """Without `code` the turn succeeded."""

    text: str = ""
    code: str | None = None
    error: str = ""
    partial: bool = False
    failed: bool = False
    interrupted: bool = False
    calls: list[JsonObject] = field(default_factory=list)
    messages: list[JsonObject] | None = None
    usage: dict[str, int] = field(default_factory=dict)
    details: dict[str, int] = field(default_factory=dict)
    reasoning: str = ""
    served_by: str = ""
    ignored: list[str] = field(default_factory=list)
    own_limit: bool = False
    retry_after_s: float | None = None
    raised: BaseException | None = None
    warnings: list[dict[str, str]] = field(default_factory=list)
    stop_sequence: str | None = None

    @property
    def finish_reason(self) -> FinishReason:
        if self.code is None:
            return "tool_calls" if self.calls else "stop"
        return error_code(self.code).finish_reason

    @property
    def is_success(self) -> bool:
        """Whether there is something to show: text, calls, or a limit that the request set itself."""
        return self.code is None or bool(self.text) or (self.own_limit and self.code == "output_truncated")

    @property
    def is_failure(self) -> bool:
        """Whether a format that cannot show text and an error together shows the error."""
        return not self.is_success or self.finish_reason == "error"

    def flags(self) -> JsonObject | None:
        """None when the turn succeeded."""
        warnings = {"warnings": self.warnings} if self.warnings else {}
        if self.code is None:
            return warnings or None
        return {
            "completed": False,
            "partial": self.partial,
            "failed": self.failed,
            "interrupted": self.interrupted,
            "error": self.error or None,
            "error_code": self.code,
            **warnings,
        }

    def headers(self) -> dict[str, str]:
        warnings = {"X-Hermes-Warning": ", ".join(one["code"] for one in self.warnings)} if self.warnings else {}
        if self.code is None:
            return warnings
        ascii_text = self.error.encode("ascii", "replace").decode()
        text = "".join(c if " " <= c <= "~" else " " for c in ascii_text)[:OUTCOME_CHARS_MAX]
        flags = {"X-Hermes-Completed": "false", "X-Hermes-Partial": str(self.partial).lower(), **warnings}
        return {**flags, "X-Hermes-Error": text.strip()} if text.strip() else flags

    def failure(self) -> ApiError:
        """The turn as an error, for answers with nothing else to show."""
        code = error_code(self.code or "").alone or self.code or "agent_incomplete"
        headers = {**self.headers(), "x-should-retry": "false"}
        if code == "provider_rate_limited":
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s or 1)))
        message = self.error or "The agent gave no answer."
        return ApiError(error_code(code).status, message, code, headers=headers, hermes=self.flags())

    def error_object(self) -> JsonObject:
        failure = self.failure()
        error: JsonObject = error_body(failure.status, failure.message, failure.code)["error"]
        return error

    def chat_usage(self) -> ChatUsage:
        details = self.details.get
        return ChatUsage(
            prompt_tokens=self.usage.get("input_tokens", 0),
            completion_tokens=self.usage.get("output_tokens", 0),
            total_tokens=self.usage.get("total_tokens", 0),
            prompt_tokens_details={
                "cached_tokens": details("cache_read_tokens") or 0,
                "cache_write_tokens": details("cache_write_tokens") or 0,
            },
            completion_tokens_details={"reasoning_tokens": details("reasoning_tokens") or 0},
        )

    def response_usage(self) -> JsonObject:
        return usage_object({**self.usage, **self.details})


def usage_object(counts: JsonMapping) -> JsonObject:
    """Token counts of a turn, as far as known."""
    return {
        **{name: counts.get(name) or 0 for name in _TOKENS},
        "input_tokens_details": {
            "cached_tokens": counts.get("cache_read_tokens") or 0,
            "cache_write_tokens": counts.get("cache_write_tokens") or 0,
        },
        "output_tokens_details": {"reasoning_tokens": counts.get("reasoning_tokens") or 0},
    }


def outcome_of(
    result: JsonMapping, usage: JsonMapping, redact: Callable[[str], str], *, own_limit: bool = False
) -> Outcome:
    """A result without flags is a success."""
    partial, failed, interrupted = (bool(result.get(name)) for name in ("partial", "failed", "interrupted"))
    well = not (partial or failed or interrupted) and result.get("completed", True) is not False
    error = redact(str(result.get("error") or ""))
    messages = result.get("messages")
    provider, model = result.get("provider"), result.get("model")
    return Outcome(
        text=str(result.get("final_response") or ""),
        code=None if well else _code(result, error),
        error="" if well else error,
        partial=partial,
        failed=failed,
        interrupted=interrupted,
        calls=list(result.get("pending_calls") or ()),
        messages=messages if isinstance(messages, list) else None,
        usage={name: usage[name] for name in _TOKENS if isinstance(usage.get(name), int)},
        details={k: v for k, v in (result.get("usage_details") or {}).items() if isinstance(v, int)},
        reasoning=str(result.get("last_reasoning") or ""),
        served_by=f"{provider}/{model}" if isinstance(provider, str) and isinstance(model, str) and model else "",
        ignored=list(result.get("ignored_options") or ()),
        own_limit=own_limit,
        retry_after_s=result.get("retry_after_s"),
        warnings=list(result.get("warnings") or ()),
        stop_sequence=result.get("stop_sequence"),
    )


def raised(error: BaseException, redact: Callable[[str], str]) -> Outcome:
    message = redact(str(error) or type(error).__name__)
    code = "session_db_unavailable" if isinstance(error, StoreError) else "agent_error"
    return Outcome(code=code, error=message, failed=True, raised=error)


def refusal(error: Refused) -> ApiError:
    if error.code == "session_not_found":
        return ApiError(404, str(error), error.code)
    api_error = refused(error.code, str(error), status=_ADMISSION.get(error.code, 409))
    if error.holder:
        api_error.headers["X-Hermes-Run-Id"] = error.holder
    return api_error


def _code(result: JsonMapping, error: str) -> str:
    known = result.get("error_code")
    if isinstance(known, str) and known:
        return known
    if result.get("interrupted"):
        return "interrupted"
    return "output_truncated" if "truncat" in error.lower() else "agent_incomplete"
