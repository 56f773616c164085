"""Schedules as people write them, and when they come: pure tables."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from hermes.runs import schedule
from hermes.runs.schedule import BadSchedule, next_time, next_times, parse, zone_named

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=BERLIN)).timestamp()


NOW = at("2026-11-13T10:10:00")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30m", {"kind": "once", "run_at": "2026-11-13T10:40:00+01:00", "display": "once in 30m"}),
        (" 2h ", {"kind": "once", "run_at": "2026-11-13T12:10:00+01:00", "display": "once in 2h"}),
        ("1d", {"kind": "once", "run_at": "2026-11-14T10:10:00+01:00", "display": "once in 1d"}),
        ("every 30m", {"kind": "interval", "minutes": 30, "display": "every 30m"}),
        ("Every 2 hours", {"kind": "interval", "minutes": 120, "display": "every 2h"}),
        ("every 90 minutes", {"kind": "interval", "minutes": 90, "display": "every 90m"}),
        ("every 1m", {"kind": "interval", "minutes": 1, "display": "every 1m"}),
        ("0 9 * * mon-fri", {"kind": "cron", "expr": "0 9 * * mon-fri", "display": "0 9 * * mon-fri"}),
        ("0 9 * * * 15", {"kind": "cron", "expr": "0 9 * * * 15", "display": "0 9 * * * 15"}),
        ("0  0 l * *", {"kind": "cron", "expr": "0 0 l * *", "display": "0 0 l * *"}),
        (
            "2026-12-24T18:00",
            {"kind": "once", "run_at": "2026-12-24T18:00:00+01:00", "display": "once at 2026-12-24 18:00"},
        ),
        (
            "2026-12-24T18:00:00Z",
            {"kind": "once", "run_at": "2026-12-24T18:00:00+00:00", "display": "once at 2026-12-24 18:00"},
        ),
    ],
)
def test_schedule_parsing(text: str, expected: dict[str, Any]) -> None:
    assert parse(text, NOW, BERLIN) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "soon", "0m", "every 0m", "every 30s", "30", "every", "9999999d", "99999999m", "* * * *", "* * * * * * *",
        "* * * * * *", "0 9 * * * */10", "0 9 * * * 61", "99 * * * *", "0 0 31 2 *", "R * * * *", "H * * * *", "@daily",
        "a b c d e", "*/0 * * * *", "2020-01-01T00:00", "2026-11-13T10:10", "0001-01-01", "9999-12-31", "2026-13-01",
    ],
)  # fmt: skip
def test_invalid_schedule_is_rejected_with_grammar(text: str) -> None:
    with pytest.raises(BadSchedule) as refused:
        parse(text, NOW, BERLIN)
    assert str(refused.value).endswith(schedule.GRAMMAR)


@pytest.mark.parametrize(
    ("text", "after", "times"),
    [
        ("0 9 * * mon-fri", "2026-11-13T10:10", ["2026-11-16T09:00:00+01:00", "2026-11-17T09:00:00+01:00"]),
        ("*/20 * * * *", "2026-11-13T10:20", ["2026-11-13T10:40:00+01:00", "2026-11-13T11:00:00+01:00"]),
        ("0 9 * * * 15", "2026-11-13T09:00:15", ["2026-11-14T09:00:15+01:00", "2026-11-15T09:00:15+01:00"]),
        # An hour that does not exist: as soon as there is one again. One that comes twice: once.
        ("30 2 * * *", "2026-03-28T12:00", ["2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"]),
        ("30 2 * * *", "2026-10-24T12:00", ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]),
        ("*/30 * * * *", "2026-10-25T02:10:00+02:00", ["2026-10-25T02:30:00+02:00", "2026-10-25T02:00:00+01:00"]),
        ("every 2h", "2026-10-25T01:00:00+02:00", ["2026-10-25T02:00:00+01:00", "2026-10-25T04:00:00+01:00"]),
        ("0 0 29 2 *", "2026-11-13T10:10", ["2028-02-29T00:00:00+01:00", "2032-02-29T00:00:00+01:00"]),
    ],
)
def test_schedule_next_times(text: str, after: str, times: list[str]) -> None:
    schedule = parse(text, at(after), BERLIN)
    assert next_times(schedule, at(after), BERLIN, 2) == times


def test_one_shot_schedule_has_one_time() -> None:
    once = parse("30m", NOW, BERLIN)
    assert next_time(once, NOW, BERLIN) == NOW + 1800
    assert next_time(once, NOW + 1800, BERLIN) is None
    assert len(next_times(once, NOW, BERLIN)) == 1


def test_one_shot_schedule_within_this_second_has_time() -> None:
    once = parse("2026-11-13T10:10:00.9", NOW + 0.5, BERLIN)
    assert once["run_at"] == "2026-11-13T10:10:01+01:00"
    assert next_time(once, NOW + 0.5, BERLIN) == NOW + 1


@pytest.mark.parametrize(("passed", "wait"), [(0, 600), (599, 1), (600, 600), (2000, 400)])
def test_interval_schedule_collapses_missed_times(passed: int, wait: int) -> None:
    often = parse("every 10m", NOW, BERLIN)
    assert next_time(often, NOW + passed, BERLIN, last=NOW) == NOW + passed + wait


def test_unknown_timezone_is_rejected() -> None:
    assert zone_named("Europe/Berlin") is BERLIN
    assert datetime.fromtimestamp(NOW, zone_named("")).timestamp() == NOW
    for name in ("Europe/Atlantis", "../etc/passwd", "\0"):
        with pytest.raises(BadSchedule, match="no time zone"):
            zone_named(name)
