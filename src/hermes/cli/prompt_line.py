"""The line at which a person types, below what is shown: keys, history, completion and the line of facts."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from textwrap import wrap

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Always, Condition, has_focus
from prompt_toolkit.formatted_text import ANSI, FormattedText
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.styles import Style

from hermes.cli.picker import matching
from hermes.core.home import Home, make_private_folder, private_opener

_STYLE = Style.from_dict({"bottom-toolbar": "noreverse ansibrightblack"})
_TICK_S = 0.125
_REDRAW_S = 0.02
_TYPED_AHEAD_S = 1.0
# Lines below the moving part: the prompt, the line of facts, and some room to type.
_LINES_KEPT = 6


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What keys do, and what is shown around the line. `key` takes a letter or Enter where `wants_keys` says so, and
    returns whether it was no text; `tick` is called several times a second and returns whether something moves."""

    enter: Callable[[str], None]
    typed: Callable[[], None]
    pasted: Callable[[str], str]
    paste_image: Callable[[], None]
    wants_keys: Callable[[], bool]
    key: Callable[[str], bool]
    interrupt: Callable[[], None]
    leave: Callable[[], None]
    mark: Callable[[], str]
    hint: Callable[[], str]
    live: Callable[[int], str]
    tick: Callable[[], bool]
    facts: Callable[[], str]
    commands: Callable[[], Mapping[str, str]]
    # Names of which one is to be chosen, with what is shown beside each; mostly none.
    names: Callable[[], Mapping[str, str]]


