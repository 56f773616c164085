"""Runs and their logs: what was committed is read back as it was shown, for as long as it is kept."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hermes.bus.memory import MemoryBus
from hermes.core.events import Cuts, Event, RunState, fold
from hermes.core.limits import SWEEP_BATCH_ROWS
from hermes.core.processes import host_of, this_process
from hermes.core.spec import Control, RouteChoice, RunSpec
from hermes.runs.commits import LogOutput
from hermes.runs.log import RunLog
from hermes.runs.writer import RunWriter
from hermes.store import runs as runs_module
from hermes.store.base import EventsExpired, LeaseLost, NoPlace, Partial, Row, RunExists
from hermes.store.runs import ClaimedSession
from hermes.store.stores import Async, Store, open_store

from .conftest import call
from .tools import Turn, at_once, look, texts, url

BEGUN_AT = 1_790_000_000.0
WHOLE = 1_000_000


@pytest.fixture(scope="module", params=["file", "memory"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store for many examples, each with a run of its own."""
    folder = tmp_path_factory.mktemp("runs")
    with closing(open_store(url(folder / "state.db") if request.param == "file" else "sqlite://")) as store:
        yield store


@pytest.fixture
def turn(store: Store) -> Turn:
    turn = Turn(store, "s")
    turn.begin()
    return turn


def paged(store: Store, run_id: str, size: int, after: int = 0) -> list[Event]:
    """The log behind a number, read page by page."""
    events: list[Event] = []
    while page := store.runs.read(run_id, events[-1].seq if events else after, size):
        assert len(page) <= size
        events += page
    return events


def stored_events(turn: Turn) -> list[tuple[int, str]]:
    return [(event.seq, event.type) for event in turn.store.runs.read(turn.run_id, 0, WHOLE)]


def state(store: Store, run_id: str) -> RunState:
    record = store.runs.get(run_id)
    assert record is not None
    return record.state


def notice(turn: Turn, message: str = "m") -> Event:
    return turn.event("notice", 1, level="info", code="c", message=message)


def thought(turn: Turn, message_id: str, *pieces: str, form: str = "raw") -> Partial:
    """The open reasoning of a message after these deltas."""
    return replace(turn.grown(f"{message_id}:reasoning", *pieces), kind="reasoning", form=form)


def tool_output(turn: Turn, call_id: str, *pieces: str, stream: str = "stdout") -> Partial:
    """The output of a running tool after these deltas."""
    return replace(turn.grown(f"{call_id}/{stream}", *pieces), kind="tool", form=stream)


def complete(turn: Turn, message_id: str, text: Partial | None, reasoning: Partial | None = None) -> None:
    """A whole message with its reasoning."""
    events = []
    if reasoning is not None:
        chars = {"chars": len(reasoning.text), "form": reasoning.form, "cuts": reasoning.cuts}
        events.append(turn.event("reasoning.completed", 1, message_id=message_id, **chars))
    event = turn.event("message.completed", 1, message_id=message_id, row=None, cuts=text.cuts if text else "")
    row = turn.row("assistant", text.text if text else "", (event, "row"))
    row.reasoning = reasoning.text if reasoning else None
    closes = [stream.stream_id for stream in (text, reasoning) if stream is not None]
    turn.append(*events, event, rows=[row], closes=closes)


# ---- specs

SAMPLES: dict[str, Any] = {
    "user_message": [{"type": "text", "text": "Grüße 🧭"}, {"type": "image_url", "image_url": {"url": "data:,x"}}],
    "session_id": "kitchen",
    "run_id": "run_given",
    "kind": "subagent",
    "source": "cron",
    "owner": "ada",
    "session_key": "k",
    "history": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call("c")]}],
    "verbatim": True,
    "continues": True,
    "user_name": "Ada",
    "instructions": "Be kind.",
    "route": RouteChoice("m", "p", "http://127.0.0.1:1/v1", "chat_completions"),
    "sampling": {"temperature": 0.1, "stop": ["a", "b"], "seed": 2**53 + 1},
    "reasoning": {"effort": "high"},
    "shows_reasoning": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "max_output_tokens": 17,
    "toolsets": frozenset({"web", "files"}),
    "toolsets_by_default": True,
    "disabled_toolsets": frozenset({"terminal"}),
    "tool_policy": frozenset(),
    "allowed_models": frozenset({"fast"}),
    "client_tools": ({"type": "function", "function": {"name": "f"}},),
    "allowed_tools": frozenset({"f"}),
    "results": ({"tool_call_id": "call_1", "content": "done"},),
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "approvals": "manual",
    "answerable": True,
    "max_iterations": 3,
    "max_tool_calls": 0,
    "on_detach": "cancel",
    "persist": False,
    "stateless": True,
    "compress": False,
    "compact": "the plan",
    "count_only": True,
    "script": "git log -3",
    "context_files": False,
    "memory": False,
    "deadline_seconds": 0.25,
    "base_id": "b",
    "response_id": "resp_1",
    "job_id": "job_1",
    "parent": ("run_0", "call_0"),
    "parent_session_id": "parent",
    "metadata": {"a": "b"},
    "workdir": "/srv/work",
}


def test_spec_samples_cover_every_field() -> None:
    assert set(SAMPLES) == set(RunSpec.__struct_fields__)
    plain = RunSpec("x", "s")
    assert all(getattr(plain, name) != value for name, value in SAMPLES.items())


@pytest.mark.parametrize("name", SAMPLES)
def test_spec_field_round_trip(name: str) -> None:
    spec = RunSpec(**{"user_message": "x", "session_id": "s", name: SAMPLES[name]})
    assert RunSpec.from_stored(json.loads(json.dumps(spec.stored()))) == spec


def test_spec_round_trip_through_store(store: Store) -> None:
    spec = RunSpec(**SAMPLES)
    store.runs.create(spec)
    record = store.runs.get(spec.run_id)
    assert record is not None
    assert record.spec == spec
    assert isinstance(record.spec.parent, tuple)
    assert isinstance(record.spec.client_tools, tuple)


def test_credentials_of_route_are_not_stored(tmp_path: Path) -> None:
    route = RouteChoice(
        "m", api_key="sk-secret", extra_body={"key": "sk-secret"}, fallbacks=({"api_key": "sk-secret"},)
    )
    with closing(open_store(url(tmp_path / "state.db"))) as store:
        store.runs.create(RunSpec("x", "s", run_id="run_1", route=route))
        assert store.runs.get("run_1").spec.route == RouteChoice("m")  # type: ignore[union-attr]
    assert b"sk-secret" not in (tmp_path / "state.db").read_bytes()


def test_route_choice_of_defaults_round_trip() -> None:
    spec = RunSpec("x", "s", route=RouteChoice())
    assert RunSpec.from_stored(json.loads(json.dumps(spec.stored()))) == spec


def test_unknown_spec_fields_are_ignored() -> None:
    spec = RunSpec("x", "s")
    assert RunSpec.from_stored(spec.stored() | {"colour": "green"}) == spec


def test_new_run_is_queued(store: Store) -> None:
    before = time.time()
    store.runs.create(RunSpec("x", "s", run_id="run_1"))
    record = store.runs.get("run_1")
    assert record is not None
    assert record.state == RunState()
    assert (record.resumes, record.log_expired) == (0, False)
    assert before <= record.created_at == record.updated_at <= time.time()
    assert store.runs.get("unknown") is None


