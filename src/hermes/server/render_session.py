"""Sessions, messages and search matches as objects, and a turn as session events. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from hermes.core.events import Event
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import HIT_SHOWN_CHARS_MAX
from hermes.core.text import spaced_json, text_of
from hermes.server.outcome import Outcome
from hermes.server.render_shared import (
    approval_request,
    approval_responded,
    clarify_request,
    clarify_responded,
    encode,
    result_of,
    sse_frame,
    tool_output,
)
from hermes.server.sse import Item
from hermes.store.search import MARKS

# Events whose payload needs the message that they announce.
ROWS = frozenset({"message.completed", "tool.finished"})


# --- objects ---------------------------------------------------------------------------------------------------------


class Session(Struct, kw_only=True):
    """A session. Times are seconds since 1970."""

    ADMIN_ONLY: ClassVar = ("owner",)

    id: str
    source: str | None
    user_id: str | None
    model: str | None
    title: str | None
    started_at: float
    ended_at: float | None
    end_reason: str | None
    message_count: int
    tool_call_count: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    reasoning_tokens: int
    actual_cost_usd: float | None
    api_call_count: int
    forked_at_message_id: int | None
    archived: bool
    pinned: bool
    workdir: str | None
    toolsets: list[str] | None
    max_iterations: int | None
    reasoning_effort: str | None
    last_active: float | None
    preview: str | None
    estimated_cost_usd: None = None
    parent_session_id: str | None = None
    has_system_prompt: bool = False
    has_model_config: bool = False
    active_run_id: str | None = None
    owner: str | UnsetType = UNSET


class Branch(Session, kw_only=True):
    """A session among its forks. `shared_messages`: how many of its first messages it has from its parent."""

    shared_messages: int


# The fields of a session that are columns of its row; the others come from elsewhere.
_SESSION_COLUMNS = tuple(field.name for field in msgspec.structs.fields(Session) if field.required)


def session_object(row: JsonMapping, around: JsonMapping, owner: str | UnsetType) -> Session:
    """`around`: fields that are not in the session's own row."""
    session = Session(**{name: row[name] for name in _SESSION_COLUMNS}, owner=owner)
    session.parent_session_id = around.get("parent_session_id")
    session.has_system_prompt = bool(around.get("has_system_prompt"))
    session.has_model_config = bool(around.get("has_model_config"))
    session.active_run_id = around.get("active_run_id")
    return session


class StoredMessage(Struct, kw_only=True):
    id: int
    session_id: str
    role: str
    content: str | list[Any] | None
    tool_call_id: str | None
    tool_calls: list[Any] | None
    tool_name: str | None
    timestamp: float
    token_count: int | None
    finish_reason: str | None
    synthetic: bool
    run_id: str | None
    active: bool | UnsetType = UNSET
    compacted: bool | UnsetType = UNSET
    model_only: bool | UnsetType = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET


_MESSAGE_COLUMNS = tuple(field.name for field in msgspec.structs.fields(StoredMessage) if field.required)


def message_object(row: JsonMapping, *, reasoning: bool, state: bool) -> StoredMessage:
    """`state`: whether the message is still part of the conversation."""
    message = StoredMessage(**{name: row[name] for name in _MESSAGE_COLUMNS})
    if state:
        message.active, message.compacted, message.model_only = row["active"], row["compacted"], row["model_only"]
    if reasoning:
        message.reasoning = message.reasoning_content = row["reasoning"]
    return message


class Match(Struct, kw_only=True, tag_field="object", tag="hermes.session.match"):
    """A place where something was said."""

    session_id: str
    title: str | None
    source: str | None
    message_id: int | None
    role: str | None
    timestamp: float | None
    snippet: str
    highlights: list[list[int]]
    score: float | None


def message_match(hit: JsonMapping) -> Match:
    snippet, highlights = _cut(*_split_marks(hit["snippet"]))
    same = {name: hit[name] for name in ("session_id", "title", "source", "role", "timestamp", "score")}
    return Match(**same, message_id=hit["id"], snippet=snippet, highlights=highlights)


def title_match(session: JsonMapping, terms: Sequence[str]) -> Match:
    title = session["title"]
    pattern = "|".join(re.escape(word) for word in sorted(terms, key=len, reverse=True) if word)
    places = [[m.start(), m.end()] for m in re.finditer(pattern, title, re.IGNORECASE)] if pattern else []
    snippet, highlights = _cut(title, places)
    return Match(
        session_id=session["id"],
        title=title,
        source=session["source"],
        message_id=None,
        role=None,
        timestamp=session["last_active"],
        snippet=snippet,
        highlights=highlights,
        score=None,
    )


