"""Sessions in words: lines of a list, a transcript, hits of a search, a document to read. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]
_TIMES = frozenset({"started_at", "last_active", "ended_at", "timestamp", "session_started"})
# The long texts of a session that are told only when everything is asked for.
_LONG = frozenset({"system_prompt", "instructions"})
_CLIPPED_CHARS, _CLIPPED_LINES = 1_000, 12
_NAMED_CHARS_MIN = 12
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def local(when: float | None) -> str:
    """A time for a person, where the person is."""
    moment = _moment(when)
    return moment.astimezone().strftime("%Y-%m-%d %H:%M") if moment else "?"


def iso(when: float | None) -> str | None:
    """A time for a program."""
    moment = _moment(when)
    return moment.isoformat(timespec="milliseconds") if moment else None


def _moment(when: float | None) -> datetime | None:
    try:
        return None if when is None else datetime.fromtimestamp(when, UTC)
    except (ValueError, OverflowError, OSError):  # imported from who knows where
        return None


def with_iso(row: Mapping[str, Any], *, full: bool = True) -> Json:
    """A row for a JSON document; without `full`, without prompts."""
    left_out = {"cursor", "score"} if full else {"cursor", "score", *_LONG}
    told = {name: value for name, value in row.items() if name not in left_out}
    return {name: iso(value) if name in _TIMES else value for name, value in told.items()}


def printable(text: str) -> str:
    """The text without anything that would steer a terminal."""
    return _STEERING.sub("\ufffd", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """The text in one line."""
    return printable(" ".join(text.split()))


def size(count: int) -> str:
    """A number of bytes, rounded."""
    amount, unit = float(count), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{count} bytes" if unit == 0 else f"{amount:.1f} {_UNITS[unit]}"


def counted(count: int, thing: str) -> str:
    """`1 session`, `2 sessions`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


# ---- lists


def name_of(session: Mapping[str, Any]) -> str:
    """Its title, or how it began."""
    return one_line(session["title"] or session["preview"] or "(nothing said)")


def session_lines(sessions: Sequence[Mapping[str, Any]], width: int | None = None) -> list[str]:
    """Id, name, source, model, messages and last activity; no wider than a terminal of this width."""
    rows = [
        [
            one_line(session["id"]),
            name_of(session),
            one_line(session["source"]),
            one_line(session["model"] or "-"),
            counted(session["message_count"], "message"),
            local(session["last_active"]) + ("  archived" if session["archived"] else ""),
        ]
        for session in sessions
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(6)] if rows else []
    if width is not None and rows:
        others = sum(widths) - widths[1] + 2 * (len(widths) - 1)
        widths[1] = min(widths[1], max(_NAMED_CHARS_MIN, width - others))
    return ["  ".join(_fitted(text, width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _fitted(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"


# ---- one session


def head_lines(session: Mapping[str, Any]) -> Iterator[str]:
    """What there is to know of a session before it is read."""
    ended = f"{local(session['ended_at'])} ({session['end_reason'] or 'no reason'})" if session["ended_at"] else ""
    told = {
        "id": session["id"],
        "title": session["title"],
        "source": session["source"],
        "model": session["model"],
        "folder": session["cwd"],
        "parent": session["parent_session_id"],
        "started": local(session["started_at"]),
        "last active": local(session["last_active"]),
        "ended": ended,
        "archived": "yes" if session["archived"] else "",
        "messages": session["message_count"],
        "tokens": f"{session['input_tokens']} in, {session['output_tokens']} out",
    }
    for name, value in told.items():
        if value not in (None, ""):
            yield f"{name}: {one_line(str(value))}"


def message_lines(message: Mapping[str, Any], *, full: bool) -> Iterator[str]:
    """A message: who, when, and what; long texts are cut unless they are asked for in full."""
    state = "" if message["active"] else ", compacted" if message["compacted"] else ", taken back"
    ours = ", written by Hermes" if message["synthetic"] else ""
    yield f"[{message['id']}] {_speaker(message)}, {local(message['timestamp'])}{state}{ours}"
    if full and message["reasoning"]:
        yield from _indented(f"(reasoning) {message['reasoning']}")
    if text := text_of(message["content"]):
        yield from _indented(text if full else _clipped(text))
    for call in _calls(message):
        yield from _indented(call if full else _clipped(call))


def _speaker(message: Mapping[str, Any]) -> str:
    name = message.get("tool_name")
    return one_line(f"{message['role']} {name}" if name else message["role"])


def text_of(content: Any) -> str:
    """What can be read of a content; other parts are named."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = (part.get("text") or f"[{part.get('type') or 'part'}]" for part in content if isinstance(part, Mapping))
    return "\n".join(str(part) for part in parts)


def _calls(message: Mapping[str, Any]) -> Iterator[str]:
    for call in message.get("tool_calls") or []:
        made = call.get("function") if isinstance(call.get("function"), Mapping) else call
        arguments = made.get("arguments", "")
        words = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield f"-> {made.get('name', '?')} {words}"


def _indented(text: str) -> Iterator[str]:
    for line in printable(text).splitlines():
        yield f"    {line}".rstrip()


def _clipped(text: str) -> str:
    lines = text[:_CLIPPED_CHARS].splitlines()[:_CLIPPED_LINES]
    short = "\n".join(lines)
    left = len(text) - len(short)
    return f"{short}\n… ({counted(left, 'character')} more)" if left > 1 else text


# ---- search


def hit_lines(hit: Mapping[str, Any]) -> Iterator[str]:
    """A message that was found, between its neighbours."""
    title = f"  {one_line(hit['title'])}" if hit["title"] else ""
    yield f"{one_line(hit['session_id'])}{title}  [{hit['id']}] {_speaker(hit)}, {local(hit['timestamp'])}"
    before = [near for near in hit["context"] if near["id"] < hit["id"]]
    after = [near for near in hit["context"] if near["id"] > hit["id"]]
    yield from map(_near, before)
    yield f"  > {one_line(hit['snippet'])}"
    yield from map(_near, after)


def _near(message: Mapping[str, Any]) -> str:
    return f"    {message['role']}: {one_line(message['content'] or '')}".rstrip()


# ---- a document to read


def markdown(session: Mapping[str, Any]) -> str:
    """An exported session as people saw it: without what was taken back and what was repeated for the model."""
    lines = [f"# {name_of(session)}", ""]
    for name, value in (
        ("Session", session["id"]),
        ("Source", session["source"]),
        ("Model", session["model"]),
        ("Folder", session["cwd"]),
        ("Started", local(session["started_at"])),
        ("Last active", local(session["last_active"])),
    ):
        if value:
            lines.append(f"- {name}: {one_line(str(value))}")
    for message in session["messages"]:
        if _was_seen(message):
            lines += ["", f"## {_speaker(message).capitalize()}, {local(message['timestamp'])}", ""]
            lines += _written(message)
    return "\n".join(lines) + "\n"


def _was_seen(message: Mapping[str, Any]) -> bool:
    held = message.get("active", True) or message.get("compacted", False)
    return bool(held) and not message.get("synthetic") and message.get("copy_of") is None


def _written(message: Mapping[str, Any]) -> Iterable[str]:
    text = printable(text_of(message["content"]))
    if message["role"] == "tool":
        yield from _fenced(text)
    elif text:
        yield text
    for call in _calls(message):
        yield from _fenced(printable(call))


def _fenced(text: str) -> Iterator[str]:
    """Text as it is, between fences that it does not hold itself."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", text))])
    yield from (fence, text, fence)
