"""What is written about the database is true of it."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hermes.core.limits import (
    DATA_URL_CHARS_MAX,
    IDEMPOTENCY_KEPT_S,
    IDEMPOTENCY_RECORDS_MAX,
    PENDING_CALLS_KEPT_S,
    SEARCHED_CHARS_MAX,
)
from hermes.store.responses import RESPONSES
from hermes.store.sqlite.schema import STATE
from hermes.store.stores import open_store

from .conftest import create_conversation
from .tools import Turn, look, url

DOCUMENT = (Path(__file__).parents[2] / "docs" / "database.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"^```sql\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
FILES = ("state.db", "response_store.db")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Both databases, with something in the tables that people ask about."""
    folder = tmp_path_factory.mktemp("home")
    with closing(open_store(url(folder / "state.db"))) as store:
        create_conversation(
            store.sessions, "a", "Write a list for the kitchen.", "Done.", source="api_server", title="Shopping"
        )
        create_conversation(store.sessions, "b", "日本の台所", "A kitchen; no more.", source="cli")
        usage = {"input_tokens": 900, "output_tokens": 40, "cache_read_tokens": 600, "cost_usd": 0.25}
        for task in ("", "", "title_generation"):
            store.sessions.add_usage("a", usage, "large", "p", task)
        store.sessions.add_usage("b", {"input_tokens": 5}, "small", "p")
        broken = Turn(store, "a")
        broken.begin()
        broken.append(broken.event("run.failed", failure="timeout", error="The model took too long.", usage={}))
        latest = Turn(store, "b", kind="chat")
        latest.begin()
        latest.complete("m", "Noon.")
        latest.end()
        store.responses.put("resp_1", {"response": {"status": "completed"}, "conversation_history": [{"a": 1}]})
    yield folder


def run(path: Path, sql: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(sql)]


# ---- queries


def test_document_has_five_example_queries() -> None:
    assert len(QUERIES) == 5


def test_query_latest_sessions_with_tokens(folder: Path) -> None:
    completed = run(folder / "state.db", QUERIES[0])
    assert {row["id"]: (row["about"], row["input_tokens"], row["output_tokens"]) for row in completed} == {
        "a": ("Shopping", 1800, 80),
        "b": ("日本の台所", 5, 0),
    }
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", row["active"]) for row in completed)


def test_query_full_text_search_with_session_title(folder: Path) -> None:
    [row] = run(folder / "state.db", QUERIES[1])
    assert (row["title"], row["role"]) == ("Shopping", "user")
    assert "[kitchen]" in row["found"]


def test_query_token_sums_by_model(folder: Path) -> None:
    large, small = run(folder / "state.db", QUERIES[2])
    assert tuple(large.values()) == ("large", "p", 3, 2700, 1800, 120, 0.75)
    assert (small["model"], small["input"], small["usd"]) == ("small", 5, None)


def test_query_failed_runs_with_reason(folder: Path) -> None:
    [row] = run(folder / "state.db", QUERIES[3])
    assert (row["failure"], row["error"], row["model"]) == ("timeout", "The model took too long.", "m")


def test_query_events_of_latest_run_in_order(folder: Path) -> None:
    completed = run(folder / "state.db", QUERIES[4])
    assert [row["type"] for row in completed] == ["run.started", "message.completed", "run.completed"]
    assert [row["seconds"] for row in completed] == [0.0, 1.0, 2.0]


def test_documented_match_finds_text_without_spaces(folder: Path) -> None:
    match = re.search(r"`MATCH ('[^`]+')`", DOCUMENT)
    assert match is not None
    rows = run(folder / "state.db", f"SELECT rowid FROM messages_fts WHERE messages_fts MATCH {match[1]}")
    assert len(rows) == 1


# ---- tables


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def described() -> dict[str, set[str]]:
    """The tables and columns that the document names."""
    named: dict[str, set[str]] = {}
    lines = iter(DOCUMENT.splitlines())
    for line in lines:
        if cells(line)[:2] != ["table", "column"]:
            continue
        next(lines)
        for row in lines:
            if not row.startswith("|"):
                break
            table, columns, _ = cells(row)
            named.setdefault(table.strip("`"), set()).update(re.findall(r"`([^`]+)`", columns))
    return named


def existing(folder: Path) -> dict[str, set[str]]:
    """The tables and views that there are, without those that SQLite makes for its own use."""
    listed = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    return {
        name: {row[1] for row in look(folder / file, f"PRAGMA table_info({name})")}
        for file in FILES
        for (name,) in look(folder / file, listed)
        if not name.startswith("messages_fts_")
    }


def test_document_lists_every_table(folder: Path) -> None:
    assert set(described()) == set(existing(folder))


def test_documented_columns_exist(folder: Path) -> None:
    there = existing(folder)
    assert {table: columns - there[table] for table, columns in described().items() if columns - there[table]} == {}
    assert all(described().values())


def test_no_column_is_documented_twice() -> None:
    rows = [cells(line) for line in DOCUMENT.splitlines() if line.startswith("| `")]
    named = [(row[0], column) for row in rows if len(row) == 3 for column in re.findall(r"`([^`]+)`", row[1])]
    assert len(named) == len(set(named))


def test_fts_shadow_tables_are_documented(folder: Path) -> None:
    names = [name for (name,) in look(folder / "state.db", "SELECT name FROM sqlite_master WHERE name GLOB '*_fts_*'")]
    assert names
    assert all(name in DOCUMENT or f"`{name.removeprefix('messages_fts')}`" in DOCUMENT for name in names)


# ---- numbers


def test_documented_schema_versions_match_files(folder: Path) -> None:
    versions = [look(folder / file, "PRAGMA user_version")[0][0] for file in FILES]
    assert versions == [STATE.version, RESPONSES.version]
    text = " ".join(DOCUMENT.split())
    assert f"{versions[0]} in `state.db`, {versions[1]} in `response_store.db`" in text


def test_documented_limits_match_code() -> None:
    text = " ".join(DOCUMENT.split())
    assert f"first {SEARCHED_CHARS_MAX:,} characters" in text
    assert f"more than {DATA_URL_CHARS_MAX:,} characters" in text
    assert f"{IDEMPOTENCY_KEPT_S / 3600:g} hours, at most {IDEMPOTENCY_RECORDS_MAX:,}" in text
    assert f"| calls that wait for a client | {PENDING_CALLS_KEPT_S / 3600:g} hours |" in text
