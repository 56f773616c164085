"""Notifications of a chat: the end of a long turn, and an approval or a question that waits for the user."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from hermes.core.json_types import JsonObject
from hermes.services.notifications import NotificationFailed, run_notify_command, terminal_sequence

if TYPE_CHECKING:
    from hermes.settings.config import Settings

log = logging.getLogger(__name__)
_TITLE = "Hermes"
_QUESTIONS = {"approval.request": "An approval is wanted.", "clarify.request": "A question waits for an answer."}
_ENDS = {
    "run.completed": "The answer is there.",
    "run.failed": "The turn has failed.",
    "run.cancelled": "The turn was stopped.",
}


def write_to_terminal(sequence: str) -> None:
    """Past the stream that carries text only; the sequences of notifications move no cursor."""
    with suppress(OSError, AttributeError, ValueError):
        os.write(sys.__stdout__.fileno(), sequence.encode())  # type: ignore[union-attr]


class Notifier:
    """Is told of the events of turns, one turn after the other."""

    def __init__(
        self, settings: Settings, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._write, self._clock = settings, write, clock
        self._began: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def hear(self, event: JsonObject) -> None:
        kind = event.get("event", "")
        if self._began is None:
            self._began = self._clock()
        if kind in _QUESTIONS:
            self._notify(_QUESTIONS[kind])
        elif kind in _ENDS:
            seconds, self._began = self._clock() - self._began, None
            if seconds >= self._settings.display.notify_after_seconds:
                self._notify(_ENDS[kind])

    def _notify(self, text: str) -> None:
        if sequence := terminal_sequence(self._settings.display.notify, _TITLE, text):
            self._write(sequence)
        if self._settings.notify.command:
            task = asyncio.ensure_future(self._run(text))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, text: str) -> None:
        try:
            await run_notify_command(self._settings, _TITLE, text)
        except NotificationFailed as error:
            log.warning("the notification was not shown: %s", error)
