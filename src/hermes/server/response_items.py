"""Input items of a response: each validated, given an id, and turned into a message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any

from hermes.core.ids import random_hex
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import ITEMS_AT_ONCE_MAX, MESSAGES_AT_ONCE_MAX
from hermes.core.text import spaced_json, text_of
from hermes.server.content import check_not_empty, content, newest, result
from hermes.server.errors import ApiError, invalid
from hermes.server.response_tools import additional
from hermes.server.sealing import Broken, Seal
from hermes.server.tool_types import CALL_ITEMS, HOSTED_ITEMS, IGNORED_ITEMS, OUTPUT_ITEMS, flat_name

Find = Callable[[Collection[str]], Awaitable[dict[str, JsonObject]]]
_ROLES = ("user", "assistant", "system", "developer")
_PREFIX = {"message": "msg", "mcp_call": "mcp", "reasoning": "rs", "compaction": "cmp", "additional_tools": "at"}
_PREFIX |= {name: kind.prefix for name, kind in CALL_ITEMS.items()}
_PREFIX |= {name: f"{kind.prefix}o" for name, kind in OUTPUT_ITEMS.items()}
_PREFIX |= {name: kind.prefix for name, kind in HOSTED_ITEMS.items()}
_PREFIX |= dict.fromkeys(IGNORED_ITEMS, "item")
# Their outputs are content; what other items have under that name stays as sent.
_WITH_CONTENT = tuple(name for name, kind in OUTPUT_ITEMS.items() if kind.takes_parts)
_WITH_STATUS = ("message", "mcp_call", *CALL_ITEMS, *OUTPUT_ITEMS)
# Fields that clients expect of a listed part, even where they were not sent.
_ADDED: dict[Any, JsonObject] = {"output_text": {"annotations": []}, "input_image": {"detail": "auto"}}
SUMMARY = "Summary of the conversation so far:"


@dataclass(slots=True)
class Given:
    """The input: system text, messages, tools, and the items as stored. `_speaks`: the user has said something since
    the last answer, which a summary is not; `_asked_at` names its field."""

    system: list[str] = field(default_factory=list)
    messages: list[JsonObject] = field(default_factory=list)
    items: list[JsonObject] = field(default_factory=list)
    tools: list[JsonObject] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    _referenced: dict[str, JsonObject] = field(default_factory=dict)
    _opaque: Any = None
    _asked_at: str = ""
    _speaks: bool = False

    def split_messages(self) -> tuple[list[JsonObject], Any, tuple[JsonObject, ...]]:
        """The history, the new message, and the results of calls that the history leaves open."""
        before, outputs, user_messages = newest(self.messages)
        if not outputs and not (user_messages and self._speaks):
            message = "The last item of input must be a message of the user or the output of a function call."
            raise ApiError(400, message, "missing_user_message", "input")
        if user_messages:
            check_not_empty(user_messages[-1]["content"], self._asked_at)
        return before, user_messages[-1]["content"] if user_messages else "", tuple(map(result, outputs))


@dataclass(slots=True)
class Reader:
    """Reads items for one owner. `find` gives stored items by id."""

    text_chars_max: int
    owner: str
    find: Find
    seal: Callable[[], Awaitable[Seal]]

    async def read(self, given: Any, where: str = "input") -> Given:
        out = Given()
        items: list[Any] = [given] if isinstance(given, str) else given
        for start in range(0, len(items), MESSAGES_AT_ONCE_MAX):
            some = items[start : start + MESSAGES_AT_ONCE_MAX]
            named = {item["id"] for item in some if _is_reference(item) and isinstance(item.get("id"), str)}
            if named:
                out._referenced = await self.find(named)
            for at, item in enumerate(some, start):
                await self._item(item, f"{where}[{at}]" if items is given else where, out)
                if not (at + 1) % ITEMS_AT_ONCE_MAX:
                    await asyncio.sleep(0)  # others have their turn in between
        return out

    async def _item(self, item: object, where: str, out: Given) -> None:
        bare = isinstance(item, str)
        if bare:
            item = {"type": "message", "role": "user", "content": content(item, where, self.text_chars_max)}
        if not isinstance(item, Mapping):
            raise invalid(where, f"Invalid type for {where!r}: an item is an object.", "invalid_type")
        if _is_reference(item):
            referenced = out._referenced.get(_text(item, "id", where))
            if referenced is None:
                raise ApiError(404, f"There is no item {item['id']!r}.", "item_not_found", f"{where}.id")
            await self._item(referenced, where, out)
            return
        kind = item.get("type") or "message"
        read = self._READ.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise invalid(f"{where}.type", f"Items of the type {kind!r} are not taken.")
        await read(self, item, where, out)
        if bare:
            out._asked_at = where
        item_id = item.get("id")
        known = item_id if isinstance(item_id, str) and item_id else f"{_PREFIX[kind]}_{random_hex(12)}"
        stored = {**item, "type": kind, "id": known}
        if kind == "message":
            stored["content"] = _stored_content(item.get("content"), item.get("role"))
        elif kind in _WITH_CONTENT and isinstance(item.get("output"), list):
            stored["output"] = _stored_content(item["output"], "user")
        if kind in _WITH_STATUS and stored.get("status") is None:
            stored["status"] = "completed"
        out.items.append(stored)

    async def _message(self, item: JsonMapping, where: str, out: Given) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise invalid(f"{where}.role", f"A role is one of {', '.join(_ROLES)}.")
        system = role in ("system", "developer")
        given = content(item.get("content"), f"{where}.content", self.text_chars_max, text_only=system)
        if system:
            out.system.append(text_of(given))
            return
        message: JsonObject = {"role": role, "content": given}
        if role == "assistant":
            message |= _opaque_of(out)
            out._speaks = False
        else:
            out._asked_at, out._speaks = f"{where}.content", True
        out.messages.append(message)

    async def _call(self, item: JsonMapping, where: str, out: Given) -> None:
        kind = CALL_ITEMS[item["type"]]
        call_id, payload = _text(item, "call_id", where), item.get(kind.payload)
        if not isinstance(payload, kind.payload_type):
            place, wanted = f"{where}.{kind.payload}", "text" if kind.payload_type is str else "an object"
            raise invalid(place, f"Invalid type for {place!r}: {wanted} is expected.", "invalid_type")
        namespace = _text(item, "namespace", where) if item.get("namespace") is not None else None
        name = kind.function or flat_name(namespace, _text(item, "name", where))
        self._add_call(call_id, name, kind.unpack(payload), out)

    def _add_call(self, call_id: str, name: str, arguments: str, out: Given) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
        out._speaks = False
        last = out.messages[-1] if out.messages else None
        if last is not None and last["role"] == "assistant":
            last.setdefault("tool_calls", []).append(call)
            last |= _opaque_of(out)
        else:
            out.messages.append({"role": "assistant", "content": "", "tool_calls": [call], **_opaque_of(out)})

    async def _output(self, item: JsonMapping, where: str, out: Given) -> None:
        output = content(OUTPUT_ITEMS[item["type"]].content(item), f"{where}.output", self.text_chars_max)
        # The outputs of local_shell name their call by `id`.
        named = "id" if item["type"] == "local_shell_call_output" and not item.get("call_id") else "call_id"
        out.messages.append({"role": "tool", "content": output, "tool_call_id": _text(item, named, where)})
        if item.get("tools") is not None:
            await self._tools(item, where, out)

    async def _tools(self, item: JsonMapping, where: str, out: Given) -> None:
        """Tools that can be called from here on."""
        tools = item.get("tools")
        if not isinstance(tools, list):
            raise invalid(
                f"{where}.tools", f"Invalid type for {where + '.tools'!r}: a list is expected.", "invalid_type"
            )
        additional(tools, where)
        out.tools += tools

    async def _hosted(self, item: JsonMapping, where: str, out: Given) -> None:
        """A call of a hosted tool, with as much of its result as the item holds."""
        call_id = _text(item, "id", where)
        name, arguments, result = HOSTED_ITEMS[item["type"]].given(item)
        self._add_call(call_id, name, spaced_json(arguments), out)
        out.messages.append({"role": "tool", "content": result, "tool_call_id": call_id})

    async def _ignored(self, item: JsonMapping, where: str, out: Given) -> None:
        out.ignored.append(f"input.{item['type']}")

    async def _mcp(self, item: JsonMapping, where: str, out: Given) -> None:
        call_id, arguments = _text(item, "id", where), item.get("arguments")
        if not isinstance(arguments, str):
            place = f"{where}.arguments"
            raise invalid(place, f"Invalid type for {place!r}: text is expected.", "invalid_type")
        self._add_call(call_id, _text(item, "name", where), arguments, out)
        output = item.get("output") if item.get("output") is not None else item.get("error") or ""
        if isinstance(output, Mapping):
            parts = output.get("content")
            output = text_of(parts) if isinstance(parts, list) else output.get("message") or ""
        out.messages.append({"role": "tool", "content": str(output), "tool_call_id": call_id})

    async def _reasoning(self, item: JsonMapping, where: str, out: Given) -> None:
        """The model gets back its provider's sealed reasoning, but no summary text."""
        sealed = item.get("encrypted_content")
        if not isinstance(sealed, str) or not sealed:
            return
        try:
            opaque = (await self.seal()).open("reasoning", self.owner, sealed)
        except Broken:
            return  # of another server: left out
        last = out.messages[-1] if out.messages else None
        if last is not None and last["role"] == "assistant" and "opaque" not in last:
            last["opaque"] = opaque
        else:
            out._opaque = opaque

    async def _compaction(self, item: JsonMapping, where: str, out: Given) -> None:
        try:
            summary = (await self.seal()).open("compaction", self.owner, _text(item, "encrypted_content", where))
        except Broken as error:
            place = f"{where}.encrypted_content"
            raise invalid(place, f"This compaction cannot be used. {error}", "invalid_compaction_item") from None
        out.messages.append({"role": "user", "content": f"{SUMMARY}\n\n{summary}"})

    _READ = {  # noqa: RUF012  (a table of methods)
        "message": _message,
        "mcp_call": _mcp,
        "reasoning": _reasoning,
        "compaction": _compaction,
        "additional_tools": _tools,
        **dict.fromkeys(CALL_ITEMS, _call),
        **dict.fromkeys(OUTPUT_ITEMS, _output),
        **dict.fromkeys(HOSTED_ITEMS, _hosted),
        **dict.fromkeys(IGNORED_ITEMS, _ignored),
    }


def _is_reference(item: object) -> bool:
    if not isinstance(item, Mapping):
        return False
    return item.get("type") == "item_reference" or (not item.get("type") and set(item) == {"id"})


def _opaque_of(out: Given) -> JsonObject:
    opaque, out._opaque = out._opaque, None
    return {"opaque": opaque} if opaque else {}


def _text(item: JsonMapping, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(f"{where}.{name}", f"{where + '.' + name!r} must be text.", "invalid_type")
    return value


def _stored_content(given: Any, role: Any) -> Any:
    """Content as listed: parts, whatever form it came in."""
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(given, str):
        given = [given]
    parts = [{"type": kind, "text": part} if isinstance(part, str) else dict(part) for part in given or ()]
    return [_ADDED.get(p.get("type"), {}) | {name: v for name, v in p.items() if v is not None} for p in parts]


def cut_to(messages: list[JsonObject], count: int) -> list[JsonObject]:
    """The last messages, none of them a result without its call."""
    if len(messages) <= count:
        return messages
    return list(dropwhile(lambda message: message["role"] == "tool", messages[-count:]))
