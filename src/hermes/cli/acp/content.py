"""Prompts of an editor as messages of a user, and stored messages as content for an editor."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from acp import RequestError

from hermes.cli.attach import part
from hermes.core.formatting import size
from hermes.core.json_types import JsonObject
from hermes.core.limits import ATTACHED_BYTES_MAX
from hermes.core.spec import Content
from hermes.core.text import own_text_of

_DATA_URL = re.compile(r"data:([\w.+/-]+);base64,")


def invalid(field: str, problem: str) -> RequestError:
    return RequestError(-32602, f"Invalid params: {field} {problem}", {"field": field})


def message_of(blocks: Sequence[Any]) -> tuple[Content, str]:
    """The message of a prompt, and its text. Files that are embedded come with it; those that are only linked are named,
    for the agent to read."""
    texts, attached = list[str](), list[JsonObject]()
    for at, block in enumerate(blocks):
        field = f"prompt[{at}]"
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "image":
            attached.append(_image(field, block.data))
        elif block.type == "resource_link":
            texts.append(_link(block.uri, block.name))
        elif block.type == "resource":
            texts.append(_link(block.resource.uri))
            attached.append(_resource(f"{field}.resource", block.resource))
        else:
            raise invalid(f"{field}.type", f"is {block.type!r}, which is not supported")
    text = "".join(texts)
    if not text.strip() and not attached:
        raise invalid("prompt", "is empty")
    return ([{"type": "text", "text": text}, *attached] if attached else text), text


def _image(field: str, data: str) -> JsonObject:
    content_part = part("image", _decoded(f"{field}.data", data))
    if content_part["type"] != "image_url":
        raise invalid(f"{field}.data", "is no PNG, JPEG, GIF or WebP image")
    return content_part


def _resource(field: str, resource: Any) -> JsonObject:
    name = os.path.basename(_path(resource.uri).partition("#")[0]) or "resource"
    if (blob := getattr(resource, "blob", None)) is not None:
        return part(name, _decoded(f"{field}.blob", blob))
    data = _bounded(f"{field}.text", resource.text.encode("utf-8", "replace"))
    return {"type": "file", "file": {"name": name, "media_type": "text/plain", "data": data}}


def _decoded(field: str, data: str) -> bytes:
    try:
        return _bounded(field, base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        raise invalid(field, "is no base64") from None


def _bounded(field: str, data: bytes) -> bytes:
    if len(data) > ATTACHED_BYTES_MAX:
        raise invalid(field, f"is larger than {size(ATTACHED_BYTES_MAX)}")
    return data


def _link(uri: str, name: str = "") -> str:
    path = _path(uri)
    return f"[{name or os.path.basename(path.partition('#')[0]) or path}]({path})"


def _path(uri: str) -> str:
    """The path of a file, with the lines that its address names; any other address as it is."""
    url = urlsplit(uri)
    if url.scheme != "file":
        return uri
    return unquote(url.path) + (f"#{url.fragment}" if url.fragment else "")


def blocks_of(content: Content | None) -> Iterator[JsonObject]:
    """A stored message as it was typed: its words and images, without the text of attached files."""
    if text := own_text_of(content):
        yield {"type": "text", "text": text}
    for piece in content if isinstance(content, list) else ():
        url = str((piece.get("image_url") or {}).get("url", "")) if piece.get("type") == "image_url" else ""
        if match := _DATA_URL.match(url):
            yield {"type": "image", "mimeType": match[1], "data": url[match.end() :]}
