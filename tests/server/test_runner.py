"""Start and shutdown of the server: rejected configurations, order, state files, and status."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import resource
import socket
import sqlite3
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import hermes
from hermes import app as apps
from hermes.core.errors import ConfigError, HermesError
from hermes.core.home import Home, is_served
from hermes.core.spec import RunSpec
from hermes.logs import logging_to
from hermes.sandbox.choose import choose_backend
from hermes.server import runner
from hermes.server.runner import GatewayRunner, raise_file_limit
from hermes.server.startup_checks import bind, is_loopback, resolved
from hermes.server.status import HomeServed, hold, read_runtime_status
from hermes.settings import config
from support.model_server import ModelServer, Reply
from support.waiting import until

GOOD_KEY = "q7Zr-4fJ0_pW2xLs9TnB6vYc1HdK8mGa"
LOCAL = "terminal: {backend: local}"
UNTITLED = "auxiliary: {title_generation: {enabled: false}}\n"


@pytest.fixture
def home(home_folder: Path) -> Home:
    home_folder.mkdir(mode=0o700)
    return Home(home_folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def state(home: Home) -> dict[str, Any]:
    """The state file, whoever wrote it."""
    payload: dict[str, Any] = json.loads(home.state_file.read_text()) if home.state_file.exists() else {}
    return payload


@asynccontextmanager
async def serving(home: Home, **options: Any) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A server on a free port: its address, and what stops it."""
    stop = asyncio.Event()
    task = asyncio.create_task(GatewayRunner(home, **{"port": 0, **options}).serve(stop))
    await until(lambda: task.done() or state(home).get("gateway_state") == "running")
    if task.done():
        task.result()
    try:
        yield f"http://127.0.0.1:{state(home)['port']}", stop
    finally:
        stop.set()
        assert await task == 0


async def get(url: str) -> int:
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        return answer.status


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


# ---- starting and ending