class PromptLine:
    """The prompt of a whole conversation. Without a home nothing that is typed is kept."""

    def __init__(self, home: Home | None, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._pending: list[str] = []
        self._writing = False
        self._began = 0.0
        self._session: PromptSession[str] = PromptSession(
            self._message,
            multiline=True,
            prompt_continuation="  ",
            bottom_toolbar=lambda: FormattedText([("class:bottom-toolbar", f" {callbacks.facts()}")]),
            key_bindings=self._keys(),
            history=_History(home) if home is not None else InMemoryHistory(),
            completer=_Commands(callbacks),
            complete_while_typing=Condition(self._completes),
            enable_suspend=True,
            erase_when_done=True,
            style=_STYLE,
            color_depth=ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None,
        )
        self._session.app.min_redraw_interval = _REDRAW_S
        self.buffer.on_text_changed += lambda _: callbacks.typed()
        # The line of facts stands right below what is typed, not at the end of the screen.
        self._session.layout.current_window.dont_extend_height = Always()

    @property
    def buffer(self) -> Buffer:
        return self._session.default_buffer

    @property
    def columns(self) -> int:
        return self._session.app.output.get_size().columns

    async def run(self) -> None:
        self._began = time.monotonic()
        ticking = asyncio.create_task(self._tick())
        try:
            await self._session.prompt_async(set_exception_handler=False)
        finally:
            ticking.cancel()
            self._flush()

    def type(self, text: str) -> None:
        self.buffer.complete_state = None
        self.buffer.document = Document(text)

    def open_menu(self) -> None:
        self.buffer.start_completion(select_first=False)

    def clear(self) -> None:
        """Clear the screen; the prompt is drawn again at its top."""
        self._flush()
        self._session.app.renderer.clear()

    def exit(self) -> None:
        if self._session.app.is_running and not self._session.app.is_done:
            self._session.app.exit(result="")

    def refresh(self) -> None:
        self._session.app.invalidate()

    def write(self, text: str) -> None:
        """Lines that stay, above the prompt."""
        self._pending.append(text)
        if not self._session.app.is_running:
            self._flush()
        elif not self._writing:  # what is written in one go is drawn in one go
            self._writing = True
            asyncio.get_running_loop().call_soon(self._write_above)

    def _write_above(self) -> None:
        """Put the lines where the prompt is, and the prompt below them. Keys that are pressed meanwhile are not lost:
        the terminal stays as it is."""
        self._writing, app = False, self._session.app
        if not app.is_running:
            self._flush()
            return
        app.renderer.erase()
        self._flush()
        app.renderer.reset()
        app.renderer.request_absolute_cursor_position()
        app._redraw()

    def _flush(self) -> None:
        text, self._pending = "".join(self._pending), []
        if text:
            with suppress(OSError):  # the terminal has gone
                self._session.app.output.write_raw(text)
                self._session.app.output.flush()

    async def _tick(self) -> None:
        """Let clocks run while there is something to wait for."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self._callbacks.tick():
                self.refresh()

    def _message(self) -> ANSI:
        # What stands above the prompt is cut at the edge of the screen, so it is wrapped here.
        hints = wrap(self._callbacks.hint(), max(20, self.columns - 3))
        room = self._session.app.output.get_size().rows - _LINES_KEPT - len(hints)
        hint = "".join(f"\x1b[2m  {line}\x1b[0m\n" for line in hints)
        return ANSI(f"{self._callbacks.live(room)}{hint}\x1b[1;36m{self._callbacks.mark()}\x1b[0m ")

    def _completes(self) -> bool:
        text = self.buffer.document.text_before_cursor
        return bool(self._callbacks.names()) or text.startswith("/") or text.rpartition(" ")[2].startswith("@")

    def _keys(self) -> KeyBindings:
        keys, typing = KeyBindings(), has_focus(DEFAULT_BUFFER)
        empty = Condition(lambda: not self.buffer.text)

        @keys.add("enter", filter=typing)
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if self._callbacks.wants_keys() and self._callbacks.key("\r"):
                return
            if buffer.complete_state and buffer.complete_state.current_completion and not self._callbacks.names():
                buffer.complete_state = None
            elif buffer.document.text_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end:
                buffer.delete_before_cursor()
                buffer.newline(copy_margin=False)
            else:
                text = buffer.text
                buffer.append_to_history()
                buffer.reset()
                self._callbacks.enter(text)

        @keys.add("<any>", filter=typing & Condition(self._callbacks.wants_keys))
        def _(event: KeyPressEvent) -> None:
            if event.data.isprintable() and not self._callbacks.key(event.data):
                event.current_buffer.insert_text(event.data)

        @keys.add(Keys.BracketedPaste, filter=typing)
        def _(event: KeyPressEvent) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            if text:
                event.current_buffer.insert_text(self._callbacks.pasted(text))
            else:  # so terminals paste what is no text
                self._callbacks.paste_image()

        @keys.add("c-v", filter=typing)
        def _(event: KeyPressEvent) -> None:
            self._callbacks.paste_image()

        @keys.add("c-j", filter=typing)
        @keys.add("escape", "enter", filter=typing)
        def _(event: KeyPressEvent) -> None:
            # What was typed before the prompt was there has passed the terminal's line mode, where Enter is Ctrl-J.
            if event.data == "\n" and time.monotonic() - self._began < _TYPED_AHEAD_S:
                event.key_processor.feed(KeyPress(Keys.ControlM, "\r"))
            else:
                event.current_buffer.newline(copy_margin=False)

        @keys.add("c-c", filter=typing)
        @keys.add("<sigint>")
        def _(event: KeyPressEvent) -> None:
            self._callbacks.interrupt()

        @keys.add("c-d", filter=typing & empty)
        def _(event: KeyPressEvent) -> None:
            self._callbacks.leave()

        return keys


class _History(FileHistory):
    """What was typed, in a file that only its owner can read; a line that begins with a space is nobody's business."""

    def __init__(self, home: Home) -> None:
        make_private_folder(home.path)
        os.close(private_opener(home.history_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        super().__init__(str(home.history_file))

    def append_string(self, string: str) -> None:
        if not string.startswith(" "):
            super().append_string(string)


class _Commands(Completer):
    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks, self._paths = callbacks, PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        word = text.rpartition(" ")[2]
        if text.startswith("/") and " " not in text:
            for name, about in self._callbacks.commands().items():
                if name.startswith(text[1:]):
                    yield Completion(f"/{name}", -len(text), display_meta=about)
        elif names := self._callbacks.names():
            yield from NameCompleter(names).get_completions(document, event)
        elif word.startswith("@"):
            yield from self._paths.get_completions(Document(word[1:]), event)


class NameCompleter(Completer):
    def __init__(self, names: Mapping[str, str]) -> None:
        """Names, and what is shown beside each."""
        self._names = names

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        for name in matching(self._names, text):
            yield Completion(name, -len(text), display_meta=self._names[name])
