"""Leave to do something: the order of the rules, what is asked and who answers, and what a grant covers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.conftest import MakeHarness
from agent.harness import KEY, CompletedRun, Harness, Json, Running, nothing_left, tool
from hermes.tools.framework import approvals
from hermes.tools.framework.approvals import _mentions
from hermes.tools.framework.questions import ApprovalRequest
from hermes.tools.framework.registry import ToolContext
from runs.test_resume import OrphanedRun
from support.model_server import Call, ModelServer, Reply, Request

from .commanding import SURELY_S, ToolSession

FLAGGED = "rm -r build"


def build_folder(tool_session: ToolSession) -> Path:
    """Something that the flagged command deletes."""
    folder = tool_session.workspace / "build"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def terminal(command: str, **more: Any) -> Call:
    return Call("terminal", {"command": command, **more})


async def answer_approval(active_run: Running, choice: str) -> Json:
    """The question, which is answered by that."""
    event = await active_run.wait_for("approval.requested")
    assert await active_run.control("approve", id=event["approval_id"], choice=choice) == "applied"
    return event


def decided(run: CompletedRun) -> list[tuple[str, str]]:
    return [(event["choice"], event["by"]) for event in run.events_of("approval.resolved")]


# ---- the order


@pytest.mark.parametrize(
    ("settings", "fields", "command", "status", "decision"),
    [
        # What is never done.
        ({"mode": "off"}, {}, "rm -rf /", "blocked", [("deny", "rule")]),
        ({"mode": "off", "deny": ["git push"]}, {}, "cd x && git push origin", "blocked", [("deny", "rule")]),
        (
            {"mode": "off", "deny": ["git push*--force"]},
            {},
            "bash -c 'git  push a --force'",
            "blocked",
            [("deny", "rule")],
        ),
        ({"deny": ["git push"]}, {}, "echo git-push", "ok", []),
        ({"unattended": "allow"}, {}, "mkfs.ext4 /dev/sda", "blocked", [("deny", "rule")]),
        # No rule.
        ({}, {}, "echo fine", "ok", []),
        # Modes.
        ({"mode": "off"}, {}, FLAGGED, "ok", [("once", "rule")]),
        ({}, {"approvals": "off"}, FLAGGED, "ok", [("once", "rule")]),
        ({}, {}, FLAGGED, "blocked", [("deny", "rule")]),
        ({"unattended": "allow"}, {}, FLAGGED, "ok", [("once", "rule")]),
        ({"unattended": "allow"}, {"approvals": "deny"}, FLAGGED, "blocked", [("deny", "rule")]),
    ],
)
async def test_approval_rule_precedence(
    make_harness: MakeHarness,
    server: ModelServer,
    settings: Json,
    fields: Json,
    command: str,
    status: str,
    decision: list[tuple[str, str]],
) -> None:
    tool_session = ToolSession(make_harness, server, approvals=settings)
    folder = build_folder(tool_session)
    run = await tool_session.run(terminal(command), **fields)
    [answer] = run.tool_results()
    assert (answer["status"], decided(run)) == (status, decision)
    assert run.event("tool.finished")["status"] == status
    assert ("tool.started" in run.types) is (status == "ok")
    assert folder.exists() is not (command == FLAGGED and status == "ok")


async def test_blocked_answer_to_model(make_harness: MakeHarness, server: ModelServer) -> None:
    answer = await ToolSession(make_harness, server).sh(FLAGGED)
    assert {name: answer[name] for name in ("status", "by", "rules", "code", "exit_code")} == {
        "status": "blocked",
        "by": "rule",
        "rules": ["delete"],
        "code": "blocked",
        "exit_code": -1,
    }
    assert "deletes" in answer["reason"] and "another way" in answer["hint"] and "Tell the user" in answer["hint"]


@pytest.mark.parametrize("how", ["process", "session"])
async def test_yolo_mode_skips_approvals(
    make_harness: MakeHarness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "process":
        monkeypatch.setenv("HERMES_YOLO_MODE", "1")
    tool_session = ToolSession(make_harness, server)
    monkeypatch.delenv("HERMES_YOLO_MODE", raising=False)  # it is read once, at the start
    tool_session.harness.app.services.session_states.of("default", "s1").yolo = how == "session"
    build_folder(tool_session)
    run = await tool_session.run(terminal(FLAGGED))
    assert (run.tool_results()[0]["status"], decided(run)) == ("ok", [("once", "rule")])
    assert (await tool_session.sh("rm -rf /"))["status"] == "blocked"


@pytest.mark.parametrize(
    ("command", "needs_approval"),
    [
        ("chmod -R 777 /opt/x; true", False),  # of the system, which it cannot reach
        ('eval "$(echo ZWNobwo= | base64 -d)"; true', False),
        ("curl -s x | sh; true", False),  # from the network, which it does not have
        (FLAGGED, True),  # of the workspace, which it has
        ("rm -rf /", True),
    ],
)
async def test_sandbox_skips_some_approvals(
    make_harness: MakeHarness, server: ModelServer, command: str, needs_approval: bool
) -> None:
    tool_session = ToolSession(make_harness, server, "bubblewrap")
    build_folder(tool_session)
    run = await tool_session.run(terminal(command))
    # A host that a command then wants to reach is decided on of its own.
    assert decided(run)[0] == (("deny", "rule") if needs_approval else ("once", "rule"))
    assert run.tool_results()[0]["status"] == ("blocked" if needs_approval else "ok")


async def test_remote_code_with_network_needs_approval(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = ToolSession(make_harness, server, "bubblewrap", terminal={"network": True})
    assert (await tool_session.sh("curl -s x | sh"))["rules"] == ["remote"]


@pytest.mark.parametrize(
    ("text", "pattern", "expected"),
    [
        ("git push", "git push", True),
        ("a; git  push x", "git push", True),
        ("git pushed", "git push", False),
        ("my-git push", "git push", False),
        ("git push x --force", "git push*--force", True),
        ("git push --force x", "git push*--force", True),
        ("--force git push", "git push*--force", False),
        ("anything", "*", True),
        ("anything", "", False),
        ("a.b", "a?b", False),
        ("git " * 20_000, "git * --force", False),
    ],
)
def test_deny_pattern_matching(text: str, pattern: str, expected: bool) -> None:
    assert _mentions(text, pattern) is expected


# ---- asking


@pytest.mark.parametrize(
    ("choice", "status"), [("once", "ok"), ("session", "ok"), ("always", "ok"), ("deny", "blocked")]
)
async def test_approval_choice_scope(make_harness: MakeHarness, server: ModelServer, choice: str, status: str) -> None:
    tool_session = ToolSession(make_harness, server)
    build_folder(tool_session)
    active_run = await tool_session.begin(terminal(FLAGGED), answerable=True)
    request = await answer_approval(active_run, choice)
    assert (request["kind"], request["subject"], request["rules"], request["reviewer"]) == (
        "command",
        FLAGGED,
        ["delete"],
        None,
    )
    assert (request["choices"], "deletes" in request["reason"]) == (["once", "session", "always", "deny"], True)
    run = await active_run.end()
    assert (run.tool_results()[0]["status"], decided(run)) == (status, [(choice, "user")])
    if status == "blocked":
        assert "The user did not allow it." in run.tool_results()[0]["reason"]
    # The same once more; a little more than the same; elsewhere; in another session.
    commands = [FLAGGED, f"{FLAGGED}; echo more", f"cd / && {FLAGGED}", "rm -r other"]
    results = [(await tool_session.sh(command))["status"] for command in commands]
    granted = {"session": ["ok", "ok", "blocked", "blocked"], "always": ["ok", "ok", "ok", "blocked"]}
    assert results == granted.get(choice, ["blocked"] * 4)
    elsewhere = await tool_session.call("terminal", {"command": FLAGGED}, session_id="s2")
    assert elsewhere["status"] == ("ok" if choice == "always" else "blocked")
    config = yaml.safe_load(tool_session.harness.home.config_file.read_text())
    assert config.get("command_allowlist") == ([FLAGGED] if choice == "always" else None)


@pytest.mark.parametrize(
    ("command", "fields", "always"),
    [
        (FLAGGED, {}, True),
        (FLAGGED, {"owner": "kitchen"}, False),
        (FLAGGED, {"owner": "kitchen", "source": "cli"}, True),
        ("git reset --hard && git clean -fd", {}, True),
        ("rm -r build > /dev/null", {}, True),
        ("rm -r *", {}, False),
        ("rm -r $(cat list)", {}, False),
        (f"cd x && {FLAGGED}", {}, False),
        ("curl x | sh", {}, False),
        ("curl x > f; sh f", {}, False),
        ("rm -r ~/build", {}, True),
        ('eval "$(cat x)"', {}, False),
        (f"rm -r {KEY}", {}, False),
    ],
)
async def test_always_choice_availability(
    make_harness: MakeHarness, server: ModelServer, command: str, fields: Json, always: bool
) -> None:
    tool_session = ToolSession(make_harness, server)
    active_run = await tool_session.begin(terminal(command), answerable=True, **fields)
    request = await answer_approval(active_run, "deny")
    assert request["choices"] == ["once", "session", *(["always"] if always else []), "deny"]
    await active_run.end()


@pytest.mark.parametrize(
    ("allowed", "command", "status"),
    [
        (["rm -r build"], FLAGGED, "ok"),
        (["rm -r *"], "rm -r build/x y", "ok"),
        (["rm -r *"], "echo hi; rm -r 'a b' && echo ho", "ok"),
        (["rm -r build"], "rm -r build2", "blocked"),
        (["m -r build"], FLAGGED, "blocked"),
        (["rm -r build"], f"{FLAGGED}; rm -r other", "blocked"),
        (["*"], 'eval "$(cat x)"', "blocked"),
        (["*"], "rm -r $(cat list)", "blocked"),
        (["*"], "curl x | sh", "blocked"),
        (["*"], "rm -rf /", "blocked"),
        (["git *"], "git reset --hard; rm -r build", "blocked"),
    ],
)
async def test_command_allowlist(
    make_harness: MakeHarness, server: ModelServer, allowed: list[str], command: str, status: str
) -> None:
    tool_session = ToolSession(make_harness, server, command_allowlist=allowed)
    assert (await tool_session.sh(command))["status"] == status


async def test_approval_timeout(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = ToolSession(make_harness, server, api_server={"approval_timeout_seconds": 0.05})
    run = await tool_session.run(terminal(FLAGGED), answerable=True)
    assert decided(run) == [("deny", "timeout")]
    assert (run.tool_results()[0]["by"], run.tool_results()[0]["status"]) == ("timeout", "blocked")


async def test_interrupt_during_approval(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = ToolSession(make_harness, server)
    active_run = await tool_session.begin(terminal(FLAGGED), answerable=True)
    await active_run.wait_for("approval.requested")
    await active_run.control("interrupt")
    run = await active_run.end()
    assert decided(run) == [("deny", "interrupt")] and "tool.started" not in run.types
    await nothing_left(server)


async def test_approval_text_is_complete_and_redacted(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = ToolSession(make_harness, server)
    text = " ".join(f"word{n}" for n in range(3000))
    active_run = await tool_session.begin(terminal(f"rm -r build {text} {KEY} end"), answerable=True)
    request = await answer_approval(active_run, "deny")
    assert request["subject"] == f"rm -r build {text} [redacted] end"
    await active_run.end()


async def test_approvals_are_sequential_and_block_only_conflicting_calls(
    make_harness: MakeHarness, server: ModelServer
) -> None:
    tool_session = ToolSession(make_harness, server)

    async def ask(ctx: ToolContext, args: Json) -> Json:
        await approvals.permission(ctx, "mcp", args["a"], "It may destroy something.", key="server tool")
        return {"done": args["a"]}

    tool_session.offer(
        tool("ask", ask, scope=lambda args: frozenset({args["a"]})), tool("look", scope=lambda _: frozenset())
    )
    calls = [Call("ask", {"a": "one"}), Call("ask", {"a": "two"}), Call("look")]
    active_run = await tool_session.begin(*calls, answerable=True)
    await active_run.wait_for("tool.finished")  # the one that need not wait
    request = await answer_approval(active_run, "session")
    assert (request["kind"], request["choices"]) == ("mcp", ["once", "session", "deny"])
    run = await active_run.end()
    assert run.event("approval.requested")
    assert decided(run) == [("session", "user"), ("once", "rule")], "the second one is granted with the first"
    assert run.tool_results()[:2] == [{"done": "one"}, {"done": "two"}]


async def test_approval_before_crash_counts_for_one_request(harness: Harness, server: ModelServer) -> None:
    choices: list[str] = []

    async def act(ctx: ToolContext, _: Json) -> Json:
        for kind in ("network", "command"):
            request = ApprovalRequest(ctx.call_id, kind, "x", "why not")
            choices.append((await ctx.asking.approve(request)).choice)
        return {"ok": True}

    harness.offer(tool("act", act, effect="read"))
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"x"}), answerable=False).begin()
    await orphan.say("", calls=[Call("act", {}, id="c1")])
    await orphan.add(orphan.event("approval.requested", approval_id="apr_1", call_id="c1", expires_at=orphan.ts + 60))
    await orphan.add(orphan.event("approval.resolved", approval_id="apr_1", choice="once", by="user"))
    await orphan.taken_up()
    assert choices == ["once", "deny"], "the other one is a question of its own"


# ---- the other kinds


async def test_write_grant_for_folder_outside_workspace(
    make_harness: MakeHarness, server: ModelServer, tmp_path: Path
) -> None:
    tool_session = ToolSession(make_harness, server)
    outside = tmp_path / "elsewhere"
    outside.mkdir()

    async def write(ctx: ToolContext, args: Json) -> Json:
        paths = await ctx.resources.paths()
        if (folder := await ctx.blocking(lambda: paths.needs_grant(outside / "file"))) is not None:
            await approvals.folder(ctx, folder)
        return {"needs": str((await ctx.resources.paths()).needs_grant(outside / "file"))}

    tool_session.offer(tool("write", write))
    answers = []
    for choice in ("deny", "once", "session", None):
        active_run = await tool_session.begin(Call("write"), answerable=True)
        if choice is not None:
            request = await answer_approval(active_run, choice)
            assert (request["kind"], request["subject"]) == ("write", str(outside))
        [answer] = (await active_run.end()).tool_results()
        answers.append(answer.get("needs", answer.get("status")))
    assert answers == ["blocked", "None", "None", "None"]


@pytest.mark.parametrize(("key", "choices"), [("", ["once", "deny"]), ("k", ["once", "session", "deny"])])
async def test_approval_for_other_tools(
    make_harness: MakeHarness, server: ModelServer, key: str, choices: list[str]
) -> None:
    tool_session = ToolSession(make_harness, server)

    async def ask(ctx: ToolContext, _: Json) -> Json:
        await approvals.permission(ctx, "skill", f"delete it {KEY}", "Skills are to be approved.", key=key)
        return {"ok": True}

    tool_session.offer(tool("ask", ask))
    active_run = await tool_session.begin(Call("ask"), answerable=True)
    request = await answer_approval(active_run, "once")
    assert (request["choices"], request["rules"], request["subject"]) == (choices, [], "delete it [redacted]")
    assert (await active_run.end()).tool_results() == [{"ok": True}]


# ---- the reviewer


def verdict(decision: str, reason: str = "It is what the user wants.") -> Reply:
    return Reply(text=json.dumps({"decision": decision, "reason": reason}))


async def smart(
    make_harness: MakeHarness, server: ModelServer, reply: Reply, **fields: Any
) -> tuple[ToolSession, Running]:
    tool_session = ToolSession(make_harness, server, approvals={"mode": "smart"}, **fields)
    build_folder(tool_session)
    await tool_session.sh("echo words of a tool")
    return tool_session, await tool_session.begin(
        terminal(FLAGGED), replies=(reply,), message="clean up the build", answerable=True
    )


async def test_smart_approval_reviewer_approves_once(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session, active_run = await smart(make_harness, server, verdict("approve"))
    run = await active_run.end()
    assert (run.tool_results()[0]["status"], decided(run)) == ("ok", [("once", "reviewer")])
    assert run.events_of("usage")[1]["task"] == "approval"
    assert not tool_session.harness.app.services.session_states.of("default", "s1").granted
    review: Request = server.requests[-2]
    payload = json.loads(review.turns[-1].text)
    assert (payload["action"], payload["user_message"]) == (FLAGGED, "clean up the build")
    assert payload["cwd"] == str(tool_session.workspace) and "deletes" in payload["rules"]
    assert "words of a tool" not in json.dumps(review.body)
    assert not review.body.get("tools")


@pytest.mark.parametrize(
    ("decision", "choices"), [("deny", ["once", "deny"]), ("unsure", ["once", "session", "always", "deny"])]
)
async def test_smart_approval_reviewer_escalates_to_user(
    make_harness: MakeHarness, server: ModelServer, decision: str, choices: list[str]
) -> None:
    _, active_run = await smart(make_harness, server, verdict(decision, "It deletes more than that."))
    request = await answer_approval(active_run, "once")
    assert request["choices"] == choices
    assert request["reviewer"] == {"decision": decision, "reason": "It deletes more than that."}
    assert "It deletes more than that." in request["reason"]
    run = await active_run.end()
    assert (run.tool_results()[0]["status"], decided(run)) == ("ok", [("once", "user")])


@pytest.mark.parametrize(
    "reply",
    [
        Reply(text="approve"),
        Reply(text='{"decision": "yes", "reason": "x"}'),
        Reply(text='{"decision": "approve"}'),
        Reply(text='["approve"]'),
        Reply(text='Sure! {"decision": "approve", "reason": "x"}'),
        Reply(status=400, error="no"),
    ],
    ids=["no json", "no decision", "no reason", "no object", "words around it", "refused"],
)
async def test_smart_approval_invalid_reviewer_answer_is_ignored(
    make_harness: MakeHarness, server: ModelServer, reply: Reply
) -> None:
    _, active_run = await smart(make_harness, server, reply)
    request = await answer_approval(active_run, "deny")
    assert (request["choices"], request["reviewer"]) == (["once", "session", "always", "deny"], None)
    assert decided(await active_run.end()) == [("deny", "user")]


async def test_smart_approval_reviewer_timeout(make_harness: MakeHarness, server: ModelServer) -> None:
    slow = Reply(text="late", stall_at=0)
    quiet = {"title_generation": {"enabled": False}}
    _, active_run = await smart(make_harness, server, slow, auxiliary={**quiet, "approval": {"timeout": 0.2}})
    async with asyncio.timeout(SURELY_S):
        request = await answer_approval(active_run, "deny")
        assert request["reviewer"] is None
        await active_run.end()


async def test_smart_approval_reviewer_answer_in_code_fence(make_harness: MakeHarness, server: ModelServer) -> None:
    reply = Reply(text='```json\n{"decision": "approve", "reason": "x"}\n```')
    _, active_run = await smart(make_harness, server, reply)
    assert decided(await active_run.end()) == [("once", "reviewer")]


async def test_smart_approval_reviewer_is_not_asked_for_denied_or_granted(
    make_harness: MakeHarness, server: ModelServer
) -> None:
    tool_session = ToolSession(make_harness, server, approvals={"mode": "smart"}, command_allowlist=[FLAGGED])
    build_folder(tool_session)
    for command in ("rm -rf /", FLAGGED):
        before = len(server.requests)
        await tool_session.sh(command)
        assert len(server.requests) == before + 2, "the call, and the answer"
