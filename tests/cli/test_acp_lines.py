"""The lines that editors write to `hermes acp`, as they are: what Zed, JetBrains IDEs and plugins of Neovim send in a
session, and lines that are wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.model_server import Call, Reply

from .acp_client import WAIT_S, started, stderr_of
from .conftest import Cli

# As Zed begins: it offers files and terminals, and names extensions that nobody else knows.
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {
        "protocolVersion": 1,
        "clientCapabilities": {
            "fs": {"readTextFile": True, "writeTextFile": True},
            "terminal": True,
            "_meta": {"terminal_output": True, "terminal-auth": True},
        },
        "clientInfo": {"name": "zed", "title": "Zed", "version": "0.210.0"},
    },
}


class Lines:
    """The pipes of the process. Requests of the agent are answered by `answers`, by their method; a
    list has one answer for each request."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self._reader, self._writer = reader, writer
        self.answers: dict[str, Any] = {}
        self.updates: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []

    def write(self, *messages: Any) -> None:
        for message in messages:
            line = message if isinstance(message, bytes) else json.dumps(message).encode()
            self._writer.write(line + b"\n")

    async def answer(self, id_: Any) -> dict[str, Any]:
        """Read until the answer to a request."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message: dict[str, Any] = json.loads(await self._reader.readline())
                assert message["jsonrpc"] == "2.0"
                if "method" not in message:
                    assert message["id"] == id_, message
                    return message
                if message["method"] == "session/update":
                    self.updates.append(message["params"]["update"])
                else:
                    self.requests.append(message)
                    result = self.answers[message["method"]]
                    result = result.pop(0) if isinstance(result, list) else result
                    self.write({"jsonrpc": "2.0", "id": message["id"], **result})

    async def request(self, method: str) -> dict[str, Any]:
        """Read until the agent asks this, and do not answer it."""
        async with asyncio.timeout(WAIT_S):
            while (message := json.loads(await self._reader.readline())).get("method") != method:
                assert message.get("method") == "session/update", message
        return dict(message)

    async def ask(self, id_: Any, method: str, params: Any) -> dict[str, Any]:
        self.write({"jsonrpc": "2.0", "id": id_, "method": method, "params": params})
        return await self.answer(id_)


async def test_session_as_zed_sends_it(cli: Cli) -> None:
    (cli.folder / "main.rs").write_text("fn main() {}\n")
    cli.script(
        Reply(tool_calls=[Call("read_file", {"path": "main.rs"}, id="c1")]),
        Reply(tool_calls=[Call("terminal", {"command": "make"}, id="c2")]),
        Reply(text=["It is ", "empty."]),
    )
    async with started(cli) as (reader, writer, process):
        lines = Lines(reader, writer)
        lines.answers = {
            "fs/read_text_file": {"result": {"content": "fn main() { todo!() }\n"}},
            "session/request_permission": {"result": {"outcome": {"outcome": "selected", "optionId": "once"}}},
            "terminal/create": {"result": {"terminalId": "term_1"}},
            "terminal/wait_for_exit": {"result": {"exitCode": 0, "signal": None}},
            "terminal/output": {"result": {"output": "made it", "truncated": False}},
            "terminal/release": {"result": None},
        }
        lines.write(INITIALIZE)
        assert (await lines.answer(0))["result"]["protocolVersion"] == 1
        new = await lines.ask(1, "session/new", {"cwd": str(cli.folder), "mcpServers": []})
        session_id = new["result"]["sessionId"]
        assert new["result"]["modes"]["availableModes"] and new["result"]["configOptions"]
        assert lines.updates == []  # an IDE does not know the session before it has the answer
        blocks = [
            {"type": "text", "text": "What does "},
            {"type": "resource_link", "uri": f"file://{cli.folder}/main.rs", "name": "main.rs"},
            {"type": "text", "text": " do?"},
        ]
        ended = await lines.ask(2, "session/prompt", {"sessionId": session_id, "prompt": blocks})
        assert ended["result"]["stopReason"] == "end_turn"
        session_updates = [update["sessionUpdate"] for update in lines.updates]
        assert session_updates[0] == "available_commands_update"
        assert (
            session_updates.index("tool_call")
            < session_updates.index("tool_call_update")
            < session_updates.index("agent_message_chunk")
        )
        assert lines.requests[0]["params"] == {"sessionId": session_id, "path": str(cli.folder / "main.rs")}
        lines.write({"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": session_id}})
        lines.write({"jsonrpc": "2.0", "method": "$/cancel_request", "params": {"requestId": 2}})
        listed = await lines.ask("three", "session/list", {})
        assert [session["sessionId"] for session in listed["result"]["sessions"]] == [session_id]
        writer.close()
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0
    assert "todo!()" in cli.model_messages(1)[-1][1] and "made it" in cli.model_messages(2)[-1][1]
    assert stderr_of(cli) == ""


async def test_session_as_jetbrains_ides_send_it(cli: Cli) -> None:
    """Each message names its class, and `jsonrpc` is its last field; there are files and no terminals."""
    cli.script(Reply(tool_calls=[Call("read_file", {"path": "a.txt"})]), Reply(text="Done."))
    (cli.folder / "a.txt").write_text("saved\n")
    package = "com.agentclientprotocol.rpc"

    def request(id_: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
        return {"type": f"{package}.JsonRpcRequest", "id": id_, "method": method, "params": params, "jsonrpc": "2.0"}

    capabilities = {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": False}
    info = {"name": "JetBrains.IntelliJ IDEA", "version": "2026.1 EAP", "title": "IntelliJ IDEA 2026.1 EAP"}
    initialize = {"protocolVersion": 1, "clientCapabilities": capabilities, "clientInfo": info}
    async with started(cli) as (reader, writer, _):
        lines = Lines(reader, writer)
        answered = {"type": f"{package}.JsonRpcResponse", "result": {"content": "unsaved\n", "_meta": None}}
        lines.answers = {"fs/read_text_file": answered}
        lines.write(request(1, "initialize", initialize))
        assert (await lines.answer(1))["result"]["agentCapabilities"]["sessionCapabilities"]["list"] == {}
        lines.write(request(2, "session/new", {"cwd": str(cli.folder), "mcpServers": [], "_meta": None}))
        session_id = (await lines.answer(2))["result"]["sessionId"]
        assert lines.updates == []
        text = {"type": "text", "text": "go", "annotations": None, "_meta": None}
        lines.write(request(3, "session/prompt", {"sessionId": session_id, "prompt": [text], "_meta": None}))
        assert (await lines.answer(3))["result"]["stopReason"] == "end_turn"
    assert "1|unsaved" in cli.model_messages()[-1][1]


async def test_session_as_avante_sends_it(cli: Cli) -> None:
    """Behind each message is an empty line, `HOME` is not set, and a write that fails has its reason as its result."""
    cli.configure("approvals: {mode: off}\n")
    del cli.env["HOME"]
    (cli.folder / "a.txt").write_text("one\ntwo\n")
    cli.script(
        Reply(tool_calls=[Call("read_file", {"path": "a.txt"})]),
        Reply(tool_calls=[Call("write_file", {"path": "a.txt", "content": "new\n"})]),
        Reply(text="Done."),
    )
    async with started(cli) as (reader, writer, _):
        lines = Lines(reader, writer)
        lines.answers = {
            "fs/read_text_file": {"result": {"content": "one\ntwo"}},
            "fs/write_text_file": {"result": "Failed to write file: a.txt"},
        }
        capabilities = {"fs": {"readTextFile": True, "writeTextFile": True}}
        params = {"protocolVersion": 1, "clientCapabilities": capabilities}
        lines.write({"id": 1, "jsonrpc": "2.0", "method": "initialize", "params": params}, b"")
        await lines.answer(1)
        params = {"cwd": str(cli.folder), "mcpServers": []}
        lines.write({"id": 2, "jsonrpc": "2.0", "method": "session/new", "params": params}, b"")
        session_id = (await lines.answer(2))["result"]["sessionId"]
        params = {"sessionId": session_id, "prompt": [{"type": "text", "text": "go"}]}
        lines.write({"id": 3, "jsonrpc": "2.0", "method": "session/prompt", "params": params}, b"")
        assert (await lines.answer(3))["result"]["stopReason"] == "end_turn"
    assert (cli.folder / "a.txt").read_text() == "new\n"


async def test_session_as_codecompanion_sends_it(cli: Cli) -> None:
    """It authenticates with the first method that is offered, reads missing files as empty ones, and answers a write with
    null."""
    cli.configure("approvals: {mode: off}\n")
    cli.script(
        Reply(tool_calls=[Call("read_file", {"path": "gone.txt"})]),
        Reply(tool_calls=[Call("write_file", {"path": "new.txt", "content": "new\n"})]),
        Reply(text="Done."),
    )
    async with started(cli) as (reader, writer, _):
        lines = Lines(reader, writer)
        lines.answers = {"fs/read_text_file": {"result": {"content": ""}}, "fs/write_text_file": {"result": None}}
        info = {"name": "CodeCompanion.nvim", "version": "1.0.0"}
        capabilities = {"fs": {"readTextFile": True, "writeTextFile": True}}
        params = {"clientInfo": info, "clientCapabilities": capabilities, "protocolVersion": 1}
        [method] = (await lines.ask(1, "initialize", params))["result"]["authMethods"]
        assert (await lines.ask(2, "authenticate", {"methodId": method["id"]}))["result"] == {}
        new = await lines.ask(3, "session/new", {"mcpServers": [], "cwd": str(cli.folder)})
        session_id = new["result"]["sessionId"]
        effort = {"sessionId": session_id, "configId": "effort", "value": "high"}
        options = (await lines.ask(4, "session/set_config_option", effort))["result"]["configOptions"]
        assert [option["currentValue"] for option in options if option["id"] == "effort"] == ["high"]
        params = {"sessionId": session_id, "prompt": [{"type": "text", "text": "go"}]}
        assert (await lines.ask(5, "session/prompt", params))["result"]["stopReason"] == "end_turn"
        writes = [request["params"] for request in lines.requests if request["method"] == "fs/write_text_file"]
    assert [(write["sessionId"], write["content"]) for write in writes] == [(session_id, "new\n")]
    assert "not_found" in cli.model_messages(1)[-1][1]
    assert not (cli.folder / "new.txt").exists()  # what the editor has taken is up to the editor


async def test_editor_that_refuses_files_leaves_those_on_disk(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    (cli.folder / "a.txt").write_text("saved\n")
    cli.script(
        Reply(tool_calls=[Call("read_file", {"path": "a.txt"})]),
        Reply(tool_calls=[Call("write_file", {"path": "a.txt", "content": "new\n"})]),
        Reply(text="Done."),
    )
    async with started(cli) as (reader, writer, _):
        lines = Lines(reader, writer)
        refusal = {"error": {"code": -32603, "message": "no project"}}
        lines.answers = {"fs/read_text_file": refusal, "fs/write_text_file": refusal}
        lines.write(INITIALIZE)
        await lines.answer(0)
        new = await lines.ask(1, "session/new", {"cwd": str(cli.folder), "mcpServers": []})
        prompt = {"sessionId": new["result"]["sessionId"], "prompt": [{"type": "text", "text": "go"}]}
        assert (await lines.ask(2, "session/prompt", prompt))["result"]["stopReason"] == "end_turn"
    assert (cli.folder / "a.txt").read_text() == "new\n"


async def test_odd_answers_of_the_editor_are_failures_of_the_call(cli: Cli) -> None:
    """Whatever an editor answers, the turn goes on; what is missing is named."""
    cli.configure("terminal: {backend: local}\napprovals: {mode: off}\n")
    (cli.folder / "a.txt").write_text("saved\n")
    run = Call("terminal", {"command": "make"})
    cli.script(
        Reply(tool_calls=[Call("read_file", {"path": "a.txt"})]),
        *[Reply(tool_calls=[run])] * 3,
        Reply(text="Done."),
    )
    answers = {
        "fs/read_text_file": [{"error": "no project"}],
        "terminal/create": [{"result": None}, {"error": ["full"]}, {"result": {"terminalId": "t"}}],
        "terminal/wait_for_exit": [{"result": {"exitCode": 3}}],
        "terminal/output": [{"error": {"code": -32603, "message": "gone"}}],
        "terminal/release": [{"error": None}],
    }
    async with started(cli) as (reader, writer, _):
        lines = Lines(reader, writer)
        lines.answers = answers
        lines.write(INITIALIZE)
        await lines.answer(0)
        new = await lines.ask(1, "session/new", {"cwd": str(cli.folder), "mcpServers": []})
        prompt = {"sessionId": new["result"]["sessionId"], "prompt": [{"type": "text", "text": "go"}]}
        assert (await lines.ask(2, "session/prompt", prompt))["result"]["stopReason"] == "end_turn"
    results = [text for role, text in cli.model_messages(4) if role == "tool"]
    expected = ("saved", "its answer has no terminalId", "full", "does not give the output")
    for result, words in zip(results, expected, strict=True):
        assert words in result


async def test_cancel_does_not_wait_for_a_terminal(cli: Cli) -> None:
    """A terminal that the editor opens when nobody waits for it any more is ended."""
    cli.configure("terminal: {backend: local}\napprovals: {mode: off}\n")
    cli.script(Reply(tool_calls=[Call("terminal", {"command": "make"})]), Reply(text="Done."))
    async with started(cli) as (reader, writer, _):
        lines = Lines(reader, writer)
        lines.write(INITIALIZE)
        await lines.answer(0)
        new = await lines.ask(1, "session/new", {"cwd": str(cli.folder), "mcpServers": []})
        session = {"sessionId": new["result"]["sessionId"]}
        prompt = {**session, "prompt": [{"type": "text", "text": "go"}]}
        lines.write({"jsonrpc": "2.0", "id": 2, "method": "session/prompt", "params": prompt})
        create = await lines.request("terminal/create")
        lines.write({"jsonrpc": "2.0", "method": "session/cancel", "params": session})
        assert (await lines.answer(2))["result"]["stopReason"] == "cancelled"
        lines.write({"jsonrpc": "2.0", "id": create["id"], "result": {"terminalId": "late"}})
        for method in ("terminal/kill", "terminal/release"):
            model_messages = await lines.request(method)
            assert model_messages["params"] == {**session, "terminalId": "late"}
            lines.write({"jsonrpc": "2.0", "id": model_messages["id"], "result": {}})
        assert (await lines.ask(3, "session/prompt", prompt))["result"]["stopReason"] == "end_turn"


async def test_calls_that_are_refused_are_announced_and_replayed_as_failed(cli: Cli) -> None:
    cli.configure("terminal: {backend: local}\n")
    cli.script(
        Reply(tool_calls=[Call("terminal", {"nothing": 5}, id="c1"), Call("nothing", {}, id="c2")]),
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf x"}, id="c3")]),
        Reply(text="Done."),
    )
    calls = {"c1": ("terminal", "execute"), "c2": ("nothing", "other"), "c3": ("rm -rf x", "execute")}
    async with started(cli) as (reader, writer, _):
        lines = Lines(reader, writer)
        lines.answers = {"session/request_permission": {"result": {"outcome": {"outcome": "cancelled"}}}}
        await lines.ask(0, "initialize", {"protocolVersion": 1})
        session = {"cwd": str(cli.folder), "mcpServers": []}
        session["sessionId"] = (await lines.ask(1, "session/new", session))["result"]["sessionId"]
        prompt = {"sessionId": session["sessionId"], "prompt": [{"type": "text", "text": "go"}]}
        assert (await lines.ask(2, "session/prompt", prompt))["result"]["stopReason"] == "end_turn"
        check_calls(lines.updates, calls)
        lines.updates.clear()
        await lines.ask(3, "session/load", session)
        check_calls(lines.updates, calls)


def check_calls(updates: list[dict[str, Any]], expected: dict[str, tuple[str, str]]) -> None:
    """Each call is announced before it is updated, and has failed in the end."""
    calls: dict[str, dict[str, Any]] = {}
    for update in updates:
        if update["sessionUpdate"] == "tool_call":
            calls[update["toolCallId"]] = dict(update)
        elif update["sessionUpdate"] == "tool_call_update":
            calls[update["toolCallId"]] |= update
    assert {name: (call["title"], call["kind"]) for name, call in calls.items()} == expected
    assert {call["status"] for call in calls.values()} == {"failed"}


async def test_invalid_messages_are_errors_and_keep_the_connection(cli: Cli, subtests: pytest.Subtests) -> None:
    session = {"sessionId": "nothing"}
    text = [{"type": "text", "text": "hi"}]
    wrong: list[tuple[str, Any, int, str]] = [
        ("session/nothing", {}, -32601, "session/nothing"),
        ("_zed.dev/extension", {}, -32601, "Method not found"),
        ("session/new", None, -32602, "cwd"),
        ("session/new", [], -32602, "params"),
        ("session/new", {"cwd": "relative", "mcpServers": []}, -32602, "cwd"),
        ("session/new", {"cwd": "/nowhere/at/all", "mcpServers": []}, -32602, "cwd"),
        ("session/load", {"cwd": "/", "sessionId": "nothing", "mcpServers": []}, -32002, "nothing"),
        ("session/prompt", {**session, "prompt": text}, -32602, "sessionId"),
        ("session/prompt", {"prompt": text}, -32602, "sessionId"),
        ("session/set_mode", {**session, "modeId": "off"}, -32602, "sessionId"),
        ("session/set_config_option", {**session, "configId": "x", "value": 5}, -32602, "value"),
        ("authenticate", {"methodId": "other"}, -32602, "methodId"),
        ("initialize", {}, -32602, "protocolVersion"),
    ]
    lines_that_are_none = [
        (b"this is no JSON", -32700),
        (b"[" * 100_000, -32700),
        (b"[]", -32600),
        (b"5", -32600),
        (b'{"jsonrpc":"2.0","id":{},"method":"initialize"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":{}}', -32600),
        (b"{}", -32600),
        (b'{"jsonrpc":"2.0","id":1}', -32600),
        (b'{"jsonrpc":"2.0","result":{}}', -32600),
    ]
    prompts: list[tuple[Any, str]] = [
        ([], "prompt is empty"),
        ([{"type": "text", "text": " "}], "prompt is empty"),
        ([{"type": "audio", "data": "", "mimeType": "audio/wav"}], "prompt[0].type"),
        ([{"type": "image", "data": "!", "mimeType": "image/png"}], "prompt[0].data is no base64"),
        ([{"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"}], "prompt[0].data is no PNG"),
        (
            [{"type": "resource", "resource": {"uri": "a:b", "text": "x" * 6_000_000}}],
            "prompt[0].resource.text is larger",
        ),
        ([{"type": "nothing"}], "prompt"),
    ]
    async with started(cli) as (reader, writer, _):
        lines = Lines(reader, writer)
        lines.write(INITIALIZE)
        await lines.answer(0)
        for number, (method, params, code, named) in enumerate(wrong, 10):
            with subtests.test(method, params=str(params)[:80]):
                error = (await lines.ask(number, method, params))["error"]
                assert error["code"] == code and named in error["message"], error
        for line, code in lines_that_are_none:
            with subtests.test(str(line[:60])):
                lines.write(line)
                assert (await lines.answer(None))["error"]["code"] == code
        lines.write(b"", {"jsonrpc": "2.0", "id": 999, "result": {}}, {"jsonrpc": "2.0", "method": "unknown"})
        new = await lines.ask(1, "session/new", {"cwd": str(cli.folder), "mcpServers": []})
        for number, (blocks, named) in enumerate(prompts, 100):
            with subtests.test(named):
                params = {"sessionId": new["result"]["sessionId"], "prompt": blocks}
                error = (await lines.ask(number, "session/prompt", params))["error"]
                assert error["code"] == -32602 and named in error["message"], error
    assert cli.model.requests == [] and stderr_of(cli) == ""


async def test_standard_output_carries_the_protocol_only(cli: Cli) -> None:
    """What a slash command prints, and what a command of the agent prints, is in messages and nowhere else."""
    cli.configure("approvals: {mode: off}\n")
    cli.script(Reply(tool_calls=[Call("terminal", {"command": "echo out; echo err >&2"})]), Reply(text="Done."))
    async with started(cli, "--debug") as (reader, writer, _):
        lines = Lines(reader, writer)
        await lines.ask(0, "initialize", {"protocolVersion": 1})
        new = await lines.ask(1, "session/new", {"cwd": str(cli.folder), "mcpServers": []})
        for number, text in enumerate(("/skills", "/tools list", "/cron list", "go"), 2):
            params = {"sessionId": new["result"]["sessionId"], "prompt": [{"type": "text", "text": text}]}
            assert "result" in await lines.ask(number, "session/prompt", params)
        writer.close()
        assert await reader.read() == b""


async def test_capabilities_that_cannot_be_read_count_as_none(cli: Cli, subtests: pytest.Subtests) -> None:
    cli.script(*[Reply(text="Done.")] * 4)
    async with started(cli) as (reader, writer, _):
        lines = Lines(reader, writer)
        for number, odd in enumerate(("x", [], {"fs": "x", "terminal": "x"}, {"elicitation": [1], "auth": 5}), 1):
            with subtests.test(str(odd)):
                params = {"protocolVersion": 1, "clientCapabilities": odd}
                assert "result" in await lines.ask(f"a{number}", "initialize", params)
                session = {"cwd": str(cli.folder), "mcpServers": []}
                session_id = (await lines.ask(f"b{number}", "session/new", session))["result"]["sessionId"]
                prompt = {"sessionId": session_id, "prompt": [{"type": "text", "text": "go"}]}
                assert (await lines.ask(f"c{number}", "session/prompt", prompt))["result"]["stopReason"] == "end_turn"
    assert stderr_of(cli) == ""
