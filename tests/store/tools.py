"""What the tests of the store share: a second look at a file, programs beside it, and a turn written by hand."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hermes.core.events import Cuts, Event
from hermes.core.spec import RunSpec
from hermes.store.base import Partial, Row
from hermes.store.sqlite.connections import add_functions
from hermes.store.sqlite.schema import MIGRATIONS

Json = dict[str, Any]

# Longer than anything here takes; only a hang reaches it.
PATIENCE_S = 120


def url(path: Path) -> str:
    return f"sqlite://{path}"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextlib.contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def side(path: Path, suffix: str) -> Path:
    """A file that SQLite keeps beside its database."""
    return path.with_name(path.name + suffix)


@contextlib.contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of one's own, past the store; what is done in it is committed."""
    with contextlib.closing(sqlite3.connect(path, timeout=PATIENCE_S)) as connection, connection:
        add_functions(connection)
        yield connection


def look(path: Path, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """What a second reader of the file sees."""
    with raw(path) as connection:
        return connection.execute(sql, values).fetchall()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def texts(db: Any, session_id: str) -> list[Any]:
    """What was said in a session."""
    return [message["content"] for message in db.get_messages(session_id)]


# ---- threads


def at_once(count: int, work: Callable[[int], Any], meanwhile: Callable[[], None] | None = None) -> list[Any]:
    """The results of the work in so many threads that begin together; an exception is a result too.

    `meanwhile` is called when all of them have begun.
    """
    results: list[Any] = [None] * count
    gate = threading.Barrier(count + 1)

    def carry_out(number: int) -> None:
        gate.wait(PATIENCE_S)
        try:
            results[number] = work(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=carry_out, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    gate.wait(PATIENCE_S)
    if meanwhile is not None:
        meanwhile()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


# ---- programs


def start(source: str, *args: object, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A Python program beside the test, fed and read by the test; `args` are its `sys.argv[1:]`."""
    command = [*prefix, sys.executable, "-c", textwrap.dedent(source), *map(str, args)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(program: subprocess.Popen[str], text: str = "") -> Any:
    """What the program printed last, as JSON. It must end well."""
    try:
        out, err = program.communicate(text, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        # Its children are in its group.
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
        raise
    assert program.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def kill(program: subprocess.Popen[str]) -> None:
    """End a program in the way of a power failure, and let nothing of it stay."""
    program.kill()
    program.communicate(timeout=PATIENCE_S)


def run(source: str, *args: object, prefix: tuple[str, ...] = ()) -> Any:
    """The JSON that a Python program prints."""
    return finish(start(source, *args, prefix=prefix))


# ---- versions

LATEST = len(MIGRATIONS)

# A further step than there is: a table, a column, and a change of every row.
NEXT = """
from hermes.store.sqlite import schema

def add_step(*more):
    step = (
        "CREATE TABLE extra (id INTEGER PRIMARY KEY, words TEXT)",
        "INSERT INTO extra (id, words) SELECT id, hex(randomblob(500)) FROM messages",
        "ALTER TABLE sessions ADD COLUMN note TEXT",
        "UPDATE messages SET finish_reason = 'moved'",
        "UPDATE sessions SET note = (SELECT count(*) FROM extra)",
        *more,
    )
    object.__setattr__(schema.STATE, "migrations", (*schema.MIGRATIONS, step))
"""


def next_program(path: Path, source: str) -> subprocess.Popen[str]:
    """A program of a Hermes that can take this further step, by `add_step()`."""
    return start(NEXT + textwrap.dedent(source), path)


def has_table(path: Path, name: str) -> bool:
    return bool(look(path, "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", name))


def whole_step(path: Path) -> int:
    """The version of the file, which has all of the step that leads to it or nothing of it."""
    [(version,)] = look(path, "PRAGMA user_version")
    columns = {row[1] for row in look(path, "PRAGMA table_info(sessions)")}
    moved = look(path, "SELECT count(*) FROM messages WHERE finish_reason = 'moved'")[0][0]
    total = look(path, "SELECT count(*) FROM messages")[0][0]
    state = (has_table(path, "extra"), "note" in columns, moved)
    if version == LATEST:
        assert state == (False, False, 0)
    else:
        assert version == LATEST + 1
        assert state == (True, True, total)
        assert look(path, "SELECT count(*) FROM extra") == [(total,)]
    assert look(path, "PRAGMA integrity_check") == [("ok",)]
    return int(version)


# ---- turns


class Turn:
    """A turn of a session as its writer records it: events with the rows that they announce."""

    def __init__(self, store: Any, session_id: str, *, token: int | None = None, **fields: Any) -> None:
        self.store, self.session_id, self.token = store, session_id, token
        self.spec = RunSpec("What is the time?", session_id, **fields)
        self.run_id = self.spec.run_id
        self.seq = 0
        store.runs.create(self.spec)

    def event(self, type_: str, step: int = 0, /, **data: Any) -> Event:
        self.seq += 1
        return Event(self.run_id, type_, step, data, self.seq, 1_790_000_000.0 + self.seq)

    def row(self, role: str, content: Any, *announced_in: tuple[Event, str], **fields: Any) -> Row:
        return Row(self.session_id, role, content, self.run_id, announced_in=announced_in, **fields)

    def append(self, *events: Event, rows: list[Row] | None = None, **options: Any) -> None:
        self.store.runs.append(self.run_id, self.token, events, rows or [], **options)

    def begin(self, question: str = "What is the time?") -> Event:
        """The run has started, with the user's row."""
        event = self.event(
            "run.started",
            kind=self.spec.kind,
            session_id=self.session_id,
            model="m",
            provider="p",
            api_mode="chat_completions",
            tools=[],
            user_row=None,
            max_iterations=90,
            on_detach="continue",
        )
        session = {"id": self.session_id, "source": "api_server", "model": "m", "owner": self.spec.owner}
        self.append(event, rows=[self.row("user", question, (event, "user_row"))], session=session)
        return event

    def grown(self, message_id: str, *pieces: str, step: int = 1) -> Partial:
        """The open text of a message after these deltas."""
        cuts = Cuts()
        for piece in pieces:
            self.seq += 1
            cuts.add(self.seq, len(piece), 1_790_000_000.0 + self.seq)
        return Partial(message_id, "text", step, "".join(pieces), cuts.pack(), self.seq)

    def complete(self, message_id: str, text: str, cuts: str = "", step: int = 1, **data: Any) -> Event:
        """A whole message: its row, and the end of its open text."""
        calls = data.pop("tool_calls", None)
        event = self.event(
            "message.completed",
            step,
            message_id=message_id,
            row=None,
            text_length=len(text),
            finish_reason="tool_calls" if calls else "stop",
            tool_calls=calls or [],
            partial=False,
            cuts=cuts,
        )
        row = self.row("assistant", text, (event, "row"), tool_calls=calls)
        self.append(event, rows=[row], closes=[message_id], **data)
        return event

    def end(self) -> Event:
        event = self.event("run.completed", message_id="", row=None, finish_reason="stop", steps=1, usage={})
        self.append(event)
        return event
