"""Leases: who may write to what, for how long, and under which token."""

from __future__ import annotations

from collections.abc import Mapping

from hermes.core.processes import is_gone, this_process
from hermes.store.codec import pack
from hermes.store.dialect import CLOCK, FOR_SHARE, either
from hermes.store.engine import Record, Tx
from hermes.store.repository import Repository, reads, reads_slowly, writes

__all__ = ["Leases", "acquire", "current_token", "held_by", "is_current", "release", "this_process"]

# Leases of dead replicas on other hosts.
_EXPIRED_KEPT_S = 86_400.0
# Of two transactions that have both seen a lease to be free, the engine runs the later one again.
_ACQUIRE = (
    f"INSERT INTO leases VALUES (?, ?, ?, {CLOCK} + ?) ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, "
    "token = excluded.token, until = excluded.until"
)
# A lease, with the next token where the database gives it in the same statement.
LEASE_COLUMNS = f"l.holder, l.token, l.until - {CLOCK} AS left_s"
NEXT_TOKEN = either("NULL", "nextval('lease_token')")
# The token is drawn under a lock, so that tokens of a lease grow even if it was acquired and released since the
# snapshot of this transaction, which causes no conflict.
_ORDERED_TOKEN = either(
    "NULL", "(SELECT nextval('lease_token') FROM pg_advisory_xact_lock(hashtextextended('lease ' || asked.name, 0)))"
)
_TO_ACQUIRE = (
    f"SELECT {LEASE_COLUMNS}, {_ORDERED_TOKEN} AS next_token "
    f"FROM (SELECT {either('?', '?::text')} AS name) AS asked LEFT JOIN leases l ON l.name = asked.name"
)
_RENEW_ALL = (
    f"UPDATE leases SET until = {CLOCK} + ? FROM {either('json_each(?)', 'json_each_text(?::json)')} AS held "
    f"WHERE leases.name = held.key AND leases.token = {either('held.value', 'held.value::bigint')} RETURNING name"
)


class Leases(Repository):
    """Leases with growing tokens. A lease of a dead process of this host has expired at once."""

    @writes
    def acquire(self, tx: Tx, name: str, holder: str, ttl: float) -> int | None:
        """The token to write under, or None while somebody else holds the lease."""
        return acquire(tx, name, holder, ttl)

    @writes
    def renew(self, tx: Tx, name: str, token: int, ttl: float) -> bool:
        return tx.change(f"UPDATE leases SET until = {CLOCK} + ? WHERE name = ? AND token = ?", (ttl, name, token)) > 0

    @writes
    def renew_all(self, tx: Tx, tokens: Mapping[str, int], ttl: float) -> set[str]:
        """Renew leases by their names and tokens; the names of those that were renewed."""
        return {row[0] for row in tx.rows(_RENEW_ALL, (ttl, pack(tokens)))} if tokens else set()

    @writes
    def release(self, tx: Tx, name: str, token: int) -> None:
        release(tx, name, token)

    @writes
    def release_gone(self, tx: Tx) -> int:
        """Delete leases of dead processes of this host and leases that expired long ago; returns how many there
        were."""
        released = tx.change(f"DELETE FROM leases WHERE name <> '' AND until < {CLOCK} - ?", (_EXPIRED_KEPT_S,))
        holders = {row["holder"] for row in tx.rows("SELECT DISTINCT holder FROM leases")}
        dead = [holder for holder in holders if is_gone(holder)]
        return released + sum(tx.change("DELETE FROM leases WHERE holder = ?", (holder,)) for holder in dead)

    @reads
    def holder(self, tx: Tx, name: str) -> str | None:
        return held_by(tx, name)

    @reads_slowly
    def holders(self, tx: Tx) -> list[str]:
        leases = tx.rows(f"SELECT holder, token, until - {CLOCK} AS left_s FROM leases WHERE name <> ''")
        return sorted({lease["holder"] for lease in leases if not is_free(lease)})


def acquire(tx: Tx, name: str, holder: str, ttl: float) -> int | None:
    lease = tx.rows(_TO_ACQUIRE, (name,))[0]
    return acquire_free(tx, name, holder, ttl, lease["next_token"]) if is_free(lease) else None


def acquire_free(tx: Tx, name: str, holder: str, ttl: float, next_token: int | None) -> int:
    """The token of a lease that this transaction has seen to be free."""
    token = next_token or tx.next_value("lease_token")
    tx.execute(_ACQUIRE, (name, holder, token, ttl))
    return token


def release(tx: Tx, name: str, token: int) -> None:
    tx.execute("DELETE FROM leases WHERE name = ? AND token = ?", (name, token))


def held_by(tx: Tx, name: str) -> str | None:
    """The current holder; None if the lease has expired or its process is dead."""
    lease = tx.row(f"SELECT holder, token, until - {CLOCK} AS left_s FROM leases WHERE name = ?", (name,))
    return None if lease is None or is_free(lease) else str(lease["holder"])


def is_free(lease: Record) -> bool:
    return lease["token"] is None or lease["left_s"] <= 0 or is_gone(lease["holder"])


def is_current(tx: Tx, name: str, token: int) -> bool:
    return current_token(tx, name) == token


def current_token(tx: Tx, name: str) -> int | None:
    """The token of a lease, locked until this transaction ends."""
    token: int | None = tx.value(f"SELECT token FROM leases WHERE name = ? {FOR_SHARE}", (name,))
    return token
