"""The tool types of the Responses routes, and the items that their calls and outputs travel as.

The model is offered every client tool as a function; hosted tools stand for tools of the server. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import FUNCTION_NAME_CHARS_MAX
from hermes.core.text import spaced_json
from hermes.server.models import NamespacedTool

_NO_RESULT = "[The client kept no result of this call.]"
_NONE: JsonMapping = MappingProxyType({})


def flat_name(namespace: str | None, name: str) -> str:
    """The function name of a tool in a namespace; shortened with a digest where it would be too long."""
    if not namespace:
        return name
    flat = f"{namespace}__{name}"
    if len(flat) <= FUNCTION_NAME_CHARS_MAX:
        return flat
    return f"{flat[: FUNCTION_NAME_CHARS_MAX - 9]}_{hashlib.sha256(flat.encode()).hexdigest()[:8]}"


def object_of(arguments: str) -> JsonObject:
    """Arguments that do not parse are empty."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _parameters(required: tuple[str, ...], **properties: JsonObject) -> JsonObject:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


# --- tools that the client executes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientType:
    """One type of client tool.

    `payload` is the field of a call's item that holds the arguments: `pack` makes it from the function's arguments,
    `unpack` does the reverse. `event` is the prefix of the events that stream it. A type without `parameters` takes
    those of the tool itself, and one without `function` its name. `takes_parts`: the output may be a list of parts.
    """

    call: str
    output: str
    prefix: str
    payload: str
    pack: Callable[[str], Any] = object_of
    unpack: Callable[[Any], str] = spaced_json
    payload_type: type = dict
    event: str | None = None
    function: str | None = None
    description: str = ""
    parameters: JsonObject | None = None
    constant: JsonMapping = field(default_factory=dict)
    content: Callable[[JsonMapping], Any] = lambda item: item.get("output")
    takes_parts: bool = True

    def schema(self, tool: NamespacedTool, name: str) -> JsonObject:
        """The function that stands for a tool of this type."""
        parameters = self.parameters or tool.parameters or {"type": "object", "properties": {}}
        description = tool.description or self.description
        schema: JsonObject = {"name": name, "description": description, "parameters": parameters}
        if tool.type == "custom":
            schema["format"] = tool.format or {"type": "text"}
        return {"type": "function", "function": schema}

    def item(self, called: JsonMapping, item_id: str, call_id: str) -> JsonObject:
        """The item of a call of the tool `called`, before its payload is known."""
        named = {} if self.function else {key: called[key] for key in ("name", "namespace") if called.get(key)}
        return {"type": self.call, "id": item_id, "call_id": call_id, **named, **self.constant}


def _custom_input(arguments: str) -> str:
    value = object_of(arguments)
    given = value.get("input", next(iter(value.values()), "") if len(value) == 1 else None)
    return given if isinstance(given, str) else arguments


def _shell_content(item: JsonMapping) -> Any:
    output = item.get("output")
    return spaced_json(output) if isinstance(output, list) else output


def _patch_content(item: JsonMapping) -> Any:
    return item.get("output") or f"The patch was {'not applied' if item.get('status') == 'failed' else 'applied'}."


def _loaded(item: JsonMapping) -> Any:
    tools = item.get("tools")
    listed = tools if isinstance(tools, list) else ()
    names = [str(tool.get("name")) for tool in listed if isinstance(tool, Mapping)]
    return f"These tools can be called now: {', '.join(names)}." if names else "No tool was found."


