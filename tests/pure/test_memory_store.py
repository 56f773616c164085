"""The stores in memory: transcripts, logs and leases as every store keeps them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hermes.runs.events import Cuts, Event
from hermes.runs.spec import RunSpec
from hermes.store import memory
from hermes.store.base import LeaseLost, Partial, Row, SessionRecord
from hermes.store.memory import MemoryStore

SPEC = RunSpec("hello", "s1", run_id="run_1")
STARTED = {"model": "m", "provider": "p"}


def event(type_: str, seq: int, **data: Any) -> Event:
    return Event("run_1", type_, 0, data, seq, float(seq))


@pytest.fixture
async def store() -> MemoryStore:
    made = MemoryStore()
    await made.runs.create(SPEC)
    opening = event("run.started", 1, **STARTED)
    await made.runs.append("run_1", None, [opening], session=SessionRecord("s1", "cli", title=None))
    return made


async def roles(store: MemoryStore, session_id: str = "s1") -> list[tuple[str, Any]]:
    return [(row.role, row.content) for row in await store.sessions.messages(session_id)]


# ---- transcripts


async def test_rows_get_growing_ids_and_tell_their_event(store: MemoryStore) -> None:
    done = event("message.completed", 2, message_id="m")
    rows = [Row("s1", "user", "hi"), Row("s1", "assistant", "hello", told=((done, "row"),))]
    await store.runs.append("run_1", None, [done], rows)
    assert rows[0].id is not None and rows[1].id is not None and rows[0].id < rows[1].id
    assert done.data["row"] == rows[1].id
    assert await store.runs.row("run_1", rows[1].id) is rows[1]
    assert await roles(store) == [("user", "hi"), ("assistant", "hello")]


async def test_a_row_may_be_told_in_several_events_under_names_of_their_own(store: MemoryStore) -> None:
    done, failed = event("message.completed", 2, message_id="m"), event("run.failed", 3)
    row = Row("s1", "assistant", "x", told=((done, "row"), (failed, "partial_row")))
    await store.runs.append("run_1", None, [done, failed], [row])
    assert done.data["row"] == failed.data["partial_row"] == row.id


async def test_results_are_read_in_the_order_of_their_calls(store: MemoryStore) -> None:
    asked = Row("s1", "assistant", "", tool_calls=[{"id": i} for i in ("a", "b", "c")])
    late = [Row("s1", "tool", i, tool_call_id=i) for i in ("c", "a", "b")]
    again = [Row("s1", "assistant", "", tool_calls=[{"id": "d"}]), Row("s1", "tool", "d", tool_call_id="d")]
    await store.runs.append("run_1", None, [], [asked, *late, *again, Row("s1", "user", "next")])
    assert [content for _, content in await roles(store)] == ["", "a", "b", "c", "", "d", "next"]


async def test_replaced_rows_are_archived_not_lost(store: MemoryStore) -> None:
    old = [Row("s1", "user", "old"), Row("s1", "assistant", "older")]
    await store.runs.append("run_1", None, [], old)
    await store.runs.append("run_1", None, [], [Row("s1", "user", "summary")], replaces=True)
    assert await roles(store) == [("user", "summary")]
    assert all(row.compacted and not row.active for row in old)
    assert await store.runs.row("run_1", old[0].id or 0) is old[0]


async def test_words_that_stand_for_a_row_before_the_model(store: MemoryStore) -> None:
    row = Row("s1", "user", "too much")
    await store.runs.append("run_1", None, [], [row])
    await store.runs.append("run_1", None, [], annotate=(row.id or 0, "[left out]"))
    assert row.as_message() == {"role": "user", "content": "[left out]"}
    assert await roles(store) == [("user", "too much")]


async def test_a_session_is_made_once_and_its_empty_fields_are_filled(store: MemoryStore) -> None:
    later = SessionRecord("s1", "api_server", model="m2", instructions="be kind", session_key="k")
    await store.runs.append("run_1", None, [], session=later)
    known = await store.sessions.get("s1")
    assert known is not None
    assert (known.source, known.model, known.instructions, known.session_key) == ("cli", "m2", "be kind", "k")
    await store.runs.append("run_1", None, [], session=SessionRecord("s1", "cli", model="m3"))
    assert known.model == "m2"
    assert await store.sessions.get("unknown") is None


async def test_a_title_is_set_only_where_there_is_none(store: MemoryStore) -> None:
    await store.sessions.set_auto_title_if_empty("s1", "First")
    await store.sessions.set_auto_title_if_empty("s1", "Second")
    await store.sessions.set_auto_title_if_empty("unknown", "x")
    known = await store.sessions.get("s1")
    assert known is not None and known.title == "First"


async def test_usage_is_counted_by_model_and_task(store: MemoryStore) -> None:
    usage = {"model": "m", "provider": "p", "task": "", "input_tokens": 10, "output_tokens": None}
    for seq, task in ((2, ""), (3, ""), (4, "title_generation")):
        await store.runs.append("run_1", None, [event("usage", seq, **{**usage, "task": task})])
    known = await store.sessions.get("s1")
    assert known is not None
    assert known.counts == {"input_tokens": 20, "output_tokens": 0, "api_call_count": 2}
    assert known.usage_by_model["m", "p", "title_generation"]["input_tokens"] == 10


# ---- logs


async def test_a_log_is_read_from_anywhere_in_pages(store: MemoryStore) -> None:
    await store.runs.append("run_1", None, [event("notice", seq) for seq in range(2, 8)])
    assert [e.seq for e in await store.runs.read("run_1", 0, 100)] == [1, 2, 3, 4, 5, 6, 7]
    assert [e.seq for e in await store.runs.read("run_1", 4, 2)] == [5, 6]
    assert await store.runs.read("run_1", 7, 100) == []
    assert await store.runs.read("unknown", 0, 100) == []


async def test_an_open_text_is_read_until_its_row_is_there(store: MemoryStore) -> None:
    cuts = Cuts()
    cuts.add(2, 3, 2.0)
    cuts.add(3, 2, 3.0)
    await store.runs.put_partials("run_1", None, [Partial("m", "text", 1, "Hello", cuts.pack(), 3)])
    texts = [e.data["text"] for e in await store.runs.read("run_1", 1, 100)]
    assert texts == ["Hel", "lo"]
    done = event("message.completed", 4, message_id="m", cuts=cuts.pack())
    row = Row("s1", "assistant", "Hello", told=((done, "row"),))
    await store.runs.append("run_1", None, [done], [row], closes=["m"])
    again = await store.runs.read("run_1", 1, 100)
    assert [(e.seq, e.type) for e in again] == [(2, "text.delta"), (3, "text.delta"), (4, "message.completed")]
    assert [e.data["text"] for e in again[:2]] == texts


async def test_the_record_follows_the_log(store: MemoryStore) -> None:
    record = await store.runs.get("run_1")
    assert record is not None and (record.spec, record.state.status) == (SPEC, "running")
    await store.runs.append("run_1", None, [event("run.completed", 2)])
    assert record.state.status == "completed"
    assert await store.runs.get("unknown") is None


async def test_runs_are_listed_newest_first_by_what_is_asked_for(store: MemoryStore) -> None:
    await store.runs.create(RunSpec("x", "s2", run_id="run_2", owner="ada", kind="chat"))
    await store.runs.create(RunSpec("y", "s1", run_id="run_3"))

    async def ids(**wanted: Any) -> list[str]:
        return [record.spec.run_id for record in await store.runs.list(**wanted)]

    assert await ids() == ["run_3", "run_2", "run_1"]
    assert await ids(session_id="s1") == ["run_3", "run_1"]
    assert await ids(owner="ada", kind="chat") == ["run_2"]
    assert await ids(status="running") == ["run_1"]
    assert await ids(owner="ada", status="running") == []


async def test_a_discarded_run_leaves_nothing(store: MemoryStore) -> None:
    await store.runs.append("run_1", None, [], [Row("s1", "user", "hi")])
    await store.runs.discard("run_1")
    await store.runs.discard("run_1")
    assert await store.runs.get("run_1") is None
    assert await store.runs.read("run_1", 0, 10) == []
    assert await roles(store) == []


# ---- leases


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until it is set."""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: made.now, time=lambda: made.now))
    return made


