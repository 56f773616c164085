"""From a request to its `RunSpec`: the one builder, the model's route, and the client's tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from hermes.core.ids import scope_name
from hermes.core.json_types import JsonMapping, Message
from hermes.core.spec import RouteChoice, RunSpec
from hermes.server.errors import ApiError, invalid, missing
from hermes.server.keys import Key
from hermes.server.models import ChatTool, Parameters
from hermes.server.request_bodies import Body
from hermes.server.request_options import RequestOptions
from hermes.services import models
from hermes.store.history_match import match
from hermes.store.rows import row_of_message

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(slots=True)
class Tools:
    """A client's functions, and how they may be chosen.

    `reported`: how the client knows a tool that is not a plain function; `hosted`: tool types that the server executes.
    """

    schemas: tuple[Message, ...] = ()
    choice: str | Message | None = None
    allowed: frozenset[str] | None = None
    reported: dict[str, Message] = field(default_factory=dict)
    hosted: tuple[str, ...] = ()


def build_spec(
    context: ServerContext,
    caller: Key,
    options: RequestOptions,
    body: Body[Any],
    spec: RunSpec,
    *,
    announces: bool = False,
) -> RunSpec:
    """The turn's spec: the API's own part (`spec`) with the options of headers and common parameters.

    A turn that ends with its client has `on_detach="cancel"`, which the headers may change. `announces`: the stream
    shows questions of the agent, so they are asked unless the client says otherwise.
    """
    toolsets = context.toolsets(options.toolsets)
    sampling, max_output_tokens, reasoning, metadata, route = spec.sampling, None, None, spec.metadata, spec.route
    given = body.model
    if isinstance(given, Parameters):
        if isinstance(given.provider, dict):
            body.ignored.append("provider")
        sampling = {**sampling}
        for name in models.SAMPLING:
            if (value := getattr(given, name, None)) is not None:
                sampling.setdefault(name, value)
        limits: dict[str, int] = {}
        for name in _LIMITS:
            if (max_tokens := getattr(given, name)) is not None:
                limits[name] = max_output_tokens = max_tokens
        if len(set(limits.values())) > 1:
            raise invalid(list(limits)[-1], f"{' and '.join(limits)} are the same limit and have different values.")
        effort = given.reasoning_effort or (given.reasoning.effort if given.reasoning else None)
        reasoning = {"enabled": effort != "none", "effort": effort} if effort else None
        metadata = dict(given.metadata or {})
        route = route_of(context, caller, given.model, given.provider if isinstance(given.provider, str) else None)
    return spec.replace(
        run_id=spec.run_id if options.recording is None else options.recording.run_id,
        session_key=options.session_key,
        route=route,
        sampling=sampling,
        reasoning=reasoning,
        max_output_tokens=max_output_tokens,
        toolsets=toolsets,
        toolsets_by_default=options.toolsets is None and toolsets is not None,
        disabled_toolsets=options.disabled_toolsets,
        tool_policy=caller.toolsets,
        allowed_models=caller.models,
        approvals="deny" if options.approvals == "deny" else None,
        answerable=announces if options.approvals is None else options.approvals == "wait",
        on_detach="continue" if options.detach or spec.on_detach == "continue" else "cancel",
        deadline_seconds=options.deadline_s,
        metadata=metadata,
    )


def route_of(context: ServerContext, caller: Key, model: str | None, provider: str | None = None) -> RouteChoice | None:
    """The route that a request names; None: the session's, else the configured one."""
    aliases = context.options.model_routes
    is_default = not model or (model == context.model_name and model not in aliases)
    if provider:
        choice = models.of_provider(context.settings, provider, None if is_default else model)
        model = f"{provider}/{(choice.model if choice else model) or ''}"
        _check_allowed(caller, model)
        if choice is None:
            message = f"There is no model {model!r} here: the provider is not configured, or no model is named for it."
            raise invalid("provider", f"{message} GET /v1/models lists what can be asked for.")
        return choice
    if not model or is_default:
        return None
    _check_allowed(caller, model)
    choice = RouteChoice(alias=model) if model in aliases else models.named(context.app.settings, model)
    # A key that is limited to certain models never gets another one in place of a removed one.
    if choice is None and (context.options.strict_models or caller.models is not None):
        raise ApiError(404, f"There is no model {model!r} here; GET /v1/models lists them.", "model_not_found", "model")
    return choice or RouteChoice()


async def check_model(context: ServerContext, caller: Key, spec: RunSpec) -> None:
    """A turn without a model uses its session's, or the default: its key must allow that one."""
    if spec.route is None and caller.models is not None:
        session = await context.session(spec.session_id) if spec.persist else None
        own = session["model"] if session and session["owner"] == spec.owner else None
        _check_allowed(caller, own or context.model_name)


def _check_allowed(caller: Key, name: str) -> None:
    """A ceiling holds names as requested: `provider/model` is allowed only where it is listed as such."""
    if caller.models is not None and name not in caller.models:
        message = f"This key may not use the model {name!r}; it may use {', '.join(sorted(caller.models))}."
        raise ApiError(403, message, "model_not_allowed", "model")


