"""The SQLite engine: one writer thread per file with group commit, read-only connections beside it, and its faults."""

from __future__ import annotations

import asyncio
import atexit
import errno
import functools
import logging
import os
import queue
import random
import sqlite3
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from hermes.home import make_private_folder, private_opener
from hermes.limits import (
    BATCH_JOBS_MAX,
    BUSY_S_MAX,
    BUSY_TIMEOUT_S,
    CLOSE_S_MAX,
    FREE_BYTES_MIN,
    UPKEEP_BATCHES,
    UPKEEP_IDLE_S,
    UPKEEP_STEP_S_MAX,
    WAL_KEPT_BYTES_MAX,
)
from hermes.store.base import StoreBusy, StoreDamaged, StoreError, StoreFull, StoreReadOnly, StoreTooNew
from hermes.text import whole_text
from hermes.threads import Threads

log = logging.getLogger(__name__)

R = TypeVar("R")
Params = Sequence[Any]
# Locks and shared memory across machines are not to be relied on there.
_NETWORKED = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "lustre", "gluster", "fuse.sshfs", "fuse.glusterfs", "beegfs")


@dataclass(frozen=True)
class Schema:
    """The tables of one kind of file. `migrations[i]` brings version i to i + 1; `index` is a table that can be made
    anew from the others, `probe` a quick look at whether it is sound; `upkeep` does a little work in an idle moment and says whether there is more."""

    migrations: Sequence[Sequence[str]]
    index: str = ""
    probe: Callable[[Tx], bool] | None = None
    upkeep: Callable[[Tx], bool] | None = None

    @property
    def version(self) -> int:
        return len(self.migrations)


class TimeUp(Exception):
    """A reading that was given a time has used it up."""


class Tx:
    """A transaction, or one consistent view for reading."""

    __slots__ = ("_db", "later")

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.later: list[Callable[[], None]] = []

    def execute(self, sql: str, params: Params = ()) -> int:
        """Run a statement; the number of rows it changed."""
        return self._run(sql, params).rowcount

    def many(self, sql: str, rows: Sequence[Params]) -> None:
        """Run a statement for each of these."""
        self._db.executemany(sql, rows)

    def row(self, sql: str, params: Params = ()) -> sqlite3.Row | None:
        """The first row."""
        found: sqlite3.Row | None = self._run(sql, params).fetchone()
        return found

    def rows(self, sql: str, params: Params = ()) -> list[sqlite3.Row]:
        """All rows."""
        return self._run(sql, params).fetchall()

    def each(self, sql: str, params: Params = ()) -> Iterator[sqlite3.Row]:
        """The rows one by one."""
        return iter(self._run(sql, params))

    def value(self, sql: str, params: Params = (), default: Any = None) -> Any:
        """The first column of the first row."""
        found = self._run(sql, params).fetchone()
        return default if found is None else found[0]

    def _run(self, sql: str, params: Params) -> sqlite3.Cursor:
        try:
            return self._db.execute(sql, params)
        except UnicodeEncodeError:  # half a surrogate pair, which names and finds nothing
            return self._db.execute(sql, [whole_text(p) if isinstance(p, str) else p for p in params])

    def after(self, act: Callable[[], None]) -> None:
        """Have something done once the transaction counts; not at all if it is undone."""
        self.later.append(act)

    def empty_log(self) -> None:
        """After the transaction: what was deleted leaves the log of changes too."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def nested(self, work: Callable[[Tx], R]) -> R:
        """A part of a transaction that is undone alone when it fails."""
        kept = len(self.later)
        self._db.execute("SAVEPOINT part")
        try:
            result = work(self)
        except BaseException:
            del self.later[kept:]
            if self._db.in_transaction:
                self._db.execute("ROLLBACK TO part")
                self._db.execute("RELEASE part")
            raise
        self._db.execute("RELEASE part")
        return result

    @property
    def changes(self) -> int:
        """How many rows this connection has changed so far."""
        return self._db.total_changes

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Raise `TimeUp` when what is read inside takes longer."""
        until = time.monotonic() + seconds
        self._db.set_progress_handler(lambda: time.monotonic() > until, 50_000)
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
                raise TimeUp from None
            raise
        finally:
            self._db.set_progress_handler(None, 0)


