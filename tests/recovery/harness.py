"""An app on a home of its own, many turns at once, and the invariants that every turn must keep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hermes.app import App
from hermes.core.events import FINAL, Event
from hermes.core.home import Home
from hermes.core.spec import RouteChoice, RunSpec
from hermes.runs.engine import Result
from hermes.settings import config

BASES = {"chat_completions": "/v1", "codex_responses": "/v1", "anthropic_messages": ""}
PROTOCOLS = {"chat_completions": "chat", "codex_responses": "responses", "anthropic_messages": "anthropic"}


@asynccontextmanager
async def running_app(folder: Path, settings: str = "") -> AsyncIterator[App]:
    """An app without random delays, closed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(
        "agent: {delta_window_ms: 0}\nauxiliary: {title_generation: {enabled: false}}\n" + settings
    )
    home = Home(folder)
    app = App(home, config.load(home, environ={}))
    app.services = replace(app.services, jitter=lambda: 0.0)
    try:
        yield app
    finally:
        await app.close()


async def turn(app: App, url: str, api_mode: str, question: str, **fields: Any) -> tuple[Result, list[Event]]:
    """One turn and its log."""
    route = RouteChoice(model="m", base_url=url + BASES[api_mode], api_mode=api_mode, api_key="key-12345678")
    fields.setdefault("toolsets", frozenset({"todo"}))
    spec = RunSpec(
        question, session_id=question, kind="cli", source="cli", route=route, history=[], persist=False, **fields
    )
    live = await app.engine.start(spec)
    assert live.task is not None
    events = [event async for event in app.engine.subscribe(spec.run_id)]
    return await live.task, events


async def at_most(count: int, jobs: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Run all jobs, at most that many at a time; stop at the first failure."""
    queue = iter(jobs)

    async def worker() -> None:
        for job in queue:
            await job()

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(worker())


def check_log(events: list[Event]) -> dict[str, str]:
    """Check the invariants of a log (order, one final event, append-only texts); returns the texts by message."""
    assert [e.seq for e in events] == sorted({e.seq for e in events})
    assert [e.type for e in events if e.type in FINAL] == [events[-1].type]
    texts: dict[str, str] = {}
    for event in events:
        if event.type == "text.delta":
            known = texts.setdefault(event.data["message_id"], "")
            assert event.data["offset"] == len(known), "delivered text was rewritten or skipped"
            texts[event.data["message_id"]] = known + event.data["text"]
        if event.type == "message.completed":
            assert event.data["text_length"] == len(texts.get(event.data["message_id"], ""))
    return texts
