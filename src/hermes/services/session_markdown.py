"""A session as a Markdown document, and the texts of its messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hermes.core.formatting import local, one_line, printable
from hermes.core.json_types import JsonMapping


def name_of(session: JsonMapping) -> str:
    return one_line(session["title"] or session["preview"] or "(nothing said)")


def speaker(message: JsonMapping) -> str:
    name = message.get("tool_name")
    return one_line(f"{message['role']} {name}" if name else message["role"])


def text_of(content: Any) -> str:
    """The readable text of a content; other parts are named."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = (part.get("text") or f"[{part.get('type') or 'part'}]" for part in content if isinstance(part, Mapping))
    return "\n".join(str(part) for part in parts)


def call_lines(message: JsonMapping) -> Iterator[str]:
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call.get("function"), Mapping) else call
        arguments = function.get("arguments", "")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield f"-> {function.get('name', '?')} {text}"


def markdown(session: JsonMapping) -> str:
    """An exported session without its withdrawn messages."""
    named = {"Session": "id", "Source": "source", "Model": "model", "Folder": "cwd"}
    facts = {name: session[column] for name, column in named.items()}
    facts |= {"Started": local(session["started_at"]), "Last active": local(session["last_active"])}
    lines = [f"# {name_of(session)}", ""]
    lines += [f"- {name}: {one_line(str(value))}" for name, value in facts.items() if value]
    for message in session["messages"]:
        held = message.get("active", True) or message.get("compacted")
        if not held or message.get("synthetic"):
            continue
        lines += ["", f"## {speaker(message).capitalize()}, {local(message['timestamp'])}", ""]
        text = text_of(message["content"])
        if message["role"] == "tool":
            lines.append(_fenced(text))
        elif text:
            lines.append(printable(text))
        lines += map(_fenced, call_lines(message))
    return "\n".join(lines) + "\n"


def _fenced(text: str) -> str:
    """The text between fences that it does not contain."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", text))])
    return f"{fence}\n{printable(text)}\n{fence}"
