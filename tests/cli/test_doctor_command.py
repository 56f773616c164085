"""`hermes doctor`, `hermes status`, `hermes logs`, `hermes version`, `hermes completion`."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hermes as package
from hermes.cli import doctor_command
from hermes.cli.doctor_command import CHECKS
from hermes.cli.main import COMMANDS, parser_with
from hermes.core.home import Home, write_private
from hermes.core.spec import RunSpec
from hermes.services.health import Check, Finding
from hermes.store.sessions import SessionDB
from hermes.store.sqlite import maintenance
from hermes.store.sqlite.connections import Tx
from hermes.store.stores import Store
from support.model_server import ModelServer, Reply
from support.server_thread import serving
from support.waiting import DEADLINE_S

from .conftest import Cli
from .shell import Hermes

SECRET = "sk-very-secret-0123456789"


@contextmanager
def configured(home: Home, *script: Reply, more: str = "") -> Iterator[ModelServer]:
    with serving(*(script or (Reply(text="Hello."),))) as server:
        write_private(home.config_file, f"model: {{default: m, base_url: '{server.url}/v1'}}\n{more}")
        yield server


def findings(hermes: Hermes, *args: str) -> dict[str, tuple[str, str]]:
    checks = hermes("doctor", *args, "--json").json["checks"]
    return {check["name"]: (check["state"], check["message"]) for check in checks}


# ---- doctor


def test_doctor_runs_all_checks(home: Home, hermes: Hermes) -> None:
    with configured(home) as server:
        result = hermes("doctor", "--json")
        assert len(server.requests) == 1
    report = result.json
    assert [check["name"] for check in report["checks"]] == list(CHECKS)
    assert (result.code, report["ok"]) == (0, True) and not [c for c in report["checks"] if c["state"] == "fail"]
    assert all(set(check) == {"name", "state", "message", "remedy"} for check in report["checks"])


def test_doctor_reports_rejected_key_redacted(home: Home, hermes: Hermes) -> None:
    with configured(home, Reply(status=401, quote_key=True), more="") as server:
        write_private(home.config_file, f"model: {{default: m, base_url: '{server.url}/v1', api_key: '{SECRET}'}}\n")
        result = hermes("doctor")
    assert result.code == 1 and SECRET not in result.out + result.err
    assert any(line.startswith("fail model:") and "Try: hermes setup model" in line for line in result.lines)


def test_doctor_without_model(home: Home, hermes: Hermes) -> None:
    checks = findings(hermes)
    assert checks["model"][0] == checks["local runtime"][0] == "fail"


def test_doctor_with_unreadable_settings(home: Home, hermes: Hermes) -> None:
    write_private(home.config_file, "agent: [\n")
    checks = findings(hermes)
    assert checks["configuration"][0] == "fail" and checks["disk"][0] == "ok" and "model" not in checks


def test_doctor_with_invalid_settings(home: Home, hermes: Hermes) -> None:
    with configured(home, more="agent: {max_turns: many}\n"):
        assert findings(hermes)["configuration"][0] == "fail"
    with configured(home, more="agnet: {max_turns: 1}\n"):
        assert findings(hermes)["configuration"][0] == "warn"


def test_doctor_fixes_modes_and_stale_files(home: Home, hermes: Hermes) -> None:
    draft = home.path / ".config.yaml.abc.tmp"
    with configured(home, Reply(text="a"), Reply(text="b"), Reply(text="c")):
        home.config_file.chmod(0o644)
        state, message = findings(hermes)["home"]
        assert state == "warn" and "config.yaml" in message
        assert home.config_file.stat().st_mode & 0o777 == 0o644
        write_private(draft, "")
        os.utime(draft, (1, 1))
        state, message = findings(hermes, "--fix")["home"]
        assert state == "ok" and "config.yaml is private now" in message and f"{draft} was removed" in message
    assert home.config_file.stat().st_mode & 0o777 == 0o600 and not draft.exists()


def test_doctor_damaged_database(home: Home, hermes: Hermes) -> None:
    write_private(home.state_db, b"no database" * 500)
    state, message = findings(hermes)["database"]
    assert state == "fail" and message


def test_doctor_rebuilds_search_index(home: Home, hermes: Hermes) -> None:
    with closing(SessionDB(home.state_db)) as db:
        db.create_session("s", "cli")
        db.append_message("s", "user", "Hello gardens")
    with closing(sqlite3.connect(home.state_db)) as raw, raw:
        raw.execute("INSERT INTO messages_fts(messages_fts) VALUES ('delete-all')")
    state, message = findings(hermes, "--deep", "--fix")["database"]
    assert state == "ok" and "made anew" in message
    assert "made anew" not in findings(hermes, "--deep")["database"][1]
    assert len(hermes("sessions", "search", "gardens", "--json").json["hits"]) == 1


def test_doctor_quick_check_time_limit(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    @contextmanager
    def within(_: Tx, seconds: float) -> Iterator[None]:
        limits.append(seconds)
        yield

    now = iter([100.0, 100.0, 104.0])
    with closing(SessionDB(home.state_db)) as db:
        monkeypatch.setattr(Tx, "within", within)
        monkeypatch.setattr(maintenance, "time", SimpleNamespace(monotonic=lambda: next(now)))
        assert db.check() == []
    assert limits == [maintenance.QUICK_CHECK_S_MAX, maintenance.QUICK_CHECK_S_MAX - 4.0]


def test_doctor_reports_abandoned_run(home: Home, hermes: Hermes) -> None:
    with closing(Store(home.state_db)) as store:
        store.sessions.create_session("s", "cli")
        store.runs.create(RunSpec("hi", "s", run_id="run_left"))
    state, message = findings(hermes)["runs left over"]
    assert state == "warn" and "run_left" in message


def test_doctor_reports_clock_behind(home: Home, hermes: Hermes) -> None:
    with closing(SessionDB(home.state_db)) as db:
        db.create_session("s", "cli")
    with closing(sqlite3.connect(home.state_db)) as raw, raw:
        raw.execute("UPDATE sessions SET last_active = ?", (time.time() + 86_400,))
    assert findings(hermes)["clock"][0] == "warn"


def test_doctor_checks_servers_web_key_listener_and_bus(home: Home, hermes: Hermes, closed_port: int) -> None:
    more = "mcp_servers: {gone: {command: /no/such/program}}\nterminal: {backend: local}\n"
    more += f"api_server: {{host: 0.0.0.0, key: short}}\nbus: {{url: 'nats://127.0.0.1:{closed_port}'}}\n"
    write_private(home.env_file, "SEARXNG_URL=http://x.test\n")
    with configured(home, more=more):
        checks = findings(hermes)
    assert (checks["MCP servers"][0], checks["web"][0], checks["bus"][0]) == ("warn", "ok", "fail")
    assert f"127.0.0.1:{closed_port} is out of reach" in checks["bus"][1]
    assert checks["key"][0] == "warn" and checks["listener"][0] == "fail" and checks["sandbox"][0] == "warn"
    assert "without a sandbox" in checks["sandbox"][1]


def test_doctor_connects_to_nats(home: Home, hermes: Hermes, nats_url: str) -> None:
    with configured(home, more=f"bus: {{url: '{nats_url}'}}\n"):
        state, message = findings(hermes)["bus"]
    assert state == "ok" and "answers" in message and "@" not in message


def test_doctor_survives_broken_or_hanging_check(home: Home, hermes: Hermes, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Finding:
        raise RuntimeError("no")

    end = threading.Event()
    monkeypatch.setitem(CHECKS, "bus", Check(broken))
    monkeypatch.setitem(CHECKS, "web", Check(lambda _: end.wait(600)))  # type: ignore[arg-type,return-value]
    for seconds in (2.0, 10.0, 50.0):
        monkeypatch.setattr(doctor_command, "CHECKS_S_MAX", seconds)
        checks = findings(hermes)
        if checks["disk"][0] != "warn":  # a slow machine has more time for the others
            break
    end.set()
    assert checks["bus"] == ("fail", "It could not be looked at: RuntimeError: no")
    assert checks["web"][0] == "warn" and checks["disk"][0] == "ok"


@pytest.mark.long
def test_doctor_on_five_gigabyte_database(home: Home) -> None:
    with closing(SessionDB(home.state_db)) as db:
        db.create_session("s", "cli")
    with closing(sqlite3.connect(home.state_db)) as raw:
        raw.execute("PRAGMA synchronous=OFF")
        for number in range(50):
            with raw:
                row = (f"{number:064}", "a/b")
                raw.execute("INSERT INTO blobs (sha256, media_type, bytes) VALUES (?, ?, zeroblob(100000000))", row)
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert home.state_db.stat().st_size > 4.9e9
    result = subprocess.run(
        [sys.executable, "-m", "hermes", "doctor", "--json"], capture_output=True, text=True, timeout=300, check=False
    )
    home.state_db.unlink()  # it is not worth keeping
    report = json.loads(result.stdout)
    assert report["seconds"] < 10
    assert next(check for check in report["checks"] if check["name"] == "database")["state"] == "ok"


# ---- status and version


def test_status_command(home: Home, hermes: Hermes) -> None:
    assert hermes("status").code == 0 and not home.state_db.exists()
    with configured(home):
        hermes("cron", "create", "every 1d", "Go.")
        report = hermes("status", "--json").json
    assert (report["profile"], report["route"], report["server"]) == ("default", "custom/m", "not running")
    assert (report["runs"], report["jobs_due"]) == (0, 0) and report["store_bytes"] > 0
    write_private(home.config_file, "model: [\n")
    assert "none:" in hermes("status").out


def test_version_json(home: Home, hermes: Hermes) -> None:
    report = hermes("version", "--json").json
    assert (report["hermes"], report["home"], report["profile"]) == (package.__version__, str(home.path), "default")
    assert set(report) == {"hermes", "home", "profile", "python", "store", "sandbox", "local_runtime"}
    assert hermes("version").out == hermes("-V").out


# ---- logs


def entry(when: str, level: str, text: str) -> str:
    return f"{when},123 {level} hermes.agent: {text}\n"


@pytest.fixture
def logs(home: Home) -> Path:
    old = entry("2020-01-01 00:00:00", "INFO", "long ago run_aa1")
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    text = entry(now, "ERROR", "it broke\nTraceback:\n  line of run_bb2") + entry(now, "INFO", f"the key {SECRET}")
    write_private(home.logs / "agent.log.1", old)
    write_private(home.logs / "agent.log", text)
    write_private(home.logs / "gateway.log", entry(now, "INFO", "listening"))
    write_private(home.env_file, f"X_KEY={SECRET}\n")
    return home.logs / "agent.log"


def test_logs_are_shown_oldest_first_and_redacted(logs: Path, hermes: Hermes) -> None:
    result = hermes("logs")
    assert result.code == 0 and len(result.lines) == 5 and "long ago" in result.lines[0]
    assert SECRET not in result.out and "the key [redacted]" in result.out
    assert "listening" in hermes("logs", "gateway").out
    assert hermes("logs", "-n", "1", "--json").json["lines"] == [result.lines[-1]]
    assert hermes("logs", "errors").code == 0
    assert hermes("logs", "nonsense").code == 2


def test_logs_filters_level_run_and_age(logs: Path, hermes: Hermes) -> None:
    assert len(hermes("logs", "--level", "error").lines) == 3  # with the lines that belong to it
    assert "it broke" in hermes("logs", "--run", "run_bb2").lines[0]
    assert "long ago" not in hermes("logs", "--since", "1h").out
    assert hermes("logs", "--since", "soon").code == 2


def test_logs_follow_over_rotation(logs: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hermes", "logs", "-f", "-n", "1"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert "the key" in process.stdout.readline()
        with logs.open("a") as file:
            file.write(entry("2030-01-01 00:00:00", "INFO", "one more"))
        assert "one more" in process.stdout.readline()
        logs.rename(logs.with_name("agent.log.2"))
        write_private(logs, entry("2030-01-01 00:00:01", "INFO", "in a new file"))
        assert "in a new file" in process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


# ---- completion


def completed(script: str, *args: str) -> list[str]:
    line = " ".join(f"'{word}'" for word in args)
    program = (
        f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(args) - 1}; _hermes; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_bash_completion(hermes: Hermes) -> None:
    script = hermes("completion", "bash").out
    assert set(COMMANDS) <= set(completed(script, "hermes", ""))
    assert completed(script, "hermes", "sess") == ["sessions"]
    assert completed(script, "hermes", "-p", "work", "sessions", "arch") == ["archive"]
    assert completed(script, "hermes", "tools", "list", "--platform", "c") == ["cli", "cron"]
    assert "--json" in completed(script, "hermes", "config", "show", "--")
    assert completed(script, "hermes", "runs", "tail", "--af") == ["--after"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_other_shells(shell: str, hermes: Hermes) -> None:
    script = hermes("completion", shell).out
    for name in COMMANDS:
        assert f"hermes {name}" in script
    assert "optimize" in script and ("--older-than" in script or "older-than" in script)


def test_completion_of_unknown_shell_is_usage_error(hermes: Hermes) -> None:
    assert hermes("completion", "tcsh").code == 2


# ---- every command


def test_quiet_prints_result_only(hermes: Hermes, home: Home) -> None:
    assert hermes("skills", "list").err and hermes("skills", "list", "--quiet").err == ""
    assert hermes("skills", "show", "nothing", "--quiet").err  # an error is told


def leaves(path: tuple[str, ...], parser: Any) -> Iterator[tuple[str, ...]]:
    yield path
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, below in action.choices.items():
                yield from leaves((*path, name), below)


def test_every_command_and_action_has_help(hermes: Hermes) -> None:
    for path in leaves((), parser_with(COMMANDS)):
        result = hermes(*path, "--help")
        assert result.code == 0 and result.out.startswith("usage: hermes"), path


@pytest.mark.parametrize(
    "args",
    [
        ("tools", "list"), ("tools", "show", "file"), ("tools", "check", "ls"), ("approvals", "list"), ("memory", "show"),
        ("skills", "list"), ("cron", "list"), ("cron", "status"), ("mcp", "list"), ("runs", "list"), ("status",),
        ("version",), ("logs",), ("model",), ("config", "show"), ("config", "check"), ("profile", "list"),
        ("profile", "show"), ("sessions", "list"), ("sessions", "stats"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_report_is_one_json_document(args: tuple[str, ...], hermes: Hermes, home: Home) -> None:
    result = hermes(*args, "--json")
    assert isinstance(result.json, dict) and result.code in (0, 3)
    assert list(home.path.iterdir()) == []


@pytest.mark.parametrize("args", [("tools", "show", "file"), ("completion", "bash"), ("doctor",)], ids=" ".join)
def test_broken_pipe_is_quiet(args: tuple[str, ...], home: Home) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hermes", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=DEADLINE_S)
    assert errors == b""


def test_doctor_names_the_port_of_the_running_server(cli: Cli) -> None:
    def listener() -> str:
        checks = json.loads(cli.run("doctor", "--json").stdout)["checks"]
        return str(next(check["message"] for check in checks if check["name"] == "listener"))

    assert listener().startswith("No server runs; one would listen at 127.0.0.1:8642")
    cli.serve()
    port = json.loads((cli.home / "gateway_state.json").read_text())["port"]
    assert listener().startswith(f"The server listens at 127.0.0.1:{port}, ")
