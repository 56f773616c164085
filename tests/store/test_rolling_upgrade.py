"""Replicas of two neighbouring schema versions work on one PostgreSQL database; the older code is that of the history."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from hermes.store.base import StoreTooNew
from hermes.store.postgres.schema import MIGRATIONS
from hermes.store.stores import open_store
from support.engines import execute
from support.waiting import until_blocking

from .tools import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]
SCHEMA = "src/hermes/store/postgres/schema.py"
# Somebody in this database waits for a lock of the kind that upgrades take.
WAITING = """
SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
# Evaluates each line that it is given with a store in reach.
PROGRAM = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from store.tools import Turn
from hermes.core.spec import RunSpec
from hermes.store.base import StoreError
from hermes.store.postgres.schema import MIGRATIONS
from hermes.store.stores import open_store

try:
    store = open_store(sys.argv[2])
except StoreError as error:
    print(json.dumps({"refused": type(error).__name__}), flush=True)
    sys.exit()
print(json.dumps({"knows": len(MIGRATIONS)}), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line), default=str), flush=True)
store.close()
"""


def git(*args: str) -> bytes:
    return subprocess.run(["git", "-C", str(REPOSITORY), *args], check=True, capture_output=True).stdout


@pytest.fixture(scope="session")
def older_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest code of the version before, with the tests' tools of that time."""
    try:
        changes = git("log", "--format=%H %P", "--", SCHEMA).decode().splitlines()
        shallow = git("rev-parse", "--is-shallow-repository").strip() == b"true"
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the history of the repository is not here: no git, or no clone")
    # What was there before the change that made the present version.
    for commit in ["HEAD", *" ".join(changes).split()]:
        folder = tmp_path_factory.mktemp("older")
        try:
            archive = git("archive", commit, "src", "tests/store")
        except subprocess.CalledProcessError:  # before the beginning of a shallow clone
            continue
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        count = "from hermes.store.postgres.schema import MIGRATIONS; print(len(MIGRATIONS))"
        env = {**os.environ, "PYTHONPATH": str(folder / "src")}
        result = subprocess.run([sys.executable, "-c", count], env=env, capture_output=True, check=False)
        if result.returncode == 0 and int(result.stdout) == len(MIGRATIONS) - 1:
            return folder
    if shallow:
        pytest.skip("the clone is shallow: the code of the version before is not in it")
    raise AssertionError(f"no commit has {len(MIGRATIONS) - 1} migrations")


