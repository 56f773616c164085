"""The embedded model on the real runtime: loaded when asked, streamed, bound to its form, replaced when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes.app import App
from hermes.core.events import Event
from hermes.core.home import Home
from hermes.core.spec import Control
from local.conftest import of, text, turn
from support.model_server import ModelServer, Reply
from support.waiting import until

Start = Callable[..., App]
LONG = "Write a long story about a ship."


def workers(home: Home) -> list[int]:
    """The processes that hold a model of this home."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            ours = entry.name.isdigit() and b"worker.py" in (entry / "cmdline").read_bytes().split(b"\0")[-3]
            if ours and Path(os.readlink(entry / "cwd")) == home.run_folder.resolve():
                pids.append(int(entry.name))
        except (OSError, IndexError):
            continue
    return pids


def worker(home: Home) -> int:
    """The one that has the model; the other is the one that looks after it."""
    return max(workers(home))


async def workers_ended(home: Home) -> None:
    await until(lambda: not workers(home))


async def test_worker_is_loaded_on_first_request_and_streams(started: Start, home: Home) -> None:
    app = started()
    assert workers(home) == []
    events = await turn(app, "Say hello.", max_output_tokens=12)
    assert [data["code"] for data in of(events, "notice")] == ["model_loading"]
    assert text(events) and len(of(events, "text.delta")) > 1
    [usage] = of(events, "usage")
    assert usage["measured"] == "provider" and 0 < usage["output_tokens"] <= 12 and usage["input_tokens"] > 5
    again = await turn(app, "Say hello.", max_output_tokens=4)
    assert of(again, "notice") == [] and len(workers(home)) <= 2
    assert of(again, "usage")[0]["cache_read_tokens"] > 0


@pytest.mark.parametrize("configured", ["auto", "1"])
async def test_a_core_is_left_to_others_while_it_writes(started: Start, home: Home, configured: str) -> None:
    await turn(started(f"local: {{context: 2048, threads: {configured}}}\n"), "Say hello.", max_output_tokens=2)
    options = json.loads(Path(f"/proc/{worker(home)}/cmdline").read_bytes().split(b"\0")[-2])
    cores = os.cpu_count() or 2
    assert options["threads"] == ([max(1, cores - 1), cores] if configured == "auto" else [1, 1])


async def test_local_sessions_are_titled_without_model_call(started: Start) -> None:
    async with ModelServer(Reply(text="A title")) as other:
        aside = f"providers: {{aside: {{base_url: '{other.url}/v1', models: [m]}}}}"
        title = "auxiliary: {title_generation: {provider: aside, model: m}}"
        app = started(f"local: {{context: 2048}}\n{aside}\n{title}\n")
        assert text(await turn(app, "Say hello to the fox.", max_output_tokens=4, kind="session"))
        session = await app.store.sessions.get_session("s")
        assert session is not None and session["title"] == "Say hello to the fox."
        assert other.requests == []


@pytest.mark.long
async def test_server_warms_up_prompt_cache(started: Start, home: Home) -> None:
    app = started("local: {context: 4096}\n")
    app.serve()
    await until(lambda: workers(home) and not app.engine.active, seconds=300)
    events = await turn(app, "hello", toolsets=None, max_output_tokens=2, source="api_server")
    assert of(events, "notice") == []
    [usage] = of(events, "usage")
    assert usage["cache_read_tokens"] > 0.9 * usage["input_tokens"] > 300


