"""Lists over twice as many rows take at most 2.3 times the work of the database, counted by its own steps."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hermes.store.sqlite import connections
from server.conftest import Api, Start, start  # noqa: F401
from support.model_server import Reply

RATIO_MAX = 2.3
# What a request costs whatever there is.
STEPS_MIN = 200
ROWS = 1_500
SESSION = "api-session"
MANY = "&".join(f"x{at}=1" for at in range(200))
ROUTES = (
    "/api/sessions",
    "/api/sessions?limit=100&offset=1000",
    "/api/sessions?order=started_at",
    "/api/sessions?q=word",
    "/api/sessions?source=api_server&include_children=true&archived=true",
    "/api/sessions?session_key=none",
    "/api/sessions/search?q=word",
    "/api/sessions/search?q=word&sort=newest",
    f"/api/sessions?{MANY}",
    f"/api/sessions/{SESSION}/messages",
    f"/api/sessions/{SESSION}/messages?limit=20&order=desc",
    f"/api/sessions/{SESSION}/export",
    f"/api/sessions/{SESSION}/files",
    f"/api/sessions/{SESSION}",
    "/v1/runs",
    "/v1/runs?limit=100",
    f"/v1/runs?session_id={SESSION}",
    "/v1/runs?status=completed",
    "/v1/runs?status=failed",
    "/api/jobs",
)


class Steps:
    count = 0


class Counted(connections.Connection):
    """A connection that counts what its statements do."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        super().set_progress_handler(self._step, 10)

    def _step(self) -> None:
        Steps.count += 1

    def set_progress_handler(self, *args: Any) -> None:
        """A time limit would end the count."""


@pytest.fixture(autouse=True)
def counted_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(connections, "Connection", Counted)
    yield


def copy_rows(db: sqlite3.Connection, table: str, count: int, **names: str) -> None:
    """So many rows like the first one but for these columns, in which `{}` stands for a number."""
    columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[1] != "id" or "id" in names]
    [first] = db.execute(f"SELECT {', '.join(columns)} FROM {table} LIMIT 1")
    [(known,)] = db.execute(f"SELECT count(*) FROM {table}")
    rows = [
        [names[name].format(known + at) if name in names else value for name, value in zip(columns, first, strict=True)]
        for at in range(count - known)
    ]
    db.executemany(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", rows)


def fill(database: Path, count: int) -> None:
    with closing(sqlite3.connect(database, timeout=30)) as db, db:
        copy_rows(db, "sessions", count, id="s{}", title="word {}")
        copy_rows(db, "runs", count, run_id="run_{}")
        copy_rows(db, "messages", count)
        db.execute("UPDATE sessions SET message_count = ? WHERE id = ?", (count, SESSION))


async def test_list_routes_are_linear_in_rows(start: Start, home_folder: Path) -> None:  # noqa: F811
    api = await start(Reply(text="word"))
    async with api.post("/api/sessions", {"id": SESSION}) as response:
        assert response.status == 201
    async with api.post(f"/api/sessions/{SESSION}/chat", {"message": "word"}) as response:
        assert response.status == 200
    results: list[dict[str, int]] = []
    for count in (ROWS, 2 * ROWS):
        fill(home_folder / "state.db", count)
        results.append({route: await steps(api, route) for route in ROUTES})
    once, twice = results
    slow = {
        route: (once[route], twice[route]) for route in ROUTES if twice[route] > RATIO_MAX * once[route] + STEPS_MIN
    }
    assert not slow


async def steps(api: Api, route: str) -> int:
    """The least of three times: the store may do other work meanwhile."""
    counts: list[int] = []
    for _ in range(3):
        Steps.count = 0
        async with api.get(route) as response:
            assert response.status == 200, (route, await response.text())
            await response.read()
        counts.append(Steps.count)
    return min(counts)
