"""Two processes on one file: nothing is lost, nothing is locked out, and a lease has one holder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hermes.store.base import LeaseLost, StoreError, StoreReadOnly
from hermes.store.leases import this_process
from hermes.store.sessions import SessionDB
from hermes.store.stores import is_server, open_store, path_of

from .conftest import query
from .tools import contents, finish, kill, look, start, texts, url

THREADS = 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def store(path: Path) -> Iterator[Any]:
    with contextlib.closing(open_store(url(path))) as store:
        store.sessions.create_session("s", "cli")
        yield store


def together(source: str, *args: object) -> list[Any]:
    """What the program prints in two processes that begin at the same word."""
    programs = [start(source, name, *args) for name in ("left", "right")]
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n", program.communicate()
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("go\n")
        program.stdin.flush()
    return [finish(program) for program in programs]


# ---- writing

HAMMER = """
    import json, sys, threading
    from hermes.store.stores import open_store

    name, url, threads, turns, spread = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    store = open_store(url)
    written, failures = [], []

    def work(number):
        for turn in range(turns):
            session = f"s{number % spread}" if spread else f"{name}-{number}-{turn % 3}"
            text = f"{name}/{number}/{turn}"
            try:
                store.sessions.create_session(session, "cli")
                written.append((number, session, store.sessions.append_message(session, "user", text), text))
                if turn % 5 == 0:
                    store.sessions.get_messages(session, limit=5, order="desc")
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    print("ready", flush=True)
    sys.stdin.readline()
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    store.close()
    print(json.dumps([written, failures]))
