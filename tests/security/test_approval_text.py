"""What is shown for approval is what will be done: whole, with nothing invisible, and only known secrets hidden."""

from __future__ import annotations

import pytest

from agent.conftest import MakeHarness
from agent.harness import Json
from hermes.cli.runs_command import _line
from hermes.core.events import Event
from hermes.core.text import visible
from hermes.server.render_shared import approval_request
from support.model_server import Call, ModelServer
from tools.commanding import ToolSession

PATTERNS = [
    "ghp_" + "Zq8Yw2Xe4Rt6" * 3,
    "sk-proj-0123456789abcdefghij",
    "Authorization: Bearer abcdefghijklmnop",
    "PASSWORD=$(curl-x-evil)",
    "--api-key='touch /tmp/not-shown; true'",
    "https://user:longpassword@host.test/",
]


async def asked_about(tool_session: ToolSession, command: str) -> Json:
    """The request for approval of a command that is then refused."""
    active_run = await tool_session.begin(Call("terminal", {"command": command}), answerable=True)
    event = await active_run.wait_for("approval.requested")
    await active_run.control("approve", id=event["approval_id"], choice="deny")
    await active_run.end()
    return event


@pytest.mark.parametrize("text", PATTERNS)
async def test_approval_shows_text_that_only_looks_secret(
    make_harness: MakeHarness, server: ModelServer, text: str
) -> None:
    command = f"rm -r build; echo {text}"
    assert (await asked_about(ToolSession(make_harness, server), command))["subject"] == command


async def test_approval_masks_known_secret(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = ToolSession(make_harness, server)
    tool_session.harness.home.env_file.write_text("SOME_PHRASE=quartz-violet-heron\n")
    request = await asked_about(tool_session, "rm -r build; echo quartz-violet-heron end")
    assert request["subject"] == "rm -r build; echo [redacted] end"


async def test_approval_shows_long_command_whole(make_harness: MakeHarness, server: ModelServer) -> None:
    command = f"rm -r build; echo {'x' * 20_000} middle {'y' * 20_000}\necho second"
    event_data = await asked_about(ToolSession(make_harness, server), command)
    assert event_data["subject"] == command
    request = approval_request(Event("run_1", "approval.requested", 0, event_data))
    assert request["command"] == command


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain 'text' ü 漢字", "plain 'text' ü 漢字"),
        ("two\n\tlines", "two\n\tlines"),
        ("a\u202eb", "a\\u202eb"),
        ("a\u2066b\u2069", "a\\u2066b\\u2069"),
        ("a\u200bb\u200d\ufeff", "a\\u200bb\\u200d\\ufeff"),
        ("a\u00a0b\u2003c\u3164d\u2800", "a\\u00a0b\\u2003c\\u3164d\\u2800"),
        ("a\x1b[2Kb\r\x00\x08\x7f\x9b", "a\\u001b[2Kb\\u000d\\u0000\\u0008\\u007f\\u009b"),
        ("a\U000e0041\ufe0f\U000e0100", "a\\U000e0041\\ufe0f\\U000e0100"),
        ("a\u2028b", "a\\u2028b"),
    ],
)
def test_invisible_characters_are_escaped(text: str, expected: str) -> None:
    assert visible(text) == expected


async def test_approval_request_escapes_invisible_characters(make_harness: MakeHarness, server: ModelServer) -> None:
    request = await asked_about(ToolSession(make_harness, server), "rm -r build; echo \u202etxt.exe\u202c \x1b[1A")
    assert request["subject"] == "rm -r build; echo \\u202etxt.exe\\u202c \\u001b[1A"


def test_followed_log_shows_command_newlines() -> None:
    data = {"subject": "echo a\nrm -r b", "reason": "It deletes.", "choices": ["once"]}
    assert "echo a\\nrm -r b" in _line(Event("run_1", "approval.requested", 0, data), str)
