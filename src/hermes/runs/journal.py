"""The tail journal: text that readers were given and the database does not hold yet.

A process appends it to its own files before any reader sees it, in one write for all deltas of a tick of the loop.
The files are not synced: they survive the process, not a loss of power. A process holds a lock on each of its files,
so that others can tell when it is dead; whoever takes over one of its runs moves its tails to the database first."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.bus.memory import MemoryBus
from hermes.core.events import Event
from hermes.core.home import FILE_MODE, make_private_folder
from hermes.core.ids import random_hex
from hermes.core.limits import JOURNAL_FILE_BYTES_MAX, JOURNAL_RETRY_S, JOURNAL_REUSED_BYTES_MAX
from hermes.core.processes import host_of, is_alive, this_process
from hermes.store.base import Tail

if TYPE_CHECKING:
    from hermes.runs.streams import Stream

log = logging.getLogger(__name__)
_STREAM, _DELTA = 0, 1
# With this bit, a short delta of the same stream as the one before, with the next number: the rest is its size.
_NEXT = 0x80
_SUFFIX = ".tail"


def _numbers(*values: int) -> bytes:
    """Unsigned integers as base-128 varints, lowest bits first."""
    if max(values) <= 0x7F:
        return bytes(values)
    out = bytearray()
    for value in values:
        while value > 0x7F:
            out.append(0x80 | value & 0x7F)
            value >>= 7
        out.append(value)
    return bytes(out)


def writer_of(holder: str) -> str:
    """How a process is named in its file names: host and process."""
    return "-".join(hashlib.sha256(part.encode()).hexdigest()[:12] for part in (host_of(holder), holder))


class JournalFile:
    """A file of this process's journal. `streams` has the number of the last delta of each stream in it, as far as
    known: the file that is being written may get more."""

    def __init__(self, folder: Path) -> None:
        self.size, self.declared, self.last = 0, 0, -1
        self.streams: dict[Stream, float] = {}
        make_private_folder(folder)
        while True:
            self.path = folder / f"{os.getpid()}-{writer_of(this_process())}-{random_hex(8)}{_SUFFIX}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, FILE_MODE)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:  # it was taken for one of a dead process, and removed
                os.close(self._fd)

    def append(self, data: bytes | bytearray) -> None:
        if os.write(self._fd, data) != len(data):
            raise OSError("the disk is full")
        self.size += len(data)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        self.close()

    def close(self) -> None:
        os.close(self._fd)


class TailJournal:
    """Publishes deltas once they are in a file of this process. `full` is called when the texts in it should be moved
    to the database, so that files can be deleted."""

    def __init__(self, folder: Path, bus: MemoryBus, full: Callable[[], None]) -> None:
        self._folder, self._bus, self._full = folder, bus, full
        self._file: JournalFile | None = None
        self._older: list[JournalFile] = []
        self._data = bytearray()
        self.waiting: list[Event] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.works = True
        self._retry_at = 0.0

    def add(self, stream: Stream, event: Event) -> None:
        """Write a delta and publish it with all others of this tick."""
        if (file := self._file) is None:
            if not self.works and time.monotonic() < self._retry_at:
                self.publish(event)
                return
            try:
                file = self._file = JournalFile(self._folder)
            except OSError as error:
                self._fail(error)
                self.publish(event)
                return
        if stream.journal is not file:
            self._declare_stream(stream, file, event)
        text, ms = event.data["text"].encode("utf-8", "surrogatepass"), round(event.ts * 1000)
        number, count, passed, size = (
            stream.journal_number,
            event.seq - stream.journal_seq,
            ms - stream.journal_ms,
            len(text),
        )
        if number == file.last and count == 1 and passed | size < _NEXT:
            self._data += bytes((_NEXT | size, passed))
        else:
            self._data += _numbers(_DELTA, number, count, passed, size)
            file.last = number
        self._data += text
        stream.journal_seq, stream.journal_ms = event.seq, ms
        if not self.waiting:
            self._call_soon()
        self.waiting.append(event)

    def _declare_stream(self, stream: Stream, file: JournalFile, event: Event) -> None:
        stream.journal, stream.journal_number, stream.journal_seq, stream.journal_ms = file, file.declared, 0, 0
        file.declared += 1
        file.streams[stream] = inf
        header = (event.run_id, stream.id, stream.kind, stream.step, stream.form, event.data["offset"])
        data = json.dumps(header, separators=(",", ":")).encode()
        self._data += _numbers(_STREAM, stream.journal_number, len(data)) + data

    def publish(self, event: Event) -> None:
        """Publish an event that needs no record, after what is pending."""
        if not self.waiting:
            self._call_soon()
        self.waiting.append(event)

    def _call_soon(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what was added, and publish it."""
        if not self.waiting:
            return
        events, self.waiting = self.waiting, []
        data, self._data = self._data, bytearray()
        if data and (file := self._file) is not None:
            try:
                file.append(data)
                self.works = True
                if file.size > JOURNAL_FILE_BYTES_MAX:
                    self._rotate()
            except OSError as error:
                self._fail(error)
        for event in events:
            try:
                self._bus.publish(event.run_id, event)
            except Exception:
                log.exception("an event of run %s could not be delivered to a reader", event.run_id)

    def _rotate(self) -> None:
        """Start another file. The old one is deleted when the database has its content."""
        if self._file is not None:
            self._file.streams = {stream: stream.last_seq for stream in self._file.streams}
            self._older.append(self._file)
            self._file = None
        self._full()

    def _fail(self, error: OSError) -> None:
        if self.works:
            log.warning("the journal in %s cannot be written, so texts are saved more often: %s", self._folder, error)
        self.works, self._retry_at = False, time.monotonic() + JOURNAL_RETRY_S
        if self._file is not None and not self._file.size:
            self._file.remove()
            self._file = None
        self._rotate()

    def check(self) -> None:
        """Raise OSError if the journal cannot be written. Blocks."""
        file = JournalFile(self._folder)
        try:
            file.append(bytes((_STREAM,)))  # not yet a record
        finally:
            file.remove()

    def release(self, stream: Stream, seq: float) -> None:
        """The database has this stream up to the number `seq`; `inf` if it needs no more of it."""
        for file in self._files():
            if stream not in file.streams or file.streams[stream] > seq:
                continue
            del file.streams[stream]
            if file.streams:
                continue
            if file is not self._file:
                self._older.remove(file)
                file.remove()
            elif file.size > JOURNAL_REUSED_BYTES_MAX and not self._data:
                self._file = None
                file.remove()

    def _files(self) -> list[JournalFile]:
        return [*self._older, *([self._file] if self._file is not None else [])]

    def close(self) -> None:
        """What is still needed stays, for whoever continues its runs."""
        self.flush()
        for file in self._files():
            if file.streams:
                file.close()
            else:
                file.remove()
        self._file, self._older = None, []


