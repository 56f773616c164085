"""Scheduled jobs. A row holds when its job is due; schedules are interpreted in `runs`."""

from __future__ import annotations

import builtins
import secrets
import time
from typing import Any

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import SQL_ROWS_MAX
from hermes.store.codec import clean, pack, unpack
from hermes.store.dialect import FOR_UPDATE_SKIP_LOCKED
from hermes.store.engine import Record, Tx
from hermes.store.repository import Repository, reads, writes

_COLUMNS = ("id", "owner", "name", "enabled", "state", "created_at", "next_run_at")


class Jobs(Repository):
    """Jobs by id. A due job is given to one caller at a time."""

    @writes
    def create(self, tx: Tx, job: JsonMapping) -> JsonObject:
        record = {"owner": "default", "name": "", "enabled": True, "state": "scheduled", "next_run_at": None, **job}
        record.setdefault("id", secrets.token_hex(6))
        record.setdefault("created_at", time.time())
        if tx.value("SELECT 1 FROM jobs WHERE id = ?", (record["id"],)) is not None:
            raise ValueError(f"There is a job '{record['id']}' already.")
        tx.execute(
            "INSERT INTO jobs (id, owner, name, enabled, state, created_at, next_run_at, data) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*_values(record), _rest(record)),
        )
        return _job_of(tx.row("SELECT * FROM jobs WHERE id = ?", (record["id"],)))

    @reads
    def get(self, tx: Tx, job_id: str) -> JsonObject | None:
        row = tx.row("SELECT * FROM jobs WHERE id = ?", (job_id,))
        return _job_of(row) if row else None

    @reads
    def list(self, tx: Tx, owner: str | None = None, include_disabled: bool = True) -> builtins.list[JsonObject]:
        where, params = "TRUE", []
        if owner is not None:
            where, params = "owner = ?", [owner]
        if not include_disabled:
            where += " AND enabled"
        sql = f"SELECT * FROM jobs WHERE {where} ORDER BY created_at, id"
        return [_job_of(row) for row in tx.rows(sql, params)]

    @writes
    def update(self, tx: Tx, /, job_id: str, **fields: Any) -> JsonObject | None:
        return _update(tx, job_id, fields)

    @writes
    def delete(self, tx: Tx, job_id: str) -> bool:
        return tx.change("DELETE FROM jobs WHERE id = ?", (job_id,)) > 0

    @reads
    def due(self, tx: Tx, now: float) -> builtins.list[JsonObject]:
        """Unclaimed jobs that are due, the longest overdue first."""
        return _due(tx, now, SQL_ROWS_MAX)

    @writes
    def claim_due(
        self, tx: Tx, now: float, holder: str, ttl: float = 300, limit: int = 10
    ) -> builtins.list[JsonObject]:
        """Claim due jobs. Nobody else gets them until they are finished or `ttl` has passed."""
        jobs = _due(tx, now, limit, FOR_UPDATE_SKIP_LOCKED)
        for job in jobs:
            tx.execute("UPDATE jobs SET claimed_by = ?, claimed_until = ? WHERE id = ?", (holder, now + ttl, job["id"]))
        return jobs

    @writes
    def finish(self, tx: Tx, /, job_id: str, holder: str | None = None, **fields: Any) -> JsonObject | None:
        """Return a job with its changed fields; with a holder, only if that holder still has it."""
        if holder is not None and tx.value("SELECT claimed_by FROM jobs WHERE id = ?", (job_id,)) != holder:
            return None
        tx.execute("UPDATE jobs SET claimed_by = NULL, claimed_until = 0 WHERE id = ?", (job_id,))
        return _update(tx, job_id, fields)


def _update(tx: Tx, job_id: str, fields: JsonMapping) -> JsonObject | None:
    row = tx.row("SELECT * FROM jobs WHERE id = ?", (job_id,))
    if row is None:
        return None
    job = {**_job_of(row), **fields, "id": job_id}
    tx.execute(
        "UPDATE jobs SET owner = ?, name = ?, enabled = ?, state = ?, created_at = ?, next_run_at = ?, data = ? "
        "WHERE id = ?",
        (*_values(job)[1:], _rest(job), job_id),
    )
    return _job_of(tx.row("SELECT * FROM jobs WHERE id = ?", (job_id,)))


def _due(tx: Tx, now: float, limit: int, lock: str = "") -> list[JsonObject]:
    sql = (
        "SELECT * FROM jobs WHERE enabled AND next_run_at IS NOT NULL AND next_run_at <= ? AND claimed_until <= ? "
        f"ORDER BY next_run_at, id LIMIT ? {lock}"
    )
    return [_job_of(row) for row in tx.rows(sql, (now, now, limit))]


def _values(job: JsonMapping) -> tuple[Any, ...]:
    return (
        str(job["id"]),
        str(job["owner"]),
        clean(str(job["name"])),
        bool(job["enabled"]),
        str(job["state"]),
        job["created_at"],
        job["next_run_at"],
    )


def _rest(job: JsonMapping) -> str:
    return pack({name: value for name, value in job.items() if name not in _COLUMNS})


def _job_of(row: Record | None) -> JsonObject:
    assert row is not None
    columns = {name: row[name] for name in _COLUMNS}
    return {**unpack(row["data"]), **columns, "enabled": bool(row["enabled"])}
