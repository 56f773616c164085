"""Files of a session, calls that wait for a client, and small things kept under a name."""

from __future__ import annotations

import time

import pytest

from hermes.store.sessions import SessionDB


def add(db: SessionDB, session_id: str = "s", name: str = "a.txt") -> str:
    return db.add_file(session_id, name, bytes=3, mime="text/plain", direction="upload", path=f"/somewhere/{name}")


def test_files_of_a_session_are_listed_in_order_and_found_by_id(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.create_session("t", "cli")
    first, second = add(db), add(db, name="b\x00\ud800.txt")
    assert [file["id"] for file in db.list_files("s")] == [first, second]
    found = db.get_file("s", first)
    assert found is not None
    assert (found["name"], found["bytes"], found["mime"], found["direction"]) == ("a.txt", 3, "text/plain", "upload")
    assert db.get_file("t", first) is None and db.list_files("t") == []
    db.delete_session("s")
    assert db.get_file("s", first) is None


def test_a_file_of_no_session_is_refused(db: SessionDB) -> None:
    with pytest.raises(KeyError):
        add(db)


def test_a_call_that_waits_is_known_to_its_owner(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.put_pending_calls("s", "run_1", ["c1", "c2"], owner="ada")
    assert db.pending_calls(["c1"]) == []
    [found] = db.pending_calls(["c1", "unknown"], owner="ada")
    assert (found["call_id"], found["session_id"], found["run_id"]) == ("c1", "s", "run_1")
    assert 86_000 < found["expires_at"] - time.time() <= 86_400
    assert [call["call_id"] for call in db.pending_calls(["c2"], owner="ada")] == ["c2"]


def test_a_call_waits_until_its_time_is_up_or_its_session_is_gone(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.put_pending_calls("s", "run_1", ["late"], expires_at=time.time() - 1)
    db.put_pending_calls("s", "run_1", ["c1"])
    assert db.pending_calls(["late"]) == []
    db.delete_session("s")
    assert db.pending_calls(["c1"]) == []
    with pytest.raises(KeyError):
        db.put_pending_calls("s", "run_1", ["c1"])


def test_small_things_are_kept_under_a_name(db: SessionDB) -> None:
    assert db.get_meta("seal") is None
    db.set_meta("seal", "one")
    db.set_meta("seal", "two")
    assert db.get_meta("seal") == "two"
