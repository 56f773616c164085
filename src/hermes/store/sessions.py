"""`SessionDB`: conversations and their messages."""

from __future__ import annotations

import os
import secrets
import shutil
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hermes.core.home import resolve
from hermes.core.ids import UNRECORDED, folder_name, random_hex
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import PENDING_CALLS_KEPT_S, SESSION_ID_CHARS_MAX
from hermes.store import rows as messages
from hermes.store.base import Row, SessionBusy, SessionExists
from hermes.store.codec import checked_id, clean_or_none, end_reason, plain_title
from hermes.store.dialect import all_of, like, placeholders
from hermes.store.engine import SET_META, Engine, Tx
from hermes.store.history_match import Binding
from hermes.store.leases import held_by
from hermes.store.lists import INSIDE, Lists, escaped, folder_of
from hermes.store.prompts import Prompts, put
from hermes.store.repository import blocks, reads, reads_slowly, writes
from hermes.store.search import Search
from hermes.store.session_rows import (
    CREATED_WITH,
    SESSION,
    column,
    count_usage,
    exists,
    free_title,
    keep,
    next_title,
    open_session,
    refuse_foreign,
    refuse_taken,
    require,
    session_fields,
    usage_of,
)
from hermes.store.sqlite.engine import SqliteEngine
from hermes.store.sqlite.schema import STATE
from hermes.store.transcripts import Transcripts
from hermes.store.transfer import Transfer
from hermes.store.upkeep import Upkeep
from hermes.store.usage_days import DAY_S, TOKENS, UsageKey, add_amounts

_CHANGED = (
    *("model", "model_config", "instructions", "cwd", "archived", "system_prompt", "prompt_digest"),
    *("pinned", "workdir", "toolsets", "max_iterations", "reasoning_effort"),
)
# Turns change these by themselves; a change of any other field means that somebody has named the session.
_CHANGED_BY_TURNS = {"archived", "system_prompt", "prompt_digest"}
# Sessions of requests that named none, without an active run.
_STATELESS = (
    "stateless AND NOT pinned AND last_active < ? AND NOT EXISTS "
    "(SELECT 1 FROM runs r WHERE r.session_id = sessions.id AND r.ended_at IS NULL)"
)
_NOT_FORKED = ("title", "base_id", "kind", "pinned", "stateless")
# Rows of finished turns.
_FINISHED = "NOT EXISTS (SELECT 1 FROM runs r WHERE r.run_id = messages.run_id AND r.ended_at IS NULL)"
_DELETED_AT_ONCE = 50
# Folders beside the database: uploads and sandbox of a session; large tool results of a run.
_FOLDERS, _RESULTS = ("uploads", "sandbox"), "cache/tool_results"


def new_session_id() -> str:
    """A local timestamp with a random suffix that cannot be guessed."""
    return f"{time.strftime('%Y%m%d_%H%M%S')}_{random_hex(6)}"


