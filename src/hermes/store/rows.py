"""The messages table: rows written together with the counters of their session, and read back unchanged."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat, takewhile
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

from hermes.core.json_types import JsonObject
from hermes.core.limits import SEARCHED_CHARS_MAX
from hermes.store.base import MESSAGE_COLUMNS, PURGE_DUE, Row
from hermes.store.codec import (
    Blobs,
    checked_role,
    clean_or_none,
    columns_of,
    content_of,
    first_text_of,
    pack,
    pack_content,
    pack_or_none,
    preview_of,
    search_text,
    text_of,
    unpack,
    unpack_content,
)
from hermes.store.dialect import either, greatest, in_json_list
from hermes.store.digests import continued, digest_of, encoded, is_current
from hermes.store.engine import SET_META, Record, Tx
from hermes.store.words import ts_vector

T = TypeVar("T")
_COLUMNS = ", ".join(MESSAGE_COLUMNS)
# SQLite's index follows the table by triggers; PostgreSQL's is a column. PostgreSQL also gives ids in advance, so that
# statements that refer to a message need not wait for it.
_INSERT = (
    f"INSERT INTO messages ({_COLUMNS}, parts, search_text{either('', ', search, id')}) "
    f"VALUES ({', '.join('?' * (len(MESSAGE_COLUMNS) + 2))}{either('', ', ?, ?')}) {either('RETURNING id', '')}"
)
_NEXT_IDS = "SELECT nextval('messages_id_seq') FROM generate_series(1, ?)"
_EXTEND = (
    "UPDATE messages SET content = ?, search_text = CASE WHEN synthetic THEN NULL ELSE ? END, "
    f"{either('', 'search = CASE WHEN synthetic THEN NULL ELSE ?::tsvector END,')} api_content = ?, "
    "tool_calls = ?, finish_reason = ?, opaque = coalesce(?, opaque), digest = NULL WHERE id = ?"
)
SELECT = f"SELECT {_COLUMNS}, id, parts FROM messages"
_values_of = attrgetter(*MESSAGE_COLUMNS)
# Positions of the columns that are converted: looking them up by name takes longer than all the rest.
_CONTENT, _API_CONTENT, _DIGEST = map(MESSAGE_COLUMNS.index, ("content", "api_content", "digest"))
_TEXTS = [MESSAGE_COLUMNS.index(n) for n in ("finish_reason", "tool_call_id", "tool_name", "reasoning", "name")]
_JSON = [MESSAGE_COLUMNS.index(name) for name in ("tool_calls", "opaque")]
_FLAGS = [MESSAGE_COLUMNS.index(name) for name in ("synthetic", "active", "compacted", "model_only")]
_MESSAGE_COLUMNS = "role, content, parts, api_content, tool_calls, tool_call_id, tool_name, opaque, name"
# The transcript under its original ids: neither rewound nor written for the model only.
TRANSCRIPT = "NOT model_only AND (active OR compacted)"
# Of that, the messages of the user and the model themselves.
CONVERSATION = f"NOT synthetic AND {TRANSCRIPT}"
# The rest of a message that was continued, as its run produced it; the message itself has all of it.
CONTINUATION = "(model_only AND run_id IS NOT NULL)"
# The order of what the model sees. A compaction numbers those rows from one; later ones follow by their ids.
MODEL_ORDER = "coalesce(position, id)"


def add(tx: Tx, rows: Iterable[Row], *, counted: bool = False) -> None:
    """Append rows to their session and set their ids; update the session's counters unless `counted`."""
    by_session: dict[str, list[Row]] = {}
    rows = list(rows)
    ids = _next_ids(tx, len(rows))
    for row in rows:
        if row.continues:
            _extend_last_message(tx, row)
        row.id = _insert(tx, row, next(ids))
        by_session.setdefault(row.session_id, []).append(row)
    for session_id, session_rows in by_session.items() if not counted else ():
        _count(tx, session_id, session_rows)


def prefetch_ids(tx: Tx, count: int) -> None:
    if count and tx.backend == "postgres":
        tx.prefetch(_NEXT_IDS, (count,))


def _next_ids(tx: Tx, count: int) -> Iterator[int | None]:
    if not count or tx.backend == "sqlite":  # SQLite assigns the id on insertion
        return repeat(None)
    return iter([row[0] for row in tx.rows(_NEXT_IDS, (count,))])


