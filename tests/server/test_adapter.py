"""The API server's adapter: made without touching anything, and strict about who comes in."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from hermes.server.compat import (
    APIServerAdapter,
    _derive_chat_session_id,
    _IdempotencyCache,
    cors_middleware,
    security_headers_middleware,
)
from hermes.server.errors import error_body
from hermes.server.settings import PlatformConfig
from support.waiting import idle


def adapter(**extra: Any) -> APIServerAdapter:
    return APIServerAdapter(PlatformConfig(enabled=True, extra=extra))


def request(**headers: str) -> Any:
    return make_mocked_request("GET", "/", headers={name.replace("_", "-"): value for name, value in headers.items()})


def test_adapter_constructor_touches_no_file(home_folder: Path) -> None:
    adapter(key="sk-test")
    assert not home_folder.exists()


def test_session_db_is_opened_lazily(home_folder: Path) -> None:
    server = adapter()
    db = server._ensure_session_db()
    assert db is server._ensure_session_db() and (home_folder / "state.db").exists()
    db.close()


def test_unreadable_session_db_is_none(home_folder: Path) -> None:
    home_folder.mkdir()
    (home_folder / "state.db").write_bytes(b"this is no database at all, whatever its name may say" * 40)
    assert adapter()._ensure_session_db() is None


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_auth_scheme_is_case_insensitive(scheme: str) -> None:
    assert adapter(key="sk-test123")._check_auth(request(Authorization=f"{scheme} sk-test123")) is None


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer sk-test12", "Basic sk-test123", "sk-test123", "Bearer schlüssel"]
)
def test_invalid_authorization_is_401_envelope(value: str) -> None:
    refusal = adapter(key="sk-test123")._check_auth(request(Authorization=value))
    assert refusal is not None and refusal.status == 401
    assert refusal.headers["WWW-Authenticate"] == "Bearer"
    assert json.loads(refusal.body)["error"]["code"] == "invalid_api_key"  # type: ignore[arg-type]


def test_cors_wildcard_origin_has_no_vary() -> None:
    headers = adapter(cors_origins=["*"])._cors_headers_for_origin("http://anywhere.example")
    assert headers is not None and headers["Access-Control-Allow-Origin"] == "*" and "Vary" not in headers


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (403, "permission_error"), (429, "rate_limit_error"), (503, "server_error")],
)
def test_error_body_shape_and_type(status: int, kind: str) -> None:
    assert error_body(status, "No.", "why") == {"error": {"message": "No.", "type": kind, "param": None, "code": "why"}}


def test_derived_session_id_depends_on_owner() -> None:
    plain = _derive_chat_session_id("be kind", "hi")
    assert plain == _derive_chat_session_id("be kind", "hi", "default")
    assert plain != _derive_chat_session_id("be kind", "hi", "ada")
    assert _derive_chat_session_id(None, "x") != _derive_chat_session_id("", "x")
    assert _derive_chat_session_id("\ud800", "x").startswith("api-")


async def test_idempotency_cache_does_not_keep_failures() -> None:
    cache, calls = _IdempotencyCache(), 0

    async def fail() -> None:
        nonlocal calls
        calls += 1
        await idle()
        raise ValueError("no")

    results = await asyncio.gather(*(cache.get_or_set("k", "f", fail) for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in results] == ["no"] * 3 and calls == 1
    with pytest.raises(ValueError, match="no"):
        await cache.get_or_set("k", "f", fail)
    assert calls == 2


@pytest.mark.parametrize(("origin", "status"), [(None, 404), ("http://here", 404), ("http://there", 403)])
async def test_security_headers_are_on_every_response(origin: str | None, status: int) -> None:
    app = web.Application(middlewares=[cors_middleware, security_headers_middleware])
    with pytest.warns(web.NotAppKeyWarning):
        app["api_server_adapter"] = adapter(cors_origins=["http://here"])
    async with TestClient(TestServer(app)) as client:
        answer = await client.get("/nowhere", headers={"Origin": origin} if origin else {})
        assert answer.status == status
        assert answer.headers.get("Access-Control-Allow-Origin") == ("http://here" if origin == "http://here" else None)
        assert status == 403 or answer.headers["X-Frame-Options"] == "DENY"
