"""A connection to PostgreSQL that is lost during COMMIT: the transaction counts once, and is known to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from hermes.store.base import StoreUnreachable
from hermes.store.engine import Engine, Tx
from hermes.store.postgres import engine as engine_module
from hermes.store.postgres.commits import Marker
from hermes.store.stores import open_store
from support.commit_proxy import CommitProxy, commit_proxy
from support.ports import refusing_port

from .conftest import empty

Write = Callable[[Engine, Callable[[Tx], Any]], Any]


def _for_psycopg(marker: Marker) -> tuple[str, tuple[str, int]]:
    sql, params = marker.next_statement()
    return sql.replace("?", "%s"), params


@pytest.fixture
def proxy(postgres_schema: str) -> Iterator[CommitProxy]:
    empty(postgres_schema)
    with commit_proxy(postgres_schema) as proxy:
        yield proxy


@pytest.fixture(params=["thread", "loop"])
def write(request: pytest.FixtureRequest) -> Write:
    if request.param == "thread":
        return lambda engine, work: engine.write(work)

    async def submit(engine: Engine, work: Callable[[Tx], Any]) -> Any:
        return await engine.submit_write(work)

    return lambda engine, work: asyncio.run(submit(engine, work))


class Notes:
    """Work that adds a row without a key, so that it counts twice if it is done twice."""

    def __init__(self) -> None:
        self.runs, self.after = 0, 0

    def __call__(self, tx: Tx) -> int:
        self.runs += 1
        tx.after(self._count_after)
        tx.execute("INSERT INTO conversation_objects VALUES ('c', 'o', 1, '{}') ON CONFLICT DO NOTHING")
        tx.execute("INSERT INTO conversation_items (conversation_id, json) VALUES ('c', '{}')")
        return self.runs

    def _count_after(self) -> None:
        self.after += 1


def count(url: str) -> int:
    with psycopg.connect(url) as db:
        row = db.execute("SELECT count(*) FROM hermes.conversation_items").fetchone()
        assert row is not None
        return int(row[0])


@pytest.mark.parametrize(("loss", "runs"), [("request", 2), ("answer", 1), ("word", 2)])
def test_lost_commit_counts_once(proxy: CommitProxy, write: Write, postgres_schema: str, loss: Any, runs: int) -> None:
    with closing(open_store(proxy.url)) as store:
        notes = Notes()
        proxy.lose_next(loss)
        assert write(store.engine, notes) == runs
        assert not proxy.is_due
        assert (count(postgres_schema), notes.runs, notes.after) == (1, runs, 1)
        # The engine goes on as before.
        write(store.engine, notes)
        assert (count(postgres_schema), notes.after) == (2, 2)


def test_transaction_that_was_given_up_cannot_count_later(
    proxy: CommitProxy, write: Write, postgres_schema: str
) -> None:
    with closing(open_store(proxy.url)) as store:
        notes = Notes()
        proxy.lose_next("late")
        write(store.engine, notes)
        assert (count(postgres_schema), notes.runs) == (1, 2)
        proxy.deliver_late()
        assert count(postgres_schema) == 1


@pytest.mark.parametrize("uses", [0, 1])
def test_marker_that_was_given_up_is_refused(postgres_schema: str, uses: int) -> None:
    marker = Marker()
    with psycopg.connect(postgres_schema, autocommit=True) as db:
        db.execute("SET search_path = hermes")
        for _ in range(uses):
            db.execute(*_for_psycopg(marker))
        late = _for_psycopg(marker)
        assert db.execute(*marker.question).fetchone() == (False,)
        with pytest.raises(psycopg.errors.CheckViolation):
            db.execute(*late)
        db.execute(*_for_psycopg(marker))
        assert db.execute(*marker.question).fetchone() == (True,)


def test_read_writes_no_marker(proxy: CommitProxy) -> None:
    with closing(open_store(proxy.url)) as store:
        assert store.engine.read(lambda tx: tx.value("WITH one AS (SELECT 1 AS n) SELECT n FROM one")) == 1


def test_lost_end_of_a_read_is_no_error(proxy: CommitProxy, write: Write) -> None:
    with closing(open_store(proxy.url)) as store:
        proxy.lose_next("answer")
        assert write(store.engine, lambda tx: tx.value("SELECT 1")) == 1
        assert not proxy.is_due


def test_unknown_outcome_is_reported_as_error(
    proxy: CommitProxy, write: Write, postgres_schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "BUSY_S_MAX", 0.5)

    class Failing(Notes):
        def __call__(self, tx: Tx) -> int:
            proxy.lose_next("answer")
            monkeypatch.setattr(proxy, "_server", ("127.0.0.1", refusing))
            return super().__call__(tx)

    with refusing_port() as refusing, closing(open_store(proxy.url)) as store:
        notes = Failing()
        with pytest.raises(StoreUnreachable, match="not known"):
            write(store.engine, notes)
        assert (notes.runs, notes.after) == (1, 0)