def _insert(tx: Tx, row: Row, row_id: int | None) -> int:
    blobs: Blobs = {}
    content, parts = columns_of(row.content, blobs)
    api_content = pack_content(row.api_content, blobs)
    checked_role(row.role)
    values = list(_values_of(row))
    for index in _TEXTS:
        values[index] = clean_or_none(values[index])
    for index in _JSON:
        values[index] = pack_or_none(values[index])
    values[_CONTENT], values[_API_CONTENT] = content, api_content
    if row.role == "user" and parts is not None:
        values[_DIGEST] = digest_of_row(row)
    indexed = not row.synthetic and not row.model_only
    search = _search_columns(tx, content, row.tool_name) if indexed else _search_columns(tx, None, None)
    if row_id is None:
        row_id = int(tx.value(_INSERT, (*values, parts, *search)))
    else:
        tx.execute(_INSERT, (*values, parts, *search, row_id))
    keep_blobs(tx, row_id, blobs)
    return row_id


def _search_columns(tx: Tx, content: str | None, tool_name: str | None) -> tuple[str | None, ...]:
    """The search columns of a message."""
    text = search_text(content)
    if tx.backend == "sqlite":
        return (text,)
    return text, search_vector(text, content, tool_name)


def search_vector(text: str | None, content: str | None, tool_name: str | None) -> str | None:
    """The `tsvector` of an indexed message; `text` is its `search_text`."""
    return ts_vector(text or (content or "")[:SEARCHED_CHARS_MAX], tool_name)


def _extend_last_message(tx: Tx, addition: Row) -> None:
    """Append the rest of the session's last message to it; the row itself is stored for the log of its run."""
    rows = read(tx, f"session_id = ? AND active ORDER BY {MODEL_ORDER} DESC LIMIT 1", (addition.session_id,))
    last = rows[0] if rows else None
    if last is None or last.role != "assistant" or last.tool_calls or not isinstance(last.content, str):
        addition.active = True
        return
    addition.active, addition.model_only = False, True
    content = clean_or_none(f"{last.content}{text_of(addition.content) or ''}")
    api_content = None
    if last.api_content is not None or addition.api_content is not None:
        parts = (row.content if row.api_content is None else row.api_content for row in (last, addition))
        api_content = pack_content("".join(text_of(part) or "" for part in parts), {})
    values = (
        content,
        *_search_columns(tx, content, last.tool_name),
        api_content,
        pack_or_none(addition.tool_calls),
        clean_or_none(addition.finish_reason),
    )
    tx.execute(_EXTEND, (*values, pack_or_none(addition.opaque), last.id))


