"""`hermes logs`: what the parts of Hermes have written about their work."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from hermes.cli.command import Args, Argument, age, command, flag, number
from hermes.cli.output import mask, note, tell
from hermes.core.home import Home

LOGS = ("agent", "errors", "gateway")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_HEAD = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} ([A-Z]+) ")
_POLL_S = 0.2


class Entry(NamedTuple):
    """What was written at once: a line, and those that belong to it."""

    when: datetime | None
    level: str
    lines: list[str]


@command(
    "logs",
    Argument("log", metavar="LOG", nargs="?", choices=LOGS, default="agent", help="agent, errors or gateway"),
    Argument("-n", "--lines", metavar="N", type=number, default=100, help="the last N lines (100)"),
    flag("-f", "--follow", help="follow the log"),
    Argument("--level", choices=LEVELS, type=str.upper, default="DEBUG", help="this level and above"),
    Argument("--run", metavar="ID", help="only lines about this run"),
    Argument("--since", metavar="AGE", type=age, help="only newer lines: 30m, 1h, 2d"),
)
def logs(args: Args, home: Home) -> None:
    file, hidden = home.logs / f"{args.log}.log", mask(home)
    now, place = _read(file)
    entries = _wanted(args, _entries(chain(_older(file), now)))
    lines = [hidden(line) for line in deque((line for entry in entries for line in entry.lines), maxlen=args.lines)]
    tell(args, {"log": str(file), "lines": lines}, *lines)
    if not file.exists():
        note(f"There is no {file} yet.")
    if args.follow and not args.json:
        sys.stdout.flush()
        for entry in _wanted(args, _entries(_growing(file, *place))):
            print(*map(hidden, entry.lines), sep="\n", flush=True)


def _wanted(args: Args, entries: Iterable[Entry]) -> Iterator[Entry]:
    since = datetime.now() - timedelta(seconds=args.since) if args.since is not None else None
    for entry in entries:
        loud = entry.level not in LEVELS or LEVELS.index(entry.level) >= LEVELS.index(args.level)
        young = since is None or (entry.when is not None and entry.when >= since)
        if loud and young and (args.run is None or any(args.run in line for line in entry.lines)):
            yield entry


def _entries(lines: Iterable[str]) -> Iterator[Entry]:
    """Lines put together: one without a time belongs to the one before it. An empty text is a pause."""
    entry = Entry(None, "", [])
    for line in chain(lines, ("",)):
        head = _HEAD.match(line)
        if (head or not line) and entry.lines:
            yield entry
            entry = Entry(entry.when, entry.level, [])
        if head:
            entry = Entry(datetime.fromisoformat(head[1]), head[2], [line])
        elif line:
            entry.lines.append(line)


def _older(file: Path) -> Iterator[str]:
    older = [path for path in file.parent.glob(f"{file.name}.*") if path.suffix[1:].isdecimal()]
    for path in sorted(older, key=lambda path: -int(path.suffix[1:])):
        yield from _read(path)[0]


def _read(file: Path, at: int = 0) -> tuple[list[str], tuple[int, int]]:
    """The whole lines of a file from a place on, and where it goes on: the place, and in which file."""
    try:
        with file.open("rb") as opened:
            opened.seek(at)
            data, identity = opened.read(), os.fstat(opened.fileno()).st_ino
    except OSError:
        return [], (at, 0)
    whole = data[: data.rfind(b"\n") + 1]
    # An empty text is a pause; an empty line is none.
    return [line or " " for line in whole.decode("utf-8", "replace").split("\n")[:-1]], (at + len(whole), identity)


def _growing(file: Path, at: int, identity: int) -> Iterator[str]:
    """What is written from there on, also after the file was turned over."""
    while True:
        with suppress(OSError):
            info = os.stat(file)
            if info.st_ino != identity or info.st_size < at:
                at, identity = 0, info.st_ino
        lines, (at, _) = _read(file, at)
        yield from lines or ("",)
        if not lines:
            time.sleep(_POLL_S)