class _Read:
    """The content of a file: its streams, and how far it was read."""

    def __init__(self) -> None:
        self.at = 0
        self.rest = b""
        self.tails: dict[int, tuple[str, Tail]] = {}
        self._last: dict[int, tuple[int, int]] = {}
        self._number = -1

    def take(self, data: bytes) -> None:
        """Parse what was appended to the file. A record without its end waits for it."""
        self.at += len(data)
        data, at = self.rest + data, 0
        with contextlib.suppress(IndexError):
            while at < len(data):
                at = self._record(data, at)
        self.rest = data[at:]

    def _record(self, data: bytes, at: int) -> int:
        if data[at] == _STREAM:
            (number, size), at = _read_numbers(data, at + 1, 2)
            run_id, *header = json.loads(_slice(data, at, size))
            self.tails[number], self._last[number] = (run_id, Tail(*header)), (0, 0)
        else:
            if data[at] & _NEXT:
                number, count, passed, size, at = self._number, 1, data[at + 1], data[at] & ~_NEXT, at + 2
            else:
                (number, count, passed, size), at = _read_numbers(data, at + 1, 4)
            text = _slice(data, at, size).decode("utf-8", "surrogatepass")
            self._number = number
            seq, ms = self._last[number][0] + count, self._last[number][1] + passed
            self._last[number] = seq, ms
            self.tails[number][1].deltas.append((seq, ms, text))
        return at + size


def _read_numbers(data: bytes, at: int, count: int) -> tuple[list[int], int]:
    numbers: list[int] = []
    for _ in range(count):
        value = shift = 0
        while data[at] & 0x80:
            value |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
        numbers.append(value | data[at] << shift)
        at += 1
    return numbers, at


def _slice(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise IndexError("the record is not complete")
    return data[at : at + size]


class JournalReader:
    """Reads the files of all processes of a home. Blocking, thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, _Read] = {}
        self._lock = threading.Lock()

    def tails(self, run_id: str, holder: str | None = None) -> list[Tail]:
        """The tails of a run, from one process or all, the older file of a stream first. What others append meanwhile
        is not added: events before it may be missing in an older view of the store."""
        writers = None if holder is None else ("", writer_of(holder))
        with self._lock:
            self._refresh()
            files = [read for path, read in self._known.items() if writers is None or _writer(path) in writers]
            matching = (tail for journal in files for run, tail in journal.tails.values() if run == run_id)
            copies = (replace(tail, deltas=[*tail.deltas]) for tail in matching)
            return sorted(copies, key=lambda tail: tail.offset)

    def _refresh(self) -> None:
        paths = list(_paths(self._folder))
        self._known = {path: self._known.get(path) or _Read() for path in paths}
        for path in paths:
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(self._known[path].at)
                self._known[path].take(file.read())


class LeftBehind:
    """A file of a dead process: its tails by run. It stays locked until it is closed."""

    def __init__(self, path: str, fd: int) -> None:
        self._path, self._fd, self.writer = path, fd, _writer(path)
        journal = _Read()
        with open(path, "rb") as file:
            journal.take(file.read())
        self.tails: dict[str, list[Tail]] = {}
        for run_id, tail in journal.tails.values():
            self.tails.setdefault(run_id, []).append(tail)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def close(self) -> None:
        os.close(self._fd)


def left_behind(folder: Path) -> list[LeftBehind]:
    """The files of dead processes. Blocks."""
    journals = []
    for path in _paths(folder):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            _lock(fd, path)
            journals.append(LeftBehind(path, fd))
        except OSError:  # its process is alive, or it was moved to the database
            os.close(fd)
    return journals


def _lock(fd: int, path: str) -> None:
    """Lock the file of a dead process. Waits for another process that moves it to the database: whoever continues one
    of its runs needs its content."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.path.basename(path).partition("-")[0]
        host, own_host = (writer.partition("-")[0] for writer in (_writer(path), writer_of(this_process())))
        # For another host it is only known that something there holds the file.
        if host not in ("", own_host) or not pid.isdecimal() or is_alive(int(pid), None):
            raise
        fcntl.flock(fd, fcntl.LOCK_EX)
    os.stat(path)


def _writer(path: str) -> str:
    """The writer in a file name, as by `writer_of`; empty for files without one."""
    _, _, rest = os.path.basename(path).partition("-")
    return rest.rpartition("-")[0]


def _paths(folder: Path) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        files = [entry for entry in entries if entry.name.endswith(_SUFFIX)]
        yield from (entry.path for entry in sorted(files, key=_age))


def _age(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_ctime_ns
    except OSError:
        return 0