_COMMANDS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_MILLISECONDS = {"type": "integer", "minimum": 1}
CLIENT_TYPES: dict[str, ClientType] = {
    "function": ClientType(
        "function_call",
        "function_call_output",
        "fc",
        "arguments",
        pack=str,
        unpack=lambda given: given or "{}",
        payload_type=str,
        event="response.function_call_arguments",
    ),
    "custom": ClientType(
        "custom_tool_call",
        "custom_tool_call_output",
        "ctc",
        "input",
        pack=_custom_input,
        unpack=lambda given: spaced_json({"input": given}),
        payload_type=str,
        event="response.custom_tool_call_input",
        parameters=_parameters(("input",), input={"type": "string", "description": "The whole input, as plain text."}),
    ),
    "local_shell": ClientType(
        "local_shell_call",
        "local_shell_call_output",
        "lsh",
        "action",
        pack=lambda arguments: {"type": "exec", "command": [], "env": {}, **object_of(arguments)},
        unpack=lambda given: spaced_json({key: value for key, value in given.items() if key not in ("type", "env")}),
        function="local_shell",
        description="Run a command on the user's machine.",
        parameters=_parameters(
            ("command",),
            command={**_COMMANDS, "description": "The program and its arguments."},
            working_directory={"type": "string"},
            timeout_ms=_MILLISECONDS,
        ),
    ),
    "shell": ClientType(
        "shell_call",
        "shell_call_output",
        "sh",
        "action",
        pack=lambda arguments: {"commands": [], "timeout_ms": None, "max_output_length": None, **object_of(arguments)},
        unpack=lambda given: spaced_json({key: value for key, value in given.items() if value is not None}),
        function="shell",
        description="Run shell commands on the user's machine.",
        parameters=_parameters(
            ("commands",),
            commands={**_COMMANDS, "description": "Commands, each run by the shell."},
            timeout_ms=_MILLISECONDS,
            max_output_length={"type": "integer", "minimum": 1},
        ),
        content=_shell_content,
        takes_parts=False,
    ),
    "apply_patch": ClientType(
        "apply_patch_call",
        "apply_patch_call_output",
        "apc",
        "operation",
        function="apply_patch",
        description="Create, update or delete a file on the user's machine.",
        parameters=_parameters(
            ("type", "path"),
            type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            path={"type": "string"},
            diff={
                "type": "string",
                "description": "A V4A diff: lines that begin with a space, + or -, under headers that begin with @@. "
                "A new file has only lines that begin with +.",
            },
        ),
        content=_patch_content,
    ),
    "tool_search": ClientType(
        "tool_search_call",
        "tool_search_output",
        "tsc",
        "arguments",
        function="tool_search",
        description="Search for further tools; those that are found can be called afterwards.",
        constant={"execution": "client"},
        content=_loaded,
        takes_parts=False,
    ),
}
CALL_ITEMS = {kind.call: kind for kind in CLIENT_TYPES.values()}
OUTPUT_ITEMS = {kind.output: kind for kind in CLIENT_TYPES.values()}


# --- tools that the server has in the place of hosted ones -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostedType:
    """A hosted tool: the server's tools in its place, and the item that shows a call of one of them.

    Without the tool `needs` the others are no equivalent. `fields` turns a tool's arguments into fields of the item,
    `result` its result; `given` reads an item of a history back as tool, arguments and result.
    """

    toolset: str
    needs: str
    call: str
    prefix: str
    fields: Mapping[str, Callable[[JsonObject], JsonObject]]
    working: str
    given: Callable[[JsonMapping], tuple[str, JsonObject, str]]
    result: Callable[[str], JsonObject] = lambda _: {}


def _first(value: object) -> str:
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) else ""


def _searched(item: JsonMapping) -> tuple[str, JsonObject, str]:
    action = item.get("action")
    action = action if isinstance(action, Mapping) else _NONE
    if url := _first(action.get("url")):
        return "web_extract", {"urls": [url]}, _NO_RESULT
    return "web_search", {"query": _first(action.get("query")) or _first(action.get("queries"))}, _NO_RESULT


def _interpreted(item: JsonMapping) -> tuple[str, JsonObject, str]:
    outputs = item.get("outputs")
    items = [output for output in outputs if isinstance(output, Mapping)] if isinstance(outputs, list) else []
    logs = "\n".join(_first(output.get("logs")) for output in items if output.get("type") == "logs")
    return "execute_code", {"code": _first(item.get("code"))}, logs or _NO_RESULT


_WEB_SEARCH = HostedType(
    "web",
    "web_search",
    "web_search_call",
    "ws",
    {
        "web_search": lambda args: {"action": {"type": "search", "query": _first(args.get("query"))}},
        "web_extract": lambda args: {"action": {"type": "open_page", "url": _first(args.get("urls"))}},
    },
    "searching",
    _searched,
)
_CODE_INTERPRETER = HostedType(
    "code_execution",
    "execute_code",
    "code_interpreter_call",
    "ci",
    {"execute_code": lambda args: {"code": _first(args.get("code")), "container_id": "hermes", "outputs": None}},
    "interpreting",
    _interpreted,
    lambda output: {"outputs": [{"type": "logs", "logs": output}]},
)
_SEARCHES = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
_UNAVAILABLE = ("computer", "computer_use", "computer_use_preview", "file_search", "image_generation", "mcp")
# OpenAI's types that are not the client's to execute; None: the server has no equivalent.
HOSTED_TYPES: dict[str, HostedType | None] = {
    **dict.fromkeys(_SEARCHES, _WEB_SEARCH),
    "code_interpreter": _CODE_INTERPRETER,
    **dict.fromkeys((*_UNAVAILABLE, "programmatic_tool_calling")),
}
HOSTED_ITEMS = {hosted.call: hosted for hosted in (_WEB_SEARCH, _CODE_INTERPRETER)}
# Items that mean nothing to another model: ignored and reported.
IGNORED_ITEMS = (
    *("computer_call", "computer_call_output", "file_search_call", "image_generation_call", "mcp_approval_request"),
    *("mcp_approval_response", "mcp_list_tools", "program", "program_output"),
)


def is_hosted(kind: str, environment: JsonMapping | None, execution: str | None) -> bool:
    """Whether a client type's tool is executed by the server after all."""
    if kind == "shell":
        return environment is not None and environment.get("type") not in (None, "local")
    return kind == "tool_search" and execution != "client"
