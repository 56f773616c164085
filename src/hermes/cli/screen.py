"""What a conversation looks like: the events of runs as lines that stay, and what is still moving below them."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.text import Text

from hermes.cli.markdown_lines import MarkdownLines
from hermes.cli.tool_text import DIFF_LINES_SHOWN, diff_lines, file_diff, preview_lines, readable
from hermes.core.formatting import one_line, printable, without_colours
from hermes.core.json_types import JsonObject
from hermes.core.limits import TOOL_LINES_SHOWN
from hermes.core.result import Result

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SPINS_PER_S = 8
_OUTPUT_CHARS_KEPT = 10_000
# What they answer is shown in other ways, or to the model alone.
_WITHOUT_PREVIEW = frozenset({"clarify", "todo", "read_file", "skill_view"})
_MARKS = {"ok": ("✓", "green"), "blocked": ("⊘", "yellow"), "interrupted": ("■", "yellow"), "error": ("✗", "red")}
_CHOICES = {"once": "[o]nce", "session": "[s]ession", "always": "[a]lways", "deny": "[d]eny"}
_TRAILING = re.compile(r" +((?:\x1b\[0?m)?)$", re.MULTILINE)
_KINDS = {"command": "a command", "code": "a script", "write": "writing there", "mcp": "a tool of a server"}
_KINDS |= {"network": "the network", "memory": "a change of memory", "skill": "a change of a skill"}

_LEAVE = {"once": "Allowed once", "session": "Allowed for this session", "always": "Allowed from now on"}
_LEAVE |= {"deny": "Denied"}
# Events that are one note each.
NOTES: dict[str, Callable[[JsonObject], str]] = {
    "subagent.started": lambda event: f"→ {one_line(event['goal'] or '')}",
    "subagent.completed": lambda event: f"← {event['status']}",
    "steer.applied": lambda event: "Sent to the model with the next tool result.",
    "context.compressed": lambda event: (
        f"Compacted by {event['method']}: {event['tokens_before']:,} tokens before, {event['tokens_after']:,} after."
    ),
    "model.fallback": lambda event: (
        f"{event['to']['model']} answers instead of {event['from']['model']}: {event['reason']}."
    ),
    "warning": lambda event: event["message"],
}
_BY = {"timeout": ": nobody answered in time", "reviewer": " by the reviewer", "rule": " by a rule"}


@dataclass(slots=True)
class _Tool:
    name: str
    preview: str
    began: float
    arguments: JsonObject
    output: str = ""


@dataclass(slots=True)
class Open:
    """A question that waits for an answer, in the words of the event that asked it."""

    id: str
    event: JsonObject
    kind: str = field(default="approve")


def _below(line: Text) -> Padding:
    """A line that belongs to the call above it."""
    return Padding(line, (0, 0, 0, 4), expand=False)


class _PlainConsole(Console):
    """What it draws has its styles, and nothing else that steers a terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class Screen:
    """Draws on a terminal. `emit` takes finished lines; `live` is what moves, for whoever shows it below them."""

    def __init__(self, width: Callable[[], int], *, reasoning: bool, quiet: bool, expands: bool = True) -> None:
        """`expands`: `/expand` shows what is left out."""
        self._hint = ": /expand" if expands else ""
        self.emit: Callable[[str], Any] = sys.stdout.write
        self._width = width
        self.reasoning, self._quiet = reasoning, quiet
        self._file = io.StringIO()
        self._console = _PlainConsole(file=self._file, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._markdown = MarkdownLines()
        self._block = ""
        self._blank_lines = 0
        self._line = self._thought = ""
        self._thought_told = False
        self._tools: dict[str, _Tool] = {}
        self.questions: list[Open] = []
        self.last_output = self.last_diff = ""
        self.busy_since: float | None = None
        self.tokens = self._used = 0
        self.model = self.took = ""

    # --- drawing ----------------------------------------------------------------------------------------------------

    def drawn(self, *what: Any) -> str:
        self._console.width = max(20, self._width())
        for one in what:
            self._console.print(one)
        text = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return _TRAILING.sub(r"\1", text)

    def put(self, block: str, *what: Any) -> None:
        """Lines that stay; one blank line parts those of one block from those of another."""
        if block != self._block:
            self._blank_lines = 1 if self._block else 0
            self._block = block
        self.emit("\n" * self._blank_lines + self.drawn(*what))
        self._blank_lines = 0

    def note(self, text: str, style: str = "dim") -> None:
        """A word beside the conversation; a line of the answer that is not finished stays below it."""
        self.put("note", Padding(Text(printable(text), style), (0, 0, 0, 2)))

    def problem(self, text: str) -> None:
        self.note(f"✗ {text}", "red")

    def plain(self, text: str) -> None:
        self.put(f"plain {id(text)}", Text(printable(text.rstrip("\n"))))

    def user_text(self, text: str) -> None:
        first, *rest = printable(text).split("\n")
        lines = [Text.assemble(("› ", "bold cyan"), (first, "bold")), *(Text(f"  {line}", "bold") for line in rest)]
        self.put(f"said {time.monotonic()}", *lines)

    def markdown(self, text: str, block: str = "text") -> None:
        lines = MarkdownLines()
        for line in printable(text).strip().split("\n"):
            for one in lines.line(line):
                self.put(block, one)
        for one in lines.end():
            self.put(block, one)

    # --- what a run tells -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.busy_since = time.monotonic()
        self._markdown = MarkdownLines()

    def show(self, event: JsonObject) -> None:
        kind = event["event"]
        if (draw := self._EVENTS.get(kind)) is not None:
            draw(self, event)
        elif (format_note := NOTES.get(kind)) is not None:
            warns = kind == "model.fallback" or event.get("level") == "warn"
            self.note(format_note(event), "yellow" if warns else "dim")
        elif kind == "run.started":
            self.model = event["model"]
        elif kind == "usage.updated":
            self._used = event["usage"]["total_tokens"]

    def ended(self, result: Result) -> None:
        seconds = time.monotonic() - (self.busy_since or time.monotonic())
        self.reset()
        self.tokens, self._used = self.tokens + result["total_tokens"], 0
        self.took = f"{seconds:.1f} s"
        if not self._quiet and result["total_tokens"]:
            cost = result["usage_details"]["cost_usd"]
            counts = [f"{result['input_tokens']:,} tokens in, {result['output_tokens']:,} out"]
            counts += [f"${cost:.4f}".rstrip("0").rstrip(".")] if cost else []
            self.note(" · ".join([*counts, self.took]))

    def reset(self) -> None:
        self._settle()
        self.busy_since = None
        self._tools.clear()
        self.questions.clear()

    def facts(self) -> list[str]:
        """What the line below the prompt says of the turn: its time, and the tokens so far."""
        now = "" if self.busy_since is None else f"{time.monotonic() - self.busy_since:.0f} s"
        return [f"{self.tokens + self._used:,} tokens", *filter(None, [now or self.took])]

    def _delta(self, event: JsonObject) -> None:
        self._end_thought()
        self._line += event["delta"]
        *whole, self._line = self._line.split("\n")
        for line in whole:
            self._text(line)

    def _text(self, line: str) -> None:
        """A whole line of the answer. Blank ones wait for something to follow them."""
        if not line.strip() and not self._markdown.is_open:
            self._blank_lines += self._block == "text"
            return
        for one in self._markdown.line(printable(line)):
            self.put("text", one)

    def _settle(self) -> None:
        """Put down what has come of an unfinished line."""
        self._end_thought()
        line, self._line = self._line, ""
        if line:
            self._text(line)
        for one in self._markdown.end():
            self.put("text", one)

    def _message(self, event: JsonObject) -> None:
        self._settle()
        self._markdown = MarkdownLines()

    def _thinking(self, event: JsonObject) -> None:
        self._thought_told = True
        self._thought += event["text"]
        *whole, self._thought = self._thought.split("\n")
        self._think(whole)

    def _think(self, lines: Iterable[str]) -> None:
        for line in lines:
            if line.strip() and self.reasoning:
                self.put("thought", Text(printable(line), "dim italic"))

    def _end_thought(self) -> None:
        line, self._thought = self._thought, ""
        self._think([line])

    def _thoughts(self, event: JsonObject) -> None:
        """All of the reasoning, where it did not come bit by bit."""
        if not self._thought_told:
            self._think(event["text"].split("\n"))
        self._end_thought()
        self._thought_told = False

    def _tool_begins(self, event: JsonObject) -> None:
        self._settle()
        tool = _Tool(event["tool"], one_line(event["preview"] or ""), time.monotonic(), event.get("arguments") or {})
        self._tools[event["tool_call_id"]] = tool

    def _tool_says(self, event: JsonObject) -> None:
        if (tool := self._tools.get(event["tool_call_id"])) is not None:
            tool.output = (tool.output + event["text"])[-_OUTPUT_CHARS_KEPT:]

    def _tool_ends(self, event: JsonObject) -> None:
        tool = self._tools.pop(event["tool_call_id"], None) or _Tool(event["tool"], "", 0.0, {})
        self.last_output = readable(event["result"])
        if event["result_chars"] > len(event["result"]):
            self.last_output += f"\n… {event['result_chars'] - len(event['result']):,} more characters"
        mark, style = _MARKS.get(event["status"], _MARKS["error"])
        ending = "" if event["status"] == "ok" else f"{event['status']} · "
        self.put("tools", self._tool_line(mark, style, tool, f"{ending}{event['duration']:.1f} s"))
        self.last_diff = file_diff(event["result"], tool.arguments) if event["status"] == "ok" else ""
        if self.last_diff:
            self.put("tools", *(_below(line) for line in diff_lines(self.last_diff, DIFF_LINES_SHOWN, self._hint)))
        elif event["tool"] not in _WITHOUT_PREVIEW:
            for line in preview_lines(event["result"], self._hint):
                line.truncate(max(20, self._width()) - 5, overflow="ellipsis")
                self.put("tools", _below(line))

    def expand(self) -> None:
        """All of what the last tool answered."""
        if self.last_diff:
            self.put(f"plain {time.monotonic()}", *diff_lines(self.last_diff))
        else:
            self.plain(self.last_output)

    def _tool_line(self, mark: str, style: str, tool: _Tool, ending: str) -> Text:
        """A call in one line, whatever its preview."""
        line = Text.assemble("  ", (mark, style), " ", tool.name)
        room = max(20, self._width()) - line.cell_len - len(ending) - 5
        preview = Text(f"  {tool.preview}" if tool.preview else "", "dim")
        preview.truncate(max(0, room), overflow="ellipsis")
        return line + preview + Text(f" · {ending}", "dim")

    def _asks_leave(self, event: JsonObject) -> None:
        self._settle()
        self.questions.append(Open(event["approval_id"], event))
        rules = f" ({', '.join(event['pattern_keys'])})" if event["pattern_keys"] else ""
        kind = f"{_KINDS.get(event['kind'], event['kind'])}{', by a subagent' if event['path'] else ''}"
        self.put(
            f"ask {event['approval_id']}",
            Text.assemble("  ", ("?", "bold yellow"), f" Approval needed for {kind}:"),
            Padding(Text(printable(event["command"]), "bold"), (0, 0, 0, 4)),
            Padding(Text(f"{printable(event['description'])}{rules}", "yellow"), (0, 0, 0, 4)),
        )

    def _leave_told(self, event: JsonObject) -> None:
        self._answered(event["approval_id"])
        if event["by"] != "rule" or event["choice"] == "deny":
            self.note(f"{_LEAVE[event['choice']]}{_BY.get(event['by'], '')}.")

    def _asks(self, event: JsonObject) -> None:
        self._settle()
        self.questions.append(Open(event["request_id"], event, "answer"))
        offered = [Text(f"    {at}. {printable(choice)}") for at, choice in enumerate(event["choices"] or (), 1)]
        hint = "a number, or your own words" if offered else "your own words"
        self.put(
            f"ask {event['request_id']}",
            Text.assemble("  ", ("?", "bold yellow"), " ", (printable(event["question"]), "bold")),
            *offered,
            Text(f"    {hint}", "dim"),
        )

    def _told(self, event: JsonObject) -> None:
        self._answered(event["request_id"])
        if not event["answered"]:
            self.note("Nobody answered.")

    def _answered(self, question_id: str) -> None:
        self.questions = [one for one in self.questions if one.id != question_id]

    def _failed(self, event: JsonObject) -> None:
        self._settle()
        self.problem(event["error"])

    def _cancelled(self, event: JsonObject) -> None:
        self._settle()
        self.note("■ Stopped." if event["reason"] == "stop" else f"■ Stopped: {event['reason']}.", "yellow")

    _EVENTS: dict[str, Callable[[Screen, JsonObject], None]] = {  # noqa: RUF012  (a table of methods)
        "message.delta": _delta,
        "message.completed": _message,
        "reasoning.delta": _thinking,
        "reasoning.available": _thoughts,
        "tool.started": _tool_begins,
        "tool.output": _tool_says,
        "tool.completed": _tool_ends,
        "approval.request": _asks_leave,
        "approval.responded": _leave_told,
        "clarify.request": _asks,
        "clarify.responded": _told,
        "run.failed": _failed,
        "run.cancelled": _cancelled,
    }

    # --- what moves -------------------------------------------------------------------------------------------------

    def live(self, height: int) -> str:
        """What is unfinished, in so many lines at most: a line of the answer, tools at work, or the waiting itself."""
        gap = "\n" if self._block else ""
        if self.busy_since is None:
            return gap
        if self._thought or self._line:
            same = self._block == ("text" if self._line else "thought")
            gap = "\n" * self._blank_lines if same else gap
        now = time.monotonic()
        spin = _SPINNER[int(now * _SPINS_PER_S) % len(_SPINNER)]
        parts: list[Any] = []
        if self._thought and self.reasoning:
            parts.append(Text(printable(self._thought), "dim italic"))
        parts += self._markdown.unfinished(printable(self._line[-max(1, height) * max(20, self._width()) :]))
        call_ids = {question.event["tool_call_id"] for question in self.questions}
        for tool in (tool for call_id, tool in self._tools.items() if call_id not in call_ids):
            parts.append(self._tool_line(spin, "cyan", tool, f"{now - tool.began:.1f} s"))
            shown = [
                Text(f"    {line}", "dim")
                for line in printable(without_colours(tool.output)).splitlines()[-TOOL_LINES_SHOWN:]
            ]
            for line in shown:
                line.truncate(max(20, self._width()) - 1, overflow="ellipsis")
            parts += shown
        waited = now - self.busy_since
        if not parts and not self.questions:
            parts.append(Text.assemble("  ", (spin, "cyan"), (f" thinking · {waited:.0f} s", "dim")))
        lines = self.drawn(Group(*parts)).rstrip("\n").split("\n") if parts else []
        return gap + "".join(f"{line}\n" for line in lines[-max(1, height) :]) + ("\n" if lines else "")


def choices(event: JsonObject) -> str:
    """The keys that answer an approval."""
    return "  ".join([*(_CHOICES[choice] for choice in event["choices"]), "[n]o, instead…", "[e]xplain · Enter denies"])
