"""The sweep: what was kept long enough goes, once in a while, by one process at a time."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes.core.events import Event
from hermes.core.home import Home
from hermes.core.spec import RunSpec
from hermes.services.housekeeping import sweep_if_due
from hermes.settings import config
from hermes.store.base import EventsExpired
from hermes.store.stores import Store, open_store

HOUR, DAY = 3600.0, 86_400.0


def settings(folder: Path, **values: object) -> config.Settings:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return config.load(Home(folder), environ={})


def ended_run(store: Store, kind: str, ago_s: float) -> str:
    spec = RunSpec("hi", "s", kind=kind)  # type: ignore[arg-type]
    store.runs.create(spec)
    at = time.time() - ago_s
    events = [Event(spec.run_id, "run.started", 0, {"model": "m", "provider": "p"}, 1, at)]
    store.runs.append(spec.run_id, None, [*events, Event(spec.run_id, "run.completed", 0, {}, 2, at)])
    return spec.run_id


@pytest.mark.parametrize(
    ("kind", "log_s", "run_s"),
    [
        ("chat", HOUR, 7 * DAY),
        ("session", HOUR, 7 * DAY),
        ("run", 7 * DAY, 7 * DAY),
        ("job", DAY, 30 * DAY),
        ("cli", DAY, 30 * DAY),
        ("response", 30 * DAY, 30 * DAY),
    ],
)
def test_sweep_retention_by_run_kind(store: Store, tmp_path: Path, kind: str, log_s: float, run_s: float) -> None:
    young, old, expired = (
        ended_run(store, kind, log_s - 60),
        ended_run(store, kind, log_s + 60),
        ended_run(store, kind, run_s + 60),
    )
    assert sweep_if_due(store, settings(tmp_path)) is not None
    assert [event.seq for event in store.runs.read(young, 0, 10)] == [1, 2]
    assert store.runs.get(expired) is None
    if log_s < run_s:
        assert store.runs.get(old) is not None
        with pytest.raises(EventsExpired):
            store.runs.read(old, 0, 10)


def test_sweep_runs_at_interval_under_maintenance_lease(store: Store, tmp_path: Path) -> None:
    config = settings(tmp_path)
    token = store.leases.acquire("maintenance", "another process", 60)
    assert token is not None and sweep_if_due(store, config) is None
    store.leases.release("maintenance", token)
    assert sweep_if_due(store, config) is not None
    assert sweep_if_due(store, config) is None
    assert store.leases.holder("maintenance") is None
    assert sweep_if_due(store, config, every_s=0.0) is not None


@pytest.mark.parametrize(("wanted", "is_kept"), [(False, True), (True, False)])
def test_auto_prune_setting_removes_old_sessions(store: Store, tmp_path: Path, wanted: bool, is_kept: bool) -> None:
    store.sessions.create_session("old", "cli")
    store.sessions.append_message("old", "user", "hi", timestamp=1.0)
    store.sessions.end_session("old", "cli_close")
    store.sessions.engine.write(lambda tx: tx.execute("UPDATE sessions SET last_active = 1"))
    sweep_if_due(store, settings(tmp_path, sessions={"auto_prune": wanted}))
    assert (store.sessions.get_session("old") is not None) is is_kept


def test_sweep_removes_folders_of_unstored_turns_after_a_day(tmp_path: Path) -> None:
    home = tmp_path / "home"
    config = settings(home)
    with closing(open_store(f"sqlite:///{home / 'state.db'}")) as store:
        kept_run = ended_run(store, "response", 60)
        store.sessions.create_session("unrecorded-by-name-only", "api_server")
        folders = {
            home / "uploads/unrecorded-old": False,
            home / "uploads/unrecorded-young": True,
            home / "uploads/some-session": True,
            home / "uploads/unrecorded-by-name-only": True,
            home / "sandbox/unrecorded-old": False,
            home / "cache/tool_results/run_unknown": False,
            home / "cache/tool_results" / kept_run: True,
        }
        for folder in folders:
            (folder / "inner").mkdir(parents=True)
            (folder / "inner/file.txt").write_text("x")
            if "young" not in folder.name:
                for path in (folder / "inner/file.txt", folder / "inner", folder):
                    os.utime(path, (time.time() - 2 * DAY,) * 2)
        report = sweep_if_due(store, config)
        assert report is not None and report["unrecorded"] == 3
        assert {folder: folder.exists() for folder in folders} == folders


# ---- sessions of calls that named none


def stateless(store: Store, session_id: str, ago_s: float = 8 * DAY, **fields: object) -> None:
    store.sessions.create_session(session_id, "api_server", stateless=True, **fields)
    store.sessions.append_message(session_id, "user", f"about {session_id} zebra")
    store.sessions.engine.write(
        lambda tx: tx.execute("UPDATE sessions SET last_active = ? WHERE id = ?", (time.time() - ago_s, session_id))
    )


def run_in(store: Store, session_id: str, *, ends: bool = True, **fields: object) -> str:
    spec = RunSpec("hi", session_id, kind="chat", **fields)  # type: ignore[arg-type]
    store.runs.create(spec)
    events = [Event(spec.run_id, "run.started", 0, {"model": "m", "provider": "p"}, 1, time.time())]
    if ends:
        events.append(Event(spec.run_id, "run.completed", 0, {}, 2, time.time()))
    store.runs.append(spec.run_id, None, events)
    return spec.run_id


def named_by_turn(store: Store) -> None:
    session = {"id": "s", "source": "api_server", "owner": "default", "stateless": False}
    spec = RunSpec("again", "s", kind="session")
    store.runs.create(spec)
    event = Event(spec.run_id, "run.started", 0, {"model": "m", "provider": "p"}, 1, time.time())
    store.runs.append(spec.run_id, None, [event], session=session)
    store.runs.append(spec.run_id, None, [Event(spec.run_id, "run.completed", 0, {}, 2, time.time())])
    store.sessions.engine.write(lambda tx: tx.execute("UPDATE sessions SET last_active = 1"))


@pytest.mark.parametrize(
    ("before", "stays"),
    [
        (lambda store: None, False),
        (lambda store: store.sessions.set_auto_title_if_empty("s", "Ours"), False),
        (lambda store: store.sessions.update_session("s", system_prompt="p", prompt_digest="d"), False),
        (lambda store: store.sessions.end_session("s", "done"), False),
        (lambda store: run_in(store, "s"), False),
        (lambda store: store.sessions.set_session_title("s", "Mine"), True),
        (lambda store: store.sessions.update_session("s", pinned=True), True),
        (lambda store: store.sessions.update_session("s", model="m"), True),
        (named_by_turn, True),
        (lambda store: run_in(store, "s", ends=False), True),
        (lambda store: store.leases.acquire("session:s", "another process", 60), True),
    ],
    ids=[
        *("left alone", "titled by itself", "prompt by a turn", "ended", "had a run", "titled", "pinned", "changed"),
        *("continued by name", "run without an end", "held"),
    ],
)
def test_sweep_removes_stateless_sessions_after_a_week(store: Store, tmp_path: Path, before: Any, stays: bool) -> None:
    stateless(store, "s")
    before(store)
    report = sweep_if_due(store, settings(tmp_path))
    assert (store.sessions.get_session("s") is not None) is stays
    assert report is not None and report["sessions"] == (0 if stays else 1)


@pytest.mark.parametrize(
    ("value", "ago_days", "stays"),
    [({}, 6.9, True), ({}, 7.1, False), (2, 2.1, False), (2, 1.9, True), (0, 9000, True), (None, 9000, True)],
)
def test_stateless_session_retention_setting(
    store: Store, tmp_path: Path, value: object, ago_days: float, stays: bool
) -> None:
    stateless(store, "s", ago_days * DAY)
    sweep_if_due(store, settings(tmp_path, sessions={} if value == {} else {"api_retention_days": value}))
    assert (store.sessions.get_session("s") is not None) is stays


def test_sweep_removes_dependents_and_keeps_forks(tmp_path: Path) -> None:
    home = tmp_path / "home"
    config = settings(home)
    with closing(open_store(f"sqlite:///{home / 'state.db'}")) as store:
        stateless(store, "s")
        store.sessions.create_session("child", "subagent", parent_session_id="s", kind="delegate")
        run_id = run_in(store, "s")
        store.sessions.add_file("s", "a.txt", bytes=1, mime="text/plain", direction="received", path="/x")
        fork = store.sessions.fork_session("s")
        folders = [home / "uploads/s", home / "sandbox/s", home / "cache/tool_results" / run_id]
        for folder in folders:
            folder.mkdir(parents=True)
        store.sessions.engine.write(lambda tx: tx.execute("UPDATE sessions SET last_active = 1"))
        sweep_if_due(store, config)
        assert [row["id"] for row in store.sessions.list_sessions(include_children=True)] == [fork]
        assert [hit["session_id"] for hit in store.sessions.search_messages("zebra")] == [fork]
        assert store.runs.get(run_id) is None and not any(folder.exists() for folder in folders)
        remaining = {
            table: store.engine.read(lambda tx, table=table: tx.value(f"SELECT count(*) FROM {table}"))
            for table in ("run_events", "session_files", "messages")
        }
        assert remaining == {"run_events": 0, "session_files": 0, "messages": 1}


def test_sweep_keeps_session_while_response_is_stored(tmp_path: Path) -> None:
    home = tmp_path / "home"
    config = settings(home)
    with closing(open_store(f"sqlite:///{home / 'state.db'}")) as store:
        for name in ("kept", "gone"):
            stateless(store, name)
            run_in(store, name, response_id=f"resp_{name}")
            store.responses.put(f"resp_{name}", {"response": {"status": "completed"}})
        store.sessions.engine.write(lambda tx: tx.execute("UPDATE sessions SET last_active = 1"))
        store.responses.delete("resp_gone")
        sweep_if_due(store, config)
        assert [row["id"] for row in store.sessions.list_sessions()] == ["kept"]
        store.responses.delete("resp_kept")
        sweep_if_due(store, config, every_s=0.0)
        assert store.sessions.list_sessions() == []
