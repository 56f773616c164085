"""The tool `execute_code`: a script's output and end, and its calls, each on the way every call takes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agent.conftest import MakeHarness
from agent.harness import KEY, Json, nothing_left, schema, tool
from hermes.tools import code as code_tool
from hermes.tools.framework.registry import ToolContext, ToolError
from support.model_server import Call, ModelServer

from .commanding import SURELY_S, ToolSession, descriptors, new_mark, running


def script(text: str) -> Call:
    return Call("execute_code", {"code": text}, id="call_x")


@pytest.fixture(params=["local", "bubblewrap"])
def tool_session(request: pytest.FixtureRequest, make_harness: MakeHarness, server: ModelServer) -> ToolSession:
    """Scripts need no leave here: on `local` because nobody wants to be asked."""
    return ToolSession(make_harness, server, request.param, approvals={"mode": "off"})


# ---- what it says and how it ends


@pytest.mark.parametrize(
    ("text", "stdout", "stderr", "exit_code"),
    [
        ("print('hi')", "hi\n", "", 0),
        ("import sys; print('out'); print('err', file=sys.stderr)", "out\n", "err\n", 0),
        ("import os; os.write(1, b'a\\xff'); os.write(2, b'b')", "a\ufffd", "b", 0),
        ("import os; os.system('echo child >&2; echo out')", "out\n", "child\n", 0),
        ("import sys; sys.exit(7)", "", "", 7),
        ("import sys; sys.exit('words')", "", "words\n", 1),
        ("import os; os.kill(os.getpid(), 9)", "", "", 137),
        ("print(__name__, input.__name__)", "__main__ input\n", "", 0),
        ("import sys; print(sys.stdin.read() == '')", "True\n", "", 0),
        ("é = 'ü'; print(é)", "ü\n", "", 0),
    ],
)
async def test_script_output_and_exit_code(
    tool_session: ToolSession, text: str, stdout: str, stderr: str, exit_code: int
) -> None:
    answer = await tool_session.call("execute_code", {"code": text})
    assert answer == {"stdout": stdout, "stderr": stderr, "exit_code": exit_code, "status": "ok", "calls": 0}
    assert tool_session.left_over() == []


async def test_script_error_has_traceback(tool_session: ToolSession) -> None:
    answer = await tool_session.call("execute_code", {"code": "def f():\n    return 1 / 0\n\nf()"})
    lines = answer["stderr"].splitlines()
    assert (answer["exit_code"], lines[-1]) == (1, "ZeroDivisionError: division by zero")
    assert "line 4, in <module>" in lines[1] and "hermes_tools" not in answer["stderr"]
    wrong = await tool_session.call("execute_code", {"code": "def f(:"})
    assert wrong["exit_code"] == 1 and "SyntaxError" in wrong["stderr"]


async def test_script_runs_in_shell_cwd(tool_session: ToolSession) -> None:
    await tool_session.sh("mkdir d; cd d; export LEFT=x; echo 'N = 5' > own.py")
    text = "import os, own; print(os.getcwd(), os.environ['LEFT'], own.N)"
    assert (await tool_session.call("execute_code", {"code": text}))["stdout"] == f"{tool_session.workspace}/d x 5\n"


async def test_long_script_output_is_truncated(tool_session: ToolSession) -> None:
    text = "import sys\nfor n in range(100000): print(f'{n:05}')\nprint('e' * 1000000, file=sys.stderr)"
    run = await tool_session.run(script(text))
    [answer] = run.tool_results()
    head, _, tail = answer["stdout"].partition("\n[… ")
    dropped, _, tail = tail.partition(" characters left out …]\n")
    assert (len(head) + len(tail) + int(dropped), len(head) + len(tail) <= 50_000) == (600_000, True)
    assert len(head) == (len(head) + len(tail)) * 2 // 5
    assert head.startswith("00000\n") and tail.endswith("99999\n")
    assert "characters left out" in answer["stderr"]
    assert {event["stream"] for event in run.events_of("tool.output")} == {"stdout", "stderr", "info"}


async def test_script_timeout(tool_session: ToolSession, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = new_mark()
    text = f"import os; print('so far'); os.system('sleep {mark}')"
    for seconds in (2.0, 10.0, 40.0):
        monkeypatch.setattr(code_tool.limits, "CODE_S_MAX", seconds)
        run = await tool_session.run(script(text))
        [answer] = run.tool_results()
        if answer["stdout"]:  # a slow machine has more time for it
            break
    assert (answer["status"], answer["exit_code"], answer["stdout"]) == ("timeout", 124, "so far\n")
    assert run.event("tool.finished")["status"] == "timeout"
    assert running(mark) == [] and tool_session.left_over() == []


# ---- its calls


async def test_script_tool_calls_are_recorded(tool_session: ToolSession) -> None:
    text = "from hermes_tools import terminal\nfor n in (1, 2): print(terminal(f'echo {n}; exit {n}'))"
    run = await tool_session.run(script(text), persist=True)
    [answer] = run.tool_results()
    payloads = [
        json.loads(line.replace("'", '"').replace("None", "null").replace("False", "false"))
        for line in answer["stdout"].splitlines()
    ]
    assert [(payload["output"], payload["exit_code"]) for payload in payloads] == [("1\n", 1), ("2\n", 2)]
    assert answer["calls"] == 2
    entries = [(event["call_id"], event["name"], event["parent_call_id"]) for event in run.events_of("tool.started")]
    inner = [("call_x.1", "terminal", "call_x"), ("call_x.2", "terminal", "call_x")]
    assert entries == [("call_x", "execute_code", None), *inner]
    ended = [
        (event["call_id"], event["parent_call_id"], event["row"] is None) for event in run.events_of("tool.finished")
    ]
    assert ended == [("call_x.1", "call_x", True), ("call_x.2", "call_x", True), ("call_x", None, False)]
    rows = await tool_session.harness.rows("s1")
    assert [row.tool_call_id for row in rows if row.role == "tool"] == ["call_x"], "the conversation has one result"


async def test_script_tool_arguments_by_position_and_name(tool_session: ToolSession) -> None:
    items: list[Json] = []

    async def read(_: ToolContext, args: Json) -> Json:
        items.append(args)
        if args["path"] == "bad":
            raise ToolError("There is no such file.", "path_not_found")
        return {"content": f"text of {args['path']} {KEY}"}

    parameters = schema(["path"], path={"type": "string"}, offset={"type": "integer"})
    tool_session.offer(tool("read_file", read, parameters=parameters), tool("other"))
    text = """
