"""`hermes acp` with the SDK's own client side as the editor: sessions, prompts, tools, approvals, files, models, ends."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
from typing import Any

import pytest
from acp import RequestError, text_block
from acp.schema import (
    BlobResourceContents,
    EmbeddedResourceContentBlock,
    ImageContentBlock,
    ResourceContentBlock,
    TextResourceContents,
)

from hermes.sandbox import bubblewrap
from support.model_server import Call, Reply

from .acp_client import WAIT_S, editing, real, stderr_of
from .conftest import Cli

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(40)).decode()


@pytest.fixture(params=["here", "server"])
def way(cli: Cli, request: pytest.FixtureRequest) -> tuple[Cli, list[str]]:
    """The agent in the process of `hermes acp`, and in a server given by an option."""
    if request.param == "here":
        return cli, []
    cli.serve()
    from hermes.core.home import Home
    from hermes.server.status import local_url

    return cli, ["--server", local_url(Home(cli.home))]


async def prompt(editor: Any, session_id: str, text: str) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await editor.agent.prompt(session_id=session_id, prompt=[text_block(text)])


async def new_session(editor: Any, cli: Cli) -> str:
    await editor.initialize()
    return str((await editor.agent.new_session(cwd=str(cli.folder), mcp_servers=[])).session_id)


async def test_initialize_declares_capabilities(cli: Cli) -> None:
    async with editing(cli) as editor:
        answer = (await editor.initialize()).model_dump(by_alias=True, exclude_none=True)
    assert answer["protocolVersion"] == 1 and answer["agentInfo"]["name"] == "hermes"
    able = answer["agentCapabilities"]
    assert able["loadSession"] and able["promptCapabilities"]["image"] and able["promptCapabilities"]["embeddedContext"]
    assert set(able["sessionCapabilities"]) == {"list", "resume", "close"}
    assert editor.process.returncode == 0


async def test_prompt_streams_thoughts_and_message(way: tuple[Cli, list[str]]) -> None:
    cli, args = way
    cli.script(Reply(reasoning=["I ", "wonder."], text=["Hel", "lo."], usage={"input": 12, "output": 3}))
    async with editing(cli, *args) as editor:
        session_id = await new_session(editor, cli)
        await editor.until(lambda: "available_commands_update" in editor.kinds())
        answer = await prompt(editor, session_id, "hi")
        assert (answer.stop_reason, answer.usage.input_tokens) == ("end_turn", 12)
        assert editor.text() == "Hello." and editor.text("agent_thought_chunk") == "I wonder."
        assert editor.of("usage_update")[0]["used"] == 15
    assert cli.messages() == [("user", "hi"), ("assistant", "Hello.")]
    assert cli.sessions()[0]["cwd"] == str(cli.folder)
    assert stderr_of(cli) == ""


async def test_prompt_with_image_and_resources(cli: Cli) -> None:
    (cli.folder / "a.py").write_text("x = 1\n")
    cli.script(Reply(text="Seen."))
    uri = f"file://{cli.folder}/a.py"
    text, blob = TextResourceContents(uri=f"{uri}#L1:1", text="x = 1\n"), BlobResourceContents(uri="x:y.png", blob=PNG)
    blocks = [
        text_block("Look at "),
        ResourceContentBlock(type="resource_link", uri=uri, name="a.py"),
        EmbeddedResourceContentBlock(type="resource", resource=text),
        EmbeddedResourceContentBlock(type="resource", resource=blob),
        ImageContentBlock(type="image", data=PNG, mime_type="image/png"),
    ]
    async with editing(cli) as editor:
        session_id = await new_session(editor, cli)
        answer = await editor.agent.prompt(session_id=session_id, prompt=blocks)
        assert answer.stop_reason == "end_turn"
        await editor.agent.load_session(cwd=str(cli.folder), session_id=session_id, mcp_servers=[])
        again = [chunk["content"] for chunk in editor.of("user_message_chunk")]
    assert [block["type"] for block in again] == ["text", "image", "image"]
    assert again[0]["text"].startswith("Look at [a.py]") and "x = 1" not in again[0]["text"]
    assert again[2]["data"] == PNG
    [message] = [message for message in cli.model.requests[-1].body["messages"] if message["role"] == "user"]
    parts = message["content"]
    assert f"Look at [a.py]({cli.folder}/a.py)[a.py]({cli.folder}/a.py#L1:1)" in parts[0]["text"]
    assert parts[1]["text"] == "File a.py:\nx = 1\n"
    assert [part["type"] for part in parts[2:]] == ["image_url", "image_url"]
    assert parts[3]["image_url"]["url"] == f"data:image/png;base64,{PNG}"


async def test_file_tools_see_unsaved_buffers_and_write_through_editor(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    path = real(cli, "a.txt")
    (cli.folder / "a.txt").write_text("saved\n")
    (cli.folder / "other.txt").write_bytes(b"one\r\ntwo\r\n")
    cli.script(
        Reply(
            tool_calls=[
                Call("read_file", {"path": "a.txt"}, id="c1"),
                Call("read_file", {"path": "other.txt", "offset": 1}, id="c2"),
            ]
        ),
        Reply(
            tool_calls=[
                Call(
                    "patch", {"mode": "replace", "path": "a.txt", "old_string": "unsaved", "new_string": "new"}, id="c3"
                )
            ]
        ),
        Reply(tool_calls=[Call("write_file", {"path": "a.txt", "content": "whole\n"}, id="c4")]),
        Reply(tool_calls=[Call("write_file", {"path": "sub/b.txt", "content": "b\n"}, id="c5")]),
        Reply(text="Done."),
    )
    async with editing(cli) as editor:
        editor.buffers[path] = "unsaved\n"
        session_id = await new_session(editor, cli)
        assert (await prompt(editor, session_id, "go")).stop_reason == "end_turn"
        assert editor.buffers[path] == "whole\n"
        assert editor.writes == [path, path, real(cli, "sub/b.txt")]
        calls = {call["toolCallId"]: call for call in editor.of("tool_call")}
        ends = {
            update["toolCallId"]: update
            for update in editor.of("tool_call_update")
            if update.get("status") == "completed"
        }
    assert "1|unsaved" in cli.model_messages(1)[-2][1] and "1|one" in cli.model_messages(1)[-1][1]
    assert (cli.folder / "a.txt").read_text() == "whole\n"
    assert (calls["c1"]["kind"], calls["c1"]["title"]) == ("read", "Read a.txt")
    assert calls["c1"]["locations"] == calls["c4"]["locations"] == [{"path": path}]
    assert calls["c2"]["locations"] == [{"path": real(cli, "other.txt"), "line": 1}]
    assert calls["c3"]["kind"] == "edit"
    assert calls["c3"]["content"] == [{"type": "diff", "path": path, "oldText": "unsaved", "newText": "new"}]
    assert calls["c4"]["content"] == [{"type": "diff", "path": path, "oldText": "new\n", "newText": "whole\n"}]
    assert ends["c4"]["content"] == calls["c4"]["content"] and ends.keys() == calls.keys()
    assert calls["c5"]["content"][0]["newText"] == "b\n" and "oldText" not in calls["c5"]["content"][0]


async def test_editor_is_never_asked_for_refused_paths(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    (cli.home / ".env").write_text("SOME_API_KEY=sk-0123456789abcdef\n")
    key = f"-----BEGIN RSA PRIVATE KEY-----\n{'MIIE' * 8}\n"
    (cli.folder / "key.txt").write_text("nothing\n")
    cli.script(
        Reply(tool_calls=[Call("read_file", {"path": str(cli.home / ".env")}), Call("read_file", {"path": "key.txt"})]),
        Reply(text="Done."),
    )
    async with editing(cli) as editor:
        editor.buffers |= {real(cli, "key.txt"): key, str(cli.home / ".env"): "SOME"}
        await prompt(editor, await new_session(editor, cli), "go")
        assert editor.reads == [real(cli, "key.txt")]
        assert [update["status"] for update in editor.of("tool_call_update")] == ["failed", "failed"]
    results = [text for role, text in cli.model_messages() if role == "tool"]
    assert all("path_refused" in text for text in results) and not any("MIIE" in text for text in results)


async def test_files_on_disk_without_editor_files(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    (cli.folder / "a.txt").write_text("saved\n")
    cli.script(Reply(tool_calls=[Call("read_file", {"path": "a.txt"})]), Reply(text="Done."))
    async with editing(cli) as editor:
        editor.buffers[real(cli, "a.txt")] = "unsaved\n"
        await editor.initialize(files=False)
        session_id = (await editor.agent.new_session(cwd=str(cli.folder), mcp_servers=[])).session_id
        await prompt(editor, session_id, "go")
        assert editor.reads == []
    assert "1|saved" in cli.model_messages()[-1][1]


@pytest.mark.parametrize(
    ("choice", "is_run", "status"), [("once", True, "completed"), ("deny", False, "failed"), (None, False, "failed")]
)
async def test_approval_is_permission_request(
    way: tuple[Cli, list[str]], choice: str | None, is_run: bool, status: str
) -> None:
    cli, args = way
    cli.script(Reply(tool_calls=[Call("terminal", {"command": "touch made"}, id="c1")]), Reply(text="Done."))
    async with editing(cli, *args) as editor:
        editor.choose = lambda _: choice
        assert (await prompt(editor, await new_session(editor, cli), "go")).stop_reason == "end_turn"
        [request] = editor.permission_requests
        kinds = {option["optionId"]: option["kind"] for option in request["options"]}
        assert kinds["once"] == "allow_once" and kinds["session"] == "allow_always" and kinds["deny"] == "reject_once"
        assert request["toolCall"]["toolCallId"] == "c1" and request["toolCall"]["kind"] == "execute"
        assert "touch made" in str(request["toolCall"]["content"])
        assert [call["status"] for call in editor.of("tool_call")] == ["pending"]
        assert editor.of("tool_call_update")[-1]["status"] == status
    assert (cli.folder / "made").exists() is is_run


async def test_permission_for_session_is_asked_once(cli: Cli) -> None:
    command = {"command": "touch made"}
    cli.script(
        Reply(tool_calls=[Call("terminal", command)]),
        Reply(tool_calls=[Call("terminal", command)]),
        Reply(text="Done."),
    )
    async with editing(cli) as editor:
        editor.choose = lambda _: "session"
        await prompt(editor, await new_session(editor, cli), "go")
        assert len(editor.permission_requests) == 1


async def test_command_output_is_streamed(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    cli.script(Reply(tool_calls=[Call("terminal", {"command": "echo one; echo '```'"}, id="c1")]), Reply(text="Done."))
    async with editing(cli) as editor:
        await prompt(editor, await new_session(editor, cli), "go")
        last = editor.of("tool_call_update")[-1]
    assert last["content"][0]["content"]["text"] == "````\none\n```\n````"
    assert last["rawOutput"]["exit_code"] == 0


async def test_commands_run_in_terminals_of_editor(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    sub = cli.folder / "sub"
    sub.mkdir()
    command = "cd sub; export MINE=1; echo of=$OF_EDITOR key=$TERM_KEY; touch made; exit 3"
    cli.env["TERM_KEY"] = "secret"
    cli.script(
        Reply(tool_calls=[Call("terminal", {"command": command}, id="c1")]),
        Reply(tool_calls=[Call("terminal", {"command": "pwd; echo mine=$MINE"}, id="c2")]),
        Reply(tool_calls=[Call("search_files", {"pattern": "made", "target": "files"}, id="c3")]),
        Reply(text="Done."),
    )
    async with editing(cli) as editor:
        await editor.initialize(terminal=True)
        session_id = (await editor.agent.new_session(cwd=str(cli.folder), mcp_servers=[])).session_id
        await prompt(editor, session_id, "go")
        assert editor.released == ["term_0", "term_1"] and editor.killed == []
        call_updates = [
            update
            for update in (*editor.of("tool_call"), *editor.of("tool_call_update"))
            if update["toolCallId"] == "c1"
        ]
        assert call_updates[-1]["content"] == [{"type": "terminal", "terminalId": "term_0"}]
        assert call_updates[-1]["status"] == "completed"
    first, second, third = [json.loads(text) for role, text in cli.model_messages() if role == "tool"]
    assert (first["exit_code"], first["output"].strip()) == (3, "of=yes key=")
    assert second["output"].split() == [real(cli, "sub"), "mine=1"] and "made" in str(third)


@pytest.mark.skipif(bool(bubblewrap.probe()), reason="needs bubblewrap")
async def test_editor_is_not_asked_while_sandboxed_command_runs(cli: Cli) -> None:
    """It would follow a link that the command puts in the place of a checked path."""
    cli.configure("approvals: {mode: off}\n")
    (cli.folder / "a.txt").write_text("saved\n")
    read = Call("read_file", {"path": "a.txt"})
    cli.script(
        Reply(tool_calls=[read]),
        Reply(tool_calls=[Call("terminal", {"command": "sleep 100", "background": True})]),
        Reply(tool_calls=[read]),
        Reply(tool_calls=[Call("terminal", {"command": "echo boxed"})]),
        Reply(text="Done."),
    )
    async with editing(cli, "--sandbox", "bubblewrap") as editor:
        editor.buffers[real(cli, "a.txt")] = "unsaved\n"
        await editor.initialize(terminal=True)
        session_id = (await editor.agent.new_session(cwd=str(cli.folder), mcp_servers=[])).session_id
        await prompt(editor, session_id, "go")
        assert len(editor.reads) == 1 and editor.terminals == {}
    results = [text for role, text in cli.model_messages() if role == "tool"]
    assert "unsaved" in results[0] and "1|saved" in results[2] and "boxed" in results[3]


async def test_cancel_kills_terminal_of_editor(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    cli.script(Reply(tool_calls=[Call("terminal", {"command": "sleep 100"})]), Reply(text="Done."))
    async with editing(cli) as editor:
        await editor.initialize(terminal=True)
        session_id = (await editor.agent.new_session(cwd=str(cli.folder), mcp_servers=[])).session_id
        asking = asyncio.create_task(prompt(editor, session_id, "go"))
        await editor.until(lambda: bool(editor.terminals))
        await editor.agent.cancel(session_id=session_id)
        assert (await asking).stop_reason == "cancelled"
        assert editor.killed and editor.released == ["term_0"]


async def test_plan_from_todo(cli: Cli) -> None:
    states = ("pending", "in_progress", "completed", "cancelled")
    todos = [{"id": str(at), "content": f"step {at}", "status": state} for at, state in enumerate(states)]
    cli.script(Reply(tool_calls=[Call("todo", {"todos": todos})]), Reply(text="Done."))
    async with editing(cli) as editor:
        await prompt(editor, await new_session(editor, cli), "go")
        [plan] = editor.of("plan")
    assert [(entry["content"], entry["status"]) for entry in plan["entries"]] == [
        (f"step {at}", state) for at, state in enumerate(states[:3])
    ]


async def test_clarify_question_offers_choices(cli: Cli) -> None:
    cli.script(
        Reply(tool_calls=[Call("clarify", {"question": "Which?", "choices": ["red", "blue"]})]),
        Reply(tool_calls=[Call("clarify", {"question": "Why?"})]),
        Reply(text="Done."),
    )
    async with editing(cli) as editor:
        editor.choose = lambda _: "1"
        await prompt(editor, await new_session(editor, cli), "go")
        assert [option["name"] for option in editor.permission_requests[0]["options"]] == [
            "red",
            "blue",
            "None of these",
        ]
        assert len(editor.permission_requests) == 1
    first, second = [text for role, text in cli.model_messages() if role == "tool"]
    assert '"blue"' in first and "cannot ask this" in second


async def test_cancel_ends_prompt_and_pending_permission(way: tuple[Cli, list[str]]) -> None:
    cli, args = way
    cli.script(Reply(tool_calls=[Call("terminal", {"command": "touch made"})]), Reply(text="Done."))
    async with editing(cli, *args) as editor:
        editor.permission_gate, editor.choose = asyncio.Event(), lambda _: "once"
        session_id = await new_session(editor, cli)
        asking = asyncio.create_task(prompt(editor, session_id, "go"))
        await editor.until(lambda: bool(editor.permission_requests))
        await editor.agent.cancel(session_id=session_id)
        assert (await asking).stop_reason == "cancelled"
        editor.permission_gate.set()
        cli.script(Reply(text="Still here."))
        assert (await prompt(editor, session_id, "again")).stop_reason == "end_turn"
        assert editor.text() == "Still here."
    assert not (cli.folder / "made").exists()


async def test_cancel_stops_streamed_answer_and_keeps_it(cli: Cli) -> None:
    cli.script(Reply(text=["The beginning of", " the end"], stall_at=450))
    async with editing(cli) as editor:
        session_id = await new_session(editor, cli)
        asking = asyncio.create_task(prompt(editor, session_id, "go"))
        waiting = asyncio.create_task(prompt(editor, session_id, "and then"))
        await editor.until(lambda: bool(editor.text()))
        await editor.agent.cancel(session_id=session_id)
        assert [(await pending).stop_reason for pending in (asking, waiting)] == ["cancelled", "cancelled"]
    assert cli.messages()[-1] == ("assistant", "The beginning of")


async def test_cancel_right_behind_prompt(cli: Cli) -> None:
    cli.script(Reply(text="slow", delay_s=600))
    async with editing(cli) as editor:
        session_id = await new_session(editor, cli)
        asking = asyncio.create_task(prompt(editor, session_id, "go"))
        await asyncio.sleep(0)  # it is written
        await editor.agent.cancel(session_id=session_id)
        assert (await asking).stop_reason == "cancelled"


async def test_sessions_run_at_the_same_time(cli: Cli) -> None:
    other = cli.folder / "other"
    other.mkdir()

    async def answer(_: Any) -> Reply:
        await cli.model.until(lambda: len(cli.model.requests) == 2)
        return Reply(text=["one ", "two"])

    cli.model.handler = answer
    async with editing(cli) as editor:
        first = await new_session(editor, cli)
        second = (await editor.agent.new_session(cwd=str(other), mcp_servers=[])).session_id
        answers = await asyncio.gather(prompt(editor, first, "a"), prompt(editor, second, "b"))
        assert [answer.stop_reason for answer in answers] == ["end_turn", "end_turn"]
        assert editor.text(session_id=first) == editor.text(session_id=second) == "one two"
    assert {session["cwd"] for session in cli.sessions()} == {str(cli.folder), str(other)}


async def test_load_replays_and_list_finds_session(way: tuple[Cli, list[str]]) -> None:
    cli, args = way
    todos = [{"id": "1", "content": "step", "status": "pending"}]
    cli.script(
        Reply(
            reasoning="I wonder.", tool_calls=[Call("todo", {"todos": todos}, id="c1"), Call("nothing", {}, id="c2")]
        ),
        Reply(text="Done."),
    )
    async with editing(cli, *args) as editor:
        session_id = await new_session(editor, cli)
        await prompt(editor, session_id, "go on")
    cli.script(Reply(text="Once more."))
    async with editing(cli, *args) as editor:
        await editor.initialize()
        [entry] = (await editor.agent.list_sessions(cwd=str(cli.folder))).sessions
        assert (entry.session_id, entry.cwd) == (session_id, str(cli.folder)) and entry.updated_at
        assert (await editor.agent.list_sessions(cwd="/nowhere")).sessions == []
        state = await editor.agent.load_session(cwd=str(cli.folder), session_id=session_id, mcp_servers=[])
        assert {option.id for option in state.config_options} >= {"mode", "model", "effort"}
        await editor.until(lambda: "available_commands_update" in editor.kinds())
        assert editor.text("user_message_chunk") == "go on" and editor.text() == "Done."
        assert editor.text("agent_thought_chunk") == "I wonder."
        ends = {update["toolCallId"]: update["status"] for update in editor.of("tool_call_update")}
        assert ends == {"c1": "completed", "c2": "failed"}
        assert editor.of("plan")[0]["entries"][0]["content"] == "step"
        assert (await prompt(editor, session_id, "again")).stop_reason == "end_turn"
    assert [text for role, text in cli.model_messages() if role == "user"] == ["go on", "again"]


async def test_server_of_another_home(elsewhere: Cli) -> None:
    """Its sessions, models and files are its own; what it does not take is not offered."""
    (elsewhere.folder / "a.txt").write_text("saved\n")
    elsewhere.script(
        Reply(tool_calls=[Call("read_file", {"path": str(elsewhere.folder / "a.txt")})]),
        Reply(tool_calls=[Call("terminal", {"command": "touch made"})]),
        Reply(text="Done."),
    )
    async with editing(elsewhere, *elsewhere.options) as editor:
        editor.choose = lambda _: "deny"
        await editor.initialize(terminal=True)
        state = await editor.agent.new_session(cwd=str(elsewhere.folder), mcp_servers=[])
        options = {option.id: option for option in state.config_options}
        assert state.modes is None and set(options) == {"model", "effort"}
        assert options["model"].current_value == "hermes-agent"
        await editor.until(lambda: "available_commands_update" in editor.kinds())
        commands = {command["name"] for command in editor.of("available_commands_update")[0]["availableCommands"]}
        assert "usage" in commands and not {"yolo", "memory", "compress"} & commands
        assert (await prompt(editor, state.session_id, "go")).stop_reason == "end_turn"
        assert len(editor.permission_requests) == 1 and editor.reads == [] and editor.terminals == {}
        [entry] = (await editor.agent.list_sessions()).sessions
        assert entry.session_id == state.session_id
    async with editing(elsewhere, *elsewhere.options) as editor:
        await editor.initialize()
        await editor.agent.load_session(cwd=str(elsewhere.folder), session_id=state.session_id, mcp_servers=[])
        assert editor.text("user_message_chunk") == "go" and editor.text() == "Done."
    assert stderr_of(elsewhere) == ""


async def test_server_that_is_not_there(elsewhere: Cli, closed_port: int) -> None:
    async with editing(elsewhere, "--server", f"http://127.0.0.1:{closed_port}") as editor:
        await editor.initialize()
        with pytest.raises(RequestError, match="does not answer"):
            await editor.agent.new_session(cwd=str(elsewhere.folder), mcp_servers=[])


async def test_session_list_continues_after_cursor(cli: Cli) -> None:
    from hermes.store.sessions import SessionDB

    db = SessionDB(cli.home / "state.db")
    for number in range(60):
        db.create_session(f"s{number}", "cli", cwd=str(cli.folder))
    db.close()
    async with editing(cli) as editor:
        await editor.initialize()
        first = await editor.agent.list_sessions()
        second = await editor.agent.list_sessions(cursor=first.next_cursor)
        assert second.next_cursor is None
        assert len({session.session_id for session in (*first.sessions, *second.sessions)}) == 60
        with pytest.raises(RequestError, match="cursor"):
            await editor.agent.list_sessions(cursor="nonsense")


async def test_resume_and_close_session(cli: Cli) -> None:
    cli.script(Reply(text="One."), Reply(text="Two."))
    async with editing(cli) as editor:
        session_id = await new_session(editor, cli)
        await prompt(editor, session_id, "a")
        await editor.agent.close_session(session_id=session_id)
        with pytest.raises(RequestError, match="not open"):
            await prompt(editor, session_id, "b")
        await editor.agent.resume_session(cwd=str(cli.folder), session_id=session_id, mcp_servers=[])
        assert "user_message_chunk" not in editor.kinds()
        assert (await prompt(editor, session_id, "b")).stop_reason == "end_turn"


async def test_modes_and_config_options(cli: Cli) -> None:
    cli.configure("providers: {more: {base_url: 'http://127.0.0.1:9/v1', models: [other]}}\n")
    cli.script(Reply(tool_calls=[Call("terminal", {"command": "touch made"})]), Reply(text="Done."))
    async with editing(cli) as editor:
        await editor.initialize()
        state = await editor.agent.new_session(cwd=str(cli.folder), mcp_servers=[])
        assert state.modes.current_mode_id == "manual"
        assert [available_mode.id for available_mode in state.modes.available_modes] == ["manual", "smart", "off"]
        options = {option.id: option for option in state.config_options}
        assert options["model"].current_value == "custom/m"
        assert [option.value for option in options["model"].options] == ["custom/m", "more/other"]
        await editor.agent.set_session_mode(session_id=state.session_id, mode_id="off")
        assert (await prompt(editor, state.session_id, "go")).stop_reason == "end_turn"
        assert editor.permission_requests == [] and (cli.folder / "made").exists()
        for name, value in (("effort", "high"), ("model", "more/other"), ("mode", "manual")):
            answer = await editor.agent.set_config_option(session_id=state.session_id, config_id=name, value=value)
            assert {option.id: option.current_value for option in answer.config_options}[name] == value
        for name, value in (("effort", "endless"), ("model", "none/none"), ("nothing", "x")):
            with pytest.raises(RequestError, match="Invalid params"):
                await editor.agent.set_config_option(session_id=state.session_id, config_id=name, value=value)
        with pytest.raises(RequestError, match="modeId"):
            await editor.agent.set_session_mode(session_id=state.session_id, mode_id="nothing")
        back = await editor.agent.set_config_option(session_id=state.session_id, config_id="model", value="custom/m")
        assert {option.id: option.current_value for option in back.config_options}["model"] == "custom/m"
        cli.script(Reply(text="Thought."))
        await prompt(editor, state.session_id, "again")
    assert '"high"' in json.dumps(cli.model.requests[-1].body)


async def test_slash_commands(cli: Cli) -> None:
    skill = cli.home / "skills" / "greet"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: greet\ndescription: How to greet\n---\nSay hello.\n")
    cli.script(Reply(text="Hello."))
    async with editing(cli) as editor:
        session_id = await new_session(editor, cli)
        await editor.until(lambda: "available_commands_update" in editor.kinds())
        commands = {
            command["name"]: command for command in editor.of("available_commands_update")[0]["availableCommands"]
        }
        assert commands["greet"]["description"] == "How to greet" and commands["model"]["input"]["hint"]
        assert not {"quit", "new", "resume", "approve", "stop"} & set(commands)
        assert (await prompt(editor, session_id, "/status")).stop_reason == "end_turn"
        assert "custom/m" in editor.text()
        await prompt(editor, session_id, "/tools list")
        assert "terminal" in editor.text()
        await prompt(editor, session_id, "/reasoning high")
        assert {
            option["id"]: option["currentValue"] for option in editor.of("config_option_update")[-1]["configOptions"]
        }["effort"] == "high"
        await prompt(editor, session_id, "/reasoning endless")
        assert "no effort" in editor.text()
        assert cli.model.requests == []
        await prompt(editor, session_id, "/greet the world")
        assert editor.text().endswith("Hello.")
    assert "Say hello." in cli.model_messages()[-1][1]


async def test_unknown_slash_is_sent_to_model(cli: Cli) -> None:
    cli.script(Reply(text="A file."))
    async with editing(cli) as editor:
        await prompt(editor, await new_session(editor, cli), "/etc/hosts, what is that?")
    assert cli.model_messages() == [("user", "/etc/hosts, what is that?")]


async def test_failed_turn_is_an_error_and_session_continues(cli: Cli) -> None:
    cli.script(Reply(status=400, error="nonsense"))
    async with editing(cli) as editor:
        session_id = await new_session(editor, cli)
        with pytest.raises(RequestError, match="nonsense"):
            await prompt(editor, session_id, "go")
        cli.script(Reply(status=401, error="bad key"))
        with pytest.raises(RequestError) as refused:
            await prompt(editor, session_id, "go")
        assert refused.value.code == -32000
        cli.script(Reply(text="Fine."))
        assert (await prompt(editor, session_id, "go")).stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("replies", "args", "reason"),
    [
        ([Reply(text="Cut", finish="content_filter")], [], "refusal"),
        ([Reply(tool_calls=[Call("todo", {})]), Reply(text="Summary.")], ["--max-turns", "1"], "max_turn_requests"),
        ([Reply(text="Cut", finish="length")] * 9, [], "max_tokens"),
    ],
)
async def test_stop_reasons(cli: Cli, replies: list[Reply], args: list[str], reason: str) -> None:
    cli.script(*replies)
    async with editing(cli, *args) as editor:
        assert (await prompt(editor, await new_session(editor, cli), "go")).stop_reason == reason


async def test_missing_model_requires_setup(cli: Cli) -> None:
    cli.env["HERMES_LOCAL"] = "off"
    (cli.home / "config.yaml").write_text("model: {provider: openai, default: m}\n")
    async with editing(cli) as editor:
        ready = await editor.initialize(auth={"terminal": True})
        [method] = ready.auth_methods
        assert (method.id, method.type, method.args) == ("setup", "terminal", ["--setup"])
        with pytest.raises(RequestError) as refused:
            await editor.agent.new_session(cwd=str(cli.folder), mcp_servers=[])
        assert refused.value.code == -32000 and "OPENAI_API_KEY" in str(refused.value)
        with pytest.raises(RequestError):
            await editor.agent.authenticate(method_id="setup")
        cli.configure()
        await editor.agent.authenticate(method_id="setup")
        assert (await editor.agent.new_session(cwd=str(cli.folder), mcp_servers=[])).session_id


async def test_editor_that_disappears_ends_turn_and_process(cli: Cli) -> None:
    cli.script(Reply(text=["The beginning of", " the end"], stall_at=450))
    async with editing(cli) as editor:
        session_id = await new_session(editor, cli)
        asking = asyncio.create_task(prompt(editor, session_id, "go"))
        await editor.until(lambda: bool(editor.text()))
        await editor.agent.close()
        asking.cancel()
    assert editor.process.returncode == 0
    assert cli.messages()[-1] == ("assistant", "The beginning of")
    assert "Traceback" not in stderr_of(cli)


async def test_sigterm_ends_process(cli: Cli) -> None:
    async with editing(cli) as editor:
        await new_session(editor, cli)
        editor.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(editor.process.wait, WAIT_S) == 0


def test_missing_extra_has_install_hint(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("hermes.cli.acp.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "acp", None)
    result = cli.run("acp")
    assert result.returncode == 78 and result.stdout == ""
    assert "extra `acp`" in result.stderr and "hermes install acp" in result.stderr


def test_standard_input_must_be_a_pipe(cli: Cli) -> None:
    process = cli.start("acp")
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (2, "") and "started by an editor" in err
