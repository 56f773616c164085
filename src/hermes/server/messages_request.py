"""Requests of the Messages protocol: their types, and the conversation, tools and parameters that they come to. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from hermes.core import limits
from hermes.core.json_types import JsonMapping, JsonObject, Message
from hermes.core.text import decode_base64, spaced_json, text_of
from hermes.server.chat import ParsedMessages, split_conversation, structure
from hermes.server.content import joined, part_of
from hermes.server.errors import invalid, missing
from hermes.server.models import Count, JsonSchema, Label, Parameters
from hermes.server.turn_spec import Tools, choice_of
from hermes.settings.schema_types import Effort

ToolName = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,128}$")]
# Tools that run at the server which is asked: the agent has its own in their place.
_HOSTED_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_")
# The budget of tokens up to which thinking has this effort; above them it is high.
_EFFORTS: tuple[tuple[int, Effort], ...] = ((4_096, "low"), (16_384, "medium"))
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Where the protocol has parameters that every turn has, by the names of the latter.
NAMES = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


class MessageParam(Struct, kw_only=True):
    """A message. What its blocks hold is checked block by block."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[JsonObject], Meta(max_length=limits.CONTENT_PARTS_MAX)]


class MessagesTool(Struct, kw_only=True):
    """A tool of the client, which has an input_schema, or one of the server, which has a type."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    cache_control: Any = None


class MessagesToolChoice(Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: JsonObject


class OutputConfig(Struct, kw_only=True):
    effort: Effort | None = None
    format: OutputFormat | None = None


class MessagesMetadata(Struct, kw_only=True):
    user_id: Label | None = None


class Thread(Struct, kw_only=True):
    """Whether the conversation goes on from a message of before: then only what is new is sent."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class CountTokensRequest(Struct, kw_only=True):
    """What tokens are counted of: a request without what only its answer needs."""

    UNSUPPORTED: ClassVar = ("mcp_servers",)
    WITHOUT_EFFECT: ClassVar = ("cache_control", "context_management", "container", "top_k", "inference_geo")

    model: str
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=limits.MESSAGES_MAX)]
    system: str | Annotated[list[JsonObject], Meta(max_length=limits.CONTENT_PARTS_MAX)] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=limits.CLIENT_TOOLS_MAX)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Label | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=limits.STOP_STRINGS_MAX)] | None = None
    max_tokens: Count | None = None
    stream: bool = False
    thread: Thread | None = None
    cache_control: Any = None
    context_management: Any = None
    container: Any = None
    top_k: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Count


def parameters(params: CountTokensRequest) -> Parameters:
    """What the model is asked for, as every turn has it."""
    effort = params.output_config.effort if params.output_config else None
    if params.thinking is not None and params.thinking.type == "disabled":
        effort = "none"
    elif params.thinking is not None and (budget := params.thinking.budget_tokens) is not None and effort is None:
        effort = next((name for most, name in _EFFORTS if budget <= most), "high")
    one_at_a_time = params.tool_choice is not None and params.tool_choice.disable_parallel_tool_use
    return Parameters(
        model=params.model,
        temperature=params.temperature,
        top_p=params.top_p,
        stop=params.stop_sequences or None,
        max_tokens=params.max_tokens,
        reasoning_effort=effort,
        parallel_tool_calls=False if one_at_a_time else None,
        service_tier=params.service_tier,
    )


def shows_thinking(params: CountTokensRequest, by_default: bool) -> bool:
    if params.thinking is None:
        return by_default
    return params.thinking.type != "disabled" and params.thinking.display != "omitted"


def response_format(params: CountTokensRequest) -> Message | None:
    """`output_format` is what earlier clients call `output_config.format`."""
    form, where = params.output_format, "output_format"
    if params.output_config is not None and params.output_config.format is not None:
        form, where = params.output_config.format, "output_config.format"
    return structure(form.type, JsonSchema(schema=form.schema, strict=True), where) if form else None


def tools_of(params: CountTokensRequest) -> tuple[Tools, list[str]]:
    """The client's tools, and the places of those in whose stead the agent uses its own."""
    schemas: list[Message] = []
    names: set[str] = set()
    hosted: list[str] = []
    for at, tool in enumerate(params.tools or ()):
        where = f"tools[{at}]"
        if tool.type is not None and tool.type.startswith(_HOSTED_TOOLS):
            hosted.append(where)
            continue
        if tool.type not in (None, "custom"):
            message = f"Tools of the type {tool.type!r} are not taken; describe the tool by an input_schema."
            raise invalid(f"{where}.type", message, "unsupported_tool_type")
        if tool.input_schema is None:
            place = f"{where}.input_schema"
            raise missing(place)
        if tool.name in names:
            raise invalid(f"{where}.name", f"There are two tools named {tool.name!r}.")
        names.add(tool.name)
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        schemas.append({"type": "function", "function": function})
    choice: str | Message | None = None
    if params.tool_choice is not None:
        choice = _CHOICES.get(params.tool_choice.type) or {
            "type": "function",
            "function": {"name": params.tool_choice.name},
        }
        if hosted and not names:
            choice = None  # whether the agent uses its own tools is not for the client to say
    return Tools(tuple(schemas), *choice_of(choice, names)), hosted


