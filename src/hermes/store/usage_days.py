"""Usage by day (UTC), owner and model: named numbers that are added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from hermes.store.codec import clean
from hermes.store.engine import Tx
from hermes.store.repository import Repository, reads_slowly, writes

Group = Literal["day", "owner", "provider", "model"]
DAY_S = 86_400
TOKENS = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "reasoning_tokens")


class UsageKey(NamedTuple):
    """`day`: days since 1970."""

    day: int
    owner: str
    provider: str
    model: str


_ADD = (
    "INSERT INTO usage_days VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (day, owner, provider, model, name) DO UPDATE SET value = usage_days.value + excluded.value"
)


def add_amounts(tx: Tx, amounts: Mapping[UsageKey, Mapping[str, float]]) -> None:
    # In one order, so that replicas do not wait for each other in a circle.
    for key in sorted(amounts):
        for name in sorted(amounts[key]):
            tx.execute(_ADD, (key.day, *map(clean, key[1:]), name, amounts[key][name]))


class UsageDays(Repository):
    @writes
    def add(self, tx: Tx, amounts: Mapping[UsageKey, Mapping[str, float]]) -> None:
        add_amounts(tx, amounts)

    @reads_slowly
    def sums(
        self, tx: Tx, first_day: int, groups: Sequence[Group], owner: str | None = None
    ) -> dict[tuple[str | int, ...], dict[str, float]]:
        """The sums since a day, grouped by these columns; of one owner or of all."""
        columns = [column for column in get_args(Group) if column in groups]
        where, values = (
            ("day >= ? AND owner = ?", (first_day, owner)) if owner is not None else ("day >= ?", (first_day,))
        )
        grouped = ", ".join([*columns, "name"])
        sums: dict[tuple[str | int, ...], dict[str, float]] = {}
        for row in tx.rows(f"SELECT {grouped}, sum(value) FROM usage_days WHERE {where} GROUP BY {grouped}", values):
            *key, name, value = tuple(row)
            sums.setdefault(tuple(key), {})[name] = value
        return dict(sorted(sums.items()))

    @writes
    def sweep(self, tx: Tx, first_day: int) -> int:
        return tx.change("DELETE FROM usage_days WHERE day < ?", (first_day,))
