"""Files of a session, calls that wait for a client, and small things kept under a name."""

from __future__ import annotations

import time

import pytest

from hermes.store.sessions import SessionDB


def add(db: SessionDB, session_id: str = "s", name: str = "a.txt") -> str:
    return db.add_file(session_id, name, bytes=3, mime="text/plain", direction="upload", path=f"/somewhere/{name}")


def test_session_files_are_listed_in_order_and_found_by_id(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.create_session("t", "cli")
    first, second = add(db), add(db, name="b\x00\ud800.txt")
    assert [file["id"] for file in db.list_files("s")] == [first, second]
    file = db.get_file("s", first)
    assert file is not None
    assert (file["name"], file["bytes"], file["mime"], file["direction"]) == ("a.txt", 3, "text/plain", "upload")
    assert db.get_file("t", first) is None and db.list_files("t") == []
    db.delete_session("s")
    assert db.get_file("s", first) is None


def test_file_of_unknown_session_is_rejected(db: SessionDB) -> None:
    with pytest.raises(KeyError):
        add(db)


def test_pending_calls_are_scoped_to_owner(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.put_pending_calls("s", "run_1", ["c1", "c2"], owner="ada")
    assert db.pending_calls(["c1"]) == []
    [pending_call] = db.pending_calls(["c1", "unknown"], owner="ada")
    assert (pending_call["call_id"], pending_call["session_id"], pending_call["run_id"]) == ("c1", "s", "run_1")
    assert 86_000 < pending_call["expires_at"] - time.time() <= 86_400
    assert [call["call_id"] for call in db.pending_calls(["c2"], owner="ada")] == ["c2"]


def test_pending_calls_expire_or_end_with_session(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.put_pending_calls("s", "run_1", ["late"], expires_at=time.time() - 1)
    db.put_pending_calls("s", "run_1", ["c1"])
    assert db.pending_calls(["late"]) == []
    db.delete_session("s")
    assert db.pending_calls(["c1"]) == []
    with pytest.raises(KeyError):
        db.put_pending_calls("s", "run_1", ["c1"])


def test_meta_values_are_stored_and_overwritten(db: SessionDB) -> None:
    assert db.get_meta("seal") is None
    db.set_meta("seal", "one")
    db.set_meta("seal", "two")
    assert db.get_meta("seal") == "two"