async def test_worker_has_no_port_no_secret_and_private_socket(
    started: Start, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-planted-000000000000")
    await turn(started(), "Hi", max_output_tokens=2)
    pid = worker(home)
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"planted" not in environment and {line.split(b"=")[0] for line in environment.split(b"\0") if line} <= {
        b"PATH", b"LANG", b"TMPDIR", b"LC_CTYPE",
    }  # fmt: skip
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(os.readlink(fd).removeprefix("socket:").strip("[]"))
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
        assert not inodes & {row[9] for row in rows}
    [socket] = home.run_folder.glob("*.sock")
    assert socket.is_socket() and home.run_folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.long
async def test_generated_tool_calls_are_valid(started: Start, home: Home) -> None:
    """A model of this size calls any tool; its calls are always valid."""
    app = started("local: {context: 4096}\n")
    home.workspace.mkdir(parents=True)
    events = await turn(app, "List the files.", toolsets=frozenset({"file"}), max_iterations=3, max_output_tokens=300)
    assert of(events, "tool.started") or text(events)
    assert not [data for data in of(events, "tool.finished") if data["code"] in ("invalid_arguments", "unknown_tool")]


async def test_interrupt_during_generation(started: Start, home: Home) -> None:
    app = started()

    def stop(event: Event) -> Any:
        if event.type == "text.delta":
            return app.engine.control(event.run_id, Control("interrupt"))
        return None

    events = await turn(app, LONG, stop)
    assert events[-1].type == "run.cancelled" and text(events)
    # The place is free again at once.
    assert text(await turn(app, "Hi", max_output_tokens=3, session_id="other"))


async def test_worker_crash_is_restarted_and_answer_continues(started: Start, home: Home) -> None:
    app, killed = started(), []

    def kill(event: Event) -> None:
        if event.type == "text.delta" and not killed:
            killed.append(worker(home))
            os.kill(killed[0], signal.SIGKILL)

    events = await turn(app, LONG, kill, max_output_tokens=24)
    assert [(data["failure"], data["action"]) for data in of(events, "model.retrying")] == [
        ("local_unavailable", "reconnect")
    ]
    assert text(events) and worker(home) != killed[0], events[-1]
    assert events[-1].data.get("failure") in (None, "truncated_text")  # it may well reach the limit


@pytest.mark.long
async def test_queued_requests_get_notice_and_run_in_order(started: Start, home: Home) -> None:
    app = started()
    all_events = await asyncio.gather(
        *(turn(app, "Say something.", session_id=f"s{n}", max_output_tokens=10) for n in range(3))
    )
    notices = [data for events in all_events for data in of(events, "notice")]
    # On a busy machine a turn may wait long enough to be told so besides.
    codes = sorted(data["code"] for data in notices if data["code"] != "model_waiting")
    assert codes == ["model_loading", "model_queue", "model_queue"] and all(map(text, all_events))
    waits = [data["message"] for data in notices if data["code"] == "model_queue"]
    assert sorted(waits) == [f"The local model is busy; {n} waiting." for n in (1, 2)]


async def test_prompt_over_window_is_rejected(started: Start) -> None:
    events = await turn(started("local: {context: 512}\n"), "word " * 2_000)
    assert events[-1].type == "run.failed" and events[-1].data["code"] == "context_length_exceeded"


@pytest.mark.long
async def test_two_processes_of_home_share_worker(started: Start, home: Home) -> None:
    first, other = started(), started()
    assert text(await turn(first, "Hi", max_output_tokens=3))
    had = workers(home)
    assert text(await turn(other, "Hi", max_output_tokens=3, session_id="t")) and workers(home) == had
    await first.close()
    await workers_ended(home)
    assert text(await turn(other, "Hi", max_output_tokens=3, session_id="t")) and workers(home)


@pytest.mark.long
async def test_worker_ends_with_its_owner(started: Start, home: Home) -> None:
    app = started()
    await turn(app, "Hi", max_output_tokens=2)
    assert workers(home)
    await app.close()
    assert workers(home) == [] and not list(home.run_folder.glob("*.sock"))


@pytest.mark.long
async def test_idle_worker_unloads_and_wakes(started: Start, home: Home) -> None:
    app = started("local: {context: 2048, idle_unload_seconds: 5}\n")
    await turn(app, "Hi", max_output_tokens=2)
    pid = worker(home)

    def mapped() -> bool:
        return ".gguf" in Path(f"/proc/{pid}/maps").read_text()

    assert mapped()
    await until(lambda: not mapped())
    assert text(await turn(app, "Hi", max_output_tokens=2)) and worker(home) == pid


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("model: {path: /nowhere/m.gguf, provider: local}\n", "/nowhere/m.gguf"),
        ("local: {context: 2048}\n", "hermes setup"),
    ],
    ids=["a file that is not there", "no file"],
)
async def test_missing_model_error_has_hint(started: Start, home: Home, settings: str, message: str) -> None:
    (home.models / "tiny.gguf").unlink()
    events = await turn(started(settings), "Hi")
    assert events[-1].type == "run.failed" and message in events[-1].data["error"]


async def test_invalid_model_file_is_reported(started: Start, home: Home) -> None:
    (home.models / "tiny.gguf").unlink()
    (home.models / "bad.gguf").write_text("no model")
    events = await turn(started(), "Hi")
    assert events[-1].type == "run.failed" and "bad.gguf" in events[-1].data["error"]
    assert workers(home) == []


@pytest.mark.long
async def test_changed_model_file_is_loaded(started: Start, home: Home, model: Path) -> None:
    app = started()
    await turn(app, "Hi", max_output_tokens=2)
    before = worker(home)
    home.config_file.write_text(f"model: {{path: {model}, provider: local}}\nlocal: {{context: 1024}}\n")
    assert text(await turn(app, "Hi", max_output_tokens=2)) and worker(home) != before
