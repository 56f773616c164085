"""Who comes in: keys with an owner each, what they may do, how much and how often."""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from aiohttp import web
from msgspec import UNSET, UnsetType

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import WRONG_KEY_ADDRESSES_MAX, WRONG_KEYS_PER_MINUTE_MAX
from hermes.core.spec import RunKind, RunSpec
from hermes.server.shared_counters import SharedNumbers

SCOPES = ("chat", "sessions:read", "sessions:write", "runs", "jobs", "admin")
# A run is under the scope of the route that begins its kind, or under `runs`.
RUN_SCOPES: dict[RunKind, str] = {
    "chat": "runs|chat",
    "response": "runs|chat",
    "session": "runs|chat sessions:write",
    "run": "runs",
    "job": "runs|jobs",
    "cli": "runs",
    "subagent": "runs",
}
DEFAULT_OWNER = "default"
COUNTS = ("max_concurrent", "requests_per_minute", "tokens_per_minute")
CEILINGS = ("toolsets", "models")
ENTRY_FIELDS = ("name", "key", "key_env", "key_sha256", "scopes", *COUNTS, *CEILINGS)


@dataclass(frozen=True, slots=True)
class Key:
    """A key: to whom belongs what is done with it, and within which bounds. 0 and None: no bound."""

    owner: str = DEFAULT_OWNER
    digest: bytes = field(default=b"", repr=False)
    scopes: frozenset[str] = frozenset(SCOPES)
    max_concurrent: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    toolsets: frozenset[str] | None = None
    models: frozenset[str] | None = None
    # Where keys have owners, an admin's sees what belongs to any of them.
    sees_all: bool = False

    @property
    def visible_owner(self) -> str | None:
        """Whose things its caller may see; None: everybody's."""
        return None if self.sees_all else self.owner

    def may_see(self, owner: str) -> bool:
        return self.sees_all or owner == self.owner

    def shown_owner(self, owner: str) -> str | UnsetType:
        """The owner of an object, for a caller that sees the objects of all owners."""
        return owner if self.sees_all else UNSET

    @property
    def credential(self) -> str:
        """Its name in the log of who did what; nothing on a server without keys."""
        return self.owner if self.digest else ""

    @property
    def fingerprint(self) -> str:
        """What a sign-in with this key is bound to. The key cannot be told from it, nor its digest."""
        return hashlib.sha256(b"sign-in " + self.digest).hexdigest()

    @property
    def is_admin(self) -> bool:
        return "admin" in self.scopes

    def lacks(self, scope: str | None) -> list[str]:
        """What it is missing of a scope, which may be several with spaces between, or alternatives with `|` between; any
        key does for `any`."""
        if scope in (None, "any") or self.is_admin:
            return []
        ways = [[name for name in way.split() if name not in self.scopes] for way in str(scope).split("|")]
        return [] if [] in ways else ways[0]

    def opens(self, scope: str | None) -> bool:
        return not self.lacks(scope)


# The key that a request has shown.
CALLER: web.RequestKey[Key] = web.RequestKey("caller", Key)
# The key with which the request's browser has signed in, or why that does not count.
SIGNED_IN: web.RequestKey[Key | Exception] = web.RequestKey("signed_in")
_ANYBODY = Key()


def caller_of(request: web.Request) -> Key:
    """Whose request it is: that of the key it has shown, else that of whoever may come in without."""
    caller: Key = request.get(CALLER, _ANYBODY)
    return caller


def key_of(entry: JsonMapping) -> Key:
    """A key of the configuration, which was checked when it was read."""
    text = entry.get("key")
    digest = bytes.fromhex(entry["key_sha256"]) if text is None else _digest(str(text).encode())
    bounds: JsonObject = {name: int(entry.get(name) or 0) for name in COUNTS}
    bounds |= {name: frozenset(entry[name]) for name in CEILINGS if entry.get(name) is not None}
    return Key(entry["name"], digest, frozenset(entry.get("scopes") or ()), **bounds)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# What is left and when it was looked at last, held while it is looked at and changed.
Level = Callable[[], AbstractContextManager[list[float]]]


class Bucket:
    """A token bucket with a burst of one minute. It may go below zero; the caller then waits."""

    __slots__ = ("_clock", "_level", "limit")

    def __init__(self, per_minute: int, clock: Callable[[], float], level: Level | None = None) -> None:
        self.limit, self._clock = per_minute, clock
        own = [float(per_minute), clock()]
        self._level = level or (lambda: nullcontext(own))

    @property
    def left(self) -> float:
        return self._changed(0.0)

    def spend(self, amount: float) -> None:
        self._changed(amount)

    def take(self, amount: float) -> bool:
        return self._changed(amount, at_least=amount) >= 0

    def correct(self, left: float) -> None:
        with self._level() as level:
            level[:] = left, self._clock()

    def _changed(self, amount: float, at_least: float = -math.inf) -> float:
        """What is left when so much is taken; below zero where less is there than that, which then stays."""
        with self._level() as level:
            now = self._clock()
            level[:] = min(float(self.limit), level[0] + (now - level[1]) * self.limit / 60), now
            if level[0] < at_least:
                return level[0] - at_least
            level[0] -= amount
            return level[0] if at_least == -math.inf else 0.0

    def wait_s(self, wanted: float) -> float:
        return max(0.0, (wanted - self.left) * 60 / self.limit)

    def headers(self, name: str) -> dict[str, str]:
        values = {"limit": str(self.limit), "remaining": str(max(0, math.floor(self.left)))}
        values["reset"] = f"{self.wait_s(self.limit):.1f}s"
        return {f"x-ratelimit-{part}-{name}": value for part, value in values.items()}


@dataclass(frozen=True, slots=True)
class RateExceeded:
    """Which rate is used up, and how long to wait for more."""

    message: str
    retry_after_s: int


