"""What a server holds, seen from outside: memory, threads, descriptors, processes, turns at work, rows not at rest."""

from __future__ import annotations

import os
import re
import sqlite3
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

Figures = dict[str, int]
_KINDS = (("socket:", "sockets"), ("pipe:", "pipes"), ("anon_inode:", "handles"))
# file: what must not be there when everything has ended. What has ended is kept for a time, and is nothing left over.
_ROWS = {
    "state.db": {
        "live runs": "SELECT count(*) FROM runs WHERE ended_at IS NULL",
        "leases": "SELECT count(*) FROM leases",
        "open texts": "SELECT count(*) FROM run_partials",
        "controls not taken": "SELECT count(*) FROM run_controls WHERE taken_at IS NULL",
        "open claims": "SELECT count(*) FROM idempotency WHERE state = 'running'",
        "rows without a parent": "SELECT count(*) FROM pragma_foreign_key_check",
        "unused blobs": "SELECT count(*) FROM blobs WHERE sha256 NOT IN (SELECT sha256 FROM message_blobs)",
    },
    "response_store.db": {
        "open responses": "SELECT count(*) FROM responses WHERE status IN ('queued', 'in_progress')",
        "unused items": "SELECT count(*) FROM response_items WHERE refs <= 0",
    },
}
_GAUGES = {"turns at work": "hermes_turns_active", "streams being read": "hermes_sse_streams_active"}
# What the server says of work that nobody waited for, and of its own defects.
COMPLAINTS = re.compile(r"Traceback|was destroyed but|never retrieved|never awaited|Unclosed|internal error")


def resident_mb(pid: int) -> float:
    """Memory that is really there."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def held(pid: int) -> Figures:
    """Threads, descriptors by kind, and child processes."""
    kinds: Counter[str] = Counter({"sockets": 0, "pipes": 0, "handles": 0, "files": 0})
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            kinds[next((kind for mark, kind in _KINDS if target.startswith(mark)), "files")] += 1
    with suppress(FileNotFoundError):
        children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
        return {"threads": len(children), "processes": sum(map(len, children)), **kinds}
    return held(pid)  # a thread has just ended


def rows(home: Path) -> Figures:
    """Rows that say that something is still going on, or that nothing refers to."""
    found: Figures = {}
    for name, queries in _ROWS.items():
        with closing(sqlite3.connect(f"file:{home / name}?mode=ro", uri=True, timeout=30)) as db:
            found |= {what: db.execute(sql).fetchone()[0] for what, sql in queries.items()}
    return found


def gauges(metrics: str) -> Figures:
    """What the server says that it is doing."""
    found = {what: re.findall(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE) for what, name in _GAUGES.items()}
    assert all(found.values()), f"these are not told: {found}"
    return {what: int(sum(map(float, told))) for what, told in found.items()}
