"""Clients that leave while the first record of their turn is being made: it has an end, or was never there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hermes.core.spec import RunSpec
from hermes.server import responses
from hermes.server.idempotency import IdempotentExecutor
from support.model_server import Reply
from support.waiting import idle, until

from .conftest import Api, Json


class HeldCall:
    """A method of a store whose first call has done its work and does not return yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        whole: Callable[..., Awaitable[Any]] = getattr(owner, name)

        async def hold(*args: Any, **named: Any) -> Any:
            result = await whole(*args, **named)
            self.reached.set()
            await self.go.wait()
            return result

        monkeypatch.setattr(owner, name, hold)

    async def leave(self, client: asyncio.Task[Any]) -> None:
        """The client is found gone meanwhile."""
        reached = asyncio.create_task(self.reached.wait())
        await asyncio.wait([client, reached], return_when=asyncio.FIRST_COMPLETED)
        assert reached.done(), await client
        client.cancel()
        await idle()
        self.go.set()
        await asyncio.wait([client])


async def unended(api: Api) -> list[Any]:
    return list(await api.app.store.runs.unfinished())


async def test_disconnect_during_run_submission_continues_run(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.model.script = [Reply(text="Hello.")]
    spec, engine = RunSpec("hi", "hall"), api.app.engine
    held_call = HeldCall(monkeypatch, type(api.app.store.runs), "append")
    await held_call.leave(asyncio.create_task(engine.submit(spec)))
    record: Any = await until(lambda: engine.get(spec.run_id), lambda value: value and value.state.ended)
    assert record.state.status == "completed"
    await until(lambda: engine.live(spec.run_id), lambda live: live is None)


@pytest.mark.parametrize("body", [{}, {"background": True}, {"stream": True}, {"stream": True, "background": True}])
@pytest.mark.parametrize("headers", [{}, {"X-Hermes-Detach": "true"}])
async def test_disconnect_during_first_response_store(
    api: Api, monkeypatch: pytest.MonkeyPatch, body: Json, headers: dict[str, str]
) -> None:
    api.model.script = [Reply(text="Hello.")]
    held_call, handling = HeldCall(monkeypatch, type(api.context.stored_responses), "put"), list[asyncio.Task[Any]]()
    prepare = responses.prepare

    async def prepared(*args: Any) -> Any:
        handling.append(asyncio.current_task())  # type: ignore[arg-type]
        return await prepare(*args)

    monkeypatch.setattr(responses, "prepare", prepared)
    asking = asyncio.create_task(
        api.client.post(f"{api.url}/v1/responses", json={"input": "hi", **body}, headers=headers)
    )
    await until(lambda: handling)
    await held_call.leave(handling[0])
    asking.cancel()
    await until(api.context.stored_responses.unfinished, lambda value: not value)
    await until(lambda: unended(api), lambda value: not value)
    if body.get("background") or headers:
        [run] = await api.app.engine.list()
        assert run.state.status == "completed"
        assert (await api.context.stored_responses.get(run.spec.response_id))["response"]["status"] == "completed"


async def test_disconnect_during_idempotency_claim(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.model.script = [Reply(text="Hello.")]
    held_call, handling = HeldCall(monkeypatch, type(api.app.store.idempotency), "claim"), list[asyncio.Task[Any]]()
    whole = IdempotentExecutor.answer

    async def respond(*args: Any) -> Any:
        handling.append(asyncio.current_task())  # type: ignore[arg-type]
        return await whole(*args)

    monkeypatch.setattr(IdempotentExecutor, "answer", respond)
    body = {"messages": [{"role": "user", "content": "hi"}]}

    async def ask() -> tuple[int, str]:
        headers = {"Idempotency-Key": "k"}
        async with api.client.post(f"{api.url}/v1/chat/completions", json=body, headers=headers) as answer:
            return answer.status, (await answer.json())["choices"][0]["message"]["content"]

    asking = asyncio.create_task(ask())
    await until(lambda: handling)
    await held_call.leave(handling[0])
    asking.cancel()
    assert await ask() == (200, "Hello.")
    assert len(await api.app.engine.list()) == 1
