"""Names, descriptions and schemas of MCP tools checked before they are offered, and their answers converted. Pure."""

from __future__ import annotations

import base64
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


def toolname(server: str, tool: str, registered: dict[str, str], kind: str = "tool") -> str:
    """The name under which the model calls a tool, entered into `registered`. One that is too long, or belongs to
    another tool, ends in a hash instead."""
    key = f"{kind}\0{server}\0{tool}"
    name = re.sub(r"[^a-z0-9_]", "_", f"mcp_{server}_{tool}".lower())
    if len(name) > limits.MCP_NAME_CHARS_MAX or registered.setdefault(name, key) != key:
        digest = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:8]
        name = f"{name[: limits.MCP_NAME_CHARS_MAX - 9]}_{digest}"
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
        except Unfit as error:
            unfit[name[: limits.MCP_NAME_CHARS_MAX]] = str(error)
        else:
            fitting.setdefault(name, Fit(name, *offer, hints if isinstance(hints, dict) else {}))
    return list(fitting.values()), unfit


def description(server: str, tool: str, text: object) -> str:
    quote = text.strip() if isinstance(text, str) else ""
    if len(quote) > limits.MCP_DESCRIPTION_CHARS_MAX:
        quote = quote[: limits.MCP_DESCRIPTION_CHARS_MAX - 1] + "…"
    begin = f"The tool {tool!r} of the MCP server {server!r}"
    return f"{begin}, which says of it: {fenced(quote, 'that server')}" if quote else f"{begin}."


def schema(source: object) -> JsonObject:
    """The schema of a tool's arguments, if it is valid, self-contained and small; without descriptions that give orders.
    Raises Unfit."""
    if not isinstance(source, dict) or source.get("type", "object") not in ("object", ["object"]):
        raise Unfit("its arguments are no object")
    top = {name: value for name, value in _clean(source, 0).items() if name not in _NOT_ON_TOP}
    if not isinstance(top.setdefault("properties", {}), dict):
        raise Unfit("its schema is malformed")
    top["type"] = "object"
    if len(json.dumps(top, ensure_ascii=False).encode("utf-8", "replace")) > limits.MCP_SCHEMA_BYTES_MAX:
        raise Unfit(f"its schema is larger than {limits.MCP_SCHEMA_BYTES_MAX // 1024} KB")
    if problem := schema_problem(top):
        raise Unfit(f"its schema {problem[:120]}")
    return top


def _clean(value: object, depth: int) -> Any:
    if depth > limits.MCP_SCHEMA_DEPTH_MAX:
        raise Unfit("its schema is nested too deeply")
    if isinstance(value, list):
        return [_clean(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    cleaned: JsonObject = {}
    for name, item in value.items():
        if name in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(item, str) and not item.startswith("#"):
            raise Unfit("its schema refers to another document")
        if isinstance(item, str) and (name in _DROPPED or (name == "description" and suspicious(item))):
            continue
        if name == "description" and isinstance(item, str):
            item = item[: limits.MCP_DESCRIPTION_CHARS_MAX]
        cleaned[name] = _clean(item, depth + 1)
    return cleaned


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
    """The content of a tool or resource for the model: texts, structured part and links; and its binary parts."""
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
            try:
                blobs.append(Blob(str(inner.get("mimeType") or "application/octet-stream"), base64.b64decode(data)))
            except ValueError:
                blobs.append(Blob("text/plain", b"[unreadable]"))
        elif inner.get("uri"):
            links.append({name: inner[name] for name in ("uri", "name", "description", "mimeType") if name in inner})
    text = "\n".join(texts)
    result: JsonObject = {}
    if structured is not None:
        result["structured"] = structured
    if text and not (structured is not None and _repeats(text, structured)):
        result["text"] = text
        if len(text) > limits.MCP_ANSWER_CHARS_MAX:
            result["text"] = f"{text[: limits.MCP_ANSWER_CHARS_MAX]}\n[… cut: {len(text)} characters in all]"
    if links:
        result["resources"] = links
    return result, blobs


def _repeats(text: str, structured: object) -> bool:
    """Whether a text only repeats the structured part, as servers do for clients that read texts only."""
    if structured == {"result": text}:
        return True
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return value == structured or {"result": value} == structured
