"""Errors of a PostgreSQL server as ours, with hints and without passwords."""

from __future__ import annotations

import re

import psycopg
from psycopg import errors

from hermes.core.errors import ConfigError, HermesError
from hermes.core.limits import BUSY_S_MAX
from hermes.store.base import (
    RunExists,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreRuleBroken,
    StoreTimeout,
    StoreUnreachable,
)
from hermes.store.engine import Conflict

# The connection's prepared statements differ from what psycopg assumes: one was to be prepared after a statement that
# failed, or its tables have changed since.
STALE = (errors.InvalidSqlStatementName, errors.DuplicatePreparedStatement, errors.FeatureNotSupported)
# The transaction is retried: it conflicted with another, or the connection is replaced.
RETRIED = (
    *STALE,
    errors.SerializationFailure,
    errors.DeadlockDetected,
    errors.UniqueViolation,
    errors.ForeignKeyViolation,
    errors.LockNotAvailable,
)
_RUNS_KEY = "runs_pkey"
# The server is stopping, starting, or no longer the primary.
_UNAVAILABLE = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.DatabaseDropped,
    errors.IdleInTransactionSessionTimeout,
    errors.ReadOnlySqlTransaction,
    errors.TooManyConnections,
)
_REFUSED = (
    errors.InvalidPassword,
    errors.InvalidAuthorizationSpecification,
    errors.InvalidCatalogName,
    errors.InvalidSchemaName,
    errors.InsufficientPrivilege,
)
# A failed connection attempt has no SQLSTATE: then libpq's text decides, without quoted names of hosts and files.
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
_REFUSED_WORDS = re.compile(
    "authentication failed|no password supplied|does not exist|permission denied for|not permitted to log in"
    "|no pg_hba.conf entry|does not support SSL|certificate verify failed|server certificate for|invalid"
)


def is_lost(error: BaseException) -> bool:
    """Whether the connection is lost or unusable."""
    if isinstance(error, _UNAVAILABLE):
        return True
    # Errors of the server have a SQLSTATE; the others are the connection's.
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and error.sqlstate is None


def is_conflict(error: BaseException) -> bool:
    """Whether a retry of the transaction can succeed."""
    return isinstance(error, (Conflict, *RETRIED)) and not _is_second_run(error)


def _is_second_run(error: BaseException) -> bool:
    """Whether a run was inserted that exists: nobody looks for it first."""
    return isinstance(error, errors.UniqueViolation) and error.diag.constraint_name == _RUNS_KEY


def unreachable(place: str, error: BaseException) -> StoreUnreachable:
    return StoreUnreachable(
        f"PostgreSQL is out of reach: {_first_line(error)}.",
        where=place,
        hint="check that the server runs and that storage.url names its address",
    )


def explained(error: BaseException, place: str) -> BaseException:
    if not isinstance(error, psycopg.Error | Conflict):
        return error
    if is_lost(error):
        return unreachable(place, error)
    if isinstance(error, errors.QueryCanceled):
        return StoreTimeout("The store had no answer in time.", where=place, hint="ask for less, or try again later")
    if _is_second_run(error):
        return RunExists(place)
    if isinstance(error, psycopg.IntegrityError):
        return StoreRuleBroken(
            f"The change breaks a rule of the tables: UNIQUE or FOREIGN KEY ({_first_line(error)}).", where=place
        )
    if isinstance(error, (Conflict, *RETRIED)):
        message = f"Other changes have been in the way for more than {BUSY_S_MAX:g} s."
        return StoreBusy(message, where=place, hint="try again")
    if isinstance(error, errors.DiskFull):
        return StoreFull("The disk of the database server is full; nothing was changed.", where=place)
    if isinstance(error, errors.InsufficientPrivilege):
        return StoreReadOnly(f"The database user lacks a right: {_first_line(error)}.", where=place)
    if isinstance(error, errors.DataCorrupted | errors.IndexCorrupted):
        return StoreDamaged(f"The database is damaged: {_first_line(error)}.", where=place)
    return StoreError(f"The database failed: {_first_line(error)}.", where=place)


def refused_at_start(error: BaseException, place: str) -> HermesError:
    """Why the process cannot start: a configuration error, or a server that is unreachable."""
    if isinstance(error, psycopg.ProgrammingError) and error.sqlstate is None:
        # libpq's message may quote the password.
        message = "The address of PostgreSQL is not valid, or has a parameter that PostgreSQL does not know."
        return ConfigError(message, where=place, hint="correct storage.url (HERMES_DATABASE_URL)")
    line = _first_line(error)
    stateless = getattr(error, "sqlstate", None) is None
    if isinstance(error, _REFUSED) or (stateless and _REFUSED_WORDS.search(_QUOTED.sub("", str(error)))):
        hint = "correct storage.url (HERMES_DATABASE_URL): user, password and database, and the user's rights"
        return ConfigError(f"PostgreSQL refuses this configuration: {line}.", where=place, hint=hint)
    return unreachable(place, error)


def _first_line(error: BaseException) -> str:
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    text = primary or str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
