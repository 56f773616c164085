"""The frame around every handler: who may come in, and how whatever goes wrong is told."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from hermes.core.ids import random_hex
from hermes.server.errors import ApiError
from hermes.server.request_bodies import give_back_room
from hermes.store.base import StoreBusy, StoreError, StoreTimeout

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter

log = logging.getLogger(__name__)
Work = Callable[["APIServerAdapter", web.Request], Awaitable[web.StreamResponse]]
Handler = Callable[["APIServerAdapter", web.Request], Awaitable[web.StreamResponse]]
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_KNOWN = web.RequestKey("request_id", str)
# The adapter whose gate has let the request in.
PASSED: web.RequestKey[APIServerAdapter] = web.RequestKey("passed")


def request_id(request: web.Request) -> str:
    """The id under which the request is known: the client's own where it can be used."""
    found = request.get(_KNOWN)
    if found is None:
        given = request.headers.get("X-Request-Id", "")
        found = given if _REQUEST_ID.fullmatch(given) else f"req_{random_hex(16)}"
        request[_KNOWN] = found
    return found


def endpoint(work: Work, *, public: bool = False) -> Handler:
    """A handler of the adapter that does this work; `public` ones need no key.

    Handlers can be put into an application that has no gate: then the key is checked here.
    """

    async def told(self: APIServerAdapter, request: web.Request) -> web.StreamResponse:
        """What the work comes to, refusals included."""
        try:
            return await work(self, request)
        except ApiError as error:
            error.redact(self.redact)
            return error.response()

    async def handle(self: APIServerAdapter, request: web.Request) -> web.StreamResponse:
        try:
            refusal = None if public or request.get(PASSED) is self else self._check_auth(request)
            if refusal is not None:
                return refusal
            answer = await self.once(request, told)
            if not public and not answer.prepared:
                answer.headers.update(self.rate_headers())
            return answer
        except ApiError as error:
            error.redact(self.redact)
            return error.response()
        except StoreError as error:
            retry = {"Retry-After": "1", "x-should-retry": "true"} if isinstance(error, StoreBusy) else {}
            log.warning("%s: the store is out of reach: %s", request_id(request), error)
            message = self.redact(
                str(error) if isinstance(error, StoreTimeout) else f"The store is out of reach: {error}"
            )
            return ApiError(503, message, "session_db_unavailable", headers=retry).response()
        except web.HTTPException:
            raise
        except Exception:  # noqa: BLE001  (a defect of ours: the client learns under which id it is in the log)
            log.error("%s: %s", request_id(request), self.redact(traceback.format_exc()))
            message = f"The server had an internal error; it is in the log as {request_id(request)}."
            return ApiError(500, message, "internal_error").response()
        finally:
            give_back_room(self, request)

    handle.__name__ = work.__name__
    handle.__doc__ = work.__doc__
    return handle
