"""Events of a run, and stored messages, as session updates of the Agent Client Protocol."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hermes.cli.acp.content import blocks_of
from hermes.cli.screen import NOTES
from hermes.cli.tool_text import readable
from hermes.core.formatting import one_line, without_colours
from hermes.core.json_types import JsonObject
from hermes.core.limits import ACP_OUTPUT_CHARS_MAX, ACP_OUTPUT_EVERY_S, ACP_TITLE_CHARS_MAX
from hermes.core.text import text_of
from hermes.tools.framework.registry import ToolError
from hermes.tools.patching import parse_patch

# tool: its kind, and its title with what stands in an argument
_TOOLS = {
    "read_file": ("read", "Read {path}"),
    "write_file": ("edit", "Write {path}"),
    "patch": ("edit", "Edit {path}"),
    "search_files": ("search", "Search {pattern}"),
    "session_search": ("search", "Search sessions: {query}"),
    "terminal": ("execute", "{command}"),
    "process": ("execute", "Process {action} {session_id}"),
    "execute_code": ("execute", "Run a script"),
    "web_search": ("fetch", "Search the web: {query}"),
    "web_extract": ("fetch", "Read {urls}"),
    "vision_analyze": ("read", "Look at {image_url}"),
    "todo": ("think", "Update the plan"),
    "delegate_task": ("think", "Delegate: {goal}"),
    "clarify": ("other", "Ask: {question}"),
}
_APPROVAL_KINDS = {"command": "execute", "code": "execute", "write": "edit", "network": "fetch", "host": "fetch"}
_EDITS = frozenset({"write_file", "patch"})
# What the answer of a call that was not carried out says of it.
_FAILED = ("blocked", "interrupted")
_PLAN_STATES = ("pending", "in_progress", "completed")
_FIELD = re.compile(r"\{(\w+)\}")
_FENCES = re.compile("`{3,}")


@dataclass(slots=True)
class _Call:
    """A call under way. `shown` is what it shows whatever its answer is: changes of files, or a terminal."""

    shown: list[JsonObject]
    is_started: bool = False
    output: str = ""
    sent_at: float = 0.0


class Updates:
    """The updates of one session. `folder` returns the folder that relative paths are in, and `text_before` the text of a
    file before the change that is being made, where it is known."""

    def __init__(
        self, folder: Callable[[], str], text_before: Callable[[str], str | None], window: Callable[[], int] = lambda: 0
    ) -> None:
        self._folder, self._text_before, self._window = folder, text_before, window
        self._calls: dict[str, _Call] = {}
        self._terminals: dict[str, list[JsonObject]] = {}
        # Calls of subagents, by the approval that they wait for.
        self._asked_calls: dict[str, str] = {}
        self._is_thinking = False
        self._used = 0

    def begin(self) -> None:
        self._calls.clear()
        self._asked_calls.clear()
        self._terminals.clear()
        self._is_thinking, self._used = False, 0

    def render(self, event: JsonObject) -> Iterator[JsonObject]:
        kind = event["event"]
        if (render := self._EVENTS.get(kind)) is not None:
            yield from render(self, event)
        elif (format_note := NOTES.get(kind)) is not None:
            yield thought(f"{format_note(event)}\n\n")

    # --- what the model says -----------------------------------------------------------------------------------------

    def _delta(self, event: JsonObject) -> Iterator[JsonObject]:
        yield message(event["delta"])

    def _thinking(self, event: JsonObject) -> Iterator[JsonObject]:
        self._is_thinking = True
        yield thought(event["text"])

    def _thoughts(self, event: JsonObject) -> Iterator[JsonObject]:
        """All of the reasoning, where it did not come bit by bit."""
        if not self._is_thinking:
            yield thought(event["text"])
        self._is_thinking = False

    # --- tools -------------------------------------------------------------------------------------------------------

    def _started(self, event: JsonObject) -> Iterator[JsonObject]:
        call_id, name, arguments = event["tool_call_id"], event["tool"], _object(event["arguments"])
        known, shown = call_id in self._calls, self._terminals.pop(call_id, []) or self._diffs(name, arguments)
        self._calls[call_id] = _Call(shown, is_started=True)
        kind, title = _described(name, arguments, event.get("preview") or "")
        update: JsonObject = {"sessionUpdate": "tool_call_update" if known else "tool_call", "toolCallId": call_id}
        update |= {"title": title, "kind": kind, "status": "in_progress", "rawInput": arguments}
        update |= {"locations": self._locations(name, arguments)}
        yield update | ({"content": shown} if shown else {})

    def terminal(self, call_id: str, terminal_id: str) -> Iterator[JsonObject]:
        """A call whose command runs in a terminal of the editor, which may be known before the call is."""
        shown: list[JsonObject] = [{"type": "terminal", "terminalId": terminal_id}]
        if (call := self._calls.get(call_id)) is not None and call.is_started:
            call.shown = shown
            yield _tool_update(call_id, content=shown)
        else:
            self._terminals[call_id] = shown

    def _output(self, event: JsonObject) -> Iterator[JsonObject]:
        call = self._calls.setdefault(event["tool_call_id"], _Call([]))
        call.output = (call.output + without_colours(event["text"]))[-ACP_OUTPUT_CHARS_MAX:]
        if not call.shown and event["timestamp"] - call.sent_at >= ACP_OUTPUT_EVERY_S:
            call.sent_at = event["timestamp"]
            yield _tool_update(event["tool_call_id"], content=[text_content(fenced(call.output))])

    def _completed(self, event: JsonObject) -> Iterator[JsonObject]:
        known = event["tool_call_id"] in self._calls
        call = self._calls.pop(event["tool_call_id"], None) or _Call([])
        ok = event["status"] == "ok"
        result = _object(event["result"])
        content = [one for one in call.shown if ok or one["type"] == "terminal"]
        if not content and (shown := readable(event["result"])):
            content = [text_content(fenced(shown))]
        more: JsonObject = {"content": content} if content else {}
        more |= {"rawOutput": result} if result else {}
        update = _tool_update(event["tool_call_id"], status="completed" if ok else "failed", **more)
        if not known:  # refused before it started, as arguments that do not fit are
            kind, title = _described(event["tool"], {}, "")
            update |= {"sessionUpdate": "tool_call", "title": title, "kind": kind}
        yield update
        if ok and event["tool"] == "todo" and isinstance(result.get("todos"), list):
            yield plan(result["todos"])

    def _asked(self, event: JsonObject) -> Iterator[JsonObject]:
        """A call is asked about before it starts, so that it is not known yet; one of a subagent never starts here."""
        if event["path"]:
            self._asked_calls[event["approval_id"]] = event["tool_call_id"]
        if event["tool_call_id"] not in self._calls:
            self._calls[event["tool_call_id"]] = _Call([])
            yield {"sessionUpdate": "tool_call", "status": "pending", **approval_call(event)}

    def _answered(self, event: JsonObject) -> Iterator[JsonObject]:
        if (call_id := self._asked_calls.pop(event["approval_id"], None)) is not None:
            self._calls.pop(call_id, None)
            yield _tool_update(call_id, status="failed" if event["choice"] == "deny" else "completed")

    def _usage(self, event: JsonObject) -> Iterator[JsonObject]:
        total = event["usage"]["total_tokens"]
        used, self._used = total - self._used, total
        if (window := self._window()) and used > 0:
            yield {"sessionUpdate": "usage_update", "used": used, "size": window}

    _EVENTS: dict[str, Callable[[Updates, JsonObject], Iterator[JsonObject]]] = {  # noqa: RUF012  (a table of methods)
        "message.delta": _delta,
        "reasoning.delta": _thinking,
        "reasoning.available": _thoughts,
        "tool.started": _started,
        "tool.output": _output,
        "tool.completed": _completed,
        "approval.request": _asked,
        "approval.responded": _answered,
        "usage.updated": _usage,
    }

    def _locations(self, name: str, arguments: JsonObject) -> list[JsonObject]:
        if name == "patch" and arguments.get("mode") == "patch":
            return [{"path": diff["path"]} for diff in _unique(self._diffs(name, arguments))]
        path = arguments.get("path")
        if name not in (*_EDITS, "read_file", "search_files") or not isinstance(path, str) or not path:
            return []
        line = arguments.get("offset")
        return [{"path": self._absolute(path)} | ({"line": line} if type(line) is int else {})]

    def _diffs(self, name: str, arguments: JsonObject) -> list[JsonObject]:
        path, content = arguments.get("path"), arguments.get("content")
        if name == "write_file" and isinstance(path, str) and isinstance(content, str):
            return [self._diff(path, self._text_before(self._absolute(path)), content)]
        if name != "patch":
            return []
        if arguments.get("mode") == "replace":
            old, new = arguments.get("old_string"), arguments.get("new_string")
            return [self._diff(str(path), str(old), str(new))] if isinstance(path, str) else []
        try:
            sections = parse_patch(str(arguments.get("patch") or ""))
        except ToolError:  # the tool itself says what is wrong
            return []
        diffs = []
        for section in sections:
            if section.kind == "Delete":
                diffs.append(self._diff(section.path, self._text_before(self._absolute(section.path)), ""))
            for hunk in section.hunks:
                old, new = ("\n".join(line for sign, line in hunk.rows if sign != skip) for skip in "+-")
                diffs.append(self._diff(section.move or section.path, None if section.kind == "Add" else old, new))
        return diffs

    def _diff(self, path: str, old: str | None, new: str) -> JsonObject:
        return {"type": "diff", "path": self._absolute(path), "oldText": old, "newText": new}

    def _absolute(self, path: str) -> str:
        return os.path.normpath(os.path.join(self._folder(), os.path.expanduser(path)))

    # --- what was said before ------------------------------------------------------------------------------------------

    def replay(self, messages: Sequence[JsonObject]) -> Iterator[JsonObject]:
        plans: list[JsonObject] = []
        names: dict[str, str] = {}
        for row in messages:
            if row["role"] == "user" and not row.get("synthetic"):
                for block in blocks_of(row["content"]):
                    yield {"sessionUpdate": "user_message_chunk", "content": block}
            elif row["role"] == "assistant":
                if row.get("reasoning"):
                    yield thought(str(row["reasoning"]))
                if text := text_of(row["content"]):
                    yield message(text)
                for call in row.get("tool_calls") or ():
                    function = call["function"]
                    names[call["id"]] = function["name"]
                    event = {"tool_call_id": call["id"], "tool": function["name"]}
                    yield from self._started({**event, "arguments": _object(function["arguments"])})
            elif row["role"] == "tool":
                result, call_id = text_of(row["content"]), row["tool_call_id"]
                answer = _object(result)
                failed = bool(answer.get("error")) or answer.get("status") in _FAILED
                event = {"tool_call_id": call_id, "tool": names.get(call_id, ""), "result": result}
                for update in self._completed({**event, "status": "error" if failed else "ok"}):
                    if update["sessionUpdate"] == "plan":
                        plans = [update]
                    else:
                        yield update
        yield from plans
        self.begin()


def message(text: str) -> JsonObject:
    return {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}


def thought(text: str) -> JsonObject:
    return {"sessionUpdate": "agent_thought_chunk", "content": {"type": "text", "text": text}}


def plan(todos: Sequence[JsonObject]) -> JsonObject:
    """What was given up is not shown: the protocol has no such state."""
    entries = [
        {"content": str(item.get("content")), "priority": "medium", "status": item["status"]}
        for item in todos
        if isinstance(item, dict) and item.get("status") in _PLAN_STATES
    ]
    return {"sessionUpdate": "plan", "entries": entries}


def approval_call(event: JsonObject) -> JsonObject:
    """The tool call that a person is asked about: all that it would do, and why it is asked about."""
    rules = f" ({', '.join(event['pattern_keys'])})" if event["pattern_keys"] else ""
    shown = [text_content(fenced(str(event["command"]))), text_content(f"{event['description']}{rules}")]
    return {
        "toolCallId": event["tool_call_id"],
        "title": _shortened(str(event["command"])),
        "kind": _APPROVAL_KINDS.get(event["kind"], "other"),
        "content": shown,
    }


def text_content(text: str) -> JsonObject:
    return {"type": "content", "content": {"type": "text", "text": text}}


def fenced(text: str) -> str:
    """Text that an editor shows as it is, whatever is in it."""
    fence = max(["``", *_FENCES.findall(text)], key=len) + "`"
    end = "" if text.endswith("\n") else "\n"
    return f"{fence}\n{text}{end}{fence}"


def _tool_update(call_id: str, **fields: object) -> JsonObject:
    return {"sessionUpdate": "tool_call_update", "toolCallId": call_id, **fields}


def _described(name: str, arguments: JsonObject, preview: str) -> tuple[str, str]:
    kind, form = _TOOLS.get(name, ("other", ""))
    fields = _FIELD.findall(form)
    if form and all(arguments.get(field) for field in fields):
        values = {field: arguments[field] for field in fields}
        return kind, _shortened(
            form.format(**{k: " ".join(v) if isinstance(v, list) else v for k, v in values.items()})
        )
    return kind, _shortened(f"{name}: {preview}" if preview else name)


def _shortened(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= ACP_TITLE_CHARS_MAX else f"{line[: ACP_TITLE_CHARS_MAX - 1]}…"


def _unique(diffs: list[JsonObject]) -> list[JsonObject]:
    return list({diff["path"]: diff for diff in diffs}.values())


def _object(text: object) -> JsonObject:
    try:
        document = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
