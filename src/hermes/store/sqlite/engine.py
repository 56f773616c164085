"""The SQLite engine: one writer thread per file with group commit, read-only connections beside it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hermes.core.limits import (
    BATCH_JOBS_MAX,
    CLOSE_S_MAX,
    LOG_EMPTIED_TRIES,
    LOG_EMPTIED_WAIT_S,
    SLOW_READ_S_MAX,
    SLOW_READERS_MAX,
    SLOW_READERS_NICENESS,
    UPKEEP_BATCHES,
    UPKEEP_IDLE_S,
    UPKEEP_PAUSE_S,
    UPKEEP_STEP_S_MAX,
    UPKEEP_STEPS_LOGGED,
    WAL_ROWS,
)
from hermes.store.base import StoreError, StoreReadOnly
from hermes.store.engine import MARK_SQL, Engine, Maintenance, TimeUp, Work
from hermes.store.sqlite import opening
from hermes.store.sqlite.connections import Connection, Done, Readers, Schema, Tx, file_id, is_busy, patiently, watch
from hermes.store.sqlite.errors import Index, explained

log = logging.getLogger(__name__)
R = TypeVar("R")
_STATE_FILE = "state.db"


class _Job:
    __slots__ = ("done", "error", "future", "loop", "mended", "raw", "result", "sync", "work")

    def __init__(
        self,
        work: Callable[[Any], Any],
        sync: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        raw: bool = False,
    ) -> None:
        self.work, self.sync, self.loop, self.raw = work, sync, loop, raw
        self.mended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.future: asyncio.Future[Any] | None = loop.create_future() if loop else None
        self.done: threading.Event | None = None

    def settle(self) -> None:
        assert self.future is not None
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        elif isinstance(self.error, StopIteration):  # a future cannot carry it
            self.future.set_exception(RuntimeError("the work raised StopIteration"))
        else:
            self.future.set_exception(self.error)


class SqliteEngine(Engine):
    """One file, or a database in memory. Waiting jobs are committed together. If one fails, all are run again, each in
    its own savepoint, so that a failure affects no other job; every caller continues after the commit of its job.
    Readers never wait for the writer. A database in memory has one connection and no threads: callers do the work."""

    backend = "sqlite"

    def __init__(self, path: Path | None, schema: Schema, *, read_only: bool = False, read_threads: int = 4) -> None:
        super().__init__(str(path), max(1, read_threads))
        self.path, self.schema, self.read_only = path, schema, read_only
        # Session folders belong to the home's own database.
        self.folder = path.parent if path is not None and path.name == _STATE_FILE else None
        self.index = Index(schema, path, self._notice)
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._db: sqlite3.Connection | None = None
        self._synced: bool | None = None
        self._checkpointing: threading.Thread | None = None
        self._checkpointed_at = 0
        self._was_opened = False
        # Device and inode of the database and its write-ahead log when they were opened.
        self._files: dict[Path, tuple[int, int]] = {}
        self._closing = threading.Event()
        self._readers = Readers(max(1, read_threads), self._reader, self._check_usable)
        self._slow_readers = Readers(SLOW_READERS_MAX, self._reader, self._check_usable, niceness=SLOW_READERS_NICENESS)
        self._upkeep_due = self._upkeep_continues = self._truncate_log = False
        self._upkeep_steps = 0

    @property
    def maintenance(self) -> Maintenance:
        from hermes.store.sqlite import maintenance

        return maintenance

    # --- using it -----------------------------------------------------------------------------------------------

    def write(self, work: Work[R], *, sync: bool = False) -> R:
        if (tx := getattr(self._thread, "tx", None)) is not None:
            return tx.nested(work)  # type: ignore[no-any-return]
        return self._wait(_Job(work, sync))  # type: ignore[no-any-return]

    def exclusive(self, work: Callable[[sqlite3.Connection], R]) -> R:
        """Run `work` with the writer's connection, outside of any transaction; other writers wait."""
        if getattr(self._thread, "tx", None) is not None:
            raise self._nested_error()
        return self._wait(_Job(work, raw=True))  # type: ignore[no-any-return]

    def _wait(self, job: _Job) -> Any:
        if self.path is None:
            self._run_inline(job)
        else:
            job.done = threading.Event()
            self._submit(job)
            job.done.wait()
        if job.error is not None:
            raise job.error
        return job.result

    def read(self, work: Work[R], *, slow: bool = False, stop: threading.Event | None = None) -> R:
        if (tx := getattr(self._thread, "tx", None) or getattr(self._thread, "view", None)) is not None:
            return work(tx)
        if self.path is None:
            return self.write(work)
        readers = self._slow_readers if slow else self._readers
        try:
            return self._read(work, readers, stop)
        except sqlite3.Error as error:
            if self.read_only or not self.index.may_be_hit_by(error) or not self.exclusive(self.index.mend):
                raise explained(error, self.path) from error
        try:
            return self._read(work, readers, stop)
        except sqlite3.Error as error:
            raise explained(error, self.path) from error

    def submit_write(self, work: Work[R], *, sync: bool = False) -> asyncio.Future[R]:
        job = _Job(work, sync, asyncio.get_running_loop())
        assert job.future is not None
        if self.path is None:
            self._run_inline(job)
            job.settle()
        else:
            self._submit(job)
        return job.future

    async def read_soon(self, work: Work[R], *, slow: bool = False) -> R:
        if self.path is None:
            return await self.submit_write(work)
        self._check_usable()
        if not slow:
            return await self._readers.threads.call(lambda: self.read(work))  # type: ignore[no-any-return]
        stop = threading.Event()
        try:
            async with asyncio.timeout(SLOW_READ_S_MAX):
                return await self._slow_readers.threads.call(  # type: ignore[no-any-return]
                    lambda: self.read(work, slow=True, stop=stop)
                )
        except TimeoutError:
            raise self._timeout_error() from None
        finally:
            stop.set()  # nobody waits for it any more

    def open(self) -> None:
        if self.read_only:
            self.read(lambda _: None)
        else:
            self.write(lambda _: None)

    def exists(self) -> bool:
        return self.path is None or self.path.exists()

    async def check(self) -> None:
        if self.path is None:
            return
        died = self._writer is not None and not self._writer.is_alive()
        job = _Job(self._try_write, loop=asyncio.get_running_loop(), raw=True)
        assert job.future is not None
        self._submit(job)
        await job.future
        if died:
            raise StoreError("The thread that writes to the database had ended; it was started again.")

    def _try_write(self, db: sqlite3.Connection) -> None:
        self._check_files()
        opening.try_write(db, self.path, self.schema)

    def _check_files(self) -> None:
        """Raise if a file was replaced or deleted: a new connection would mix two databases."""
        for path, opened in self._files.items():
            if (current := file_id(path)) != opened:
                fate = "deleted" if current is None else "replaced"
                hint = "put it back, or restart the server to use the present file"
                raise StoreError(f"The file was {fate} while it is in use.", where=str(path), hint=hint)

    def copy_to(self, copy: sqlite3.Connection) -> None:
        if self.path is None:
            self.exclusive(lambda db: db.backup(copy))
            return
        while True:
            with self._slow_readers.connection() as db:
                db.backup(copy)
                if db.as_it_was(self.path):
                    return
                db.stale = True

    def _read(self, work: Work[R], readers: Readers, stop: threading.Event | None = None) -> R:
        self._check_usable()
        while True:
            with readers.connection() as db:
                db.execute("BEGIN")
                if stop is not None:
                    watch(db, stop)
                self._thread.view = tx = Tx(db, stop)
                try:
                    result = work(tx)
                finally:
                    self._thread.view = None
                    if stop is not None:
                        watch(db, None)
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
            if self._writer is None or not self._writer.is_alive():
                writer = threading.Thread(target=self._serve, name="hermes-store", daemon=True)
                writer.start()
                self._writer = writer
            self._queue.put(job)

    # --- the writer ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        running, since_upkeep = True, 0
        while running:
            pause = UPKEEP_PAUSE_S if self._upkeep_continues else UPKEEP_IDLE_S
            try:
                job = self._queue.get(timeout=pause if self._upkeep_due else None)
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
                running = False
            transactional = [item for item in batch if not item.raw]
            if transactional:
                self._upkeep_continues = False  # the moment is not idle any more
                self._run_batch(transactional)
                self._wake_callers(transactional)
                if self._db is not None and self._db.total_changes - self._checkpointed_at >= WAL_ROWS:
                    self._start_checkpoint()
            for raw in [item for item in batch if item.raw]:
                self._run_exclusive(raw)
                self._wake_callers([raw])
                del raw
            del batch, transactional
            job = None  # an idle thread must not keep references
        self._fail_queued()
        if self._db is not None:
            self._db.close()
            self._db = None

    def _start_checkpoint(self) -> None:
        """Checkpoint the write-ahead log in its own thread: it waits for the disk."""
        with self._lock:
            if self._db is None or self._closed or (self._checkpointing is not None and self._checkpointing.is_alive()):
                return
            self._checkpointed_at = self._db.total_changes
            empty, self._truncate_log = self._truncate_log, False
            thread = threading.Thread(target=self._checkpoint, args=(empty,), name="hermes-fold", daemon=True)
            thread.start()
            self._checkpointing = thread

    def _checkpoint(self, empty: bool) -> None:
        assert self.path is not None
        for _ in range(LOG_EMPTIED_TRIES if empty else 1):
            with suppress(sqlite3.Error, OSError, StoreError):  # the writer does it then
                self._check_files()
                opening.checkpoint(self.path)
            # The writer checkpoints the little that was added meanwhile, so that the log starts again from its beginning.
            job = _Job(opening.empty_log if empty else opening.checkpoint_rest, raw=True)
            job.done = threading.Event()
            self._queue.put(job)
            if not empty:
                return
            job.done.wait(LOG_EMPTIED_WAIT_S)
            if job.result or self._closing.wait(LOG_EMPTIED_WAIT_S):
                return

    def _fail_queued(self) -> None:
        with suppress(queue.Empty):
            while True:
                if (job := self._queue.get_nowait()) is not None:
                    job.error = self._closed_error()
                    self._wake_callers([job])

    def _run_batch(self, batch: list[_Job], *, isolated: bool = False) -> None:
        """Commit the jobs in one transaction; if one fails, again with a savepoint for each (`isolated`), then one by
        one."""
        exclusive = len(batch) == 1
        db: sqlite3.Connection | None = None
        tx: Tx | None = None
        try:
            db = self._ready_db()
            self._begin(db, sync=any(job.sync for job in batch))
            self._thread.tx = tx = Tx(db)
            for job in batch:
                if not self._try(db, tx, job, isolated):
                    raise _RolledBack
            db.execute("COMMIT")
            self._thread.tx = None
            self._upkeep_due = self.schema.upkeep is not None
            self._run_callbacks(tx)
        except BaseException as error:  # noqa: BLE001  (each caller gets its own error)
            if db is not None and db.in_transaction:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
            self._thread.tx = None
            if tx is None and is_busy(error):  # all have waited as long as they may
                for job in batch:
                    job.error = explained(error, self.path)
            elif not exclusive:
                for job in batch:
                    job.result = job.error = None
                for retried in [[job] for job in batch] if isolated else [batch]:
                    self._run_batch(retried, isolated=not isolated)
            elif isinstance(error, _RolledBack):
                self._retry_after_mending(batch)
            else:
                batch[0].error = explained(error, self.path)
        finally:
            self._thread.tx = None

    def _run_inline(self, job: _Job) -> None:
        """Run a job of a database in memory in the caller's thread."""
        with self._lock:
            self._check_usable()
            if job.raw:
                self._run_exclusive(job)
            else:
                self._run_batch([job])

    def _run_exclusive(self, job: _Job) -> None:
        try:
            job.result = job.work(self._ready_db())
        except BaseException as error:  # noqa: BLE001  (it belongs to the caller)
            job.error = explained(error, self.path)

    def _try(self, db: sqlite3.Connection, tx: Tx, job: _Job, isolated: bool) -> bool:
        """Run one job. False: the transaction has to be rolled back."""
        try:
            job.result = tx.nested(job.work) if isolated else job.work(tx)
        except BaseException as error:  # noqa: BLE001  (it belongs to the caller)
            job.error = error
            if not isolated or not db.in_transaction or self.index.may_be_hit_by(error):
                return False
            job.error = explained(error, self.path)
        return True

    def _retry_after_mending(self, batch: list[_Job]) -> None:
        """Run a job that failed alone again, if the search index was damaged and has been rebuilt."""
        job = batch[0]
        assert job.error is not None
        if job.mended or not self.index.may_be_hit_by(job.error):
            job.error = explained(job.error, self.path)
            return
        job.mended = True
        mend = _Job(self.index.mend, raw=True)
        self._run_exclusive(mend)
        if not mend.result:
            job.error = explained(job.error, self.path)
            return
        job.error = None
        self._run_batch(batch)

    @staticmethod
    def _wake_callers(batch: list[_Job]) -> None:
        """Wake the callers with one call per loop."""
        loops: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
        for job in batch:
            if job.done is not None:
                job.done.set()
            elif job.loop is not None:
                loops.setdefault(job.loop, []).append(job)
        for loop, jobs in loops.items():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle_all, jobs)

    def _begin(self, db: sqlite3.Connection, *, sync: bool) -> None:
        if sync is not self._synced:
            db.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
            self._synced = sync
        patiently(db, "BEGIN IMMEDIATE")

    def _upkeep(self) -> None:
        """Work that makes later work cheaper, in idle moments."""
        self._upkeep_due = False
        upkeep = self.schema.upkeep
        if upkeep is None or self._db is None:
            return

        def bounded(tx: Tx) -> Done:
            try:
                with tx.within(UPKEEP_STEP_S_MAX):
                    return upkeep(tx)
            except TimeUp:
                return "nothing"

        job = _Job(bounded)
        self._run_batch([job])
        if job.error is not None:
            log.warning("upkeep of %s: %s", self.path, job.error)
        self._upkeep_continues = job.result in ("more", "all")
        self._upkeep_steps += self._upkeep_continues
        # Deleted pages leave the file with the next checkpoint, and the write-ahead log when it is truncated.
        if job.result == "all":
            self._truncate_log = True
        if self._truncate_log or (self._upkeep_continues and self._upkeep_steps % UPKEEP_STEPS_LOGGED == 0):
            self._start_checkpoint()
        self._upkeep_due = self._upkeep_continues or self._truncate_log

    # --- opening ------------------------------------------------------------------------------------------------

    def _ready_db(self) -> sqlite3.Connection:
        """The writer's connection; a file that could not be opened is tried again."""
        if self._db is None or not self._ready:
            if self._db is not None:
                self._db.close()
            self._was_opened, self._synced, self._checkpointed_at = True, None, 0
            self._db = opening.connect_writer(self.path, self.schema)
            opening.make_ready(self._db, self.path, self.schema, self._notice)
            self._check_finished(self._db)
            self.index.check(self._db)
            self._files = self._opened_files()
            self._ready = True
        return self._db

    def _opened_files(self) -> dict[Path, tuple[int, int]]:
        if self.path is None:
            return {}
        ids = {path: file_id(path) for path in (self.path, self.path.with_name(f"{self.path.name}-wal"))}
        return {path: opened for path, opened in ids.items() if opened is not None}

    def _reader(self) -> Connection:
        assert self.path is not None
        if not self.read_only and not self._ready:
            self.open()
        self._check_files()
        self._was_opened = True
        db = opening.connect_reader(self.path, self.schema, exclusive=self.read_only)
        if self.read_only:  # otherwise the writer has checked it
            try:
                self._check_finished(db)
            except BaseException:
                db.close()
                raise
        return db

    def _check_finished(self, db: sqlite3.Connection) -> None:
        if self.schema.has_marks and (row := db.execute(MARK_SQL).fetchone()) is not None:
            self.check_finished(row[0])

    def _notice(self, message: str) -> None:
        if message not in self.notices:
            self.notices.append(message)
            log.warning("%s", message)

    # --- its life -----------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, path: Path | None, schema: Schema, *, read_only: bool = False, read_threads: int = 4) -> SqliteEngine:
        """The engine of a file, shared by all users; each calls `release`."""
        if path is None:
            return cls(None, schema).shared()
        _release_dropped()
        real = os.path.realpath(path)
        with Engine.registry_lock:
            if (inherited := _inherited.get(real)) is not None:
                inherited._check_usable()
            if (engine := _engines.get((real, read_only))) is None:
                engine = cls(Path(real), schema, read_only=read_only, read_threads=read_threads)
                _engines[real, read_only] = engine
            engine._users += 1
            return engine

    @staticmethod
    def is_open(path: Path) -> bool:
        _release_dropped()
        real = os.path.realpath(path)
        return (real, False) in _engines or (real, True) in _engines

    def drop(self) -> None:
        """Release one user later; safe to call from a finalizer, even one that runs inside this registry."""
        _dropped.put(self)

    def release(self) -> None:
        """Release one user; the last one closes the files."""
        _release_dropped()
        self._release()

    def _release(self) -> None:
        with Engine.registry_lock:
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
        self._closing.set()
        # The writer closes last: it checkpoints the rest of the write-ahead log.
        if self._checkpointing is not None:
            self._checkpointing.join()
        for readers in (self._readers, self._slow_readers):
            readers.close(CLOSE_S_MAX)
        self._queue.put(None)
        self._callers.close()
        if self.path is None and self._db is not None:
            self._db.close()
            self._db = None
        if writer is not None and writer is not threading.current_thread():
            writer.join()


class _RolledBack(Exception):
    pass


def _release_dropped() -> None:
    """Release the users that were garbage-collected."""
    with suppress(queue.Empty):
        while True:
            _dropped.get_nowait()._release()


def _settle_all(jobs: list[_Job]) -> None:
    for job in jobs:
        job.settle()


# The engines in use, by real path and whether they only read.
_engines: dict[tuple[str, bool], SqliteEngine] = {}
# Engines that the parent process had opened: their files cannot be opened again in this one.
_inherited: dict[str, SqliteEngine] = {}
_dropped: queue.SimpleQueue[SqliteEngine] = queue.SimpleQueue()


def _after_fork() -> None:
    # A child must not use its parent's connections: SQLite's locks belong to the process. A file that the parent had only
    # named can be opened by the child as by any other process.
    _inherited.update({path: engine for (path, _), engine in _engines.items() if engine._was_opened})
    _engines.clear()


def _close_all() -> None:
    for engine in tuple(_engines.values()):
        engine._close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)
