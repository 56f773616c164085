"""Scheduled work: kept as it was given, and handed to one caller when its time has come."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest

from hermes.store.stores import Store, open_store

from .tools import Json, at_once

JOB: Json = {
    "name": "Morning news",
    "prompt": "What is new? 新しい",
    "skills": ["web", "summary"],
    "model": "m",
    "provider": None,
    "enabled_toolsets": ["web"],
    "workdir": None,
    "schedule": {"kind": "interval", "minutes": 30, "display": "every 30m"},
    "schedule_display": "every 30m",
    "repeat": {"times": None, "completed": 0},
    "enabled": True,
    "state": "scheduled",
    "created_at": 10.5,
    "next_run_at": 100.25,
    "last_run_at": None,
    "last_status": None,
    "last_error": None,
    "session_id": None,
    "deliver": "local",
    "timezone": "Europe/Berlin",
    "origin": {"surface": "cli"},
    "paused_at": None,
    "paused_reason": None,
    "owner": "default",
}


@pytest.fixture
def jobs(store: Store) -> Any:
    return store.jobs


def ids(items: list[Json]) -> list[str]:
    return [job["id"] for job in items]


def make(jobs: Any, number: int, **fields: Any) -> str:
    """A job that is due at the time of its number."""
    name = f"{number:012x}"
    jobs.create({**JOB, "id": name, "name": name, "next_run_at": float(number), **fields})
    return name


def test_job_round_trip(jobs: Any) -> None:
    job = jobs.create(JOB)
    assert re.fullmatch("[0-9a-f]{12}", job["id"])
    assert {name: job[name] for name in JOB} == JOB
    assert jobs.get(job["id"]) == job


def test_job_keeps_given_id(jobs: Any) -> None:
    assert jobs.create({**JOB, "id": "0123456789ab"})["id"] == "0123456789ab"
    assert jobs.get("0123456789ab")["name"] == "Morning news"


def test_job_ids_are_unique(jobs: Any) -> None:
    assert len({jobs.create(JOB)["id"] for _ in range(50)}) == 50


def test_create_does_not_mutate_input(jobs: Any) -> None:
    job = {"name": "n", "schedule": {"kind": "once"}}
    jobs.create(job)
    assert job == {"name": "n", "schedule": {"kind": "once"}}


def test_unknown_job_is_none(jobs: Any) -> None:
    assert jobs.get("0123456789ab") is None
    assert jobs.update("0123456789ab", name="x") is None
    assert jobs.delete("0123456789ab") is False
    assert jobs.list() == []


def test_update_changes_only_given_fields(jobs: Any) -> None:
    job = jobs.create(JOB)
    changed = jobs.update(job["id"], name="Evening news", repeat={"times": 3, "completed": 1}, model=None)
    assert changed == {**job, "name": "Evening news", "repeat": {"times": 3, "completed": 1}, "model": None}
    assert jobs.get(job["id"]) == changed


def test_deleted_job_is_gone(jobs: Any) -> None:
    remaining, deleted = make(jobs, 1), make(jobs, 2)
    assert jobs.delete(deleted) is True
    assert jobs.delete(deleted) is False
    assert ids(jobs.list()) == [remaining]
    assert ids(jobs.due(10.0)) == [remaining]


def test_list_filters_by_owner_and_enabled(jobs: Any) -> None:
    first = make(jobs, 1, owner="a")
    second = make(jobs, 2, owner="b")
    third = make(jobs, 3, owner="a", enabled=False)
    assert set(ids(jobs.list())) == {first, second, third}
    assert set(ids(jobs.list(owner="a"))) == {first, third}
    assert set(ids(jobs.list(include_disabled=False))) == {first, second}
    assert ids(jobs.list(owner="a", include_disabled=False)) == [first]
    assert jobs.list(owner="c") == []


def test_jobs_survive_restart(durable_url: str) -> None:
    with contextlib.closing(open_store(durable_url)) as store:
        job = store.jobs.create(JOB)
    with contextlib.closing(open_store(durable_url)) as store:
        assert store.jobs.list() == [job]


# ---- when their time has come


def test_due_jobs_are_enabled_and_oldest_first(jobs: Any) -> None:
    late, later, future = make(jobs, 20), make(jobs, 10), make(jobs, 30)
    make(jobs, 5, enabled=False)
    make(jobs, 6, next_run_at=None)
    assert ids(jobs.due(20.0)) == [later, late]
    assert ids(jobs.due(9.9)) == []
    assert ids(jobs.due(1000.0)) == [later, late, future]


def test_due_does_not_claim(jobs: Any) -> None:
    name = make(jobs, 1)
    assert ids(jobs.due(5.0)) == ids(jobs.due(5.0)) == [name]
    assert ids(jobs.claim_due(5.0, "me")) == [name]


def test_job_is_claimed_by_one_caller(jobs: Any) -> None:
    names = [make(jobs, number) for number in range(1, 4)]
    claimed = jobs.claim_due(10.0, "a")
    assert ids(claimed) == names
    assert claimed[0]["prompt"] == JOB["prompt"]
    assert jobs.claim_due(10.0, "b") == []
    assert jobs.claim_due(10.0, "a") == []


def test_claim_due_respects_limit(jobs: Any) -> None:
    names = [make(jobs, number) for number in range(1, 16)]
    assert ids(jobs.claim_due(100.0, "a", limit=4)) == names[:4]
    assert ids(jobs.claim_due(100.0, "b")) == names[4:14]
    assert ids(jobs.claim_due(100.0, "c")) == names[14:]


def test_expired_job_claim_can_be_claimed_again(jobs: Any) -> None:
    name = make(jobs, 1)
    assert ids(jobs.claim_due(10.0, "a", ttl=300)) == [name]
    assert jobs.claim_due(309.0, "b") == []
    assert ids(jobs.claim_due(311.0, "b")) == [name]


def test_finished_job_is_due_at_next_run_at(jobs: Any) -> None:
    name = make(jobs, 1)
    jobs.claim_due(10.0, "a")
    jobs.finish(name, next_run_at=50.0, last_run_at=10.0, last_status="ok", last_run_id="run_1")
    assert jobs.claim_due(49.0, "b") == []
    [again] = jobs.claim_due(50.0, "b")
    assert again["id"] == name
    assert (again["last_status"], again["last_run_id"], again["last_run_at"]) == ("ok", "run_1", 10.0)


def test_finished_job_without_new_time_is_due_immediately(jobs: Any) -> None:
    name = make(jobs, 1)
    jobs.claim_due(10.0, "a")
    jobs.finish(name)
    assert ids(jobs.claim_due(10.0, "b")) == [name]


def test_completed_job_is_never_due_again(jobs: Any) -> None:
    name = make(jobs, 1)
    jobs.claim_due(10.0, "a")
    jobs.finish(name, next_run_at=None, enabled=False, state="completed")
    assert jobs.due(1e12) == []
    assert jobs.get(name)["state"] == "completed"


def test_update_keeps_job_claim(jobs: Any) -> None:
    name = make(jobs, 1)
    jobs.claim_due(10.0, "a")
    jobs.update(name, name="other")
    assert jobs.claim_due(11.0, "b") == []


def test_disabled_job_is_not_due_until_enabled(jobs: Any) -> None:
    name = make(jobs, 1)
    jobs.update(name, enabled=False, state="paused", paused_reason="holidays")
    assert jobs.claim_due(10.0, "a") == []
    jobs.update(name, enabled=True)
    assert ids(jobs.claim_due(10.0, "a")) == [name]


def test_concurrent_claims_get_each_job_once(jobs: Any) -> None:
    names = {make(jobs, number) for number in range(1, 41)}

    def take(number: int) -> list[str]:
        job_ids: list[str] = []
        while claimed := jobs.claim_due(100.0, f"thread {number}", limit=3):
            job_ids += ids(claimed)
        return job_ids

    claimed = [name for names_of_one in at_once(8, take) for name in names_of_one]
    assert len(claimed) == 40
    assert set(claimed) == names


def test_job_finish_by_former_holder_is_ignored(store: Store) -> None:
    store.jobs.create({"id": "j", "next_run_at": 1.0})
    assert store.jobs.claim_due(10.0, "a", ttl=5)
    assert store.jobs.claim_due(20.0, "b", ttl=5)
    assert store.jobs.finish("j", holder="a", next_run_at=None) is None
    assert store.jobs.claim_due(21.0, "c", ttl=5) == []
    assert store.jobs.finish("j", holder="b", next_run_at=None) is not None
