"""Finding messages: what people type becomes a query that cannot fail, and an answer that says if it is whole."""

from __future__ import annotations

import re
import sqlite3
import time
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes.limits import (
    CHOSEN_ROWS_MAX,
    PREFIXES_MAX,
    QUERY_CHARS_MAX,
    SEARCH_CONTEXT_CHARS,
    SEARCH_S_MAX,
    SNIPPET_TOKENS,
    SORTED_MATCHES_MAX,
)
from hermes.store.coding import clean, spaced, unspaced
from hermes.store.connections import TimeUp, Tx
from hermes.store.parts import Part, reads_slowly

_TOKEN = re.compile(r'"([^"]*)"(\*)?|(\()|(\))|([^\s"()]+)')
_OPERATORS = ("AND", "OR", "NOT")
_DEPTH_MAX, _PLAIN_WORDS_MAX, _DETAILS_S_MIN = 16, 64, 0.2
_SORTS = ("relevance", "newest", "oldest")
_MATCHES = """SELECT f.rowid, {score} FROM messages_fts f JOIN messages m ON m.id = f.rowid
JOIN sessions s ON s.id = m.session_id WHERE messages_fts MATCH ? {where} ORDER BY {order} LIMIT ? OFFSET ?"""
_SHOWN = f"""SELECT m.id, m.session_id, m.role, m.timestamp, m.tool_name, s.source, s.title,
  s.started_at AS session_started, snippet(messages_fts, -1, '>>>', '<<<', '…', {SNIPPET_TOKENS}) AS snippet
FROM messages_fts f JOIN messages m ON m.id = f.rowid JOIN sessions s ON s.id = m.session_id
WHERE messages_fts MATCH ? AND """


class Found(list[dict[str, Any]]):
    """Matches; `complete` is false when time ended the search early."""

    complete = True


class Search(Part):
    """The index over all that was said."""

    @reads_slowly
    def search_messages(
        self,
        tx: Tx,
        query: str,
        source: str | None = None,
        role: str | None = None,
        owner: str | None = None,
        session_key: str | None = None,
        session_id: str | None = None,
        limit: int = 20,
        offset: int = 0,
        sort: str = "relevance",
        include_inactive: bool = False,
    ) -> Found:
        """Messages that hold these words. Rewound ones and what we wrote ourselves are hidden, compacted ones found."""
        if len(query) > QUERY_CHARS_MAX:
            raise ValueError(f"A query has at most {QUERY_CHARS_MAX} characters; this one has {len(query)}.")
        if sort not in _SORTS:
            raise ValueError(f"`sort` is one of {', '.join(_SORTS)}.")
        expression = fts_query(query)
        if not expression or limit <= 0:
            return Found()
        where, params = "" if include_inactive else " AND (m.active OR m.compacted)", []
        if role is not None:
            where += " AND m.role = ?"
            params.append(role)
        of_sessions = {"source": source, "owner": owner, "session_key": session_key, "id": session_id}
        chosen = {name: value for name, value in of_sessions.items() if value is not None}
        if chosen:
            sql = " AND ".join(f"s.{name} = ?" for name in chosen)
            if _is_small(tx, sql, chosen):
                sql = f"+f.rowid IN (SELECT m.id FROM sessions s JOIN messages m ON m.session_id = s.id WHERE {sql})"
            where += f" AND {sql}"
            params += chosen.values()
        try:
            return _found(tx, expression, where, params, limit, offset, sort)
        except sqlite3.OperationalError as error:
            if "fts5" not in str(error):
                raise
            # Too much for one query: then it is plain words.
            return _found(tx, plain_query(query), where, params, limit, offset, sort)


def _is_small(tx: Tx, condition: str, values: Mapping[str, Any]) -> bool:
    """Whether the chosen sessions hold so little that it is quicker to begin with them."""
    sql = f"SELECT sum(s.message_count) FROM sessions s WHERE {condition}"
    return int(tx.value(sql, list(values.values())) or 0) <= CHOSEN_ROWS_MAX


def _found(tx: Tx, expression: str, where: str, params: Sequence[Any], limit: int, offset: int, sort: str) -> Found:
    until = time.monotonic() + SEARCH_S_MAX
    ids, complete = _ordered(tx, expression, where, params, limit, offset, sort)
    found = Found()
    rows = _details(tx, expression, [message_id for message_id, _ in ids], until)
    for message_id, score in ids:
        if (row := rows.get(message_id)) is not None:
            told = dict(row) | {"snippet": unspaced(row["snippet"] or ""), "score": score}
            found.append(told | {"context": _context(tx, row["session_id"], message_id)})
    found.complete = complete and len(found) == len(ids)
    return found


def _details(tx: Tx, expression: str, ids: Sequence[int], until: float) -> dict[int, sqlite3.Row]:
    """What is shown of these matches."""
    if "*" not in expression:
        return {
            message_id: row for message_id in ids if (row := tx.row(_SHOWN + "f.rowid = ?", (expression, message_id)))
        }
    # The many words of a prefix are looked up once for all, not for each.
    found: dict[int, sqlite3.Row] = {}
    try:
        with tx.within(max(_DETAILS_S_MIN, until - time.monotonic())):
            for row in tx.each(_SHOWN + f"+f.rowid IN ({', '.join('?' * len(ids))})", [expression, *ids]):
                found[row["id"]] = row
    except TimeUp:
        pass
    return found


Ids = list[tuple[int, float | None]]