# --- messages --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Reader:
    """Reads the blocks of a conversation. `ignored` are the places of blocks without effect."""

    chars_max: int
    system: list[str] = field(default_factory=list)
    conversation: list[Message] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def read(self, index: int, message: MessageParam) -> None:
        where = f"messages[{index}].content"
        blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
        read = {"user": self._user, "assistant": self._assistant, "system": self._system}[message.role]
        for added in read(blocks, where):
            self.conversation.append(added)
            self.indexes.append(index)

    def _system(self, blocks: list[JsonObject], where: str) -> list[Message]:
        """System text within the conversation stays in its place, as a part of what the user says there: were it in the
        system prompt, that would be another one with every such message, and so would be the session."""
        texts = []
        for at, block in enumerate(blocks):
            if block.get("type") == "text":
                texts.append(part_of(block, f"{where}[{at}]", self.chars_max)["text"])
            else:
                self.ignored.append(f"{where}[{at}]")
        if not self.conversation:
            self.system += texts
            return []
        parts = [{"type": "text", "text": f"<system-reminder>\n{text}\n</system-reminder>"} for text in texts]
        if not parts or self.conversation[-1]["role"] != "user":
            return [{"role": "user", "content": joined(parts)}] if parts else []
        previous = self.conversation[-1]["content"]
        before = [{"type": "text", "text": previous}] if isinstance(previous, str) else previous
        self.conversation[-1]["content"] = joined([*before, *parts])
        return []

    def _user(self, blocks: list[JsonObject], where: str) -> list[Message]:
        results: list[Message] = []
        parts: list[JsonObject] = []
        for at, block in enumerate(blocks):
            place = f"{where}[{at}]"
            if block.get("type") == "tool_result":
                results.append(self._result(block, place))
            else:
                parts += self._parts(block, place)
        return [*results, {"role": "user", "content": joined(parts)}] if parts or not results else results

    def _assistant(self, blocks: list[JsonObject], where: str) -> list[Message]:
        texts: list[str] = []
        calls: list[JsonObject] = []
        for at, block in enumerate(blocks):
            place, kind = f"{where}[{at}]", block.get("type")
            if kind == "text":
                texts.append(part_of(block, place, self.chars_max)["text"])
            elif kind == "tool_use":
                calls.append(_call(block, place))
            elif kind not in ("thinking", "redacted_thinking"):
                self.ignored.append(place)
        # Each message of a turn with several is a block of its own in what the client was given.
        message: Message = {"role": "assistant", "content": "\n\n".join(filter(None, texts))}
        return [{**message, "tool_calls": calls} if calls else message]

    def _result(self, block: JsonObject, where: str) -> Message:
        call_id, given = _text(block, "tool_use_id", where), block.get("content")
        if given is None or isinstance(given, str):
            given = [{"type": "text", "text": given or ""}]
        blocks = _blocks(given, f"{where}.content")
        parts = [part for at, inner in enumerate(blocks) for part in self._parts(inner, f"{where}.content[{at}]")]
        content = joined(parts)
        if block.get("is_error") is True and isinstance(content, str) and "error" not in content[:40].lower():
            content = f"Error: {content}"
        return {"role": "tool", "content": content, "tool_call_id": call_id}

    def _parts(self, block: JsonObject, where: str) -> list[JsonObject]:
        read = _PARTS.get(str(block.get("type")))
        if read is None:
            message = f"Unsupported content in {where!r}: the type {block.get('type')!r} is not taken here."
            raise invalid(f"{where}.type", message, "unsupported_content_type")
        parts = read(block, where)
        return [part_of(part, where, self.chars_max) if part["type"] == "text" else part for part in parts]


def read_conversation(params: CountTokensRequest, chars_max: int) -> tuple[ParsedMessages, list[str]]:
    """The conversation of a request, and the places of blocks that have no effect."""
    reader = _Reader(chars_max)
    if params.system:
        blocks = [{"type": "text", "text": params.system}] if isinstance(params.system, str) else params.system
        reader.system += system_texts(blocks, "system", chars_max)
    for index, message in enumerate(params.messages):
        reader.read(index, message)
    system = "\n\n".join(reader.system) if reader.system else None
    return split_conversation(system, reader.conversation, reader.indexes), reader.ignored