class Replica:
    """A process with a store open, of the code in a folder."""

    def __init__(self, code: Path, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(code / "tests"), url],
            env={**os.environ, "PYTHONPATH": str(code / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def __call__(self, expression: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{expression}\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def replicas() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, code: Path, url: str) -> Replica:
    return stack.enter_context(closing(Replica(code, url)))


def version_of(url: str) -> int:
    with closing(open_store(url)) as store:
        return int(store.engine.read(lambda tx: tx.value("SELECT version FROM schema_version")))


def work_together(old: Replica, new: Replica) -> None:
    """Each writes what the other reads and goes on with."""
    for mine, other, name in ((old, new, "a"), (new, old, "b")):
        # sessions
        mine(f"store.sessions.create_session('{name}', 'cli', title='Of {name}')")
        other(f"store.sessions.append_message('{name}', 'user', 'kitchen {name}')")
        mine(f"store.sessions.append_message('{name}', 'assistant', 'done')")
        for replica in (mine, other):
            assert replica(f"[m['content'] for m in store.sessions.get_messages('{name}')]") == [
                f"kitchen {name}",
                "done",
            ]
            assert replica(f"[m['session_id'] for m in store.sessions.search_messages('kitchen {name}')]") == [name]
        # leases
        token = mine(f"store.leases.acquire('session:{name}', 'host:1:', 60)")
        assert token is not None
        assert other(f"store.leases.acquire('session:{name}', 'host:2:', 60)") is None
        mine(f"store.leases.release('session:{name}', {token})")
        later = other(f"store.leases.acquire('session:{name}', 'host:2:', 60)")
        assert later > token
        assert mine(f"store.leases.renew('session:{name}', {token}, 60)") is False
        other(f"store.leases.release('session:{name}', {later})")
        # runs: one of mine is followed by the other, a queued one is taken by it
        mine(f"globals().update(turn=Turn(store, '{name}'))")
        mine("turn.begin()")
        run_id = mine("turn.run_id")
        mine("turn.complete('m', 'Noon.')")
        mine("turn.end()")
        logs = [replica(f"[repr(event) for event in store.runs.read('{run_id}', 0, 100)]") for replica in (mine, other)]
        assert logs[0] == logs[1] and len(logs[0]) == 3
        mine(f"globals().update(spec=RunSpec('?', 'queued-{name}', run_id='run_queued_{name}'))")
        mine("store.runs.create(spec)")
        mine("store.runs.offer(spec.run_id)")
        assert other("store.runs.any_queued()") is True
        assert other("store.runs.take_queued().spec.run_id") == f"run_queued_{name}"
        assert mine("store.runs.take_queued()") is None
        # jobs
        mine(f"store.jobs.create({{'id': '{name * 12}', 'name': 'n', 'enabled': True, 'next_run_at': 1.0}})")
        assert other("[job['id'] for job in store.jobs.claim_due(2.0, 'host:2:')]") == [name * 12]
        assert mine("store.jobs.claim_due(2.0, 'host:1:')") == []
        # idempotency and responses
        mine(f"store.idempotency.claim('POST', '{name}', 'f')")
        mine(f"store.idempotency.finish('POST', '{name}', 200, b'body')")
        assert "body" in json.dumps(other(f"repr(store.idempotency.claim('POST', '{name}', 'f'))"))
        mine(f"store.responses.put('resp_{name}', {{'response': {{'status': 'completed'}}}})")
        assert other(f"store.responses.get('resp_{name}')") == {"response": {"status": "completed"}}
        for replica in (mine, other):
            replica("asyncio.run(store.engine.check())")


def test_database_is_upgraded_under_older_replicas(
    older_code: Path, postgres_database: str, replicas: ExitStack
) -> None:
    old = start(replicas, older_code, postgres_database)
    assert old.answer() == {"knows": len(MIGRATIONS) - 1}
    old("store.sessions.create_session('before', 'cli')")
    new = start(replicas, REPOSITORY, postgres_database)
    assert new.answer() == {"knows": len(MIGRATIONS)}
    assert new("store.sessions.get_session('before')['id']") == "before"
    work_together(old, new)


def test_older_replica_joins_upgraded_database(older_code: Path, postgres_database: str, replicas: ExitStack) -> None:
    new = start(replicas, REPOSITORY, postgres_database)
    assert new.answer() == {"knows": len(MIGRATIONS)}
    old = start(replicas, older_code, postgres_database)
    assert old.answer() == {"knows": len(MIGRATIONS) - 1}
    work_together(old, new)
    assert version_of(postgres_database) == len(MIGRATIONS)


def test_replica_two_versions_behind_is_refused(older_code: Path, postgres_database: str, replicas: ExitStack) -> None:
    open_store(postgres_database).close()
    execute(postgres_database, f"UPDATE hermes.schema_version SET version = {len(MIGRATIONS) + 1}")
    assert start(replicas, older_code, postgres_database).answer() == {"refused": "StoreTooNew"}
    assert version_of(postgres_database) == len(MIGRATIONS) + 1, "one version behind is accepted"
    execute(postgres_database, f"UPDATE hermes.schema_version SET version = {len(MIGRATIONS) + 2}")
    with pytest.raises(StoreTooNew):
        open_store(postgres_database)


def test_replicas_that_start_together_upgrade_once(
    older_code: Path, postgres_database: str, replicas: ExitStack
) -> None:
    old = start(replicas, older_code, postgres_database)
    old.answer()
    started = [start(replicas, REPOSITORY, postgres_database) for _ in range(4)]
    assert [replica.answer() for replica in started] == [{"knows": len(MIGRATIONS)}] * 4
    assert version_of(postgres_database) == len(MIGRATIONS)
    with closing(open_store(postgres_database)) as store:
        assert store.engine.read(lambda tx: tx.value("SELECT count(*) FROM schema_version")) == 1


def test_upgrade_may_wait_longer_than_other_statements(
    older_code: Path, postgres_database: str, replicas: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    from hermes.store.postgres import opening

    start(replicas, older_code, postgres_database).answer()
    monkeypatch.setattr(opening, "PG_STATEMENT_S_MAX", 1)
    with ThreadPoolExecutor() as threads, psycopg.connect(postgres_database) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s)", (opening.lock_key("hermes", "migrate"),))
        upgrade = threads.submit(opening.make_ready, postgres_database, "hermes", "here")
        until_blocking(lambda: other.execute(WAITING).fetchone() or upgrade.done())
        # One that would end later than this would not be noticed: the test can only pass too easily.
        with pytest.raises(TimeoutError):
            upgrade.result(1.5)
        other.rollback()
        upgrade.result(PATIENCE_S)
    assert version_of(postgres_database) == len(MIGRATIONS)


def test_upgrade_does_not_undo_that_of_a_newer_replica(
    older_code: Path, postgres_database: str, replicas: ExitStack
) -> None:
    import psycopg

    from hermes.store.postgres import opening

    start(replicas, older_code, postgres_database).answer()
    with ThreadPoolExecutor() as threads, psycopg.connect(postgres_database) as newer:
        newer.execute("SELECT pg_advisory_xact_lock(%s)", (opening.lock_key("hermes", "migrate"),))
        upgrade = threads.submit(opening.make_ready, postgres_database, "hermes", "here")
        until_blocking(lambda: newer.execute(WAITING).fetchone() or upgrade.done())
        assert not upgrade.done()
        newer.execute("UPDATE hermes.schema_version SET version = %s", (len(MIGRATIONS) + 1,))
        newer.commit()
        upgrade.result(PATIENCE_S)
    assert version_of(postgres_database) == len(MIGRATIONS) + 1
