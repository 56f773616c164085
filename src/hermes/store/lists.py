"""Lists of sessions: filtered, ranked, paged without gaps or repetitions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from hermes.core.json_types import JsonObject
from hermes.core.limits import BRANCHES_MAX, SESSION_ID_CHARS_MAX
from hermes.store.dialect import all_of, index_hint, like, placeholders
from hermes.store.engine import Tx
from hermes.store.repository import Repository, reads, reads_slowly, reads_slowly_with
from hermes.store.rows import TRANSCRIPT
from hermes.store.session_rows import SessionRow, session_fields

# Texts that may be long are left out.
_NOT_LISTED = ("model_config", "instructions", "system_prompt", "prompt_digest", "transcript_digest", "stateless")
_SHOWN_IN_LISTS = ", ".join(name for name in SessionRow.__struct_fields__ if name not in _NOT_LISTED)
_CURSOR = re.compile(r"([012])\|(-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\|(.+)", re.DOTALL)
_AROUND = """SELECT s.id, p.id AS parent_session_id, s.instructions IS NOT NULL AS has_system_prompt,
  s.model_config IS NOT NULL AS has_model_config, NULL AS active_run_id
FROM sessions s LEFT JOIN sessions p ON p.id = s.parent_session_id AND p.owner = s.owner"""
_AT_WORK = f"SELECT session_id, run_id, started_at, created_at FROM runs {index_hint('runs_unfinished')} WHERE ended_at IS NULL"
# The session that one was forked from; its forks, recursively; and the number of messages that a fork shares with its
# parent.
_FORKED_FROM = "SELECT parent_session_id FROM sessions WHERE id = ? AND kind = 'branch'"
_FORKS = """WITH RECURSIVE forks(id) AS (
  SELECT id FROM sessions WHERE id = ?
  UNION SELECT s.id FROM forks JOIN sessions s ON s.parent_session_id = forks.id WHERE s.kind = 'branch'
) SELECT id FROM forks LIMIT ?"""
_SHARED = f"""SELECT count(*) FROM sessions s JOIN messages m ON m.session_id = s.parent_session_id
  AND m.id <= s.forked_at_message_id WHERE s.id = ? AND s.kind = 'branch' AND {TRANSCRIPT}"""
INSIDE = "(cwd = ? OR substr(cwd, 1, length(?)) = ?)"


class SessionFilters(TypedDict, total=False):
    """Which sessions a list holds; None means no condition. `archived` is true, false or 'all'."""

    source: str | None
    cwd_prefix: str | None
    owner: str | None
    session_key: str | None
    include_children: bool
    archived: bool | str
    search: str | None
    pinned: bool | None


class Lists(Repository):
    @reads_slowly_with("search", "cwd_prefix")
    def list_sessions(
        self,
        tx: Tx,
        source: str | None = None,
        cwd_prefix: str | None = None,
        owner: str | None = None,
        session_key: str | None = None,
        limit: int = 20,
        cursor: str | None = None,
        offset: int = 0,
        include_children: bool = False,
        archived: bool | str = False,
        search: str | None = None,
        pinned: bool | None = None,
        order: str = "last_active",
    ) -> list[JsonObject]:
        """Sessions without their prompts, latest first. Each has the `cursor` after which the list continues."""
        filters = SessionFilters(source=source, cwd_prefix=cwd_prefix, owner=owner, session_key=session_key)
        filters |= SessionFilters(include_children=include_children, archived=archived, search=search, pinned=pinned)
        if order not in ("last_active", "started_at"):
            raise ValueError("Sessions are listed by 'last_active' or 'started_at'.")
        where, params = _condition(filters)
        rank, ranked = _rank(search)
        by_active = "sessions_active" if owner is None else "sessions_owner"
        index = "" if search else index_hint("sessions_started" if order == "started_at" else by_active)
        inner = f"SELECT {_SHOWN_IN_LISTS}, {rank} AS rank FROM sessions {index} WHERE {where}"
        after = ""
        after_params: list[Any] = []
        if cursor is not None:
            after, after_params = _after_cursor(tx, cursor, order, rank, ranked, bool(search))
        rows = tx.rows(
            f"SELECT * FROM ({inner}) AS listed {after} ORDER BY {'rank, ' if search else ''}{order} DESC, id DESC "
            "LIMIT ? OFFSET ?",
            [*ranked, *params, *after_params, _check_count("limit", limit), _check_count("offset", offset)],
        )
        sessions = [session_fields(row) for row in rows]
        for session in sessions:
            session["cursor"] = f"{session.pop('rank')}|{session[order]!r}|{session['id']}"
        return sessions

    @reads_slowly_with("search", "cwd_prefix")
    def count_sessions(self, tx: Tx, **filters: Unpack[SessionFilters]) -> int:
        where, params = _condition(filters)
        # Without a covering index, reading rows in their order is quicker.
        index = index_hint("" if filters.get("search") or filters.get("cwd_prefix") else "sessions_owner")
        return int(tx.value(f"SELECT count(*) FROM sessions {index} WHERE {where}", params))

    @reads
    def session_page(
        self, tx: Tx, *, limit: int, offset: int, cursor: str | None, order: str, **filters: Unpack[SessionFilters]
    ) -> tuple[list[JsonObject], dict[str, JsonObject], int]:
        """A page of a list, extra facts by session id (`around_sessions`), and the length of the whole list."""
        sessions = self.list_sessions(limit=limit, offset=offset, cursor=cursor, order=order, **filters)
        around = self.around_sessions([session["id"] for session in sessions])
        return sessions, around, self.count_sessions(**filters)

    @reads_slowly
    def branches(self, tx: Tx, session_id: str) -> list[tuple[JsonObject, int]]:
        """The forks that a session belongs to, starting with their common root; each with how many messages it shares
        with its parent."""
        root = session_id
        for _ in range(BRANCHES_MAX):
            parent = tx.value(_FORKED_FROM, (root,))
            if parent is None:
                break
            root = parent
        ids = [row[0] for row in tx.rows(_FORKS, (root, BRANCHES_MAX))]
        sql = f"SELECT {_SHOWN_IN_LISTS} FROM sessions WHERE id IN ({placeholders(ids)}) ORDER BY started_at, id"
        rows = [session_fields(row) for row in tx.rows(sql, ids)]
        return [(row, int(tx.value(_SHARED, (row["id"],)) or 0)) for row in rows]

    @reads
    def around_sessions(self, tx: Tx, session_ids: Sequence[str]) -> dict[str, JsonObject]:
        """Facts about sessions beside their rows: the active run, a parent of the same owner, prompts."""
        if not session_ids:
            return {}
        details = {
            row["id"]: dict(row)
            for row in tx.rows(f"{_AROUND} WHERE s.id IN ({placeholders(session_ids)})", session_ids)
        }
        at_work = tx.rows(f"{_AT_WORK} AND session_id IN ({placeholders(session_ids)})", session_ids)
        # The first that has started, or else the first that waits.
        for row in sorted(at_work, key=lambda run: (run["started_at"] is None, run["created_at"]), reverse=True):
            if row["session_id"] in details:
                details[row["session_id"]]["active_run_id"] = row["run_id"]
        return details


def _condition(filters: SessionFilters) -> tuple[str, list[str]]:
    archived, search, cwd_prefix = filters.get("archived", False), filters.get("search"), filters.get("cwd_prefix")
    owner, source, session_key = filters.get("owner"), filters.get("source"), filters.get("session_key")
    where, params = all_of(("source = ?", source), ("owner = ?", owner), ("session_key = ?", session_key))
    if (pinned := filters.get("pinned")) is not None:
        where += " AND pinned" if pinned else " AND NOT pinned"
    if not filters.get("include_children"):
        where += " AND kind != 'delegate'"
    if archived not in ("all", True, False):
        raise ValueError("`archived` is true, false or 'all'.")
    if archived != "all":
        where += " AND archived" if archived else " AND NOT archived"
    if cwd_prefix is not None:
        where += f" AND {INSIDE}"
        params += folder_of(cwd_prefix)
    if search and (len(search) > SESSION_ID_CHARS_MAX or "\x00" in search):
        where += " AND FALSE"
    elif search:
        where += f" AND ({like('title')} OR {like('id')})"
        params += [f"%{escaped(search)}%"] * 2
    return where, params


def _rank(search: str | None) -> tuple[str, list[str]]:
    """Exact matches rank before prefixes, prefixes before matches elsewhere."""
    if not search:
        return "0", []
    exact, beginning = escaped(search), f"{escaped(search)}%"
    title = like("coalesce(title, '')")
    condition = f"WHEN {title} OR {like('id')} THEN"
    return f"CASE {condition} 0 {condition} 1 ELSE 2 END", [exact, exact, beginning, beginning]


def _after_cursor(
    tx: Tx, cursor: str, order: str, rank: str, ranked: list[str], searching: bool
) -> tuple[str, list[Any]]:
    """The condition that continues a list after a cursor or after a session."""
    row = tx.row(f"SELECT {order}, id, {rank} AS rank FROM sessions WHERE id = ?", [*ranked, cursor])
    match = _CURSOR.fullmatch(cursor)
    if row is not None:
        last_rank, value, last = row["rank"], row[order], row["id"]
    elif match is not None:
        last_rank, value, last = int(match[1]), float(match[2]), match[3]
    else:
        raise ValueError("The cursor is not valid.")
    later = f"({order}, id) < (?, ?)"
    if not searching:
        return f"WHERE {later}", [value, last]
    return f"WHERE rank > ? OR (rank = ? AND {later})", [last_rank, last_rank, value, last]


def is_inside(cwd: str | None, folder: str) -> bool:
    itself, below, _ = folder_of(folder)
    return cwd is not None and (cwd == itself or cwd.startswith(below))


def folder_of(path: str) -> list[str]:
    """The parameters of `INSIDE`: the folder itself, unless it ends with a slash, and twice the prefix of paths below
    it."""
    below = f"{path.rstrip('/')}/"
    return [path, below, below]


def escaped(text: str) -> str:
    return re.sub(r"([\\%_])", r"\\\1", text)


def _check_count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"`{name}` must be a non-negative integer.")
    return value
