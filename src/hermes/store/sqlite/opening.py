"""Opening a database file: permissions, version check, migrations; or reading it without leaving a trace."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path

from hermes.core.home import make_private_folder, private_opener
from hermes.core.ids import random_hex
from hermes.core.limits import (
    BUSY_TIMEOUT_S,
    READER_CACHE_KB,
    VACUUM_AT_OPENING_BYTES_MAX,
    WAL_KEPT_BYTES_MAX,
    WAL_PAGES_MAX,
)
from hermes.store.base import StoreError, StoreReadOnly, StoreTooNew
from hermes.store.sqlite import connections, space
from hermes.store.sqlite.connections import (
    Connection,
    Schema,
    connect,
    patiently,
    require_fts5,
    stamp_of,
    uri,
    write_transaction,
)
from hermes.store.sqlite.errors import full

# File systems on which locks and shared memory are unreliable.
_NETWORKED = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "lustre", "gluster", "fuse.sshfs", "fuse.glusterfs", "beegfs")
_PRAGMAS = (
    "foreign_keys=ON",
    "secure_delete=ON",
    "temp_store=MEMORY",
    "analysis_limit=400",
    f"wal_autocheckpoint={WAL_PAGES_MAX}",
    f"journal_size_limit={WAL_KEPT_BYTES_MAX}",
)


@lru_cache(maxsize=4)
def _new_database(schema: Schema) -> bytes:
    """The content of an empty database with this schema."""
    with closing(connect(":memory:")) as db:
        space.prepare(db)
        _migrate_all(db, schema)
        return db.serialize()


def connect_writer(path: Path | None, schema: Schema) -> Connection:
    """A connection that may write; creates the file if needed."""
    require_fts5()
    if path is None:
        db = connect(":memory:")
        db.deserialize(_new_database(schema))
        return db
    try:
        make_private_folder(path.parent)
        if not path.exists():
            # Closing a descriptor of a file in use would drop SQLite's locks; nobody uses this one yet.
            with suppress(FileExistsError):
                _make_file(path, _new_database(schema))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise full(path) from error
        raise StoreReadOnly(
            f"The database cannot be made: {error.strerror}.",
            where=str(path),
            hint="check the rights of the folder, or set HERMES_HOME to another one",
        ) from error
    return connect(uri(path, "rw"))


def _make_file(path: Path, content: bytes) -> None:
    """Create a file that others see with all of its content or not at all."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    draft = path.with_name(f".{path.name}.{random_hex(8)}")
    fd = private_opener(draft, flags)
    try:
        if os.write(fd, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # no links there: its first user fills it
            os.close(private_opener(path, flags))
    finally:
        os.close(fd)
        os.unlink(draft)


def _migrate_all(db: sqlite3.Connection, schema: Schema) -> None:
    while (version := db.execute("PRAGMA user_version").fetchone()[0]) < schema.version:
        _migrate(db, schema, version)


def checkpoint(path: Path) -> None:
    """Checkpoint as much of the write-ahead log as possible without waiting."""
    with closing(connect(uri(path, "rw"))) as db:
        db.execute("PRAGMA wal_checkpoint(PASSIVE)")


def checkpoint_rest(db: sqlite3.Connection) -> None:
    """`checkpoint` with the writer's connection."""
    db.execute("PRAGMA wal_checkpoint(PASSIVE)").close()


def empty_log(db: sqlite3.Connection) -> bool:
    """Truncate the write-ahead log. False: a reader still needs it; it is not waited for."""
    db.execute("PRAGMA busy_timeout=0")
    try:
        return bool(db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
    finally:
        db.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")


def connect_reader(path: Path, schema: Schema, *, exclusive: bool) -> Connection:
    """A read-only connection. `exclusive`: no writer of this process has opened the file."""
    require_fts5()
    if exclusive and not path.is_file():
        raise StoreError("There is no such database.", where=str(path))
    # A file that nobody has open is read without leaving files beside it, as long as it does not change.
    stamp = stamp_of(path) if exclusive else None
    db = connect(uri(path, "ro" if stamp is None else "ro&immutable=1"))
    db.execute(f"PRAGMA cache_size=-{READER_CACHE_KB}")
    db.stamp = stamp
    try:
        db.execute("PRAGMA query_only=ON")
        _check_version(db, path, schema, current=exclusive)
    except BaseException:
        db.close()
        raise
    return db


def make_ready(db: sqlite3.Connection, path: Path | None, schema: Schema, notice: Callable[[str], None]) -> None:
    """Migrate the file. One of a newer version or of another program is left alone."""
    _check_version(db, path, schema)
    if path is not None:
        if not path.stat().st_size:
            space.prepare(db)
        _set_journal(db, path, notice)
    for pragma in _PRAGMAS:
        db.execute(f"PRAGMA {pragma}")
    _migrate_all(db, schema)
    if path is not None and not space.gives_back(db) and path.stat().st_size <= VACUUM_AT_OPENING_BYTES_MAX:
        with suppress(sqlite3.OperationalError):  # another process writes, or the disk is full: try again later
            space.vacuum(db)


def try_write(db: sqlite3.Connection, path: Path | None, schema: Schema) -> None:
    """Raise the reason why the file cannot be changed; it is rewritten with its own content."""
    with write_transaction(db):
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > schema.version:
            raise _too_new(version, path, schema)
        if version < schema.version:
            message = (
                f"The database does not have the version that it was opened with ({schema.version}) but {version}."
            )
            raise StoreError(message, where=str(path), hint="restart the server")
        db.execute(f"PRAGMA user_version={version}")


def _too_new(version: int, path: Path | None, schema: Schema) -> StoreTooNew:
    return StoreTooNew(
        f"The database was written by a newer Hermes (version {version}, this one knows {schema.version}).",
        where=str(path),
        hint="update Hermes, or name another home",
    )


def _check_version(db: sqlite3.Connection, path: Path | None, schema: Schema, *, current: bool = False) -> None:
    db.execute("BEGIN")  # another process may be creating it
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    finally:
        db.rollback()
    if version > schema.version:
        raise _too_new(version, path, schema)
    if version == 0 and tables:
        raise StoreError("The file is a database of another program.", where=str(path))
    if current and version < schema.version:
        raise StoreError(
            "The database was written by an older Hermes and has to be migrated first.",
            where=str(path),
            hint="open it once for writing: hermes sessions list",
        )


def _set_journal(db: sqlite3.Connection, path: Path, notice: Callable[[str], None]) -> None:
    kind = connections.file_system_of(path)
    networked = kind.startswith(_NETWORKED)
    mode = patiently(db, f"PRAGMA journal_mode={'delete' if networked else 'wal'}").fetchone()[0]
    if mode != "wal":
        reason = f"a network file system ({kind})" if networked else "a file system that refuses it"
        notice(f"{path} lies on {reason}: it works without a write-ahead log, which is slower.")


def _migrate(db: sqlite3.Connection, schema: Schema, version: int) -> None:
    """One step in its own transaction; nothing if another process was quicker."""
    with write_transaction(db):
        if db.execute("PRAGMA user_version").fetchone()[0] == version:
            for statement in schema.migrations[version]:
                db.execute(statement)
            db.execute(f"PRAGMA user_version={version + 1}")
