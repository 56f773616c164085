"""The figures of the last run of each part, in `bench/results.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "results.json"


def keep(figures: Mapping[str, Any]) -> None:
    """Put figures beside those of the other parts."""
    kept: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        kept = json.loads(FILE.read_text())
    FILE.write_text(json.dumps({**kept, **figures}, indent=1) + "\n")
