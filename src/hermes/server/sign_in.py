"""Browser sign-in: a key is given once, and a cookie stands for it from then on.

The cookie is a random token that scripts cannot read; the store has its hash, so it is valid on every worker and
replica and after a restart. It is accepted from the server's own pages only.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from typing import TYPE_CHECKING

from aiohttp import web
from msgspec import Struct

from hermes.core.limits import SIGN_IN_KEPT_S
from hermes.server.errors import ApiError, answer
from hermes.server.gate import client_address, is_same_origin, seen_as
from hermes.server.keys import SCOPES, SIGNED_IN, Key, caller_of
from hermes.server.models import LoginRequest, LogoutRequest
from hermes.server.routes import header, route
from hermes.store.base import StoreError

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

log = logging.getLogger(__name__)
# Another site's page cannot send it unless CORS allows that, which it never does for requests with a cookie.
PAGE_HEADER = "X-Hermes-Page"
_TOKEN_BYTES = 32
_SAFE = ("GET", "HEAD")
_PORT = re.compile(r":(\d+)$")
_HEADERS = (header(PAGE_HEADER, "`1`; whatever a page of the server sends that is no GET must have it"),)
# When the sign-in of a request ends.
_EXPIRES_AT: web.RequestKey[float] = web.RequestKey("sign_in_expires_at", float)


class AuthSession(Struct, kw_only=True, tag_field="object", tag="hermes.auth.session"):
    """Who is asking. `key_required`: the server has keys; without, everybody whom it serves is signed in."""

    key_required: bool
    signed_in: bool
    owner: str | None = None
    scopes: list[str] = []
    sees_all: bool = False
    expires_at: float | None = None


@route("GET /api/auth/session", "auth_session", "Who is signed in", scope=None, features="sign_in")
async def session(context: ServerContext, request: web.Request) -> web.Response:
    """Nobody is not an error here."""
    if context.check_auth(request) is not None:
        return _uncached(AuthSession(key_required=not context.is_open, signed_in=False))
    return _uncached(_session(context, caller_of(request), request.get(_EXPIRES_AT)))


@route(
    "POST /api/auth/login",
    "auth_login",
    "Sign in with a key",
    scope=None,
    headers=_HEADERS,
    example={"key": "…"},
    answers=AuthSession,
    faults=(401, 429, 503),
)
async def login(context: ServerContext, request: web.Request, body: LoginRequest) -> web.Response:
    """The session, with a cookie that stands for the key. A sign-in that the browser had ends."""
    _check_page(context, request)
    if context.is_open:
        return await session(context, request)
    address = client_address(context, request)
    if wait_s := context.wrong_keys.wait_s(address):
        message = "Too many wrong keys came from your address; wait a little."
        raise ApiError(429, message, "rate_limit_exceeded", headers={"Retry-After": str(wait_s)})
    key = context.keyring.find(body.key.strip().encode("utf-8", "surrogatepass"))
    if key is None:
        context.wrong_keys.count(address)
        log.warning("a wrong key was used to sign in from %s", address)
        challenge = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, "Incorrect API key provided.", "invalid_api_key", "key", headers=challenge)
    await _forget(context, request)
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    added = await context.app.store.sign_ins.add(_hash(token), key.owner, key.fingerprint, SIGN_IN_KEPT_S)
    log.info("%s has signed in from %s", key.owner, address)
    response = _uncached(_session(context, key, added.expires_at))
    name, is_secure = _cookie(context, request)
    response.set_cookie(
        name, token, max_age=int(SIGN_IN_KEPT_S), path="/", secure=is_secure, httponly=True, samesite="Strict"
    )
    return response


@route(
    "POST /api/auth/logout", "auth_logout", "Sign out", scope=None, headers=_HEADERS, answers=AuthSession, faults=(503,)
)
async def logout(context: ServerContext, request: web.Request, body: LogoutRequest) -> web.Response:
    """End the sign-in of this browser, or all of its owner's. Somebody who is not signed in is signed out as well."""
    _check_page(context, request)
    if body.everywhere and isinstance(key := request.get(SIGNED_IN), Key):
        await context.app.store.sign_ins.remove_all(key.owner)
    await _forget(context, request)
    response = _uncached(AuthSession(key_required=not context.is_open, signed_in=context.is_open))
    name, is_secure = _cookie(context, request)
    response.del_cookie(name, path="/", secure=is_secure, httponly=True, samesite="Strict")
    return response


def _session(context: ServerContext, key: Key, expires_at: float | None) -> AuthSession:
    return AuthSession(
        key_required=not context.is_open,
        signed_in=True,
        owner=key.owner,
        scopes=[scope for scope in SCOPES if key.opens(scope)],
        sees_all=key.sees_all,
        expires_at=expires_at,
    )


def _uncached(session: AuthSession) -> web.Response:
    return answer(session, headers={"Cache-Control": "no-store"})


# --- the cookie ------------------------------------------------------------------------------------------------------


async def find_sign_in(context: ServerContext, request: web.Request) -> ApiError | None:
    """Find the key for the request's cookie; `check_auth` uses it where the request has no key itself.

    A key that was changed or removed has no sign-ins any more.
    """
    app, token = context.attached_app, request.cookies.get(_cookie(context, request)[0])
    if context.is_open or app is None or not token:
        return None
    try:
        sign_in = await app.store.sign_ins.get(_hash(token))
    except StoreError as error:
        return ApiError(503, f"The store is out of reach: {error}", "session_db_unavailable")
    key = context.keyring.by_owner.get(sign_in.owner) if sign_in is not None else None
    if sign_in is None or key is None or not secrets.compare_digest(key.fingerprint, sign_in.key_sha256):
        return None
    request[SIGNED_IN] = _foreign(context, request) or key
    request[_EXPIRES_AT] = sign_in.expires_at
    return None


async def _forget(context: ServerContext, request: web.Request) -> None:
    if token := request.cookies.get(_cookie(context, request)[0]):
        await context.app.store.sign_ins.remove(_hash(token))


def _cookie(context: ServerContext, request: web.Request) -> tuple[str, bool]:
    """The name of the cookie, and whether it is for https alone.

    Browsers share cookies between all ports of a host and between profiles: each has its own name.
    """
    scheme, host = seen_as(context, request)
    app, port = context.attached_app, _PORT.search(host)
    parts = ["hermes", *([app.home.profile] if app is not None else []), *(port.groups() if port else ())]
    is_secure = scheme == "https"
    return ("__Host-" if is_secure else "") + "_".join(parts), is_secure


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


# --- whose page is asking --------------------------------------------------------------------------------------------


def _foreign(context: ServerContext, request: web.Request) -> ApiError | None:
    """Why a request with a cookie may not come from the server's own pages. GET and the like may be a plain link."""
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site not in (None, "same-origin", "none") or (origin and not is_same_origin(context, request, origin)):
        message = "A sign-in counts for the server's own pages only; programs and other sites use a key."
        return ApiError(403, message, "cross_site_request")
    changes = request.method not in _SAFE or "Upgrade" in request.headers
    if changes and request.headers.get(PAGE_HEADER) != "1":
        message = f"A request with a sign-in that changes something needs the header {PAGE_HEADER}: 1."
        return ApiError(403, message, "cross_site_request", PAGE_HEADER)
    return None


def _check_page(context: ServerContext, request: web.Request) -> None:
    if (refusal := _foreign(context, request)) is not None:
        raise refusal
