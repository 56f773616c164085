"""Tools of a request for a response: the client's as functions, hosted ones as server tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hermes.core.json_types import Message
from hermes.core.limits import CLIENT_TOOLS_MAX
from hermes.server.errors import ApiError, invalid, missing
from hermes.server.keys import Key
from hermes.server.models import AdditionalTools, NamespacedTool, ResponseTool
from hermes.server.request_bodies import parse
from hermes.server.tool_types import CLIENT_TYPES, HOSTED_TYPES, flat_name, is_hosted
from hermes.server.turn_spec import Tools, choice_of

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

_NAMESPACE = "namespace"


def additional(given: object, where: str) -> list[ResponseTool]:
    try:
        return parse({"tools": given}, AdditionalTools).model.tools
    except ApiError as error:
        raise invalid(f"{where}.{error.param}", error.message, error.code) from None


def response_tools(
    tools: Sequence[ResponseTool],
    added: Sequence[ResponseTool],
    choice: str | Message | None,
    ignored: list[str],
) -> Tools:
    """Validate the tools of a request. Tools in the input (`added`) replace earlier ones of the same name.

    Tools without effect are added to `ignored`.
    """
    schemas: dict[str, Message] = {}
    reported: dict[str, Message] = {}
    hosted: list[str] = []
    own = len(tools)
    for at, tool in enumerate((*tools, *added)):
        where = f"tools[{at}]" if at < own else "input"
        if tool.type in HOSTED_TYPES or is_hosted(tool.type, tool.environment, tool.execution):
            hosted.append(tool.type)
            continue
        for name, schema, called in _functions(tool, where):
            if name in schemas and at < own:
                raise invalid(f"{where}.name", f"There are two tools named {name!r}.")
            schemas[name] = schema
            if called != {"type": "function", "name": name}:
                reported[name] = called
            else:
                reported.pop(name, None)
    if len(schemas) > CLIENT_TOOLS_MAX:
        message = f"There are more than {CLIENT_TOOLS_MAX} tools, those of namespaces included."
        raise invalid("tools", message, "array_above_max_length")
    chosen = _choice(choice, ignored)
    if chosen == "required" and tools and not schemas:  # only hosted ones, which are left to the model
        ignored.append("tool_choice")
        chosen = None
    return Tools(tuple(schemas.values()), *choice_of(chosen, set(schemas)), reported, tuple(dict.fromkeys(hosted)))


async def stand_in(
    context: ServerContext, caller: Key, tools: Tools, narrowed: frozenset[str] | None, ignored: list[str]
) -> frozenset[str]:
    """Offer the server's own tools, as far as the request may use them, for hosted ones: their toolsets."""
    used: set[str] = set()
    own = {schema["function"]["name"] for schema in tools.schemas}
    for kind in tools.hosted:
        hosted = HOSTED_TYPES.get(kind)
        offered = await context.offered(hosted.toolset, narrowed, caller) if hosted is not None else frozenset()
        if hosted is None or hosted.needs not in offered:
            ignored.append(f"tools.{kind}")
            continue
        used.add(hosted.toolset)
        # A client tool hides a server tool of the same name.
        tools.reported |= {name: {"type": kind} for name in hosted.fields if name in offered and name not in own}
    return frozenset(used)


def _functions(tool: ResponseTool, where: str) -> Iterator[tuple[str, Message, Message]]:
    """The functions of a tool: name, schema, and how the client knows each."""
    if tool.type != _NAMESPACE:
        yield _function(tool, where, None)
        return
    namespace = _name(tool, where)
    for at, inner in enumerate(tool.tools or ()):
        place = f"{where}.tools[{at}]"
        if inner.type not in ("function", "custom"):
            message = f"A namespace holds function and custom tools, not {inner.type!r}."
            raise invalid(f"{place}.type", message, "unsupported_tool_type")
        yield _function(inner, place, namespace)


def _function(tool: NamespacedTool, where: str, namespace: str | None) -> tuple[str, Message, Message]:
    kind = CLIENT_TYPES.get(tool.type)
    if kind is None:
        message = f"There is no tool type {tool.type!r}; client tools are {', '.join(CLIENT_TYPES)} and {_NAMESPACE}."
        raise invalid(f"{where}.type", message, "unsupported_tool_type")
    called = {"type": tool.type, "name": kind.function or _name(tool, where)}
    if namespace:
        called["namespace"] = namespace
    name = flat_name(namespace, called["name"])
    return name, kind.schema(tool, name), called


def _name(tool: NamespacedTool, where: str) -> str:
    if tool.name is None:
        param = f"{where}.name"
        raise missing(param)
    return tool.name


def _choice(given: str | Message | None, ignored: list[str]) -> str | Message | None:
    """A choice in terms of functions. The choice of a hosted tool is left to the model."""
    if not isinstance(given, Mapping):
        return given
    if given.get("type") == "allowed_tools" and isinstance(given.get("tools"), list):
        return {**given, "tools": [_chosen(tool) for tool in given["tools"] if not _is_hosted(tool)]}
    if _is_hosted(given):
        ignored.append("tool_choice")
        return None
    chosen: Message = _chosen(given)
    return chosen


def _is_hosted(tool: object) -> bool:
    return isinstance(tool, Mapping) and isinstance(tool.get("type"), str) and tool["type"] in HOSTED_TYPES


def _chosen(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if not isinstance(kind, str) or kind not in CLIENT_TYPES:
        return tool
    name, namespace = CLIENT_TYPES[kind].function or tool.get("name"), tool.get(_NAMESPACE)
    if not isinstance(name, str) or not isinstance(namespace, str | None):
        return tool
    return {"type": "function", "name": flat_name(namespace, name)}