def _ordered(
    tx: Tx, expression: str, where: str, params: Sequence[Any], limit: int, offset: int, sort: str
) -> tuple[Ids, bool]:
    """The matches of the page that is asked for, and whether there was time enough to find the right ones."""
    seconds, complete = SEARCH_S_MAX, True
    if sort == "relevance":
        # Ranking has to look at every match before it gives the first; the newest matches come at once.
        # (`rank` would score them all before it looks at what else is asked of them.)
        order = "bm25(messages_fts)" if "+f.rowid IN" in where else "f.rank"
        ids, complete = _gather(tx, expression, where, params, limit, offset, order, seconds * 0.8)
        if complete:
            return ids, True
        sort, seconds = "newest", seconds * 0.1
    down = "DESC" if sort == "newest" else "ASC"
    # What was imported is older than its place in the table: where there are few matches they are put in order of time.
    few, whole = _gather(tx, expression, where, params, SORTED_MATCHES_MAX + 1, 0, f"f.rowid {down}", seconds)
    if whole and len(few) <= SORTED_MATCHES_MAX:
        times = _times(tx, few)
        few.sort(key=lambda match: (times[match[0]], match[0]), reverse=sort == "newest")
        return few[offset : offset + limit], complete
    if offset + limit > len(few):
        few, whole = _gather(tx, expression, where, params, offset + limit, 0, f"f.rowid {down}", seconds)
    return few[offset : offset + limit], complete and whole


def _times(tx: Tx, ids: Ids) -> dict[int, float]:
    marks = ", ".join("?" * len(ids))
    found = tx.rows(f"SELECT id, timestamp FROM messages WHERE id IN ({marks})", [match[0] for match in ids])
    return {row[0]: row[1] for row in found}


def _gather(
    tx: Tx,
    expression: str,
    where: str,
    params: Sequence[Any],
    limit: int,
    offset: int,
    order: str,
    seconds: float,
) -> tuple[Ids, bool]:
    """Matches in an order, as far as the time reaches. False: it did not."""
    found: Ids = []
    score = "NULL" if order.startswith("f.rowid") else f"-{order}"
    try:
        with tx.within(seconds):
            sql = _MATCHES.format(score=score, where=where, order=order)
            for row in tx.each(sql, [expression, *params, limit, offset]):
                found.append((row[0], row[1]))
    except TimeUp:
        return found, False
    return found, True


def _context(tx: Tx, session_id: str, message_id: int) -> list[dict[str, Any]]:
    """The message before and the one after, shortened."""
    sql = (
        "SELECT id, role, substr(content, 1, ?) AS content FROM messages WHERE session_id = ? AND id {sign} ? "
        "AND (active OR compacted) AND copy_of IS NULL ORDER BY id {order} LIMIT 1"
    )
    near: list[sqlite3.Row | None] = []
    for sign, order in (("<", "DESC"), (">", "ASC")):
        near.append(tx.row(sql.format(sign=sign, order=order), (SEARCH_CONTEXT_CHARS, session_id, message_id)))
    return [dict(row) for row in near if row is not None]


# --- from what is typed to a query. Pure. ----------------------------------------------------------------------------


@dataclass
class _Group:
    """Terms, operators and groups between a pair of brackets."""

    items: list[str | _Group] = field(default_factory=list)


def fts_query(text: str) -> str:
    """Phrases, AND, OR, NOT, brackets and prefixes as the index takes them; what makes no sense is left out."""
    top = _Group()
    open_groups = [top]
    prefixes = 0
    for quoted, starred, opens, closes, word in _TOKEN.findall(clean(text)):
        group = open_groups[-1]
        if opens:
            if len(open_groups) < _DEPTH_MAX:
                inner = _Group()
                group.items.append(inner)
                open_groups.append(inner)
        elif closes:
            if len(open_groups) > 1:
                open_groups.pop()
        elif word in _OPERATORS:
            group.items.append(word)
        else:
            # Few prefixes, and none of one letter: each is looked up in all words that begin with it.
            plain = quoted or word.rstrip("*")
            prefix = bool(starred or word.endswith("*")) and len(plain) > 1 and prefixes < PREFIXES_MAX
            prefixes += prefix
            if term := _term(plain, prefix):
                group.items.append(term)
    return _joined(top) or plain_query(text)


def plain_query(text: str) -> str:
    """Every word of it, and nothing else."""
    words = [_term(word.strip('"()*'), False) for word in clean(text).split()]
    return " AND ".join(list(dict.fromkeys(word for word in words if word))[:_PLAIN_WORDS_MAX])


def _term(text: str, prefix: bool) -> str:
    """A word or a phrase in quotes; nothing when it holds nothing that is indexed."""
    if not any(unicodedata.category(char)[0] in "LN" or unicodedata.category(char) == "Co" for char in text):
        return ""
    quoted = spaced(text).replace('"', '""')
    return f'"{quoted}" *' if prefix else f'"{quoted}"'


def _joined(group: _Group) -> str:
    """Operators stand between two operands; any other is left out. Operands side by side must both be there."""
    out: list[str] = []
    waiting = ""
    for item in group.items:
        if isinstance(item, str) and item in _OPERATORS:
            waiting = item
            continue
        operand = item if isinstance(item, str) else _joined(item)
        if not operand:
            continue
        if out:
            out.append(waiting or "AND")
        out.append(operand if isinstance(item, str) else f"({operand})")
        waiting = ""
    return " ".join(out)
