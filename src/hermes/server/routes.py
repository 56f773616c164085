"""Routes: `@route(...)` at a handler declares everything about it, once.

The router, the methods of the context, the list of endpoints, the features, the API's description, and the reading of
query and body are made of these declarations.
"""

from __future__ import annotations

import inspect
import logging
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from hermes.core.errors import ServiceError
from hermes.core.json_types import JsonObject
from hermes.core.limits import SESSION_ID_CHARS_MAX, SESSION_KEY_CHARS_MAX
from hermes.server.errors import ApiError, Error, ErrorForm, MessagesError, OllamaError, answer, api_error
from hermes.server.headers import VERSION_HEADER, request_id
from hermes.server.query_params import parse_query
from hermes.server.request_bodies import TAKES_FORM_TYPE, give_back_room, read
from hermes.server.sse import KEEPALIVE
from hermes.store.base import StoreBusy, StoreError, StoreTimeout

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

log = logging.getLogger(__name__)
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[msgspec.Struct | web.StreamResponse]])
Endpoint = Callable[["ServerContext", web.Request], Awaitable[web.StreamResponse]]
# The context whose gate has passed the request.
PASSED: web.RequestKey[ServerContext] = web.RequestKey("passed")
# The parts of the API, in the order in which they are shown.
GROUPS = ("server", "chat", "messages", "responses", "conversations", "runs", "jobs", "sessions")
ROUTES: list[Route] = []
_BY_PLACE: dict[tuple[str, str], Route] = {}
_PROFILE = re.compile(r"^/p/[^/]+(?=/)")
# What else clients of the Ollama protocol ask for. It is not here, and they read that in the form of their protocol.
_PATHS_NOT_OFFERED = frozenset(
    f"/api/{name}" for name in ("copy", "create", "delete", "embed", "embeddings", "pull", "push")
)


@dataclass(slots=True, eq=False)
class Route:
    """One route, and the decorator of its handler.

    A handler is called with the context and the request, with the parsed `query` and `body` where it has parameters of
    these names, and returns a struct (sent with the route's status) or a response. The types in its signature are those
    of the route; `body` and `answers` are given here where a handler reads its body or makes its response by itself.

    `scope` is what a key must have (None: no key is needed); several scopes have spaces between them, and all are
    needed; alternatives have `|` between them.
    """

    # The method and the path, with a space between.
    place: str
    name: str
    summary: str
    _: KW_ONLY
    scope: str | None
    query: type[msgspec.Struct] | None = None
    headers: tuple[JsonObject, ...] = ()
    body: type[msgspec.Struct] | None = None
    example: JsonObject | None = None
    status: int = 200
    answers: type[msgspec.Struct] | None = None
    # Other statuses of success, which have no body.
    also: Mapping[int, str] = field(default_factory=dict)
    # Media types of answers that are not structs, and the description of an event stream.
    types: tuple[str, ...] = ()
    stream: str = ""
    # The keepalive of its streams.
    keepalive: bytes = KEEPALIVE
    # Further error statuses, besides those of scope, path and body; and statuses with their own envelope.
    faults: tuple[int, ...] = ()
    refusals: Mapping[int, type[msgspec.Struct]] = field(default_factory=dict)
    # The error envelope of its protocol.
    errors: ErrorForm = Error
    # For a route that creates something: its path parameter in other routes, and where the answer has it.
    link: tuple[str, str] | None = None
    # Names of features that it adds to the capabilities, with spaces between.
    features: str = ""
    # Whether JSON may come under the type of a form, which programs without a client of the protocol name by default.
    takes_form_type: bool = False
    # Whether an idempotency key is honoured, and whether the model is asked.
    idempotent: bool = False
    begins_turns: bool = False
    method: str = field(init=False)
    path: str = field(init=False)
    handler: Callable[..., Awaitable[msgspec.Struct | web.StreamResponse]] = field(init=False)

    def __post_init__(self) -> None:
        self.method, self.path = self.place.split(" ")

    def __call__(self, handler: Handler) -> Handler:
        """Declare the handler's route. Structs in its signature need not be named again."""
        self.handler = handler
        for name, parameter in (("query", "query"), ("body", "body"), ("answers", "return")):
            annotation = handler.__annotations__.get(parameter, "").partition(" | ")[0]
            if issubclass(struct := handler.__globals__.get(annotation, object), msgspec.Struct):
                setattr(self, name, struct)
        ROUTES.append(self)
        _BY_PLACE[self.method, self.path] = self
        return handler

    @property
    def group(self) -> str:
        part = self.path.removeprefix("/v1").removeprefix("/api").split("/")[1]
        return part if part in GROUPS else GROUPS[0]

    def endpoint(self) -> Endpoint:
        """The handler wrapped in authentication, idempotency and error responses."""
        names = inspect.signature(self.handler).parameters
        query_type, body_type = self.query if "query" in names else None, self.body if "body" in names else None
        handler, status, public, idempotent = self.handler, self.status, self.scope is None, self.idempotent
        takes_form_type = self.takes_form_type

        async def work(context: ServerContext, request: web.Request) -> web.StreamResponse:
            try:
                arguments: dict[str, msgspec.Struct] = {}
                if query_type is not None:
                    arguments["query"] = parse_query(request, query_type)
                body = None if body_type is None else await read(context, request, body_type)
                if body is not None:
                    arguments["body"] = body.model
                answered = await handler(context, request, **arguments)
                response = answered if isinstance(answered, web.StreamResponse) else answer(answered, status)
                if body is not None:
                    response.headers.update(body.headers())
                return response
            except (ApiError, ServiceError) as error:
                return error_answer(request, error_of(context, request, error))

        async def handle(context: ServerContext, request: web.Request) -> web.StreamResponse:
            try:
                # Handlers may be mounted without the gate: then the key is checked here.
                refusal = None if public or request.get(PASSED) is context else context.check_auth(request)
                if refusal is not None:
                    return error_answer(request, refusal)
                if not context.is_attached:
                    await context.use_current_app()
                if takes_form_type:
                    request[TAKES_FORM_TYPE] = True
                key = request.headers.get("Idempotency-Key") if idempotent and context.is_attached else None
                if key is None:
                    response = await work(context, request)
                else:
                    response = await context.idempotency.answer(request, key, work)
                if context.keyring.limited and not public and not response.prepared:
                    response.headers.update(context.rate_headers(request))
                return response
            except web.HTTPException:
                raise
            except Exception as error:  # noqa: BLE001  (of a defect of ours the client learns where in the log it is)
                return error_answer(request, error_of(context, request, error))
            finally:
                give_back_room(context, request)

        handle.__name__ = handler.__name__
        return handle


