"""What an owner may have at once and use in a minute, counted for all processes that share the store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from hermes.core.processes import is_gone, this_process
from hermes.store.base import NoPlace
from hermes.store.dialect import CLOCK, FOR_UPDATE, either
from hermes.store.engine import Tx
from hermes.store.repository import Repository, writes

# Names are compared byte by byte, whatever the database's language is.
_NAME = either("name", 'name COLLATE "C"')
_PLACES = f"SELECT name, holder FROM leases WHERE {_NAME} > ? AND {_NAME} < ? AND until > {CLOCK}"
_TAKE = f"INSERT INTO leases VALUES (?, ?, 0, {CLOCK} + ?) ON CONFLICT (name) DO UPDATE SET until = excluded.until"
_KEEP_ROW = "INSERT INTO state_meta VALUES (?, '{}') ON CONFLICT (key) DO UPDATE SET value = state_meta.value"


class OwnerBounds(NamedTuple):
    """Turns at once, requests and tokens in a minute; 0: no bound."""

    turns: int = 0
    requests: int = 0
    tokens: int = 0


class Use(NamedTuple):
    """What is asked for: a place for the turn of this number, one request, and whether tokens must be left. Or what has
    ended: a place that is given back, tokens that were used."""

    takes_place: str = ""
    requests: int = 0
    needs_tokens: bool = False
    frees_place: str = ""
    tokens: int = 0


class Outcome(NamedTuple):
    """Whether all that was asked for was there, or nothing was taken; and what is left of each rate that has a bound."""

    granted: bool
    left: dict[str, float]


class OwnerLimits(Repository):
    """Rates and places of owners. What is asked for at once, by whichever process, is granted one after the other."""

    @writes
    def use(self, tx: Tx, owner: str, bounds: OwnerBounds, uses: Sequence[Use], ttl: float) -> list[Outcome]:
        left = _lock(tx, owner, bounds)
        runs, places = _turns(tx, owner) if bounds.turns and any(use.takes_place for use in uses) else (set(), set())
        outcomes: list[Outcome] = []
        for use in uses:
            if use.frees_place:
                places.discard(use.frees_place)
                tx.execute("DELETE FROM leases WHERE name = ?", (_place(owner, use.frees_place),))
            granted = (
                left.get("requests", use.requests) >= use.requests
                and (not use.needs_tokens or left.get("tokens", 1.0) > 0)
                and not (use.takes_place and 0 < bounds.turns <= len(runs | places))
            )
            if granted:
                for name, amount in (("requests", use.requests), ("tokens", use.tokens)):
                    if name in left:
                        left[name] -= amount
                if use.takes_place and bounds.turns:
                    places.add(use.takes_place)
                    tx.execute(_TAKE, (_place(owner, use.takes_place), this_process(), ttl))
            outcomes.append(Outcome(granted, dict(left)))
        if left:
            now = tx.value(f"SELECT {CLOCK}")
            levels = json.dumps({name: [level, now] for name, level in left.items()})
            tx.execute("UPDATE state_meta SET value = ? WHERE key = ?", (levels, _row(owner)))
        return outcomes

    @writes
    def renew_places(self, tx: Tx, places: Sequence[tuple[str, str]], ttl: float) -> None:
        """Of turns at work in this process, each with its owner."""
        names = [(ttl, _place(owner, run_id)) for owner, run_id in places]
        tx.many(f"UPDATE leases SET until = {CLOCK} + ? WHERE name = ?", names)


def check_places(tx: Tx, owner: str, turns_max: int) -> None:
    """Raise NoPlace where an owner has so many turns. Of two transactions that ask at once the second is run again, since
    both write the same row: then it counts what the first has added."""
    tx.execute(_KEEP_ROW, (_row(owner),))
    runs, places = _turns(tx, owner)
    if len(runs | places) >= turns_max:
        raise NoPlace(f"{turns_max} turns of {owner!r} are running already.")


def _lock(tx: Tx, owner: str, bounds: OwnerBounds) -> dict[str, float]:
    """What is left of the owner's rates; whoever asks for the same owner meanwhile is run again after this."""
    tx.execute(_KEEP_ROW, (_row(owner),))
    row = tx.rows(f"SELECT value, {CLOCK} AS now FROM state_meta WHERE key = ? {FOR_UPDATE}", (_row(owner),))[0]
    levels, left = json.loads(row["value"]), dict[str, float]()
    for name, per_minute in (("requests", bounds.requests), ("tokens", bounds.tokens)):
        if per_minute:
            level, at = levels.get(name, (per_minute, row["now"]))
            left[name] = min(float(per_minute), level + max(0.0, row["now"] - at) * per_minute / 60)
    return left


def _turns(tx: Tx, owner: str) -> tuple[set[str], set[str]]:
    """The runs of an owner that have no end, and the turns that have a place, which may not be on record yet."""
    runs = tx.rows("SELECT run_id FROM runs WHERE owner = ? AND ended_at IS NULL", (owner,))
    prefix = _place(owner, "")
    places = tx.rows(_PLACES, (prefix, prefix[:-1] + ";"))
    at_work = {str(row["name"])[len(prefix) :] for row in places if not is_gone(row["holder"])}
    return {str(row["run_id"]) for row in runs}, at_work


def _place(owner: str, run_id: str) -> str:
    return f"place:{hashlib.sha256(owner.encode()).hexdigest()[:24]}:{run_id}"


def _row(owner: str) -> str:
    return f"limits:{owner}"
