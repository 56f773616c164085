"""Text as every store and every wire can take it."""

from __future__ import annotations

import json
from typing import Any

# JSON as `json.dumps` writes it, which would make an encoder for every call.
spaced_json = json.JSONEncoder(ensure_ascii=False).encode


def whole_text(text: str) -> str:
    """The text with half pairs of surrogates replaced; they are no characters, and nothing can encode them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def whole_tree(value: Any) -> Any:
    """A JSON value with every string in it whole."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, dict):
        return {whole_tree(key): whole_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [whole_tree(item) for item in value]
    return value
