"""Sessions, their messages and what is found in them as they are shown, and a turn as the events of its session. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hermes.core.events import Event
from hermes.core.limits import HIT_SHOWN_CHARS_MAX
from hermes.core.text import spaced_json
from hermes.server.content import text_of
from hermes.server.outcome import Outcome
from hermes.server.render_chat import approval_request, clarify_request
from hermes.server.render_run import approval_responded, clarify_responded, result_of, tool_output
from hermes.server.sse import Item

Json = dict[str, Any]
# Events whose payload needs the message that they announce.
ROWS = frozenset({"message.completed", "tool.finished"})
# What marks a match inside a snippet: nothing that anybody writes.
MARKS = ("\x02", "\x03")
_SESSION = (
    "id",
    "source",
    "user_id",
    "model",
    "title",
    "started_at",
    "ended_at",
    "end_reason",
    "message_count",
    "tool_call_count",
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
    "actual_cost_usd",
    "api_call_count",
    "forked_at_message_id",
    "archived",
    "pinned",
    "workdir",
    "toolsets",
    "max_iterations",
    "last_active",
    "preview",
)
_MESSAGE = (
    "id",
    "session_id",
    "role",
    "content",
    "tool_call_id",
    "tool_calls",
    "tool_name",
    "timestamp",
    "token_count",
    "finish_reason",
    "synthetic",
    "run_id",
)
_encode = msgspec.json.Encoder().encode


# --- objects ---------------------------------------------------------------------------------------------------------


def session_object(session: Mapping[str, Any], around: Mapping[str, Any]) -> Json:
    """A session; `around` is what its own row does not say."""
    return {
        **{name: session[name] for name in _SESSION},
        "estimated_cost_usd": None,
        "parent_session_id": around.get("parent_session_id"),
        "has_system_prompt": bool(around.get("has_system_prompt")),
        "has_model_config": bool(around.get("has_model_config")),
        "active_run_id": around.get("active_run_id"),
    }


def message_object(row: Mapping[str, Any], *, reasoning: bool, state: bool) -> Json:
    """A message of a session; `state` says whether it is still part of the conversation."""
    told = {name: row[name] for name in _MESSAGE}
    if state:
        told |= {name: row[name] for name in ("active", "compacted", "model_only")}
    if reasoning:
        told |= {"reasoning": row["reasoning"], "reasoning_content": row["reasoning"]}
    return told


def file_object(row: Mapping[str, Any]) -> Json:
    """A file of a session."""
    return {name: row[name] for name in ("id", "name", "bytes", "mime", "created_at", "direction")}


def message_match(hit: Mapping[str, Any]) -> Json:
    """A message that was found."""
    snippet, highlights = _parted(hit["snippet"])
    who = {"session_id": hit["session_id"], "title": hit["title"], "source": hit["source"]}
    what = {"message_id": hit["id"], "role": hit["role"], "timestamp": hit["timestamp"]}
    return _match(who | what, snippet, highlights, hit["score"])


def title_match(found: Mapping[str, Any], words: Sequence[str]) -> Json:
    """A session that was found by its title."""
    title = found["title"]
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True) if word)
    highlights = [[m.start(), m.end()] for m in re.finditer(pattern, title, re.IGNORECASE)] if pattern else []
    who = {"session_id": found["id"], "title": title, "source": found["source"]}
    what = {"message_id": None, "role": None, "timestamp": found["last_active"]}
    return _match(who | what, title, highlights, None)


def _match(told: Json, snippet: str, highlights: list[list[int]], score: float | None) -> Json:
    shown, places = _cut(snippet, highlights)
    return {"object": "hermes.session.match", **told, "snippet": shown, "highlights": places, "score": score}


def _parted(marked: str) -> tuple[str, list[list[int]]]:
    """A snippet without its marks, and where they stood."""
    opens, closes = MARKS
    text, places = "", list[list[int]]()
    for piece in marked.split(opens):
        inside, found, behind = piece.partition(closes)
        if found and inside:
            start = len(text)
            if places and places[-1][1] == start:
                places[-1][1] += len(inside)
            else:
                places.append([start, start + len(inside)])
        text += inside + behind.replace(closes, "")
    return text, places


def _cut(text: str, places: list[list[int]]) -> tuple[str, list[list[int]]]:
    """A text that is short enough to be shown, with its first match in it."""
    if len(text) <= HIT_SHOWN_CHARS_MAX:
        return text, places
    first = places[0][0] if places else 0
    start = max(0, min(first - HIT_SHOWN_CHARS_MAX // 3, len(text) - HIT_SHOWN_CHARS_MAX))
    end = start + HIT_SHOWN_CHARS_MAX
    inside = [[max(a, start) - start, min(b, end) - start] for a, b in places if a < end and b > start]
    return text[start:end], inside


# --- the stream of a turn --------------------------------------------------------------------------------------------


class SessionRenderer:
    """One streamed turn of a session. Its answer is one message, however many the model writes."""

    ended, closing = False, b""  # it is `finish` that tells the end

    def __init__(self, session_id: str, run_id: str, user_message: Any, redact: Callable[[str], str]) -> None:
        self._session_id, self._run_id, self._user_message, self._redact = session_id, run_id, user_message, redact
        self._message_id = f"msg_{run_id.removeprefix('run_')[:24]}"
        who = spaced_json({"session_id": session_id, "run_id": run_id})[:-1]
        self._delta = (
            f'event: assistant.delta\ndata: {who}, "seq": ',
            f', "message_id": "{self._message_id}", "delta": ',
        )
        self._seq = 0
        self._said = False
        self._speaking: str | None = None
        self._tools: dict[str, tuple[str, Any]] = {}
        self._hidden: set[str] = set()
        self._messages: list[Json] = []
        self._logged = self._handed_over = False
        self._reason = ""

    def begin(self) -> Iterable[bytes]:
        """That the turn is there, before anything has happened in it."""
        asked = {"role": "user", "content": self._user_message}
        yield self._frame("run.started", {"user_message": asked})
        yield self._frame("message.started", {"message": {"id": self._message_id, "role": "assistant"}})

    def feed(self, items: list[Item]) -> bytes:
        """Text, tools, thoughts and questions."""
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
        """The whole answer, how it ended, and that nothing follows. A turn that the next server goes on with has no end."""
        out: list[bytes] = []
        if self._handed_over:
            return b""
        if not self._said and ended.text:
            self._say(ended.text, None, time.time(), out)
        out += (self._frame("warning", {"level": "warn", **warning}) for warning in ended.warnings)
        how = {"completed": ended.code is None, "partial": ended.partial}
        told = {"message_id": self._message_id, "content": ended.text, **how, "interrupted": ended.interrupted}
        out.append(self._frame("assistant.completed", told))
        messages = self._messages if self._logged else turn_messages(ended.messages)
        if ended.code is None:
            done = {"message_id": self._message_id, **how, "messages": messages, "usage": ended.response_usage()}
            out.append(self._frame("run.completed", done))
        elif ended.interrupted:
            reason = self._reason or ("server_shutdown" if ended.code == "server_shutdown" else "stop")
            out.append(self._frame("run.cancelled", {"reason": reason, "messages": messages}))
        else:
            message = ended.error or "The agent gave no answer."
            out.append(self._frame("error", {"message": message, "code": ended.code}))
            out.append(self._frame("run.failed", {"error": message, "error_code": ended.code, "messages": messages}))
        out.append(self._frame("done", {}))
        return b"".join(out)

    def _frame(self, name: str, payload: Json, ts: float | None = None) -> bytes:
        self._seq += 1
        head = {"session_id": self._session_id, "run_id": self._run_id, "seq": self._seq, "ts": ts or time.time()}
        data = spaced_json({**head, **payload})
        return f"event: {name}\ndata: {data}\n\n".encode()

    def _say(self, text: str, message_id: str | None, ts: float, out: list[bytes]) -> None:
        if message_id != self._speaking:
            # A message that follows another one begins a paragraph of its own.
            if self._said and self._speaking is not None:
                text = "\n\n" + text
            self._speaking = message_id
        self._said = True
        self._seq += 1
        head, tail = self._delta
        out += (f'{head}{self._seq}, "ts": {ts!r}{tail}'.encode(), _encode(text), b"}\n\n")

    # --- events -----------------------------------------------------------------------------------------------------

    def _completed(self, event: Event, out: list[bytes]) -> None:
        data = event.data
        message: Json = {"role": "assistant", "content": text_of(data.get("content"))}
        if data["tool_calls"]:
            message["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in data["tool_calls"]
            ]
        self._messages.append(message)

    def _thought(self, event: Event, out: list[bytes]) -> None:
        if text := event.data.get("reasoning"):
            told = {"message_id": self._message_id, "tool_name": "_thinking", "delta": text}
            out.append(self._frame("tool.progress", told, event.ts))

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
        if not data.get("parent_call_id"):  # a call within a call is no message of the conversation
            told = {"role": "tool", "content": text_of(data.get("content"))}
            self._messages.append({**told, "tool_call_id": data["call_id"], "tool_name": data["name"]})
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

    def _tool(self, data: Json, preview: str, args: Any) -> Json:
        who = {"message_id": self._message_id, "tool_name": data["name"], "tool_call_id": data["call_id"]}
        return {**who, "preview": preview, "args": args}

    def _output(self, event: Event, out: list[bytes]) -> None:
        if event.data["call_id"] not in self._hidden:
            out.append(self._frame("tool.output", tool_output(event), event.ts))

    def _approval(self, event: Event, out: list[bytes]) -> None:
        out.append(self._frame("approval.request", approval_request(event), event.ts))

    def _approved(self, event: Event, out: list[bytes]) -> None:
        out.append(self._frame("approval.responded", approval_responded(event), event.ts))

    def _question(self, event: Event, out: list[bytes]) -> None:
        out.append(self._frame("clarify.request", clarify_request(event), event.ts))

    def _answered(self, event: Event, out: list[bytes]) -> None:
        out.append(self._frame("clarify.responded", clarify_responded(event), event.ts))

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
        "approval.requested": _approval,
        "approval.resolved": _approved,
        "clarify.requested": _question,
        "clarify.resolved": _answered,
        "run.cancelled": _cancelled,
        "run.interrupted": _interrupted,
    }


def turn_messages(messages: Sequence[Mapping[str, Any]] | None) -> list[Json]:
    """What the agent and its tools have said in a turn: all behind the last words of the user."""
    said: list[Json] = []
    for message in messages or ():
        if message.get("role") == "user":
            said = []
        elif message.get("role") in ("assistant", "tool"):
            names = ("role", "content", "tool_calls", "tool_call_id", "tool_name")
            said.append({name: message[name] for name in names if name in message})
    return said
