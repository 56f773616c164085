"""Redaction and the search for injected orders take work in proportion to the text, whatever the text is."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hermes.guards import injection, secrets
from hermes.guards.secrets import Secrets
from support.regex_attacks import attacks
from support.regex_steps import steps_to_search

RATIO_MAX = 2.2
VALUE = "kn0wn-value-of-the-process"
CHARS = 200
CPU_S_MAX = 20
LONG_CHARS = 32 * 1024

PREFIXES = [*secrets._PREFIXES, *secrets._DASHED]
REPEATED = [
    *(prefix + end for prefix in ("sk-", "pk-", "csk-", "sk_live_", "rk_test_") for end in ("", "-", "a-", " ", "a1 ")),
    *(prefix + end for prefix in PREFIXES for end in ("", "-")),
    *("AIza", "AIza-", "AKIA", "ASIA-", "SG.", "SG.SG-", "SG-SG.", "ya29.", "-ya29."),
    *("eyJ", "eyJ-", "eyJ.", "-eyJ.eyJ", "eyJaaaaaaaa.", "eyJaaaaaaaa-", "eyJaaaaaaaa.a."),
    *("Authorization", "Authorization:", "authorization= ", "Authorization: a ", "bearer ", "Basic\t", "bearer basic"),
    *("://", ":// ", "://a", "://a:", "://:@", "://a@", "://:a", "a://a:a"),
    *(
        "password=",
        "password:",
        "password: ",
        "password='",
        'password="',
        "password='x\"",
        "password\\",
        "token",
        "key",
    ),
    *("api_key", "api_key=", "api-key:'a", "secret='a", 'pwd=\\"', "pwd=\\'\\", "token=None ", "token:[redacted]"),
    *("-----BEGIN ", "-----BEGIN PRIVATE KEY", "-----BEGIN PRIVATE KEY-----", "-----END ", "-", "-----BEGIN A"),
    *("a", "A", "0", "_", " ", "\n", "\t", "\\", '"', "'", "=", "@", ".", "/", ":", "é", "\u200c", "<", "< ", "</"),
    *(
        "ignore ",
        "ignore a ",
        "ignore all ",
        "ignore previous a ",
        "reveal ",
        "reveal the ",
        "[system ",
        "[ ",
        "<system ",
    ),
    *("do not ", "you are ", "forget\n", VALUE[:7], VALUE[:7] + "-", VALUE + " "),
]
BEGINNINGS = [
    "",
    "sk-",
    "eyJ",
    "password='",
    "password",
    "Authorization: ",
    "://a:",
    "-----BEGIN ",
    "<",
    "[",
    "ignore ",
]


def check_linear(work: Callable[[str], int], begin: str, repeated: str, end: str, chars: int) -> None:
    count = -(-chars // len(repeated))
    once, twice = (work(begin + repeated * times + end) for times in (count, 2 * count))
    assert twice <= RATIO_MAX * once, f"{begin!r} + {repeated!r} * n + {end!r}: {once} steps, then {twice}"


def shrunk(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """A repetition of up to some hundreds costs a constant, which shows as one in short texts where it is smaller."""
    return re.compile(re.sub(r",\d{3,}\}", ",20}", pattern.pattern), pattern.flags)


PATTERNS = {
    **{f"{needles[0]} {row}": shrunk(pattern) for row, (needles, pattern, _) in enumerate(secrets._PATTERNS)},
    "orders": injection._ORDERS,
    "hidden": injection._HIDDEN,
}


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(pattern, id=name, marks=[pytest.mark.long] * (at % 2))
        for at, (name, pattern) in enumerate(PATTERNS.items())
    ],
)
def test_every_redaction_pattern_is_linear(pattern: re.Pattern[str]) -> None:
    for begin, repeated, end in attacks(pattern):
        check_linear(lambda text: steps_to_search(pattern, text), begin, repeated, end, CHARS)


class Counted:
    """A pattern that counts the steps of its use."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern, self.steps = pattern, 0

    def sub(self, replacement: Any, text: str) -> str:
        self.steps += steps_to_search(self._pattern, text)
        return self._pattern.sub(replacement, text)


@pytest.fixture
def redaction_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    counted = [(needles, Counted(shrunk(pattern)), replacement) for needles, pattern, replacement in secrets._PATTERNS]
    monkeypatch.setattr(secrets, "_PATTERNS", counted)
    known = Secrets([VALUE])
    monkeypatch.setattr(known, "_pattern", of_values := Counted(known._pattern))  # type: ignore[arg-type]

    def steps(text: str) -> int:
        for pattern in (of_values, *(pattern for _, pattern, _ in counted)):
            pattern.steps = 0
        known.redact(text)
        return len(text) + of_values.steps + sum(pattern.steps for _, pattern, _ in counted)

    return steps


@pytest.mark.parametrize("repeated", REPEATED)
def test_redaction_is_linear(redaction_steps: Callable[[str], int], repeated: str) -> None:
    check_linear(redaction_steps, "", repeated, "", CHARS)


@pytest.mark.parametrize("begin", BEGINNINGS)
@pytest.mark.parametrize("repeated", [" ", "a", "A", "-", "sk-", "\\", "a:", "A PRIVATE KEY"])
def test_redaction_is_linear_after_prefix(redaction_steps: Callable[[str], int], begin: str, repeated: str) -> None:
    check_linear(redaction_steps, begin, repeated, "!", CHARS)


# What cannot be counted step by step: everything that redacts, in a process that may use so much processor time.
# A quadratic pattern needs many times as much for one of these texts; all of them together need a few seconds.
_CHILD = """
import sys
from hermes.guards.injection import fenced
from hermes.guards.secrets import Secrets, redact_tree
from hermes.tools.file_access import LineRedactor
from types import SimpleNamespace

value, chars = sys.argv[1], int(sys.argv[2])
known = Secrets([value])
shower = LineRedactor(SimpleNamespace(secrets=known, settings=SimpleNamespace(security=SimpleNamespace(redact_secrets=True))))
for line in sys.stdin.read().split("\\0"):
    text = line * (chars // len(line))
    known.redact(text)
    shower.text(text)
    fenced(text, "a page")
    redact_tree({"a": [text[:4096]] * 4}, known.redact)
    stream = known.stream()
    for at in range(0, len(text), 64):
        stream.feed(text[at : at + 64])
    stream.finish()
print("done")
"""


def test_redaction_stays_within_cpu_time() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S_MAX, CPU_S_MAX))

    child = subprocess.run(
        [sys.executable, "-c", _CHILD, VALUE, str(LONG_CHARS)],
        check=False,
        input="\0".join(REPEATED),
        text=True,
        capture_output=True,
        preexec_fn=limit,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"},
    )
    assert child.returncode == 0 and child.stdout == "done\n", (child.returncode, child.stderr[-2000:])
