"""What a key may use, and how often, holds for every turn of its owner, whatever began it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hermes.core.events import Event
from hermes.core.spec import RouteChoice, RunSpec
from hermes.guards.secrets import Secrets
from hermes.runs.engine import Refused
from hermes.runs.jobs import spec_of
from hermes.runs.scheduler import Scheduler
from hermes.services.jobs import new_job
from hermes.store.base import Row
from support.model_server import Call, Reply
from support.waiting import until

from .clients import HeldModel, Json, read_error, read_json, tool_names, user
from .conftest import Api, Start
from .test_keys import ALL, BEN, bearer

LIMITED = "sk-limited-0123456789abcdef"
ROUTES = {"fast": {"model": "quick"}, "slow": {"model": "big"}}
ANSWER = Reply(text="Hi.", continues=False, usage={"input": 60, "output": 40})
Begin = Callable[[Api], Awaitable[Any]]


def key(**limits: Any) -> list[Json]:
    return [
        {"name": "limited", "key": LIMITED, "scopes": ALL, **limits},
        {"name": "ben", "key": BEN, "scopes": ALL},
    ]


CEILING: Json = {"toolsets": ["todo", "cronjob", "delegation"], "models": ["fast"]}
MORE: Json = {"headers": bearer(LIMITED)}


async def wait_for_end(api: Api, run_id: str) -> Any:
    async def record() -> Any:
        return await api.app.engine.get(run_id)

    return await until(record, lambda value: value is not None and value.state.ended)


# --- ways to begin a turn --------------------------------------------------------------------------------------------


async def _chat(api: Api) -> None:
    async with api.post("/v1/chat/completions", user("hi", model="fast"), **MORE) as response:
        await read_json(response)


async def _response(api: Api) -> None:
    async with api.post("/v1/responses", {"input": "hi", "model": "fast"}, **MORE) as response:
        await read_json(response)


async def _background(api: Api) -> None:
    body = {"input": "hi", "model": "fast", "background": True}
    async with api.post("/v1/responses", body, **MORE) as response:
        response_id = (await read_json(response))["id"]
    await wait_for_end(api, response_id.replace("resp_", "run_"))


async def _websocket(api: Api) -> None:
    async with api.client.ws_connect(f"{api.url}/v1/responses", **MORE) as socket:
        await socket.send_json({"type": "response.create", "input": "hi", "model": "fast"})
        while (event := await socket.receive_json())["type"] not in ("response.completed", "error"):
            pass
        assert event["type"] == "response.completed", event


async def _session(api: Api) -> None:
    async with api.post("/api/sessions", {"id": "mine", "model": "fast"}, **MORE) as response:
        await read_json(response, 201)
    async with api.post("/api/sessions/mine/chat", {"message": "hi", "model": "fast"}, **MORE) as response:
        await read_json(response)


async def _run(api: Api) -> None:
    async with api.post("/v1/runs", {"input": "hi", "model": "fast"}, **MORE) as response:
        await wait_for_end(api, (await read_json(response, 202))["run_id"])


async def _job(api: Api) -> None:
    body = {"schedule": "1h", "prompt": "hi", "model": "fast", "enabled_toolsets": ["todo", "terminal", "file"]}
    async with api.post("/api/jobs", body, **MORE) as response:
        job = (await read_json(response, 201))["job"]
    assert not {"tool_policy", "allowed_models"} & job.keys()
    async with api.post(f"/api/jobs/{job['id']}/run", **MORE) as response:
        await wait_for_end(api, (await read_json(response, 202))["run_id"])


def _record(**fields: Any) -> Json:
    """A job of the owner's that says nothing of ceilings."""
    job = new_job({"schedule": "every 1h", "prompt": "hi", **fields}, time.time(), "UTC", Secrets())
    return {**job, "owner": "limited", "next_run_at": time.time() - 1}


async def _scheduled(api: Api) -> None:
    job = await api.app.store.jobs.create(_record(model="quick"))
    await Scheduler(api.app.engine, api.app.store.jobs, lambda: 4).look()
    await wait_for_end(api, (await api.app.store.jobs.get(job["id"]))["last_run_id"])


