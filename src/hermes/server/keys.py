"""API keys: their owners, scopes, ceilings and rate limits."""

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
    """0 and None mean no limit."""

    owner: str = DEFAULT_OWNER
    digest: bytes = field(default=b"", repr=False)
    scopes: frozenset[str] = frozenset(SCOPES)
    max_concurrent: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    toolsets: frozenset[str] | None = None
    models: frozenset[str] | None = None
    # With several keys, an admin's sees every owner's objects.
    sees_all: bool = False

    @property
    def visible_owner(self) -> str | None:
        """The owner whose objects the caller may see; None: every owner's."""
        return None if self.sees_all else self.owner

    def may_see(self, owner: str) -> bool:
        return self.sees_all or owner == self.owner

    def shown_owner(self, owner: str) -> str | UnsetType:
        """The owner of an object, for a caller that sees the objects of all owners."""
        return owner if self.sees_all else UNSET

    @property
    def credential(self) -> str:
        """Its name in the audit log; empty on a server without keys."""
        return self.owner if self.digest else ""

    @property
    def fingerprint(self) -> str:
        """Binds a sign-in to this key. Neither the key nor its digest can be derived from it."""
        return hashlib.sha256(b"sign-in " + self.digest).hexdigest()

    @property
    def is_admin(self) -> bool:
        return "admin" in self.scopes

    def lacks(self, scope: str | None) -> list[str]:
        """The missing parts of a scope: several are separated by spaces, alternatives by `|`; any key has `any`."""
        if scope in (None, "any") or self.is_admin:
            return []
        ways = [[name for name in way.split() if name not in self.scopes] for way in str(scope).split("|")]
        return [] if [] in ways else ways[0]

    def opens(self, scope: str | None) -> bool:
        return not self.lacks(scope)


# The key of the request.
CALLER: web.RequestKey[Key] = web.RequestKey("caller", Key)
# The key of the browser's sign-in, or why it is not accepted.
SIGNED_IN: web.RequestKey[Key | Exception] = web.RequestKey("signed_in")
_ANYBODY = Key()


def caller_of(request: web.Request) -> Key:
    """The key of the request, else that of callers without one."""
    caller: Key = request.get(CALLER, _ANYBODY)
    return caller


def key_of(entry: JsonMapping) -> Key:
    text = entry.get("key")
    digest = bytes.fromhex(entry["key_sha256"]) if text is None else _digest(str(text).encode())
    bounds: JsonObject = {name: int(entry.get(name) or 0) for name in COUNTS}
    bounds |= {name: frozenset(entry[name]) for name in CEILINGS if entry.get(name) is not None}
    return Key(entry["name"], digest, frozenset(entry.get("scopes") or ()), **bounds)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# The level and the time of its last change, locked while in use.
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
        """What is left after the change; negative and unchanged where less than `at_least` was there."""
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
    message: str
    retry_after_s: int


class SharedTurns:
    """How many turns the workers run, each in its own column of a row."""

    def __init__(self, numbers: SharedNumbers, rows: Mapping[str | None, int]) -> None:
        self._numbers, self._rows = numbers, rows
        numbers.forget(tuple(rows.values()))

    def put(self, owner: str | None, count: int) -> None:
        if owner in self._rows:
            self._numbers.put(self._rows[owner], count)

    def others(self, owner: str | None) -> int:
        return self._numbers.others(self._rows[owner]) if owner in self._rows else 0


class Keyring:
    def __init__(self, own: str, entries: Sequence[JsonMapping], clock: Callable[[], float] = time.monotonic) -> None:
        self.keys = [Key(digest=_digest(own.encode()))] if own else []
        self.keys += map(key_of, entries)
        if entries:
            self.keys = [replace(key, sees_all=key.is_admin) for key in self.keys]
        self.by_owner = {key.owner: key for key in self.keys}
        # Whether any key has a rate limit.
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
        """Share the rate limits with the other workers."""

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
        """The running turns of all workers: of each key with a limit, and in total."""
        owners = (None, *(key.owner for key in self.keys if key.max_concurrent))
        return SharedTurns(numbers, {owner: numbers.row(f"{place} turns {owner or ''}") for owner in owners})

    def find(self, given: bytes) -> Key | None:
        """Compares every key, in constant time."""
        digest = _digest(given)
        matches = [key for key in self.keys if hmac.compare_digest(key.digest, digest)]
        return matches[0] if matches else None

    def bucket(self, owner: str, name: str) -> Bucket | None:
        """None: no limit."""
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
        for name, wanted in ((name, wanted) for name, wanted, is_asked in wanted_rates if is_asked):
            bucket = self.bucket(owner, name)
            if bucket is not None and bucket.left < max(wanted, 1e-9):
                message = f"This key may use {bucket.limit} {name} per minute, and has."
                return RateExceeded(message, math.ceil(bucket.wait_s(wanted) or 1))
        return None

    def ceiling(self, spec: RunSpec) -> RunSpec:
        """The run limited to the toolsets and models of its owner's key."""
        key = self.by_owner.get(spec.owner)
        return spec if key is None else spec.within(key.toolsets, key.models)

    def concurrent(self, owner: str) -> int:
        """How many turns an owner may run at once; 0: no limit."""
        key = self.by_owner.get(owner)
        return key.max_concurrent if key else 0


class WrongKeys:
    """Failed authentications by address, of the latest addresses: after several an address has to wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}

    def wait_s(self, address: str) -> int:
        bucket = self._buckets.get(address)
        return 0 if bucket is None else math.ceil(bucket.wait_s(1.0))

    def count(self, address: str) -> None:
        bucket = self._buckets.pop(address, None) or Bucket(WRONG_KEYS_PER_MINUTE_MAX, self._clock)
        bucket.spend(1.0)
        self._buckets[address] = bucket
        if len(self._buckets) > WRONG_KEY_ADDRESSES_MAX:
            del self._buckets[next(iter(self._buckets))]
