"""`hermes gateway` as people and init systems use it: real processes, sockets and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

import hermes
from hermes.cli import gateway_command
from hermes.cli.main import main
from hermes.core.home import Home, is_served
from hermes.server.status import hold, read_runtime_status, write_runtime_status
from support.model_server import ModelServer, Reply
from support.ports import refusing_port
from support.preloaded import HermesProcess
from support.server_thread import serving as model
from support.waiting import DEADLINE_S, until_blocking

COMMAND = (sys.executable, "-m", "hermes")


@pytest.fixture
def home(home_folder: Path) -> Home:
    home_folder.mkdir(mode=0o700)
    return Home(home_folder)


class Server:
    """A process that serves; made when its line is there."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.line = process.stdout.readline()
        match = re.search(r"listening on (http://\S+)", self.line)
        assert match, process.communicate()
        self.url = match[1]

    def get(self, path: str) -> int:
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=DEADLINE_S)
        connection.request("GET", path)
        try:
            return connection.getresponse().status
        finally:
            connection.close()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Its exit code and what it said."""
        self.process.send_signal(number)
        stderr = self.process.communicate(timeout=DEADLINE_S)[1]
        return self.process.returncode, stderr


Launch = Callable[..., Server]


@pytest.fixture
def launch(home: Home) -> Iterator[Launch]:
    """Starts servers, and ends those that are left."""
    with ExitStack() as stack:

        def started(*args: str, **more: Any) -> Server:
            process = HermesProcess(
                [*COMMAND, *(args or ("gateway", "run", "--port", "0"))],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                **more,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return Server(process)

        yield started


def run_command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@contextmanager
def hanging(home: Home, launch: Launch) -> Iterator[Server]:
    """A server with a turn whose model says nothing."""
    with model(Reply(text="never", stall_at=0)) as silent:
        configure(home, silent)
        server = launch()
        connection = HTTPConnection(urlsplit(server.url).netloc, timeout=DEADLINE_S)
        question = {"stream": True, "messages": [{"role": "user", "content": "hi"}]}
        connection.request("POST", "/v1/chat/completions", json.dumps(question), {"Content-Type": "application/json"})
        until_blocking(lambda: len(silent.requests) == 1)
        try:
            yield server
        finally:
            connection.close()


def configure(home: Home, server: ModelServer) -> None:
    quiet = "auxiliary: {title_generation: {enabled: false}}"
    home.config_file.write_text(f"model: {{default: m, base_url: '{server.url}/v1'}}\n{quiet}\n")


def state(home: Home) -> dict[str, Any]:
    payload: dict[str, Any] = json.loads(home.state_file.read_text())
    return payload


# ---- run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_gateway_serves_until_terminated(number: signal.Signals, home: Home, launch: Launch) -> None:
    command = ("-m", "llama", "--provider", "ollama", "gateway", "run", "--port", "0")
    # Whoever runs the tests may have done so with `nohup`.
    server = launch(*command, umask=0, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    health = server.get("/health")
    code, stderr = server.end(number)
    assert server.line.startswith(
        f"Hermes {hermes.__version__} listening on {server.url} (model ollama/llama, auth open"
    )
    assert (health, code, stderr) == (200, 0, "")
    assert (state(home)["gateway_state"], is_served(home)) == ("stopped", False)
    files = [path for path in home.path.rglob("*") if path.is_file()]
    assert {home.state_db, home.state_file, home.lock_file} <= set(files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_nohup_keeps_gateway_after_hangup(home: Home, launch: Launch) -> None:
    server = launch(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    server.process.send_signal(signal.SIGHUP)
    assert server.get("/health") == 200
    assert server.end()[0] == 0


def test_second_signal_ends_gateway_immediately(home: Home, launch: Launch) -> None:
    with hanging(home, launch) as server:
        server.process.send_signal(signal.SIGTERM)
        until_blocking(lambda: state(home)["gateway_state"] == "draining")
        health = server.get("/health")
        code, _ = server.end()
    assert (health, code) == (200, 130)
    assert not is_served(home)


def test_startup_failure_is_reported(home: Home) -> None:
    home.config_file.write_text("model: [")
    result = run_command("gateway", "run", "--port", "0")
    assert (result.returncode, result.stdout) == (78, "")
    assert result.stderr.startswith("hermes: config.yaml line 2, column 1: ") and result.stderr.count("\n") <= 2
    assert "Try: hermes config edit" in result.stderr
    assert state(home)["gateway_state"] == "startup_failed"


def test_home_is_served_once_until_replaced(home: Home, launch: Launch) -> None:
    first = launch()
    second = run_command("gateway", "run", "--port", "0")
    assert second.returncode == 4 and f"pid {first.process.pid}" in second.stderr
    assert first.get("/health") == 200
    port = urlsplit(first.url).port
    third = launch("gateway", "run", "--replace", "--port", str(port))
    assert (first.process.wait(timeout=DEADLINE_S), third.url, third.get("/health")) == (0, first.url, 200)
    assert state(home)["pid"] == third.process.pid
    assert third.end()[0] == 0


def test_two_profiles_on_own_ports(home: Home, launch: Launch) -> None:
    (home.path / "profiles" / "work").mkdir(parents=True, mode=0o700)
    first = launch()
    port = str(urlsplit(first.url).port)
    refused = run_command("gateway", "run", "--port", port, "-p", "work")
    assert refused.returncode == 69
    assert f"127.0.0.1:{port} cannot be bound" in refused.stderr
    assert f"profile 'default' (pid {first.process.pid})" in refused.stderr
    second = launch("-p", "work", "gateway", "run", "--port", "0")
    assert (first.get("/health"), second.get("/health")) == (200, 200)
    assert str(home.path / "profiles" / "work" / "state.db") in second.line
    assert main(["gateway", "stop", "-p", "work"]) == 0
    assert (second.process.wait(timeout=DEADLINE_S), first.process.poll()) == (0, None)


@pytest.mark.parametrize("args", [["--port", "65536"], ["--port", "x"], ["--port", "-1"], ["--no-such"]])
def test_invalid_argument_is_usage_error(args: list[str], home: Home) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["gateway", "run", *args])
    assert ended.value.code == 2
    assert not home.state_file.exists()


# ---- status, stop, restart


def test_gateway_status_and_stop(
    home: Home, launch: Launch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gateway_command, "_HEALTH_S_MAX", DEADLINE_S)
    with model() as unused:
        configure(home, unused)
        server = launch()
        until_blocking(lambda: server.get("/health/ready") == 200)
        code = main(["gateway", "status", "--json"])
        payload = json.loads(capfd.readouterr().out)
        deep = main(["gateway", "status", "--deep"])
        lines = capfd.readouterr().out.splitlines()
        stopped = main(["gateway", "stop", "--json"])
        after = json.loads(capfd.readouterr().out)
        again = main(["gateway", "stop"]), main(["gateway", "status"])
    assert (code, deep, stopped, again, server.process.wait(timeout=DEADLINE_S)) == (0, 0, 0, (5, 5), 0)
    assert (payload["state"], payload["address"], payload["pid"]) == ("running", server.url, server.process.pid)
    assert (payload["runs"], payload["store"], payload["bus"], payload["error"]) == (0, "ok", "ok", None)
    assert "state: running" in lines and any(line.startswith("check state_db: ok") for line in lines)
    assert after == {"stopped": True, "pid": server.process.pid}
    captured = capfd.readouterr()
    assert captured.out == "state: stopped\n" and "No server is running" in captured.err


def test_silent_server_is_degraded(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    with hold(home), refusing_port() as port:
        write_runtime_status(home, gateway_state="running", host="127.0.0.1", port=port)
        code = main(["gateway", "status"])
    captured = capsys.readouterr()
    assert code == 1
    assert "state: degraded" in captured.out and "does not answer" in captured.err


def test_status_reports_failed_start(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    write_runtime_status(home, gateway_state="startup_failed", exit_reason="The port is taken.")
    assert main(["gateway", "status"]) == 5
    assert "The last start failed: The port is taken." in capsys.readouterr().err


def test_status_and_stop_create_nothing(home: Home) -> None:
    assert (main(["gateway", "status"]), main(["gateway", "stop"])) == (5, 5)
    assert list(home.path.iterdir()) == []


def test_stop_now_does_not_wait(home: Home, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    patience: list[float] = []
    is_free = gateway_command._is_free

    def is_free_later(home: Home, seconds: float) -> bool:
        """The time for the drain is over as soon as it has begun; the rest may take as long as the machine needs."""
        patience.append(seconds)
        if len(patience) == 1:
            until_blocking(lambda: state(home)["gateway_state"] == "draining")
            return not is_served(home)
        return is_free(home, DEADLINE_S)

    monkeypatch.setattr(gateway_command, "_is_free", is_free_later)
    with hanging(home, launch) as server:
        assert main(["gateway", "stop", "--now"]) == 0
        assert server.process.wait(timeout=DEADLINE_S) == 130
    assert patience == [gateway_command.NOW_S] * 2
    assert read_runtime_status(home) is None


def test_stop_timeout_is_reported(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gateway_command, "_END_S_MAX", 0.1)
    home.config_file.write_text("api_server: {drain_seconds: 0}")
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    with hold(home):
        write_runtime_status(home, gateway_state="running", active_agents=2)
        assert main(["gateway", "stop"]) == 1
    err = capsys.readouterr().err
    assert "Waiting for 2 running turns" in err and "Try: hermes gateway stop --now" in err


def test_gateway_restart_keeps_arguments(home: Home, launch: Launch) -> None:
    first = launch("gateway", "run", "-v", "--port", "0")
    second = launch("gateway", "restart")
    assert first.process.wait(timeout=DEADLINE_S) == 0
    assert second.get("/health") == 200
    assert state(home)["pid"] == second.process.pid
    assert state(home)["argv"][1:] == ["gateway", "run", "-v", "--port", "0", "-p", "default"]
    code, stderr = second.end()
    assert code == 0 and "INFO hermes.server.runner: draining" in stderr


# ---- key


def test_gateway_key_is_generated_once_and_private(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    codes = [main(["gateway", "key"])]
    first = capsys.readouterr()
    codes.append(main(["gateway", "key"]))
    second = capsys.readouterr()
    codes.append(main(["gateway", "key", "--new", "--json"]))
    third = json.loads(capsys.readouterr().out)
    assert codes == [0, 0, 0]
    assert len(first.out.strip()) >= 43 and first.out.count("\n") == 1 and str(home.env_file) in first.err
    assert (second.out, second.err) == (first.out, "")
    assert third["new"] and third["key"] != first.out.strip()
    assert home.env_file.read_text() == f"API_SERVER_KEY={third['key']}\n"
    assert stat.S_IMODE(home.env_file.stat().st_mode) == 0o600


def test_gateway_key_warns_if_not_in_effect(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("API_SERVER_KEY", "from-the-environment")
    with hold(home):
        main(["gateway", "key", "--new"])
    err = capsys.readouterr().err
    assert "API_SERVER_KEY still comes first" in err and "hermes gateway restart" in err
    main(["gateway", "key"])
    assert capsys.readouterr().out == "from-the-environment\n"


def test_profiles_are_served_under_their_names(home: Home, launch: Launch) -> None:
    for name in ("work", "club"):
        folder = home.root / "profiles" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"api_server: {{key: sk-{name}-0123456789abcdef}}\n")
    home.config_file.write_text("api_server: {key: sk-main-0123456789abcdef, profiles: [work, club]}\n")
    url = launch().url

    def request(path: str, key: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer sk-{key}-0123456789abcdef", "Content-Type": "application/json"}
        try:
            with urlopen(Request(url + path, body, headers)) as answer:
                return answer.status, json.load(answer)
        except HTTPError as refusal:
            return refusal.code, json.load(refusal)["error"]

    for name in ("work", "club"):
        status, document = request(f"/p/{name}/v1/models", name)
        assert status == 200 and [model["id"] for model in document["data"]] == [name]
        for other in ("main", "club" if name == "work" else "work"):
            assert request(f"/p/{name}/v1/models", other)[0] == 401
        assert request("/v1/models", name)[0] == 401
    assert request("/p/work/api/sessions", "work", b'{"id": "mine"}')[0] == 201
    assert request("/p/work/api/sessions/mine", "work")[0] == 200
    assert request("/p/club/api/sessions/mine", "club")[0] == request("/api/sessions/mine", "main")[0] == 404
    assert request("/p/none/v1/models", "main")[1]["code"] == "profile_not_found"
    assert request("/p/work/v1/nothing", "work")[1]["code"] == "not_found"
    assert request("/v1/capabilities", "main")[1]["features"]["profiles"] is True
    assert request("/p/work/v1/capabilities", "work")[1]["features"]["profiles"] is False