def test_runs_that_replicas_of_other_hosts_hold_are_not_left_behind(store: Store) -> None:
    host = f"{host_of(this_process())}:1:1.00"
    leases = {
        "free": None,
        "here": (host, 60),
        "elsewhere": ("elsewhere:1:1.00", 60),
        "late": ("elsewhere:1:1.00", -60),
    }
    for name, lease in leases.items():
        store.runs.create(RunSpec("x", name, run_id=f"run_{name}"))
        if lease is not None:
            assert store.leases.acquire(f"session:{name}", *lease) is not None
    assert store.runs.left_behind() == [("run_free", None), ("run_here", host), ("run_late", None)]


# ---- rows and what goes with them


def test_appended_rows_get_ids_and_update_event(turn: Turn) -> None:
    event = turn.event("message.completed", 1, message_id="m", row=None, cuts="")
    rows = [turn.row("user", "hi"), turn.row("assistant", "hello", (event, "row"))]
    turn.append(event, rows=rows)
    assert rows[0].id is not None and rows[1].id is not None and rows[0].id < rows[1].id
    assert event.data["row"] == rows[1].id
    assert turn.store.runs.durable(turn.run_id)[-1].data["row"] == rows[1].id
    row = turn.store.runs.row(turn.run_id, rows[1].id)
    assert row == replace(rows[1], announced_in=())
    assert texts(turn.store.sessions, "s") == ["What is the time?", "hi", "hello"]


def test_row_id_is_filled_into_several_events(turn: Turn) -> None:
    event = turn.event("message.completed", 1, message_id="m", row=None, cuts="")
    failed = turn.event("run.failed", failure="timeout", error="late", partial_row=None)
    row = turn.row("assistant", "x", (event, "row"), (failed, "partial_row"))
    turn.append(event, failed, rows=[row])
    assert event.data["row"] == failed.data["partial_row"] == row.id
    assert state(turn.store, turn.run_id).final_row == row.id


def test_row_is_visible_only_to_its_run(turn: Turn) -> None:
    other = Turn(turn.store, "s")
    row = turn.row("assistant", "x")
    turn.append(rows=[row])
    assert turn.store.runs.row(other.run_id, row.id) is None
    assert turn.store.runs.row(turn.run_id, row.id + 1) is None


def test_tool_result_rows_follow_order_of_calls(turn: Turn) -> None:
    row = turn.row("assistant", "", tool_calls=[call(name) for name in ("a", "b", "c")])
    late = [turn.row("tool", name, tool_call_id=name) for name in ("c", "a", "b")]
    again = [turn.row("assistant", "", tool_calls=[call("d")]), turn.row("tool", "d", tool_call_id="d")]
    turn.append(rows=[row, *late, *again, turn.row("user", "next")])
    ordered = ["What is the time?", "", "a", "b", "c", "", "d", "next"]
    assert [row.content for row in turn.store.runs.rows(turn.run_id)] == ordered
    messages = turn.store.sessions.get_messages_as_conversation("s")
    assert [message["content"] for message in messages] == ordered


def test_rows_belong_to_their_run(turn: Turn) -> None:
    other = Turn(turn.store, "s")
    other.begin("And now?")
    assert [row.content for row in turn.store.runs.rows(turn.run_id)] == ["What is the time?"]
    assert [row.content for row in other.store.runs.rows(other.run_id)] == ["And now?"]
    assert turn.store.runs.rows("unknown") == []


def test_events_and_rows_are_written_atomically(turn: Turn) -> None:
    before = stored_events(turn), state(turn.store, turn.run_id), texts(turn.store.sessions, "s")
    again = notice(turn)
    again.seq = 1
    with pytest.raises(Exception, match="UNIQUE"):
        turn.append(notice(turn), again, rows=[turn.row("assistant", "lost")], partials=[turn.grown("m", "x")])
    assert (stored_events(turn), state(turn.store, turn.run_id), texts(turn.store.sessions, "s")) == before
    assert turn.store.runs.partials(turn.run_id) == []


def test_annotated_row_gets_api_content(turn: Turn) -> None:
    row = turn.row("user", "too much")
    turn.append(rows=[row])
    turn.append(annotate=(row.id, "[left out]"))
    assert turn.store.runs.rows(turn.run_id)[-1].as_message() == {"role": "user", "content": "[left out]"}
    assert turn.store.sessions.get_messages_as_conversation("s")[-1]["content"] == "[left out]"
    assert texts(turn.store.sessions, "s")[-1] == "too much"
    assert [hit["id"] for hit in turn.store.sessions.search_messages("much")] == [row.id]


@pytest.mark.parametrize("message", ["", "data:image/png;base64," + "A" * 8000, '{"$blob": "x"}', "🧭 e\u0301"])
def test_annotation_accepts_any_text(turn: Turn, message: str) -> None:
    row = turn.row("user", "too much")
    turn.append(rows=[row])
    turn.append(annotate=(row.id, message))
    assert turn.store.runs.row(turn.run_id, row.id).api_content == message


# ---- what is replaced


def replaced(turn: Turn) -> tuple[list[Row], list[Row]]:
    """A conversation whose middle was put into other words: the rows before, and those after."""
    row = turn.row("assistant", "Let me look.", tool_calls=[call("c")], timestamp=11.5, token_count=7)
    row.reasoning, row.finish_reason, row.opaque = "hm", "tool_calls", {"chat_completions": {"id": 1}}
    result = turn.row("tool", "noon", tool_call_id="c", tool_name="clock", timestamp=12.5, token_count=3)
    answer = turn.row("assistant", "Noon.", timestamp=13.5, token_count=2, reasoning="so", finish_reason="stop")
    turn.append(rows=[row, result, answer])
    summary = Row("s", "user", "[What was said before]")
    kept_rows = [
        Row("s", "assistant", "Let me look.", tool_calls=[call("c")], opaque={"chat_completions": {"id": 1}}),
        Row("s", "tool", "noon", tool_call_id="c", tool_name="clock"),
        Row("s", "assistant", "Noon."),
    ]
    turn.append(
        turn.event("context.compacted", 1, method="summary"), rows=[summary, *kept_rows], replaces=[None, 1, 2, 3]
    )
    return [row, result, answer], turn.store.runs.rows(turn.run_id)


def test_compacted_rows_are_archived_not_lost(turn: Turn) -> None:
    replaced(turn)
    sessions = turn.store.sessions
    contents = [message["content"] for message in sessions.get_messages_as_conversation("s")]
    assert contents == ["[What was said before]", "Let me look.", "noon", "Noon."]
    first, *rest = sessions.get_messages("s")
    assert (first["active"], first["compacted"]) == (False, True)
    assert [row["content"] for row in rest] == ["Let me look.", "noon", "Noon."]
    assert sessions.get_session("s")["message_count"] == 4
    assert len(sessions.get_messages("s", include_inactive=True)) == 5


def test_compaction_keeps_retained_rows_unchanged(turn: Turn) -> None:
    old, copies = replaced(turn)
    assert [row.id for row in copies] == [row.id for row in old]
    columns = ("content", "run_id", "timestamp", "token_count", "reasoning", "finish_reason", "opaque", "tool_calls")
    for name in (*columns, "tool_call_id", "tool_name", "role", "synthetic"):
        assert [getattr(row, name) for row in copies] == [getattr(row, name) for row in old], name
    assert all(row.active and not row.compacted for row in copies)


def test_compaction_summary_rows_are_synthetic(turn: Turn) -> None:
    replaced(turn)
    rows = turn.store.sessions.get_messages("s", include_inactive=True)
    assert [row["synthetic"] for row in rows] == [False, False, False, False, True]
    assert [row["model_only"] for row in rows] == [False, False, False, False, True]
    assert turn.store.sessions.search_messages("said") == []
    assert len(turn.store.sessions.search_messages("noon")) == 2


