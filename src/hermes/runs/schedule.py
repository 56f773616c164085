"""Schedules of jobs: parsing, and the times that follow from them. Pure except for time zones."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta, tzinfo

from hermes.core.json_types import JsonMapping, JsonObject

GRAMMAR = (
    "A schedule is 30m, 2h or 1d (one run, so long from now); every 30m (again and again, at least a minute apart); "
    "five fields of cron (minute hour day month weekday, as 0 9 * * mon-fri), with one number of seconds as an optional "
    "sixth; or an ISO time (2027-01-31T09:00, with or without an offset)."
)
_SPAN = re.compile(r"(every\s+)?([0-9]{1,7})\s*(m|h|d|min|minute|hour|day)s?", re.I)
_MINUTES = {"m": 1, "h": 60, "d": 1440}
_MINUTES_MAX = 10 * 365 * 1440
_NAMES = "sun|mon|tue|wed|thu|fri|sat|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|l"
_FIELD = re.compile(rf"(?:[0-9*,/#-]|{_NAMES})+", re.I)
_YEAR_MIN, _YEAR_MAX = 1971, 2999


class BadSchedule(ValueError):
    """An invalid schedule, or one that is never due; the message ends with the accepted forms."""

    field = "schedule"

    def __init__(self, reason: str, forms: str = GRAMMAR) -> None:
        super().__init__(f"{reason} {forms}")


class BadTimeZone(BadSchedule):
    field = "timezone"


def zone_named(name: str) -> tzinfo:
    """The named time zone; the machine's by default. Raises BadTimeZone."""
    if not name:
        from dateutil.tz import tzlocal  # type: ignore[import-untyped]

        local: tzinfo = tzlocal()
        return local
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise BadTimeZone(f"There is no time zone {name!r}.", "Zones are named as Europe/Berlin or UTC.") from None


def parse(text: str, now: float, zone: tzinfo) -> JsonObject:
    """A schedule as it is stored: `kind` once, interval or cron, its run_at, minutes or expr, and its display form."""
    text = " ".join(text.split())
    if span := _SPAN.fullmatch(text):
        minutes = int(span[2]) * _MINUTES[span[3][0].lower()]
        if not 1 <= minutes <= _MINUTES_MAX:
            raise BadSchedule(f"{text!r} is not between a minute and ten years.")
        if span[1]:
            return {"kind": "interval", "minutes": minutes, "display": f"every {_span(minutes)}"}
        return _once(datetime.fromtimestamp(now + 60 * minutes, zone), f"once in {_span(minutes)}")
    fields = text.split(" ")
    if len(fields) in (5, 6) and all(map(_FIELD.fullmatch, fields)):
        if len(fields) == 6 and not re.fullmatch("[0-9]{1,2}", fields[5]):
            raise BadSchedule(f"{text!r} could run more than once a minute: the seconds must be one number.")
        schedule = {"kind": "cron", "expr": text, "display": text}
        _after(text, now, zone)
        return schedule
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BadSchedule(f"{text!r} is no schedule." if text else "The schedule is missing.") from None
    if not _YEAR_MIN <= at.year <= _YEAR_MAX or (at := at if at.tzinfo else at.replace(tzinfo=zone)).timestamp() <= now:
        raise BadSchedule(f"{text!r} is in the past, or too far off.")
    return _once(at, f"once at {at:%Y-%m-%d %H:%M}")


def next_time(schedule: JsonMapping, after: float, zone: tzinfo, last: float | None = None) -> float | None:
    """The first time after `after`; None if there is none. Intervals count from the last time, if there was one."""
    if schedule["kind"] == "once":
        at = datetime.fromisoformat(schedule["run_at"]).timestamp()
        return at if at > after else None
    if schedule["kind"] == "interval":
        seconds = 60 * int(schedule["minutes"])
        begin = after if last is None else last
        return begin + seconds * max(1, math.floor((after - begin) / seconds) + 1)
    return _after(schedule["expr"], after, zone)


def next_times(schedule: JsonMapping, after: float, zone: tzinfo, count: int = 3) -> list[str]:
    times: list[str] = []
    while len(times) < count and (next_at := next_time(schedule, after, zone)) is not None:
        times.append(datetime.fromtimestamp(next_at, zone).isoformat(timespec="seconds"))
        after = next_at
    return times


def _once(at: datetime, display: str) -> JsonObject:
    # Fractions of a second are rounded up: rounded down, a time would be over before it is stored.
    if at.microsecond:
        at = at.replace(microsecond=0) + timedelta(seconds=1)
    return {"kind": "once", "run_at": at.isoformat(timespec="seconds"), "display": display}


def _span(minutes: int) -> str:
    unit = next(unit for unit in "dhm" if minutes % _MINUTES[unit] == 0)
    return f"{minutes // _MINUTES[unit]}{unit}"


def _after(expr: str, after: float, zone: tzinfo) -> float:
    from croniter import croniter

    # An hour that is repeated at the end of summer time counts twice only for hourly schedules.
    hourly = set("*/") & set(expr.split(" ")[1])
    try:
        times = croniter(expr, datetime.fromtimestamp(after, zone), max_years_between_matches=10)
        while (candidate := times.get_next(datetime)).fold and not hourly:
            pass
    except (ValueError, KeyError, OverflowError) as error:
        raise BadSchedule(f"{expr!r} is not a cron expression that will ever be due: {error}.") from None
    return float(candidate.timestamp())
