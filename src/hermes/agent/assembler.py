"""Assembles a streamed answer: parts in, deltas out, and a message at the end. Pure."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from hermes.agent.inline import InlineMarkup, Piece
from hermes.agent.leaked_calls import parse as parse_leaked_calls
from hermes.core.json_types import JsonObject
from hermes.core.limits import OVERLAP_CHARS_MAX, OVERLAP_CHARS_MIN
from hermes.core.stream_parts import (
    Assembled,
    Finish,
    FinishReason,
    Model,
    Opaque,
    Part,
    Reasoning,
    ReasoningForm,
    ServerError,
    Text,
    ToolCall,
    ToolDelta,
    Usage,
)


class TextDelta(msgspec.Struct):
    text: str


class ReasoningDelta(msgspec.Struct):
    text: str
    form: ReasoningForm = "raw"


class ToolDrafted(msgspec.Struct):
    index: int
    name: str


Delta = TextDelta | ReasoningDelta | ToolDrafted
_NOTHING: Sequence[Delta] = ()

_PIECES_MAX = 64
_JSON_MARKS = re.compile(r'\\.|["{}\[\]]', re.S)

# --- continuing ------------------------------------------------------------------------------------------------------


class Overlap:
    """Removes from a continuation what repeats the tail of the text before it."""

    __slots__ = ("_held", "_open", "_tail")

    def __init__(self, before: str) -> None:
        self._tail = before[-OVERLAP_CHARS_MAX:]
        self._held = ""
        self._open = len(self._tail) >= OVERLAP_CHARS_MIN

    def feed(self, text: str) -> str:
        if not self._open:
            return text
        self._held += text
        if len(self._held) < len(self._tail) and self._held in self._tail:
            return ""
        return self.finish()

    def finish(self) -> str:
        text, self._held, self._open = self._held, "", False
        for size in range(min(len(text), len(self._tail)), OVERLAP_CHARS_MIN - 1, -1):
            if self._tail.endswith(text[:size]):
                return text[size:]
        return text


# --- the assembler ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Draft:
    """The fields from `read` on are the state of the incremental scan of the arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    extra: object = None
    leaked: bool = False
    read: int = 0
    depth: int = 0
    quoted: bool = False
    escape: str = ""
    has_value: bool = False

    def is_whole(self) -> bool:
        """Whether the arguments so far are a whole value. Each fragment is scanned once."""
        for fragment in self.arguments[self.read :]:
            text = self.escape + fragment
            self.has_value = self.has_value or not text.isspace()
            self.escape = "\\" if (len(text) - len(text.rstrip("\\"))) % 2 else ""
            for mark in _JSON_MARKS.findall(text):
                if mark == '"':
                    self.quoted = not self.quoted
                elif mark[0] != "\\" and not self.quoted:
                    self.depth += 1 if mark in "{[" else -1
        self.read = len(self.arguments)
        return self.has_value and self.depth <= 0 and not self.quoted

    def replace(self, arguments: str) -> None:
        self.arguments = [arguments]
        self.read, self.depth, self.quoted, self.escape, self.has_value = 0, 0, False, "", False


# The name and arguments of a call that came as text; None if there is no such tool.
Accept = Callable[[str, JsonObject | str], tuple[str, str] | None]


