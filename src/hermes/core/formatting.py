"""Formats times, sizes, numbers, lists and tables, and makes text safe for a terminal."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

_FLEXIBLE_CHARS_MIN = 12
# SGR escape sequences.
COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def local(when: float | None) -> str:
    moment = _moment(when)
    return moment.astimezone().strftime("%Y-%m-%d %H:%M") if moment else "?"


def iso(when: float | None) -> str | None:
    moment = _moment(when)
    return moment.isoformat(timespec="milliseconds") if moment else None


def _moment(when: float | None) -> datetime | None:
    try:
        return None if when is None else datetime.fromtimestamp(when, UTC)
    except (ValueError, OverflowError, OSError):  # imported data may hold any number
        return None


def with_iso(value: object) -> Any:
    if isinstance(value, list):
        return [with_iso(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: iso(item) if name.endswith("_at") and isinstance(item, int | float) else with_iso(item)
        for name, item in value.items()
    }


def span(seconds: float) -> str:
    for unit, most in (("second", 90), ("minute", 90), ("hour", 36), ("day", 1e9)):
        if abs(seconds) < most:
            break
        seconds /= {"second": 60, "minute": 60, "hour": 24}[unit]
    return counted(round(seconds), unit)


def without_colours(text: str) -> str:
    """A command's output without colour sequences."""
    return COLOURS.sub("", text)


def printable(text: str) -> str:
    return _STEERING.sub("\ufffd", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def size(count: int) -> str:
    unit = min((max(count, 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{count / 1024**unit:.1f} {_UNITS[unit]}" if unit else f"{count} bytes"


def counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def width() -> int | None:
    """The width of the terminal; None where output is piped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns(rows: Sequence[Sequence[str]], flexible: int, wide: int | None = -1) -> list[str]:
    """Rows as aligned lines. Where they are wider than the terminal, or `wide`, the `flexible` column is cut."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if (wide := width() if wide == -1 else wide) is not None and cells:
        room = max(_FLEXIBLE_CHARS_MIN, wide - sum(widths) + widths[flexible] - 2 * (len(widths) - 1))
        widths[flexible] = min(widths[flexible], room)
        for row in cells:
            text = row[flexible]
            row[flexible] = text if len(text) <= room else f"{text[: room - 1]}…"
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
