"""Sign-ins: found by the hash of their token until they expire, bounded for each owner."""

from __future__ import annotations

from hermes.core.limits import SIGN_INS_PER_OWNER_MAX
from hermes.store.stores import Store


def test_sign_in_is_found_until_it_expires_or_is_removed(store: Store) -> None:
    added = store.sign_ins.add("t1", "ada", "k", 60.0)
    assert store.sign_ins.get("t1") == added
    assert (added.owner, added.key_sha256) == ("ada", "k")
    assert store.sign_ins.get("t2") is None
    store.sign_ins.add("old", "ada", "k", -1.0)
    assert store.sign_ins.get("old") is None
    assert store.sign_ins.sweep() == 1
    assert store.sign_ins.remove("t1")
    assert not store.sign_ins.remove("t1")
    assert store.sign_ins.get("t1") is None


def test_sign_ins_of_an_owner_end_together(store: Store) -> None:
    for token, owner in (("t1", "ada"), ("t2", "ada"), ("t3", "bob")):
        store.sign_ins.add(token, owner, "k", 60.0)
    assert store.sign_ins.remove_all("ada") == 2
    assert [store.sign_ins.get(token) is not None for token in ("t1", "t2", "t3")] == [False, False, True]


def test_oldest_sign_ins_of_an_owner_go(store: Store) -> None:
    store.sign_ins.add("other", "bob", "k", 60.0)
    for number in range(SIGN_INS_PER_OWNER_MAX + 2):
        store.sign_ins.add(f"t{number}", "ada", "k", 60.0)
    is_stored = [store.sign_ins.get(f"t{number}") is not None for number in range(SIGN_INS_PER_OWNER_MAX + 2)]
    assert is_stored.count(True) == SIGN_INS_PER_OWNER_MAX
    assert is_stored[-1]
    assert store.sign_ins.get("other") is not None
