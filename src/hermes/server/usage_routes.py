"""Usage: tokens, costs, times and errors, by day, owner and model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, get_args

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from hermes.core.limits import USAGE_KEPT_DAYS, USAGE_ROWS_MAX
from hermes.server.errors import invalid
from hermes.server.keys import caller_of
from hermes.server.routes import route
from hermes.services.usage import date_of, labels, report, total_of
from hermes.store.usage_days import DAY_S, Group

if TYPE_CHECKING:
    from hermes.server.context import ServerContext


class UsageQuery(Struct, kw_only=True):
    days: Annotated[int, Meta(ge=1, le=USAGE_KEPT_DAYS, description="how many days back, today included")] = 30
    group_by: Annotated[
        str, Meta(description="what has rows of its own: any of day, owner, provider, model, comma separated")
    ] = "day"


class UsageNumbers(Struct, kw_only=True):
    """What was used. Input tokens count cached ones too. Times are in seconds; those to the first token are null where
    there are none, costs where no provider told any."""

    turns: int
    failed: int
    cancelled: int
    calls: int
    retries: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    reasoning_tokens: int
    cost_usd: float | None
    turn_seconds: float
    first_token_mean: float | None
    first_token_p50: float | None
    first_token_p95: float | None
    tool_calls: int
    tool_errors: int
    tool_seconds: float


class UsageRow(UsageNumbers, kw_only=True):
    """The numbers of a group. Days are those of UTC."""

    day: str | UnsetType = UNSET
    owner: str | UnsetType = UNSET
    provider: str | UnsetType = UNSET
    model: str | UnsetType = UNSET


class UsageList(Struct, kw_only=True, tag_field="object", tag="list"):
    first_day: str
    last_day: str
    data: list[UsageRow]
    total: UsageNumbers


@route("GET /api/usage", "usage", "Usage statistics", scope="sessions:read", features="usage_api")
async def usage(context: ServerContext, request: web.Request, query: UsageQuery) -> UsageList:
    """Days on which nothing was used have no rows."""
    groups = _groups(query.group_by)
    today = int(time.time() // DAY_S)
    first, owner = today - query.days + 1, caller_of(request).visible_owner
    store = context.app.store.usage_days
    await context.app.usage.write()
    sums = await store.sums(first, groups, owner)
    if len(sums) > USAGE_ROWS_MAX:
        message = f"That would be more than {USAGE_ROWS_MAX} rows; ask for fewer days or columns."
        raise invalid("group_by", message)
    return UsageList(
        first_day=date_of(first),
        last_day=date_of(today),
        data=[UsageRow(**labels(groups, key), **report(numbers)) for key, numbers in sums.items()],
        total=UsageNumbers(**report(total_of(sums.values()))),
    )


def _groups(text: str) -> list[Group]:
    """The named columns, in the store's order."""
    named, known = {name.strip() for name in text.split(",")}, get_args(Group)
    if wrong := named - set(known):
        message = f"There is no column {sorted(wrong)[0]!r}; there are {', '.join(known)}."
        raise invalid("group_by", message)
    return [name for name in known if name in named]
