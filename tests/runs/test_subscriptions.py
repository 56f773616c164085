"""The log of a run: whoever reads it, from wherever and however slowly, reads the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent.conftest import MakeHarness
from agent.harness import LIVE_ONLY, PROTOCOLS, Harness, Json, check_laws, joined, rebuilt, tool
from hermes.core.events import VOLATILE, Event, fold
from hermes.core.limits import QUEUE_BYTES_MAX, QUEUE_EVENTS_MAX
from hermes.runs.journal import JournalReader
from hermes.tools import clarify
from support.model_server import Call, ModelServer, Protocol, Reply, Request
from support.waiting import DEADLINE_S, until

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
STORY = [f"word {n}, " for n in range(40)]


def talkative(harness: Harness) -> None:
    async def talk(ctx: Any, _: Any) -> Json:
        ctx.emit("stdout", "working\n")
        await asyncio.sleep(0.03)  # there are readers that join meanwhile, and see the same
        ctx.emit("stdout", "still working\n")
        return {"ok": True}

    harness.offer(tool("talk", talk))


def rich_script() -> list[Reply]:
    """A turn with all that a log can hold: thought, text, a call with output, and text again."""
    return [
        Reply(reasoning=["first ", "then"], text=STORY, tool_calls=[Call("talk")], gap_s=0.002),
        Reply(text=["Grüße ", "🙂 ", "日本語"], gap_s=0.03),
    ]


def hold_first_answer(server: ModelServer, *replies: Reply) -> asyncio.Event:
    """Let the model wait for the event before it begins. Who reads by then is shown all that is shown live only."""
    go_on, remaining = asyncio.Event(), list(replies)

    async def answer(_: Request) -> Reply:
        await go_on.wait()
        return remaining.pop(0)

    server.handler = answer
    return go_on


async def read(harness: Harness, run_id: str, after: int = 0) -> list[Json]:
    async with asyncio.timeout(DEADLINE_S):
        return [event.as_dict() async for event in harness.engine.subscribe(run_id, after)]


def durable_events(events: list[Json]) -> list[Json]:
    return [event for event in events if event["type"] not in LIVE_ONLY]


async def finished(harness: Harness, server: ModelServer, protocol: Protocol = "chat") -> tuple[str, list[Json]]:
    """A rich run that has ended, with what a reader from its first moment saw."""
    talkative(harness)
    go_on = hold_first_answer(server, *rich_script())
    running = await harness.begin(harness.spec(server, protocol=protocol, persist=True))
    await joined(harness.engine.log, running.run_id)
    go_on.set()
    run = await running.end()
    assert {"reasoning.delta", "tool.output", "tool.drafted", "text.delta"} <= set(run.types)
    return running.run_id, run.events


# ---- many readers


async def test_two_subscribers_see_same_events(harness: Harness, server: ModelServer) -> None:
    talkative(harness)
    go_on = hold_first_answer(server, *rich_script())
    spec = harness.spec(server)
    live = await harness.engine.start(spec)
    assert live.task is not None
    reading = [asyncio.create_task(read(harness, spec.run_id)) for _ in range(2)]
    await joined(harness.engine.log, spec.run_id, 2)
    go_on.set()
    result, two, _ = await asyncio.gather(*reading, live.task)
    assert result == two
    check_laws(result)


@pytest.mark.parametrize(
    "moment", ["reasoning.delta", "text.delta", "message.completed", "tool.started", "tool.finished"]
)
async def test_late_subscriber_sees_all_events(harness: Harness, server: ModelServer, moment: str) -> None:
    talkative(harness)
    go_on = hold_first_answer(server, *rich_script())
    running = await harness.begin(harness.spec(server, persist=True))
    await joined(harness.engine.log, running.run_id)
    go_on.set()
    await running.wait_for(moment)
    late = await read(harness, running.run_id)
    run = await running.end()
    assert durable_events(late) == durable_events(run.events)
    assert {event["seq"] for event in late} <= {event["seq"] for event in run.events}
    check_laws(late)


async def test_subscriber_can_join_mid_message_and_resume_from_any_seq(
    make_harness: MakeHarness, server: ModelServer
) -> None:
    harness = make_harness({"agent": {"delta_window_ms": 0}})  # each piece is an event
    server.script = [Reply(text=STORY, gap_s=0.004)]
    running = await harness.begin(harness.spec(server, persist=True))
    readers: list[asyncio.Task[list[Json]]] = []
    for count in range(2, 9):
        events = await running.until(lambda value, n=count: len(value) >= n and list(value))
        readers.append(asyncio.create_task(read(harness, running.run_id, events[-1]["seq"])))
    run = await running.end()
    for reader in readers:
        read_events = await reader
        assert read_events == [event for event in run.events if event["seq"] >= read_events[0]["seq"]]
        assert read_events[0]["seq"] == next(e["seq"] for e in run.events if e["seq"] >= read_events[0]["seq"])


@each_protocol
async def test_replay_from_every_seq_is_identical(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    run_id, events = await finished(harness, server, protocol)
    for number in range(events[-1]["seq"]):
        wanted = [event for event in durable_events(events) if event["seq"] > number]
        assert await read(harness, run_id, number) == wanted, number


async def test_subscribe_from_last_seq_of_ended_run_ends_immediately(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    spec = harness.spec(server, persist=True)
    run = await harness.carry_out(spec)
    async with asyncio.timeout(DEADLINE_S):
        assert [event async for event in harness.engine.subscribe(spec.run_id, run.final["seq"])] == []


async def test_text_rebuilt_from_any_seq_is_complete(harness: Harness, server: ModelServer) -> None:
    run_id, events = await finished(harness, server)
    whole = rebuilt(events)
    for at, event in enumerate(events[:-1]):
        again = [*events[: at + 1], *await read(harness, run_id, event["seq"])]
        assert rebuilt(again) == whole
        # Applying a piece twice changes nothing.
        assert rebuilt([*events[: at + 1], *await read(harness, run_id, 0)]) == whole


async def test_tool_output_is_not_replayed_after_call_finished(harness: Harness, server: ModelServer) -> None:
    run_id, events = await finished(harness, server)
    assert "".join(e["text"] for e in events if e["type"] == "tool.output") == "working\nstill working\n"
    assert [event for event in await read(harness, run_id) if event["type"] in LIVE_ONLY] == []


async def test_tool_output_of_running_call_is_replayed(harness: Harness, server: ModelServer) -> None:
    printed, go_on = asyncio.Event(), asyncio.Event()

    async def talk(ctx: Any, _: Any) -> Json:
        ctx.emit("stdout", "working\n")
        printed.set()
        await go_on.wait()
        return {"ok": True}

    harness.offer(tool("talk", talk))
    server.script = [Reply(tool_calls=[Call("talk")]), Reply(text="Done.")]
    running = await harness.begin(harness.spec(server, persist=True))
    await printed.wait()
    late: list[Json] = []

    async def read_late() -> None:
        async for event in harness.engine.subscribe(running.run_id):
            late.append(event.as_dict())  # noqa: PERF401  (it is looked at meanwhile)

    reading = asyncio.create_task(read_late())
    await running.wait_for("tool.output")
    await until(lambda: any(event["type"] == "tool.output" for event in late))
    go_on.set()
    run = await running.end()
    async with asyncio.timeout(DEADLINE_S):
        await reading
    assert [e for e in late if e["type"] == "tool.output"] == run.events_of("tool.output")


# ---- slow readers


async def slow(events: AsyncIterator[Event], run: asyncio.Task[Any]) -> list[Json]:
    """Take one event, then nothing until the run is over, then the rest."""
    observed = [(await anext(events)).as_dict()]
    await run
    async with asyncio.timeout(DEADLINE_S):
        return [*observed, *[event.as_dict() async for event in events]]


@pytest.mark.parametrize(("count", "size"), [(3000, 4), (300, 4000)], ids=["many events", "many bytes"])
async def test_overflowing_subscriber_catches_up_without_loss(
    make_harness: MakeHarness, server: ModelServer, count: int, size: int
) -> None:
    harness = make_harness({"agent": {"delta_window_ms": 0}})
    server.script = [Reply(text=[f"{n:0{size}d}" for n in range(count)])]
    spec = harness.spec(server, persist=True)
    live = await harness.engine.start(spec)
    assert live.task is not None
    quick = asyncio.create_task(read(harness, spec.run_id))
    events = await slow(harness.engine.subscribe(spec.run_id).__aiter__(), live.task)
    assert len(events) > QUEUE_EVENTS_MAX or sum(len(event.get("text", "")) for event in events) > QUEUE_BYTES_MAX
    assert events == await quick
    assert rebuilt(events) == {events[-1]["message_id"]: "".join(f"{n:0{size}d}" for n in range(count))}


async def test_sink_delivers_each_event_once_in_order(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"agent": {"delta_window_ms": 0}})
    go_on = hold_first_answer(server, Reply(text=[f"{n} " for n in range(600)]))
    spec = harness.spec(server, persist=True)
    await harness.engine.start(spec)
    seqs: list[int] = []
    delivered_seq: list[int] = []

    def sink(event: Event) -> bool:
        if event.seq % 50 == 0 or event.type != "text.delta":
            return False
        seqs.append(event.seq)
        delivered_seq.append(event.seq)
        return True

    async def take() -> None:
        async for batch in harness.engine.batches(spec.run_id, 0, sink):
            seqs.extend(event.seq for event in batch)

    taking = asyncio.create_task(take())
    await joined(harness.engine.log, spec.run_id)
    go_on.set()
    await taking
    assert seqs == list(range(1, len(seqs) + 1))
    assert len(seqs) > 600 and delivered_seq


async def test_stalled_subscriber_does_not_block_others(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"agent": {"delta_window_ms": 0}})
    server.script = [Reply(text=[f"{n} " for n in range(2000)])]
    spec = harness.spec(server, persist=True)
    live = await harness.engine.start(spec)
    stuck = harness.engine.subscribe(spec.run_id).__aiter__()
    await anext(stuck)
    assert live.task is not None
    async with asyncio.timeout(DEADLINE_S):
        events = await read(harness, spec.run_id)
        await live.task
    assert events[-1]["type"] == "run.completed"
    await stuck.aclose()  # type: ignore[attr-defined]


async def test_leaving_subscriber_does_not_affect_others(harness: Harness, server: ModelServer) -> None:
    talkative(harness)
    server.script = rich_script()
    running = await harness.begin(harness.spec(server))
    leaving = harness.engine.subscribe(running.run_id).__aiter__()
    for _ in range(4):
        await anext(leaving)
    await leaving.aclose()  # type: ignore[attr-defined]
    run = await running.end()
    assert run.text().endswith("日本語")


# ---- runs that keep nothing


async def test_unpersisted_run_is_gone_after_end(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    spec = harness.spec(server, persist=False)
    await harness.engine.run(spec)
    assert await harness.engine.get(spec.run_id) is None
    assert await read(harness, spec.run_id) == []
    assert await harness.app.store.sessions.get_session(spec.session_id) is None
    assert await harness.rows(spec.session_id) == []


async def test_unpersisted_run_can_be_read_to_end_by_subscriber(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    spec = harness.spec(server, persist=False)
    live = await harness.engine.start(spec)
    assert live.task is not None
    events = await slow(harness.engine.subscribe(spec.run_id).__aiter__(), live.task)
    assert [event["type"] for event in events][-1] == "run.completed"
    assert await harness.engine.get(spec.run_id) is None


async def test_persisted_run_can_be_replayed_later(harness: Harness, server: ModelServer) -> None:
    run_id, events = await finished(harness, server)
    record = await harness.engine.get(run_id)
    assert record is not None
    assert record.state.status == "completed"
    assert await read(harness, run_id) == durable_events(events)


# ---- status

NOTHING: Json = {"usage": {}, "steps": 0, "partial_row": None, "text_length": 0}
STARTED = ("run.started", {"model": "m", "provider": "p"})
STATES = [
    ("queued", [("run.queued", {})]),
    ("running", [("run.queued", {}), STARTED]),
    ("running", [STARTED, ("model.started", {})]),
    ("waiting_for_approval", [STARTED, ("approval.requested", {"approval_id": "a"})]),
    ("running", [STARTED, ("approval.requested", {"approval_id": "a"}), ("approval.resolved", {"approval_id": "a"})]),
    ("waiting_for_input", [STARTED, ("clarify.requested", {"request_id": "r"})]),
    ("running", [STARTED, ("clarify.requested", {"request_id": "r"}), ("clarify.resolved", {"request_id": "r"})]),
    ("stopping", [STARTED, ("control.received", {"control_id": "c", "control": "interrupt"})]),
    ("stopping", [STARTED, ("control.received", {"control_id": "c", "control": "cancel"})]),
    ("running", [STARTED, ("control.received", {"control_id": "c", "control": "steer"})]),
    ("completed", [STARTED, ("run.completed", NOTHING)]),
    ("failed", [STARTED, ("run.failed", {**NOTHING, "failure": "auth", "error": "no"})]),
    (
        "cancelled",
        [STARTED, ("control.received", {"control_id": "c", "control": "cancel"}), ("run.cancelled", NOTHING)],
    ),
    ("interrupted", [STARTED, ("run.interrupted", {})]),
    ("running", [STARTED, ("run.interrupted", {}), ("run.resumed", {})]),
]


@pytest.mark.parametrize(("status", "events"), STATES, ids=lambda value: value if isinstance(value, str) else "")
def test_status_is_fold_of_log(status: str, events: list[tuple[str, Json]]) -> None:
    log = [Event("run_1", kind, data=data, seq=n, ts=float(n)) for n, (kind, data) in enumerate(events, 1)]
    assert fold(log).status == status


async def test_stored_status_follows_log(harness: Harness, server: ModelServer) -> None:
    harness.offer(clarify.TOOL)
    server.script = [Reply(tool_calls=[Call("clarify", {"question": "Which?"})]), Reply(text=["a", "b"], gap_s=600)]
    running = await harness.begin(harness.spec(server, persist=True, answerable=True))

    async def status() -> str:
        record = await harness.engine.get(running.run_id)
        assert record is not None
        return record.state.status

    event = await running.wait_for("clarify.requested")
    assert await status() == "waiting_for_input"
    await running.control("answer", id=event["request_id"], answer="This.")
    await running.wait_for("clarify.resolved")
    assert await status() == "running"
    await running.wait_for("text.delta")
    await running.control("interrupt")
    await running.end()
    assert await status() == "cancelled"
    record = await harness.engine.get(running.run_id)
    assert record is not None
    assert (record.state.last_event, record.state.last_seq) == ("run.cancelled", running.events[-1]["seq"])


# ---- durability


async def test_durable_event_is_stored_before_delivery(harness: Harness, server: ModelServer) -> None:
    talkative(harness)
    server.script = rich_script()
    spec = harness.spec(server, persist=True)
    await harness.engine.start(spec)
    async for event in harness.engine.subscribe(spec.run_id):
        if event.type not in VOLATILE:
            stored = await harness.app.store.runs.read(spec.run_id, event.seq - 1, 1)
            assert [event.as_dict() for event in stored] == [event.as_dict()]


async def test_delivered_text_is_in_journal(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]
    running = await harness.begin(harness.spec(server, persist=True))
    delta = await running.wait_for("text.delta")
    tails = JournalReader(harness.app.home.journal).tails(running.run_id)
    stored = await harness.app.store.runs.read(running.run_id, delta["seq"] - 1, 10, tails=tails)
    assert [event.as_dict() for event in stored] == [delta]
    await running.control("interrupt")
    await running.end()


async def test_message_text_is_stored_once(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text=["a unique ", "needle"], reasoning="a hidden pin")]
    spec = harness.spec(server, persist=True)
    run = await harness.carry_out(spec)
    durable = [event for event in run.events if event["type"] not in VOLATILE]
    assert "needle" not in str(durable)
    assert "pin" not in str(durable)
    assert run.event("message.completed")["cuts"]
    assert run.event("reasoning.completed")["cuts"]
