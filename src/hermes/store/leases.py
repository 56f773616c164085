"""Leases: who may write to what, for how long, and under which token."""

from __future__ import annotations

import time

from hermes.core.processes import is_gone, this_process
from hermes.store.connections import Tx
from hermes.store.repository import Repository, reads, writes

__all__ = ["Leases", "acquire", "current_token", "held_by", "is_current", "release", "this_process"]

# The last token is in a row without a name: on the page that a lease is written to anyway.
_NEXT_TOKEN = (
    "INSERT INTO leases VALUES ('', '', 1, 0) ON CONFLICT (name) DO UPDATE SET token = token + 1 RETURNING token"
)
_ACQUIRE = (
    "INSERT INTO leases VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
    "holder = excluded.holder, token = excluded.token, until = excluded.until"
)


class Leases(Repository):
    """Leases with growing tokens. A holder of this host whose process is gone has lapsed at once."""

    @writes
    def acquire(self, tx: Tx, name: str, holder: str, ttl: float) -> int | None:
        """The token to write under, or None while somebody else holds it."""
        return acquire(tx, name, holder, ttl)

    @writes
    def renew(self, tx: Tx, name: str, token: int, ttl: float) -> bool:
        until = time.time() + ttl
        return tx.execute("UPDATE leases SET until = ? WHERE name = ? AND token = ?", (until, name, token)) > 0

    @writes
    def release(self, tx: Tx, name: str, token: int) -> None:
        release(tx, name, token)

    @writes
    def release_gone(self, tx: Tx) -> int:
        """Remove the leases of processes of this host that are gone; how many there were."""
        holders = {row["holder"] for row in tx.rows("SELECT DISTINCT holder FROM leases")}
        return sum(
            tx.execute("DELETE FROM leases WHERE holder = ?", (holder,)) for holder in holders if is_gone(holder)
        )

    @reads
    def holder(self, tx: Tx, name: str) -> str | None:
        return held_by(tx, name)


def acquire(tx: Tx, name: str, holder: str, ttl: float, *, free: bool = False) -> int | None:
    """The token to write under, or None while somebody else holds it, unless it is known to be free."""
    if not free and held_by(tx, name) is not None:
        return None
    token = int(tx.value(_NEXT_TOKEN))
    tx.execute(_ACQUIRE, (name, holder, token, time.time() + ttl))
    return token


def release(tx: Tx, name: str, token: int) -> None:
    tx.execute("DELETE FROM leases WHERE name = ? AND token = ?", (name, token))


def held_by(tx: Tx, name: str) -> str | None:
    """Who holds a lease now: one that ran out, or whose process is gone, is current_token by nobody."""
    lease = tx.row("SELECT holder, until FROM leases WHERE name = ?", (name,))
    if lease is None or lease["until"] <= time.time() or is_gone(lease["holder"]):
        return None
    return str(lease["holder"])


def is_current(tx: Tx, name: str, token: int) -> bool:
    return current_token(tx, name) == token


def current_token(tx: Tx, name: str) -> int | None:
    token: int | None = tx.value("SELECT token FROM leases WHERE name = ?", (name,))
    return token
