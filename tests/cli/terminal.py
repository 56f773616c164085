"""A pseudo-terminal for tests: it types keys, and renders the screen that a user would see."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path

from support.preloaded import HermesProcess
from support.waiting import until_blocking

_SEQUENCE = re.compile(r"\x1b(?:\[([?0-9;]*)([A-Za-z@])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>78])")
_SURELY_S = 120.0


class Screen:
    """The lines of a screen and its scrollback."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.lines: list[list[str]] = [[]]
        self.top = self.row = self.column = 0
        self._left = ""

    def feed(self, text: str) -> int:
        """Process output; returns the number of cursor position queries."""
        text, at, queries = self._left + text, 0, 0
        self._left = ""
        while at < len(text):
            if text[at] != "\x1b":
                self._put(text[at])
                at += 1
            elif match := _SEQUENCE.match(text, at):
                queries += match[2] == "n"
                self._steer(match[1] or "", match[2] or "")
                at = match.end()
            else:
                self._left = text[at:]  # the rest of it is still to come
                break
        return queries

    def _put(self, char: str) -> None:
        if char == "\n":
            self.row += 1
        elif char == "\r":
            self.column = 0
        elif char == "\b":
            self.column = max(0, self.column - 1)
        elif char >= " ":
            if self.column >= self.columns:
                self.row, self.column = self.row + 1, 0
            self._grow()
            line = self.lines[self.row]
            line += " " * (self.column + 1 - len(line))
            line[self.column] = char
            self.column += 1
        self._grow()

    def _grow(self) -> None:
        while len(self.lines) <= self.row:
            self.lines.append([])
        self.top = max(self.top, self.row - self.rows + 1)

    def _steer(self, numbers: str, kind: str) -> None:
        first = int(re.sub(r"\D.*", "", numbers.lstrip("?")) or 0)
        count = max(1, first)
        if kind == "A":
            self.row = max(self.top, self.row - count)
        elif kind == "B":
            self.row = min(self.top + self.rows - 1, self.row + count)
        elif kind == "C":
            self.column = min(self.columns - 1, self.column + count)
        elif kind == "D":
            self.column = max(0, self.column - count)
        elif kind == "H":
            self.row, self.column = self.top, 0
        elif kind in "JK" and kind:
            del self.lines[min(self.row, len(self.lines) - 1)][self.column :]
            if kind == "J":
                del self.lines[self.row + 1 :]
        self._grow()

    def __str__(self) -> str:
        return "\n".join("".join(line).rstrip() for line in self.lines).rstrip()


class Terminal:
    """A program at a pseudo-terminal."""

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: Path,
        columns: int = 100,
        rows: int = 40,
        stdout: Path | None = None,
    ) -> None:
        self.screen = Screen(columns, rows)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environ = {**env, "TERM": "xterm-256color", "LANG": "C.UTF-8", "COLUMNS": str(columns), "LINES": str(rows)}
        with stdout.open("wb") if stdout else contextlib.nullcontext(inner) as output:
            self.process = HermesProcess(
                argv, stdin=inner, stdout=output, stderr=inner, env=environ, cwd=cwd, start_new_session=True
            )
        os.close(inner)

    def type(self, text: str) -> None:
        """Send these keys."""
        os.write(self._fd, text.encode())

    def send(self, text: str) -> None:
        """Type a line and send it."""
        self.type(f"{text}\r")

    def until(self, wanted: str | Callable[[str], bool], seconds: float = _SURELY_S) -> str:
        """Wait until the text is on the screen or the condition holds; returns the screen."""
        end = time.monotonic() + seconds
        while not (wanted in str(self) if isinstance(wanted, str) else wanted(str(self))):
            assert time.monotonic() < end, f"not on the screen: {wanted}\n{self}"
            assert self._take() or self.process.poll() is None, f"it has ended without {wanted}\n{self}"
        return str(self)

    def until_silent(self) -> None:
        """Wait until the program shows nothing of what is typed; what asks in secret throws away what came before."""
        until_blocking(lambda: not termios.tcgetattr(self._fd)[3] & termios.ECHO)

    def _take(self) -> bool:
        """Read available output; False if there was none."""
        if not select.select([self._fd], [], [], 0.05)[0]:
            return False
        try:
            data = os.read(self._fd, 65_536)
        except OSError:  # the other side is closed
            return False
        for _ in range(self.screen.feed(self._decoder.decode(data))):
            self.type(f"\x1b[{self.screen.row - self.screen.top + 1};{self.screen.column + 1}R")
        return bool(data)

    def wait(self, seconds: float = _SURELY_S) -> int:
        """Read output until the program exits, and return the exit code."""
        end = time.monotonic() + seconds
        while self._take() or self.process.poll() is None:
            assert time.monotonic() < end, f"it does not end\n{self}"
        return self.process.wait()

    def hang_up(self) -> None:
        """Close the terminal and send SIGHUP."""
        os.close(self._fd)
        self._fd = -1
        self.process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self._fd >= 0:
            os.close(self._fd)

    def __str__(self) -> str:
        return str(self.screen)
