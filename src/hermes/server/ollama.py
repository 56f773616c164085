"""The Ollama protocol, with `api_server.ollama`: models to be found, and chats with them as lines of JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from aiohttp import web
from msgspec import Meta, Struct, field

from hermes.core import limits
from hermes.core.json_types import JsonObject, Message
from hermes.core.spec import RouteChoice
from hermes.core.text import spaced_json
from hermes.server.chat import ParsedMessages, build_turn, split_messages, structure
from hermes.server.discovery import models_of
from hermes.server.documents import check_on
from hermes.server.errors import ApiError, OllamaError, answer, invalid, missing
from hermes.server.idempotency import request_created_at
from hermes.server.models import Call, CalledFunction, ChatMessage, ChatTool, JsonSchema, Parameters, Penalty
from hermes.server.render_ollama import KEEPALIVE, OllamaAnswer, OllamaRenderer
from hermes.server.request_bodies import Body, read
from hermes.server.routes import SESSION_ID_HEADER, TURN_FAULTS, TURN_HEADERS, route
from hermes.server.turn_spec import client_tools
from hermes.server.turns import Turn
from hermes.services import models
from hermes.settings.schema_types import Effort

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

# The version of the protocol that this follows: clients ask for a least one.
_VERSION = "0.12.0"
_FAMILY = "hermes"
_FOREVER = "2318-01-01T00:00:00Z"
_NDJSON = "application/x-ndjson"
# Where the protocol has parameters that every turn has, by the names of the latter.
_NAMES = {"max_tokens": "options.num_predict", "reasoning_effort": "think", "response_format": "format"}
_NAMES |= {
    name: f"options.{name}"
    for name in ("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty")
}
# How the base64 of an image begins, by its kind.
_IMAGES = {"/9j/": "jpeg", "R0lG": "gif", "UklGR": "webp"}
_DETAILS: JsonObject = {
    "parent_model": "",
    "format": "",
    "family": _FAMILY,
    "families": [_FAMILY],
    "parameter_size": "",
    "quantization_level": "",
}


# --- finding models --------------------------------------------------------------------------------------------------


class OllamaVersion(Struct, kw_only=True):
    version: str = _VERSION


class OllamaModel(Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: JsonObject


class OllamaModels(Struct, kw_only=True):
    models: list[OllamaModel]


class LoadedModel(OllamaModel, kw_only=True):
    size_vram: int
    expires_at: str


class LoadedModels(Struct, kw_only=True):
    models: list[LoadedModel]


class ShowRequest(Struct, kw_only=True):
    """The model's name, under either field."""

    WITHOUT_EFFECT: ClassVar = ("verbose",)

    model: str | None = None
    name: str | None = None
    verbose: Any = None


class ShownModel(Struct, kw_only=True):
    license: str = ""
    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    details: JsonObject = field(default_factory=lambda: dict(_DETAILS))
    model_info: JsonObject
    capabilities: list[str]
    modified_at: str


@route(
    "GET /api/version",
    "ollama_version",
    "Version of the Ollama protocol",
    scope=None,
    errors=OllamaError,
    faults=(404,),
)
async def version(context: ServerContext, request: web.Request) -> OllamaVersion:
    check_on(context, "ollama", request)
    return OllamaVersion()


@route("GET /api/tags", "ollama_tags", "List models, as Ollama does", scope="any", errors=OllamaError, faults=(404,))
async def tags(context: ServerContext, request: web.Request) -> OllamaModels:
    check_on(context, "ollama", request)
    return OllamaModels(models=[OllamaModel(**entry) for entry in _entries(context, request)])


@route("GET /api/ps", "ollama_ps", "List loaded models, as Ollama does", scope="any", errors=OllamaError, faults=(404,))
async def loaded(context: ServerContext, request: web.Request) -> LoadedModels:
    """Every model can be asked at any time, so all are loaded and stay so."""
    check_on(context, "ollama", request)
    stays: JsonObject = {"size_vram": 0, "expires_at": _FOREVER}
    return LoadedModels(models=[LoadedModel(**entry, **stays) for entry in _entries(context, request)])


def _entries(context: ServerContext, request: web.Request) -> Iterator[JsonObject]:
    modified_at = _time(context.started_at)
    for name in models_of(context, request):
        digest = hashlib.sha256(name.encode()).hexdigest()
        yield {
            "name": name, "model": name, "modified_at": modified_at, "size": 0, "digest": digest, "details": _DETAILS,
        }  # fmt: skip


