"""What the events of a run tell of its tools: output while they run, under its label, and no secrets."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hermes.guards.secrets import MARK
from support.model_server import Call, ModelServer, Protocol, Reply

from .harness import KEY, PROTOCOLS, CompletedRun, Harness, Json, Running, tool

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


# ---- output


class Talking:
    """A blocking tool that says two lines, on two streams, and then waits to be let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def run(self, ctx: Any, _: Json) -> Json:
        ctx.emit("stdout", "made\n")
        ctx.emit("stderr", "warned\n")
        self.go.wait(600)
        ctx.emit("stdout", "done\n")
        return {"ok": True}


@pytest.fixture
def talking(harness: Harness, server: ModelServer) -> Iterator[Talking]:
    tool_calls = Talking()
    harness.offer(tool("talk", tool_calls.run))
    server.script = [Reply(tool_calls=[Call("talk")]), Reply(text="Done.")]
    yield tool_calls
    tool_calls.go.set()


def outputs(events: list[Json]) -> list[tuple[str, int, str]]:
    return [(e["stream"], e["offset"], e["text"]) for e in events if e["type"] == "tool.output"]


async def test_blocking_tool_output_is_streamed_with_labels(
    harness: Harness, server: ModelServer, talking: Talking
) -> None:
    running = await harness.begin(harness.spec(server))
    await running.until(lambda events: len(outputs(events)) == 2)
    talking.go.set()
    run = await running.end()
    assert outputs(run.events) == [("stdout", 0, "made\n"), ("stderr", 0, "warned\n"), ("stdout", 5, "done\n")]


async def test_late_subscriber_sees_blocking_tool_output_with_labels(
    harness: Harness, server: ModelServer, talking: Talking
) -> None:
    early = await harness.begin(harness.spec(server, persist=True))
    await early.until(lambda events: len(outputs(events)) == 2)
    late = Running(harness, early._live)
    await late.until(lambda events: len(outputs(events)) == 2)
    talking.go.set()
    run = await early.end()
    assert outputs((await late.end()).events) == outputs(run.events)


# ---- secrets


def leaks(run: CompletedRun) -> list[str]:
    return [event["type"] for event in run.events if KEY in json.dumps(event)]


@each_protocol
async def test_key_in_tool_arguments_is_redacted_in_events(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(tool_calls=[Call("look", {"a": f"use {KEY} here"})]), Reply(text="Done.")]
    run = await harness.run(server, protocol=protocol)
    assert leaks(run) == []
    (call,) = run.events_of("message.completed")[0]["tool_calls"]
    assert json.loads(call["arguments"]) == {"a": f"use {MARK} here"}


async def test_key_in_tool_arguments_is_redacted_in_replay(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(tool_calls=[Call("look", {"a": KEY})]), Reply(text="Done.")]
    run = await harness.run(server, persist=True)
    again = [event.as_dict() async for event in harness.engine.subscribe(run.spec.run_id)]
    assert KEY not in json.dumps(again)


@pytest.mark.parametrize("blocking", [False, True], ids=["coroutine", "blocking"])
async def test_key_in_tool_exception_is_redacted_in_log(
    harness: Harness, server: ModelServer, caplog: pytest.LogCaptureFixture, blocking: bool
) -> None:
    caplog.set_level(logging.DEBUG)

    def fail(_: Any, __: Json) -> Json:
        raise ValueError(f"could not use {KEY}")

    async def fail_softly(ctx: Any, args: Json) -> Json:
        return fail(ctx, args)

    harness.offer(tool("look", fail if blocking else fail_softly))
    server.script = [Reply(tool_calls=[Call("look")]), Reply(text="Done.")]
    run = await harness.run(server)
    assert run.result["completed"] is True
    assert "look" in caplog.text
    assert "could not use" in caplog.text
    assert KEY not in caplog.text
    assert not any(KEY in str(record.exc_info) + (record.exc_text or "") for record in caplog.records)
    assert leaks(run) == []