async def _by_cron_tool(api: Api) -> None:
    args = {"action": "create", "schedule": "every 1h", "prompt": "hi", "model": "quick"}
    api.model.script[:0] = [Reply(tool_calls=[Call("cronjob", args)])]
    await _chat(api)
    [job] = await api.app.store.jobs.list()
    assert job["allowed_models"] == ["fast"] and job["tool_policy"] == sorted(CEILING["toolsets"])
    api.model.requests.clear()
    await api.app.engine.run(spec_of(job, time.time()))


async def _delegated(api: Api) -> None:
    api.model.script[:0] = [Reply(tool_calls=[Call("delegate_task", {"goal": "look"})])]
    await _chat(api)
    [child] = await api.app.engine.list(kind="subagent")
    assert child.state.status == "completed" and child.spec.allowed_models == {"fast"}
    assert child.spec.tool_policy == set(CEILING["toolsets"])


async def _resumed(api: Api) -> None:
    """A run that an earlier server has begun, when its owner's key had no ceilings."""
    spec = RunSpec("hi", session_id="cut-off", owner="limited", route=RouteChoice(alias="fast"))
    store = api.app.store
    await store.runs.create(spec)
    data = {"kind": "run", "model": "m", "provider": "p", "user_row": None, "session_id": spec.session_id}
    started = Event(spec.run_id, "run.started", 0, data, 1, time.time())
    row = Row(spec.session_id, "user", "hi", spec.run_id, announced_in=((started, "user_row"),))
    session = {"id": spec.session_id, "source": "api_server", "owner": spec.owner}
    await store.runs.append(spec.run_id, None, [started], [row], session=session)
    await api.app.engine.resume_all()  # unless the server has found it already
    assert (await wait_for_end(api, spec.run_id)).state.status == "completed"


WAYS: dict[str, Begin] = {
    "chat": _chat,
    "response": _response,
    "background": _background,
    "websocket": _websocket,
    "session": _session,
    "run": _run,
    "job": _job,
    "scheduled job": _scheduled,
    "cron tool": _by_cron_tool,
    "delegation": _delegated,
    "recovery": _resumed,
}


@pytest.mark.parametrize("way", WAYS)
async def test_every_turn_respects_toolsets_and_models_of_key(start: Start, way: str) -> None:
    api = await start(*[ANSWER] * 9, keys=key(**CEILING), model_routes=ROUTES)
    await WAYS[way](api)
    assert api.model.requests
    for request in api.model.requests:
        assert request.model == "quick"
        assert set(tool_names(request)) <= {"todo", "cronjob", "delegate_task"}, tool_names(request)
    for record in await api.app.engine.list(owner="limited") if way != "recovery" else ():
        assert record.spec.tool_policy is not None and record.spec.allowed_models == {"fast"}
        assert RunSpec.from_stored(record.spec.stored()) == record.spec


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["slow", None])
async def test_job_with_disallowed_model_is_403(start: Start, model: str | None) -> None:
    api = await start(keys=key(**CEILING), model_routes=ROUTES)
    body = {"schedule": "1h", "prompt": "hi", **({"model": model} if model else {})}
    async with api.post("/api/jobs", body, **MORE) as response:
        await read_error(response, 403, "model_not_allowed", "model")


@pytest.mark.parametrize("model", ["big", None])
async def test_background_turn_with_disallowed_model_fails(start: Start, model: Any) -> None:
    api = await start(keys=key(**CEILING), model_routes=ROUTES)
    spec = spec_of({**_record(model=model), "id": "0" * 12}, time.time())
    await api.app.engine.run(spec)
    state = (await wait_for_end(api, spec.run_id)).state
    assert state.status == "failed" and "fast" in state.error and api.model.requests == []


async def test_cron_tool_rejects_disallowed_model(start: Start) -> None:
    args = {"action": "create", "schedule": "every 1h", "prompt": "hi", "model": "big"}
    api = await start(Reply(tool_calls=[Call("cronjob", args)]), ANSWER, keys=key(**CEILING), model_routes=ROUTES)
    await _chat(api)
    assert "may not be used" in api.model.requests[1].body["messages"][-1]["content"]
    assert await api.app.store.jobs.list() == []


# --- rates -----------------------------------------------------------------------------------------------------------