def client_tools(tools: Sequence[ChatTool] | None, choice: str | Message | None) -> Tools:
    if not tools and choice is None:
        return Tools()
    schemas: list[Message] = []
    names: set[str] = set()
    for at, tool in enumerate(tools or ()):
        where = f"tools[{at}]"
        if tool.type != "function":
            message = f"Tools of the type {tool.type!r} are not supported; only functions of the client are."
            raise invalid(f"{where}.type", message, "unsupported_tool_type")
        function = tool.function
        where += ".function"
        if function is None:
            raise missing(where)
        if function.name in names:
            raise invalid(f"{where}.name", f"There are two tools named {function.name!r}.")
        names.add(function.name)
        schema: Message = {"name": function.name, "description": function.description or ""}
        schema["parameters"] = function.parameters or {"type": "object", "properties": {}}
        schemas.append({"type": "function", "function": schema})
    return Tools(tuple(schemas), *choice_of(choice, names))


def choice_of(given: str | Message | None, names: set[str]) -> tuple[str | Message | None, frozenset[str] | None]:
    """The tool choice in the form of chat completions, and the allowed functions."""
    if given is None or isinstance(given, str):
        if given not in (None, "auto", "none", "required"):
            raise invalid("tool_choice", "tool_choice is auto, none, required, or names a function.")
        if given == "required" and not names:
            raise invalid("tool_choice", "tool_choice is required, and there are no tools.")
        return given, None
    if given.get("type") == "allowed_tools":
        inner = given.get("allowed_tools")
        options: JsonMapping = inner if isinstance(inner, Mapping) else given
        listed = options.get("tools")
        if not isinstance(listed, list) or options.get("mode", "auto") not in ("auto", "required"):
            raise invalid("tool_choice", "allowed_tools has a mode (auto or required) and a list of tools.")
        allowed = {_named(tool) for tool in listed}
        if not allowed <= names:
            raise invalid("tool_choice", "allowed_tools names a function that is not among the tools.")
        return options.get("mode", "auto"), frozenset(n for n in allowed if n)
    if given.get("type") == "function" and (name := _named(given)) in names:
        return {"type": "function", "function": {"name": name}}, None
    raise invalid("tool_choice", "tool_choice names something that is not among the tools.")


def _named(tool: object) -> str | None:
    if not isinstance(tool, Mapping):
        return None
    inner = tool.get("function")
    name = (inner if isinstance(inner, Mapping) else tool).get("name")
    return name if isinstance(name, str) else None


# --- calls of tools that a history holds --------------------------------------------------------------------------------


async def with_unseen(context: ServerContext, spec: RunSpec, history: list[Message]) -> list[Message]:
    """The history with the server's own calls, where exactly one suspended turn matches these results."""
    if not spec.results:
        return history
    call_id, scope = str(spec.results[0]["tool_call_id"]), scope_name(spec.owner, spec.session_key)
    candidates = await context.stored_responses.suspended(call_id, scope)
    matches = [match(history, [row_of_message("", message) for message in one]) for one in candidates]
    same = [alignment for alignment in matches if alignment is not None and not alignment.remaining]
    return same[0].with_unseen() if len(same) == 1 else history


def open_calls(messages: Sequence[JsonMapping]) -> list[str]:
    """Ids of the last message's calls that have no results."""
    answered: set[Any] = set()
    for message in reversed(messages):
        if message.get("role") != "tool":
            calls = message.get("tool_calls") or () if message.get("role") == "assistant" else ()
            return [str(call["id"]) for call in calls if call.get("id") not in answered]
        answered.add(message.get("tool_call_id"))
    return []


def missing_output(call_id: str) -> ApiError:
    message = f"The tool call {call_id!r} has no output; it must be answered before anything else is said."
    return ApiError(400, message, "tool_output_missing", "tool_call_id")


def answered_calls(messages: Sequence[JsonMapping]) -> set[Any]:
    return {message.get("tool_call_id") for message in messages if message.get("role") == "tool"}


def answered_again(
    messages: Sequence[Message], results: Sequence[JsonMapping]
) -> tuple[list[Message], tuple[JsonMapping, ...]] | None:
    """The conversation before the client's outputs of the last calls, and all of these outputs: the new ones, else the
    earlier ones. None: the results are of other calls, or the user has spoken since."""
    given = {str(result["tool_call_id"]): result for result in results}
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].get("role") == "user":
            return None
        calls = messages[at].get("tool_calls") or ()
        if not given.keys() & {str(call["id"]) for call in calls}:
            continue
        outputs = list(takewhile(lambda message: message.get("role") == "tool", messages[at + 1 :]))
        own = [message for message in outputs if message.get("tool_name")]
        clients = {str(message["tool_call_id"]): message for message in outputs if not message.get("tool_name")}
        if not given.keys() <= clients.keys():
            return None
        again = [given.get(i) or {k: v for k, v in output.items() if k != "role"} for i, output in clients.items()]
        return [*messages[: at + 1], *own], tuple(again)
    return None
