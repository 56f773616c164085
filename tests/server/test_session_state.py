"""What a session has in the process and on the disk belongs to its owner, and goes with the session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes.core.ids import folder_name
from hermes.core.limits import BACKGROUND_MAX
from hermes.store.sessions import SessionDB
from hermes.tools.process import Background, Processes
from support.model_server import Call, Reply
from support.waiting import until

from .clients import Json, read_json
from .conftest import Api, Start
from .test_keys import ANNA, BEN, KEYS, bearer

ODD, PLAIN = "a session of café", "plain"
SETTINGS: Json = {"terminal": {"backend": "local"}, "approvals": {"mode": "off"}}


async def turn(api: Api, key: str, session_id: str, *calls: Call) -> list[Json]:
    """The results of these calls, made in a turn of the session."""
    api.model.script = [*(Reply(tool_calls=[call]) for call in calls), Reply(text="Done.")]
    api.model.requests.clear()
    headers = {**bearer(key), "X-Hermes-Session-Id": session_id}
    body = {"messages": [{"role": "user", "content": "go"}]}
    async with api.post("/v1/chat/completions", body, headers=headers) as response:
        await read_json(response)
    messages = api.model.requests[-1].body["messages"]
    return [json.loads(m["content"]) for m in messages if m["role"] == "tool"]


def command(text: str, **more: Any) -> Call:
    return Call("terminal", {"command": text, **more})


async def delete(api: Api, key: str, session_id: str) -> None:
    async with api.delete(f"/api/sessions/{session_id}", headers=bearer(key)) as response:
        await read_json(response)


@pytest.fixture
async def api(start: Start) -> Api:
    return await start(keys=KEYS, settings=SETTINGS, toolsets=["terminal", "file"])


@pytest.mark.parametrize("by", ["request", "another process"])
@pytest.mark.parametrize("heir", [ANNA, BEN], ids=["same owner", "other owner"])
async def test_new_session_with_reused_id_has_no_state(api: Api, home_folder: Path, by: str, heir: str) -> None:
    await turn(api, ANNA, PLAIN, command("export MELON=green; cd /tmp"))
    anna = api.app.services.session_states.of("anna", PLAIN)
    assert anna.shell is not None and anna.shell.env["MELON"] == "green"
    anna.granted.add("rm")
    anna.yolo = True
    if by == "request":
        await delete(api, ANNA, PLAIN)
        assert ("anna", PLAIN) not in api.app.services.session_states._states
    else:  # the listeners of this process hear nothing of it
        listeners = api.app.store.blocking.engine.deletion_listeners
        saved, listeners[:] = [*listeners], []
        db = SessionDB(home_folder / "state.db")
        assert db.delete_session(PLAIN)
        db.close()
        listeners[:] = saved
    [result] = await turn(api, heir, PLAIN, command('echo "[$MELON] $PWD"'))
    assert result["output"].startswith("[] ") and not result["output"].startswith("[] /tmp\n")
    inherited = api.app.services.session_states.of("anna" if heir == ANNA else "ben", PLAIN)
    assert inherited is not anna and not inherited.granted and not inherited.yolo


async def test_session_state_is_not_shared_between_owners(api: Api) -> None:
    await turn(api, ANNA, PLAIN, command("export MELON=green"))
    assert api.app.services.session_states.of("ben", PLAIN).shell is None


@pytest.mark.parametrize("session_id", [PLAIN, ODD])
async def test_session_files_are_deleted_with_session(api: Api, home_folder: Path, session_id: str) -> None:
    await turn(api, ANNA, session_id, command("true"))
    [run] = await api.app.engine.list(session_id=session_id)
    folders = [home_folder / "uploads" / folder_name(session_id), home_folder / "sandbox" / folder_name(session_id)]
    folders.append(home_folder / "cache" / "tool_results" / run.spec.run_id)
    for folder in folders:
        closed = folder / "home" / "closed"
        closed.mkdir(parents=True)
        (closed / "file").write_text("melon")
        closed.chmod(0)
    await delete(api, ANNA, session_id)
    for folder in folders:
        assert list(folder.parent.iterdir()) == []


async def test_sessions_with_similar_ids_have_own_uploads(start: Start, home_folder: Path) -> None:
    api = await start(*[Reply(text="Hi.")] * 2, keys=KEYS)
    part = {"filename": "n.bin", "file_data": "data:application/octet-stream;base64,AAEC/w=="}
    content = [{"type": "text", "text": "look"}, {"type": "file", "file": part}]
    for key, session_id in ((ANNA, "a b"), (BEN, "a_b")):
        headers = {**bearer(key), "X-Hermes-Session-Id": session_id}
        body = {"messages": [{"role": "user", "content": content}]}
        async with api.post("/v1/chat/completions", body, headers=headers) as response:
            await read_json(response)
    assert {folder.name for folder in (home_folder / "uploads").iterdir()} == {folder_name("a b"), "a_b"}


async def test_background_processes_end_with_session(api: Api) -> None:
    begin = command("sleep 600", background=True, notify_on_complete=True)
    [started] = await turn(api, ANNA, PLAIN, begin)
    [process] = api.app.services.outside.processes.of("anna", PLAIN)
    await delete(api, ANNA, PLAIN)
    await until(process.ended.wait)
    listing, polled = await turn(
        api, BEN, PLAIN, Call("process", {"action": "list"}),
        Call("process", {"action": "poll", "session_id": started["session_id"]}),
    )  # fmt: skip
    assert listing["processes"] == [] and polled["state"] == "lost"
    assert started["session_id"] not in json.dumps(api.model.requests[0].body)


def _background(owner: str, number: int, *, ended: bool = False) -> Background:
    background = Background(f"proc_{owner}{number}", owner, "s", "true", None, None)  # type: ignore[arg-type]
    if ended:
        background.ended.set()
    return background


async def test_background_process_limit_is_per_owner() -> None:
    processes = Processes()
    for number in range(BACKGROUND_MAX):
        process = _background("anna", number)
        processes._processes[process.id] = process
    over = _background("ben", 0, ended=True)
    processes._processes[over.id] = over
    assert not processes.make_room("anna") and processes.make_room("ben")
    assert processes.of("ben", "s") == [over] and processes.get("ben", "s", "proc_anna1") is None
    processes._processes["proc_anna3"].ended.set()
    assert processes.make_room("anna") and "proc_anna3" not in processes._processes and over.id in processes._processes


async def test_unrecorded_session_has_no_files_of_recorded_one() -> None:
    from hermes.core.spec import RunSpec

    specs = [RunSpec("x", "s", owner=owner, persist=persist) for owner in ("anna", "ben") for persist in (True, False)]
    assert [spec.folder_id for spec in specs].count("s") == 2 and len({spec.folder_id for spec in specs}) == 3
