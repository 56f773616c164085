"""Waiting for the lock that another process holds on the database."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from hermes.core import limits
from hermes.store.sqlite.connections import patiently

from .tools import PATIENCE_S

ATTEMPTS = 5


def connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=limits.BUSY_TIMEOUT_S)


def test_busy_lock_is_tried_again_in_short_steps(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    holder, waiter = connect(path), connect(path)
    holder.execute("BEGIN IMMEDIATE")
    attempts, tried = [], threading.Event()

    def trace(sql: str) -> None:
        attempts.append(sql)
        if attempts.count("BEGIN IMMEDIATE") == ATTEMPTS:
            tried.set()

    waiter.set_trace_callback(trace)
    thread = threading.Thread(target=patiently, args=(waiter, "BEGIN IMMEDIATE"))
    thread.start()
    try:
        # SQLite's own wait would keep the first attempt for all of BUSY_TIMEOUT_S.
        assert tried.wait(min(PATIENCE_S, limits.BUSY_TIMEOUT_S / 2))
    finally:
        holder.execute("ROLLBACK")
        thread.join(PATIENCE_S)
    assert waiter.in_transaction
    assert waiter.execute("PRAGMA busy_timeout").fetchone() == (int(limits.BUSY_TIMEOUT_S * 1000),)


def test_lock_that_is_never_released_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUSY_S_MAX", 0.01)
    path = tmp_path / "state.db"
    holder, waiter = connect(path), connect(path)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        patiently(waiter, "BEGIN IMMEDIATE")
