"""What an MCP server tells of its tools, made fit to be offered, and what they answer, made fit to be read. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from hermes.core import limits
from hermes.core.json_types import JsonObject
from hermes.guards.injection import fenced, suspicious
from hermes.tools.framework.arguments import schema_problem
from hermes.tools.framework.registry import Effect

# At the top of a schema some providers refuse these; the server checks what it is sent in any case.
_NOT_ON_TOP = frozenset({"anyOf", "oneOf", "allOf", "not", "if", "then", "else", "enum", "const", "$ref"})
_DROPPED = frozenset({"$schema", "$id", "$comment", "$vocabulary", "title"})


class Unfit(ValueError):
    pass


def toolname(server: str, tool: str, taken: dict[str, str], kind: str = "tool") -> str:
    """What the model calls it, noted in `taken`. One that is too long, or another's already, ends in a mark of its own."""
    key = f"{kind}\0{server}\0{tool}"
    name = re.sub(r"[^a-z0-9_]", "_", f"mcp_{server}_{tool}".lower())
    if len(name) > limits.MCP_NAME_CHARS_MAX or taken.setdefault(name, key) != key:
        mark = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:8]
        name = f"{name[: limits.MCP_NAME_CHARS_MAX - 9]}_{mark}"
    return name


class Fit(NamedTuple):
    name: str
    description: str
    parameters: JsonObject
    hints: JsonObject


def fit(server: str, listing: Iterable[JsonObject]) -> tuple[list[Fit], dict[str, str]]:
    fitting: dict[str, Fit] = {}
    unfit: dict[str, str] = {}
    for tool in listing:
        name, hints = str(tool.get("name")), tool.get("annotations")
        try:
            offer = description(server, name, tool.get("description")), schema(tool.get("inputSchema"))
        except Unfit as why:
            unfit[name[: limits.MCP_NAME_CHARS_MAX]] = str(why)
        else:
            fitting.setdefault(name, Fit(name, *offer, hints if isinstance(hints, dict) else {}))
    return list(fitting.values()), unfit


def description(server: str, tool: str, text: object) -> str:
    quote = text.strip() if isinstance(text, str) else ""
    if len(quote) > limits.MCP_DESCRIPTION_CHARS_MAX:
        quote = quote[: limits.MCP_DESCRIPTION_CHARS_MAX - 1] + "…"
    begin = f"The tool {tool!r} of the MCP server {server!r}"
    return f"{begin}, which says of it: {fenced(quote, 'that server')}" if quote else f"{begin}."


def schema(given: object) -> JsonObject:
    """A schema of arguments that is one, refers to nothing outside, gives no orders, and is small. Raises Unfit."""
    if not isinstance(given, dict) or given.get("type", "object") not in ("object", ["object"]):
        raise Unfit("its arguments are no object")
    made = _clean(given, 0)
    top = {name: value for name, value in made.items() if name not in _NOT_ON_TOP}
    if not isinstance(top.setdefault("properties", {}), dict):
        raise Unfit("its schema is malformed")
    top["type"] = "object"
    if len(json.dumps(top, ensure_ascii=False).encode("utf-8", "replace")) > limits.MCP_SCHEMA_BYTES_MAX:
        raise Unfit(f"its schema is larger than {limits.MCP_SCHEMA_BYTES_MAX // 1024} KB")
    if fault := schema_problem(top):
        raise Unfit(f"its schema {fault[:120]}")
    return top


def _clean(value: object, deep: int) -> Any:
    if deep > limits.MCP_SCHEMA_DEPTH_MAX:
        raise Unfit("its schema is nested too deeply")
    if isinstance(value, list):
        return [_clean(item, deep + 1) for item in value]
    if not isinstance(value, dict):
        return value
    made: JsonObject = {}
    for name, item in value.items():
        if name in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(item, str) and not item.startswith("#"):
            raise Unfit("its schema refers to another document")
        if isinstance(item, str) and (name in _DROPPED or (name == "description" and suspicious(item))):
            continue
        if name == "description" and isinstance(item, str):
            item = item[: limits.MCP_DESCRIPTION_CHARS_MAX]
        made[name] = _clean(item, deep + 1)
    return made


def effect(hints: JsonObject) -> Effect:
    if hints.get("readOnlyHint") is True:
        return "read"
    return "idempotent" if hints.get("idempotentHint") is True else "effect"


def needs_approval(mode: str, hints: JsonObject) -> bool:
    if mode != "destructive":
        return mode == "always"
    return hints.get("readOnlyHint") is not True and hints.get("destructiveHint") is not False


def fit_into_window(costs: Iterable[tuple[str, int]], room: int) -> tuple[set[str], list[str]]:
    fitting: set[str] = set()
    left_out: list[str] = []
    for name, size in costs:
        if size <= room:
            fitting.add(name)
            room -= size
        else:
            left_out.append(name)
    return fitting, left_out


class Blob(NamedTuple):
    media_type: str
    data: bytes


def answer(content: Iterable[JsonObject], structured: object = None) -> tuple[JsonObject, list[Blob]]:
    """What a tool or a resource has given: its texts, its structured part, and what is to be kept as files."""
    texts: list[str] = []
    links: list[JsonObject] = []
    blobs: list[Blob] = []
    for part in content:
        inner = part.get("resource") if part.get("type") == "resource" else part
        inner = inner if isinstance(inner, dict) else {}
        data = inner.get("data") or inner.get("blob")
        if isinstance(inner.get("text"), str):
            texts.append(inner["text"])
        elif isinstance(data, str):
            blobs.append(_blob(str(inner.get("mimeType") or "application/octet-stream"), data))
        elif inner.get("uri"):
            links.append({name: inner[name] for name in ("uri", "name", "description", "mimeType") if name in inner})
    text = "\n".join(texts)
    made: JsonObject = {}
    if structured is not None:
        made["structured"] = structured
    if text and not (structured is not None and _repeats(text, structured)):
        made["text"] = text
        if len(text) > limits.MCP_ANSWER_CHARS_MAX:
            made["text"] = f"{text[: limits.MCP_ANSWER_CHARS_MAX]}\n[… cut: {len(text)} characters in all]"
    if links:
        made["resources"] = links
    return made, blobs


def _repeats(text: str, structured: object) -> bool:
    """Whether a text only repeats the structured part, as servers do for clients that read texts only."""
    if structured == {"result": text}:
        return True
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return value == structured or {"result": value} == structured


def _blob(media_type: str, data: str) -> Blob:
    try:
        return Blob(media_type, base64.b64decode(data, validate=False))
    except (binascii.Error, ValueError):
        return Blob("text/plain", b"[unreadable]")