@route(
    "POST /api/show",
    "ollama_show",
    "Show a model, as Ollama does",
    scope="any",
    errors=OllamaError,
    faults=(404,),
    takes_form_type=True,
)
async def show(context: ServerContext, request: web.Request, body: ShowRequest) -> ShownModel:
    check_on(context, "ollama", request)
    if not (given := body.model or body.name):
        raise missing("model")
    listed = models_of(context, request)
    name = _plain_name(given)
    if name not in listed:
        raise ApiError(404, f"model {given!r} not found", "model_not_found", "model")
    settings = context.app.settings
    choice = RouteChoice() if name == context.model_name else models.named(settings, name)
    target = models.primary(settings, choice or RouteChoice())
    able = models.capabilities_of(target)
    offered = {"completion": True, "tools": able.tools, "vision": able.images, "thinking": able.reasoning}
    info: JsonObject = {"general.architecture": _FAMILY, "general.basename": name}
    info[f"{_FAMILY}.context_length"] = models.window_of(target)
    return ShownModel(
        model_info=info,
        capabilities=[name for name, is_there in offered.items() if is_there],
        modified_at=_time(context.started_at),
    )


def _plain_name(name: str) -> str:
    return name.removesuffix(":latest")


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


# --- asking them -----------------------------------------------------------------------------------------------------


class OllamaCalledFunction(Struct, kw_only=True):
    name: str
    arguments: JsonObject = field(default_factory=dict)


class OllamaCall(Struct, kw_only=True):
    function: OllamaCalledFunction
    id: str | None = None


Images = Annotated[list[str], Meta(max_length=limits.CONTENT_PARTS_MAX - 1)]


class OllamaMessage(Struct, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=limits.CLIENT_TOOLS_MAX)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    thinking: str | None = None


