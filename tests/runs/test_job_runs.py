"""Runs of jobs: their script, their effort, the session they share, and a result that is not shown."""

from __future__ import annotations

from typing import Any

import pytest

from agent.conftest import MakeHarness
from agent.harness import CompletedRun, Harness, sent_messages
from hermes.core.spec import Control
from hermes.core.text import own_text_of, text_of
from hermes.runs.jobs import spec_of
from support.model_server import ModelServer, Reply

from .test_scheduler import NOW, Plan

FREE = {"terminal": {"backend": "local"}, "approvals": {"mode": "off"}}


def plan_of(make_harness: MakeHarness, server: ModelServer, **settings: Any) -> Plan:
    route = {"base_url": f"{server.url}/v1", "default": "m"}
    return Plan(
        make_harness({"model": route, "platform_toolsets": {"cron": ["terminal", "todo"]}, **FREE, **settings}), server
    )


@pytest.fixture
def plan(make_harness: MakeHarness, server: ModelServer) -> Plan:
    server.script = [Reply(text="Noted.", continues=False)] * 20
    return plan_of(make_harness, server)


async def run_job(plan: Plan, job: Any, **changes: Any) -> CompletedRun:
    return await plan.harness.carry_out(spec_of(job, plan.clock.now).replace(**changes))


def prompts(plan: Plan, at: int = -1) -> list[str]:
    return [text for role, text in sent_messages(plan.server.requests[at]) if role == "user"]


async def test_job_script_runs_first_and_its_output_is_model_input(plan: Plan) -> None:
    job = await plan.add("every 1h", script="echo 3 new mails; echo >&2 one warning")
    run = await run_job(plan, job)
    prompt, result_text = prompts(plan)
    assert prompt == "Say hi."
    assert "without an error" in result_text and "File script-output.txt:\n3 new mails\none warning" in result_text
    assert (run.event("tool.started")["name"], run.event("tool.finished")["status"]) == ("terminal", "ok")
    assert run.event("notice")["level"] == "info"
    rows = await plan.harness.rows(run.spec.session_id)
    assert [row.role for row in rows] == ["user", "user", "assistant"]


@pytest.mark.parametrize(
    ("script", "settings", "message"),
    [
        ("echo half; exit 3", {}, "exit code 3"),
        ("sleep 1000", {"terminal": {"backend": "local", "timeout": 1}}, "took longer than 1 s"),
        ("sleep 60 &", {}, "leaves something running"),
        ("rm -rf /", {}, "blocked"),
        ("touch made", {"approvals": {"mode": "manual"}}, "blocked"),
        ("echo hi", {"agent": {"disabled_toolsets": ["terminal"]}}, "may not use the toolset terminal"),
        ("echo hi", {"platform_toolsets": {"cron": ["todo"]}}, "may not use the toolset terminal"),
    ],
)
async def test_failing_job_script_is_reported_and_recorded(
    make_harness: MakeHarness, server: ModelServer, script: str, settings: Any, message: str
) -> None:
    server.script = [Reply(text="Noted.")]
    plan = plan_of(make_harness, server, **settings)
    run = await run_job(plan, await plan.add("every 1h", script=script))
    assert run.final["type"] == "run.completed"
    notice = run.event("notice")
    prompt = prompts(plan)[1]
    assert "It failed" in prompt and notice["level"] == "warn"
    ended = "".join(event["status"] for event in run.events_of("tool.finished"))
    assert message in f"{prompt} {ended}"
    assert not (plan.harness.home.workspace / "made").exists()
    assert ("half" in prompt) is (script.startswith("echo half"))


async def test_job_script_needs_allowed_terminal_toolset(plan: Plan) -> None:
    job = await plan.add("every 1h", script="echo ran", enabled_toolsets=["todo"])
    await run_job(plan, job)
    assert "ran\n" in prompts(plan)[1]
    await run_job(plan, job, tool_policy=frozenset({"todo"}), session_id="other")
    assert "may not use the toolset terminal" in prompts(plan)[1]


async def test_job_script_output_is_redacted_and_not_user_text(plan: Plan) -> None:
    script = "echo see https://news.example.org; printf 'API_TOKEN%s' =abcd1234efgh5678"
    run = await run_job(plan, await plan.add("every 1h", script=script))
    assert "news.example.org" in prompts(plan)[1] and "abcd1234efgh5678" not in str(plan.server.requests[-1].body)
    assert "abcd1234" not in str(run.events_of("tool.finished", "notice"))
    [_, row, _] = await plan.harness.rows(run.spec.session_id)
    assert "without an error" in own_text_of(row.content) and "news.example.org" not in own_text_of(row.content)


