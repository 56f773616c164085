"""The tool `terminal`: what commands say, how they end, what they leave to the next one, and that nothing else stays."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from agent.conftest import MakeHarness
from agent.harness import KEY, Json, nothing_left
from hermes.core.errors import ConfigError
from hermes.core.formatting import without_colours
from hermes.guards.secrets import Secrets
from hermes.sandbox import base, choose
from hermes.tools import output_buffer
from hermes.tools.output_buffer import HeadAndTail, OutputDecoder
from hermes.tools.terminal import goes_online
from support.model_server import Call, ModelServer

from .commanding import SURELY_S, ToolSession, allowed, descriptors, each_backend, new_mark, running


@pytest.fixture
def tool_session(make_harness: MakeHarness, server: ModelServer) -> ToolSession:
    return allowed(make_harness, server)


# ---- what a command says


@each_backend
@pytest.mark.parametrize(
    ("command", "code", "output"),
    [
        ("echo out; echo err >&2; echo out", 0, "out\nerr\nout\n"),
        ("exit 7", 7, ""),
        ("false; echo $?", 0, "1\n"),
        ("kill -9 $$", 137, ""),
        ("cat; echo no input", 0, "no input\n"),
        ("printf 'a\\033[1;31mred\\033[0m\\033]0;title\\007\\r\\nb'", 0, "ared\nb"),
        ("printf 'a\\377b\\000c'", 0, "a\ufffdb\ufffdc"),
        ("cat <<'EOF'\nit's\nEOF", 0, "it's\n"),
        ("no_such_command_here 2>/dev/null", 127, ""),
    ],
)
async def test_terminal_answer(
    make_harness: MakeHarness, server: ModelServer, backend: str, command: str, code: int, output: str
) -> None:
    tool_session = allowed(make_harness, server, backend)
    answer = await tool_session.sh(command)
    assert {"output", "exit_code", "status", "error", "cwd", "duration_ms", "truncated", "spill"} <= answer.keys()
    assert (answer["output"], answer["exit_code"], answer["status"]) == (output, code, "ok")
    assert (answer["error"], answer["truncated"], answer["spill"]) == (None, False, None)
    assert answer["cwd"] == str(tool_session.workspace)
    assert tool_session.left_over() == []


@each_backend
async def test_terminal_cwd_persists_per_session(make_harness: MakeHarness, server: ModelServer, backend: str) -> None:
    tool_session = allowed(make_harness, server, backend)
    assert (await tool_session.sh("mkdir -p a/b; cd a; export LEFT='x y'; HERE=1"))[
        "cwd"
    ] == f"{tool_session.workspace}/a"
    assert (await tool_session.sh("echo $LEFT$HERE; pwd"))["output"] == f"x y\n{tool_session.workspace}/a\n"
    # One that crashes wedges nothing, and leaves the state as it was.
    assert (await tool_session.sh("cd b; export LEFT=lost; kill -9 $$"))["exit_code"] == 137
    assert (await tool_session.sh("echo $LEFT"))["output"] == "x y\n"
    assert (await tool_session.sh("pwd", workdir="b"))["output"] == f"{tool_session.workspace}/a/b\n"
    assert (await tool_session.sh("pwd", workdir="~"))["output"] != ""
    failed = await tool_session.sh("echo not reached", workdir="/no/such/folder")
    assert failed["exit_code"] != 0 and "not reached" not in failed["output"]
    other = await tool_session.call("terminal", {"command": "pwd"}, session_id="s2")
    assert other["output"] == f"{tool_session.workspace}\n", "another session has a shell of its own"


async def test_terminal_environment_has_no_secrets(
    make_harness: MakeHarness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "HERMES_WRITE_SAFE_ROOT", "SOME_OTHER"):
        monkeypatch.setenv(name, "/planted-value")
    assert "planted-value" not in (await allowed(make_harness, server).sh("env"))["output"]


async def test_terminal_shell_state_cannot_be_poisoned(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = allowed(make_harness, server, approvals={"mode": "off"})
    hide = "f() { echo hidden; }; export -f f; export BASH_ENV=/x LD_PRELOAD=/x PS4=x KEPT=yes"
    await tool_session.sh(hide)
    assert (await tool_session.sh("f; env | grep -cE '^(BASH_|LD_|PS4)'; echo $KEPT 2>&1"))["output"].endswith(
        "0\nyes\n"
    )


async def test_terminal_sudo_is_non_interactive(
    tool_session: ToolSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "sudo"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho with $*\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    assert (await tool_session.sh("sudo id; (sudo -u me ls)"))["output"] == "with -n id\nwith -n -u me ls\n"


# ---- much of it


@each_backend
async def test_terminal_long_output_is_truncated_and_spilled(
    make_harness: MakeHarness, server: ModelServer, backend: str
) -> None:
    tool_session = allowed(make_harness, server, backend, tool_output={"max_bytes": 10_000})
    answer = await tool_session.sh("seq -w 1 10000; echo last >&2")
    output = answer["output"]
    assert (answer["truncated"], answer["exit_code"]) == (True, 0)
    head, mark, tail = output.partition("\n[… 50005 characters left out; all of it is in ")
    assert (len(head), len(tail.partition("]\n")[2])) == (4000, 6000) and mark
    assert head.startswith("00001\n00002\n") and tail.endswith("10000\nlast\n")
    spill = Path(answer["spill"])
    assert spill.read_text() == "".join(f"{n:05}\n" for n in range(1, 10_001)) + "last\n"
    assert spill.stat().st_mode & 0o777 == 0o600 and spill.parent.parent.name == "tool_results"


async def test_terminal_spill_file_limit(tool_session: ToolSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_buffer.limits, "COMMAND_OUTPUT_BYTES_KEPT", 2 << 20)
    answer = await tool_session.sh("yes 0123456 | head -c 5000000")
    assert "its first 2 MiB are in" in answer["output"]
    assert Path(answer["spill"]).stat().st_size == 2 << 20


async def test_terminal_output_flood_uses_little_memory(tool_session: ToolSession) -> None:
    await tool_session.sh("true")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = await tool_session.run(Call("terminal", {"command": "yes abcdefg | head -c 300000000"}))
    [answer] = run.tool_results()
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert answer["exit_code"] == 0 and answer["truncated"]
    assert grown_kb < 50_000
    events = run.events_of("tool.output")
    assert sum(len(event["text"]) for event in events if event["stream"] == "stdout") == 200_000
    assert events[-1]["stream"] == "info" and "more output" in events[-1]["text"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_terminal_text_is_same_for_any_chunking(size: int) -> None:
    data = "ä\x1b[0;1mb\x1b]8;;http://x\x1b\\link\x1b(B\r\nc\r\x1b[Kd \x1b".encode()
    readable = OutputDecoder(Secrets(["sk-planted-000000000"]))
    pieces = [readable.feed(data[at : at + size]) for at in range(0, len(data), size)]
    assert "".join(pieces) + readable.feed(b"", end=True) == "äblink\nc\rd "


SECRET = "sk-planted-000000000"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x1b[1;31mred\x1b[0m\r\n", "\x1b[1;31mred\x1b[0m\n"),
        (b"\x1b[38:2::1:2:3mtrue\x1b[m", "\x1b[38:2::1:2:3mtrue\x1b[m"),
        (b"\x1b[31mred\x1b[2J\x1b]0;title\x07\x1b[5Agone\xc2\x9b1mx\x1b\x1b[0m", "\x1b[31mredgonex\x1b[0m"),
        (b"\x1b[31mred \x1b[", "red "),
        (b"plain", "plain"),
        (f"\x1b[31m{SECRET}\x1b[0m".encode(), "[redacted]"),
        (f"{SECRET[:9]}\x1b[31m{SECRET[9:]}".encode(), "[redacted]"),
        (f"{SECRET[:9]}\x1b[31m".encode(), ""),
        (b"\x1b[31mghp_0123456789abcdef\x1b[0mghijklmnopqrstuvwxyz", "ghp_0123456789abcdefghijklmnopqrstuvwxyz"),
    ],
)
def test_colours_are_kept_for_people_unless_they_hide_a_secret(data: bytes, expected: str) -> None:
    readable = OutputDecoder(Secrets([SECRET]))
    text = readable.feed(data)
    assert readable.coloured == expected
    assert "\x1b" not in text and without_colours(expected) == text


@each_backend
async def test_colours_are_streamed_and_not_sent_to_the_model(
    make_harness: MakeHarness, server: ModelServer, backend: str
) -> None:
    tool_session = allowed(make_harness, server, backend)
    run = await tool_session.run(Call("terminal", {"command": r"printf '\033[32mgreen\033[0m\033[2J\n'"}))
    assert "".join(event["text"] for event in run.events_of("tool.output")) == "\x1b[32mgreen\x1b[0m\n"
    assert run.tool_results()[0]["output"] == "green\n"


@pytest.mark.parametrize(
    ("line_count", "expected"), [(10, "0123456789"), (11, "0123\n[… 1 characters left out …]\n567890"), (0, "")]
)
def test_output_head_and_tail(line_count: int, expected: str) -> None:
    ends = HeadAndTail(10)
    for at in range(line_count):
        ends.add(str(at % 10))
    assert ends.text() == expected


# ---- as it comes


@each_backend
async def test_terminal_output_is_streamed(make_harness: MakeHarness, server: ModelServer, backend: str) -> None:
    tool_session = allowed(make_harness, server, backend)
    command = "echo one; until [ -e go ]; do sleep 0.01; done; printf two; until [ -e on ]; do sleep 0.01; done"
    active_run = await tool_session.begin(Call("terminal", {"command": command}))

    def output_text(events: list[Json]) -> str:
        return "".join(event["text"] for event in events if event["type"] == "tool.output")

    await active_run.until(lambda events: output_text(events) == "one\n")
    (tool_session.workspace / "go").touch()
    # No line, but a moment has passed.
    await active_run.until(lambda events: output_text(events) == "one\ntwo")
    (tool_session.workspace / "on").touch()
    assert (await active_run.end()).tool_results()[0]["output"] == "one\ntwo"


async def test_terminal_output_is_redacted(tool_session: ToolSession, home_folder: Path) -> None:
    half = len(KEY) // 2
    command = f"printf {KEY[:half]}; sleep 0.3; echo {KEY[half:]}; seq 100000; printf x{KEY}y"
    run = await tool_session.run(Call("terminal", {"command": command}), persist=True)
    [answer] = run.tool_results()
    assert answer["output"].startswith("[redacted]\n1\n") and answer["output"].endswith("x[redacted]y")
    assert KEY not in repr(run.events) and KEY not in Path(answer["spill"]).read_text()


# ---- how it ends


@each_backend
async def test_terminal_timeout(make_harness: MakeHarness, server: ModelServer, backend: str) -> None:
    tool_session, mark = allowed(make_harness, server, backend), new_mark()
    for seconds in (1.5, 15.0, 59.0):
        command = f"echo so far; (sleep {mark}); sleep {mark}"
        run = await tool_session.run(Call("terminal", {"command": command, "timeout": seconds}))
        [answer] = run.tool_results()
        if answer["output"]:  # a slow machine has more time for it
            break
    assert (answer["status"], answer["exit_code"], answer["output"]) == ("timeout", 124, "so far\n")
    assert f"{seconds:g} s" in answer["error"] and answer["code"] == "timeout"
    assert run.event("tool.finished")["status"] == "timeout"
    assert running(mark) == [] and tool_session.left_over() == []


@each_backend
async def test_terminal_interrupt_ends_process_group_and_keeps_output(
    make_harness: MakeHarness, server: ModelServer, backend: str
) -> None:
    tool_session, mark = allowed(make_harness, server, backend), new_mark()
    await tool_session.run(Call("terminal", {"command": "true"}), persist=True)
    before = descriptors()
    command = f"trap 'echo bye; exit' INT; echo hello; (sleep {mark} | sleep {mark}) & wait"
    active_run = await tool_session.begin(Call("terminal", {"command": f"sh -c {command!r}"}), persist=True)
    await active_run.wait_for("tool.output")
    async with asyncio.timeout(SURELY_S):
        await active_run.control("interrupt")
        run = await active_run.end()
    answer = run.tool_results()[-1]
    assert (answer["status"], answer["exit_code"], answer["code"]) == ("interrupted", 130, "interrupted")
    assert answer["output"].startswith("hello\n")
    assert run.event("tool.finished")["status"] == "interrupted" and run.final["type"] == "run.cancelled"
    assert running(mark) == [] and tool_session.left_over() == []
    await nothing_left(server)
    assert descriptors() <= before


async def test_terminal_interrupt_of_parallel_calls_is_graceful(
    tool_session: ToolSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "LADDER", ((signal.SIGINT, 1000.0), *base.LADDER[1:]))
    mark = new_mark()
    slow = f"trap 'sleep 0.2; echo bye; exit' INT; echo hello; while :; do sleep 0.01; done # {mark}"
    calls = [Call("terminal", {"command": slow}), Call("process", {"action": "wait", "session_id": "proc_00000000"})]
    background = (await tool_session.sh(f"sleep {mark}", background=True))["session_id"]
    calls[1] = Call("process", {"action": "wait", "session_id": background})
    active_run = await tool_session.begin(*calls)
    await active_run.wait_for("tool.output")
    await active_run.control("interrupt")
    answers = (await active_run.end()).tool_results()
    assert (answers[0]["output"], answers[0]["status"]) == ("hello\nbye\n", "interrupted")
    assert answers[1] == {"status": "interrupted"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ({"command": "true", "timeout": 601}, "invalid_arguments", "background"),
        ({"command": "sleep 5 &"}, "invalid_arguments", "background"),
        ({"command": "nohup sleep 5"}, "invalid_arguments", "background"),
        ({"command": "setsid sleep 5", "background": True}, "invalid_arguments", "background"),
        ({"command": "sleep 5 & disown"}, "invalid_arguments", "background"),
        ({"command": ""}, "invalid_arguments", ""),
        ({"command": "true", "timeout": 0}, "invalid_arguments", ""),
        ({"command": "x" * 100_001}, "invalid_arguments", ""),
        ({"command": "rm -rf /"}, "blocked", "another way"),
    ],
)
async def test_terminal_rejects_invalid_commands(
    tool_session: ToolSession, arguments: Json, code: str, message: str
) -> None:
    run = await tool_session.run(Call("terminal", arguments))
    [answer] = run.tool_results()
    assert run.event("tool.finished")["code"] == code and message in answer.get("hint", "")
    assert "tool.started" not in run.types
    if code == "blocked":
        assert (answer["status"], answer["exit_code"]) == ("blocked", -1)


@pytest.mark.parametrize("command", ["sleep 0.01 & wait", "(sleep 5 &) ; true", "echo '&' nohup"])
async def test_terminal_allows_apparent_background_commands(tool_session: ToolSession, command: str) -> None:
    answer = await tool_session.sh(command)
    assert answer.get("code") in (None, "invalid_arguments")
    assert running("sleep 5") == [] or answer.get("code") is None


async def test_terminal_reports_unusable_sandbox(tool_session: ToolSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise ConfigError("The sandbox 'docker' does not work here: no daemon.")

    monkeypatch.setattr(choose, "choose_backend", broken)
    answer = await tool_session.sh("true")
    assert answer["code"] == "tool_unavailable" and "no daemon" in answer["error"]


async def test_terminal_reports_too_long_command(tool_session: ToolSession) -> None:
    answer = await tool_session.sh("echo " + "'" * 49_998)
    assert answer["code"] in ("tool_unavailable", "blocked") and tool_session.left_over() == []


# ---- the network


@pytest.mark.parametrize(
    ("command", "online"),
    [
        ("curl https://example.org", True),
        ("cd x && sudo -n curl -s x", True),
        ("A=b timeout 5 /usr/bin/wget x", True),
        ("git -C repo fetch", True),
        ("pip install x", True),
        ("git status", False),
        ("echo curl", False),
        ("openssl rand -hex 4", False),
        ("pip list", False),
        ("", False),
    ],
)
def test_goes_online_detection(command: str, online: bool) -> None:
    assert goes_online(command) is online


async def test_terminal_network_failure_gets_hint(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = allowed(make_harness, server, "bubblewrap")
    lost = "import socket; socket.getaddrinfo('example.org', 443)"
    answer = await tool_session.sh(f'tail -n +3 /proc/net/dev; python3 -c "{lost}"')
    assert answer["exit_code"] == 1 and "asked to allow the host" in answer["hint"]
    assert "eth" not in answer["output"]
    assert "hint" not in await tool_session.sh("curl --version >/dev/null; false")
    assert "hint" not in await tool_session.sh("false")


NAMES = "env | grep ^HERMES_ | sort"


@each_backend
async def test_terminal_environment_names_session_and_surface(
    make_harness: MakeHarness, server: ModelServer, backend: str
) -> None:
    tool_session = allowed(make_harness, server, backend)
    plain = "HERMES_PLATFORM=api_server\nHERMES_SESSION_ID=s1\n"
    assert (await tool_session.sh(NAMES))["output"] == plain
    keyed: Any = {"session_key": "anna", "source": "cron"}
    [answer] = (await tool_session.run(Call("terminal", {"command": NAMES}), **keyed)).tool_results()
    assert answer["output"] == "HERMES_PLATFORM=cron\nHERMES_SESSION_ID=s1\nHERMES_SESSION_KEY=anna\n"
    await tool_session.sh("export HERMES_SESSION_ID=other HERMES_SESSION_KEY=other HERMES_PLATFORM=other")
    assert (await tool_session.sh(NAMES))["output"] == plain
    script = (
        "import os\nprint(*sorted(n + '=' + v for n, v in os.environ.items() if n.startswith('HERMES_')), sep='\\n')"
    )
    assert (await tool_session.call("execute_code", {"code": script}))["stdout"] == plain
    started = await tool_session.sh(NAMES, background=True)
    ended = await tool_session.call("process", {"action": "wait", "session_id": started["session_id"]})
    assert ended["output"] == plain