class OllamaOptions(Struct, kw_only=True):
    """What a model is asked for. Other options have no effect."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=limits.STOP_STRINGS_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**53)] | None = None


class OllamaRequest(Struct, kw_only=True):
    WITHOUT_EFFECT: ClassVar = ("keep_alive",)

    model: str
    stream: bool = True
    format: str | JsonObject | None = None
    options: OllamaOptions | None = None
    think: bool | Effort | None = None
    keep_alive: Any = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: Annotated[list[OllamaMessage], Meta(max_length=limits.MESSAGES_MAX)] = []
    tools: Annotated[list[ChatTool], Meta(max_length=limits.CLIENT_TOOLS_MAX)] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    UNSUPPORTED: ClassVar = ("suffix", "raw", "context", "template")

    prompt: str = ""
    system: str | None = None
    images: Images | None = None
    suffix: Any = None
    raw: Any = None
    context: Any = None
    template: Any = None


def _asks(path: str, name: str, summary: str, body: type[OllamaRequest], example: JsonObject) -> route:
    return route(
        f"POST {path}",
        name,
        summary,
        scope="chat",
        headers=(SESSION_ID_HEADER, *TURN_HEADERS),
        body=body,
        example={"model": "hermes-agent", **example},
        answers=OllamaAnswer,
        types=(_NDJSON,),
        keepalive=KEEPALIVE,
        errors=OllamaError,
        faults=TURN_FAULTS,
        takes_form_type=True,
        idempotent=True,
        begins_turns=True,
    )


@_asks(
    "/api/chat",
    "ollama_chat",
    "Chat, as Ollama does",
    OllamaChatRequest,
    {"messages": [{"role": "user", "content": "Which files are here?"}]},
)
async def chat(context: ServerContext, request: web.Request) -> web.StreamResponse:
    check_on(context, "ollama", request)
    body = await read(context, request, OllamaChatRequest)
    params = body.model
    return await _answer(context, request, body, list(_chat_messages(params.messages)), params.tools, "message")


@_asks("/api/generate", "ollama_generate", "Generate, as Ollama does", OllamaGenerateRequest, {"prompt": "Say hello."})
async def generate(context: ServerContext, request: web.Request) -> web.StreamResponse:
    check_on(context, "ollama", request)
    body = await read(context, request, OllamaGenerateRequest)
    params = body.model
    for name in params.UNSUPPORTED:
        if getattr(params, name):
            raise invalid(name, f"{name} is not supported.", "unsupported_parameter")
    system = [OllamaMessage(role="system", content=params.system)] if params.system else []
    prompt = [OllamaMessage(role="user", content=params.prompt, images=params.images)] if params.prompt else []
    given = list(_chat_messages([*system, *prompt])) if prompt else []
    return await _answer(context, request, body, given, None, "response")


async def _answer(
    context: ServerContext,
    request: web.Request,
    body: Body[Any],
    given: list[ChatMessage],
    tools: list[ChatTool] | None,
    form: Literal["message", "response"],
) -> web.StreamResponse:
    params: OllamaRequest = body.model
    created_at = _time(request_created_at(request))
    renderer = OllamaRenderer(params.model, created_at, form)
    if not given:  # which is how a model is loaded
        return answer(renderer.loaded())
    turn = await _turn(context, request, body, given, tools)
    renderer.thinking = turn.options.reasoning if params.think is None else params.think not in (False, "none")
    try:
        await turn.admit()
        if params.stream:
            headers = {**turn.headers(), **body.headers(), "Content-Type": _NDJSON}
            return await turn.stream(renderer, headers)
        ended = await turn.finish()
    finally:
        await turn.release()
    headers = turn.response_headers(ended, body, shows_failures=False)
    return answer(renderer.whole(ended), 200, headers)


async def _turn(
    context: ServerContext,
    request: web.Request,
    body: Body[Any],
    given: list[ChatMessage],
    tools: list[ChatTool] | None,
) -> Turn:
    params: OllamaRequest = body.model
    options = params.options or OllamaOptions()
    raw_options = body.raw.get("options")
    known = OllamaOptions.__struct_fields__
    body.ignored += [f"options.{name}" for name in raw_options or () if name not in known]
    effort: Effort | None = params.think if isinstance(params.think, str) else "none" if params.think is False else None
    body.names = _NAMES
    body.model = Parameters(
        model=_plain_name(params.model),
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        stop=options.stop,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        max_tokens=options.num_predict if options.num_predict is not None and options.num_predict > 0 else None,
        reasoning_effort=effort,
    )
    split = partial(split_messages, given, context.options.max_text_chars)
    parsed: ParsedMessages = await context.app.services.files.call_for(len(given), split)
    return await build_turn(
        context,
        request,
        body,
        parsed,
        client_tools(tools, None),
        response_format=_response_format(params.format),
        user=None,
        stream=params.stream,
    )


def _response_format(given: str | JsonObject | None) -> Message | None:
    if not given:
        return None
    if isinstance(given, dict):
        return structure("json_schema", JsonSchema(schema=given))
    if given != "json":
        raise invalid("format", "format is json, or a JSON schema.")
    return {"type": "json_object"}


def _chat_messages(messages: list[OllamaMessage]) -> Iterable[ChatMessage]:
    """The messages in the form of chat completions. Calls and results that have no ids are paired by name and order."""
    pending: list[tuple[str, str]] = []  # name and id of calls without a result
    for index, message in enumerate(messages):
        calls: list[Call] = []
        for number, call in enumerate(message.tool_calls or ()):
            function = CalledFunction(name=call.function.name, arguments=spaced_json(call.function.arguments))
            calls.append(Call(id=call.id or f"call_{index}_{number}", function=function))
        call_id = message.tool_call_id
        if message.role == "assistant":
            pending = [(call.function.name, call.id) for call in calls]
        elif message.role == "tool" and call_id is None and pending:
            named = [pair for pair in pending if pair[0] == message.tool_name] or pending
            call_id = named[0][1]
        pending = [pair for pair in pending if pair[1] != call_id]
        yield ChatMessage(
            role=message.role,
            content=_content(message),
            tool_calls=calls or None,
            tool_call_id=(call_id or "unknown") if message.role == "tool" else None,
        )


def _content(message: OllamaMessage) -> str | list[str | JsonObject]:
    if not message.images:
        return message.content
    text = [{"type": "text", "text": message.content}] if message.content else []
    return [*text, *({"type": "image_url", "image_url": {"url": _data_url(image)}} for image in message.images)]


def _data_url(image: str) -> str:
    if image.startswith("data:"):
        return image
    kind = next((kind for begins, kind in _IMAGES.items() if image.startswith(begins)), "png")
    return f"data:image/{kind};base64,{image}"