"""


@pytest.mark.parametrize("spread", [1, 3, 0], ids=["one session", "a few sessions", "many sessions"])
def test_two_processes_with_eight_threads_lose_no_writes(durable_url: str, spread: int) -> None:
    turns = 40
    results = together(HAMMER, durable_url, THREADS, turns, spread)
    assert [failures for _, failures in results] == [[], []]
    written = [tuple(entry) for entries, _ in results for entry in entries]
    assert len(written) == 2 * THREADS * turns

    stored = {
        row: (session, text)
        for row, session, text in query(durable_url, "SELECT id, session_id, content FROM messages")
    }
    assert stored == {row: (session, text) for _, session, row, text in written}
    for entries, _ in results:
        for number in range(THREADS):
            rows = [row for thread, _, row, _ in entries if thread == number]
            assert all(a < b for a, b in pairwise(rows)), "a later message has a smaller id"
    counted = "SELECT message_count - (SELECT count(*) FROM messages WHERE session_id = sessions.id) FROM sessions"
    assert {difference for (difference,) in query(durable_url, counted)} == {0}
    if not is_server(durable_url):
        path = path_of(durable_url)
        assert path is not None
        assert look(path, "PRAGMA integrity_check") == [("ok",)]
        assert look(path, "PRAGMA user_version") != [(0,)]


OPENER = """
    import json, sys, threading
    from hermes.store.stores import open_store

    name, url = sys.argv[1:]
    failures = []

    def work(number):
        try:
            store = open_store(url)
            store.sessions.create_session(f"{name}{number}", "cli")
            store.close()
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    print("ready", flush=True)
    sys.stdin.readline()
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    print(json.dumps(failures))
"""


@pytest.mark.parametrize("backend", ["file", "postgres"])
def test_concurrent_database_creation(request: pytest.FixtureRequest, path: Path, backend: str) -> None:
    where = url(path) if backend == "file" else request.getfixturevalue("postgres_database")
    assert together(OPENER, where) == [[], []]
    assert query(where, "SELECT count(*) FROM sessions") == [(16,)]


def test_killed_writer_does_not_block_others(store: Any, path: Path) -> None:
    source = """
        import sqlite3, sys
        other = sqlite3.connect(sys.argv[1], isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE sessions SET source = 'half'")
        print("ready", flush=True)
        sys.stdin.readline()
    """
    program = start(source, path)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    kill(program)
    store.sessions.append_message("s", "user", "alive")
    assert texts(store.sessions, "s") == ["alive"]
    assert store.sessions.get_session("s")["source"] == "cli"


# ---- leases

TAKERS = """
    import json, os, sys, threading
    from hermes.store.base import LeaseLost
    from hermes.store.stores import open_store
    from hermes.store.leases import this_process

    name, url, witness, threads, wanted, sessions = *sys.argv[1:4], *map(int, sys.argv[4:])
    store = open_store(url)
    taken, failures = [], []

    def work(number):
        session = f"s{number % sessions}"
        old, gained = None, 0
        while gained < wanted:
            token = store.leases.acquire(f"session:{session}", this_process(), 60)
            if token is None:
                continue
            gained += 1
            try:
                # Somebody else's eye: a file that only one can make.
                os.close(os.open(f"{witness}-{session}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                failures.append("two holders at once")
            for word in ("in", "out"):
                store.sessions.append_message(session, "user", f"{word} {token}", lease_token=token)
            try:
                if old is not None:
                    store.sessions.append_message(session, "user", "fenced", lease_token=old)
                    failures.append("a fenced write was accepted")
            except LeaseLost:
                pass
            os.unlink(f"{witness}-{session}")
            taken.append((session, token))
            store.leases.release(f"session:{session}", token)
            old = token

    def guarded(number):
        try:
            work(number)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    workers = [threading.Thread(target=guarded, args=(number,)) for number in range(threads)]
    print("ready", flush=True)
    sys.stdin.readline()
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    store.close()
    print(json.dumps([taken, failures]))
"""


@pytest.mark.parametrize("sessions", [1, 4], ids=["one session", "many sessions"])
def test_lease_has_one_holder_across_processes_and_threads(durable_url: str, tmp_path: Path, sessions: int) -> None:
    with contextlib.closing(open_store(durable_url)) as store:
        for number in range(sessions):
            store.sessions.create_session(f"s{number}", "cli")
    wanted = 4
    results = together(TAKERS, durable_url, tmp_path / "witness", THREADS, wanted, sessions)
    assert [failures for _, failures in results] == [[], []]
    entries = [tuple(entry) for entries, _ in results for entry in entries]
    assert len(entries) == 2 * THREADS * wanted
    assert len(set(entries)) == len(entries), "a token was given twice"
    with contextlib.closing(open_store(durable_url)) as store:
        for number in range(sessions):
            stored = texts(store.sessions, f"s{number}")
            tokens = sorted(token for session, token in entries if session == f"s{number}")
            assert stored == [f"{word} {token}" for token in tokens for word in ("in", "out")]


HOLDER = """
    import sys
    from hermes.store.stores import open_store
    from hermes.store.leases import this_process

    store = open_store("sqlite://" + sys.argv[1])
    print(store.leases.acquire("session:s", this_process(), 3600), flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def holder(path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds the lease of the session, and its token."""
    program = start(HOLDER, path)
    assert program.stdout is not None
    line = program.stdout.readline()
    try:
        yield program, int(line)
    finally:
        kill(program)


def test_lease_of_dead_process_expires_immediately(store: Any, path: Path) -> None:
    with holder(path) as (program, token):
        assert store.leases.acquire("session:s", "me", 60) is None
        assert store.leases.holder("session:s") is not None
        kill(program)
        assert store.leases.holder("session:s") is None
        assert store.leases.acquire("session:s", "me", 60) == token + 1
    with pytest.raises(LeaseLost):
        store.sessions.append_message("s", "user", "from the grave", lease_token=token)


def test_lease_of_zombie_process_expires_immediately(store: Any, path: Path) -> None:
    with holder(path) as (program, token):
        os.kill(program.pid, signal.SIGKILL)
        os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
        assert store.leases.acquire("session:s", "me", 60) == token + 1


def test_stopped_process_keeps_lease(store: Any, path: Path) -> None:
    with holder(path) as (program, _):
        os.kill(program.pid, signal.SIGSTOP)
        assert store.leases.acquire("session:s", "me", 60) is None


def test_lease_of_reused_pid_expires(store: Any) -> None:
    host, pid, started_at = this_process().rsplit(":", 2)
    assert (host.partition("@")[0], pid) == (socket.gethostname(), str(os.getpid()))
    earlier = f"{host}:{pid}:{float(started_at) - 1:.2f}"
    first = store.leases.acquire("session:s", earlier, 3600)
    assert store.leases.acquire("session:s", this_process(), 3600) == first + 1


@pytest.mark.parametrize(
    "named",
    [
        "me",
        "elsewhere.example:1:1",
        "elsewhere.example:999999999:1",
        "a:b",
        "a:b:c",
        "",
        "::",
        f"{socket.gethostname()}",
    ],
)
def test_lease_of_unknown_host_never_expires_early(store: Any, named: str) -> None:
    store.leases.acquire("session:s", named, 3600)
    assert store.leases.holder("session:s") == named
    assert store.leases.acquire("session:s", "other", 60) is None


# ---- claims

CLAIMER = """
    import json, sys, threading
    from hermes.store.stores import open_store

    name, path = sys.argv[1:]
    store = open_store("sqlite://" + path)
    states, jobs, failures = [], [], []

    def work(number):
        try:
            for key in range(10):
                states.append(store.idempotency.claim("scope", f"k{key}", "print", run_id=f"{name}{number}").state)
            while given := store.jobs.claim_due(100.0, f"{name}{number}", limit=2):
                jobs.extend(job["id"] for job in given)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    print("ready", flush=True)
    sys.stdin.readline()
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    store.close()
    print(json.dumps([states, jobs, failures]))
"""


def test_idempotency_key_and_job_claims_across_processes(store: Any, path: Path) -> None:
    ids = {store.jobs.create({"name": str(number), "enabled": True, "next_run_at": 50.0})["id"] for number in range(30)}
    results = together(CLAIMER, path)
    assert [failures for _, _, failures in results] == [[], []]
    states = [state for entry, _, _ in results for state in entry]
    assert (states.count("new"), states.count("running")) == (10, 150)
    claimed = [job for _, entry, _ in results for job in entry]
    assert len(claimed) == 30
    assert set(claimed) == ids


# ---- reading only

WRITER = """
    import sys
    from hermes.store.sessions import SessionDB

    db = SessionDB(sys.argv[1])
    db.create_session("s", "cli")
    number = 0
    while True:
        number += 1
        db.append_message("s", "user", str(number))
        print(number, flush=True)
        if number == int(sys.argv[2]):
            sys.stdin.readline()
"""


def test_reader_sees_commits_of_other_process(path: Path) -> None:
    program = start(WRITER, path, 200)
    assert program.stdout is not None
    try:
        program.stdout.readline()
        with contextlib.closing(SessionDB(path, read_only=True)) as db:
            count = 0
            for line in program.stdout:
                stored = texts(db, "s")
                assert len(stored) >= int(line)
                assert len(stored) >= count
                assert stored == [str(number) for number in range(1, len(stored) + 1)]
                count = len(stored)
                if int(line) == 200:
                    break
            assert db.get_session("s")["message_count"] == 200
    finally:
        kill(program)


def test_reader_sees_commits_of_killed_writer(path: Path) -> None:
    program = start(WRITER, path, 50)
    assert program.stdout is not None
    for line in program.stdout:
        if line == "50\n":
            break
    kill(program)
    with contextlib.closing(SessionDB(path, read_only=True)) as db:
        assert texts(db, "s") == [str(number) for number in range(1, 51)]


def test_read_only_store_rejects_writes(store: Any, path: Path) -> None:
    with contextlib.closing(SessionDB(path, read_only=True)) as db:
        for work in (
            lambda: db.append_message("s", "user", "x"),
            lambda: db.create_session("t", "cli"),
            lambda: db.delete_session("s"),
            lambda: db.set_meta("a", "b"),
        ):
            with pytest.raises(StoreReadOnly):
                work()
    assert look(path, "SELECT id FROM sessions") == [("s",)]


def test_read_only_open_requires_existing_file(path: Path) -> None:
    with pytest.raises((StoreError, FileNotFoundError)) as refusal:
        SessionDB(path, read_only=True)
    assert str(path) in str(refusal.value)
    assert contents(path.parent) == {}


def test_read_only_open_changes_nothing(path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
        db.append_message("s", "user", "hello")
    before = contents(path.parent)
    with contextlib.closing(SessionDB(path, read_only=True)) as db:
        assert texts(db, "s") == ["hello"]
        assert [hit["id"] for hit in db.search_messages("hello")]
    assert contents(path.parent) == before


def test_read_only_open_does_not_block_writer(path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
    source = """
        import json, sys
        from hermes.store.sessions import SessionDB
        db = SessionDB(sys.argv[1], read_only=True)
        print(json.dumps([m["content"] for m in db.get_messages("s")]), flush=True)
        sys.stdin.readline()
        print(json.dumps([m["content"] for m in db.get_messages("s")]))
        db.close()
    """
    program = start(source, path)
    assert program.stdout is not None
    assert json.loads(program.stdout.readline()) == []
    with contextlib.closing(SessionDB(path)) as db:
        db.append_message("s", "user", "hello")
    with contextlib.closing(SessionDB(path)) as db:
        db.append_message("s", "user", "again")
        assert finish(program, "go\n") == ["hello", "again"]
