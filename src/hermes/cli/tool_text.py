"""What tools answered, for a person: readable text, a short preview, and changes of files as a coloured diff."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from hermes.core.formatting import printable, without_colours
from hermes.core.json_types import JsonObject
from hermes.core.message_marks import without_foreign_frame

DIFF_LINES_SHOWN = 24
_PREVIEW_LINES = 3
# Fields that are the answer itself; everything else is said about it.
_BODIES = ("output", "stdout", "content", "diff")
_STYLES = {"+": "green", "-": "red", "@": "cyan"}
# What the line of the call says already, or nobody asks for.
_BESIDE = frozenset({"cwd", "duration_ms"})
# Fields that say nothing to a person where they have these values.
_USUAL: JsonObject = {"exit_code": 0, "status": "ok", "matched_by": "exact", "truncated": False}


def parsed(result: str) -> Any:
    result = without_foreign_frame(result)
    try:
        return json.loads(result)
    except ValueError:
        return result


def readable(result: str) -> str:
    """All of an answer as text: its body first, then its other fields, one to a line."""
    value = parsed(result)
    if not isinstance(value, dict):
        return value if isinstance(value, str) else "\n".join(_lines(value))
    hidden = {*_BODIES, *_BESIDE}
    rest = {name: field for name, field in value.items() if name not in hidden and _USUAL.get(name, ...) != field}
    return "\n\n".join(filter(None, (_body(value), "\n".join(_lines(rest)))))


def _body(value: JsonObject) -> str:
    texts = (value.get(name) for name in _BODIES)
    return "\n\n".join(text.rstrip("\n") for text in texts if isinstance(text, str) and text.strip())


def _lines(value: Any, indent: str = "") -> Iterator[str]:
    """Nested values as indented lines; empty ones are left out."""
    items = (
        value.items() if isinstance(value, dict) else (("-", one) for one in value) if isinstance(value, list) else ()
    )
    for name, item in items:
        label = f"{indent}{name}" if name == "-" else f"{indent}{name.replace('_', ' ')}:"
        if isinstance(item, dict | list):
            if inner := list(_lines(item, f"{indent}  ")):
                yield from (label, *inner)
        elif isinstance(item, str) and "\n" in item:
            yield from (label, *(f"{indent}  {line}" for line in item.rstrip("\n").split("\n")))
        elif item not in (None, ""):
            yield f"{label} {json.dumps(item) if isinstance(item, bool) else item}"
    if not isinstance(value, dict | list):
        yield f"{indent}{value}"


def file_diff(result: str, arguments: JsonObject) -> str:
    """The change of files that a call has made: as the tool tells it, or all lines of a file that is new."""
    value = parsed(result)
    if not isinstance(value, dict):
        return ""
    if isinstance(value.get("diff"), str):
        return str(value["diff"]).rstrip("\n")
    content = arguments.get("content")
    if value.get("created") is True and isinstance(content, str) and isinstance(value.get("path"), str):
        return "\n".join([f"+++ {value['path']}", *(f"+{line}" for line in content.rstrip("\n").split("\n"))])
    return ""


def diff_lines(diff: str, lines_max: int | None = None, hint: str = "") -> Iterator[Text]:
    """The lines of a diff in colours; past `lines_max` how many there are, and the hint."""
    lines = [line for line in printable(diff).split("\n") if not line.startswith(("--- ", "diff ", "index "))]
    shown = lines if lines_max is None or len(lines) <= lines_max else lines[: lines_max - 1]
    for line in shown:
        style = "bold" if line.startswith("+++ ") else _STYLES.get(line[:1], "dim")
        yield Text(line, style, overflow="fold")
    if len(shown) < len(lines):
        yield Text(f"… {len(lines) - len(shown)} more lines{hint}", "dim italic")


def preview_lines(result: str, hint: str = "") -> Iterator[Text]:
    """A few lines of an answer: all of a short one, else its first and its last line. Whoever has denied a call knows
    why it was not made."""
    value = parsed(result)
    fields: JsonObject = value if isinstance(value, dict) else {}
    if fields.get("status") == "blocked":
        yield from () if fields.get("by") == "user" else (Text(printable(str(fields.get("reason", ""))), "yellow"),)
        return
    is_error = isinstance(fields.get("error"), str)
    text = fields["error"] if is_error else _body(fields) or readable(result)
    lines = [line for line in printable(without_colours(text)).split("\n") if line.strip()]
    if len(lines) > _PREVIEW_LINES:
        lines = [lines[0], f"… {len(lines) - 2} more lines{hint}", lines[-1]]
    if fields.get("exit_code", 0) not in (0, None):
        lines.append(f"exit code {fields['exit_code']}")
    for line in lines:
        yield Text(line, "red" if is_error else "dim")