async def test_ready_line(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.config_file.write_text("model: {default: m, base_url: 'http://127.0.0.1:9/v1'}")
    async with serving(home) as (url, _):
        pass
    printed = capsys.readouterr().out
    auth = "open: hermes gateway key makes a key"
    sandbox = choose_backend(config.load(home)).name
    facts = f"model custom/m, auth {auth}, sandbox {sandbox}, store {home.state_db}"
    assert printed == f"Hermes {hermes.__version__} listening on {url} ({facts})\n"


async def test_server_lifecycle_releases_port(home: Home) -> None:
    async with serving(home) as (url, _):
        running, status = read_runtime_status(home), await get(f"{url}/health")
        served = is_served(home)
    assert (status, served) == (200, True)
    assert running is not None and running["platforms"] == {"api_server": {"state": "connected"}}
    assert (running["pid"], running["host"], running["exit_reason"]) == (os.getpid(), "127.0.0.1", None)
    assert (state(home)["gateway_state"], is_served(home), home.pid_file.exists()) == ("stopped", False, False)
    with pytest.raises(aiohttp.ClientConnectorError):
        await get(f"{url}/health")


async def test_key_is_mentioned_but_never_shown(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    home.env_file.write_text(f"API_SERVER_KEY={GOOD_KEY}")
    async with serving(home, verbose=True):
        pass
    captured = capfd.readouterr()
    assert "auth key," in captured.out and "hermes gateway key" not in captured.out
    assert "listening on" in captured.err
    assert not any(GOOD_KEY in text for text in (captured.out, captured.err, home.state_file.read_text()))


async def test_short_key_is_warning_on_loopback(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    home.env_file.write_text("API_SERVER_KEY=short")
    async with serving(home) as (url, _):
        assert await get(f"{url}/health") == 200
    assert (
        "hermes: api_server.key has fewer than 16 characters. Try: hermes gateway key --new" in capfd.readouterr().err
    )


async def test_invalid_setting_is_warning_with_default(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    home.config_file.write_text("api_server: {keepalive_seconds: soon, hots: 1}\nmodel: {provider: nobody}")
    async with serving(home) as (url, _):
        assert await get(f"{url}/health") == 200
    captured = capfd.readouterr()
    assert "keepalive_seconds must be a number" in captured.err and "hots" in captured.err
    assert "provider 'nobody' is unknown" in captured.err and "model none" in captured.out


async def test_open_home_permissions_are_fixed(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    home.config_file.write_text("")
    home.config_file.chmod(0o644)
    async with serving(home):
        assert mode(home.config_file) == 0o600
    assert f"{home.config_file} was open to others (644) and is now 600." in capfd.readouterr().err


async def test_public_listen_with_good_key(home: Home) -> None:
    home.env_file.write_text(f"API_SERVER_KEY={GOOD_KEY}")
    async with serving(home, host="0.0.0.0", allow_local_exec=True) as (url, _):
        assert await get(f"{url}/health") == 200


# ---- refusals

KEYS = "api_server: {keys: [%s]}"
GOOD_HASH = hashlib.sha256(GOOD_KEY.encode()).hexdigest().upper()


@pytest.mark.parametrize(
    ("settings", "options", "code", "message"),
    [
        ("a: [", {}, 78, "config.yaml line 2, column 1"),
        ("api_server: {enabled: false}", {}, 78, "api_server.enabled is false: there is nothing to run"),
        ("api_server: {key: 12345678}", {}, 78, "api_server.key must be text"),
        ("api_server: {keys: [a]}", {}, 78, "api_server.keys must be a list of mappings"),
        (KEYS % "{key: x, scopes: [chat]}", {}, 78, "the name must be"),
        (KEYS % "{name: default, key: x, scopes: [chat]}", {}, 78, "not 'default'"),
        (KEYS % "{name: a, key: x, scopes: [all]}", {}, 78, "unknown scope 'all'"),
        (KEYS % "{name: a, key: x}", {}, 78, "has no scopes"),
        (KEYS % "{name: a, key_env: '', scopes: [chat]}", {}, 78, "must have one of key, key_env and key_sha256"),
        (KEYS % "{name: a, key: x, key_env: K, scopes: [chat]}", {}, 78, "must have one of"),
        (KEYS % "{name: a, key_env: NO_SUCH, scopes: [chat]}", {}, 78, "variable NO_SUCH, which is not set"),
        (KEYS % "{name: a, key_sha256: ab, scopes: [chat]}", {}, 78, "64 hexadecimal digits"),
        (KEYS % "{name: a, key: x, scopes: [chat]}, {name: a, key: y, scopes: [runs]}", {}, 78, "used twice"),
        (KEYS % "{name: a, key: x, scopes: [chat], toolset: [todo]}", {}, 78, "unknown field 'toolset'"),
        (KEYS % "{name: a, key: x, scopes: [chat], model: [fast]}", {}, 78, "unknown field 'model'"),
        (KEYS % "{name: a, key: x, scopes: [chat], request_per_minute: 1}", {}, 78, "field 'request_per_minute'"),
        (KEYS % "{name: a, key: x, scopes: [chat], toolsets: file}", {}, 78, "toolsets of 'a' must be a list"),
        (KEYS % "{name: a, key: x, scopes: [chat], toolsets: }", {}, 78, "toolsets of 'a' must be a list"),
        (KEYS % "{name: a, key: x, scopes: [chat], models: [1]}", {}, 78, "models of 'a' must be a list"),
        (KEYS % "{name: a, key: x, scopes: [chat], requests_per_minute: many}", {}, 78, "requests_per_minute of 'a'"),
        (KEYS % "{name: a, key: x, scopes: [chat], tokens_per_minute: -1}", {}, 78, "tokens_per_minute of 'a'"),
        (KEYS % "{name: a, key: x, scopes: [chat], max_concurrent: true}", {}, 78, "max_concurrent of 'a'"),
        (KEYS % "{name: a, key: x, scopes: [chat], max_concurrent: 1.5}", {}, 78, "max_concurrent of 'a'"),
        (
            KEYS % "{name: a, key: x, scopes: [runs]}, {name: b, key: x, scopes: [chat]}",
            {},
            78,
            "same key as the key 'a'",
        ),
        (
            f"api_server: {{key: {GOOD_KEY}, keys: [{{name: a, key: {GOOD_KEY}, scopes: [chat]}}]}}",
            {},
            78,
            "same key as api_server.key",
        ),
        (
            f"api_server: {{key: {GOOD_KEY}, keys: [{{name: a, key_sha256: {GOOD_HASH}, scopes: [chat]}}]}}",
            {},
            78,
            "same key as api_server.key",
        ),
        ("api_server: {profiles: [nowhere]}", {}, 78, "api_server.profiles: There is no profile 'nowhere'"),
        ("api_server: {profiles: ['../x']}", {}, 78, "api_server.profiles: '../x' is not a profile name"),
        ("", {"host": "0.0.0.0"}, 78, "api_server.key is not set, and 0.0.0.0 can be reached"),
        ("api_server: {host: '::'}", {}, 78, "api_server.key is not set"),
        ("api_server: {key: short}", {"host": "0.0.0.0"}, 78, "api_server.key has fewer than 16 characters"),
        ("api_server: {key: your-api-key-here}", {"host": "0.0.0.0"}, 78, "is a placeholder"),
        ("api_server: {key: sk-xxxxxxxxxxxxxxxx}", {"host": "0.0.0.0"}, 78, "is a placeholder"),
        (KEYS % "{name: a, key: short, scopes: [chat]}", {"host": "0.0.0.0"}, 78, "'a' of api_server.keys has fewer"),
        (f"api_server: {{key: {GOOD_KEY}}}\n{LOCAL}", {"host": "0.0.0.0"}, 78, "without a sandbox"),
        ("storage: {url: 'mysql://u:hunter2@h/d'}", {}, 78, "no store of the kind 'mysql'"),
        (
            f"api_server: {{key: {GOOD_KEY}}}\nterminal: {{allow_exposed_local: true}}",
            {"host": "192.0.2.1"},
            69,
            "bound",
        ),
        ("", {"host": "no\0name"}, 69, "is not known here"),
    ],
)
async def test_refused_start_configurations(
    home: Home, settings: str, options: dict[str, Any], code: int, message: str
) -> None:
    home.config_file.write_text(settings)
    with pytest.raises(HermesError) as refused:
        await GatewayRunner(home, **{"port": 0, **options}).serve(asyncio.Event())
    assert refused.value.exit_code == code
    assert message in str(refused.value) and "Try: " in str(refused.value)
    last_state = state(home)
    assert last_state["gateway_state"] == "startup_failed" and message in last_state["exit_reason"]
    assert not is_served(home) and not any(key in str(refused.value) for key in (GOOD_KEY, "hunter2", "12345678"))


async def test_disabled_in_environment_does_not_start(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_SERVER_ENABLED", "false")
    with pytest.raises(ConfigError, match="Try: unset API_SERVER_ENABLED"):
        await GatewayRunner(home, port=0).serve(asyncio.Event())


async def test_hashed_key_counts_as_key(home: Home) -> None:
    digest = hashlib.sha256(GOOD_KEY.encode()).hexdigest()
    settings = config.load(home, environ={"K": GOOD_KEY})
    assert runner.keys_of(settings) == {}
    home.config_file.write_text(KEYS % f"{{name: a, key_sha256: {digest}, scopes: [chat]}}, {{name: b, key_env: K}}")
    assert list(runner.keys_of(config.load(home, environ={"K": GOOD_KEY})).values()) == ["", GOOD_KEY]


async def test_taken_port_is_named(home: Home) -> None:
    with listening() as port, pytest.raises(HermesError, match=f"http://127.0.0.1:{port} cannot be bound") as refused:
        await GatewayRunner(home, port=port).serve(asyncio.Event())
    assert refused.value.exit_code == 69


async def test_port_of_other_profile_is_named(home: Home) -> None:
    work = Home(home.path / "profiles" / "work", "work")
    work.path.mkdir(parents=True)
    async with serving(work) as (url, _):
        port = int(url.rpartition(":")[2])
        with pytest.raises(HermesError, match=rf"profile 'work' \(pid {os.getpid()}\)") as refused:
            await GatewayRunner(home, port=port).serve(asyncio.Event())
        assert await get(f"{url}/health") == 200
    assert refused.value.exit_code == 69


async def test_held_home_is_unchanged(home: Home) -> None:
    with hold(home):
        with pytest.raises(HomeServed) as refused:
            await GatewayRunner(home, port=0).serve(asyncio.Event())
        assert home.pid_file.exists()
    assert refused.value.exit_code == 4
    assert not home.state_file.exists()


async def test_damaged_or_newer_store_is_rejected(home: Home) -> None:
    home.state_db.write_bytes(b"no database, but long enough to be looked at " * 200)
    with pytest.raises(HermesError) as damaged:
        await GatewayRunner(home, port=0).serve(asyncio.Event())
    home.state_db.unlink()
    with sqlite3.connect(home.state_db) as db:
        db.execute("PRAGMA user_version=999")
    db.close()
    with pytest.raises(HermesError) as newer:
        await GatewayRunner(home, port=0).serve(asyncio.Event())
    assert (damaged.value.exit_code, newer.value.exit_code) == (74, 69)
    assert "newer Hermes" in state(home)["exit_reason"]


async def test_uncreatable_home_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HermesError, match="The home cannot be written to") as refused:
        await GatewayRunner(Home(tmp_path / "file" / "home"), port=0).serve(asyncio.Event())
    assert refused.value.exit_code == 69


# ---- the drain


async def start_waiting_turn(home: Home, server: ModelServer) -> str:
    """A turn that waits for its model; its id."""
    engine = (await apps.current(home)).engine
    spec = RunSpec(user_message="hi", session_id="s", kind="run", source="api_server", on_detach="continue")
    await engine.start(spec)
    await server.until(lambda: len(server.requests) == 1)
    return spec.run_id


async def test_drain_finishes_turns_while_reads_continue(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "STATE_EVERY_S", 0.01)
    release = asyncio.Event()

    async def answer(_: object) -> Reply:
        await release.wait()
        return Reply(text="done")

    async with ModelServer(handler=answer) as server:
        home.config_file.write_text(f"model: {{default: m, base_url: '{server.url}/v1'}}\n{UNTITLED}")
        async with serving(home) as (url, stop):
            run_id = await start_waiting_turn(home, server)
            await until(lambda: state(home)["active_agents"] == 1)
            stop.set()
            await until(lambda: state(home)["gateway_state"] == "draining")
            during = await get(f"{url}/health")
            release.set()
    assert during == 200
    assert (state(home)["gateway_state"], state(home)["active_agents"]) == ("stopped", 0)
    assert await status_of(home, run_id) == "completed"


async def test_drain_timeout_leaves_run_for_next_start(home: Home) -> None:
    async with ModelServer(Reply(text="x", stall_at=0), Reply(text="done")) as server:
        more = f"api_server: {{drain_seconds: 0}}\n{UNTITLED}"
        home.config_file.write_text(f"model: {{default: m, base_url: '{server.url}/v1'}}\n{more}")
        async with serving(home):
            run_id = await start_waiting_turn(home, server)
        status = await status_of(home, run_id)
        async with serving(home):
            await until(lambda: status_of(home, run_id), lambda now: now == "completed")
    assert (status, len(server.requests)) == ("interrupted", 2)


async def status_of(home: Home, run_id: str) -> str:
    record = await (await apps.current(home)).store.runs.get(run_id)
    assert record is not None
    return str(record.state.status)


# ---- addresses


@pytest.mark.parametrize(
    ("host", "only_here"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("", False)],
)
def test_loopback_detection(host: str, only_here: bool) -> None:
    assert is_loopback(resolved(host, 0)) is only_here


def test_all_addresses_of_name_share_one_port(home: Home) -> None:
    addresses = [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET, ("127.0.0.2", 0))]
    sockets = bind(home, "localhost", [*addresses, (socket.AF_INET, ("192.0.2.1", 0))])
    ports = {sock.getsockname()[1] for sock in sockets}
    for sock in sockets:
        sock.close()
    assert len(sockets) == 2 and len(ports) == 1


def test_open_files_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_used: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: limits_used.append(limits))
    for limits in ((1024, 4096), (1024, 1_000_000), (256, resource.RLIM_INFINITY), (65_536, 1_000_000)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        raise_file_limit()
    assert limits_used == [(4096, 4096), (65_536, 1_000_000), (65_536, resource.RLIM_INFINITY)]


# ---- logs


def lines(home: Home) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(home.logs.iterdir())}


@pytest.mark.parametrize("umask", [0o000, 0o777], ids=oct)
def test_logs_are_private_sorted_and_redacted(home: Home, umask: int) -> None:
    home.env_file.write_text(f"ANY_NAME={GOOD_KEY}")
    before = os.umask(umask)
    try:
        with logging_to(home, config.load(home, environ={}), verbose=False):
            logging.getLogger("hermes.agent.loop").info("a turn with %s", GOOD_KEY)
            logging.getLogger("hermes.server.chat").warning("refused: api_key=abcdef123456")
            logging.getLogger("hermes.server.chat").debug("below the level")
    finally:
        os.umask(before)
    log_lines = lines(home)
    assert {name: text.count("\n") for name, text in log_lines.items()} == {
        "agent.log": 1,
        "errors.log": 1,
        "gateway.log": 1,
    }
    assert "INFO hermes.agent.loop: a turn with [redacted]" in log_lines["agent.log"]
    assert log_lines["errors.log"] == log_lines["gateway.log"] and "abcdef" not in log_lines["errors.log"]
    assert {mode(home.logs), *map(mode, home.logs.iterdir())} == {0o700, 0o600}


def test_log_rotation(home: Home) -> None:
    home.config_file.write_text("logging: {max_size_mb: 0.01, backup_count: 2, level: WARNING}")
    with logging_to(home, config.load(home, environ={}), verbose=False):
        for number in range(600):
            logging.getLogger("hermes.server").error("line %d of many that fill a log", number)
    assert [name for name in lines(home) if name.startswith("gateway")] == [
        "gateway.log",
        "gateway.log.1",
        "gateway.log.2",
    ]
    assert max(path.stat().st_size for path in home.logs.iterdir()) <= 10_000
    assert all(mode(path) == 0o600 for path in home.logs.iterdir())


def test_new_key_is_redacted_in_running_logs(home: Home) -> None:
    with logging_to(home, config.load(home, environ={}), verbose=False):
        home.env_file.write_text(f"ANY_NAME={GOOD_KEY}")
        logging.getLogger("hermes").warning("%s", GOOD_KEY)
    assert GOOD_KEY not in lines(home)["agent.log"]


def test_logging_is_restored_and_survives_unwritable_log(home: Home) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers), logging.raiseExceptions)
    home.logs.write_text("in the way")
    with logging_to(home, config.load(home, environ={}), verbose=False):
        logging.getLogger("hermes").info("lost")
    assert (root.level, list(root.handlers), logging.raiseExceptions) == before


# ---- what agents are built from


def test_runtime_configuration_without_secrets(home: Home) -> None:
    home.config_file.write_text(
        "model: {default: m, provider: openai, base_url: 'https://h/v1', api_key: sk-0123456789abcdef}\n"
        "agent: {reasoning_effort: high, reasoning_overrides: {n.1: none}}\n"
        "fallback_providers: [anthropic/claude, {provider: x, api_key: sk-0123456789abcdef}]\n"
    )
    config = runner._load_gateway_config()
    assert runner._resolve_runtime_agent_kwargs() == {"provider": "openai", "base_url": "https://h/v1"}
    assert runner._resolve_gateway_model() == "m"
    assert GatewayRunner._load_reasoning_config() == {"enabled": True, "effort": "high"}
    assert (GatewayRunner._load_fallback_model() or [])[0] == "anthropic/claude"
    assert config["agent"]["reasoning_effort"] == "high" and config["model"]["default"] == "m"
    assert config["fallback_providers"] == ["anthropic/claude", {"provider": "x"}]
    assert "api_key" not in config["model"] and "0123456789" not in json.dumps(config)


def test_runtime_configuration_without_settings(home: Home) -> None:
    assert (runner._resolve_runtime_agent_kwargs(), runner._resolve_gateway_model()) == ({}, "")
    assert GatewayRunner._load_reasoning_config() is GatewayRunner._load_fallback_model() is None


def test_runtime_configuration_follows_file_and_is_copied(home: Home) -> None:
    home.config_file.write_text("model: {default: m}\nagent: {reasoning_effort: none}")
    runner._load_gateway_config()["model"]["default"] = "changed"
    first = runner._load_gateway_config()["model"]["default"], GatewayRunner._load_reasoning_config()
    home.config_file.write_text("model: {default: other}\nagent: {reasoning_overrides: {other: low}}")
    assert first == ("m", {"enabled": False, "effort": "none"})
    assert runner._resolve_gateway_model() == "other"
    assert GatewayRunner._load_reasoning_config() == {"enabled": True, "effort": "low"}