def test_row_retained_by_two_compactions_is_same_row(turn: Turn) -> None:
    old, _ = replaced(turn)
    turn.append(rows=[Row("s", "assistant", "Noon.")], replaces=[3])
    [again] = turn.store.runs.rows(turn.run_id)
    assert again.id == old[2].id
    assert (again.reasoning, again.token_count, again.timestamp) == ("so", 2, 13.5)


def test_compaction_matches_moved_rows_by_content(turn: Turn) -> None:
    old, _ = replaced(turn)
    turn.append(rows=[Row("s", "assistant", "Noon.")], replaces=[7])
    assert [row.id for row in turn.store.runs.rows(turn.run_id)] == [old[2].id]


def test_run_log_reads_same_after_compaction(turn: Turn) -> None:
    complete(turn, "m", turn.grown("m", "It ", "is ", "noon."), thought(turn, "m", "let me", " see"))
    before = turn.store.runs.read(turn.run_id, 0, WHOLE)
    turn.append(rows=[Row("s", "user", "[short]")], replaces=[None])
    assert turn.store.runs.read(turn.run_id, 0, WHOLE) == before


def test_compaction_does_not_touch_other_sessions(turn: Turn) -> None:
    other = Turn(turn.store, "other")
    other.begin("Who is there?")
    turn.append(rows=[Row("s", "user", "[short]")], replaces=[None])
    assert texts(turn.store.sessions, "other") == ["Who is there?"]


# ---- sessions of a turn


def test_session_is_created_once_and_empty_fields_are_filled(turn: Turn) -> None:
    later = {"id": "s", "source": "cli", "model": "m2", "instructions": "be kind", "session_key": "k"}
    turn.append(session=later)
    known = turn.store.sessions.get_session("s")
    names = ("source", "model", "instructions", "session_key")
    assert [known[name] for name in names] == ["api_server", "m", "be kind", "k"]
    turn.append(session={"id": "s", "source": "cli", "instructions": "be brief"})
    assert turn.store.sessions.get_session("s")["instructions"] == "be kind"


def test_auto_title_is_set_only_if_empty(turn: Turn) -> None:
    sessions = turn.store.sessions
    assert sessions.set_auto_title_if_empty("s", "First") is True
    assert sessions.set_auto_title_if_empty("s", "Second") is False
    assert sessions.set_auto_title_if_empty("unknown", "x") is False
    assert sessions.get_session("s")["title"] == "First"


def test_new_turn_reopens_ended_session(turn: Turn) -> None:
    turn.store.sessions.end_session("s", "done")
    Turn(turn.store, "s").begin()
    known = turn.store.sessions.get_session("s")
    assert (known["ended_at"], known["end_reason"]) == (None, None)


def test_turn_updates_last_active_of_session(turn: Turn) -> None:
    turn.store.sessions.create_session("other", "cli")
    before = turn.store.sessions.get_session("s")["last_active"]
    turn.append(session={"id": "s", "source": "cli"})
    assert turn.store.sessions.get_session("s")["last_active"] >= before
    assert [row["id"] for row in turn.store.sessions.list_sessions()] == ["s", "other"]


def test_unknown_parent_session_is_dropped(turn: Turn) -> None:
    for name, parent in (("a", "s"), ("b", "nobody")):
        child = Turn(turn.store, name, kind="subagent")
        child.append(session={"id": name, "source": "subagent", "kind": "delegate", "parent_session_id": parent})
    assert turn.store.sessions.get_session("a")["parent_session_id"] == "s"
    lonely = turn.store.sessions.get_session("b")
    assert (lonely["parent_session_id"], lonely["kind"]) == (None, "delegate")


def test_usage_is_counted_by_model_and_task(turn: Turn) -> None:
    usage = {"model": "m", "provider": "p", "input_tokens": 10, "output_tokens": None, "cost_usd": 0.5}
    for task in ("", "", "title_generation"):
        turn.append(turn.event("usage", 1, **usage, task=task))
    known = turn.store.sessions.get_session("s")
    names = ("input_tokens", "output_tokens", "api_call_count", "actual_cost_usd")
    assert [known[name] for name in names] == [20, 0, 2, 1.0]
    by_task = {row["task"]: row for row in turn.store.sessions.get_usage("s")}
    assert (by_task[""]["calls"], by_task[""]["input_tokens"]) == (2, 20)
    assert (by_task["title_generation"]["calls"], by_task["title_generation"]["input_tokens"]) == (1, 10)
    assert {(row["model"], row["provider"]) for row in by_task.values()} == {("m", "p")}


def test_usage_without_session_is_accepted(store: Store) -> None:
    turn = Turn(store, "nowhere")
    turn.append(turn.event("usage", 1, input_tokens=1, task=""))
    assert [event.type for event in store.runs.durable(turn.run_id)] == ["usage"]


def test_synced_append_uses_full_synchronous(tmp_path: Path) -> None:
    with closing(open_store(url(tmp_path / "state.db"))) as store:
        turn = Turn(store, "s")
        statements: list[str] = []
        store.engine.exclusive(lambda db: db.set_trace_callback(statements.append))
        for sync in (True, False, True):
            turn.append(notice(turn), sync=sync)

        async def written() -> None:
            writer = RunWriter(turn.run_id, Async(store).runs, LogOutput(MemoryBus()), last_seq=turn.seq)
            for sync in (True, False):
                await writer.emit("notice", sync=sync, level="info", code="c", message="m")
            await writer.close()

        asyncio.run(written())
        store.engine.exclusive(lambda db: db.set_trace_callback(None))
    at, modes = "", []
    for statement in statements:
        if statement.startswith("PRAGMA synchronous="):
            at = statement.partition("=")[2]
        elif statement.startswith("INSERT INTO run_log"):
            modes.append(at)
    assert modes == ["FULL", "NORMAL", "FULL", "FULL", "NORMAL"]


# ---- the state follows the log

ids = st.sampled_from(["a", "b", "c"])
text_strategy = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)


def kind_of(type_: str, **data: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(type_), st.fixed_dictionaries(dict(data)))


route = st.fixed_dictionaries({"model": text_strategy, "provider": text_strategy})
happenings = st.one_of(
    kind_of("run.queued", position=st.integers(0, 3)),
    kind_of("run.started", model=text_strategy, provider=text_strategy),
    kind_of("run.started", model=text_strategy, provider=text_strategy),
    kind_of("run.resumed", reason=text_strategy),
    kind_of("run.interrupted"),
    kind_of(
        "control.received",
        control_id=ids,
        control=st.sampled_from(["interrupt", "cancel", "steer", "approve", "answer"]),
    ),
    kind_of("model.switched", to=route),
    kind_of("approval.requested", approval_id=ids, subject=text_strategy, choices=st.lists(text_strategy, max_size=2)),
    kind_of("approval.resolved", approval_id=ids, choice=text_strategy),
    kind_of("clarify.requested", request_id=ids, question=text_strategy),
    kind_of("clarify.resolved", request_id=ids),
    kind_of("notice", message=text_strategy),
    kind_of("usage", input_tokens=st.integers(0, 9)),
)
ends = st.one_of(
    kind_of(
        "run.completed",
        row=st.none() | st.integers(1, 9),
        usage=st.dictionaries(text_strategy, st.integers(), max_size=2),
    ),
    kind_of("run.failed", failure=text_strategy, error=text_strategy, partial_row=st.none() | st.integers(1, 9)),
    kind_of("run.cancelled", by=text_strategy, usage=st.just({"total_tokens": 3})),
)
batches = st.lists(st.lists(happenings, min_size=1, max_size=4), max_size=10)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=batches, end=st.none() | ends)
def test_stored_state_equals_folded_log_property(
    shared: Store, batches: list[list[tuple[str, dict[str, Any]]]], end: tuple[str, dict[str, Any]] | None
) -> None:
    turn = Turn(shared, "s")
    so_far: list[Event] = []
    for batch in [*batches, *([[end]] if end else [])]:
        events = [turn.event(type_, **data) for type_, data in batch]
        turn.append(*events)
        so_far += events
        expected = fold(so_far)
        record = shared.runs.get(turn.run_id)
        assert record is not None
        assert record.state == expected
        assert record.resumes == sum(event.type == "run.resumed" for event in so_far)
        assert record.updated_at == so_far[-1].ts
        [listed] = shared.runs.list(status=expected.status, session_id="s", limit=1)
        assert listed.spec.run_id == turn.run_id
        assert (turn.run_id in unfinished(shared)) == (not expected.ended)
    assert fold(shared.runs.durable(turn.run_id)) == fold(so_far)
    shared.runs.discard(turn.run_id)