def system_texts(blocks: list[JsonObject], where: str, chars_max: int) -> list[str]:
    parts = [part_of(block, f"{where}[{at}]", chars_max, text_only=True) for at, block in enumerate(blocks)]
    return [text for part in parts if (text := text_of([part])).strip()]


def _call(block: JsonMapping, where: str) -> JsonObject:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid(
            f"{where}.input", f"Invalid type for {where + '.input'!r}: an object is expected.", "invalid_type"
        )
    function = {"name": _text(block, "name", where), "arguments": spaced_json(arguments)}
    return {"id": _text(block, "id", where), "type": "function", "function": function}


def _text(block: JsonMapping, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(f"{where}.{name}", f"{where + '.' + name!r} must be text.", "invalid_type")
    return value


def _blocks(value: object, where: str) -> list[JsonObject]:
    if not isinstance(value, list) or not all(isinstance(block, dict) for block in value):
        raise invalid(where, f"Invalid type for {where!r}: text or a list of blocks is expected.", "invalid_type")
    if len(value) > limits.CONTENT_PARTS_MAX:
        message = f"{where!r} has more than {limits.CONTENT_PARTS_MAX} blocks."
        raise invalid(where, message, "array_above_max_length")
    return value


# --- parts of a user's message ---------------------------------------------------------------------------------------


def _source(block: JsonMapping, where: str, kinds: tuple[str, ...]) -> JsonMapping:
    source = block.get("source")
    if not isinstance(source, Mapping):
        raise invalid(f"{where}.source", f"{where + '.source'!r} must be an object.", "invalid_type")
    if source.get("type") not in kinds:
        message = f"A source here is one of {', '.join(kinds)}; files are not kept under ids."
        raise invalid(f"{where}.source.type", message, "unsupported_content_type")
    return source


def _data_url(source: JsonMapping, where: str, kind: str = r"[\w.+-]+") -> str:
    media_type, data = (_text(source, name, f"{where}.source") for name in ("media_type", "data"))
    if not re.fullmatch(rf"{kind}/[\w.+-]+", media_type, re.ASCII):
        message = f"The media_type {media_type!r} is not taken here."
        raise invalid(f"{where}.source.media_type", message, "unsupported_content_type")
    if decode_base64(data) is None:
        place = f"{where}.source.data"
        raise invalid(place, f"{place!r} is not valid base64.", "invalid_content_part")
    return f"data:{media_type};base64,{data}"


def _image(block: JsonMapping, where: str) -> list[JsonObject]:
    source = _source(block, where, ("base64", "url"))
    if source["type"] == "base64":
        url = _data_url(source, where, "image")
    else:
        url = _text(source, "url", f"{where}.source")
        if not re.match(r"https?://[^\s/]", url, re.IGNORECASE):
            message = f"{where + '.source.url'!r} must begin with http:// or https://."
            raise invalid(f"{where}.source.url", message, "invalid_image_url")
    return [{"type": "image_url", "image_url": {"url": url}}]


def _document(block: JsonMapping, where: str) -> list[JsonObject]:
    source = _source(block, where, ("base64", "text", "content"))
    title, context = (value if isinstance(value := block.get(name), str) else "" for name in ("title", "context"))
    intro = [{"type": "text", "text": text} for text in (title, context) if text]
    if source["type"] == "base64":
        file = {"name": title or "document.pdf", "data": _data_url(source, where), "media_type": source["media_type"]}
        return [*intro[bool(title) :], {"type": "file", "file": file}]
    if source["type"] == "text":
        return [*intro, {"type": "text", "text": _text(source, "data", f"{where}.source")}]
    return [*intro, *_inner(source.get("content"), f"{where}.source.content")]


def _search_result(block: JsonMapping, where: str) -> list[JsonObject]:
    heading = f"{_text(block, 'title', where)} ({_text(block, 'source', where)})"
    return [{"type": "text", "text": heading}, *_inner(block.get("content"), f"{where}.content")]


def _inner(content: object, where: str) -> list[JsonObject]:
    """Text, or blocks of text and images."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks: list[JsonObject] = []
    for at, block in enumerate(_blocks(content, where)):
        place = f"{where}[{at}]"
        if block.get("type") not in ("text", "image"):
            raise invalid(f"{place}.type", f"{place!r} is neither text nor an image.", "unsupported_content_type")
        blocks += _PARTS[block["type"]](block, place)
    return blocks


_PARTS: dict[str, Callable[[JsonMapping, str], list[JsonObject]]] = {
    "text": lambda block, _: [dict(block)],
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "tool_reference": lambda block, where: [
        {"type": "text", "text": f"The tool {_text(block, 'tool_name', where)} can be called now."}
    ],
}