def _split_marks(marked: str) -> tuple[str, list[list[int]]]:
    """A snippet without its marks, and their positions."""
    opens, closes = MARKS
    text, places = "", list[list[int]]()
    for piece in marked.split(opens):
        inside, mark, behind = piece.partition(closes)
        if mark and inside:
            start = len(text)
            if places and places[-1][1] == start:
                places[-1][1] += len(inside)
            else:
                places.append([start, start + len(inside)])
        text += inside + behind.replace(closes, "")
    return text, places


def _cut(text: str, places: list[list[int]]) -> tuple[str, list[list[int]]]:
    """A text short enough to show, around its first match."""
    if len(text) <= HIT_SHOWN_CHARS_MAX:
        return text, places
    first = places[0][0] if places else 0
    start = max(0, min(first - HIT_SHOWN_CHARS_MAX // 3, len(text) - HIT_SHOWN_CHARS_MAX))
    end = start + HIT_SHOWN_CHARS_MAX
    inside = [[max(a, start) - start, min(b, end) - start] for a, b in places if a < end and b > start]
    return text[start:end], inside


# --- the stream of a turn --------------------------------------------------------------------------------------------


# event of the log: name and payload in the stream
_QUESTIONS: dict[str, tuple[str, Callable[[Event], JsonObject]]] = {
    "approval.requested": ("approval.request", approval_request),
    "approval.resolved": ("approval.responded", approval_responded),
    "clarify.requested": ("clarify.request", clarify_request),
    "clarify.resolved": ("clarify.responded", clarify_responded),
}


class SessionRenderer:
    """One streamed turn of a session. Its answer is one message, however many the model writes."""

    ended, closing = False, b""  # `finish` ends the stream

    def __init__(self, session_id: str, run_id: str, user_message: object, redact: Callable[[str], str]) -> None:
        self._session_id, self._run_id, self._user_message, self._redact = session_id, run_id, user_message, redact
        self._message_id = f"msg_{run_id.removeprefix('run_')[:24]}"
        who = spaced_json({"session_id": session_id, "run_id": run_id})[:-1]
        self._delta = (
            f'event: assistant.delta\ndata: {who}, "seq": ',
            f', "message_id": "{self._message_id}", "delta": ',
        )
        self._seq = 0
        self._has_text = False
        self._speaking: str | None = None
        self._tools: dict[str, tuple[str, Any]] = {}
        self._hidden: set[str] = set()
        self._messages: list[JsonObject] = []
        self._logged = self._handed_over = False
        self._reason = ""

    def begin(self) -> Iterable[bytes]:
        yield self._frame("run.started", {"user_message": {"role": "user", "content": self._user_message}})
        yield self._frame("message.started", {"message": {"id": self._message_id, "role": "assistant"}})

    def feed(self, items: list[Item]) -> bytes:
        out: list[bytes] = []
        for item in items:
            if isinstance(item, str):
                if item:
                    self._say(item, None, time.time(), out)
                continue
            self._logged = self._logged or bool(item.run_id)
            if item.type == "text.delta":
                self._say(item.data["text"], item.data["message_id"], item.ts, out)
            elif (render := self._RENDER.get(item.type)) is not None:
                render(self, item, out)
        return b"".join(out)

    def finish(self, ended: Outcome) -> bytes:
        """The answer, its end and `done`. A turn that the next server continues has no end."""
        out: list[bytes] = []
        if self._handed_over:
            return b""
        if not self._has_text and ended.text:
            self._say(ended.text, None, time.time(), out)
        out += (self._frame("warning", {"level": "warn", **warning}) for warning in ended.warnings)
        message_id, state = self._message_id, {"completed": ended.code is None, "partial": ended.partial}
        message = {"message_id": message_id, "content": ended.text, **state, "interrupted": ended.interrupted}
        out.append(self._frame("assistant.completed", message))
        messages = self._messages if self._logged else turn_messages(ended.messages)
        if ended.code is None:
            done = {"message_id": message_id, **state, "messages": messages, "usage": ended.response_usage()}
            out.append(self._frame("run.completed", done))
        elif ended.interrupted:
            reason = self._reason or ("server_shutdown" if ended.code == "server_shutdown" else "stop")
            out.append(self._frame("run.cancelled", {"reason": reason, "messages": messages}))
        else:
            error = ended.error or "The agent gave no answer."
            out.append(self._frame("error", {"message": error, "code": ended.code}))
            out.append(self._frame("run.failed", {"error": error, "error_code": ended.code, "messages": messages}))
        out.append(self._frame("done", {}))
        return b"".join(out)

    def _frame(self, name: str, payload: JsonObject, ts: float | None = None) -> bytes:
        self._seq += 1
        head = {"session_id": self._session_id, "run_id": self._run_id, "seq": self._seq, "ts": ts or time.time()}
        return sse_frame(name, {**head, **payload})

    def _say(self, text: str, message_id: str | None, ts: float, out: list[bytes]) -> None:
        if message_id != self._speaking:
            # A following message starts a new paragraph.
            if self._has_text and self._speaking is not None:
                text = "\n\n" + text
            self._speaking = message_id
        self._has_text = True
        self._seq += 1
        head, tail = self._delta
        out += (f'{head}{self._seq}, "ts": {ts!r}{tail}'.encode(), encode(text), b"}\n\n")

    # --- events -----------------------------------------------------------------------------------------------------

    def _completed(self, event: Event, out: list[bytes]) -> None:
        data = event.data
        message: JsonObject = {"role": "assistant", "content": text_of(data.get("content"))}
        if data["tool_calls"]:
            message["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in data["tool_calls"]
            ]
        self._messages.append(message)

    def _thought(self, event: Event, out: list[bytes]) -> None:
        if text := event.data.get("reasoning"):
            payload = {"message_id": self._message_id, "tool_name": "_thinking", "delta": text}
            out.append(self._frame("tool.progress", payload, event.ts))

    def _tool_started(self, event: Event, out: list[bytes]) -> None:
        data = event.data
        if data["name"].startswith("_"):
            self._hidden.add(data["call_id"])
            return
        args = data["args"]
        preview = data["preview"] if event.run_id else self._redact(data["preview"])
        self._tools[data["call_id"]] = (preview, args)
        out.append(self._frame("tool.started", self._tool(data, preview, args), event.ts))

    def _tool_finished(self, event: Event, out: list[bytes]) -> None:
        data = event.data
        if not data.get("parent_call_id"):  # nested calls are no messages
            message = {"role": "tool", "content": text_of(data.get("content"))}
            self._messages.append({**message, "tool_call_id": data["call_id"], "tool_name": data["name"]})
        if data["name"].startswith("_"):
            return
        preview, args = self._tools.pop(data["call_id"], ("", {}))
        result = result_of(data)
        how = {
            "duration": data["duration_ms"] / 1000,
            "error": data["status"] != "ok",
            "result": result if event.run_id else self._redact(result),
        }
        out.append(self._frame("tool.completed", {**self._tool(data, preview, args), **how}, event.ts))

    def _tool(self, data: JsonObject, preview: str, args: object) -> JsonObject:
        who = {"message_id": self._message_id, "tool_name": data["name"], "tool_call_id": data["call_id"]}
        return {**who, "preview": preview, "args": args}

    def _output(self, event: Event, out: list[bytes]) -> None:
        if event.data["call_id"] not in self._hidden:
            out.append(self._frame("tool.output", tool_output(event), event.ts))

    def _question(self, event: Event, out: list[bytes]) -> None:
        name, payload = _QUESTIONS[event.type]
        out.append(self._frame(name, payload(event), event.ts))

    def _cancelled(self, event: Event, out: list[bytes]) -> None:
        self._reason = event.data["reason"]

    def _interrupted(self, event: Event, out: list[bytes]) -> None:
        self._handed_over = True

    _RENDER: dict[str, Callable[[SessionRenderer, Event, list[bytes]], None]] = {  # noqa: RUF012  (a table)
        "message.completed": _completed,
        "reasoning.completed": _thought,
        "tool.started": _tool_started,
        "tool.finished": _tool_finished,
        "tool.output": _output,
        "approval.requested": _question,
        "approval.resolved": _question,
        "clarify.requested": _question,
        "clarify.resolved": _question,
        "run.cancelled": _cancelled,
        "run.interrupted": _interrupted,
    }


def turn_messages(messages: Sequence[JsonMapping] | None) -> list[JsonObject]:
    """The messages of the agent and its tools since the last user message."""
    turn: list[JsonObject] = []
    for message in messages or ():
        if message.get("role") == "user":
            turn = []
        elif message.get("role") in ("assistant", "tool"):
            names = ("role", "content", "tool_calls", "tool_call_id", "tool_name")
            turn.append({name: message[name] for name in names if name in message})
    return turn
