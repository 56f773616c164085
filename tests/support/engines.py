"""PostgreSQL and NATS for tests: one server of each for all workers of a pytest run, or one of a test's own.

HERMES_TEST_PG_URL and HERMES_TEST_NATS_URL name servers to use instead; databases are made in the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit, urlunsplit

import pytest

from hermes.cluster.engines import Engine, EngineState, NatsEngine, PostgresEngine
from hermes.core.home import make_private_folder
from hermes.core.processes import is_alive, process_start

from .ports import reserved_port

_PG_URL, _NATS_URL = os.environ.get("HERMES_TEST_PG_URL"), os.environ.get("HERMES_TEST_NATS_URL")
_PREFIX = f"hermes-engines-{os.geteuid()}-"
_SETTINGS = {
    "max_connections": "300",
    "shared_buffers": "64MB",
    "log_min_messages": "warning",
}
# Quick, and of no use after a crash.
_VOLATILE = {**_SETTINGS, "fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


def postgres_engine(folder: Path, *, durable: bool = True) -> PostgresEngine:
    return PostgresEngine(folder, _SETTINGS if durable else _VOLATILE)


@contextlib.contextmanager
def running(engine: Engine) -> Iterator[str]:
    engine.start()
    try:
        yield engine.url
    finally:
        engine.stop()


@contextlib.contextmanager
def _at_reserved_port(engine: Engine) -> Iterator[None]:
    """Run an engine whose port stays its own while it is down."""
    with reserved_port() as port:
        make_private_folder(engine.folder)
        engine._write(EngineState(port, uuid.uuid4().hex))
        with running(engine):
            yield


# ---- one for all workers


@contextlib.contextmanager
def shared(name: str, make: Callable[[Path], Engine]) -> Iterator[str]:
    """The address of the server that all workers of this run share; the last of them to leave stops it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    root = Path(tempfile.gettempdir())
    for users_file in root.glob(f"{_PREFIX}{name}-*.users"):
        with contextlib.suppress(BlockingIOError):
            _stop_unused(users_file.with_suffix(""), make, fcntl.LOCK_NB)
    folder = root / f"{_PREFIX}{name}-{run}"
    engine, me = make(folder), [os.getpid(), process_start(os.getpid())]
    with _users(folder) as users:
        engine.start()
        users.append(me)
    try:
        yield engine.url
    finally:
        with _users(folder) as users:
            users.remove(me)
        _stop_unused(folder, make)


def _stop_unused(folder: Path, make: Callable[[Path], Engine], flags: int = 0) -> None:
    """Stop a server without users, also one left behind by a killed test run."""
    with _users(folder, flags) as users:
        if not users:
            make(folder).stop()
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _users(folder: Path, flags: int = 0) -> Iterator[list[list[Any]]]:
    """The processes that use the server of a folder, locked and without those that have ended."""
    with _locked(folder.with_name(f"{folder.name}.users"), flags) as file:
        users = [user for user in json.loads(file.read() or "[]") if is_alive(*user)]
        try:
            yield users
        finally:
            if users or folder.exists():
                file.seek(0)
                file.truncate()
                file.write(json.dumps(users))
            else:
                os.unlink(file.name)


@contextlib.contextmanager
def _locked(path: Path, flags: int) -> Iterator[TextIO]:
    while True:
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | flags)
            # The one who held the lock before may have removed the file.
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                file.seek(0)
                yield file
                return


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The address of a PostgreSQL server shared with all other tests; its user may create databases.

    A crash of the machine would damage it (fsync is off): a test about crashes uses `own_postgres`.
    """
    if _PG_URL:
        yield _PG_URL
        return
    with shared("postgres", lambda folder: postgres_engine(folder, durable=False)) as url:
        yield url


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """The address of a NATS server with JetStream, shared with all other tests."""
    if _NATS_URL:
        yield _NATS_URL
        return
    with shared("nats", NatsEngine) as url:
        yield url


# ---- databases


def with_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


def execute(url: str, *statements: str) -> None:
    """Run each statement in its own transaction."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@contextlib.contextmanager
def new_database(url: str, *, template: str = "template1") -> Iterator[str]:
    """The address of a new database, which is dropped afterwards with whatever is connected to it. Nobody may be
    connected to `template` while it is copied."""
    name = f"test_{uuid.uuid4().hex}"
    execute(url, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    try:
        yield with_database(url, name)
    finally:
        execute(url, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.fixture
def postgres_database(postgres_url: str) -> Iterator[str]:
    """The address of an empty database of the test's own."""
    with new_database(postgres_url) as url:
        yield url


# ---- a server of the test's own


@pytest.fixture
def own_postgres(tmp_path: Path) -> Iterator[PostgresEngine]:
    """A durable PostgreSQL server that the test may stop, kill and start again."""
    engine = postgres_engine(tmp_path / "pg")
    with _at_reserved_port(engine):
        yield engine


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[NatsEngine]:
    """A NATS server that the test may stop, kill and start again."""
    engine = NatsEngine(tmp_path / "nats")
    with _at_reserved_port(engine):
        yield engine
