"""Every model call is counted once: in the totals of its session, and by model, provider and task."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hermes.store.sessions import SessionDB

from .conftest import create_conversation

USAGE: dict[str, Any] = {
    "input_tokens": 100,
    "output_tokens": 20,
    "total_tokens": 120,
    "cache_read_tokens": 60,
    "cache_write_tokens": 30,
    "reasoning_tokens": 5,
    "cost_usd": 0.25,
}
TOKENS = ["input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "reasoning_tokens"]


def totals(db: SessionDB, session_id: str = "s") -> list[int]:
    row = db.get_session(session_id)
    return [row[name] for name in ["api_call_count", *TOKENS]]


def by_model(db: SessionDB, session_id: str = "s") -> dict[tuple[str, str, str], list[int]]:
    rows = db.export_session(session_id)["usage"]
    return {(r["model"], r["provider"], r["task"]): [r["calls"], r["input_tokens"], r["output_tokens"]] for r in rows}


def test_usage_is_added_to_session_totals(db: SessionDB) -> None:
    create_conversation(db, "s", "hi")
    create_conversation(db, "other", "hi")
    db.add_usage("s", USAGE, "m", "p")
    once = totals(db)
    db.add_usage("s", USAGE, "m", "p")
    assert once == [1, 100, 20, 60, 30, 5]
    assert totals(db) == [2, 200, 40, 120, 60, 10]
    assert totals(db, "other") == [0] * 6


def test_input_tokens_include_cached_tokens(db: SessionDB) -> None:
    create_conversation(db, "s", "hi")
    db.add_usage("s", {"input_tokens": 100, "cache_read_tokens": 90, "cache_write_tokens": 10}, "m", "p")
    row = db.get_session("s")
    assert [row[name] for name in TOKENS] == [100, 0, 90, 10, 0]


def test_cost_of_calls_is_summed(db: SessionDB) -> None:
    create_conversation(db, "s", "hi")
    for _ in range(2):
        db.add_usage("s", USAGE, "m", "p")
    assert db.get_session("s")["actual_cost_usd"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "usage", [{}, {"input_tokens": None}, {"input_tokens": 0, "cost_usd": None, "measured": "estimate", "task": ""}]
)
def test_missing_usage_fields_count_as_zero(db: SessionDB, usage: dict[str, Any]) -> None:
    create_conversation(db, "s", "hi")
    db.add_usage("s", usage, "m", "p")
    assert totals(db) == [1, 0, 0, 0, 0, 0]


def test_usage_is_separated_by_model_provider_and_task(db: SessionDB) -> None:
    create_conversation(db, "s", "hi")
    for model, provider, task in [("m", "p", ""), ("m", "p", ""), ("m", "q", ""), ("n", "p", ""), ("m", "p", "vision")]:
        db.add_usage("s", USAGE, model, provider, task)
    assert by_model(db) == {
        ("m", "p", ""): [2, 200, 40],
        ("m", "q", ""): [1, 100, 20],
        ("n", "p", ""): [1, 100, 20],
        ("m", "p", "vision"): [1, 100, 20],
    }


def test_auxiliary_task_usage_is_not_in_session_totals(db: SessionDB) -> None:
    create_conversation(db, "s", "hi")
    db.add_usage("s", USAGE, "m", "p")
    db.add_usage("s", USAGE, "small", "p", task="compression")
    assert totals(db) == [1, 100, 20, 60, 30, 5]
    assert db.get_session("s")["actual_cost_usd"] == pytest.approx(0.25)
    assert by_model(db)[("small", "p", "compression")] == [1, 100, 20]


def test_concurrent_usage_updates_are_all_counted(db: SessionDB) -> None:
    create_conversation(db, "s", "hi")

    def count() -> None:
        for _ in range(20):
            db.add_usage("s", USAGE, "m", "p")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (totals(db)[:2], by_model(db)) == ([160, 16_000], {("m", "p", ""): [160, 16_000, 3200]})
