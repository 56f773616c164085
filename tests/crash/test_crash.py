"""Kills at random moments: what was acknowledged is there, nothing is there by half, and the next process goes on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes.store.sessions import SessionDB
from store.tools import LATEST, PATIENCE_S, kill, next_program, texts, whole_step

from .check import Ledger, check

ROUNDS = int(os.environ.get("HERMES_CRASH_ROUNDS", "10"))
SEED = os.environ.get("HERMES_CRASH_SEED") or secrets.token_hex(4)
# Files grow from round to round; after some rounds a new one is begun.
ROUNDS_PER_FILE = 10
THREADS = 6
# Enough that a step to the next version takes a while.
ROWS = 20_000


@contextlib.contextmanager
def seed_is_told(*where: object) -> Iterator[random.Random]:
    """A failure says how to have it again."""
    try:
        yield random.Random(f"{SEED}/{where}")
    except BaseException as error:
        error.add_note(f"HERMES_CRASH_SEED={SEED} ({where})")
        raise


def killed_after(folder: Path, seed: str, lines: int, wait_s: float) -> list[str]:
    """Kill a writer a moment after it has reported that many lines; returns all reported lines."""
    places = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    writer = subprocess.Popen(
        [sys.executable, "-m", "crash.writer", str(folder), seed, str(THREADS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert writer.stdout is not None and writer.stderr is not None
    try:
        first_lines = [line for _, line in zip(range(lines), writer.stdout, strict=False)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            writer.wait(wait_s)
        writer.kill()
        rest, complaint = writer.stdout.read(), writer.stderr.read()
        assert writer.wait(PATIENCE_S) == -signal.SIGKILL, complaint.decode()
    finally:
        writer.kill()
        writer.communicate()
    # The last line may have been cut.
    return (b"".join(first_lines) + rest).decode().split("\n")[:-1]


@pytest.mark.parametrize("file", range(-(-ROUNDS // ROUNDS_PER_FILE)))
def test_killed_writer_loses_no_acknowledged_data(tmp_path: Path, file: int) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    ledger = Ledger()
    for turn in range(min(ROUNDS_PER_FILE, ROUNDS - file * ROUNDS_PER_FILE)):
        with seed_is_told(file, turn) as chance:
            # Now and then it is killed while it opens the file.
            lines = 1 if chance.random() < 0.1 else chance.randrange(2, 800)
            wait_s = chance.uniform(0, 0.3 if lines == 1 else 0.03)
            for line in killed_after(folder, f"{SEED}/{file}/{turn}", lines, wait_s):
                ledger.take(json.loads(line))
            check(folder, ledger)
    assert (
        ledger.rows
        and ledger.runs
        and ledger.branches
        and ledger.deleted_sessions
        and ledger.summaries
        and ledger.responses
    )


@pytest.fixture(scope="module")
def filled_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with so many messages in it."""
    path = tmp_path_factory.mktemp("filled") / "state.db"
    with contextlib.closing(SessionDB(path)) as db:

        def fill() -> None:
            db.create_session("s", "cli")
            for number in range(ROWS):
                db.append_message("s", "user", f"message {number}")

        db.transaction(fill)
    return path


@pytest.mark.parametrize("turn", range(max(4, ROUNDS // 5)))
def test_kill_during_migration_leaves_old_or_new_version(filled_database: Path, tmp_path: Path, turn: int) -> None:
    path = Path(shutil.copy(filled_database, tmp_path / "state.db"))
    source = """
        import sys
        from hermes.store.sessions import SessionDB

        add_step()
        print("ready", flush=True)
        SessionDB(sys.argv[1])
        print("done", flush=True)
        sys.stdin.readline()
    """
    with seed_is_told("migration", turn) as chance:
        program = next_program(path, source)
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(chance.uniform(0, 0.2))
        kill(program)
        if whole_step(path) == LATEST:
            with contextlib.closing(SessionDB(path)) as db:
                assert len(texts(db, "s")) == ROWS
                assert len(db.search_messages(str(ROWS - 1))) == 1