def unfinished(store: Store, session_id: str | None = None) -> list[str]:
    return [record.spec.run_id for record in store.runs.unfinished(session_id)]


def test_run_record_follows_log(turn: Turn) -> None:
    assert state(turn.store, turn.run_id).status == "running"
    turn.end()
    assert state(turn.store, turn.run_id).status == "completed"


def test_run_status_column_follows_log(tmp_path: Path) -> None:
    with closing(open_store(url(tmp_path / "state.db"))) as store:
        turn = Turn(store, "s")
        observed = []
        for events in (
            [],
            [turn.event("run.started", model="m", provider="p")],
            [turn.event("approval.requested", approval_id="a")],
            [turn.event("approval.resolved", approval_id="a"), turn.event("clarify.requested", request_id="q")],
            [turn.event("control.received", control_id="c", control="interrupt")],
            [turn.event("run.cancelled", by="user", reason="stop")],
        ):
            turn.append(*events)
            observed += look(tmp_path / "state.db", "SELECT status FROM runs")[0]
    expected = ["queued", "running", "waiting_for_approval", "waiting_for_input", "stopping", "cancelled"]
    assert observed == expected


# ---- reading


def test_run_log_is_read_in_pages(turn: Turn) -> None:
    turn.append(*[notice(turn) for _ in range(6)])
    read = turn.store.runs.read
    assert [event.seq for event in read(turn.run_id, 0, 100)] == [1, 2, 3, 4, 5, 6, 7]
    assert [event.seq for event in read(turn.run_id, 4, 2)] == [5, 6]
    assert read(turn.run_id, 7, 100) == []
    assert read("unknown", 0, 100) == []
    assert turn.store.runs.durable("unknown") == turn.store.runs.partials("unknown") == []


def test_partial_text_is_read_until_row_is_committed(turn: Turn) -> None:
    grown = turn.grown("m", "Hel", "lo")
    turn.store.runs.put_partials(turn.run_id, None, [grown])
    assert turn.store.runs.partials(turn.run_id) == [grown]
    first = turn.store.runs.read(turn.run_id, 1, 100)
    assert [(event.data["offset"], event.data["text"]) for event in first] == [(0, "Hel"), (3, "lo")]
    turn.complete("m", "Hello", grown.cuts)
    again = turn.store.runs.read(turn.run_id, 1, 100)
    assert again[:2] == first
    assert [event.type for event in again] == ["text.delta", "text.delta", "message.completed"]
    assert turn.store.runs.partials(turn.run_id) == []
    assert [event.type for event in turn.store.runs.durable(turn.run_id)] == ["run.started", "message.completed"]


def test_partial_text_is_updated_in_place(turn: Turn) -> None:
    cuts = Cuts()
    for text in ("a", "ab", "abc"):
        turn.seq += 1
        cuts.add(turn.seq, 1, BEGUN_AT + turn.seq)
        turn.store.runs.put_partials(turn.run_id, None, [Partial("m", "text", 1, text, cuts.pack(), turn.seq)])
    [partial] = turn.store.runs.partials(turn.run_id)
    assert (partial.text, partial.last_seq) == ("abc", turn.seq)
    assert [event.data["text"] for event in turn.store.runs.read(turn.run_id, 1, 100)] == ["a", "b", "c"]


def test_end_of_run_deletes_partials_of_all_streams(turn: Turn) -> None:
    turn.append(notice(turn), partials=[turn.grown("m", "left"), tool_output(turn, "c", "behind")])
    turn.end()
    assert turn.store.runs.partials(turn.run_id) == []


