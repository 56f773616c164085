"""Moves a whole store from one database to another: copied in batches, verified, resumable."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hermes.core.errors import ConfigError, HermesError
from hermes.core.home import Home
from hermes.core.limits import MIGRATE_USERS_POLL_S, MIGRATE_USERS_S_MAX
from hermes.store import tables
from hermes.store.base import MIGRATION, StoreBusy, StoreError, StoreRuleBroken
from hermes.store.dialect import either
from hermes.store.engine import MARK_SQL, SET_META, Engine, Tx
from hermes.store.stores import Store, is_server, path_of, place_of, store_at
from hermes.store.tables import COUNTERS, TABLES, Columns, Table

# A server that was only started and stopped leaves rows here; they do not make the target count as used.
_NOT_COUNTED = ("state_meta",)
# Other connections to the schema; unknown for SQLite.
_CONNECTIONS = either(
    "SELECT 0",
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND application_name = current_setting('application_name')",
)


class NoSource(HermesError):
    exit_code = 5


class TargetNotEmpty(HermesError):
    exit_code = 2


class CopyDiffers(HermesError):
    """The target does not equal the source."""


class Progress(NamedTuple):
    """`work` is "copy", or "verify" for the source and again for the target."""

    work: str
    table: str
    rows: int
    total: int


class TableSum(NamedTuple):
    rows: int
    digest: str


@dataclass
class Report:
    tables: dict[str, TableSum] = field(default_factory=dict)
    unfinished_runs: int = 0
    # An interrupted copy was resumed; or there was nothing to do.
    is_continued: bool = False
    is_unchanged: bool = False

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables.values())


class Side:
    """One of the two stores, with its place for messages. On SQLite the responses are in a database of their own."""

    def __init__(self, store: Store, place: str) -> None:
        self.store, self.place = store, place
        self.state, self.responses = store.engine, store.responses.engine
        self.state.takes_unfinished = True
        for engine in (self.state, self.responses):
            engine.open()

    def engine(self, *, in_responses: bool) -> Engine:
        return self.responses if in_responses else self.state

    def of(self, table: Table) -> Engine:
        return self.engine(in_responses=table.in_responses)

    def columns(self, table: Table) -> Columns:
        return self.of(table).read(partial(tables.columns_of, table=table))

    def counts(self) -> dict[str, int]:
        return {table.name: self.of(table).read(partial(tables.count, table=table)) for table in TABLES}

    def pages(self, table: Table, after: list[Any]) -> Iterator[list[tuple[Any, ...]]]:
        columns = self.columns(table)
        key = [columns.names.index(name) for name in table.key]
        while rows := self.of(table).read(partial(tables.page, table=table, columns=columns, after=after)):
            yield rows
            after = [rows[-1][at] for at in key]

    def mark(self) -> Any:
        """The mark that an unfinished migration left in this store."""
        text = self.state.read(lambda tx: tx.value(MARK_SQL))
        return json.loads(text) if text is not None else None

    def refuse_if_used(self) -> None:
        until = time.monotonic() + MIGRATE_USERS_S_MAX
        hint = "stop the servers that use it (hermes gateway stop), then the same again"
        if holders := self.store.leases.holders():
            raise StoreBusy(f"A turn is running or was just cut off ({holders[0]}).", where=self.place, hint=hint)
        while others := self.state.read(lambda tx: tx.value(_CONNECTIONS)):
            if time.monotonic() > until:
                message = f"The database is in use: {others} other connections of Hermes."
                raise StoreBusy(message, where=self.place, hint=hint)
            time.sleep(MIGRATE_USERS_POLL_S)  # a closed connection takes a moment to disappear


@contextlib.contextmanager
def open_sides(source_url: str, target_url: str, home: Home) -> Iterator[tuple[Side, Side]]:
    """Open both stores. A missing source is not created, nor is a target without a source."""
    places = [place_of(url) for url in (source_url, target_url)]
    for url, place in zip((source_url, target_url), places, strict=True):
        if not is_server(url) and path_of(url) is None:
            raise ConfigError("A database in memory cannot be moved.", where=place, hint="sqlite:///path/state.db")
    if places[0] == places[1]:
        raise ConfigError("Source and target are the same database.", where=places[0], hint="name another one in --to")
    if not is_server(source_url) and not is_server(target_url) and _folder(source_url) == _folder(target_url):
        hint = "name a file in another folder: that of the responses is beside it"
        raise ConfigError("Two databases cannot be in one folder.", where=places[1], hint=hint)
    with contextlib.closing(store_at(source_url, home=home)) as source:
        if not source.engine.exists():
            raise NoSource("There is no such store.", where=places[0], hint="name another one in --from")
        with contextlib.closing(store_at(target_url, home=home)) as target:
            yield Side(source, places[0]), Side(target, places[1])


def _folder(url: str) -> Path:
    path = path_of(url)
    assert path is not None
    return path.resolve().parent


def migrate(source: Side, target: Side, progress: Callable[[Progress], None] = lambda _: None) -> Report:
    """Copy a store into an empty one and compare the two. A later call resumes an interrupted one. Nobody may use
    either store meanwhile."""
    return _Migration(source, target, progress).run()


class _Migration:
    def __init__(self, source: Side, target: Side, progress: Callable[[Progress], None]) -> None:
        self._source, self._target, self._progress = source, target, progress
        self._totals = source.counts()
        self._report = Report()

    def run(self) -> Report:
        source, target, report = self._source, self._target, self._report
        for side in (source, target):
            side.refuse_if_used()
        self._refuse_unlike_columns()
        if (unfinished := source.mark()) is not None:
            hint = "finish that migration first, or move the original"
            message = f"This is an unfinished copy of {unfinished['source']}."
            raise StoreError(message, where=source.place, hint=hint)
        report.unfinished_runs = source.state.read(
            lambda tx: tx.value("SELECT count(*) FROM runs WHERE ended_at IS NULL")
        )
        mark = target.mark()
        if mark is None and any(rows for name, rows in target.counts().items() if name not in _NOT_COUNTED):
            self._expect_same()
            report.is_unchanged = True
            return report
        if mark is not None and mark["source"] != source.place:
            raise TargetNotEmpty(f"This is an unfinished copy of {mark['source']}.", where=target.place, hint=_EMPTY)
        if mark is not None and mark["table"]:
            report.is_continued = True
            # The source may have changed since the first part was copied: then all of it is copied again.
            with contextlib.suppress(sqlite3.IntegrityError, StoreRuleBroken):
                self._copy(mark["table"], mark["after"])
                if not self._verify():
                    self._finish()
                    return report
        self._begin()
        self._copy(TABLES[0].name, [])
        if differences := self._verify():
            self._begin()  # a wrong copy is not resumed
            raise CopyDiffers(
                f"The copy differs from the source: {'; '.join(differences)}.",
                where=target.place,
                hint="stop whatever changes either of them, then the same again: it starts over",
            )
        self._finish()
        return report

    def _expect_same(self) -> None:
        """A target that is not empty must equal the source: an earlier call was complete."""
        counts = self._target.counts()
        if counts != self._totals or self._verify():
            names = [name for name, rows in counts.items() if rows and name not in _NOT_COUNTED]
            message = f"The target is not empty: there are rows in {', '.join(names)}."
            raise TargetNotEmpty(message, where=self._target.place, hint=_EMPTY)

    def _refuse_unlike_columns(self) -> None:
        for table in TABLES:
            mine, theirs = (set(side.columns(table).names) for side in (self._source, self._target))
            if mine != theirs:
                names = ", ".join(sorted(mine ^ theirs))
                message = f"Table {table.name} does not have the same columns on both sides ({names})."
                raise StoreError(message, hint="update Hermes")

    # ---- copying

    def _begin(self) -> None:
        def start(tx: Tx) -> None:
            tables.clear(tx, responses=False)
            self._note(tx, "", [])

        self._target.responses.write(lambda tx: tables.clear(tx, responses=True))
        self._target.state.write(start)

    def _copy(self, first: str, after: list[Any]) -> None:
        """Copy from the table `first` on, there after a key."""
        names = [table.name for table in TABLES]
        for table in TABLES[names.index(first) :]:
            self._copy_table(table, after)
            after = []
        for counter in COUNTERS:
            engines = [side.engine(in_responses=counter.in_responses) for side in (self._source, self._target)]
            values = [engine.read(counter.value) for engine in engines]
            if numbers := [value for value in values if value is not None]:
                engines[1].write(partial(counter.set, value=max(numbers)))

    def _copy_table(self, table: Table, after: list[Any]) -> None:
        columns = self._target.columns(table)
        key = [columns.names.index(name) for name in table.key]
        engine, rows_done = self._target.of(table), 0
        for rows in self._source.pages(table, after):
            last = [rows[-1][at] for at in key]

            engine.write(partial(self._write_page, table=table, columns=columns, rows=rows, last=last))
            if engine is not self._target.state:  # after the rows: repeated ones are skipped
                self._target.state.write(partial(self._note, table=table.name, after=last))
            rows_done += len(rows)
            self._progress(Progress("copy", table.name, rows_done, self._totals[table.name]))
        for rows in self._source.pages(table, []) if table.self_reference else ():
            engine.write(partial(tables.set_references, table=table, columns=columns, rows=rows))

    def _write_page(self, tx: Tx, table: Table, columns: Columns, rows: list[tuple[Any, ...]], last: list[Any]) -> None:
        tables.insert(tx, table, columns, rows)
        if self._target.of(table) is self._target.state:
            self._note(tx, table.name, last)

    def _note(self, tx: Tx, table: str, after: list[Any]) -> None:
        mark = {"source": self._source.place, "table": table, "after": after}
        tx.execute(SET_META, (MIGRATION, json.dumps(mark)))

    def _finish(self) -> None:
        self._target.state.write(lambda tx: tx.execute("DELETE FROM state_meta WHERE key = ?", (MIGRATION,)), sync=True)

    # ---- verifying

    def _verify(self) -> list[str]:
        """The differences, as sentences."""
        differences = []
        for table in TABLES:
            there, here = (self._sum(side, table) for side in (self._source, self._target))
            self._report.tables[table.name] = here
            if there.rows != here.rows:
                differences.append(f"{table.name} has {here.rows} rows instead of {there.rows}")
            elif there != here:
                differences.append(f"rows of {table.name} are not the same")
        return differences

    def _sum(self, side: Side, table: Table) -> TableSum:
        rows_done = total = 0
        for rows in side.pages(table, []):
            total += sum(map(tables.digest, rows))
            rows_done += len(rows)
            self._progress(Progress("verify", table.name, rows_done, self._totals[table.name]))
        return TableSum(rows_done, f"{total % 2**256:064x}")


_EMPTY = "name an empty database, or a file that does not exist yet"
