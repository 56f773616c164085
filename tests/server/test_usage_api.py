"""Usage: what turns cost and how long they took, by day, owner and model, and only of those whom a key sees."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from hermes.services.usage import BOUNDS_S, report
from hermes.store.base import StoreError
from hermes.store.usage_days import DAY_S, UsageKey
from support.model_server import Call, Reply

from .clients import Json, read_error, read_json, user
from .conftest import KEY, Api, Start
from .test_keys import ANNA, BEN, KEYS, bearer

USAGE = "/api/usage"
TODAY = int(time.time() // DAY_S)
TODO = {"todos": [{"id": "1", "content": "milk", "status": "pending"}]}


async def usage_of(api: Api, query: str = "", key: str = KEY) -> Json:
    async with api.get(USAGE + query, headers=bearer(key)) as response:
        return await read_json(response)


async def test_turns_are_counted(start: Start) -> None:
    api = await start(Reply(text="Let me see.", tool_calls=[Call("todo", TODO)]), Reply(text="Done."))
    async with api.post("/v1/chat/completions", user("hi")) as response:
        await read_json(response)
    api.model.script = [Reply(status=401, error={"error": {"message": "no"}})]
    async with api.post("/v1/chat/completions", user("again")) as response:
        assert response.status == 502
    usage = await usage_of(api, "?group_by=day,model,provider,owner")
    assert usage["last_day"] == datetime.now(UTC).date().isoformat()
    [row] = usage["data"]
    assert (row["day"], row["owner"], row["model"]) == (usage["last_day"], "default", "test-model")
    assert (row["turns"], row["failed"], row["cancelled"], row["calls"]) == (2, 1, 0, 2)
    assert (row["input_tokens"], row["output_tokens"], row["cost_usd"]) == (20, 10, None)
    assert (row["tool_calls"], row["tool_errors"]) == (1, 0)
    assert row["turn_seconds"] > 0 and row["tool_seconds"] >= 0
    assert 0 < row["first_token_p50"] <= row["first_token_p95"] and row["first_token_mean"] >= 0
    assert usage["total"] == {name: row[name] for name in usage["total"]}


async def test_each_owner_sees_its_own_and_an_admin_all(start: Start) -> None:
    api = await start(*[Reply(text="Hi.", continues=False)] * 3, keys=KEYS)
    for key in (ANNA, ANNA, BEN):
        async with api.post("/v1/chat/completions", user("hi"), headers=bearer(key)) as response:
            await read_json(response)
    everybody = await usage_of(api, "?group_by=owner")
    assert {row["owner"]: row["turns"] for row in everybody["data"]} == {"anna": 2, "ben": 1}
    assert everybody["total"]["turns"] == 3
    for key, owner, turns in ((ANNA, "anna", 2), (BEN, "ben", 1)):
        usage = await usage_of(api, "?group_by=owner,model", key)
        assert [(row["owner"], row["turns"]) for row in usage["data"]] == [(owner, turns)]
        assert usage["total"]["turns"] == turns


async def test_days_are_bounded(api: Api) -> None:
    for days_ago in (0, 1, 29, 30, 399):
        api.app.store.blocking.usage_days.add({UsageKey(TODAY - days_ago, "default", "p", "m"): {"turns": 1.0}})
    for query, turns in (("", 3), ("?days=1", 1), ("?days=2", 2), ("?days=400", 5)):
        assert (await usage_of(api, query))["total"]["turns"] == turns
    usage = await usage_of(api, "?days=2")
    assert len(usage["data"]) == 2 and usage["data"][0]["day"] == usage["first_day"] < usage["last_day"]
    assert set(usage["data"][0]) & {"owner", "model", "provider"} == set()
    assert (await usage_of(api, "?group_by=model"))["data"][0]["model"] == "m"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?days=0", "days"),
        ("?days=401", "days"),
        ("?days=x", "days"),
        ("?group_by=colour", "group_by"),
        ("?group_by=day;drop", "group_by"),
        ("?group_by=day,,model", "group_by"),
    ],
)
async def test_refused_query(api: Api, query: str, param: str) -> None:
    async with api.get(USAGE + query) as response:
        await read_error(response, 400, "invalid_value", param)


async def test_turns_that_are_not_stored_are_counted_by_a_server_only(api: Api) -> None:
    api.model.script = [Reply(text="Hi.", continues=False)] * 2
    for serving in (False, True):
        api.app.usage.with_unstored_runs = serving
        async with api.post("/v1/chat/completions", user("hi", store=False)) as response:
            await read_json(response)
        assert (await usage_of(api))["total"]["turns"] == int(serving)


async def test_usage_is_kept_while_the_store_fails(api: Api, monkeypatch: Any) -> None:
    async def fail(*_: Any) -> None:
        raise StoreError("busy")

    api.model.script = [Reply(text="Hi.")]
    async with api.post("/v1/chat/completions", user("hi")) as response:
        await read_json(response)
    with monkeypatch.context() as broken:
        broken.setattr(api.app.usage._days, "add", fail, raising=False)
        await api.app.usage.write()
    assert (await usage_of(api))["total"]["turns"] == 1


def test_report_of_times() -> None:
    assert report({})["first_token_p50"] is None and report({})["cost_usd"] is None
    fast = report({"first_token_le_0.2": 10, "first_token_seconds": 1.5})
    assert (fast["first_token_mean"], fast["first_token_p50"]) == (0.15, 0.15)
    assert 0.19 <= fast["first_token_p95"] <= 0.2
    slow = report({"first_token_le_0.2": 1, "first_token_le_inf": 9, "first_token_seconds": 1000})
    assert slow["first_token_p50"] == slow["first_token_p95"] == BOUNDS_S[-1]
    assert report({"cost_usd": 0.1234567})["cost_usd"] == 0.123457
