"""Idempotency records: a repeated request with the same key gets the first response and starts no second run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hermes.core.limits import IDEMPOTENCY_KEPT_S, IDEMPOTENCY_KEY_CHARS_MAX, IDEMPOTENCY_RECORDS_MAX, SWEEP_BATCH_ROWS
from hermes.store.dialect import CLOCK
from hermes.store.engine import Conflict, Tx
from hermes.store.repository import Repository, blocks, writes

# An expired record is taken over.
_CLAIM = (
    f"INSERT INTO idempotency VALUES (?, ?, ?, 'running', ?, NULL, NULL, {CLOCK}, {CLOCK} + ?) "
    "ON CONFLICT (scope, key) DO UPDATE SET fingerprint = excluded.fingerprint, state = 'running', "
    "run_id = excluded.run_id, status = NULL, body = NULL, created_at = excluded.created_at, "
    f"expires_at = excluded.expires_at WHERE idempotency.expires_at <= {CLOCK} RETURNING created_at"
)
_KEY = re.compile(rf"[\x21-\x7e]{{1,{IDEMPOTENCY_KEY_CHARS_MAX}}}")


@dataclass(frozen=True, slots=True)
class Claim:
    """The state of a key: `running` names the run to join, `done` holds the response to repeat."""

    state: Literal["new", "running", "done", "conflict"]
    run_id: str | None = None
    status: int | None = None
    body: bytes | None = None
    created_at: float = 0.0


class Idempotency(Repository):
    """Claims by scope and key. A claim is committed before its run starts, its response with the run's end."""

    @writes
    def claim(
        self, tx: Tx, scope: str, key: str, fingerprint: str, ttl: float = IDEMPOTENCY_KEPT_S, run_id: str | None = None
    ) -> Claim:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(f"An idempotency key is 1 to {IDEMPOTENCY_KEY_CHARS_MAX} visible ASCII characters.")
        sql = f"SELECT * FROM idempotency WHERE scope = ? AND key = ? AND expires_at > {CLOCK}"
        record = tx.row(sql, (scope, key))
        if record is None:
            created_at = tx.value(_CLAIM, (scope, key, fingerprint, run_id, ttl))
            if created_at is None:  # another replica was quicker
                raise Conflict(key)
            return Claim("new", run_id, created_at=created_at)
        if record["fingerprint"] != fingerprint:
            return Claim("conflict", record["run_id"])
        return Claim(record["state"], record["run_id"], record["status"], record["body"], record["created_at"])

    @writes
    def finish(self, tx: Tx, scope: str, key: str, status: int, body: bytes) -> None:
        """Store the response to be repeated byte for byte. The first one stays."""
        sql = "UPDATE idempotency SET state = 'done', status = ?, body = ? WHERE scope = ? AND key = ?"
        sql += " AND state = 'running'"
        tx.execute(sql, (status, body, scope, key))

    @writes
    def release(self, tx: Tx, scope: str, key: str) -> None:
        """Free a key whose work was not started."""
        tx.execute("DELETE FROM idempotency WHERE scope = ? AND key = ? AND state = 'running'", (scope, key))

    @writes
    def release_unstarted(self, tx: Tx) -> int:
        """At startup: free the keys that have no run."""
        return tx.change(
            "DELETE FROM idempotency WHERE state = 'running' AND "
            "(run_id IS NULL OR run_id NOT IN (SELECT run_id FROM runs))"
        )

    @blocks
    def sweep(self) -> int:
        deleted = 0
        while count := self._sweep_some():
            deleted += count
        return deleted

    @writes
    def _sweep_some(self, tx: Tx) -> int:
        surplus = tx.value("SELECT count(*) FROM idempotency") - IDEMPOTENCY_RECORDS_MAX
        deleted = tx.change(
            "DELETE FROM idempotency WHERE rowid IN "
            f"(SELECT rowid FROM idempotency WHERE expires_at <= {CLOCK} LIMIT ?)",
            (SWEEP_BATCH_ROWS,),
        )
        if deleted == 0 and surplus > 0:
            deleted = tx.change(
                "DELETE FROM idempotency WHERE rowid IN (SELECT rowid FROM idempotency ORDER BY created_at LIMIT ?)",
                (min(surplus, SWEEP_BATCH_ROWS),),
            )
        return deleted
