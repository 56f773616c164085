"""`hermes runs`, with a server that is up and without one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from hermes.core.events import Event
from hermes.core.home import Home, write_private
from hermes.core.spec import RunSpec
from hermes.store.base import Row
from hermes.store.stores import Store
from support.model_server import Call, ModelServer, Reply
from support.preloaded import HermesProcess
from support.server_thread import serving
from support.waiting import DEADLINE_S, until_blocking

from .shell import Hermes

QUIET = "auxiliary: {title_generation: {enabled: false}}\n"


@contextmanager
def started_gateway(home: Home, model: ModelServer, more: str = "") -> Iterator[Callable[[str], str]]:
    """A server of the home in a process of its own; what is yielded submits a run and gives its id."""
    write_private(home.config_file, f"model: {{default: m, base_url: '{model.url}/v1'}}\n{QUIET}{more}")
    process = HermesProcess(
        [sys.executable, "-m", "hermes", "gateway", "run", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    match = re.search(r"listening on (http://\S+)", process.stdout.readline())
    assert match

    def submit(text: str) -> str:
        connection = HTTPConnection(urlsplit(match[1]).netloc, timeout=DEADLINE_S)
        body = json.dumps({"input": text, "session_id": "talk"})
        connection.request("POST", "/v1/runs", body, {"Content-Type": "application/json"})
        with closing(connection):
            return str(json.loads(connection.getresponse().read())["run_id"])

    try:
        yield submit
    finally:
        process.kill()
        process.communicate()


def status(hermes: Hermes, run_id: str) -> str:
    return str(hermes("runs", "show", run_id, "--json").json["status"])


@pytest.fixture
def store(home: Home) -> Iterator[Store]:
    with closing(Store(home.state_db)) as store:
        yield store


def store_run(store: Store, run_id: str, *types: str, session_id: str = "talk", **data: Any) -> str:
    """Store a run whose log has these events; no process runs it."""
    store.sessions.create_session(session_id, "api_server")
    store.runs.create(RunSpec("hi", session_id, run_id=run_id))
    token = store.leases.acquire(f"session:{session_id}", "nobody:1:1", 60)
    begin = {"model": "m", "provider": "p"}
    for seq, kind in enumerate(types, 1):
        event = Event(run_id, kind, data={**begin, **data.get(kind.replace(".", "_"), {})}, seq=seq, ts=1_700_000_000.0)
        row = (
            [Row(session_id, "assistant", "Done.", run_id, announced_in=((event, "row"),))]
            if kind == "run.completed"
            else []
        )
        store.runs.append(run_id, token, [event], row)
    assert token is not None
    store.leases.release(f"session:{session_id}", token)
    return run_id


# ---- without a server


def test_runs_without_runs(home: Home, hermes: Hermes) -> None:
    result = hermes("runs", "list", "--json")
    assert (result.code, result.json) == (0, {"runs": [], "more": False}) and result.err
    assert not home.state_db.exists()
    for args in (("show", "x"), ("tail", "x"), ("stop", "x"), ("deny", "x")):
        assert hermes("runs", *args).code == 5


def test_runs_list_and_show(home: Home, hermes: Hermes, store: Store) -> None:
    first = store_run(store, "run_aa1", "run.started", "run.completed")
    second = store_run(store, "run_ab2", "run.started", session_id="other")
    listed = hermes("runs", "list", "--json").json["runs"]
    assert [(run["run_id"], run["status"]) for run in listed] == [(second, "running"), (first, "completed")]
    assert listed[1]["output"] == "Done." and listed[1]["started_at"].startswith("2023-11-14T22:13:20")
    assert [run["run_id"] for run in hermes("runs", "list", "--status", "completed", "--json").json["runs"]] == [first]
    assert [run["run_id"] for run in hermes("runs", "list", "--session", "oth", "--json").json["runs"]] == [second]
    assert hermes("runs", "list", "--limit", "1", "--json").json["more"] is True
    assert hermes("runs", "show", "aa").lines == hermes("runs", "show", "run_aa1").lines
    assert "output: Done." in hermes("runs", "show", "aa").lines
    assert hermes("runs", "show", "run_a").code == 2
    assert hermes("runs", "list", "--status", "nonsense").code == 2


def test_runs_tail_of_ended_run(home: Home, hermes: Hermes, store: Store) -> None:
    run_id = store_run(store, "run_aa1", "run.started", "run.failed", run_failed={"error": "No luck."})
    result = hermes("runs", "tail", run_id)
    assert result.code == 1 and "run.failed No luck." in result.lines[-1]
    after = hermes("runs", "tail", run_id, "--after", "1", "--json")
    assert [event["type"] for event in after.json["events"]] == ["run.failed"]


def test_runs_control_of_ended_run_fails(home: Home, hermes: Hermes, store: Store) -> None:
    run_id = store_run(store, "run_aa1", "run.started", "run.completed")
    for args in (("stop", run_id), ("steer", run_id, "x"), ("approve", run_id), ("answer", run_id, "x")):
        result = hermes("runs", *args)
        assert result.code == 1 and "has ended: completed" in result.err


def test_runs_control_is_stored_for_later(home: Home, hermes: Hermes, store: Store) -> None:
    run_id = store_run(store, "run_aa1", "run.started")
    result = hermes("runs", "stop", run_id, "--json")
    assert (result.code, result.json["result"]) == (0, "left") and "Nobody carries the run on" in result.err
    [control] = store.runs.take_controls(run_id)
    assert (control.control, control.control_id) == ("interrupt", result.json["control_id"])
    assert hermes("runs", "approve", run_id).code == 1  # it has asked for nothing
    assert hermes("runs", "answer", run_id, "x").code == 1
    assert hermes("runs", "steer", run_id, " ").code == 2


def test_runs_approve_with_unknown_choice_is_usage_error(home: Home, hermes: Hermes, store: Store) -> None:
    approval = {"approval_id": "a1", "subject": "rm", "reason": "It deletes.", "choices": ["once", "deny"]}
    run_id = store_run(store, "run_aa1", "run.started", "approval.requested", approval_requested=approval)
    result = hermes("runs", "approve", run_id, "--choice", "always")
    assert result.code == 2 and "once, deny" in result.err
    assert hermes("runs", "deny", run_id).code == 0
    assert store.runs.take_controls(run_id)[0].data == {"id": "a1", "choice": "deny"}


# ---- with a server


def remember() -> Call:
    return Call("memory", {"target": "memory", "action": "add", "content": "Likes tea."})


@pytest.mark.parametrize(
    ("args", "is_remembered"), [(["approve"], True), (["deny"], False), (["deny", "Write it to notes.txt."], False)]
)
def test_runs_approve_and_deny(args: list[str], is_remembered: bool, home: Home, hermes: Hermes) -> None:
    script = (Reply(tool_calls=[remember()]), Reply(text="Done.", continues=False))
    with serving(*script) as model, started_gateway(home, model, "memory: {write_approval: true}\n") as submit:
        run_id = submit("remember it")
        until_blocking(lambda: status(hermes, run_id) == "waiting_for_approval")
        assert hermes("runs", "deny", run_id, " ").code == 2
        completed = hermes("runs", args[0], run_id, *args[1:], "--json")
        assert (completed.code, completed.json["result"]) == (0, "applied")
        tail = hermes("runs", "tail", run_id)
        assert tail.code == 0 and "Done." in tail.out and "approval.resolved" in tail.out
        result = model.requests[-1].turns[-1].text
    assert (home.memories / "MEMORY.md").exists() is is_remembered
    assert ("Write it to notes.txt." in result) is (len(args) == 2)
    assert ("Do not try to do it in another way." in result) is (args == ["deny"])


def test_runs_answer_clarify(home: Home, hermes: Hermes) -> None:
    script = (Reply(tool_calls=[Call("clarify", {"question": "Which one?"})]), Reply(text="Done.", continues=False))
    with serving(*script) as model, started_gateway(home, model) as submit:
        run_id = submit("do it")
        until_blocking(lambda: status(hermes, run_id) == "waiting_for_input")
        assert "Which one?" in hermes("runs", "show", run_id).out
        assert hermes("runs", "answer", run_id, "The red one.").code == 0
        until_blocking(lambda: status(hermes, run_id) == "completed")
        assert "The red one." in json.dumps([turn.text for turn in model.requests[1].turns])


def test_runs_tail_steer_and_stop(home: Home, hermes: Hermes) -> None:
    with serving(Reply(text="Begun and never ended", stall_at=300)) as model, started_gateway(home, model) as submit:
        run_id = submit("begin")
        until_blocking(lambda: status(hermes, run_id) == "running")
        tail = subprocess.Popen(
            [sys.executable, "-m", "hermes", "runs", "tail", run_id, "--json"], stdout=subprocess.PIPE, text=True
        )
        assert hermes("runs", "steer", run_id, "Hurry.", "--json").json["result"] == "applied"
        assert hermes("runs", "stop", run_id, "--json").json["result"] == "applied"
        out, _ = tail.communicate(timeout=DEADLINE_S)
    events = json.loads(out)["events"]
    assert tail.returncode == 1 and events[-1]["type"] == "run.cancelled"
    assert [event["control"] for event in events if event["type"] == "control.received"] == ["steer", "interrupt"]
    assert [event["seq"] for event in events] == sorted({event["seq"] for event in events})