async def test_long_job_script_output_is_truncated(make_harness: MakeHarness, server: ModelServer) -> None:
    server.script = [Reply(text="Noted.")]
    plan = plan_of(make_harness, server, tool_output={"max_bytes": 1000})
    await run_job(plan, await plan.add("every 1h", script="seq 100000"))
    assert len(prompts(plan)[1]) < 2000


async def test_interrupt_ends_job_script(plan: Plan) -> None:
    running = await plan.harness.begin(spec_of(await plan.add("every 1h", script="echo up; sleep 1000"), NOW))
    await running.wait_for("tool.output")
    await plan.harness.engine.control(running.run_id, Control("interrupt"))
    run = await running.end()
    assert (run.final["type"], run.event("tool.finished")["status"]) == ("run.cancelled", "interrupted")
    assert plan.server.requests == []


async def test_job_effort_applies_to_its_turns(plan: Plan) -> None:
    run = await run_job(plan, await plan.add("every 1h", effort="high", model="gpt-5"))
    assert run.spec.reasoning == {"enabled": True, "effort": "high"}
    assert plan.server.requests[-1].body["reasoning_effort"] == "high"


async def test_job_continuity_shares_session_between_runs(plan: Plan) -> None:
    job = await plan.add("every 1h", continuity=True, repeat=2)
    for hour in (1, 2):
        await plan.look(NOW + hour * 3600)
    first, second = await plan.runs()
    assert first.spec.session_id == second.spec.session_id == f"cron_{job['id']}"
    assert prompts(plan) == ["Say hi.", "Say hi."]
    assert (await plan.job(job))["last_session_id"] == f"cron_{job['id']}"


@pytest.mark.parametrize(("text", "silent"), [("[SILENT]", True), (" [SILENT]\n", True), ("[SILENT] but", False)])
async def test_silent_job_result_is_hidden(plan: Plan, text: str, silent: bool) -> None:
    plan.server.script = [Reply(text=text)]
    job = await plan.add("every 1h")
    await plan.look(NOW + 3600)
    await plan.look()
    now = await plan.job(job)
    assert (now["last_status"], now["last_error"]) == ("silent" if silent else "completed", None)
    sessions = plan.harness.app.store.sessions
    session, every = [await sessions.list_sessions(archived=archived) for archived in (False, "all")]
    assert ([row["id"] for row in session] == []) is silent
    assert [row["id"] for row in every] == [now["last_session_id"]]
    [record] = await plan.runs()
    assert record.state.status == "completed"


@pytest.mark.parametrize("fields", [{"continuity": True}, {"session_id": "mine"}])
async def test_silent_job_result_does_not_hide_session_with_other_results(plan: Plan, fields: Any) -> None:
    plan.server.script = [Reply(text="[SILENT]")]
    job = await plan.add("every 1h", **fields)
    await plan.look(NOW + 3600)
    await plan.look()
    assert (await plan.job(job))["last_status"] == "silent"
    assert len(await plan.harness.app.store.sessions.list_sessions()) == 1


async def test_job_script_cut_off_by_restart_is_not_repeated(
    make_harness: MakeHarness, server: ModelServer, harness: Harness
) -> None:
    plan = plan_of(make_harness, server)
    server.script = [Reply(text="Noted.")]
    spec = spec_of(await plan.add("every 1h", script="echo again >> made; sleep 1000"), NOW)
    running = await plan.harness.begin(spec)
    marker_file = plan.harness.home.workspace / "made"
    await running.until(lambda events: marker_file.exists() or any(e["type"] == "tool.started" for e in events))
    await plan.harness.close()
    again = plan_of(make_harness, server)
    again.server.script = [Reply(text="Noted.")]
    await again.harness.engine.resume_all()
    await again.rest()
    [record] = await again.runs()
    assert record.state.status == "completed"
    assert "its output is lost" in prompts(again)[-1]
    assert text_of((await again.harness.rows(spec.session_id))[-1].content) == "Noted."
    assert not marker_file.exists() or marker_file.read_text() == "again\n"
