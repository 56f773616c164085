"""The door of a server: which requests are those of the user whose home it serves, and what only they may ask for."""

from __future__ import annotations

import json
import os
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from hermes.core.home import Home
from hermes.server.status import read_runtime_status
from support.model_server import Call, Reply

from .conftest import Place


def submitted(place: Place, body: dict[str, Any], door: str = "") -> tuple[int, dict[str, Any]]:
    """What a server says to a run that is asked for."""
    state = read_runtime_status(Home(place.home))
    assert state is not None
    connection = HTTPConnection("127.0.0.1", state["port"], timeout=20)
    headers = {"Content-Type": "application/json", **({"X-Hermes-Door": door} if door else {})}
    connection.request("POST", "/v1/runs", json.dumps({"input": "hi", **body}), headers)
    answer = connection.getresponse()
    told = json.loads(answer.read())
    connection.close()
    return answer.status, told


def test_gateway_token_is_private_and_removed(place: Place) -> None:
    place.serve()
    token = place.home / "gateway.token"
    assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) > 30
    assert place.run("gateway", "stop").returncode == 0
    assert not token.exists()


@pytest.mark.parametrize("door", ["", "guessed"])
def test_request_without_token_cannot_choose_workdir_or_cli(door: str, place: Place, tmp_path: Path) -> None:
    place.serve()
    status, told = submitted(place, {"workdir": str(tmp_path)}, door)
    assert status == 400 and told["error"]["param"] == "workdir" and "terminal.workspaces" in told["error"]["message"]
    status, told = submitted(place, {"workdir": str(tmp_path), "cli": {"yolo": True}}, door)
    assert status == 400 and told["error"]["param"] == "cli"
    assert place.model.requests == []


def test_shared_workspace_is_open_to_all(place: Place, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    place.configure("approvals: {mode: off}\n")
    config = (place.home / "config.yaml").read_text()
    (place.home / "config.yaml").write_text(config.replace("backend: local", f"backend: local, workspaces: [{shared}]"))
    place.serve()
    place.script(Reply(tool_calls=[Call("terminal", {"command": "pwd > here.txt"})]), Reply(text="done"))
    assert submitted(place, {"workdir": str(shared)})[0] == 202
    while not (shared / "here.txt").exists():
        os.sched_yield()


def test_cli_request_requires_valid_workdir(place: Place) -> None:
    place.serve()
    door = (place.home / "gateway.token").read_text()
    for workdir in (None, "relative"):
        status, told = submitted(place, {"cli": {}, **({"workdir": workdir} if workdir else {})}, door)
        assert status == 400 and told["error"]["param"] == "workdir"


def test_cli_and_server_share_run_and_session(place: Place) -> None:
    place.serve()
    assert place.server is not None
    place.script(Reply(text="One."), Reply(text="Two.", continues=False))
    first = json.loads(place.run("-z", "one", "--json").stdout)
    shown = json.loads(place.run("runs", "show", first["run_id"], "--json").stdout)
    assert (shown["kind"], shown["session_id"]) == ("cli", first["session_id"])
    place.server.terminate()
    place.server.wait()
    second = json.loads(place.run("-r", first["session_id"], "-z", "two", "--json").stdout)
    assert second["session_id"] == first["session_id"]
    assert [role for role, _ in place.said()] == ["user", "assistant"] * 2


def test_server_with_key_accepts_cli_token(place: Place) -> None:
    place.configure("api_server: {key: q7Zr-4fJ0_pW2xLs9TnB6vYc1HdK8mGa}\n")
    place.serve()
    place.script(Reply(text="ok"))
    done = place.run("-z", "hi")
    assert (done.stdout, done.stderr) == ("ok\n", "")


def test_unresponsive_server_is_bypassed(place: Place) -> None:
    place.serve()
    assert place.server is not None
    place.server.send_signal(19)  # it is held up
    try:
        place.script(Reply(text="ok"))
        assert place.run("-z", "hi").stdout == "ok\n"
    finally:
        place.server.send_signal(18)