class Assembler:
    """One attempt's answer. `before` is the text of the same message from earlier attempts; `again` is its end that the
    model was not shown and will repeat. `identity` (run and step) makes generated call ids the same whenever the step
    is repeated. With `accept` calls in the text are removed from it, and made if it accepts them."""

    def __init__(self, identity: str = "", before: str = "", again: str = "", accept: Accept | None = None) -> None:
        self._identity = identity
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._signed_from = 0
        self._drafts: list[_Draft] = []
        self._by_index: dict[int, _Draft] = {}
        self._by_id: dict[str, _Draft] = {}
        self._last_sent: _Draft | None = None  # unlike those in the text
        self._opaque: list[JsonObject] = []
        self._usage: Usage | None = None
        self._model = ""
        self._finish: FinishReason | None = None
        self._stop_sequence = ""
        self.error: ServerError | None = None
        self.inline = InlineMarkup(before, calls=accept is not None)
        self._accept = accept
        self._call_refused = False
        self._again = again
        self._overlap = Overlap(before) if before else None
        self._lead: str | None = None if before else ""
        self.delivered = 0
        # The size of the message: text, reasoning and arguments.
        self.chars = len(before)

    @property
    def drafting(self) -> tuple[str, ...]:
        return tuple(draft.name for draft in self._drafts if draft.name)

    @property
    def call_missing(self) -> bool:
        """Whether the answer announces a call, by its finish reason or its text, and has none."""
        return (self._finish == "tool_calls" or self._call_refused) and not self.drafting

    @property
    def finished(self) -> bool:
        return self._finish is not None and self.error is None

    def feed(self, part: Part) -> Sequence[Delta]:
        if type(part) is Text:
            return self.feed_text(part.text)
        if type(part) is Reasoning:
            return self._feed_reasoning(part)
        if type(part) is ToolDelta:
            return self._feed_call(part)
        if type(part) is Usage:
            self._usage = self._usage.updated(part) if self._usage else part
        elif type(part) is Model:
            self._model = part.name or self._model
        elif type(part) is Finish:
            self._finish, self._stop_sequence = part.reason, part.stop_sequence
        elif type(part) is Opaque:
            self._keep_opaque(part)
        elif type(part) is ServerError:
            self.error = part
        return _NOTHING

    def finish(self) -> Sequence[Delta]:
        out: list[Delta] = []
        for piece in self.inline.finish():
            self._emit(piece, out)
        if self._overlap is not None:
            text, self._overlap = self._overlap.finish(), None
            self._deliver(text, out)
        return out

    def message(self) -> Assembled:
        calls = self._calls()
        reason: FinishReason = self._finish or "unknown"
        if calls and reason in ("stop", "unknown") and self.finished:
            reason = "tool_calls"
        elif not calls and reason == "tool_calls":
            reason = "stop"
        return Assembled(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            tool_calls=calls,
            opaque=list(self._opaque),
            usage=self._usage,
            model=self._model,
            finish_reason=reason,
            complete=self.finished,
            stop_sequence=self._stop_sequence if reason == "stop" else "",
        )

    def _keep_opaque(self, part: Opaque) -> None:
        """Keep an opaque item; fragments of text are one item."""
        last = self._opaque[-1] if self._opaque else None
        if part.joins and last is not None and last["kind"] == part.kind:
            last["data"] += part.data
        else:
            self._opaque.append({"kind": part.kind, "data": part.data})

    def feed_text(self, text: str) -> Sequence[Delta]:
        if text and self._lead is None and not self._again and self._overlap is None and self.inline.passes(text):
            self._text.append(text)
            if len(self._text) == _PIECES_MAX:  # many small items take much more memory than one
                self._text = ["".join(self._text)]
            self.delivered += len(text)
            self.chars += len(text)
            return (TextDelta(text),)
        out: list[Delta] = []
        for piece in self.inline.feed(text):
            self._emit(piece, out)
        return out

    def _emit(self, piece: Piece, out: list[Delta]) -> None:
        kind, text = piece
        if kind == "reasoning":
            self._reasoning.append(text)
            self.chars += len(text)
            _push(out, ReasoningDelta(text))
            return
        if kind == "call":
            text = self._make_leaked_calls(text, out)
        if self._again:
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._again, text, strict=False)))
            self._again = self._again[shared:] if shared == len(text) else ""
            text = text[shared:]
        if self._overlap is not None:
            text = self._overlap.feed(text)
        self._deliver(text, out)

    def _make_leaked_calls(self, block: str, out: list[Delta]) -> str:
        """Start the calls in a block of the text; returns what of the block is text."""
        calls, text = parse_leaked_calls(block)
        accepted = [call for name, args in calls if self._accept and (call := self._accept(name, args))]
        self._call_refused = self._call_refused or not accepted
        for name, arguments in accepted:
            draft = _Draft(len(self._drafts), name=name, arguments=[arguments], leaked=True)
            self._drafts.append(draft)
            out.append(ToolDrafted(draft.index, name))
        return text

    def _deliver(self, text: str, out: list[Delta]) -> None:
        if self._lead is not None and text:
            # Nothing visible has come yet: line breaks go, the indentation of the first visible line stays.
            text = self._lead + text
            if not text.strip():
                self._lead = text
                return
            body = text.lstrip()
            text = re.split(r"[\r\n]", text[: len(text) - len(body)])[-1] + body
            self._lead = None
        if text:
            self._text.append(text)
            self.delivered += len(text)
            self.chars += len(text)
            _push(out, TextDelta(text))

    def _feed_reasoning(self, part: Reasoning) -> Sequence[Delta]:
        if part.text:
            self._reasoning.append(part.text)
            self.chars += len(part.text)
        if part.signature:
            block = "".join(self._reasoning[self._signed_from :])
            self._signed_from = len(self._reasoning)
            self._opaque.append({"kind": "signed_reasoning", "data": {"text": block, "signature": part.signature}})
        return (ReasoningDelta(part.text, part.form),) if part.text else _NOTHING

    def _feed_call(self, part: ToolDelta) -> Sequence[Delta]:
        draft = self._draft_for(part)
        self.chars += len(part.arguments)
        drafted = bool(part.name) and not draft.name
        if part.id and not draft.id:
            draft.id = part.id
            self._by_id.setdefault(part.id, draft)
        if part.name and (not draft.name or (not draft.arguments and part.name != draft.name and not part.whole)):
            draft.name += part.name
        if part.whole:
            draft.replace(part.arguments)
        elif part.arguments:
            draft.arguments.append(part.arguments)
        if part.extra is not None:
            draft.extra = part.extra
        return (ToolDrafted(draft.index, draft.name),) if drafted else _NOTHING

    def _draft_for(self, part: ToolDelta) -> _Draft:
        draft: _Draft | None
        if part.index is not None:
            draft = self._by_index.get(part.index)
            if draft is not None and part.id and draft.id and part.id != draft.id:
                draft = self._by_id.get(part.id)
        elif part.id:
            draft = self._by_id.get(part.id)
        else:
            draft = self._last_sent
            if draft is not None and part.name and draft.arguments and _is_another_call(draft, part.name):
                draft = None
        if draft is None:
            draft = self._last_sent = _Draft(len(self._drafts))
            self._drafts.append(draft)
        if part.index is not None:
            self._by_index[part.index] = draft
        return draft

    def _calls(self) -> list[ToolCall]:
        calls: list[ToolCall] = []
        if not self._drafts:
            return calls
        ids: set[str] = set()
        leaked = any(draft.leaked for draft in self._drafts)
        sent = {_call_key(draft) for draft in self._drafts if not draft.leaked} if leaked else set()
        for draft in self._drafts:
            if not draft.name or (draft.leaked and _call_key(draft) in sent):
                continue  # a call that came both ways is one
            call_id = draft.id
            if not call_id or call_id in ids:
                digest = hashlib.sha256(f"{self._identity}:{draft.index}".encode()).hexdigest()
                call_id = f"call_{digest[:24]}"
            ids.add(call_id)
            arguments = "".join(draft.arguments)
            calls.append(ToolCall(call_id, draft.name, arguments if arguments.strip() else "{}", draft.extra))
        return calls


def _is_another_call(draft: _Draft, name: str) -> bool:
    """Whether a name after arguments starts another call: not while the same call's arguments are unfinished."""
    return name != draft.name or draft.is_whole()


def _call_key(draft: _Draft) -> str:
    text = "".join(draft.arguments)
    with contextlib.suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text or "{}"), sort_keys=True)
    return f"{draft.name}\n{text}"


def _push(out: list[Delta], delta: TextDelta | ReasoningDelta) -> None:
    last = out[-1] if out else None
    if (type(last) is TextDelta and type(delta) is TextDelta) or (
        type(last) is ReasoningDelta and type(delta) is ReasoningDelta
    ):
        last.text += delta.text
    else:
        out.append(delta)
