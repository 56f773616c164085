"""Markup in a model's streamed text: reasoning between tags, and tool calls that the provider passed on as text. Pure."""

from __future__ import annotations

import re
from itertools import groupby
from operator import itemgetter
from typing import Literal

from hermes.agent.leaked_calls import CLOSINGS, OPENINGS, Opening
from hermes.core.limits import LEAKED_CALL_CHARS_MAX

# A part of the answer. That of a call is its block without the closing tag.
Piece = tuple[Literal["text", "reasoning", "call"], str]

_TAGS = ("think", "thinking", "reasoning", "thought", "reasoning_scratchpad")
_TAG = "|".join(sorted(_TAGS, key=len, reverse=True))
_OPENING = re.compile(rf"<({_TAG})>", re.I | re.A)
_CLOSING = {tag: re.compile(f"</{tag}>", re.I | re.A) for tag in _TAGS}
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)", re.S)
_LINE_HEAD_CHARS = 100

_THINK_MARK = rf"(?i:</?(?P<tag>{_TAG})>)"
_CALL_MARK = "|".join(map(re.escape, OPENINGS))
_STRAY_MARK = "|".join(map(re.escape, sorted(CLOSINGS)))
_MARKS = re.compile(_THINK_MARK, re.A)
_MARKS_AND_CALLS = re.compile(rf"{_THINK_MARK}|(?P<opening>{_CALL_MARK})|(?P<closing>{_STRAY_MARK})", re.A)
_WORDS = tuple(f"<{slash}{tag}>" for tag in _TAGS for slash in ("", "/"))
_WORDS_AND_CALLS = (*_WORDS, *OPENINGS, *CLOSINGS)
_MARK_CHARS_MAX = max(map(len, _WORDS_AND_CALLS))