def keep_blobs(tx: Tx, row_id: int, blobs: Blobs) -> None:
    """Store the blobs of a row; each is stored once, however many rows refer to it."""
    for digest, (media_type, data) in blobs.items():
        tx.execute("INSERT INTO blobs VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (digest, media_type, data))
        tx.execute("INSERT INTO message_blobs VALUES (?, ?) ON CONFLICT DO NOTHING", (digest, row_id))


def _count(tx: Tx, session_id: str, rows: Sequence[Row]) -> None:
    digest = None
    if any(row.role == "user" for row in rows):
        digest = tx.value("SELECT transcript_digest FROM sessions WHERE id = ?", (session_id,))
    counters = tally(rows, digest)
    tx.execute(
        "UPDATE sessions SET message_count = message_count + ?, tool_call_count = tool_call_count + ?, "
        "preview = coalesce(preview, ?), transcript_digest = coalesce(?, transcript_digest), "
        f"last_active = {greatest('last_active', '?')} WHERE id = ?",
        (*counters.values(), max(row.timestamp for row in rows), session_id),
    )
    if not is_current(digest):
        recount(tx, session_id)


def tally(rows: Sequence[Row], digest: str | None = None) -> JsonObject:
    """What rows add to their session: counters, preview, and the running hash over the user's messages."""
    user_rows = [row for row in rows if row.role == "user" and not row.synthetic]
    for row in user_rows:
        digest = continued(digest, digest_of_row(row))
    return {
        "message_count": sum(not row.model_only and (row.active or row.compacted) for row in rows),
        "tool_call_count": sum(len(row.tool_calls or ()) for row in rows),
        "preview": preview_of(first_text_of(user_rows[0].content)) if user_rows else None,
        "transcript_digest": digest if user_rows else None,
    }


def digest_of_row(row: Row) -> str:
    """The hash of a message as it was received, whatever was made of it since."""
    if row.digest is None and row.role == "user" and isinstance(row.content, list):
        row.digest = digest_of(row.as_given())
    return row.digest or digest_of(row.as_given())


def conversation_rows(tx: Tx, session_id: str, where: str = "") -> list[Row]:
    """The conversation of a session. User messages with a stored hash are read without their content."""
    stored = tx.rows(f"{SELECT} WHERE session_id = ? AND {CONVERSATION} {where} ORDER BY id", (session_id,))
    blob = functools.partial(_blob, tx)
    return list(
        in_call_order([_row_of(blob, row, with_content=row["role"] != "user" or not row["digest"]) for row in stored])
    )


def recount(tx: Tx, session_id: str) -> None:
    digest = None
    for row in conversation_rows(tx, session_id, "AND role = 'user'"):
        digest = continued(digest, digest_of_row(row))
    tx.execute(
        "UPDATE sessions SET transcript_digest = ?, message_count = "
        f"(SELECT count(*) FROM messages WHERE session_id = ? AND {TRANSCRIPT}) WHERE id = ?",
        (digest, session_id, session_id),
    )


def read(tx: Tx, where: str, params: Sequence[Any] = ()) -> list[Row]:
    blob = functools.partial(_blob, tx)
    return [_row_of(blob, row) for row in tx.rows(f"{SELECT} WHERE {where}", params)]


def model_position(row: Row | _Outline) -> int:
    return row.position if row.position is not None else row.id or 0


def live(tx: Tx, session_id: str, where: str = "") -> list[Row]:
    """What the model sees: live rows in order, results in the order of their calls."""
    rows = read(tx, f"session_id = ? AND active {where} ORDER BY id", (session_id,))
    return list(in_call_order(sorted(rows, key=model_position)))


def conversation(tx: Tx, session_id: str) -> list[JsonObject]:
    """What the model sees, as `Row.as_message` returns it, reading only the columns that needs."""
    blob = functools.partial(_blob, tx)
    sql = f"SELECT {MODEL_ORDER}, {_MESSAGE_COLUMNS} FROM messages WHERE session_id = ? AND active ORDER BY id"
    messages: list[tuple[int, JsonObject]] = []
    for position, role, content, parts, api_content, tool_calls, tool_call_id, tool_name, opaque, name in tx.each(
        sql, (session_id,)
    ):
        message: JsonObject = {"role": role, "content": content}
        if parts is not None or api_content is not None:
            message["content"] = unpack_content(parts if api_content is None else api_content, blob)
        if tool_calls is not None and (calls := unpack(tool_calls)):
            message["tool_calls"] = calls
        if tool_call_id:
            message["tool_call_id"] = tool_call_id
        if tool_name:
            message["tool_name"] = tool_name
        if opaque is not None and (state := unpack(opaque)):
            message["opaque"] = state
        if name:
            message["name"] = name
        messages.append((position, message))
    messages.sort(key=itemgetter(0))
    return list(in_call_order([message for _, message in messages], dict.get))


def live_up_to(remaining: Sequence[Row], removed: Sequence[Row], live: Sequence[Row]) -> list[Row]:
    """What the model sees of a conversation that ends with the last of `kept`, before `removed`. A summary that covers
    both is replaced by the messages themselves."""
    if not remaining or not removed:
        return list(live if remaining else ())
    kept_ids, removed_ids = {row.id for row in remaining}, {row.id for row in removed}
    if remaining[-1].active:
        end = 1 + max(index for index, row in enumerate(live) if row.id in kept_ids)
        return [row for row in live[:end] if row.id not in removed_ids]
    if any(not row.active for row in removed):
        return list(remaining)
    return list(takewhile(lambda row: row.id not in removed_ids, live))


def _row_of(blob: Callable[[str], tuple[str, bytes]], record: Record, *, with_content: bool = True) -> Row:
    *values, parts = record
    for index in _JSON:
        values[index] = unpack(values[index])
    for index in _FLAGS:
        values[index] = bool(values[index])
    values[_CONTENT] = content_of(values[_CONTENT], parts, blob) if with_content else None
    values[_API_CONTENT] = unpack_content(values[_API_CONTENT], blob)
    return Row(*values)


def _blob(tx: Tx, digest: str) -> tuple[str, bytes]:
    row = tx.row("SELECT media_type, bytes FROM blobs WHERE sha256 = ?", (digest,))
    return (row[0], row[1]) if row else ("", b"[The data of this part is missing.]")


def set_api_content(tx: Tx, row_id: int, content: Any) -> None:
    blobs: Blobs = {}
    tx.execute("UPDATE messages SET api_content = ? WHERE id = ?", (pack_content(content, blobs), row_id))
    keep_blobs(tx, row_id, blobs)


def archive(tx: Tx, session_id: str, rows: Sequence[Row], indexes: Sequence[int | None] = ()) -> int:
    """Replace what the model sees by `rows`; returns how many live rows were archived. A message that stays keeps its
    row and id; if it was shortened, the new text is for the model only. The other rows were generated and belong to no
    transcript. `indexes` gives the live row that each row repeats; without it they are matched by content."""
    before = _outline(tx, session_id)
    if matched := _rows_at(before, rows, indexes):
        ids = [old.id for old in matched if old is not None]
        rows_by_id = {row.id: row for row in read(tx, in_json_list("id"), (pack(ids),))}
        origins = [old and rows_by_id[old.id] for old in matched]
    else:
        origins = _origins(live(tx, session_id), rows)
    kept_ids = {old.id for old in origins if old is not None}
    archived_ids = [row.id for row in before if row.id not in kept_ids]
    sql = f"UPDATE messages SET active = FALSE, compacted = TRUE WHERE {in_json_list('id')}"
    tx.execute(sql, (pack(archived_ids),))
    positions = [(position, old.id) for position, old in enumerate(origins, 1) if old is not None]
    tx.many("UPDATE messages SET position = ? WHERE id = ?", positions)
    for position, (row, old) in enumerate(zip(rows, origins, strict=True), 1):
        row.position = position
        if old is None or old.id is None:
            row.synthetic = row.model_only = True
            row.id = _insert(tx, row, next(_next_ids(tx, 1)))
            continue
        if old.as_message()["content"] != row.content:
            set_api_content(tx, old.id, row.content)
        row.id, row.content = old.id, old.content
    touch_session(tx, session_id)
    return len(archived_ids)


def touch_session(tx: Tx, session_id: str) -> None:
    tx.execute(
        f"UPDATE sessions SET last_active = {greatest('last_active', '?')} WHERE id = ?", (time.time(), session_id)
    )


class _Outline(NamedTuple):
    """A live row without its content, which is expensive to read."""

    id: int
    role: str
    tool_calls: list[JsonObject] | None
    tool_call_id: str | None
    position: int | None


def _outline(tx: Tx, session_id: str) -> list[_Outline]:
    sql = (
        "SELECT id, role, tool_calls, tool_call_id, position FROM messages WHERE session_id = ? AND active ORDER BY id"
    )
    outlines = [
        _Outline(row_id, role, unpack(tool_calls), tool_call_id, position)
        for row_id, role, tool_calls, tool_call_id, position in tx.each(sql, (session_id,))
    ]
    return list(in_call_order(sorted(outlines, key=model_position)))


def _rows_at(before: list[_Outline], rows: Sequence[Row], indexes: Sequence[int | None]) -> list[_Outline | None]:
    """The live rows at `indexes`; empty if they do not fit."""
    matched = [before[index] if index is not None and index < len(before) else None for index in indexes]
    for row, old, index in zip(rows, matched, indexes, strict=True) if matched else ():
        if index is not None and (old is None or (old.role, old.tool_call_id) != (row.role, row.tool_call_id)):
            return []
    return matched


def _origins(before: list[Row], rows: Sequence[Row]) -> list[Row | None]:
    """The row that each new row repeats: first the common beginning and end are matched, then the rest."""
    origins: list[Row | None] = [None] * len(rows)
    head = tail = 0
    while head < min(len(before), len(rows)) and _same(before[head], rows[head]):
        origins[head] = before[head]
        head += 1
    while tail < min(len(before), len(rows)) - head and _same(before[-1 - tail], rows[-1 - tail]):
        origins[-1 - tail] = before[-1 - tail]
        tail += 1
    indexes: dict[bytes, list[int]] = {}
    for index in range(len(before) - tail - 1, head - 1, -1):
        indexes.setdefault(encoded(before[index].as_message()), []).append(index)
    free = head
    for new_index in range(head, len(rows) - tail):
        candidates = indexes.get(encoded(rows[new_index].as_message()), [])
        while candidates and candidates[-1] < free:
            candidates.pop()
        if candidates:
            origins[new_index] = before[candidates[-1]]
            free = candidates[-1] + 1
    return origins


def _same(old: Row, new: Row) -> bool:
    return old.as_message() == new.as_message()


def purge_due(tx: Tx) -> None:
    """Schedule the removal of deleted rows from the search index."""
    if tx.backend == "sqlite":  # in PostgreSQL they are deleted with their rows
        tx.execute(SET_META, (PURGE_DUE, "1"))


def in_call_order(rows: Sequence[T], get: Callable[[Any, str], Any] = getattr) -> Iterator[T]:
    """Results in the order of the calls they answer, for rows or (with `dict.get`) messages."""
    index = 0
    while index < len(rows):
        row = rows[index]
        index += 1
        yield row
        if get(row, "role") != "assistant" or not (calls := get(row, "tool_calls")):
            continue
        end = index
        while end < len(rows) and get(rows[end], "role") == "tool":
            end += 1
        call_order = {str(call.get("id")): i for i, call in enumerate(calls)}
        yield from sorted(rows[index:end], key=lambda r: call_order.get(str(get(r, "tool_call_id")), len(call_order)))
        index = end


def row_of_message(session_id: str, message: JsonObject) -> Row:
    row = Row(session_id, message["role"], message.get("content"), timestamp=time.time())
    for name in ("tool_calls", "tool_call_id", "tool_name", "opaque", "name"):
        setattr(row, name, message.get(name) or None)
    return row
