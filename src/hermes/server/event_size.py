"""Shortens stream events for clients with a limit on line length. Pure."""

from __future__ import annotations

import msgspec

from hermes.core.json_types import JsonObject

_MARK = {"truncated": True}
_MARK_BYTES = len(', "truncated": true')
_encode = msgspec.json.Encoder().encode


def shorten_outputs(items: list[JsonObject], excess_bytes: int) -> list[JsonObject]:
    """Cut the longest outputs of server tools so that the items' JSON is `excess_bytes` shorter.

    Where that is more than all outputs together, they become empty. Nothing else is cut.
    """
    sizes = {at: len(_encode(text)) for at, item in enumerate(items) if (text := _output(item))}
    cap = _cap(list(sizes.values()), sum(sizes.values()) - excess_bytes - _MARK_BYTES * len(sizes))
    return [
        _with_output(item, _prefix(_output(item), cap)) if sizes.get(at, 0) > cap else item
        for at, item in enumerate(items)
    ]


def _cap(sizes: list[int], budget: int) -> int:
    """The length to which longer outputs are cut, for all to fit into the budget."""
    for count, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        share = max(0, budget) // count
        if size > share:
            return share
        budget -= size
    return max(sizes, default=0)


def _prefix(text: str, size: int) -> str:
    """The longest prefix whose JSON takes at most `size` bytes."""
    low, high = 0, min(len(text), size)
    while low < high:
        middle = (low + high + 1) // 2
        if len(_encode(text[:middle])) <= size:
            low = middle
        else:
            high = middle - 1
    return text[:low]


def _output(item: JsonObject) -> str:
    if item["type"] == "function_call_output":
        return "".join(part["text"] for part in item["output"] if part["type"] == "input_text")
    if item["type"] == "mcp_call":
        return item["output"] or (item["error"]["content"][0]["text"] if item["error"] else "")
    if item["type"] == "code_interpreter_call":
        return "".join(part["logs"] for part in item["outputs"] or ())
    return ""


def _with_output(item: JsonObject, text: str) -> JsonObject:
    if item["type"] == "function_call_output":
        return {**item, "output": [{"type": "input_text", "text": text}], **_MARK}
    if item["type"] == "code_interpreter_call":
        return {**item, "outputs": [{"type": "logs", "logs": text}], **_MARK}
    if item["output"]:
        return {**item, "output": text, **_MARK}
    return {**item, "error": {**item["error"], "content": [{"type": "text", "text": text}]}, **_MARK}
