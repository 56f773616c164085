"""Tool answers for the model: long ones are spilled into a file, foreign ones are fenced."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hermes.core.ids import random_hex
from hermes.core.limits import FRAMED_CHARS_MIN, SPILL_PREVIEW_CHARS, SPILLED_CHARS_MIN
from hermes.core.message_marks import foreign_frame
from hermes.core.spec import Content
from hermes.core.threads import RunBlocking
from hermes.sandbox.quota import write_spill
from hermes.tools.framework.registry import Answer

_SHARE_OF_WINDOW = 0.15
_CHARS_PER_TOKEN = 3.6


def answer_chars_max(chars_max: int, window_tokens: int) -> int:
    """The configured limit of an answer, or less if the model's context window is small."""
    return max(SPILLED_CHARS_MIN, min(chars_max, int(window_tokens * _CHARS_PER_TOKEN * _SHARE_OF_WINDOW)))


def with_images(content: str, images: Sequence[str]) -> Content:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return [{"type": "text", "text": content}, *parts] if parts else content


class ResultLimiter:
    def __init__(self, folder: Path, chars_max: int, window_tokens: int, blocking: RunBlocking) -> None:
        self._max = answer_chars_max(chars_max, window_tokens)
        self._folder, self._blocking = folder, blocking
        self._mark = random_hex(8)
        self._used = 0

    def begin_step(self) -> None:
        self._used = 0

    async def shaped(self, answer: Answer, content: str, call_id: str, *, foreign: bool) -> tuple[str, str | None]:
        """The answer for the model, and the file that holds all of it where it was too long. `content` is the answer as
        JSON."""
        spilled: str | None = None
        if len(content) > self._max or self._used + len(content) > 2 * self._max:
            name = "".join(char if char.isalnum() or char in "-_" else "_" for char in call_id)[:128]
            path = self._folder / f"{name}.txt"
            whole = _as_lines(answer)
            await self._blocking(partial(write_spill, path, whole.encode("utf-8", "replace")))
            spilled = str(path)
            summary = {"spilled": {"path": spilled, "chars": len(whole), "lines": whole.count("\n")}}
            hint = "The answer was too long. This is its beginning; read_file and search_files can read all of it."
            content = json.dumps({**summary, "begins": whole[:SPILL_PREVIEW_CHARS], "hint": hint}, ensure_ascii=False)
        self._used += len(content)
        if foreign and len(content) >= FRAMED_CHARS_MIN:
            content = foreign_frame(content, self._mark)
        return content, spilled


def _as_lines(answer: Answer) -> str:
    """An answer as text that can be read and searched by line: strings verbatim, the rest as JSON."""
    texts = {name: value if isinstance(value, str) else None for name, value in answer.items()}
    rest = {name: answer[name] for name, text in texts.items() if text is None}
    named = [f"{name}:\n{text}\n" for name, text in texts.items() if text is not None]
    return "".join([*named, json.dumps(rest, ensure_ascii=False, indent=1) + "\n" if rest else ""])
