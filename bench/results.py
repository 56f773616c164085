"""Figures: what each is compared with and must be, the table of them, and those of the last full run in `results.json`."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "results.json"
SIGNS = {"ratio": "× ", "more": "+ ", "is": ""}


@dataclass(slots=True)
class Figure:
    """What it is compared with, if anything, and ours. Judged is the `ratio`, how much `more`, or what it `is`."""

    name: str
    unit: str
    found: tuple[float | None, float]
    judged_by: str = "is"
    target: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def judged(self) -> float:
        beside, ours = self.found
        if self.judged_by == "is" or beside is None:
            return ours
        return ours / beside if self.judged_by == "ratio" else ours - beside

    @property
    def ok(self) -> bool:
        return self.target is None or (self.judged >= self.target if self.at_least else self.judged <= self.target)

    def cells(self) -> tuple[str, ...]:
        sign, (beside, ours), aim = SIGNS[self.judged_by], self.found, self.target
        bound, verdict = ("", "") if aim is None else (f"{'≥' if self.at_least else '≤'} {sign}{aim:g}", "MISSED")
        shown = "" if beside is None else number(beside), number(ours), sign and f"{sign}{number(self.judged)}"
        return f"{self.name}, {self.unit}", *shown, bound, "ok" if verdict and self.ok else verdict, self.note


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.1f}" if abs(value) >= 20 else f"{value:.2f}"


def at(share: float, numbers: Sequence[float]) -> float:
    """The number below which this share of them lies."""
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(numbers: Sequence[float]) -> float:
    return at(0.5, numbers)


def show(figures: Sequence[Figure]) -> None:
    """Print the table."""
    lines = [("", "relay", "Hermes", "compared", "target", "", ""), *(figure.cells() for figure in figures)]
    wide = [max(len(line[n]) for line in lines) for n in range(6)]
    for name, *numbers, verdict, note in lines:
        row = "  ".join(f"{cell:>{wide[n]}}" for n, cell in enumerate(numbers, 1))
        print(f"{name:{wide[0]}}  {row}  {verdict:{wide[5]}}  {note}".rstrip())


def keep(part: str, figures: Sequence[Figure], others: float) -> None:
    """Put the figures of a part beside those of the others."""
    stored: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    section: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cpu": cpu_model(),
    }
    section |= {"cores": os.cpu_count(), "cores_used_by_others": round(others, 2)}
    table = [{**asdict(figure), "judged": figure.judged, "ok": figure.ok} for figure in figures]
    FILE.write_text(json.dumps({**stored, part: {**section, "figures": table}}, indent=1) + "\n")


def cpu_model() -> str:
    """What the machine says its processor is."""
    with suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    return platform.machine()
