"""Keys under which work is done once: claimed before it begins, answered with the very same bytes."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from hermes.core.limits import IDEMPOTENCY_RECORDS_MAX
from hermes.store.stores import open_store

from .tools import Turn, at_once, look, raw, url

SCOPE = "default POST /v1/runs"


def test_idempotency_key_is_new_once_then_running(store: Any) -> None:
    first = store.idempotency.claim(SCOPE, "k", "f", run_id="run_1")
    assert first.state == "new"
    again = store.idempotency.claim(SCOPE, "k", "f", run_id="run_2")
    assert (again.state, again.run_id) == ("running", "run_1")


@pytest.mark.parametrize("body", [b"", b"{}", b'{"id": "x"}\n', bytes(range(256)), b"x" * 1_000_000, "zwölf".encode()])
def test_idempotency_replays_body_byte_for_byte(store: Any, body: bytes) -> None:
    store.idempotency.claim(SCOPE, "k", "f", run_id="run_1")
    store.idempotency.finish(SCOPE, "k", 201, body)
    again = store.idempotency.claim(SCOPE, "k", "f", run_id="run_2")
    assert (again.state, again.run_id, again.status) == ("done", "run_1", 201)
    assert bytes(again.body) == body


@pytest.mark.parametrize("finished", [False, True])
def test_idempotency_key_with_other_fingerprint_is_conflict(store: Any, finished: bool) -> None:
    store.idempotency.claim(SCOPE, "k", "f", run_id="run_1")
    if finished:
        store.idempotency.finish(SCOPE, "k", 200, b"{}")
    assert store.idempotency.claim(SCOPE, "k", "other").state == "conflict"
    assert store.idempotency.claim(SCOPE, "k", "f").state == ("done" if finished else "running")


def test_idempotency_scopes_and_keys_are_independent(store: Any) -> None:
    claims = [(scope, key) for scope in (SCOPE, "another POST /v1/runs", "") for key in ("k", "K", "k ")[:2]]
    assert [store.idempotency.claim(scope, key, "f").state for scope, key in claims] == ["new"] * 6


def test_released_claim_is_new_again(store: Any) -> None:
    store.idempotency.claim(SCOPE, "k", "f")
    store.idempotency.release(SCOPE, "k")
    assert store.idempotency.claim(SCOPE, "k", "other").state == "new"


def test_release_of_unclaimed_key_is_noop(store: Any) -> None:
    store.idempotency.release(SCOPE, "k")
    assert store.idempotency.claim(SCOPE, "k", "f").state == "new"


def test_expired_claim_is_new_again(store: Any) -> None:
    store.idempotency.claim(SCOPE, "k", "f", ttl=0, run_id="run_1")
    again = store.idempotency.claim(SCOPE, "k", "other", run_id="run_2")
    assert again.state == "new"
    assert store.idempotency.claim(SCOPE, "k", "other").run_id == "run_2"


def test_expired_answer_is_not_replayed(store: Any) -> None:
    store.idempotency.claim(SCOPE, "k", "f", ttl=0)
    store.idempotency.finish(SCOPE, "k", 200, b"old")
    assert store.idempotency.claim(SCOPE, "k", "f").state == "new"


@pytest.mark.parametrize("key", ["", "x" * 256, "a b", "a\n", "\x00", "schlüssel", "\x7f", "鍵"])
def test_idempotency_key_must_be_visible_ascii(store: Any, key: str) -> None:
    with pytest.raises(ValueError):
        store.idempotency.claim(SCOPE, key, "f")


@pytest.mark.parametrize("key", ["x", "x" * 255, "!~", "550e8400-e29b-41d4-a716-446655440000", "a/b?c=d&e"])
def test_idempotency_key_accepts_any_visible_ascii(store: Any, key: str) -> None:
    assert store.idempotency.claim(SCOPE, key, "f").state == "new"


def test_claims_survive_restart(durable_url: str) -> None:
    with contextlib.closing(open_store(durable_url)) as store:
        store.idempotency.claim(SCOPE, "a", "f", run_id="run_1")
        store.idempotency.claim(SCOPE, "b", "f", run_id="run_2")
        store.idempotency.finish(SCOPE, "b", 200, b"answer")
    with contextlib.closing(open_store(durable_url)) as store:
        assert store.idempotency.claim(SCOPE, "a", "f").run_id == "run_1"
        assert bytes(store.idempotency.claim(SCOPE, "b", "f").body) == b"answer"


def test_claim_is_committed_on_return(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with contextlib.closing(open_store(url(path))) as store:
        store.idempotency.claim(SCOPE, "k", "f", run_id="run_1")
        assert look(path, "SELECT scope, key, fingerprint, run_id FROM idempotency") == [(SCOPE, "k", "f", "run_1")]


def test_concurrent_claims_have_one_winner(store: Any) -> None:
    claims = at_once(16, lambda number: store.idempotency.claim(SCOPE, "k", "f", run_id=f"run_{number}"))
    states = [claim.state for claim in claims]
    assert sorted(states) == ["new"] + ["running"] * 15
    winner = f"run_{states.index('new')}"
    assert {claim.run_id for claim in claims if claim.state == "running"} == {winner}


@pytest.mark.parametrize("fails", [False, True])
def test_answer_is_committed_atomically_with_last_event(store: Any, fails: bool) -> None:
    store.sessions.create_session("s", "cli")
    turn = Turn(store, "s", token=store.leases.acquire("session:s", "me", 60))
    turn.begin()
    store.idempotency.claim(SCOPE, "k", "f", run_id=turn.run_id)

    def work() -> None:
        turn.end()
        store.idempotency.finish(SCOPE, "k", 200, b"{}")
        if fails:
            raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        store.transaction(work)
    status = store.runs.get(turn.run_id).state.status
    assert (store.idempotency.claim(SCOPE, "k", "f").state, status) == (
        ("running", "running") if fails else ("done", "completed")
    )


# ---- sweeping


def test_sweep_removes_only_expired_claims(store: Any) -> None:
    for number in range(10):
        store.idempotency.claim(SCOPE, f"k{number}", "f", ttl=0 if number % 2 else 600)
    assert store.idempotency.sweep() == 5
    assert store.idempotency.sweep() == 0
    assert [store.idempotency.claim(SCOPE, f"k{n}", "f").state for n in range(4)] == ["running", "new"] * 2


def test_sweep_handles_multiple_batches(store: Any) -> None:
    def claim() -> None:
        for number in range(1200):
            store.idempotency.claim(SCOPE, f"k{number}", "f", ttl=0)

    store.transaction(claim)
    assert store.idempotency.sweep() == 1200


def test_sweep_caps_idempotency_records_oldest_first(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    assert IDEMPOTENCY_RECORDS_MAX == 100_000
    with contextlib.closing(open_store(url(path))) as store:
        store.idempotency.sweep()
        now = time.time()
        rows = ((SCOPE, f"k{n}", now - 100_000 + n * 0.5, now + 1000) for n in range(100_007))
        with raw(path) as other:
            other.executemany(
                "INSERT INTO idempotency (scope, key, fingerprint, state, status, body, created_at, expires_at)"
                " VALUES (?, ?, 'f', 'done', 200, x'', ?, ?)",
                rows,
            )
        assert store.idempotency.sweep() == 7
        assert look(path, "SELECT count(*) FROM idempotency") == [(100_000,)]
        states = [store.idempotency.claim(SCOPE, f"k{n}", "f").state for n in (0, 6, 7, 100_006)]
        assert states == ["new", "new", "done", "done"]


# ---- against a model


class Keys(RuleBasedStateMachine):
    """Any order of calls, beside what should come of them."""

    keys = st.sampled_from(["a", "b"])

    def __init__(self) -> None:
        super().__init__()
        self.store = open_store("sqlite://")
        self.known: dict[str, tuple[str, str, tuple[int, bytes] | None]] = {}

    @rule(key=keys, fingerprint=st.sampled_from(["f", "g"]), run_id=st.sampled_from(["r", "s"]))
    def claim(self, key: str, fingerprint: str, run_id: str) -> None:
        claim = self.store.idempotency.claim(SCOPE, key, fingerprint, run_id=run_id)
        if key not in self.known:
            assert claim.state == "new"
            self.known[key] = (fingerprint, run_id, None)
            return
        of, by, answer = self.known[key]
        if of != fingerprint:
            assert claim.state == "conflict"
        elif answer is None:
            assert (claim.state, claim.run_id) == ("running", by)
        else:
            assert (claim.state, claim.run_id, claim.status, bytes(claim.body)) == ("done", by, *answer)

    @rule(key=keys, status=st.sampled_from([200, 500]), body=st.binary(max_size=3))
    def finish(self, key: str, status: int, body: bytes) -> None:
        # The answer is given once.
        if key in self.known and self.known[key][2] is None:
            self.store.idempotency.finish(SCOPE, key, status, body)
            self.known[key] = (*self.known[key][:2], (status, body))

    @rule(key=keys)
    def release(self, key: str) -> None:
        # Only a claim that came to nothing is released.
        if key in self.known and self.known[key][2] is None:
            self.store.idempotency.release(SCOPE, key)
            del self.known[key]

    @rule()
    def sweep(self) -> None:
        assert self.store.idempotency.sweep() == 0

    def teardown(self) -> None:
        self.store.close()


TestKeysInAnyOrder = Keys.TestCase
TestKeysInAnyOrder.settings = settings(max_examples=50)
