"""Leases: one holder at a time, tokens that only grow, and writes that name theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hermes.store.base import LeaseLost
from hermes.store.leases import this_process
from hermes.store.stores import Store, open_store

from .tools import Turn, at_once, look, texts, url

NAME = "session:s"


@pytest.fixture
def store(store: Store) -> Store:
    store.sessions.create_session("s", "cli")
    return store


def test_free_lease_is_acquired_and_held_one_is_not(store: Any) -> None:
    assert store.leases.holder(NAME) is None
    token = store.leases.acquire(NAME, "a", 60)
    assert isinstance(token, int)
    assert store.leases.holder(NAME) == "a"
    assert store.leases.acquire(NAME, "b", 60) is None
    assert store.leases.holder(NAME) == "a"


def test_lease_is_not_reentrant_for_same_holder(store: Any) -> None:
    store.leases.acquire(NAME, this_process(), 60)
    assert store.leases.acquire(NAME, this_process(), 60) is None


def test_lease_tokens_increase_by_one(store: Any) -> None:
    tokens = []
    for _ in range(5):
        tokens.append(store.leases.acquire(NAME, "a", 60))
        store.leases.release(NAME, tokens[-1])
    assert tokens == list(range(tokens[0], tokens[0] + 5))


def test_failed_acquire_uses_no_token(store: Any) -> None:
    first = store.leases.acquire(NAME, "a", 60)
    for _ in range(3):
        store.leases.acquire(NAME, "b", 60)
    store.leases.release(NAME, first)
    token = store.leases.acquire(NAME, "b", 60)
    # A sequence gives no number back.
    assert token == first + 1 if store.engine.backend == "sqlite" else token > first


def test_leases_of_different_names_are_independent(store: Any) -> None:
    tokens = [store.leases.acquire(name, "a", 60) for name in ("session:x", "session:y", "job:x", "maintenance")]
    assert None not in tokens
    store.leases.release("session:x", tokens[0])
    assert [store.leases.holder(name) for name in ("session:x", "session:y", "job:x")] == [None, "a", "a"]


def test_expired_lease_is_free(store: Any) -> None:
    first = store.leases.acquire(NAME, "a", 0)
    assert store.leases.holder(NAME) is None
    assert store.leases.acquire(NAME, "b", 60) == first + 1
    assert store.leases.holder(NAME) == "b"


def test_sweep_removes_leases_that_expired_long_ago(store: Any) -> None:
    expired_s = {"process:old": 90_000, "process:late": 60, "process:at work": -60}
    tokens = {name: store.leases.acquire(name, "elsewhere:7:7.00", -seconds) for name, seconds in expired_s.items()}
    assert store.leases.release_gone() == 1
    assert not store.leases.renew("process:old", tokens["process:old"], 60)
    assert store.leases.renew("process:late", tokens["process:late"], 60)
    assert store.leases.holders() == ["elsewhere:7:7.00"]
    assert store.leases.acquire(NAME, "a", 60) > max(tokens.values())  # tokens go on


def test_renew_extends_lease(store: Any) -> None:
    token = store.leases.acquire(NAME, "a", 60)
    assert store.leases.renew(NAME, token, 0) is True
    assert store.leases.holder(NAME) is None
    other = store.leases.acquire(NAME, "b", 60)
    assert store.leases.renew(NAME, other, 120) is True
    assert store.leases.holder(NAME) == "b"


def test_only_current_token_can_renew(store: Any) -> None:
    first = store.leases.acquire(NAME, "a", 0)
    second = store.leases.acquire(NAME, "b", 60)
    assert store.leases.renew(NAME, first, 60) is False
    assert store.leases.renew(NAME, second + 1, 60) is False
    assert store.leases.renew("session:unknown", 1, 60) is False
    assert store.leases.holder(NAME) == "b"


def test_leases_are_renewed_together_where_their_tokens_are_current(store: Any) -> None:
    tokens = {name: store.leases.acquire(name, "a", 0) for name in ("session:one", "session:two", "session:taken")}
    assert store.leases.acquire("session:taken", "b", 0)
    released = store.leases.acquire("session:released", "a", 60)
    store.leases.release("session:released", released)
    assert store.leases.renew_all({**tokens, "session:released": released}, 60) == {"session:one", "session:two"}
    holders = {name: store.leases.holder(name) for name in (*tokens, "session:released")}
    assert holders == {"session:one": "a", "session:two": "a", "session:taken": None, "session:released": None}
    assert store.leases.renew_all({}, 60) == set()


def test_released_lease_cannot_be_renewed(store: Any) -> None:
    token = store.leases.acquire(NAME, "a", 60)
    store.leases.release(NAME, token)
    assert store.leases.renew(NAME, token, 60) is False
    assert store.leases.holder(NAME) is None


def test_only_current_token_can_release(store: Any) -> None:
    first = store.leases.acquire(NAME, "a", 0)
    store.leases.acquire(NAME, "b", 60)
    store.leases.release(NAME, first)
    store.leases.release("session:unknown", 1)
    assert store.leases.holder(NAME) == "b"


def test_lease_tokens_increase_across_restart(durable_url: str) -> None:
    tokens = []
    for _ in range(3):
        with contextlib.closing(open_store(durable_url)) as store:
            tokens.append(store.leases.acquire(NAME, "a", 0))
    assert tokens == list(range(tokens[0], tokens[0] + 3))


def test_lease_tokens_increase_after_session_deletion(store: Any) -> None:
    first = store.leases.acquire(NAME, "a", 60)
    store.leases.release(NAME, first)
    store.sessions.delete_session("s")
    store.sessions.create_session("s", "cli")
    assert store.leases.acquire(NAME, "a", 60) > first


def test_concurrent_acquire_has_one_winner(store: Any) -> None:
    tokens = at_once(16, lambda number: store.leases.acquire(NAME, f"thread {number}", 60))
    assert sum(token is not None for token in tokens) == 1


# ---- fenced writes


def tool_started(turn: Turn) -> None:
    turn.append(turn.event("tool.started", 1, call_id="c", name="n", args={}, effect="effect"), sync=True)


WRITES: dict[str, Callable[[Turn], Any]] = {
    "a message": lambda turn: turn.store.sessions.append_message("s", "user", "late", lease_token=turn.token),
    "an event": lambda turn: turn.append(turn.event("notice", 1, level="info", code="c", message="m")),
    "a synced event": tool_started,
    "an event with its row": lambda turn: turn.complete("msg_1", "late"),
    "open text": lambda turn: turn.store.runs.put_partials(turn.run_id, turn.token, [turn.grown("msg_1", "late")]),
    "the end": lambda turn: turn.end(),
}


@pytest.fixture(params=WRITES.values(), ids=list(WRITES))
def write(request: pytest.FixtureRequest) -> Callable[[Turn], Any]:
    return request.param


@pytest.fixture
def turn(store: Any) -> Turn:
    turn = Turn(store, "s", token=store.leases.acquire(NAME, "a", 60))
    turn.begin()
    return turn


def state(turn: Turn) -> Any:
    """All that a turn can change."""
    events = [event.as_dict() for event in turn.store.runs.read(turn.run_id, 0, 1000)]
    session = turn.store.sessions.get_session("s")
    return events, texts(turn.store.sessions, "s"), session, turn.store.runs.get(turn.run_id).state


def test_write_with_current_lease_token_is_accepted(turn: Turn, write: Callable[[Turn], Any]) -> None:
    before = state(turn)
    write(turn)
    assert state(turn) != before


def lose_by_release(turn: Turn) -> None:
    turn.store.leases.release(NAME, turn.token)


def lose_by_taking_over(turn: Turn) -> None:
    turn.store.leases.renew(NAME, turn.token, 0)
    assert turn.store.leases.acquire(NAME, "b", 60)


def lose_by_release_and_taking_over(turn: Turn) -> None:
    turn.store.leases.release(NAME, turn.token)
    assert turn.store.leases.acquire(NAME, "b", 60)


def lose_by_a_wrong_number(turn: Turn) -> None:
    turn.token += 1


def lose_by_the_number_of_another_session(turn: Turn) -> None:
    for _ in range(3):
        turn.token = turn.store.leases.acquire("session:other", "a", 0)


@pytest.mark.parametrize(
    "lose",
    [
        lose_by_release,
        lose_by_taking_over,
        lose_by_release_and_taking_over,
        lose_by_a_wrong_number,
        lose_by_the_number_of_another_session,
    ],
    ids=lambda lose: lose.__name__,
)
def test_write_with_stale_lease_token_is_rejected_unchanged(
    turn: Turn, write: Callable[[Turn], Any], lose: Callable[[Turn], None]
) -> None:
    lose(turn)
    before = state(turn)
    with pytest.raises(LeaseLost):
        write(turn)
    assert state(turn) == before


def test_new_lease_holder_writes_and_old_is_rejected(turn: Turn) -> None:
    turn.store.leases.renew(NAME, turn.token, 0)
    old, turn.token = turn.token, turn.store.leases.acquire(NAME, "b", 60)
    turn.complete("msg_1", "from the new one")
    turn.token = old
    with pytest.raises(LeaseLost):
        turn.complete("msg_2", "from the old one")
    assert texts(turn.store.sessions, "s") == ["What is the time?", "from the new one"]


def test_write_without_lease_token_is_not_fenced(turn: Turn) -> None:
    lose_by_taking_over(turn)
    turn.store.sessions.append_message("s", "user", "by hand")
    assert texts(turn.store.sessions, "s")[-1] == "by hand"


def test_lease_is_persisted_in_file(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with contextlib.closing(open_store(url(path))) as store:
        token = store.leases.acquire(NAME, "a", 60)
        assert look(path, "SELECT name, holder, token FROM leases WHERE name <> ''") == [(NAME, "a", token)]


# ---- against a model


class Leases(RuleBasedStateMachine):
    """Any order of calls, beside what should come of them. A lease of no time has lapsed at once."""

    names = st.sampled_from(["session:a", "session:b"])
    ttls = st.sampled_from([0.0, 1000.0])

    def __init__(self) -> None:
        super().__init__()
        self.store = open_store("sqlite://")
        self.last: dict[str, int] = {}
        self.holders: dict[str, str] = {}
        self.released: set[str] = set()

    @rule(name=names, holder=st.sampled_from(["x", "y"]), ttl=ttls)
    def acquire(self, name: str, holder: str, ttl: float) -> None:
        token = self.store.leases.acquire(name, holder, ttl)
        assert (token is None) == (name in self.holders)
        if token is not None:
            assert token > self.last.get(name, 0)
            self.last[name] = token
            self.released.discard(name)
            if ttl:
                self.holders[name] = holder

    @rule(name=names, back=st.integers(0, 2))
    def release(self, name: str, back: int) -> None:
        self.store.leases.release(name, self.last.get(name, 0) - back)
        if not back:
            self.holders.pop(name, None)
            self.released.add(name)

    @rule(name=names, back=st.integers(0, 2), ttl=ttls)
    def renew(self, name: str, back: int, ttl: float) -> None:
        if not back and name not in self.holders and name not in self.released:
            return  # whether a lease that lapsed and that nobody took can be renewed is left open
        result = self.store.leases.renew(name, self.last.get(name, 0) - back, ttl)
        assert result == (not back and name in self.holders)
        if result and not ttl:
            del self.holders[name]

    @invariant()
    def holders_are_known(self) -> None:
        for name in ("session:a", "session:b"):
            assert self.store.leases.holder(name) == self.holders.get(name)

    def teardown(self) -> None:
        self.store.close()


TestLeasesInAnyOrder = Leases.TestCase
TestLeasesInAnyOrder.settings = settings(max_examples=50)
