"""The error envelope of every protocol, and the exception that becomes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from hermes.core.errors import ServiceError
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import ERROR_BEGIN_CHARS_MAX, ERROR_END_CHARS_MAX

ErrorType = Literal["invalid_request_error", "permission_error", "rate_limit_error", "server_error"]
_TYPES: dict[int, ErrorType] = {403: "permission_error", 429: "rate_limit_error"}
MessagesErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "timeout_error",
    "overloaded_error",
]
_MESSAGES_TYPES: dict[int, MessagesErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# code of a service, where the API has another
_SERVICE_CODES = {
    "bad_schedule": "invalid_schedule",
    "injection_suspected": "prompt_blocked",
    "contains_secret": "prompt_blocked",
    "invalid_arguments": "invalid_value",
}
# code of a service: its status, where that is not 400
_SERVICE_STATUSES = {
    "session_not_found": 404,
    "message_not_found": 404,
    "run_not_found": 404,
    "skill_not_found": 404,
    "skill_read_only": 403,
    "setting_not_found": 404,
    "setting_read_only": 403,
    "setting_overridden": 409,
    "provider_unavailable": 502,
    "session_exists": 409,
    "run_active": 409,
    "run_finished": 409,
    "approval_not_active": 409,
    "approval_not_pending": 409,
    "clarify_not_pending": 409,
}


class ErrorObject(Struct, kw_only=True):
    """What went wrong: a sentence, its kind, the field it is about, and a code for programs."""

    message: str
    type: ErrorType
    param: str | None
    code: str | None
    hermes: JsonObject | UnsetType = UNSET


class Error(Struct, kw_only=True):
    """The one form of every error, but for those of other protocols."""

    error: ErrorObject

    @classmethod
    def of(cls, error: ApiError, request_id: str) -> Struct:
        return error.envelope()


class MessagesErrorObject(Struct, kw_only=True):
    type: MessagesErrorType
    message: str
    param: str | None
    code: str | None
    hermes: JsonObject | UnsetType = UNSET


class MessagesError(Struct, kw_only=True, tag_field="type", tag="error"):
    """An error as the Messages protocol has it, with our code and the field beside it."""

    error: MessagesErrorObject
    request_id: str | UnsetType = UNSET

    @classmethod
    def of(cls, error: ApiError, request_id: str = "") -> Struct:
        kind = _MESSAGES_TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
        error_object = MessagesErrorObject(
            type=kind,
            message=error.message,
            param=error.param,
            code=error.code,
            hermes=dict(error.hermes) if error.hermes else UNSET,
        )
        return cls(error=error_object, request_id=request_id or UNSET)


class OllamaError(Struct, kw_only=True):
    """An error as the Ollama protocol has it: its text, with our code beside it."""

    error: str
    code: str

    @classmethod
    def of(cls, error: ApiError, request_id: str = "") -> Struct:
        return cls(error=error.message, code=error.code)


ErrorForm = type[Error] | type[MessagesError] | type[OllamaError]


class ApiError(Exception):
    """Raised anywhere below a handler; the route's endpoint turns it into a response."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        hermes: JsonMapping | None = None,
    ) -> None:
        message = shortened(message)
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param = None if param is None else shortened(param)
        self.headers, self.hermes = dict(headers or {}), dict(hermes or {})
        if status == 409:  # SDKs retry a conflict unless told otherwise
            self.headers.setdefault("x-should-retry", "false")

    def redact(self, redact: Callable[[str], str]) -> None:
        """Remove secrets from everything that quotes the request."""
        self.message = redact(self.message)
        self.param = None if self.param is None else redact(self.param)

    def envelope(self) -> Error:
        return Error(error=error_object(self.status, self.message, self.code, self.param, self.hermes))

    def response(self, form: ErrorForm = Error, request_id: str = "") -> web.Response:
        return answer(form.of(self, request_id), self.status, self.headers)


def refused(code: str, message: str, *, status: int, retry_after_s: int = 1) -> ApiError:
    """The request was not started and may be retried."""
    return ApiError(status, message, code, headers={"Retry-After": str(retry_after_s), "x-should-retry": "true"})


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code, param)


def missing(param: str) -> ApiError:
    return invalid(param, f"Missing required parameter: {param!r}.", "missing_required_parameter")


def api_error(error: ServiceError) -> ApiError:
    status, code = _SERVICE_STATUSES.get(error.code, 400), _SERVICE_CODES.get(error.code, error.code)
    return ApiError(status, f"{error.message} {error.hint}".strip(), code, error.field)


def error_object(
    status: int, message: str, code: str | None, param: str | None = None, hermes: JsonMapping | None = None
) -> ErrorObject:
    kind = _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return ErrorObject(message=message, type=kind, param=param, code=code, hermes=dict(hermes) if hermes else UNSET)


def error_body(status: int, message: str, code: str | None) -> JsonObject:
    body: JsonObject = msgspec.to_builtins(Error(error=error_object(status, message, code)))
    return body


def code_in(body: bytes) -> str:
    document = msgspec.json.decode(body)
    code: str = document["code"] if "code" in document else document["error"]["code"]
    return code


def error_response(
    status: int, message: str, code: str | None, param: str | None = None, *, headers: Mapping[str, str] | None = None
) -> web.Response:
    return answer(Error(error=error_object(status, shortened(message), code, param)), status, headers)


def shortened(text: str) -> str:
    """Cut the middle out of a long text: an error may quote as much as a request can hold."""
    if len(text) <= ERROR_BEGIN_CHARS_MAX + ERROR_END_CHARS_MAX:
        return text
    return f"{text[:ERROR_BEGIN_CHARS_MAX]}[…]{text[-ERROR_END_CHARS_MAX:]}"


def answer(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, headers=headers, content_type="application/json", charset="utf-8")
