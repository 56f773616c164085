"""`hermes usage`: tokens and costs, by day, model or session."""

from __future__ import annotations

import argparse
import time

from hermes.cli.command import Args, Argument, command, number
from hermes.cli.table import print_table
from hermes.core.formatting import iso
from hermes.core.home import Home
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import USAGE_KEPT_DAYS

_HEAD = ("turns", "calls", "input", "cached", "output", "cost")
_LIMIT = 20


def _days(text: str) -> int:
    days = number(text)
    if not 1 <= days <= USAGE_KEPT_DAYS:
        raise argparse.ArgumentTypeError(f"{days} is not a number of days from 1 to {USAGE_KEPT_DAYS}")
    return days


@command(
    "usage",
    Argument("--by", choices=("day", "model", "session"), default="day", help="group by (day)"),
    Argument("--days", metavar="N", type=_days, default=30, help="how many days back, today included (30)"),
    Argument("--limit", metavar="N", type=number, default=_LIMIT, help=f"by session: how many at most ({_LIMIT})"),
)
def _usage(args: Args, home: Home) -> None:
    from hermes.cli.session_maintenance import opened
    from hermes.services import usage
    from hermes.store.usage_days import DAY_S, Group, UsageDays

    with opened(home) as db:
        if args.by == "session":
            first = time.time() - args.days * DAY_S
            sessions = [
                one for one in db.list_sessions(limit=args.limit, archived="all") if one["last_active"] >= first
            ]
            turns = db.count_turns([one["id"] for one in sessions])
            rows = [_of_session(one, turns[one["id"]], db.get_usage(one["id"])) for one in sessions]
            total = usage.total_of(rows)
        else:
            today = int(time.time() // DAY_S)
            groups: list[Group] = ["provider", "model"] if args.by == "model" else ["day"]
            sums = UsageDays(db.engine).sums(today - args.days + 1, groups)
            rows = [{**usage.labels(groups, key), **usage.report(numbers)} for key, numbers in sums.items()]
            total = usage.report(usage.total_of(sums.values()))
    lines = [[_name(args.by, row), *_cells(row)] for row in rows]
    head = [args.by, *_HEAD]
    shown = [head, *lines, ["total", *_cells(total)]] if lines else []
    document = {"by": args.by, "days": args.days, "data": rows, "total": total}
    print_table(args, home, document, shown, flexible=0, empty=f"Nothing was used in the last {args.days} days.")


def _of_session(session: JsonMapping, turns: int, calls: list[JsonObject]) -> JsonObject:
    """A session with all that was asked of models for it: turns, and tasks beside them such as its title."""
    from hermes.store.usage_days import TOKENS

    costs = [call["actual_cost_usd"] for call in calls if call["actual_cost_usd"] is not None]
    return {
        "session_id": session["id"],
        "title": session["title"] or session["preview"],
        "model": session["model"],
        "last_active": iso(session["last_active"]),
        "turns": turns,
        **{name: sum(call[name] for call in calls) for name in ("calls", *TOKENS)},
        "cost_usd": sum(costs) if costs else None,
    }


def _name(by: str, row: JsonMapping) -> str:
    if by == "session":
        return f"{row['session_id']}  {row['title'] or ''}"
    return str(row["day"]) if by == "day" else f"{row['provider']}/{row['model']}"


def _cells(row: JsonMapping) -> list[str]:
    cost = row.get("cost_usd")
    counts = (row.get(name) for name in ("turns", "calls", "input_tokens", "cache_read_tokens", "output_tokens"))
    return [*("" if count is None else f"{int(count):,}" for count in counts), "" if cost is None else f"${cost:.4f}"]