class SessionDB(Lists, Transcripts, Search, Binding, Transfer, Upkeep, Prompts):
    """The conversations of one database. Blocking, thread-safe."""

    def __init__(self, db_path: str | Path | None = None, read_only: bool = False) -> None:
        if db_path is None:
            db_path = resolve().state_db
        path = None if str(db_path) == ":memory:" else Path(db_path)
        engine = SqliteEngine.of(path, STATE, read_only=read_only)
        self._finalizer: weakref.finalize[[], SessionDB] | None = weakref.finalize(self, engine.drop)
        super().__init__(engine)
        try:
            engine.open()
        except BaseException:
            self.close()
            raise

    @classmethod
    def on(cls, engine: Engine) -> SessionDB:
        """The conversations of a store that is open, or will be when it is first used."""
        sessions = cls.__new__(cls)
        sessions._engine, sessions._finalizer = engine, None
        return sessions

    @blocks
    def close(self) -> None:
        """Release the file; the last user closes it."""
        if self._finalizer is not None and self._finalizer.detach() is not None:
            self._engine.release()

    @property
    def path(self) -> Path | None:
        return self._engine.path

    @property
    def notices(self) -> list[str]:
        return self._engine.notices

    # --- one session --------------------------------------------------------------------------------------------

    @writes
    def create_session(
        self, tx: Tx, /, session_id: str | None, source: str, *, exist_ok: bool = True, **fields: Any
    ) -> str:
        """Create a session, or fill the empty fields of an existing one."""
        if unknown := set(fields) - set(CREATED_WITH):
            raise ValueError(f"A session has no field {', '.join(sorted(unknown))}.")
        made_id = new_session_id() if session_id is None else checked_id(session_id)
        parent = fields.get("parent_session_id")
        if parent is not None and not exists(tx, parent):
            raise KeyError(f"There is no session '{parent}' to be its parent.")
        if fields.get("owner") is not None:
            refuse_foreign(tx, made_id, fields["owner"])
        if not open_session(tx, made_id, source, fields) and not exist_ok:
            raise SessionExists(f"There is a session '{made_id}' already.")
        return made_id

    @reads
    def get_session(self, tx: Tx, session_id: str) -> JsonObject | None:
        row = tx.row(SESSION, (session_id,))
        return session_fields(row) if row else None

    @reads_slowly
    def resolve_session_id(self, tx: Tx, text: str, owner: str | None = None) -> str | None:
        """The only session with this id, id prefix or title."""
        if not text or len(text) > SESSION_ID_CHARS_MAX or "\x00" in text:
            return None
        mine, params = ("AND owner = ?", [owner]) if owner is not None else ("", [])
        for condition, value in (("id = ?", text), (like("id"), f"{escaped(text)}%"), ("title = ?", text)):
            rows = tx.rows(f"SELECT id FROM sessions WHERE {condition} {mine} LIMIT 2", [value, *params])
            if len(rows) == 1:
                return str(rows[0][0])
        return None

    @writes
    def update_session(self, tx: Tx, /, session_id: str, **fields: Any) -> None:
        if unknown := set(fields) - set(_CHANGED):
            raise ValueError(f"A session's {', '.join(sorted(unknown))} cannot be changed like this.")
        require(tx, session_id)
        for name, value in fields.items():
            stored = column(name, value)
            if name == "system_prompt":
                name, stored = "prompt_sha256", None if stored is None else put(tx, stored)
            tx.execute(f"UPDATE sessions SET {name} = ? WHERE id = ?", (stored, session_id))
        if not set(fields) <= _CHANGED_BY_TURNS:
            keep(tx, session_id)

    @writes
    def end_session(self, tx: Tx, session_id: str, reason: str) -> None:
        """End the session; the first reason stays."""
        require(tx, session_id)
        tx.execute(
            "UPDATE sessions SET ended_at = ?, end_reason = ? WHERE id = ? AND ended_at IS NULL",
            (time.time(), end_reason(reason), session_id),
        )

    @writes
    def reopen_session(self, tx: Tx, session_id: str) -> None:
        require(tx, session_id)
        tx.execute("UPDATE sessions SET ended_at = NULL, end_reason = NULL WHERE id = ?", (session_id,))

    @writes
    def set_session_title(self, tx: Tx, session_id: str, title: str | None) -> bool:
        """Set the title; an empty one clears it. False: there is no such session."""
        plain = plain_title(title)
        owner = tx.value("SELECT owner FROM sessions WHERE id = ?", (session_id,))
        if owner is None:
            return False
        refuse_taken(tx, owner, plain, session_id)
        tx.execute("UPDATE sessions SET title = ? WHERE id = ?", (plain, session_id))
        keep(tx, session_id)
        return True

    @writes
    def set_auto_title_if_empty(self, tx: Tx, session_id: str, title: str) -> bool:
        """Set a generated title on a session without one, numbered if it is taken."""
        session = tx.row("SELECT owner, title FROM sessions WHERE id = ?", (session_id,))
        free = None if session is None or session["title"] else free_title(tx, session["owner"], title)
        return free is not None and tx.change("UPDATE sessions SET title = ? WHERE id = ?", (free, session_id)) > 0

    # --- deleting -----------------------------------------------------------------------------------------------

    @blocks
    def delete_session(self, session_id: str, force: bool = False) -> bool:
        """Delete a session with all that belongs to it. A running turn prevents that unless forced; it can write no
        more then."""
        return bool(self._delete([session_id], force))

    @writes
    def _delete(self, tx: Tx, session_ids: Sequence[str], force: bool, skip_busy: bool = False) -> list[str]:
        deleted: list[str] = []
        runs: list[str] = []
        for session_id in session_ids:
            if not exists(tx, session_id):
                continue
            family = _family(tx, session_id)
            if not force and (busy := [member for member in family if held_by(tx, f"session:{member}")]):
                if skip_busy:
                    continue
                raise SessionBusy(f"A turn of the session '{busy[0]}' is running.", hint="stop it first")
            for member in reversed(family):
                runs += (row[0] for row in tx.rows("SELECT run_id FROM runs WHERE session_id = ?", (member,)))
                tx.execute("DELETE FROM runs WHERE session_id = ?", (member,))
                tx.execute("DELETE FROM leases WHERE name = ?", (f"session:{member}",))
                tx.execute("DELETE FROM messages WHERE session_id = ?", (member,))
                tx.execute("DELETE FROM sessions WHERE id = ?", (member,))
            deleted += family
        if deleted:
            messages.purge_due(tx)
            if (home := self._engine.folder) is not None:
                tx.after(partial(remove_folders, home, deleted, runs))
            tx.after(lambda: self._engine.tell_deleted(deleted))
        return deleted

    @blocks
    def remove_unrecorded_folders(self, before: float) -> int:
        """Delete folders of turns without a record that were last used before then; returns how many."""
        if (home := self._engine.folder) is None:
            return 0
        folders = [*(folder for name in _FOLDERS for folder in (home / name).glob(f"{UNRECORDED}*"))]
        folders += (home / _RESULTS).glob("run_*")
        old = [folder for folder in folders if _last_used(folder) < before and not self._is_recorded(folder.name)]
        for folder in old:
            _remove_folder(folder)
        return len(old)

    @reads
    def _is_recorded(self, tx: Tx, name: str) -> bool:
        """Whether a run or a session has this name; session ids are chosen by clients."""
        sql = "SELECT 1 FROM runs WHERE run_id = ? UNION ALL SELECT 1 FROM sessions WHERE id = ?"
        return tx.value(sql, (name, name)) is not None

    @blocks
    def prune_sessions(
        self,
        older_than_days: float = 90,
        source: str | None = None,
        cwd_prefix: str | None = None,
        title: str | None = None,
        model: str | None = None,
        max_messages: int | None = None,
        archived: bool | None = None,
        dry_run: bool = False,
    ) -> list[str]:
        """Delete sessions that have ended, are inactive and not pinned; with `dry_run` only list them."""
        where, params = all_of(
            ("NOT pinned AND ended_at IS NOT NULL AND last_active < ?", time.time() - older_than_days * 86_400),
            ("source = ?", source),
            (like("title"), None if title is None else f"%{escaped(title)}%"),
            (like("model"), None if model is None else f"%{escaped(model)}%"),
            ("message_count <= ?", max_messages),
            ("archived = ?", archived),
        )
        if cwd_prefix is not None:
            where, params = f"{where} AND {INSIDE}", [*params, *folder_of(cwd_prefix)]
        candidates = self._prunable(where, params)
        if dry_run or not candidates:
            return candidates
        deleted: list[str] = []
        for start in range(0, len(candidates), _DELETED_AT_ONCE):
            deleted += self._delete(candidates[start : start + _DELETED_AT_ONCE], False, skip_busy=True)
        self.vacuum_if_worthwhile()
        return [session_id for session_id in candidates if session_id in set(deleted)]

    @reads_slowly
    def stateless_sessions(self, tx: Tx, before: float) -> dict[str, list[str]]:
        """Sessions of requests that named none, inactive since `before`, each with the ids of its responses."""
        sessions = tx.rows(f"SELECT id FROM sessions WHERE {_STATELESS} ORDER BY last_active, id", (before,))
        sql = "SELECT response_id FROM runs WHERE session_id = ? AND response_id IS NOT NULL"
        return {row[0]: [run[0] for run in tx.rows(sql, (row[0],))] for row in sessions}

    @blocks
    def delete_stateless(self, session_ids: Sequence[str], before: float) -> list[str]:
        """Delete those of these sessions that are still stateless and inactive; returns which."""
        deleted: list[str] = []
        for start in range(0, len(session_ids), _DELETED_AT_ONCE):
            deleted += self._delete_stateless(session_ids[start : start + _DELETED_AT_ONCE], before)
        return deleted

    @writes
    def _delete_stateless(self, tx: Tx, session_ids: Sequence[str], before: float) -> list[str]:
        rows = tx.rows(
            f"SELECT id FROM sessions WHERE id IN ({placeholders(session_ids)}) AND {_STATELESS}",
            (*session_ids, before),
        )
        return self._delete([row[0] for row in rows], False, skip_busy=True)

    @reads_slowly
    def _prunable(self, tx: Tx, where: str, params: Sequence[Any]) -> list[str]:
        sql = f"SELECT id FROM sessions WHERE {where} ORDER BY last_active, id"
        session_ids = [row[0] for row in tx.rows(sql, params)]
        return [
            session_id
            for session_id in session_ids
            if not any(held_by(tx, f"session:{member}") for member in _family(tx, session_id))
        ]

    # --- fork ---------------------------------------------------------------------------------------------------

    @writes
    def fork_session(
        self,
        tx: Tx,
        /,
        source_id: str,
        new_id: str | None = None,
        title: str | None = None,
        at_message_id: int | None = None,
        after_run: str | None = None,
        *,
        before_message_id: int | None = None,
        **fields: Any,
    ) -> str:
        """A new session that begins like another: up to and including a message, or the last message of a run; or with
        what precedes a message."""
        row = tx.row(SESSION, (source_id,))
        if row is None:
            raise KeyError(f"There is no session '{source_id}'.")
        source = session_fields(row)
        if unknown := set(fields) - set(CREATED_WITH):
            raise ValueError(f"A session has no field {', '.join(sorted(unknown))}.")
        made_id = new_session_id() if new_id is None else checked_id(new_id)
        owner = fields.get("owner") or source["owner"]
        refuse_foreign(tx, made_id, owner)
        if exists(tx, made_id):
            raise SessionExists(f"There is a session '{made_id}' already.")
        new_title = plain_title(title)
        if new_title is None and source["title"]:
            new_title = next_title(tx, owner, source["title"])
        rows = messages.read(tx, f"session_id = ? AND {messages.TRANSCRIPT} AND {_FINISHED} ORDER BY id", (source_id,))
        copied_rows = _up_to(rows, at_message_id) if before_message_id is None else _before(rows, before_message_id)
        if after_run is not None:
            copied_rows = _up_to_run(copied_rows, after_run)
        live = messages.live_up_to(
            copied_rows, rows[len(copied_rows) :], messages.live(tx, source_id, f"AND {_FINISHED}")
        )
        columns = {name: source[name] for name in CREATED_WITH if name not in _NOT_FORKED}
        columns |= {"owner": owner, **fields, "title": new_title, "kind": "branch", "parent_session_id": source_id}
        open_session(tx, made_id, source["source"], columns)
        tx.execute(
            "UPDATE sessions SET forked_at_message_id = ?, last_active = ? WHERE id = ?",
            (copied_rows[-1].id if copied_rows else None, time.time(), made_id),
        )
        messages.add(tx, _copied(copied_rows, live, made_id))
        tx.execute(
            "UPDATE sessions SET ended_at = ?, end_reason = 'branched' WHERE id = ? AND ended_at IS NULL",
            (time.time(), source_id),
        )
        return made_id

    # --- accounting ---------------------------------------------------------------------------------------------

    @writes
    def add_usage(self, tx: Tx, session_id: str, usage: JsonMapping, model: str, provider: str, task: str = "") -> None:
        count_usage(tx, session_id, usage, model, provider, task)

    @writes
    def add_late_usage(self, tx: Tx, session_id: str, usage: JsonMapping) -> None:
        """Count a call that belongs to no run, so that nobody else counts it: of its session, and of the day."""
        model, provider, task = usage["model"], usage["provider"], usage["task"]
        owner = tx.value("SELECT owner FROM sessions WHERE id = ?", (session_id,))
        if owner is None:
            return
        count_usage(tx, session_id, usage, model, provider, task)
        amounts = {name: amount for name in (*TOKENS, "cost_usd") if (amount := usage.get(name))}
        add_amounts(tx, {UsageKey(int(time.time() // DAY_S), owner, provider, model): {"calls": 1, **amounts}})

    @reads_slowly
    def count_turns(self, tx: Tx, session_ids: Sequence[str]) -> dict[str, int]:
        """How many turns each of these sessions has had; what was copied or imported is none."""
        sql = "SELECT count(DISTINCT run_id) FROM messages WHERE session_id = ? AND role = 'user' AND NOT synthetic"
        return {session_id: tx.value(sql, (session_id,), 0) for session_id in session_ids}

    @reads
    def get_usage(self, tx: Tx, session_id: str) -> list[JsonObject]:
        return usage_of(tx.value("SELECT usage FROM sessions WHERE id = ?", (session_id,)))

    # --- files, calls that wait for a client, small things --------------------------------------------------------

    @writes
    def add_file(
        self, tx: Tx, session_id: str, name: str, *, bytes: int, mime: str, direction: str, path: str | Path
    ) -> str:
        require(tx, session_id)
        file_id = f"file_{secrets.token_hex(12)}"
        texts = (clean_or_none(name), bytes, clean_or_none(mime), direction, str(path))
        values = (file_id, session_id, *texts, time.time())
        tx.execute(f"INSERT INTO session_files VALUES ({placeholders(values)})", values)
        return file_id

    @reads
    def list_files(self, tx: Tx, session_id: str) -> list[JsonObject]:
        sql = "SELECT * FROM session_files WHERE session_id = ? ORDER BY created_at, id"
        return [dict(row) for row in tx.rows(sql, (session_id,))]

    @reads
    def get_file(self, tx: Tx, session_id: str, file_id: str) -> JsonObject | None:
        row = tx.row("SELECT * FROM session_files WHERE session_id = ? AND id = ?", (session_id, file_id))
        return dict(row) if row else None

    @writes
    def put_pending_calls(
        self,
        tx: Tx,
        session_id: str,
        run_id: str | None,
        call_ids: Sequence[str],
        owner: str = "default",
        expires_at: float | None = None,
    ) -> None:
        """Record calls that the client is to answer, and until when."""
        require(tx, session_id)
        now = time.time()
        tx.execute("DELETE FROM pending_calls WHERE expires_at <= ?", (now,))
        until = now + PENDING_CALLS_KEPT_S if expires_at is None else expires_at
        for call_id in call_ids:
            tx.execute(
                "INSERT INTO pending_calls VALUES (?, ?, ?, ?, ?) ON CONFLICT (owner, call_id) DO UPDATE SET "
                "session_id = excluded.session_id, run_id = excluded.run_id, expires_at = excluded.expires_at",
                (call_id, owner, session_id, run_id, until),
            )

    @reads
    def pending_calls(self, tx: Tx, call_ids: Sequence[str], owner: str = "default") -> list[JsonObject]:
        sql = "SELECT * FROM pending_calls WHERE owner = ? AND call_id = ? AND expires_at > ?"
        return [dict(row) for call_id in call_ids for row in tx.rows(sql, (owner, call_id, time.time()))]

    @reads
    def get_meta(self, tx: Tx, key: str) -> str | None:
        value: str | None = tx.value("SELECT value FROM state_meta WHERE key = ?", (key,))
        return value

    @writes
    def set_meta(self, tx: Tx, key: str, value: str) -> None:
        tx.execute(SET_META, (key, value))


def _last_used(folder: Path) -> float:
    """The latest modification in a folder, judged by its first thousand files."""
    latest = 0.0
    for path in islice(chain([folder], folder.rglob("*")), 1000):
        with suppress(OSError):
            latest = max(latest, path.lstat().st_mtime)
    return latest


def remove_folders(home: Path, session_ids: Iterable[str], run_ids: Iterable[str]) -> None:
    """Delete the files of sessions and runs: uploads, sandboxes, long results."""
    for folder in _FOLDERS:
        for session_id in session_ids:
            _remove_folder(home / folder / folder_name(session_id))
    for run_id in run_ids:
        _remove_folder(home / _RESULTS / folder_name(run_id))


def _remove_folder(folder: Path) -> None:
    """Remove it at once, whatever it contains: a new session of the same id must find nothing."""
    trash = folder.with_name(f".gone-{random_hex(8)}")
    with suppress(OSError):
        folder.rename(trash)
        shutil.rmtree(trash, onerror=_open_and_retry)


def _open_and_retry(remove: object, path: str, _: object) -> None:
    """Make a folder accessible again whose mode commands have changed."""
    with suppress(OSError):
        for entry in (os.path.dirname(path), path):
            os.chmod(entry, 0o700, follow_symlinks=False) if not os.path.islink(entry) else None
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


def _family(tx: Tx, session_id: str) -> list[str]:
    """The session and the sessions of its subtasks, recursively."""
    sql = (
        "WITH RECURSIVE family(id) AS (SELECT ? UNION SELECT s.id FROM sessions s JOIN family f "
        "ON s.parent_session_id = f.id WHERE s.kind = 'delegate') SELECT id FROM family"
    )
    return [row[0] for row in tx.rows(sql, (session_id,))]


def _copied(transcript: list[Row], live: list[Row], session_id: str) -> list[Row]:
    """The transcript as rows of another session, with the rows that only its model sees."""
    positions = {row.id: position for position, row in enumerate(live, 1)}
    ordered = any(row.model_only for row in live)
    copied = [*transcript, *(row for row in live if row.model_only)]
    for row in copied:
        row.session_id, row.run_id = session_id, None
        row.active, row.compacted = row.id in positions, row.id not in positions
        row.position = positions.get(row.id) if ordered else None
    return copied


def _up_to_run(rows: list[Row], run_id: str) -> list[Row]:
    indexes = [index for index, row in enumerate(rows) if row.run_id == run_id]
    if not indexes:
        raise KeyError(f"There are no messages of the run {run_id} in this session.")
    return rows[: indexes[-1] + 1]


def _before(rows: list[Row], message_id: int) -> list[Row]:
    """What precedes a message; for a tool result, what precedes its call."""
    index = next((i for i, row in enumerate(rows) if row.id == message_id), None)
    if index is None:
        raise KeyError(f"There is no message {message_id} in this session.")
    while index > 0 and rows[index].role == "tool":
        index -= 1
    return rows[:index]


def _up_to(rows: list[Row], at_message_id: int | None) -> list[Row]:
    if at_message_id is None:
        return rows
    index = next((i for i, row in enumerate(rows) if row.id == at_message_id), None)
    if index is None:
        raise KeyError(f"There is no message {at_message_id} in this session.")
    end = index + 1
    if rows[index].role == "tool" or rows[index].tool_calls:
        while end < len(rows) and rows[end].role == "tool":
            end += 1
    return rows[:end]