from hermes_tools import read_file
import hermes_tools
print(read_file('a', 3)['content'])
print(read_file(path='b', offset='4')['content'])
print(read_file('bad')['code'], read_file()['code'], read_file('x', nonsense=1)['code'])
print(hasattr(hermes_tools, 'other'), hasattr(hermes_tools, 'web_search'))
try: read_file(1, 2, 3)
except TypeError as error: print(error)
"""
    answer = await tool_session.call("execute_code", {"code": text})
    assert answer["stdout"].splitlines() == [
        "text of a [redacted]",
        "text of b [redacted]",
        "path_not_found invalid_arguments invalid_arguments",
        "False False",
        "read_file takes 2 arguments",
    ]
    assert items == [{"path": "a", "offset": 3}, {"path": "b", "offset": 4}, {"path": "bad"}]


async def test_script_tool_calls_pass_every_guard(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = ToolSession(make_harness, server, "bubblewrap")
    (tool_session.workspace / "build").mkdir(parents=True)
    text = "from hermes_tools import terminal\nfor c in ('rm -rf /', 'rm -r build'): print(terminal(c)['status'])"
    active_run = await tool_session.begin(script(text), answerable=True)
    event = await active_run.wait_for("approval.requested")
    assert (event["call_id"], event["kind"], event["subject"]) == ("call_x.2", "command", "rm -r build")
    await active_run.control("approve", id=event["approval_id"], choice="once")
    run = await active_run.end()
    assert run.tool_results()[0]["stdout"] == "blocked\nok\n"
    assert [event["by"] for event in run.events_of("approval.resolved")] == ["rule", "user"]


async def test_script_tool_call_limit(tool_session: ToolSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tool.limits, "CODE_CALLS_MAX", 2)
    text = "from hermes_tools import terminal\nfor n in range(4): print(terminal('true').get('code'))"
    answer = await tool_session.call("execute_code", {"code": text})
    assert (answer["stdout"], answer["calls"]) == ("None\nNone\nlimit_reached\nlimit_reached\n", 2)


async def test_script_tool_calls_from_threads(tool_session: ToolSession) -> None:
    text = """
from concurrent.futures import ThreadPoolExecutor
from hermes_tools import terminal
with ThreadPoolExecutor(8) as pool:
    print([answer['output'] for answer in pool.map(lambda n: terminal(f'echo {n}'), range(8))])
"""
    answer = await tool_session.call("execute_code", {"code": text})
    assert answer["stdout"] == f"{[f'{n}{chr(10)}' for n in range(8)]}\n"


@pytest.mark.parametrize(
    "output",
    [
        "nonsense",
        "[]",
        '{"name": 1}',
        '{"name": "execute_code", "arguments": {}}',
        '{"name": "terminal", "arguments": 5}',
    ],
)
async def test_script_cannot_forge_tool_protocol(tool_session: ToolSession, output: str) -> None:
    text = f"""