def test_text_and_reasoning_are_not_duplicated_in_log(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(open_store(url(path))) as store:
        turn = Turn(store, "s")
        turn.begin()
        text, reasoning = turn.grown("m", "unmistak", "able"), thought(turn, "m", "inscru", "table")
        turn.append(notice(turn), partials=[text, reasoning])
        complete(turn, "m", text, reasoning)
        assert look(path, "SELECT count(*) FROM run_partials") == [(0,)]
        data = look(path, "SELECT group_concat(data) FROM run_events")[0][0]
    assert "unmistak" not in data
    assert "inscru" not in data


def test_tool_output_partials_are_read_until_tool_ends(turn: Turn) -> None:
    out, err = tool_output(turn, "c", "one ", "two"), tool_output(turn, "c", "oops", stream="stderr")
    turn.append(notice(turn), partials=[out, err])
    events = [event for event in turn.store.runs.read(turn.run_id, 0, 100) if event.type == "tool.output"]
    assert [tuple(event.data[name] for name in ("call_id", "stream", "offset", "text")) for event in events] == [
        ("c", "stdout", 0, "one "),
        ("c", "stdout", 4, "two"),
        ("c", "stderr", 0, "oops"),
    ]
    other = tool_output(turn, "c/2", "still")
    turn.append(
        turn.event("tool.finished", 1, call_id="c", status="ok"),
        rows=[turn.row("tool", "one two", tool_call_id="c")],
        closes=[out.stream_id, err.stream_id],
        partials=[other],
    )
    remaining = [event for event in turn.store.runs.read(turn.run_id, 0, 100) if event.type == "tool.output"]
    assert [(event.data["call_id"], event.data["text"]) for event in remaining] == [("c/2", "still")]


@pytest.mark.parametrize("size", range(1, 8))
def test_deltas_are_read_when_message_completes_after_page(turn: Turn, size: int) -> None:
    reasoning = thought(turn, "m", "let ", "me ", "see")
    text = turn.grown("m", *"It is noon.")
    for _ in range(40):
        turn.append(notice(turn), partials=[text, reasoning])
    later = turn.grown("m2", "open")
    complete(turn, "m", text, reasoning)
    turn.append(notice(turn), partials=[later])
    whole = turn.store.runs.read(turn.run_id, 0, WHOLE)
    assert [event.seq for event in whole] == list(range(1, turn.seq + 1))
    assert "".join(event.data["text"] for event in whole if event.type == "text.delta") == "It is noon.open"
    for after in range(turn.seq + 1):
        assert paged(turn.store, turn.run_id, size, after) == whole[after:]


@pytest.mark.parametrize("size", range(1, 8))
def test_many_messages_after_page_do_not_hide_deltas(turn: Turn, size: int) -> None:
    for number in range(12):
        name = f"m{number}"
        reasoning = thought(turn, name, "a", "b") if number % 3 else None
        text = turn.grown(name, "c", "d", "e") if number % 4 else None
        between = [notice(turn) for _ in range(number % 5)]
        if between:
            turn.append(*between, partials=[stream for stream in (text, reasoning) if stream])
        complete(turn, name, text, reasoning)
    turn.end()
    assert [event.seq for event in paged(turn.store, turn.run_id, size)] == list(range(1, turn.seq + 1))
    assert paged(turn.store, turn.run_id, size) == turn.store.runs.read(turn.run_id, 0, WHOLE)


def test_very_long_message_is_read_in_pages(turn: Turn) -> None:
    pieces = [f"{number} " for number in range(50_000)]
    text = turn.grown("m", *pieces)
    turn.store.runs.put_partials(turn.run_id, None, [text])
    for completed in (False, True):
        if completed:
            turn.complete("m", text.text, text.cuts)
        events = paged(turn.store, turn.run_id, 512)
        assert [event.data["text"] for event in events if event.type == "text.delta"] == pieces
        assert [event.seq for event in events] == list(range(1, turn.seq + 1))


# ---- read back as it was shown live

odd = st.sampled_from(["👩‍👩‍👧‍👦", "e\u0301", "\x00", "\ufeff", "\u200b", "日本", "\U0010ffff", "\r\n", '"', "\\u0000"])
short_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
pieces = st.lists(odd | short_text, min_size=1, max_size=4).map("".join)
acts = st.one_of(
    st.tuples(st.just("text"), pieces),
    st.tuples(st.just("text"), pieces),
    st.tuples(st.just("reasoning"), pieces),
    st.tuples(st.just("output"), pieces),
    st.tuples(st.just("errors"), pieces),
    st.tuples(st.just("notice"), pieces),
    st.tuples(st.sampled_from(["drafted", "complete", "tool", "finish", "settle", "flush", "pause"]), st.just("")),
)


class Driven:
    """A run that is driven through its writer, beside what a live reader was shown."""

    def __init__(self, store: Store, window_s: float = 0.0, last_seq: int = 0) -> None:
        self.spec = RunSpec("x", "driven")
        store.runs.create(self.spec)
        self.bus = MemoryBus()
        self.live = self.bus.subscribe(self.spec.run_id)
        ticks = count()
        self.pause = 0.0
        self.writer = RunWriter(
            self.spec.run_id,
            Async(store).runs,
            LogOutput(self.bus, window_s, clock=lambda: BEGUN_AT + self.pause + next(ticks) * 0.000_701),
            last_seq=last_seq,
        )
        self.message, self.call, self.messages, self.tools = "msg_0", "", 0, 0
        self.finished: set[str] = set()

    def row(self, role: str, content: str, **fields: Any) -> Row:
        return Row(self.spec.session_id, role, content, self.spec.run_id, **fields)

    async def act(self, name: str, piece: str) -> None:
        writer = self.writer
        if name == "text":
            writer.text(self.message, piece)
        elif name == "reasoning":
            writer.reasoning(self.message, piece, "raw" if self.tools % 2 else "summary")
        elif name in ("output", "errors") and self.call:
            writer.output(self.call, piece, {"output": "stdout", "errors": "stderr"}[name])
        elif name == "notice":
            # What no store keeps is looked at below.
            await writer.emit("notice", level="info", code="c", message=piece.replace("\x00", ""))
        elif name == "drafted":
            writer.drafted(self.message, 0, "clock")
        elif name == "complete":
            await self.complete()
        elif name == "tool" and not self.call:
            self.tools += 1
            self.call = f"call/{self.tools}"
            await writer.emit("tool.started", call_id=self.call, name="clock", args={}, effect="pure")
        elif name == "finish" and self.call:
            closes = writer.end_output(self.call)
            event = writer.event("tool.finished", call_id=self.call, status="ok", row=None)
            row = self.row("tool", "x", tool_call_id=self.call, announced_in=((event, "row"),))
            await writer.append(event, rows=[row], closes=closes)
            self.finished.add(self.call)
            self.call = ""
        elif name == "settle":
            await writer.settle()
        elif name == "flush":
            writer.flush()
        elif name == "pause":
            self.pause += 300.0

    async def complete(self) -> None:
        row = self.row("assistant", "")
        await self.writer.complete(self.message, row, finish_reason="stop", tool_calls=[], partial=False)
        self.messages += 1
        self.message = f"msg_{self.messages}"
        self.writer.step += 1

    async def run(self, script: list[tuple[str, str]], end: str) -> list[Event]:
        """What was shown, without what is only shown live."""
        opening = self.writer.event("run.started", model="m", provider="p", user_row=None)
        row = self.row("user", "x", announced_in=((opening, "user_row"),))
        await self.writer.append(opening, rows=[row], session={"id": self.spec.session_id, "source": "cli"})
        for name, piece in script:
            await self.act(name, piece)
        if end == "complete":
            await self.complete()
            await self.writer.emit("run.completed", message_id=self.message, row=None, steps=1, usage={"total": 1})
        self.writer.flush()
        await self.writer.settle()
        await self.writer.close()
        events = await self.live.take()
        assert not self.live.overflowed
        return [
            event
            for event in events
            if event.type != "tool.drafted"
            and not (event.type == "tool.output" and event.data["call_id"] in self.finished)
        ]


@pytest.fixture(scope="module")
def file_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store in a file, for many examples."""
    with closing(open_store(url(tmp_path_factory.mktemp("kept") / "state.db"))) as store:
        yield store


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    script=st.lists(acts, max_size=30),
    end=st.sampled_from(["complete", "open"]),
    window_s=st.sampled_from([0.0, 0.0, 60.0]),
    last_seq=st.sampled_from([0, 100, 4096]),
)
@example(
    script=[("text", "\x00a"), ("reasoning", "b\x00"), ("tool", ""), ("output", "\x00")],
    end="open",
    window_s=0.0,
    last_seq=0,
)
def test_replay_equals_live_events_property(
    file_store: Store, script: list[tuple[str, str]], end: str, window_s: float, last_seq: int
) -> None:
    async def drive() -> tuple[list[Event], str]:
        driven = Driven(file_store, window_s, last_seq)
        return await driven.run(script, end), driven.spec.run_id

    events, run_id = asyncio.run(drive())
    assert file_store.runs.read(run_id, 0, WHOLE) == events
    for size in range(1, 8):
        assert paged(file_store, run_id, size) == events
    for event in events[::3]:
        assert file_store.runs.read(run_id, event.seq, WHOLE) == [later for later in events if later.seq > event.seq]


def test_durable_event_data_round_trip_property(file_store: Store) -> None:
    async def drive() -> tuple[list[Event], str]:
        driven = Driven(file_store)
        opening = driven.writer.event("run.started", model="m", provider="p", user_row=None)
        await driven.writer.append(opening, session={"id": driven.spec.session_id, "source": "cli"})
        args = {"path": "a\x00b", "n": 2**70, "\x00": [None, True, 0.1]}
        await driven.writer.emit("tool.started", call_id="c", name="clock", args=args, effect="pure")
        await driven.writer.close()
        return await driven.live.take(), driven.spec.run_id

    events, run_id = asyncio.run(drive())
    assert file_store.runs.read(run_id, 0, WHOLE) == events


def test_replay_is_same_after_restart(tmp_path: Path) -> None:
    script = [("reasoning", "hm"), ("text", "Noon"), ("tool", ""), ("output", "12"), ("notice", "n"), ("text", ".")]

    async def drive(store: Store) -> tuple[list[Event], str]:
        driven = Driven(store)
        return await driven.run(script, "open"), driven.spec.run_id

    with closing(open_store(url(tmp_path / "state.db"))) as store:
        events, run_id = asyncio.run(drive(store))
    with closing(open_store(url(tmp_path / "state.db"))) as store:
        assert store.runs.read(run_id, 0, WHOLE) == events
        assert [partial.kind for partial in store.runs.partials(run_id)] == ["reasoning", "tool", "text"]


# ---- lists


def ids_of(store: Store, **wanted: Any) -> list[str]:
    return [record.spec.run_id for record in store.runs.list(**wanted)]


def test_list_runs_newest_first_with_filters(store: Store) -> None:
    first = Turn(store, "s1", run_id="run_1")
    first.begin()
    store.runs.create(RunSpec("x", "s2", run_id="run_2", owner="ada", kind="chat"))
    store.runs.create(RunSpec("y", "s1", run_id="run_3"))
    assert ids_of(store) == ["run_3", "run_2", "run_1"]
    assert ids_of(store, session_id="s1") == ["run_3", "run_1"]
    assert ids_of(store, owner="ada", kind="chat") == ["run_2"]
    assert ids_of(store, status="running") == ["run_1"]
    assert ids_of(store, owner="ada", status="running") == []
    assert ids_of(store, owner="", kind="") == []


@pytest.mark.parametrize("at", ["one time", "times of their own"])
def test_list_runs_pagination(store: Store, at: str) -> None:
    def make() -> None:
        for number in range(23):
            store.runs.create(RunSpec("x", f"s{number % 2}", run_id=f"run_{number}", owner=f"o{number % 3}"))

    store.transaction(make)
    if at == "one time":
        store.engine.write(lambda tx: tx.execute("UPDATE runs SET created_at = 1"))
    assert ids_of(store) == [f"run_{number}" for number in reversed(range(23))]
    assert unfinished(store) == [f"run_{number}" for number in range(23)]
    for wanted in ({}, {"session_id": "s1"}, {"owner": "o2"}, {"status": "queued", "owner": "o0", "session_id": "s0"}):
        whole = ids_of(store, **wanted)
        assert whole
        for size in (1, 2, 5, 100):
            ids = ids_of(store, **wanted, limit=size)
            while page := ids_of(store, **wanted, limit=size, before=ids[-1]):
                assert len(page) <= size
                ids += page
            assert ids == whole
    assert ids_of(store, limit=0) == []
    assert ids_of(store, before="unknown") == []


def test_list_runs_pagination_cursor_outside_filter(store: Store) -> None:
    for number in range(6):
        store.runs.create(RunSpec("x", "s", run_id=f"run_{number}", owner=f"o{number % 2}"))
    assert ids_of(store, owner="o0", before="run_3") == ["run_2", "run_0"]


def test_unfinished_runs_oldest_first(store: Store) -> None:
    turns = [Turn(store, f"s{number % 2}", run_id=f"run_{number}") for number in range(6)]
    turns[1].begin()
    turns[2].begin()
    turns[2].end()
    turns[4].append(turns[4].event("run.interrupted"))
    turns[5].append(turns[5].event("run.failed", failure="timeout", error="late"))
    turns[0].append(notice(turns[0]))
    assert unfinished(store) == ["run_0", "run_1", "run_3", "run_4"]
    assert unfinished(store, "s0") == ["run_0", "run_4"]
    assert unfinished(store, "s1") == ["run_1", "run_3"]
    assert unfinished(store, "unknown") == []


# ---- controls


def test_control_is_added_and_consumed_once(turn: Turn) -> None:
    runs = turn.store.runs
    control = Control("steer", {"text": "shorter 🧭"}, "ada", "http", "ctl_1")
    assert runs.add_control(turn.run_id, control) is True
    assert runs.add_control(turn.run_id, replace(control, data={"text": "other"})) is False
    assert runs.take_controls(turn.run_id) == [control]
    assert runs.take_controls(turn.run_id) == []
    assert runs.add_control(turn.run_id, control) is False
    assert runs.take_controls(turn.run_id) == []


def test_controls_are_consumed_oldest_first(turn: Turn) -> None:
    controls = [Control("steer", {"text": str(number)}, control_id=f"ctl_{9 - number}") for number in range(5)]
    for control in controls:
        turn.store.runs.add_control(turn.run_id, control)
    assert turn.store.runs.take_controls(turn.run_id) == controls


def test_controls_are_scoped_to_run(turn: Turn) -> None:
    other = Turn(turn.store, "s")
    for run_id in (turn.run_id, other.run_id):
        assert turn.store.runs.add_control(run_id, Control("cancel", {"of": run_id}, control_id="ctl_1")) is True
    assert [control.data for control in turn.store.runs.take_controls(turn.run_id)] == [{"of": turn.run_id}]
    assert [control.data for control in turn.store.runs.take_controls(other.run_id)] == [{"of": other.run_id}]


def test_ended_run_rejects_controls(turn: Turn) -> None:
    turn.begin()
    turn.complete("m", "It is late.")
    assert turn.store.runs.add_control(turn.run_id, Control("cancel", control_id="ctl_1")) is True
    turn.end()
    assert turn.store.runs.controlled([turn.run_id]) == []
    assert turn.store.runs.add_control(turn.run_id, Control("cancel", control_id="ctl_2")) is False


def test_concurrent_duplicate_control_is_added_once(turn: Turn) -> None:
    control = Control("cancel", control_id="ctl_1")
    answers = at_once(8, lambda _: turn.store.runs.add_control(turn.run_id, control))
    assert sorted(answers) == [False] * 7 + [True]


def test_concurrent_take_gets_each_control_once(turn: Turn) -> None:
    texts = [f"ctl_{number:02}" for number in range(40)]
    for control_id in texts:
        turn.store.runs.add_control(turn.run_id, Control("steer", control_id=control_id))

    def take(_: int) -> list[str]:
        return [control.control_id for _ in range(5) for control in turn.store.runs.take_controls(turn.run_id)]

    results = at_once(2, take)
    assert sorted([*results[0], *results[1]]) == texts


def test_concurrent_add_and_take_lose_no_control(turn: Turn) -> None:
    def work(number: int) -> list[str]:
        if number < 2:
            for at in range(20):
                turn.store.runs.add_control(turn.run_id, Control("steer", control_id=f"ctl_{at:02}"))
            return []
        return [control.control_id for _ in range(20) for control in turn.store.runs.take_controls(turn.run_id)]

    control_ids = [control_id for part in at_once(4, work) for control_id in part]
    control_ids += [control.control_id for control in turn.store.runs.take_controls(turn.run_id)]
    assert sorted(control_ids) == [f"ctl_{at:02}" for at in range(20)]


# ---- runs that are gone


def test_discarded_run_leaves_nothing(store: Store) -> None:
    other = Turn(store, "s")
    other.begin()
    turn = Turn(store, "run_1", run_id="run_1")
    turn.begin("remarkable")
    turn.append(notice(turn), partials=[turn.grown("m", "x")])
    store.runs.add_control("run_1", Control("cancel"))
    for _ in range(2):
        store.runs.discard("run_1")
        assert store.runs.get("run_1") is None
        assert store.runs.read("run_1", 0, 10) == store.runs.durable("run_1") == store.runs.partials("run_1") == []
        assert store.runs.take_controls("run_1") == store.runs.rows("run_1") == []
        assert store.sessions.get_session("run_1") is None
        assert store.sessions.search_messages("remarkable") == []
    assert ids_of(store) == [other.run_id]
    assert texts(store.sessions, "s") == ["What is the time?"]


def test_run_of_another_process_is_not_discarded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn(store, "run_1", run_id="run_1")
    turn.begin()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("hermes.store.runs.this_process", lambda: "other:1:1.00")
        store.runs.discard("run_1")
    assert store.runs.get("run_1") is not None and texts(store.sessions, "run_1") == ["What is the time?"]


def test_discarded_run_keeps_its_session(turn: Turn) -> None:
    turn.store.runs.discard(turn.run_id)
    assert texts(turn.store.sessions, "s") == ["What is the time?"]


@pytest.mark.parametrize("token", [None, 1])
@pytest.mark.parametrize("way", ["discarded", "with its session"])
def test_write_to_deleted_run_is_rejected(turn: Turn, way: str, token: int | None) -> None:
    if way == "discarded":
        turn.store.runs.discard(turn.run_id)
    else:
        turn.store.sessions.delete_session("s", force=True)
    before = turn.store.sessions.count_messages("s")
    turn.token = token
    with pytest.raises(LeaseLost):
        turn.append(notice(turn), rows=[turn.row("assistant", "late")], session={"id": "s", "source": "cli"})
    with pytest.raises(LeaseLost):
        turn.store.runs.put_partials(turn.run_id, token, [turn.grown("m", "late")])
    assert turn.store.runs.get(turn.run_id) is None
    assert turn.store.sessions.count_messages("s") == before
    assert (turn.store.sessions.get_session("s") is None) == (way == "with its session")


# ---- retention

RUN_DAYS = {"": 7.0, "job": 30.0, "cli": 30.0}
LOG_HOURS = {"chat": 1.0, "session": 1.0, "job": 24.0, "cli": 24.0}
HOUR, DAY = 3600.0, 86_400.0
KINDS = ("chat", "response", "session", "run", "job", "cli", "subagent")


def ended_run(store: Store, ago: float, **fields: Any) -> Turn:
    """A run with an answer, whose end is that long ago."""
    turn = Turn(store, fields.pop("session_id", "s"), **fields)
    turn.begin()
    text = turn.grown("m", "No", "on.")
    turn.complete("m", text.text, text.cuts)
    end = turn.event("run.completed", message_id="m", row=turn.store.runs.rows(turn.run_id)[-1].id, usage={})
    end.ts = time.time() - ago
    turn.append(end)
    return turn


def sweep(store: Store, max_stored: int = 1000, **options: Any) -> dict[str, int]:
    return store.runs.sweep(RUN_DAYS, LOG_HOURS, max_stored, **options)


def expired(store: Store, turn: Turn) -> bool:
    record = store.runs.get(turn.run_id)
    assert record is not None
    return record.log_expired


@pytest.mark.parametrize("kind", KINDS)
def test_log_retention_by_kind(store: Store, kind: Any) -> None:
    hours = LOG_HOURS.get(kind)
    young = ended_run(store, (hours or 6 * 24) * HOUR - 60, kind=kind)
    old = ended_run(store, (hours or 6 * 24) * HOUR + 60, kind=kind)
    assert sweep(store) == {"logs": 1 if hours else 0, "runs": 0}
    assert (expired(store, young), expired(store, old)) == (False, hours is not None)
    assert len(paged(store, young.run_id, 2)) == 5
    assert sweep(store) == {"logs": 0, "runs": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_run_retention_by_kind(store: Store, kind: Any) -> None:
    days = RUN_DAYS.get(kind, RUN_DAYS[""])
    young = ended_run(store, days * DAY - 60, kind=kind)
    old = ended_run(store, days * DAY + 60, kind=kind)
    assert sweep(store)["runs"] == 1
    assert ids_of(store) == [young.run_id]
    assert store.runs.read(old.run_id, 0, 10) == store.runs.durable(old.run_id) == []
    assert len(texts(store.sessions, "s")) == 4


def test_sweep_accepts_explicit_time(store: Store) -> None:
    turn = ended_run(store, 0, kind="chat")
    assert sweep(store, now=time.time() + 0.9 * HOUR) == {"logs": 0, "runs": 0}
    assert sweep(store, now=time.time() + 1.1 * HOUR) == {"logs": 1, "runs": 0}
    assert sweep(store, now=time.time() + 6.9 * DAY) == {"logs": 0, "runs": 0}
    assert sweep(store, now=time.time() + 7.1 * DAY) == {"logs": 0, "runs": 1}
    assert store.runs.get(turn.run_id) is None


def test_status_and_answer_outlive_log(store: Store) -> None:
    turn = ended_run(store, 2 * HOUR, kind="chat")
    before = store.runs.get(turn.run_id)
    assert before is not None
    sweep(store)
    for after in (0, 3, 1000):
        with pytest.raises(EventsExpired):
            store.runs.read(turn.run_id, after, 10)
    assert store.runs.get(turn.run_id) == replace(before, log_expired=True)
    assert before.state.status == "completed"
    answer = store.runs.row(turn.run_id, before.state.final_row or 0)
    assert answer is not None
    assert answer.content == "Noon."
    assert ids_of(store, status="completed") == [turn.run_id]
    assert store.runs.durable(turn.run_id) == store.runs.partials(turn.run_id) == []


async def test_expired_log_raises_events_expired(store: Store) -> None:
    turn = ended_run(store, 2 * HOUR, kind="chat")
    sweep(store)
    with pytest.raises(EventsExpired):
        _ = [event async for event in RunLog(MemoryBus()).subscribe(turn.run_id, Async(store).runs)]


def test_partials_are_deleted_with_log(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(open_store(url(path))) as store:
        turn = ended_run(store, 2 * HOUR, kind="session")
        store.runs.put_partials(turn.run_id, None, [turn.grown("m", "left behind")])
        sweep(store)
        for table in ("run_events", "run_partials"):
            assert look(path, f"SELECT count(*) FROM {table}") == [(0,)]
        assert look(path, "SELECT count(*) FROM runs") == [(1,)]


def test_log_is_kept_while_idempotency_key_is_valid(store: Store) -> None:
    turns = {ttl: ended_run(store, 2 * HOUR, kind="chat") for ttl in (DAY, -1.0)}
    plain = ended_run(store, 2 * HOUR, kind="chat")
    for ttl, turn in turns.items():
        store.idempotency.claim("scope", f"key{ttl}", "print", ttl, turn.run_id)
    assert sweep(store) == {"logs": 2, "runs": 0}
    assert not expired(store, turns[DAY])
    assert len(store.runs.read(turns[DAY].run_id, 0, WHOLE)) == 5
    assert expired(store, turns[-1.0])
    assert expired(store, plain)
    assert sweep(store, now=time.time() + 2 * DAY) == {"logs": 1, "runs": 0}


def test_sweep_keeps_unfinished_runs(store: Store) -> None:
    turns = [Turn(store, "s", kind=kind) for kind in KINDS]
    for turn in turns[::2]:
        turn.begin()
    assert sweep(store, 0, now=time.time() + 1000 * DAY) == {"logs": 0, "runs": 0}
    assert sorted(ids_of(store)) == sorted(turn.run_id for turn in turns)
    assert len(store.runs.read(turns[0].run_id, 0, 10)) == 1


def test_sweep_keeps_newest_runs_per_owner_and_kind(store: Store) -> None:
    run_ids: dict[tuple[str, str], list[str]] = {}
    for _ in range(5):
        for owner, kind in (("ada", "run"), ("ada", "chat"), ("bob", "run")):
            run_ids.setdefault((owner, kind), []).append(
                ended_run(store, 60, session_id=owner, owner=owner, kind=kind).run_id
            )
    waiting = Turn(store, "bob", owner="bob", kind="run").run_id
    assert sweep(store, 3) == {"logs": 0, "runs": 2 + 2 + 3}
    assert ids_of(store, owner="ada", kind="run") == run_ids["ada", "run"][:1:-1]
    assert ids_of(store, owner="ada", kind="chat") == run_ids["ada", "chat"][:1:-1]
    assert ids_of(store, owner="bob") == [waiting, *run_ids["bob", "run"][:2:-1]]


def test_sweep_of_many_batches_is_complete(store: Store) -> None:
    total = 2 * SWEEP_BATCH_ROWS + 50

    def make() -> None:
        for number in range(total):
            turn = Turn(store, "s", kind="chat" if number % 2 else "run")
            end = turn.event("run.failed", failure="timeout", error="late")
            end.ts = time.time() - (8 * DAY if number < SWEEP_BATCH_ROWS + 20 else 2 * HOUR)
            turn.append(end)

    store.transaction(make)
    old = SWEEP_BATCH_ROWS + 20
    remaining = total - old
    assert sweep(store, 100) == {"logs": total // 2, "runs": old + remaining - 200}
    assert len(ids_of(store)) == 200


def test_ended_run_log_rejects_further_events(store: Store) -> None:
    spec = RunSpec("hi", "s")
    store.runs.create(spec)

    def event(type_: str, seq: int) -> Event:
        return Event(spec.run_id, type_, 0, {"model": "m", "provider": "p"}, seq, 1.0)

    store.runs.append(spec.run_id, None, [event("run.started", 2)])
    with pytest.raises(LeaseLost):
        store.runs.append(spec.run_id, None, [event("notice", 2)])
    store.runs.append(spec.run_id, None, [event("run.completed", 3)])
    with pytest.raises(LeaseLost):
        store.runs.append(spec.run_id, None, [event("notice", 4)])
    assert [e.seq for e in store.runs.durable(spec.run_id)] == [2, 3]


def test_run_recorded_with_its_end_keeps_log_and_drops_history(store: Store) -> None:
    history = [{"role": "user", "content": "an earlier question"}]
    spec = RunSpec("What is the time?", "s", kind="chat", history=history, owner="guest")
    started = Event(spec.run_id, "run.started", 0, {"model": "m", "provider": "p", "user_row": None}, 1, 1.0)
    ended = Event(spec.run_id, "run.completed", 0, {"row": None, "usage": {}, "message": "\ud800"}, 2, 2.0)
    row = Row("s", "user", "What is the time?", spec.run_id, announced_in=((started, "user_row"),))
    session = {"id": "s", "source": "api_server", "owner": "guest"}
    store.runs.append(spec.run_id, None, [started, ended], [row], session=session, creates=spec)
    assert ended.data["message"] == "\ufffd"  # what is shown is what is stored
    assert store.runs.read(spec.run_id, 0, 10) == store.runs.durable(spec.run_id) == [started, ended]
    assert store.runs.read(spec.run_id, 1, 10) == [ended]
    assert [row.content for row in store.runs.rows(spec.run_id)] == ["What is the time?"]
    record = store.runs.get(spec.run_id)
    assert record is not None
    assert record.spec == spec.replace(history=[])
    assert store.runs.page(owner="guest", limit=5)[0][0].spec.owner == "guest"


def claim(store: Store, *, ends: bool) -> tuple[str, ClaimedSession | None]:
    """Put a run on record that makes its session, as every process does that has a chat with this opening."""
    spec = RunSpec("hi", session_id="api-1", base_id="api-1", kind="chat", history=[])
    started = Event(
        spec.run_id,
        "run.started",
        0,
        {"kind": "chat", "session_id": "api-1", "model": "m", "provider": "p"},
        1,
        BEGUN_AT,
    )
    usage = Event(spec.run_id, "usage", 1, {"input_tokens": 3, "output_tokens": 2, "model": "m"}, 2, BEGUN_AT)
    ended = Event(spec.run_id, "run.completed", 0, {"usage": {}}, 3, BEGUN_AT)
    row = Row("api-1", "user", "hi", run_id=spec.run_id, timestamp=BEGUN_AT)
    record = {"id": "api-1", "source": "api_server", "owner": "default", "base_id": "api-1"}
    events = [started, usage, ended] if ends else [started, usage]
    claimed = store.runs.append(
        spec.run_id, None, events, [row], session=record, creates=spec, claims=("another process", 30.0)
    )
    return spec.run_id, claimed


@pytest.mark.parametrize("ends", [True, False])
def test_claimed_session_is_new_and_leased_while_run_continues(store: Store, ends: bool) -> None:
    for expected in ("api-1", "api-1-2", "api-1-3"):
        run_id, claimed = claim(store, ends=ends)
        assert claimed is not None
        assert claimed.session_id == expected
        assert (claimed.token is None) is ends
        assert store.leases.holder(f"session:{expected}") == (None if ends else "another process")
        session, record = store.sessions.get_session(expected), store.runs.get(run_id)
        assert session is not None and record is not None
        assert (session["message_count"], session["api_call_count"], session["input_tokens"]) == (1, 1, 3)
        assert record.spec.session_id == expected
        assert store.runs.durable(run_id)[0].data["session_id"] == expected
        assert texts(store.sessions, expected) == ["hi"]


def test_claimed_session_id_skips_leased_ids(store: Store) -> None:
    assert store.leases.acquire("session:api-1", "another process", 30.0) is not None
    _, claimed = claim(store, ends=True)
    assert claimed is not None and claimed.session_id == "api-1-2"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("short 'x' 😀", "short 'x' 😀"),
        ("é" * 600, "é" * 500),
        ([{"type": "text", "text": "Look: " + "x" * 600}, {"type": "image_url"}], "Look: " + "x" * 494),
        ([{"type": "image_url", "image_url": {"url": "data:"}}], ""),
        ("", ""),
    ],
)
def test_run_list_has_start_of_user_message(store: Store, message: Any, expected: str) -> None:
    store.runs.create(RunSpec(message, "s"))
    [record], _, total = store.runs.page(owner=None, limit=5)
    assert (record.spec.user_message, total) == (expected, 1)


# ---- numbers of runs


def test_second_run_of_a_number_is_refused_at_the_first_try(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec("hi", session_id="s")
    store.runs.create(spec)
    tries: list[RunSpec] = []
    monkeypatch.setattr(
        runs_module, "_create", lambda tx, spec, create=runs_module._create: (tries.append(spec), create(tx, spec))
    )
    with pytest.raises(RunExists):
        store.runs.create(spec)
    # A file is tried once more, alone, for the sake of what shared the transaction.
    assert len(tries) <= 3
    record = store.runs.get(spec.run_id)
    assert record is not None and record.state.status == "queued"


async def test_losing_a_race_to_create_a_run_writes_nothing(store: Store) -> None:
    runs, spec = Async(store).runs, RunSpec("hi", session_id="s")
    await runs.create(spec)
    event = Event(spec.run_id, "run.started", 0, {"model": "m", "provider": "p"}, 1, BEGUN_AT)
    with pytest.raises(RunExists):
        await runs.append(spec.run_id, None, [event], session={"id": "s2", "source": "cli"}, creates=spec)
    assert await runs.read(spec.run_id, 0, WHOLE) == []
    assert store.sessions.get_session("s2") is None


@pytest.mark.parametrize("beside", [0, 2])
async def test_owner_has_no_more_runs_than_it_may_have(store: Store, beside: int) -> None:
    """However many are put on record at once."""
    runs = Async(store).runs

    async def submit(number: int, owner: str = "alice") -> bool:
        spec = RunSpec("hi", session_id=f"s-{owner}-{number}", owner=owner)
        event = Event(spec.run_id, "run.queued", 0, {"session_id": spec.session_id, "position": 0}, 1, BEGUN_AT)
        try:
            await runs.append(spec.run_id, None, [event], creates=spec, owner_max=5)
        except NoPlace:
            return False
        return True

    for number in range(beside):
        await runs.create(RunSpec("hi", session_id=f"b{number}", owner="alice"))
    admitted = await asyncio.gather(*(submit(number) for number in range(12)))
    assert sum(admitted) == 5 - beside
    assert (await runs.unfinished_counts())["alice"][0] == 5
    assert await submit(0, "bob")
