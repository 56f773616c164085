"""What can be wrong with the file or the place it lies in: told in a sentence, and never made worse."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from hermes.store.base import StoreBusy, StoreDamaged, StoreError, StoreReadOnly, StoreTooNew
from hermes.store.sessions import SessionDB
from hermes.store.sqlite import connections
from hermes.store.sqlite.maintenance import repair
from hermes.store.stores import open_store

from .tools import contents, look, mode, raw, run, texts, umask, url

ROWS = 60
WORDS = "the quick brown fox jumps over the lazy dog "


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of some sessions, closed."""
    path = tmp_path_factory.mktemp("sound") / "state.db"
    with contextlib.closing(SessionDB(path)) as db:
        for session in ("a", "b"):
            db.create_session(session, "cli", title=f"title of {session}")
            for number in range(ROWS // 2):
                db.append_message(session, "user", f"{session}{number} {WORDS * 30}")
    return path


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    folder = tmp_path / "state"
    folder.mkdir()
    return Path(shutil.copy(sound, folder / "state.db"))


def use(path: Path, **fields: Any) -> None:
    """Open it and touch everything in it."""
    with contextlib.closing(SessionDB(path, **fields)) as db:
        for session in db.list_sessions():
            db.get_messages(session["id"])
        db.search_messages("fox")


def is_a_sentence(error: StoreError) -> bool:
    return error.message.endswith(".") and error.message[0].isupper() and "Traceback" not in error.message


def page_size(path: Path) -> int:
    return int(look(path, "PRAGMA page_size")[0][0])


def corrupt(path: Path, first: int, last: int) -> None:
    """Overwrite a range of bytes with noise."""
    with path.open("r+b") as file:
        file.seek(first)
        file.write(bytes((number * 37 + 11) % 256 for number in range(last - first)))


# ---- a file of another Hermes


@pytest.mark.parametrize("ahead", [1, 9000])
@pytest.mark.parametrize("read_only", [False, True], ids=["writing", "reading"])
def test_newer_schema_version_is_rejected_unchanged(path: Path, ahead: int, read_only: bool) -> None:
    with raw(path) as other:
        known = other.execute("PRAGMA user_version").fetchone()[0]
        other.execute(f"PRAGMA user_version = {known + ahead}")
    before = path.read_bytes()
    with pytest.raises(StoreTooNew) as refusal:
        SessionDB(path, read_only=read_only)
    assert is_a_sentence(refusal.value)
    assert "newer" in refusal.value.message
    assert str(path) in str(refusal.value)
    assert refusal.value.hint
    assert path.read_bytes() == before


def test_file_opens_again_after_version_rejection(path: Path) -> None:
    [(known,)] = look(path, "PRAGMA user_version")
    with raw(path) as other:
        other.execute(f"PRAGMA user_version = {known + 1}")
    with pytest.raises(StoreTooNew):
        SessionDB(path)
    with raw(path) as other:
        other.execute(f"PRAGMA user_version = {known}")
    use(path)


def test_foreign_database_is_rejected_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with raw(path) as other:
        other.execute("CREATE TABLE sessions (id INTEGER, whatever TEXT)")
        other.execute("INSERT INTO sessions VALUES (1, 'theirs')")
    before = contents(tmp_path)
    with pytest.raises(StoreError) as refusal:
        use(path)
    assert is_a_sentence(refusal.value)
    assert contents(tmp_path) == before


# ---- a damaged search index

INDEX_DAMAGE = {
    "noise in its words": "UPDATE messages_fts_data SET block = x'00010203' WHERE id > 10",
    "words cut short": "UPDATE messages_fts_data SET block = substr(block, 1, 2) WHERE id > 10",
    "a structure that says it is empty": "UPDATE messages_fts_data SET block = x'00010203' WHERE id = 10",
    "noise in all of it": "UPDATE messages_fts_data SET block = x'ffffffffffff'",
    "no blocks": "DELETE FROM messages_fts_data",
    "no structure": "DELETE FROM messages_fts_data WHERE id IN (1, 10)",
    "no words": "DELETE FROM messages_fts_data WHERE id > 10",
    "no sizes": "DELETE FROM messages_fts_docsize",
    "no settings": "DELETE FROM messages_fts_config",
    "a table of its own gone": "DROP TABLE messages_fts_data",
    "nothing left": "DROP TABLE messages_fts",
    "noise in the pages of its words": "messages_fts_data",
    "noise in the pages of its terms": "messages_fts_idx",
    "noise in the pages of its sizes": "messages_fts_docsize",
    "noise in the pages of its settings": "messages_fts_config",
}


def damage_index(path: Path, how: str) -> None:
    """By a statement, or by noise in the first page of a table."""
    if " " in how:
        with raw(path) as other:
            other.execute(how)
        return
    [(root,)] = look(path, "SELECT rootpage FROM sqlite_master WHERE name = ?", how)
    page = page_size(path)
    with raw(path) as other:
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    corrupt(path, (root - 1) * page, root * page)


def rows(path: Path) -> list[tuple[Any, ...]]:
    return look(path, "SELECT id, session_id, role, content, timestamp FROM messages ORDER BY id")


def index_is_consistent(path: Path) -> None:
    with raw(path) as other:
        other.execute("INSERT INTO messages_fts(messages_fts, rank) VALUES ('integrity-check', 1)")


@pytest.mark.parametrize("damage", INDEX_DAMAGE.values(), ids=list(INDEX_DAMAGE))
def test_damaged_search_index_is_rebuilt(path: Path, damage: str) -> None:
    before = rows(path)
    damage_index(path, damage)
    with contextlib.closing(SessionDB(path)) as db:
        session_ids = {hit["session_id"] for hit in db.search_messages("lazy dog", limit=ROWS)}
        assert session_ids == {"a", "b"}
        assert rows(path) == before
        added = db.append_message("a", "user", "zebra")
        assert [hit["id"] for hit in db.search_messages("zebra")] == [added]
        [notice] = db.notices
        assert "index" in notice and str(path) in notice
    index_is_consistent(path)
    with contextlib.closing(SessionDB(path)) as db:
        assert db.notices == []


@pytest.mark.parametrize("damage", INDEX_DAMAGE.values(), ids=list(INDEX_DAMAGE))
def test_writes_continue_with_damaged_search_index(path: Path, damage: str) -> None:
    before = rows(path)
    damage_index(path, damage)
    with contextlib.closing(SessionDB(path)) as db:
        db.append_message("a", "user", "zebra")
        assert db.delete_session("b")
        db.append_message("a", "user", "zebra again")
        expected = [row for row in before if row[1] == "a"]
        assert rows(path)[:-2] == expected
        assert len(db.search_messages("zebra")) == 2
        # A part that nothing here needs may be missing unnoticed.
        assert len(db.notices) <= 1
        noticed = bool(db.notices)
    if noticed:
        index_is_consistent(path)


# Its settings are read when the file is opened.
IN_USE = [how for how in INDEX_DAMAGE.values() if " " in how and "config" not in how]


@pytest.mark.parametrize("damage", IN_USE)
def test_search_index_damaged_while_open_is_rebuilt(path: Path, damage: str) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        assert db.search_messages("fox")
        damage_index(path, damage)
        db.append_message("a", "user", "zebra")
        assert db.delete_session("b")
        assert len(db.search_messages("zebra")) == 1
        assert {hit["session_id"] for hit in db.search_messages("fox", limit=ROWS)} == {"a"}
        assert len(db.notices) == 1
    index_is_consistent(path)


# ---- a damaged file


def middle_pages(path: Path) -> None:
    size, page = path.stat().st_size, page_size(path)
    corrupt(path, page, size // page * page)


def second_half_gone(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_within_a_page(path: Path) -> None:
    os.truncate(path, page_size(path) + 100)


def table_of_contents(path: Path) -> None:
    corrupt(path, 100, page_size(path))


def head(path: Path) -> None:
    corrupt(path, 0, 100)


DAMAGE: tuple[Callable[[Path], None], ...] = (
    middle_pages,
    second_half_gone,
    cut_within_a_page,
    table_of_contents,
    head,
)


@pytest.mark.parametrize("read_only", [False, True], ids=["writing", "reading"])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damaged_file_raises_store_damaged_unchanged(
    path: Path, damage: Callable[[Path], None], read_only: bool
) -> None:
    damage(path)
    before = path.read_bytes()
    with pytest.raises(StoreDamaged) as refusal:
        use(path, read_only=read_only)
    error = refusal.value
    assert error.exit_code == 74
    assert is_a_sentence(error)
    assert str(path) in str(error)
    assert "repair" in error.hint
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", [b"hello\n" * 2000, b"\x00" * 8192, b"SQLite format 3\x00" + b"\xff" * 4080])
def test_non_database_file_is_rejected_unchanged(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(text)
    with pytest.raises(StoreError) as refusal:
        use(path)
    assert is_a_sentence(refusal.value)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == text


def test_empty_file_becomes_new_database(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.touch()
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
    assert look(path, "SELECT id FROM sessions") == [("s",)]


def test_folder_at_database_path_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.mkdir()
    with pytest.raises(StoreError) as refusal:
        use(path)
    assert is_a_sentence(refusal.value)
    assert str(path) in str(refusal.value)


def test_file_at_folder_path_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("not a folder")
    with pytest.raises(StoreError) as refusal:
        use(tmp_path / "folder" / "state.db")
    assert is_a_sentence(refusal.value)


# ---- repair


@pytest.mark.parametrize("damage", INDEX_DAMAGE.values(), ids=list(INDEX_DAMAGE))
def test_repair_of_index_keeps_every_row(path: Path, damage: str) -> None:
    before = rows(path)
    damage_index(path, damage)
    spoiled = path.read_bytes()
    report = repair(path)
    assert (report["repaired"], report["error"]) == (True, None)
    assert isinstance(report["strategy"], str)
    assert rows(path) == before
    index_is_consistent(path)
    assert Path(report["backup_path"]).read_bytes() == spoiled
    assert mode(Path(report["backup_path"])) == 0o600


def one_page_of_messages(path: Path) -> None:
    """A leaf of the table of messages becomes noise, everything else stays."""
    page = page_size(path)
    data = path.read_bytes()
    # Some row in the middle: the text of a message stands in the pages of its table.
    at = data.index(f"a{ROWS // 4} the quick".encode()) // page * page
    corrupt(path, at, at + page)


@pytest.mark.parametrize("value", [0o000, 0o022], ids=oct)
def test_repair_saves_readable_rows(path: Path, value: int) -> None:
    before = {row[0]: row for row in rows(path)}
    one_page_of_messages(path)
    spoiled = path.read_bytes()
    with umask(value):
        report = repair(path)
    assert (report["repaired"], report["error"]) == (True, None)
    remaining = rows(path)
    assert 0 < len(remaining) < ROWS
    assert all(before[row[0]] == row for row in remaining), "a row was changed"
    assert Path(report["backup_path"]).read_bytes() == spoiled
    assert {mode(file) for file in path.parent.iterdir()} == {0o600}
    with contextlib.closing(SessionDB(path)) as db:
        assert db.check(deep=True) == []
        assert len(db.search_messages("lazy dog", limit=ROWS)) == len(remaining)
        for session in ("a", "b"):
            assert db.get_session(session)["message_count"] == len(db.get_messages(session))
        db.append_message("a", "user", "goes on")


def test_repair_of_healthy_file_loses_nothing(path: Path) -> None:
    before = rows(path)
    report = repair(path)
    assert report["error"] is None
    assert rows(path) == before


@pytest.mark.parametrize("damage", [head, table_of_contents], ids=lambda damage: damage.__name__)
def test_repair_reports_failure_truthfully(path: Path, damage: Callable[[Path], None]) -> None:
    damage(path)
    spoiled = path.read_bytes()
    report = repair(path)
    copies = [file.read_bytes() for file in path.parent.iterdir()]
    assert spoiled in copies, "the only copy is gone"
    if report["repaired"]:
        use(path)
    else:
        assert report["error"]
        assert path.read_bytes() == spoiled


def test_repair_of_non_database_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(b"hello\n" * 2000)
    report = repair(path)
    assert not report["repaired"]
    assert report["error"]
    assert path.read_bytes() == b"hello\n" * 2000


def test_check_of_healthy_database_is_empty(path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        assert db.check() == []
        assert db.check(deep=True) == []


def test_check_reports_damage(path: Path) -> None:
    one_page_of_messages(path)
    with contextlib.closing(SessionDB(path)) as db:
        assert db.check(deep=True) != []


# ---- a full disk


@cache
def private_mounts() -> tuple[str, ...]:
    """The command in front of a program that may mount for itself; what it mounts is gone with it."""
    for prefix in (("unshare", "--mount"), ("unshare", "--mount", "--map-root-user")):
        mounting = [*prefix, "mount", "-t", "tmpfs", "-o", "size=1m", "none", gettempdir()]
        with contextlib.suppress(OSError):
            if subprocess.run(mounting, capture_output=True, check=False).returncode == 0:
                return prefix
    pytest.skip("no mount of one's own may be made here")


FULL = """
    import json, os, subprocess, sys
    from pathlib import Path
    from hermes.store.base import StoreFull
    from hermes.store.stores import open_store

    folder = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], check=True)
    filler = folder / "filler"
    filler.write_bytes(b"x" * 1_500_000)
    store = open_store(f"sqlite://{folder / 'state.db'}")
    store.sessions.create_session("s", "cli")
    acknowledged, refusals = [], []

    def write(text):
        store.sessions.append_message("s", "user", text + "x" * 20_000)
        acknowledged.append(text)

    def both(text):
        write(text + "a")
        write(text + "b")

    while not refusals and len(acknowledged) < 500:
        try:
            write(f"{len(acknowledged)} ")
        except StoreFull as error:
            refusals.append(error)
    full = []
    for work in (lambda: write("more "), lambda: store.transaction(lambda: both("unit "))):
        known = list(acknowledged)
        try:
            work()
            full.append("it worked")
        except StoreFull as error:
            refusals.append(error)
            acknowledged[:] = known
    readable = [m["content"].split("x")[0] for m in store.sessions.get_messages("s")]
    expected = list(acknowledged)
    counted = store.sessions.get_session("s")["message_count"]
    os.unlink(filler)
    write("later ")
    store.transaction(lambda: both("unit "))
    after = [m["content"].split("x")[0] for m in store.sessions.get_messages("s")]
    sound = store.sessions.check(deep=True)
    store.close()
    again = open_store(f"sqlite://{folder / 'state.db'}")
    reopened = [m["content"].split("x")[0] for m in again.sessions.get_messages("s")]
    again.close()
    print(json.dumps({
        "refusals": [[e.message, e.where, e.hint] for e in refusals], "unexpected": full, "readable": readable,
        "expected": expected, "counted": counted, "after": after, "acknowledged": acknowledged, "sound": sound,
        "reopened": reopened,
    }))
"""


def test_full_disk_rejects_writes_and_keeps_data(tmp_path: Path) -> None:
    completed = run(FULL, tmp_path, prefix=private_mounts())
    assert completed["unexpected"] == []
    assert len(completed["refusals"]) == 3
    for message, where, hint in completed["refusals"]:
        assert "full" in message and message.endswith(".")
        assert where == str(tmp_path / "state.db")
        assert hint
    assert len(completed["expected"]) > 10
    assert completed["readable"] == completed["expected"]
    assert completed["counted"] == len(completed["expected"])
    assert completed["after"] == [*completed["expected"], "later ", "unit a", "unit b"]
    assert completed["sound"] == []
    assert completed["reopened"] == completed["after"]


LIMITED = """
    import json, resource, sys
    from hermes.store.base import StoreError
    from hermes.store.sessions import SessionDB

    db = SessionDB(sys.argv[1])
    db.create_session("s", "cli")
    db.append_message("s", "user", "before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    refusals, written = [], 1
    while not refusals and written < 500:
        try:
            db.append_message("s", "user", "x" * 20_000)
            written += 1
        except StoreError as error:
            refusals.append(error.message)
    found = len(db.get_messages("s"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    db.append_message("s", "user", "after")
    last = db.get_messages("s")[-1]["content"]
    print(json.dumps([refusals, written, found, last, db.check(deep=True)]))
    db.close()
"""


def test_file_size_limit_rejects_writes_and_keeps_data(tmp_path: Path) -> None:
    refusals, written, stored, last, sound = run(LIMITED, tmp_path / "state.db")
    assert len(refusals) == 1
    assert refusals[0].endswith(".")
    assert stored == written
    assert last == "after"
    assert sound == []


# ---- a place where nothing can be written

UNWRITABLE = """
    import json, os, subprocess, sys
    from pathlib import Path
    from hermes.store.base import StoreError
    from hermes.store.sessions import SessionDB

    folder = Path(sys.argv[1])
    path = folder / "state.db"
    # Modes bind everybody but root, who needs a whole file system that cannot be written to.
    root = os.geteuid() == 0
    if root:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], check=True)
    db = SessionDB(path)
    db.create_session("s", "cli")
    db.append_message("s", "user", "hello")
    db.close()
    if root:
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    else:
        path.chmod(0o400)
        folder.chmod(0o500)
    refusals = []
    for target in (path, folder / "other.db", folder / "deeper" / "other.db"):
        try:
            db = SessionDB(target)
            db.create_session("t", "cli")
            refusals.append(["it worked"] * 4)
        except StoreError as error:
            refusals.append([type(error).__name__, error.message, error.where, error.hint])
    db = SessionDB(path, read_only=True)
    texts = [m["content"] for m in db.get_messages("s")]
    hits = [m["id"] for m in db.search_messages("hello")]
    db.close()
    print(json.dumps([refusals, texts, hits]))
"""


def test_read_only_folder_is_reported_and_readable(tmp_path: Path) -> None:
    try:
        refusals, stored, hits = run(UNWRITABLE, tmp_path, prefix=() if os.geteuid() else private_mounts())
    finally:
        tmp_path.chmod(0o700)
    for (kind, message, where, hint), name in zip(refusals, ("state.db", "other.db", "deeper/other.db"), strict=True):
        assert kind == StoreReadOnly.__name__
        assert message.endswith(".")
        assert where == str(tmp_path / name)
        assert hint
    assert stored == ["hello"]
    assert hits == [1]


# ---- a place that takes no write-ahead log


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "9p"])
def test_network_file_system_disables_wal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(connections, "file_system_of", lambda path: kind)
    path = tmp_path / "state.db"
    with contextlib.closing(SessionDB(path)) as db, contextlib.closing(SessionDB(path)) as other:
        db.create_session("s", "cli")
        db.append_message("s", "user", "hello")
        assert texts(other, "s") == ["hello"]
        assert look(path, "PRAGMA journal_mode") == [("delete",)]
        assert {mode(file) for file in tmp_path.iterdir() if file.is_file()} == {0o600}
        [notice] = db.notices
        assert kind in notice


def test_file_moved_to_network_file_system_leaves_wal_mode(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(path, "PRAGMA journal_mode") == [("wal",)]
    monkeypatch.setattr(connections, "file_system_of", lambda path: "nfs")
    use(path)
    assert look(path, "PRAGMA journal_mode") == [("delete",)]
    monkeypatch.undo()
    use(path)
    assert look(path, "PRAGMA journal_mode") == [("wal",)]


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "overlay", ""])
def test_local_file_systems_give_no_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(connections, "file_system_of", lambda path: kind)
    with contextlib.closing(SessionDB(tmp_path / "state.db")) as db:
        db.create_session("s", "cli")
        assert look(tmp_path / "state.db", "PRAGMA journal_mode") == [("wal",)]
        assert db.notices == []


def test_file_system_type_is_detected(tmp_path: Path) -> None:
    assert connections.file_system_of(Path("/proc/self/status")) == "proc"
    assert connections.file_system_of(tmp_path / "not" / "yet" / "there") == connections.file_system_of(tmp_path) != ""


# ---- a SQLite that cannot search


def test_sqlite_without_fts5_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "has_fts5", lambda: False)
    with pytest.raises(StoreError) as refusal:
        SessionDB(tmp_path / "new" / "state.db")
    assert "FTS5" in str(refusal.value)
    assert is_a_sentence(refusal.value)
    assert not (tmp_path / "new" / "state.db").exists()
    with pytest.raises(StoreError, match="FTS5"):
        open_store("sqlite://").open()


@pytest.mark.parametrize("read_only", [False, True], ids=["writing", "reading"])
def test_sqlite_without_fts5_leaves_existing_file_unchanged(
    path: Path, monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    monkeypatch.setattr(connections, "has_fts5", lambda: False)
    before = contents(path.parent)
    with pytest.raises(StoreError, match="FTS5"):
        SessionDB(path, read_only=read_only)
    assert contents(path.parent) == before


def test_installed_sqlite_has_fts5() -> None:
    assert connections.has_fts5()


def test_damage_is_reported_on_first_use_of_store(path: Path) -> None:
    head(path)
    with pytest.raises(StoreDamaged):
        open_store(url(path)).leases.acquire("session:a", "me", 60)


@pytest.mark.parametrize("text", ["Über", "été", "École normale", "naïve", "x-ray", "日本", "", "…", "don't"])
def test_healthy_index_is_not_rebuilt(tmp_path: Path, text: str) -> None:
    with contextlib.closing(SessionDB(tmp_path / "state.db")) as db:
        db.create_session("s", "cli")
        db.append_message("s", "user", text)
    with contextlib.closing(SessionDB(tmp_path / "state.db")) as db:
        assert db.notices == []


def test_deep_check_finds_index_mismatch(file_db: SessionDB) -> None:
    file_db.create_session("s", "cli")
    row = file_db.append_message("s", "user", "apple pie")
    sql = "INSERT INTO messages_fts(messages_fts, rowid, body, tool) VALUES ('delete', ?, 'apple pie', NULL)"
    file_db.engine.write(lambda tx: tx.execute(sql, (row,)))
    assert file_db.check(deep=True) != []


def test_repair_of_open_file_raises_busy(file_db: SessionDB) -> None:
    assert file_db.path is not None
    with pytest.raises(StoreBusy):
        repair(file_db.path)
    program = "import sys; from hermes.store.sessions import SessionDB; db = SessionDB(sys.argv[1]); print('up', flush=True); sys.stdin.read()"
    path = file_db.path.with_name("other.db")
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "up\n"
        with pytest.raises(StoreBusy):
            repair(path)
        other.communicate("")