class InlineMarkup:
    """Splits an answer into visible text, reasoning and tool calls. A reasoning tag counts at the start of the message
    or of a line outside a code fence. A tool call counts anywhere outside fences and inline code, and only if `calls`
    is set. Closing tags without an opening are dropped. Only what may still become a tag, or an unfinished call, is
    held back."""

    __slots__ = (
        "_block",
        "_calls",
        "_fence",
        "_head",
        "_held",
        "_line_start",
        "_marks",
        "_shown",
        "_tag",
        "_ticks",
        "_within_line",
    )

    def __init__(self, before: str = "", *, calls: bool = False) -> None:
        self._calls = calls
        self._marks = _MARKS_AND_CALLS if calls else _MARKS
        self._tag = ""
        self._block: _Block | None = None
        self._held = ""
        self._fence = ""
        self._head = ""
        self._ticks = 0
        self._line_start = True
        # Literal tags in the text: their closing tags stay as well.
        self._shown: dict[str, int] = {}
        self._enter_lines(before)
        self._within_line = not self._line_start

    @property
    def holds(self) -> bool:
        return bool(self._held) or self._block is not None

    def feed(self, text: str) -> list[Piece]:
        if self.passes(text):
            return [("text", text)]
        out: list[Piece] = []
        text, self._held = self._held + text, ""
        at = line_end = 0
        while at < len(text):
            if at >= line_end:
                line_end = text.find("\n", at) + 1 or len(text)
            if self._block is not None:
                at = self._in_block(self._block, text, at, out)
            elif self._tag:
                at = self._in_reasoning(text, at, out)
            else:
                at = self._in_text(text, at, line_end, out)
        self._within_line = not (self._line_start or self._tag or self._held or self._block is not None)
        return _merge_pieces(out) if len(out) > 1 else out

    def passes(self, text: str) -> bool:
        """Fast path: whether the text is plain and within a visible line. If so, it has been consumed."""
        if not self._within_line or "\n" in text:
            return False
        if ("<" in text or "[" in text or "`" in text) and not self._fence:
            return False
        if len(self._head) < _LINE_HEAD_CHARS:
            self._head += text[:_LINE_HEAD_CHARS]
        return True

    def finish(self) -> list[Piece]:
        if (block := self._block) is not None:
            self._block = None
            return [("call", block.text())]
        text, self._held = self._held, ""
        if not text:
            return []
        if self._tag:
            return [("reasoning", text)]
        mark = self._marks.match(text)
        return [("call" if mark and mark["tag"] is None else "text", text)]

    def _in_reasoning(self, text: str, at: int, out: list[Piece]) -> int:
        if closing := _CLOSING[self._tag].search(text, at):
            if closing.start() > at:
                out.append(("reasoning", text[at : closing.start()]))
            self._tag, self._line_start, self._head, self._ticks = "", True, "", 0
            return closing.end()
        end = len(text) - _suffix_that_begins(text[at:], f"</{self._tag}>")
        if end > at:
            out.append(("reasoning", text[at:end]))
        self._held = text[end:]
        return len(text)

    def _in_text(self, text: str, at: int, end: int, out: list[Piece]) -> int:
        """Consume one line, or a part of one, up to its first tag."""
        if self._line_start and not self._fence and (opening := _OPENING.match(text, at)):
            self._tag = opening[1].lower()
            return opening.end()
        plain = text.find("<", at, end) < 0 and (not self._calls or text.find("[", at, end) < 0)
        if plain or self._fence:
            self._show(text, at, end, out)
            return end
        ticks, counted = self._ticks, at
        for mark in self._marks.finditer(text, at, end):
            ticks += text.count("`", counted, mark.start())
            counted = mark.start()
            if ticks % 2 or self._is_shown(mark):
                continue  # in inline code, or part of the text
            opening_tag = mark["opening"] if self._calls else None
            if opening_tag is not None:
                begins = OPENINGS[opening_tag].begins(text, mark.end())
                if begins is False:
                    self._count(OPENINGS[opening_tag].closing)
                    continue
                self._show(text, at, mark.start(), out)
                if begins is None:
                    self._held = text[mark.start() :]
                    return len(text)
                self._block = _Block(opening_tag)
            else:
                self._show(text, at, mark.start(), out)
            return mark.end()
        if not text.endswith("\n", at, end):
            ticks += text.count("`", counted, end)
            held_chars = 0 if ticks % 2 else self._may_become_mark(text, at)
            end -= held_chars
            self._held = text[end:] if held_chars else ""
            self._show(text, at, end, out)
            return len(text)
        self._show(text, at, end, out)
        return end

    def _is_shown(self, mark: re.Match[str]) -> bool:
        """Whether a tag is part of the text: a reasoning tag within a line, or the end of one."""
        word = mark[0].lower()
        if mark["tag"] is not None and not word.startswith("</"):
            self._count(f"</{word[1:]}")
            return True
        if self._shown.get(word):
            self._shown[word] -= 1
            return True
        return False

    def _count(self, closing: str) -> None:
        if closing:
            self._shown[closing] = self._shown.get(closing, 0) + 1

    def _may_become_mark(self, text: str, at: int) -> int:
        """How many characters at the end may start a tag."""
        low = max(at, len(text) - _MARK_CHARS_MAX)
        start = max(text.rfind("<", low), text.rfind("[", low) if self._calls else -1)
        if start < 0:
            return 0
        end, marks = text[start:], _WORDS_AND_CALLS if self._calls else _WORDS
        begins = any(len(word) > len(end) and word.startswith((end, end.lower())) for word in marks)
        return len(end) if begins else 0

    def _in_block(self, block: _Block, text: str, at: int, out: list[Piece]) -> int:
        at = block.take(text, at)
        if block.closed:
            self._block = None
            out.append(("call", block.text()))
        elif block.chars > LEAKED_CALL_CHARS_MAX:
            self._block = None
            self._enter_lines(content := block.text())
            out.append(("text", content))
        return at

    def _show(self, text: str, start: int, end: int, out: list[Piece]) -> None:
        if end > start:
            piece = text[start:end]
            self._enter_line(piece)
            out.append(("text", piece))

    def _enter_lines(self, text: str) -> None:
        for line in text.splitlines(keepends=True):
            self._enter_line(line)

    def _enter_line(self, line: str) -> None:
        if len(self._head) < _LINE_HEAD_CHARS:
            self._head += line[:_LINE_HEAD_CHARS]
        self._line_start = line.endswith("\n")
        if self._line_start:
            self._follow_fence()
            self._head, self._ticks = "", 0
        elif "`" in line:
            self._ticks += line.count("`")

    def _follow_fence(self) -> None:
        """A fence is closed by a bare mark of the same kind and at least the same length."""
        mark = _FENCE.match(self._head)
        if mark is None:
            return
        if not self._fence:
            self._fence = mark[1]
        elif mark[1].startswith(self._fence) and not mark[2].strip():
            self._fence = ""


class _Block:
    """A tool call that is still being written."""

    __slots__ = ("_end", "_opening", "_pieces", "chars", "closed")

    def __init__(self, opening: str) -> None:
        self._opening: Opening = OPENINGS[opening]
        self._pieces = [opening]
        self._end = ""
        self.chars = 0
        self.closed = False

    def take(self, text: str, at: int) -> int:
        """Consume the text up to the closing tag, which may have started in an earlier piece; returns the position
        after it."""
        closing = self._opening.closing
        seam = (self._end + text[at : at + len(closing) - 1]).find(closing) if self._end else -1
        if seam >= 0:
            self.closed = True
            early = len(self._end) - seam
            self._pieces = ["".join(self._pieces)[:-early]]
            return at + len(closing) - early
        end = text.find(closing, at) if closing else -1
        self.closed = end >= 0
        piece = text[at:end] if self.closed else text[at:]
        self._pieces.append(piece)
        self.chars += len(piece)
        if closing:
            self._end = (self._end + piece[1 - len(closing) :])[1 - len(closing) :]
        return end + len(closing) if self.closed else len(text)

    def text(self) -> str:
        return "".join(self._pieces)


def _merge_pieces(pieces: list[Piece]) -> list[Piece]:
    """Join adjacent pieces of one kind; each call stays a piece."""
    merged: list[Piece] = []
    for kind, group in groupby(pieces, key=itemgetter(0)):
        if kind == "call":
            merged.extend(group)
        else:
            merged.append((kind, "".join(text for _, text in group)))
    return merged


def _suffix_that_begins(text: str, word: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `word`."""
    for size in range(min(len(text), len(word) - 1), 0, -1):
        if word.startswith(text[-size:].lower()):
            return size
    return 0
