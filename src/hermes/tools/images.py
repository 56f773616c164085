"""Images in a conversation: finding them, and scaling them down or describing them when a model refuses them."""

from __future__ import annotations

import base64
import io
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec

from hermes.core.json_types import Message
from hermes.core.limits import SHRUNK_PIXELS_MAX


def has_images(messages: Sequence[Message]) -> bool:
    return any(_is_image(part) for m in messages if isinstance(m.get("content"), list) for part in m["content"])


def can_shrink() -> bool:
    return find_spec("PIL") is not None


def shrink_images(messages: Sequence[Message]) -> list[Message]:
    return [_map_images(message, _shrink) for message in messages]


async def replace_by_descriptions(
    messages: Sequence[Message], describe: Callable[[Message], Awaitable[str]]
) -> list[Message]:
    texts: dict[str, str] = {}
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if _is_image(part) and part["image_url"]["url"] not in texts:
                texts[part["image_url"]["url"]] = await describe(part)

    def as_text(part: Message) -> Message:
        return {"type": "text", "text": f"[An image: {texts[part['image_url']['url']]}]"}

    return [_map_images(message, as_text) for message in messages]


def hide_tool_images(messages: Sequence[Message]) -> list[Message]:
    note = {"type": "text", "text": "[An image that you cannot be shown.]"}
    return [_map_images(m, lambda _: note) if m.get("role") == "tool" else m for m in messages]


def remove_images(messages: Sequence[Message]) -> list[Message]:
    note = {"type": "text", "text": "[An image was here. It was refused by the model's provider and cannot be shown.]"}
    return [_map_images(message, lambda _: note) for message in messages]


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _map_images(message: Message, change: Callable[[Message], Message]) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [change(part) if _is_image(part) else part for part in content]}


def _shrink(part: Message) -> Message:
    url: str = part["image_url"]["url"]
    if url.startswith("data:image/") and ";base64," in url:
        from PIL import Image

        with suppress(OSError, ValueError):
            with Image.open(io.BytesIO(base64.b64decode(url.partition(";base64,")[2]))) as image:
                image.thumbnail((SHRUNK_PIXELS_MAX, SHRUNK_PIXELS_MAX))
                image.convert("RGB").save(out := io.BytesIO(), "JPEG", quality=80)
            url = f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
    return {**part, "image_url": {**part["image_url"], "detail": "low", "url": url}}