route = Route


def error_of(context: ServerContext, request: web.Request, error: Exception) -> ApiError:
    """The error that a client sees; an unexpected exception is logged."""
    if isinstance(error, ApiError | ServiceError):
        refusal = api_error(error) if isinstance(error, ServiceError) else error
    elif isinstance(error, StoreError):
        retry = {"Retry-After": "1", "x-should-retry": "true"} if isinstance(error, StoreBusy) else {}
        log.warning("%s: the store is out of reach: %s", request_id(request), error)
        message = str(error) if isinstance(error, StoreTimeout) else f"The store is out of reach: {error}"
        refusal = ApiError(503, message, "session_db_unavailable", headers=retry)
    else:
        log.error("%s: %s", request_id(request), context.redact("".join(traceback.format_exception(error))))
        message = f"The server had an internal error; it is in the log as {request_id(request)}."
        refusal = ApiError(500, message, "internal_error")
    refusal.redact(context.redact)
    return refusal


def route_at(request: web.Request) -> Route | None:
    """None for a request that did not come through the router."""
    resource = getattr(getattr(getattr(request, "match_info", None), "route", None), "resource", None)
    if not isinstance(resource, web.AbstractResource):
        return None
    place = _PROFILE.sub("", resource.canonical)
    return _BY_PLACE.get(("GET" if request.method == "HEAD" else request.method, place))


def error_answer(request: web.Request, error: ApiError) -> web.Response:
    """The error in the form of the request's protocol."""
    route = route_at(request)
    if route is None:
        form: ErrorForm = OllamaError if _PROFILE.sub("", request.path) in _PATHS_NOT_OFFERED else Error
    else:
        form = route.errors
    if form is Error and VERSION_HEADER in request.headers:
        form = MessagesError
    return error.response(form, request_id(request))


# --- facts that routes share -----------------------------------------------------------------------------------------

TURN_FAULTS = (404, 409, 429, 502, 503, 504)


def header(name: str, description: str, **schema: Any) -> JsonObject:
    return {"name": name, "in": "header", "description": description, "schema": {"type": "string", **schema}}


REASONING_HEADER = header("X-Hermes-Reasoning", "whether reasoning is shown", enum=["on", "off"])
SESSION_ID_HEADER = header(
    "X-Hermes-Session-Id", "the session of the turn", minLength=1, maxLength=SESSION_ID_CHARS_MAX
)
SESSION_KEY_HEADER = header(
    "X-Hermes-Session-Key", "the scope of long-term memory; needs a key", maxLength=SESSION_KEY_CHARS_MAX
)
TURN_HEADERS = (
    SESSION_KEY_HEADER,
    header("X-OpenWebUI-User-Id", "the user whose memory is used, with `api_server.memory_scope: user`"),
    header("X-Hermes-Detach", "the turn continues when the client disconnects", type="boolean"),
    header("X-Hermes-Approvals", "wait for answers to the agent's questions, or deny", enum=["wait", "deny"]),
    header("X-Hermes-Tool-Progress", "how a chat stream reports tool calls", enum=["event", "chunk", "off"]),
    header("X-Hermes-Tool-Items", "how a response shows server tools", enum=["function", "mcp", "none"]),
    REASONING_HEADER,
    header(
        "X-Hermes-Toolsets",
        "the toolsets of this turn, comma separated, or `none`; with `tools` of the client, `terminal`, `file` and "
        "`code_execution` are offered only where this or the key names them",
    ),
    header("X-Hermes-Timeout", "the most seconds that the turn may take", type="number", minimum=1),
)