Work = Callable[[Tx], Any]


class _Job:
    """Work on its way to the writer, and its outcome."""

    __slots__ = ("bare", "done", "error", "future", "loop", "mended", "result", "sync", "work")

    def __init__(
        self,
        work: Callable[[Any], Any],
        sync: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        bare: bool = False,
    ) -> None:
        self.work, self.sync, self.loop, self.bare = work, sync, loop, bare
        self.mended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.future: asyncio.Future[Any] | None = loop.create_future() if loop else None
        self.done: threading.Event | None = None

    def settle(self) -> None:
        """On the loop: tell whoever waits."""
        assert self.future is not None
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        elif isinstance(self.error, StopIteration):  # a future cannot carry it
            self.future.set_exception(RuntimeError("the work raised StopIteration"))
        else:
            self.future.set_exception(self.error)


class Engine:
    """Everything that happens to one database, for all who use it in this process.

    Whatever waits for the writer is committed together, each in a savepoint of its own, so that one failure hurts
    nobody else; every caller goes on after the commit that holds its work. Readers never wait for the writer. A
    database in memory has one connection and no threads: whoever asks does the work.
    """

    def __init__(self, path: Path | None, schema: Schema, *, read_only: bool = False, read_threads: int = 4) -> None:
        self.path, self.schema, self.read_only = path, schema, read_only
        self.notices: list[str] = []
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._db: sqlite3.Connection | None = None
        self._ready = False
        self._closed = self._forked = False
        self._here = threading.local()
        self._read_threads = max(1, read_threads)
        self._threads = Threads(self._read_threads)
        self._slots = threading.Semaphore(self._read_threads)
        self._slow_threads = Threads(max(1, self._read_threads - 1))
        self._slow_slots = threading.Semaphore(max(1, self._read_threads - 1))
        self._idle_readers: list[Connection] = []
        self._upkeep_due = False
        self._users = 0
        _all.add(self)

    # --- using it -----------------------------------------------------------------------------------------------

    def write(self, work: Callable[[Tx], R], *, sync: bool = False) -> R:
        """Do it in a transaction, or in the one that this thread is in; returns after the commit."""
        if (tx := getattr(self._here, "tx", None)) is not None:
            return tx.nested(work)  # type: ignore[no-any-return]
        return self._wait(_Job(work, sync))  # type: ignore[no-any-return]

    def alone(self, work: Callable[[sqlite3.Connection], R]) -> R:
        """Do it with the writer's connection, outside of any transaction; other writers wait."""
        if getattr(self._here, "tx", None) is not None:
            raise StoreError("This cannot be done in the middle of a transaction.", where=str(self.path))
        return self._wait(_Job(work, bare=True))  # type: ignore[no-any-return]

    def _wait(self, job: _Job) -> Any:
        if self.path is None:
            self._carry_out_here(job)
        else:
            job.done = threading.Event()
            self._submit(job)
            job.done.wait()
        if job.error is not None:
            raise job.error
        return job.result

    def read(self, work: Callable[[Tx], R], *, slow: bool = False) -> R:
        """Do it on one consistent view of the database. What may be slow leaves a connection to others."""
        if self.path is None or getattr(self._here, "tx", None) is not None:
            return self.write(work)
        if slow:
            with self._slow_slots:
                return self.read(work)
        try:
            return self._read(work)
        except sqlite3.Error as error:
            if self.read_only or not self._may_hit_index(error) or not self.alone(self._mend_index):
                raise self._explained(error) from error
        try:
            return self._read(work)
        except sqlite3.Error as error:
            raise self._explained(error) from error

    async def write_soon(self, work: Callable[[Tx], R], *, sync: bool = False) -> R:
        """The same as `write`, for a loop."""
        if self.path is None:
            return self.write(work)
        job = _Job(work, sync, asyncio.get_running_loop())
        self._submit(job)
        assert job.future is not None
        return await job.future  # type: ignore[no-any-return]

    async def read_soon(self, work: Callable[[Tx], R], *, slow: bool = False) -> R:
        """The same as `read`, for a loop."""
        if self.path is None:
            return await self.write_soon(work)
        self._check_usable()
        threads = self._slow_threads if slow else self._threads
        return await threads.call(lambda: self.read(work, slow=slow))  # type: ignore[no-any-return]

    async def apply(self, function: Callable[[], R]) -> R:
        """Run something that uses this engine in one of its threads."""
        self._check_usable()
        return await self._threads.call(function)  # type: ignore[no-any-return]

    def open(self) -> None:
        """Open the file now, so that what is wrong with it is told now."""
        if self.read_only:
            self.read(lambda _: None)
        else:
            self.write(lambda _: None)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A read-only connection of its own, for what SQLite does with connections."""
        if not self.read_only and not self._ready:
            self.open()
        with self._slots:
            self._check_usable()
            db = self._idle_readers.pop() if self._idle_readers else self._open_reader()
            try:
                yield db
            finally:
                if self._closed or db.stale:
                    db.close()
                else:
                    self._idle_readers.append(db)

    def copy_to(self, copy: sqlite3.Connection) -> None:
        """The database as it is now, into another."""
        if self.path is None:
            self.alone(lambda db: db.backup(copy))
            return
        while True:
            with self.connection() as db:
                db.backup(copy)
                if db.as_it_was(self.path):
                    return
                db.stale = True

    def _read(self, work: Callable[[Tx], R]) -> R:
        self._check_usable()
        while True:
            with self.connection() as db:
                db.execute("BEGIN")
                try:
                    result = work(Tx(db))
                finally:
                    db.rollback()
                if db.as_it_was(self.path):
                    return result
                db.stale = True

    def _submit(self, job: _Job) -> None:
        self._check_usable()
        if self.read_only:
            raise StoreReadOnly("This database was opened for reading only.", where=str(self.path))
        with self._lock:
            self._check_usable()
            if self._writer is None:
                writer = threading.Thread(target=self._serve, name="hermes-store", daemon=True)
                writer.start()
                self._writer = writer
            self._queue.put(job)

    def _check_usable(self) -> None:
        if self._forked:
            raise StoreError(
                "The database was opened before this process was forked off, and cannot be used in it.",
                where=str(self.path),
                hint="start the process anew instead of forking it (for example the spawn method of multiprocessing)",
            )
        if self._closed:
            raise StoreError("The database is closed.", where=str(self.path))

    # --- the writer ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        going, since_upkeep = True, 0
        while going:
            try:
                job = self._queue.get(timeout=UPKEEP_IDLE_S if self._upkeep_due else None)
            except queue.Empty:
                self._upkeep()
                continue
            since_upkeep += 1
            if self._upkeep_due and since_upkeep > UPKEEP_BATCHES:  # there is no idle moment
                since_upkeep = 0
                self._upkeep()
            batch: list[_Job] = []
            while job is not None:
                batch.append(job)
                if len(batch) == BATCH_JOBS_MAX:
                    break
                try:
                    job = self._queue.get_nowait()
                except queue.Empty:
                    break
            else:
                going = False
            together = [one for one in batch if not one.bare]
            if together:
                self._carry_out(together)
                self._tell(together)
            for bare in [one for one in batch if one.bare]:
                self._carry_out_bare(bare)
                self._tell([bare])
                del bare
            del batch, together
            job = None  # or an idle thread would hold on to what it was given
        self._fail_left()
        if self._db is not None:
            self._db.close()
            self._db = None

    def _fail_left(self) -> None:
        """Whatever came after the end is told so."""
        with suppress(queue.Empty):
            while True:
                if (job := self._queue.get_nowait()) is not None:
                    job.error = StoreError("The database is closed.", where=str(self.path))
                    self._tell([job])

    def _carry_out(self, batch: list[_Job]) -> None:
        """One commit for all of them; where that cannot be had, one for each."""
        alone = len(batch) == 1
        db: sqlite3.Connection | None = None
        tx: Tx | None = None
        try:
            db = self._ready_db()
            self._begin(db, sync=any(job.sync for job in batch))
            self._here.tx = tx = Tx(db)
            for job in batch:
                if not self._try(db, tx, job, alone):
                    raise _Undone
            db.execute("COMMIT")
            self._here.tx = None
            self._upkeep_due = self.schema.upkeep is not None
            self._afterwards(tx)
        except BaseException as error:  # noqa: BLE001  (every caller is told its own)
            if db is not None and db.in_transaction:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
            self._here.tx = None
            if tx is None and _is_busy(error):  # all have waited as long as each may
                for job in batch:
                    job.error = self._explained(error)
            elif not alone:
                for job in batch:
                    job.result = job.error = None
                    self._carry_out([job])
            elif isinstance(error, _Undone):
                self._once_more(batch)
            else:
                batch[0].error = self._explained(error)
        finally:
            self._here.tx = None

    def _carry_out_here(self, job: _Job) -> None:
        """A database in memory is nobody's but this process's: what is to be done is done at once."""
        with self._lock:
            self._check_usable()
            if job.bare:
                self._carry_out_bare(job)
            else:
                self._carry_out([job])

    def _carry_out_bare(self, job: _Job) -> None:
        try:
            job.result = job.work(self._ready_db())
        except BaseException as error:  # noqa: BLE001  (it belongs to the caller)
            job.error = self._explained(error)

    def _try(self, db: sqlite3.Connection, tx: Tx, job: _Job, alone: bool) -> bool:
        """Do one job. False: the whole transaction has to be done again, without what failed."""
        try:
            job.result = job.work(tx) if alone else tx.nested(job.work)
        except BaseException as error:  # noqa: BLE001  (it belongs to the caller)
            job.error = error
            if alone or not db.in_transaction or self._may_hit_index(error):
                return False
            job.error = self._explained(error)
        return True

    def _afterwards(self, tx: Tx) -> None:
        for act in tx.later:
            try:
                act()
            except Exception:
                log.exception("what was to follow a change of %s", self.path)

    def _once_more(self, batch: list[_Job]) -> None:
        """A job that failed alone has failed, unless it was the search index that failed it."""
        job = batch[0]
        assert job.error is not None
        if job.mended or not self._may_hit_index(job.error):
            job.error = self._explained(job.error)
            return
        job.mended = True
        mend = _Job(self._mend_index, bare=True)
        self._carry_out_bare(mend)
        if not mend.result:
            job.error = self._explained(job.error)
            return
        job.error = None
        self._carry_out(batch)

    @staticmethod
    def _tell(batch: list[_Job]) -> None:
        """Wake the callers: one call per loop, however many they are."""
        loops: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
        for job in batch:
            if job.done is not None:
                job.done.set()
            elif job.loop is not None:
                loops.setdefault(job.loop, []).append(job)
        for loop, jobs in loops.items():
            with suppress(RuntimeError):  # the loop is gone, and whoever waited with it
                loop.call_soon_threadsafe(_settle_all, jobs)

    def _begin(self, db: sqlite3.Connection, *, sync: bool) -> None:
        db.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
        _patiently(db, "BEGIN IMMEDIATE")

    def _upkeep(self) -> None:
        """A little work that makes later work cheaper, while nobody waits."""
        self._upkeep_due = False
        upkeep = self.schema.upkeep
        if upkeep is None or self._db is None:
            return

        def bounded(tx: Tx) -> bool:
            try:
                with tx.within(UPKEEP_STEP_S_MAX):
                    return upkeep(tx)
            except TimeUp:
                return False

        job = _Job(bounded)
        self._carry_out([job])
        if job.error is not None:
            log.warning("upkeep of %s: %s", self.path, job.error)
        self._upkeep_due = job.result is True

    # --- opening ------------------------------------------------------------------------------------------------

    def _ready_db(self) -> sqlite3.Connection:
        """The writer's connection; a file that could not be opened is tried again."""
        if self._db is None or not self._ready:
            if self._db is not None:
                self._db.close()
            self._db = None
            _require_fts5()
            self._db = db = self._connect()
            self._check_version(db)
            self._set_journal(db)
            for pragma in ("foreign_keys=ON", "secure_delete=ON", "temp_store=MEMORY", "analysis_limit=400"):
                db.execute(f"PRAGMA {pragma}")
            db.execute(f"PRAGMA journal_size_limit={WAL_KEPT_BYTES_MAX}")
            self._migrate(db)
            self._check_index(db)
            self._ready = True
        return self._db

    def _connect(self) -> sqlite3.Connection:
        if self.path is None:
            return _connect(":memory:")
        try:
            make_private_folder(self.path.parent)
            if not self.path.exists():
                # Closing a descriptor of a file in use would drop SQLite's locks; nobody uses this one yet.
                with suppress(FileExistsError):
                    os.close(private_opener(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._full() from error
            raise StoreReadOnly(
                f"The database cannot be made: {error.strerror}.",
                where=str(self.path),
                hint="check the rights of the folder, or set HERMES_HOME to another one",
            ) from error
        return _connect(_uri(self.path, "rw"))

    def _open_reader(self) -> Connection:
        assert self.path is not None
        _require_fts5()
        if self.read_only and not self.path.is_file():
            raise StoreError("There is no such database.", where=str(self.path))
        # A file that nobody has open is read without leaving anything beside it, as long as it stays as it is.
        stamp = _stamp(self.path) if self.read_only else None
        db = _connect(_uri(self.path, "ro" if stamp is None else "ro&immutable=1"))
        db.stamp = stamp
        try:
            db.execute("PRAGMA query_only=ON")
            self._check_version(db)
        except BaseException:
            db.close()
            raise
        return db

    def _check_version(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN")  # another process may be making it just now
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        finally:
            db.rollback()
        if version > self.schema.version:
            raise StoreTooNew(
                f"The database was written by a newer Hermes (version {version}, this one knows "
                f"{self.schema.version}).",
                where=str(self.path),
                hint="update Hermes, or name another home",
            )
        if version == 0 and tables:
            raise StoreError("The file is a database of another program.", where=str(self.path))
        if self.read_only and version < self.schema.version:
            raise StoreError(
                "The database is of an older Hermes and has to be brought up to date first.",
                where=str(self.path),
                hint="open it once for writing: hermes sessions list",
            )

    def _set_journal(self, db: sqlite3.Connection) -> None:
        if self.path is None:
            return
        kind = file_system_of(self.path)
        networked = kind.startswith(_NETWORKED)
        wanted = "delete" if networked else "wal"
        got = _patiently(db, f"PRAGMA journal_mode={wanted}").fetchone()[0]
        if got != "wal":
            why = f"a network file system ({kind})" if networked else "a file system that refuses it"
            self._notice(f"{self.path} lies on {why}: it works without a write-ahead log, which is slower.")

    def _migrate(self, db: sqlite3.Connection) -> None:
        while True:
            self._begin(db, sync=False)
            try:
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version >= self.schema.version:
                    return
                for statement in self.schema.migrations[version]:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version={version + 1}")
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    def _notice(self, words: str) -> None:
        if words not in self.notices:
            self.notices.append(words)
            log.warning("%s", words)

    # --- faults -------------------------------------------------------------------------------------------------

    def _check_index(self, db: sqlite3.Connection) -> None:
        """Whether a search can be made at all, and finds what it must."""
        index = self.schema.index
        if not index:
            return
        try:
            db.execute(f"SELECT rowid FROM {index} WHERE {index} MATCH 'x' LIMIT 1").fetchone()
            if self.schema.probe is None or self.schema.probe(Tx(db)):
                return
        except sqlite3.Error as error:
            if not self._may_hit_index(error):
                raise
        self.rebuild_index(db)

    def _may_hit_index(self, error: BaseException) -> bool:
        """Whether it may be the search index that is damaged, and not what it is made of."""
        if not self.schema.index or not isinstance(error, sqlite3.Error):
            return False
        damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CORRUPT
        words = str(error)
        return damaged or "fts5" in words or self.schema.index in words or words == "constraint failed"

    def _mend_index(self, db: sqlite3.Connection) -> bool:
        """Make the index anew if it is damaged."""
        index = self.schema.index
        parts = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE name GLOB ?", (f"{index}_*",))]
        try:
            db.execute(_COMPARED.format(index=index))
            sound = all(db.execute(f"PRAGMA quick_check('{name}')").fetchone()[0] == "ok" for name in parts)
        except sqlite3.Error:
            sound = False
        if not sound:
            self.rebuild_index(db)
        return not sound

    def rebuild_index(self, db: sqlite3.Connection) -> None:
        """Make the index anew from what is indexed; the rows themselves are not touched."""
        index = self.schema.index
        again = f"INSERT INTO {index}({index}) VALUES ('rebuild')"
        try:
            self._in_one(db, [again, _COMPARED.format(index=index)])
        except sqlite3.Error:
            # What is left of it is not enough even for that. Its pages are given up, and won back by the vacuum.
            made = next(sql for step in self.schema.migrations for sql in step if f"TABLE {index} " in sql)
            gone = f"DELETE FROM sqlite_master WHERE name = '{index}' OR tbl_name GLOB '{index}_*'"
            anew = db if self.path is None else _connect(_uri(self.path, "rw"))
            try:
                self._in_one(anew, ["PRAGMA writable_schema=ON", gone, "PRAGMA writable_schema=RESET", made, again])
                anew.execute("VACUUM")
            finally:
                if anew is not db:
                    anew.close()
        self._notice(f"The search index of {self.path or 'the database'} was damaged and has been made anew.")

    def _in_one(self, db: sqlite3.Connection, statements: Sequence[str]) -> None:
        self._begin(db, sync=False)
        try:
            for sql in statements:
                db.execute(sql)
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")

    def _explained(self, error: BaseException) -> BaseException:
        """An error of SQLite in words, with what to do about it."""
        code = getattr(error, "sqlite_errorcode", None)
        if not isinstance(error, sqlite3.Error) or code is None or isinstance(error, sqlite3.IntegrityError):
            return error
        code &= 0xFF
        where = str(self.path or "")
        full = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and self._no_room()
        if full or code == sqlite3.SQLITE_FULL:
            return self._full()
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreBusy(
                f"Another process has held the database for more than {BUSY_S_MAX:g} s.", where=where, hint="try again"
            )
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return StoreDamaged(
                "The database is damaged; it was left as it is.",
                where=where,
                hint="hermes sessions repair, which makes a copy first",
            )
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            return StoreReadOnly(
                "The database cannot be written to.",
                where=where,
                hint="check the rights of the file and its folder, or set HERMES_HOME to another one",
            )
        return StoreError(f"The database failed: {error}.", where=where)

    def _full(self) -> StoreFull:
        return StoreFull("The disk is full; nothing was changed.", where=str(self.path), hint="free some space")

    def _no_room(self) -> bool:
        if self.path is None:
            return False
        with suppress(OSError):
            room = os.statvfs(self.path.parent)
            return room.f_bavail * room.f_frsize < FREE_BYTES_MIN
        return False

    # --- its life -----------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, path: Path | None, schema: Schema, *, read_only: bool = False, read_threads: int = 4) -> Engine:
        """The engine of a file, shared by all who ask; each gives it back with `release`."""
        if path is None:
            made = cls(None, schema)
            made._users = 1
            return made
        _release_dropped()
        key = (os.path.realpath(path), read_only)
        with _registry_lock:
            if key[0] in _inherited:
                engine = _inherited[key[0]]
                engine._check_usable()
            if key not in _engines:
                _engines[key] = cls(Path(key[0]), schema, read_only=read_only, read_threads=read_threads)
            _engines[key]._users += 1
            return _engines[key]

    @staticmethod
    def is_open(path: Path) -> bool:
        """Whether this process has the file open."""
        _release_dropped()
        return any(key[0] == os.path.realpath(path) for key in _engines)

    def shared(self) -> Engine:
        """The same engine for one user more."""
        with _registry_lock:
            self._check_usable()
            self._users += 1
        return self

    def drop(self) -> None:
        """One user less, from wherever the collector runs: even from within this very registry. It counts later."""
        _dropped.put(self)

    def release(self) -> None:
        """One user less; with the last one the files are closed."""
        _release_dropped()
        self._release()

    def _release(self) -> None:
        with _registry_lock:
            self._users -= 1
            if self._users > 0 or self._closed:
                return
            if self.path is not None:
                _engines.pop((str(self.path), self.read_only), None)
        self._close()

    def _close(self) -> None:
        if self._forked:
            return
        with self._lock:
            self._closed = True
            writer = self._writer
        # The writer is the last to close: it folds the log of changes into the file.
        held = [self._slots.acquire(timeout=CLOSE_S_MAX / self._read_threads) for _ in range(self._read_threads)]
        while self._idle_readers:
            self._idle_readers.pop().close()
        self._slots.release(max(1, sum(held)))  # whoever waits is told that it is closed
        self._queue.put(None)
        self._threads.close()
        self._slow_threads.close()
        if self.path is None and self._db is not None:
            self._db.close()
            self._db = None
        if writer is not None and writer is not threading.current_thread():
            writer.join()


class _Undone(Exception):
    """The transaction is gone with the job that failed."""


# With the 1 it is compared with what is indexed, too.
_COMPARED = "INSERT INTO {index}({index}, rank) VALUES ('integrity-check', 1)"


def _is_busy(error: BaseException) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF == sqlite3.SQLITE_BUSY


def _patiently(db: sqlite3.Connection, sql: str) -> sqlite3.Cursor:
    """Wait for another process, but not for ever."""
    until = time.monotonic() + BUSY_S_MAX
    while True:
        try:
            return db.execute(sql)
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() > until:
                raise
        time.sleep(random.uniform(0.005, 0.05))  # noqa: S311  (only to keep two processes out of step)


def _release_dropped() -> None:
    """Count the users that the collector has taken away."""
    with suppress(queue.Empty):
        while True:
            _dropped.get_nowait()._release()


def _settle_all(jobs: list[_Job]) -> None:
    for job in jobs:
        job.settle()


class Connection(sqlite3.Connection):
    """A connection. With a stamp it reads a file that nobody had open then, and leaves nothing beside it."""

    stamp: tuple[int, int] | None = None
    stale = False

    def as_it_was(self, path: Path | None) -> bool:
        """Whether what was read is what there is."""
        return self.stamp is None or path is None or _stamp(path) == self.stamp


def _stamp(path: Path) -> tuple[int, int] | None:
    """The state of a file, or nothing while it is in use."""
    if path.with_name(path.name + "-wal").exists() and path.with_name(path.name + "-wal").stat().st_size:
        return None
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _require_fts5() -> None:
    if not has_fts5():
        raise StoreError(
            "This Python's SQLite was built without full-text search (FTS5).",
            hint="use a Python whose sqlite3 module has FTS5, such as the one of the system or of python.org",
        )


def _connect(where: str) -> Connection:
    db = sqlite3.connect(
        where,
        factory=Connection,
        uri=where != ":memory:",
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )
    db.row_factory = sqlite3.Row
    return db


def _uri(path: Path, mode: str) -> str:
    return f"file:{urllib.parse.quote(str(path))}?mode={mode}"


@functools.cache
def has_fts5() -> bool:
    """Whether SQLite can search text."""
    with sqlite3.connect(":memory:") as db:
        found = [row[0] for row in db.execute("PRAGMA compile_options")]
    db.close()
    return "ENABLE_FTS5" in found


def file_system_of(path: Path) -> str:
    """The type of the file system that a path lies on, as the system calls it; empty where it does not say."""
    best, kind = "", ""
    real = os.path.realpath(path)
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            point = before.split()[4].replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, after.split()[0]
    return kind


_engines: dict[tuple[str, bool], Engine] = {}
_inherited: dict[str, Engine] = {}
_all: WeakSet[Engine] = WeakSet()
_dropped: queue.SimpleQueue[Engine] = queue.SimpleQueue()
_registry_lock = threading.Lock()


def _after_fork() -> None:
    """A child may not touch what its parent has open: SQLite's locks belong to the process."""
    global _registry_lock  # noqa: PLW0603
    _registry_lock = threading.Lock()
    for engine in _all:
        engine._forked = True
    _inherited.update({path: engine for (path, _), engine in _engines.items()})
    _engines.clear()


def _close_all() -> None:
    for engine in tuple(_engines.values()):
        engine._close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)
