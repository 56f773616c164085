"""Estimates of the tokens of texts, messages and images."""

from __future__ import annotations

import base64
import json

from hermes.core.limits import BYTES_PER_IMAGE_TOKEN, BYTES_PER_TOKEN, IMAGE_TOKENS, IMAGE_TOKENS_MIN, PIXELS_PER_TOKEN


def estimate(value: object) -> int:
    if isinstance(value, str):
        return int(len(value.encode("utf-8", "replace")) / BYTES_PER_TOKEN) + 1
    if isinstance(value, dict) and value.get("type") == "image_url":
        return _image_tokens(str(value["image_url"]["url"]))
    if isinstance(value, dict) and "role" in value:
        content = value.get("content")
        parts = content if isinstance(content, list) else [content or ""]
        calls = value.get("tool_calls")
        return 4 + sum(map(estimate, parts)) + (estimate(json.dumps(calls, ensure_ascii=False)) if calls else 0)
    return estimate(json.dumps(value, ensure_ascii=False, default=str))


def _image_tokens(url: str) -> int:
    """By the pixels of an inline PNG, by the bytes of other inline images, else a usual size."""
    head, is_inline, data = url.partition(";base64,")
    if not is_inline:
        return IMAGE_TOKENS
    if head.endswith("png"):
        try:
            header = base64.b64decode(data[:44])
            pixels = int.from_bytes(header[16:20], "big") * int.from_bytes(header[20:24], "big")
            return max(IMAGE_TOKENS_MIN, min(IMAGE_TOKENS, pixels // PIXELS_PER_TOKEN))
        except ValueError:
            return IMAGE_TOKENS
    return max(IMAGE_TOKENS_MIN, min(IMAGE_TOKENS, len(data) // BYTES_PER_IMAGE_TOKEN))