class SharedTurns:
    """How many turns the workers have at work, each in its own column of a row."""

    def __init__(self, numbers: SharedNumbers, rows: Mapping[str | None, int]) -> None:
        self._numbers, self._rows = numbers, rows
        numbers.forget(tuple(rows.values()))

    def put(self, owner: str | None, count: int) -> None:
        if owner in self._rows:
            self._numbers.put(self._rows[owner], count)

    def others(self, owner: str | None) -> int:
        return self._numbers.others(self._rows[owner]) if owner in self._rows else 0


class Keyring:
    """Every key of a server, and how much each has left."""

    def __init__(
        self,
        own: str,
        entries: Sequence[JsonMapping],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keys = [Key(digest=_digest(own.encode()))] if own else []
        self.keys += map(key_of, entries)
        if entries:
            self.keys = [replace(key, sees_all=key.is_admin) for key in self.keys]
        self.by_owner = {key.owner: key for key in self.keys}
        # Whether any key has a rate.
        self.limited = any(key.requests_per_minute or key.tokens_per_minute for key in self.keys)
        self._clock = clock
        self._fill(lambda *_: None)

    def _fill(self, level: Callable[[str, int, float], Level | None]) -> None:
        self._buckets = {
            (key.owner, name): Bucket(per_minute, self._clock, level(f"{key.owner} {name}", per_minute, self._clock()))
            for key in self.keys
            for name, per_minute in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute))
            if per_minute
        }

    def share(self, numbers: SharedNumbers, place: str) -> None:
        """Have the rates in common with the other workers of this place."""

        def level(name: str, per_minute: int, now: float) -> Level:
            row = numbers.row(f"{place} {name} {per_minute}", float(per_minute), now)
            return lambda: numbers.pair(row)

        self._fill(level)

    def correct(self, owner: str, left: Mapping[str, float]) -> None:
        """What all replicas together have left of an owner's rates. Until the next time it can only be less."""
        for name, level in left.items():
            if (bucket := self.bucket(owner, name)) is not None:
                bucket.correct(level)

    def spend(self, owner: str, tokens: int) -> None:
        if (bucket := self.bucket(owner, "tokens")) is not None:
            bucket.spend(tokens)

    def rates(self, owner: str) -> tuple[int, int]:
        key = self.by_owner.get(owner)
        return (key.requests_per_minute, key.tokens_per_minute) if key else (0, 0)

    def counts(self, numbers: SharedNumbers, place: str) -> SharedTurns:
        """The turns of all workers of this place: of each key that has a bound, and together."""
        owners = (None, *(key.owner for key in self.keys if key.max_concurrent))
        return SharedTurns(numbers, {owner: numbers.row(f"{place} turns {owner or ''}") for owner in owners})

    def find(self, given: bytes) -> Key | None:
        """The key that was given. Every one is compared, in the same time."""
        digest = _digest(given)
        matches = [key for key in self.keys if hmac.compare_digest(key.digest, digest)]
        return matches[0] if matches else None

    def bucket(self, owner: str, name: str) -> Bucket | None:
        """Where the requests or the tokens of an owner come from; None: without bound."""
        return self._buckets.get((owner, name))

    def headers(self, owner: str) -> dict[str, str]:
        values: dict[str, str] = {}
        for name in ("requests", "tokens"):
            if bucket := self.bucket(owner, name):
                values |= bucket.headers(name)
        return values

    def charge(self, owner: str, *, begins_turn: bool, counted: bool = False) -> RateExceeded | None:
        """Count one request of an owner, unless that or, for a turn, the owner's tokens are used up. `counted`: the
        request was counted before it was known to begin a turn."""
        requests = None if counted else self.bucket(owner, "requests")
        if (exceeded := self.exceeded(owner, begins_turn=begins_turn, counted=counted)) is not None:
            return exceeded
        if requests is not None and not requests.take(1):  # another worker was quicker
            return self.charge(owner, begins_turn=begins_turn)
        return None

    def exceeded(self, owner: str, *, begins_turn: bool, counted: bool) -> RateExceeded | None:
        """What `charge` would refuse; it takes nothing."""
        wanted_rates = (("requests", 1.0, not counted), ("tokens", 0.0, begins_turn))
        for name, wanted in ((name, wanted) for name, wanted, asked in wanted_rates if asked):
            bucket = self.bucket(owner, name)
            if bucket is not None and bucket.left < max(wanted, 1e-9):
                message = f"This key may use {bucket.limit} {name} per minute, and has."
                return RateExceeded(message, math.ceil(bucket.wait_s(wanted) or 1))
        return None

    def ceiling(self, spec: RunSpec) -> RunSpec:
        """The run under the toolsets and models that its owner's key allows."""
        key = self.by_owner.get(spec.owner)
        return spec if key is None else spec.within(key.toolsets, key.models)

    def concurrent(self, owner: str) -> int:
        """How many turns an owner may have at once; 0: as many as there are places."""
        key = self.by_owner.get(owner)
        return key.max_concurrent if key else 0


class WrongKeys:
    """How often wrong keys came from where: an address has to wait when it was often. The latest addresses are known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}

    def wait_s(self, address: str) -> int:
        """How long an address has to wait before it may try again."""
        bucket = self._buckets.get(address)
        return 0 if bucket is None else math.ceil(bucket.wait_s(1.0))

    def count(self, address: str) -> None:
        bucket = self._buckets.pop(address, None) or Bucket(WRONG_KEYS_PER_MINUTE_MAX, self._clock)
        bucket.spend(1.0)
        self._buckets[address] = bucket
        if len(self._buckets) > WRONG_KEY_ADDRESSES_MAX:
            del self._buckets[next(iter(self._buckets))]
