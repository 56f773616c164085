"""Twice the input takes at most 2.3 times the work, for everything that reads or writes what others send.

Small sizes are compared by counting steps. What happens inside of C cannot be counted: at large sizes each case has so much
processor time as many times what it needs, and far less than more than linear work would take.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import hermes
from support.work_steps import steps_of

from .cases import CASES, REFUSALS, Case

RATIO_MAX = 2.3
# What a call costs whatever it is given.
STEPS_MIN = 500
CPU_S_MAX = 12
PARTS = 12
SAMPLED = 8


def sampled(at: int) -> Any:
    return () if at % SAMPLED == 0 else pytest.mark.long


@pytest.mark.parametrize("name", [pytest.param(name, marks=sampled(at)) for at, name in enumerate(CASES)])
def test_work_is_linear_in_input_size(name: str) -> None:
    case = CASES[name]
    steps(case, case.size // 2)  # what is made once and kept does not count
    once, twice = steps(case, case.size), steps(case, 2 * case.size)
    if case.linear:
        assert twice <= RATIO_MAX * once + STEPS_MIN, f"{once} steps, then {twice}"


def steps(case: Case, size: int) -> int:
    sample = case.make(size)

    def work() -> None:
        with suppress(*REFUSALS):
            case.work(sample)

    return steps_of(work)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_large_input_stays_within_cpu_time(part: int) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "linear.cases", str(part), str(PARTS), str(CPU_S_MAX)],
        check=True,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"},
    )
    assert child.stdout == "", child.stderr[-2000:]


# ---- nothing is left out

SOURCE = Path(hermes.__file__).parent
READS = re.compile(
    "(parsed?|render|feed|redact|mask|decode|parts|texts|markdown|patched|plan|prune|shaped|excerpt|extract)(_[a-z]+)?"
)
MORE = {"guards": re.compile("check|hits|matches"), "store": re.compile("(list|search|import|export)_[a-z]+")}
ELSEWHERE = {
    "guards.urls": "`url_text`, which it asks, is a case",
    "server.context": "`guards.secrets` is a case",
    "bus.nats_client": "takes whole messages, of limited size, from what was read once",
    "server.errors": "cuts what it quotes to 700 characters first",
    "server.query_params": "reads a query, whose size is limited like that of headers",
    "server.request_options": "reads headers, whose size is limited",
    "server.sse": "a protocol, whose renderers are cases",
    "store.sessions": "lists the files of one session",
}


def readers(tree: ast.Module, package: str) -> set[str]:
    """Public functions and methods that by their names read or write what others send."""
    places: list[Any] = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for place in places for node in place.body if isinstance(node, kinds)}
    more = MORE.get(package)
    return {name for name in names if READS.fullmatch(name) or (more is not None and more.fullmatch(name))}


def test_every_parsing_module_has_a_linear_case() -> None:
    known = {part for case in CASES.values() for part in case.parts.split()} | set(ELSEWHERE)
    missing = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        package, module = parts[0] if len(parts) > 1 else "", ".".join(parts)
        names = readers(ast.parse(path.read_text("utf-8")), package)
        if names and package not in ("cli", "local", "sandbox") and module not in known:
            missing[module] = names
    assert not missing, f"add cases to {Path(__file__).with_name('cases.py')}, or say why there are none: {missing}"
    assert all((SOURCE / f"{module.replace('.', '/')}.py").exists() for module in known)
