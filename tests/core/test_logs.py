"""Log files that several processes write."""

from __future__ import annotations

import logging
from pathlib import Path

from hermes.logs import _PrivateFile

LINES = 400


def test_log_rotation_by_another_process_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    writers = [_PrivateFile(path, "a", 1_000, 100, encoding="utf-8", delay=True) for _ in range(2)]
    for number in range(LINES):
        record = logging.LogRecord("hermes", logging.INFO, "", 0, f"line {number}", None, None)
        writers[number % 2].emit(record)
    for writer in writers:
        writer.close()
    files = list(tmp_path.iterdir())
    lines = [line for file in files for line in file.read_text().splitlines()]
    assert sorted(lines) == sorted(f"line {number}" for number in range(LINES))
    assert all(file.stat().st_size <= 1_000 for file in files)
