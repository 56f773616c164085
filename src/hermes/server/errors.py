"""The one form in which every error of the server is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

_TYPES = {403: "permission_error", 429: "rate_limit_error"}


def error_body(status: int, message: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """The envelope: what is wrong, of what kind, with which field."""
    kind = _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int, message: str, code: str | None, param: str | None = None, *, headers: Mapping[str, str] | None = None
) -> web.Response:
    """An answer that says what is wrong."""
    return web.json_response(error_body(status, message, code, param), status=status, headers=headers)