import hermes_tools, socket, gc
wire = next(o for o in gc.get_objects() if isinstance(o, socket.SocketIO))
wire.write({output!r}.encode() + b'\\n')
print(wire.readinto(bytearray(9)) >= 0)
"""
    run = await tool_session.run(script(text))
    assert run.tool_results()[0]["stdout"] == "True\n"
    assert [event["call_id"] for event in run.events_of("tool.started")] == ["call_x"]


# ---- leave


@pytest.mark.parametrize(("choice", "status"), [("once", "ok"), ("session", "ok"), ("deny", "blocked")])
async def test_script_without_sandbox_is_shown_for_approval(
    make_harness: MakeHarness, server: ModelServer, choice: str, status: str
) -> None:
    tool_session = ToolSession(make_harness, server)
    text = f"print('hello')\n# {KEY}\n" + "# more\n" * 500
    active_run = await tool_session.begin(script(text), answerable=True)
    event = await active_run.wait_for("approval.requested")
    assert (event["kind"], event["choices"]) == ("code", ["once", "session", "deny"])
    assert event["subject"] == text.replace(KEY, "[redacted]")
    await active_run.control("approve", id=event["approval_id"], choice=choice)
    run = await active_run.end()
    assert run.tool_results()[0]["status"] == status
    again = await tool_session.call("execute_code", {"code": text})
    assert again["status"] == ("ok" if choice == "session" else "blocked")
    assert (await tool_session.call("execute_code", {"code": "print(1)"}))["status"] == "blocked"


@pytest.mark.parametrize(
    "text", ["import os; os.system('rm -rf /')", "import subprocess as s; s.run('git push', shell=True)"]
)
async def test_hard_denied_command_in_script_is_not_run(
    make_harness: MakeHarness, server: ModelServer, text: str
) -> None:
    tool_session = ToolSession(make_harness, server, "bubblewrap", approvals={"mode": "off", "deny": ["git push"]})
    run = await tool_session.run(script(text))
    assert run.tool_results()[0]["by"] == "rule" and "tool.started" not in run.types


async def test_script_in_sandbox_needs_no_approval(make_harness: MakeHarness, server: ModelServer) -> None:
    run = await ToolSession(make_harness, server, "bubblewrap").run(script("print(1)"), answerable=True)
    assert run.tool_results()[0]["stdout"] == "1\n" and not run.events_of("approval.resolved")


# ---- being stopped


async def test_interrupt_ends_script_and_its_tool_call(tool_session: ToolSession, server: ModelServer) -> None:
    await tool_session.run(script("print(1)"), persist=True)
    before, mark = descriptors(), new_mark()
    text = f"""
from hermes_tools import terminal
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
print('before')
print(terminal('echo inside; sleep {mark}'))
"""
    active_run = await tool_session.begin(script(text), persist=True)
    await active_run.until(
        lambda events: any(e["type"] == "tool.output" and e["call_id"] == "call_x.1" for e in events)
    )
    async with asyncio.timeout(SURELY_S):
        await active_run.control("interrupt")
        ended = await active_run.until(lambda events: [e for e in events if e["type"] == "tool.finished"])
        assert (ended[0]["call_id"], ended[0]["status"]) == ("call_x.1", "interrupted")
        run = await active_run.end()
    answer = run.tool_results()[-1]
    assert (answer["status"], answer["exit_code"], answer["stdout"]) == ("interrupted", 130, "before\n")
    assert run.final["type"] == "run.cancelled"
    assert running(mark) == [] and tool_session.left_over() == []
    await nothing_left(server)
    assert descriptors() <= before


async def test_script_exit_ends_its_tool_call(tool_session: ToolSession) -> None:
    mark = new_mark()
    text = f"""
import os, threading, time
from hermes_tools import terminal
threading.Thread(target=terminal, args=('touch here; sleep {mark}',), daemon=True).start()
while not os.path.exists('here'): time.sleep(0.01)
"""
    run = await tool_session.run(script(text))
    assert run.tool_results()[0]["status"] == "ok"
    assert [(e["call_id"], e["status"]) for e in run.events_of("tool.finished")] == [
        ("call_x.1", "interrupted"),
        ("call_x", "ok"),
    ]
    assert running(mark) == []


async def test_scripts_leave_nothing_behind(tool_session: ToolSession) -> None:
    await tool_session.call("execute_code", {"code": "print(1)"})
    before: Any = descriptors()
    for _ in range(5):
        await tool_session.call("execute_code", {"code": "from hermes_tools import terminal; terminal('true')"})
    assert descriptors() <= before and tool_session.left_over() == []
