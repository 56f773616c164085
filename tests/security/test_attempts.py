"""Attempts to get out of the sandbox, or past the guards: each is made for real, and reaches no canary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from agent.conftest import MakeHarness
from agent.harness import Json
from hermes.guards.secrets import MARK
from hermes.sandbox import bubblewrap
from support.model_server import ModelServer
from support.waiting import until_blocking
from tools.commanding import ToolSession

from .attempting import ATTEMPTS, Attempt, carried_out, done_plainly
from .canaries import Canaries

# What not every machine has.
_MISSING = re.compile(
    r"\b(curl|flock|git|ip|make|node|nsenter|openssl|perl|pgrep|pkill|ps|renice|rev|script|ssh|strings|unshare|wget): "
    r"command not found|failed to run command|Address family not supported|has no attribute 'AF_VSOCK'"
)


def _ran(answer: Json) -> bool:
    """It was let through: whether it reached anything is another question."""
    return "exit_code" in answer and answer["status"] in ("ok", "timeout")


def _refused(code: str) -> Callable[[Json], bool]:
    return lambda answer: answer.get("code") == code


def _blocked(answer: Json) -> bool:
    return answer.get("status") == "blocked"


# How it is seen that a line of defence was the one that held.
HELD: dict[str, Callable[[Json], bool]] = {
    **dict.fromkeys(
        ("mount", "namespace", "network", "environment", "limit", "reaper", "nested", "sweep", "filter"), _ran
    ),
    **dict.fromkeys(("approval", "write", "code"), _blocked),
    "hard": lambda answer: _blocked(answer) and answer["rules"] == ["hard"],
    "detach": lambda answer: "leaves something running" in answer.get("error", ""),
    "path": _refused("path_refused"),
    "absent": _refused("path_not_found"),
    "url": lambda answer: all(page.get("code") == "url_refused" for page in answer.get("pages", [answer])),
    "withheld": lambda answer: "withheld" in answer,
    "redaction": lambda answer: _ran(answer) and MARK in answer["output"],
}
# A guard that is the same everywhere is tried once.
EVERYWHERE = "=" if bubblewrap.probe() else ""
CLOSED = [attempt for attempt in ATTEMPTS if attempt.defence != "open"]


def blocked_by(defence: str, answer: Json) -> bool:
    """Whether this line of defence blocked it, or a rule of this name asked for approval."""
    if defence in HELD:
        return HELD[defence](answer)
    return _blocked(answer) and defence in answer["rules"]


def each(attempts: list[Attempt], quickly: int = 1) -> pytest.MarkDecorator:
    """Every attempt; one of so many in the quick suite."""
    params = [
        pytest.param(attempt, id=attempt.text[:70], marks=[pytest.mark.long] if at % quickly else [])
        for at, attempt in enumerate(attempts)
    ]
    return pytest.mark.parametrize("attempt", params)


def test_attempts_table_is_large_enough() -> None:
    assert len(ATTEMPTS) >= 200
    assert len({attempt.text for attempt in ATTEMPTS}) == len(ATTEMPTS)
    lines = Counter(attempt.defence for attempt in ATTEMPTS)
    assert set(lines) <= {*HELD, "open"}
    assert all(
        lines[name] >= 5
        for name in ["mount", "namespace", "network", "environment", "filter", "limit", "hard", "path", "url"]
    )
    assert sum(attempt.bites for attempt in ATTEMPTS) >= 200


@each(CLOSED, 3)
async def test_sandbox_escape_attempts_fail(
    make_harness: MakeHarness, server: ModelServer, canaries: Canaries, attempt: Attempt
) -> None:
    # Leave is given for nothing, or for everything where something else must hold.
    mode = "manual" if attempt.defence in ("approval", "network", "nested") else "off"
    tool_session = ToolSession(make_harness, server, "bubblewrap", approvals={"mode": mode}, web={"ask_hosts": False})
    canaries.plant()
    answers, text = await carried_out(tool_session, canaries, attempt)
    assert canaries.touched(text) == set(), answers
    assert blocked_by(attempt.defence, answers[-1]), answers


@each([a for a in ATTEMPTS if a.has_target and (a.alone not in "-=" or a.alone == EVERYWHERE)], 5)
async def test_escape_attempts_without_sandbox_need_approval(
    make_harness: MakeHarness, server: ModelServer, canaries: Canaries, attempt: Attempt
) -> None:
    mode = "off" if attempt.alone == "reaper" else "manual"  # what it leaves behind is seen only when it has run
    tool_session = ToolSession(make_harness, server, "local", approvals={"mode": mode}, web={"ask_hosts": False})
    canaries.plant()
    answers, text = await carried_out(tool_session, canaries, attempt)
    assert canaries.touched(text) == set(), answers
    line = attempt.defence if attempt.alone == "=" else attempt.alone
    # Where a command prepares the attempt, leave for that is asked for first.
    prepared = len(answers) > 1 and blocked_by("approval", answers[0])
    assert prepared or any(blocked_by(line, answer) for answer in answers), answers


@each([attempt for attempt in ATTEMPTS if attempt.bites], 5)
def test_escape_attempts_work_without_any_defence(canaries: Canaries, attempt: Attempt) -> None:
    canaries.hermes.mkdir()
    canaries.plant()
    if "@KEYCTL@" in attempt.text and canaries.key <= 0:
        pytest.skip("the kernel keeps no keys for us")
    text = done_plainly(canaries, attempt)
    if _MISSING.search(text) and not canaries.touched(text):
        pytest.skip(f"not on this machine: {text}")
    until_blocking(lambda: canaries.touched(text))  # some of it happens a moment later


@each([attempt for attempt in ATTEMPTS if attempt.defence == "open"])
async def test_known_sandbox_escapes(
    make_harness: MakeHarness, server: ModelServer, canaries: Canaries, attempt: Attempt
) -> None:
    """If this fails, the sandbox has improved: update the table."""
    tool_session = ToolSession(make_harness, server, "bubblewrap")
    canaries.plant()
    _, text = await carried_out(tool_session, canaries, attempt)
    assert canaries.touched(text)