async def test_websocket_turns_count_against_rate_limit(start: Start) -> None:
    api = await start(*[ANSWER] * 5, keys=key(requests_per_minute=3))
    async with api.client.ws_connect(f"{api.url}/v1/responses", **MORE) as socket:
        ends = []
        for _ in range(3):
            await socket.send_json({"type": "response.create", "input": "hi"})
            while (event := await socket.receive_json())["type"] not in ("response.completed", "error"):
                pass
            ends.append(event)
    assert [event["type"] for event in ends] == ["response.completed", "response.completed", "error"]
    assert (ends[2]["status"], ends[2]["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(api.model.requests) == 2


@pytest.mark.parametrize(
    "limit", [{"requests_per_minute": 1}, {"tokens_per_minute": 50}], ids=lambda limit: next(iter(limit))
)
async def test_job_of_rate_limited_owner_is_postponed(start: Start, limit: Json) -> None:
    api = await start(*[ANSWER] * 5, keys=key(**limit))
    await _chat_of(api)
    job = await api.app.store.jobs.create(_record())
    await Scheduler(api.app.engine, api.app.store.jobs, lambda: 4).look()
    after = await api.app.store.jobs.get(job["id"])
    assert after["last_run_id"] is None and after["next_run_at"] == job["next_run_at"]
    assert len(api.model.requests) == 1 and await api.app.engine.list(kind="job") == []


@pytest.mark.parametrize("limit", [{"requests_per_minute": 2}, {"requests_per_minute": 1}], ids=["within", "over"])
async def test_subagent_counts_against_rate_limit(start: Start, limit: Json) -> None:
    call = Call("delegate_task", {"goal": "look"})
    api = await start(Reply(tool_calls=[call]), *[ANSWER] * 5, keys=key(**limit))
    await _chat_of(api)
    children = await api.app.engine.list(kind="subagent")
    last = api.model.requests[-1].body["messages"][-1]["content"]
    assert len(children) == limit["requests_per_minute"] - 1
    assert ("requests per minute" in last) is (not children)


async def test_subagent_tokens_are_counted_once(start: Start) -> None:
    call = Call("delegate_task", {"goal": "look"})
    first = Reply(tool_calls=[call], usage={"input": 60, "output": 40})
    api = await start(first, *[ANSWER] * 5, keys=key(tokens_per_minute=1000))
    bucket = api.context.keyring.bucket("limited", "tokens")
    assert bucket is not None
    now = bucket._clock()
    bucket._clock = lambda: now  # no time passes: nothing is filled up again
    await _chat_of(api)
    assert len(api.model.requests) == 3 and bucket.left == 1000 - 300


async def test_http_turn_is_rate_counted_once(start: Start) -> None:
    api = await start(*[ANSWER] * 5, keys=key(requests_per_minute=2))
    for _ in range(2):
        await _chat_of(api)
    async with api.post("/v1/chat/completions", user("hi"), **MORE) as response:
        await read_error(response, 429, "rate_limit_exceeded")
    async with api.post("/v1/chat/completions", user("hi"), headers=bearer(BEN)) as response:
        await read_json(response)


async def test_key_concurrency_limit_applies_to_jobs(start: Start) -> None:
    async with HeldModel(Reply(text="Hi.")) as held_model:
        api = await start(settings=held_model.settings, keys=key(max_concurrent=1))
        async with api.post("/v1/runs", {"input": "hi"}, **MORE) as response:
            await read_json(response, 202)
        await held_model.wait_for_request()
        with pytest.raises(Refused) as refusal:
            await api.app.engine.submit(spec_of({**_record(), "id": "0" * 12}, time.time()))
        assert refusal.value.code == "rate_limit_exceeded"
        held_model.release_all()


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", {"input": "hi", "background": True}), ("/v1/runs", {"input": "hi"})]
)
async def test_key_concurrency_limit_applies_to_simultaneous_submissions(start: Start, path: str, body: Json) -> None:
    async with HeldModel(Reply(text="Hi.")) as held_model:
        api = await start(settings=held_model.settings, keys=key(max_concurrent=1))

        async def status() -> int:
            async with api.post(path, body, **MORE) as response:
                return response.status

        results = await asyncio.gather(*(status() for _ in range(4)))
        assert sorted(results)[1:] == [429] * 3
        held_model.release_all()

        async def wait_for_end() -> tuple[list[str], int]:
            async with api.get("/v1/runs", **MORE) as response:
                return [run["status"] for run in (await read_json(response))["data"]], api.app.engine.active

        await until(wait_for_end, lambda value: value == (["completed"], 0))


async def _chat_of(api: Api) -> None:
    async with api.post("/v1/chat/completions", user("hi"), **MORE) as response:
        await read_json(response)