async def test_a_lease_is_held_by_one_until_it_is_released(clock: SimpleNamespace) -> None:
    leases = MemoryStore().leases
    token = await leases.acquire("session:s1", "a", 30)
    assert token is not None and await leases.holder("session:s1") == "a"
    assert await leases.acquire("session:s1", "b", 30) is None
    assert await leases.acquire("session:s2", "b", 30) is not None
    await leases.release("session:s1", token)
    assert await leases.holder("session:s1") is None
    assert (await leases.acquire("session:s1", "b", 30) or 0) > token


async def test_a_lease_runs_out_unless_it_is_renewed(clock: SimpleNamespace) -> None:
    leases = MemoryStore().leases
    token = await leases.acquire("x", "a", 30) or 0
    clock.now += 20
    assert await leases.renew("x", token, 30)
    clock.now += 20
    assert await leases.acquire("x", "b", 30) is None
    clock.now += 10
    assert await leases.holder("x") is None
    newer = await leases.acquire("x", "b", 30) or 0
    assert newer > token
    assert not await leases.renew("x", token, 30)
    await leases.release("x", token)
    assert await leases.holder("x") == "b"


async def test_tokens_grow_over_releases(clock: SimpleNamespace) -> None:
    leases = MemoryStore().leases
    tokens = []
    for _ in range(3):
        token = await leases.acquire("x", "a", 30) or 0
        tokens.append(token)
        await leases.release("x", token)
    assert tokens == sorted(set(tokens))


async def test_who_lost_the_lease_can_write_nothing(clock: SimpleNamespace, store: MemoryStore) -> None:
    token = await store.leases.acquire("session:s1", "a", 30) or 0
    await store.runs.append("run_1", token, [event("notice", 2)], [Row("s1", "user", "mine")])
    clock.now += 31
    await store.leases.acquire("session:s1", "b", 30)
    for writing in (
        store.runs.append("run_1", token, [event("notice", 3)], [Row("s1", "user", "late")]),
        store.runs.put_partials("run_1", token, [Partial("m", "text", 1, "late", "", 3)]),
    ):
        with pytest.raises(LeaseLost):
            await writing
    assert await roles(store) == [("user", "mine")]
    assert [e.seq for e in await store.runs.read("run_1", 0, 10)] == [1, 2]
