"""The messages of a session: append, read, compact, rewind."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import COMPACTIONS_KEPT_S, SQL_ROWS_MAX
from hermes.store import rows
from hermes.store.base import MESSAGE_COLUMNS, Row
from hermes.store.codec import pack, unpack
from hermes.store.dialect import all_of
from hermes.store.engine import Tx
from hermes.store.repository import Repository, reads, writes
from hermes.store.session_rows import check_token, require

_PRIVATE_FIELDS = ("opaque", "api_content", "position", "name", "digest")
_PUBLIC_FIELDS = ("id", *(name for name in MESSAGE_COLUMNS if name not in _PRIVATE_FIELDS))


class Transcripts(Repository):
    @writes
    def append_message(
        self,
        tx: Tx,
        session_id: str,
        role: str,
        content: str | list[JsonObject] | None = None,
        *,
        tool_name: str | None = None,
        tool_calls: list[JsonObject] | None = None,
        tool_call_id: str | None = None,
        token_count: int | None = None,
        finish_reason: str | None = None,
        reasoning: str | None = None,
        opaque: JsonObject | None = None,
        timestamp: float | None = None,
        api_content: str | list[JsonObject] | None = None,
        run_id: str | None = None,
        synthetic: bool = False,
        lease_token: int | None = None,
    ) -> int:
        require(tx, session_id)
        if lease_token is not None:
            check_token(tx, session_id, lease_token)
        _check_kinds(content, api_content, tool_calls, token_count, timestamp)
        row = Row(session_id, role, content, run_id, tool_calls, tool_call_id, tool_name, finish_reason, reasoning)
        row.opaque, row.api_content, row.synthetic, row.token_count = opaque, api_content, synthetic, token_count
        row.timestamp = time.time() if timestamp is None else float(timestamp)
        rows.add(tx, [row])
        assert row.id is not None
        return row.id

    @reads
    def get_messages(
        self,
        tx: Tx,
        session_id: str,
        include_inactive: bool = False,
        limit: int | None = None,
        offset: int = 0,
        before_id: int | None = None,
        after_id: int | None = None,
        order: str = "asc",
    ) -> list[JsonObject]:
        """The transcript, each message once under its first id, whatever was compacted since; with `include_inactive`
        also rewound messages and those that only the model sees."""
        if order not in ("asc", "desc"):
            raise ValueError("`order` is 'asc' or 'desc'.")
        where, params = all_of(("session_id = ?", session_id), ("id < ?", before_id), ("id > ?", after_id))
        sql = f"{where} AND {_visible(include_inactive)} ORDER BY id {order} LIMIT ? OFFSET ?"
        messages = rows.read(tx, sql, [*params, SQL_ROWS_MAX if limit is None else limit, offset])
        return [_public_fields(row) for row in messages]

    @reads
    def message_page(
        self, tx: Tx, /, session_id: str, include_inactive: bool = False, **window: Any
    ) -> tuple[list[JsonObject], int]:
        """A page of `get_messages`, and the total."""
        messages = self.get_messages(session_id, include_inactive, **window)
        return messages, self.count_messages(session_id, include_inactive)

    @reads
    def count_messages(self, tx: Tx, session_id: str, include_inactive: bool = False) -> int:
        """The number of messages; the session stores that of its transcript."""
        if not include_inactive:
            return int(tx.value("SELECT message_count FROM sessions WHERE id = ?", (session_id,), 0))
        where = f"session_id = ? AND {_visible(include_inactive)}"
        return int(tx.value(f"SELECT count(*) FROM messages WHERE {where}", (session_id,)))

    @reads
    def get_messages_around(self, tx: Tx, session_id: str, message_id: int, window: int = 5) -> list[JsonObject]:
        """A message and its neighbours; empty if it is not of this session."""
        if tx.value("SELECT 1 FROM messages WHERE session_id = ? AND id = ?", (session_id, message_id)) is None:
            return []
        where = f"session_id = ? AND (({rows.TRANSCRIPT}) OR id = ?) AND id"
        before = rows.read(
            tx, f"{where} <= ? ORDER BY id DESC LIMIT ?", (session_id, message_id, message_id, window + 1)
        )
        after = rows.read(tx, f"{where} > ? ORDER BY id LIMIT ?", (session_id, message_id, message_id, window))
        return [_public_fields(row) for row in [*reversed(before), *after]]

    @reads
    def get_messages_as_conversation(self, tx: Tx, session_id: str) -> list[JsonObject]:
        """What is sent to a model: live rows, results in the order of their calls. Nothing is invented or repaired."""
        return rows.conversation(tx, session_id)

    @reads
    def conversation_until(self, tx: Tx, session_id: str, run_id: str, *, with_it: bool) -> list[JsonObject]:
        """What the model sees of the conversation before a run, or up to the run's end; everything if it has no rows
        there."""
        live = rows.live(tx, session_id)
        of_run = [index for index, row in enumerate(live) if row.run_id == run_id]
        end = len(live) if not of_run else of_run[-1] + 1 if with_it else of_run[0]
        return [row.as_message() for row in live[:end]]

    @writes
    def archive_and_compact(self, tx: Tx, session_id: str, messages: Sequence[JsonMapping]) -> int:
        """Replace what the model sees; the live rows stay in the transcript. Returns how many were archived."""
        require(tx, session_id)
        return rows.archive(tx, session_id, [rows.row_of_message(session_id, dict(message)) for message in messages])

    @writes
    def put_compaction(
        self, tx: Tx, session_id: str, owner: str, digest: str, first_kept: int, messages: Sequence[JsonMapping]
    ) -> None:
        """Store the replacement of messages of a client's own history: those up to this hash, except the first few."""
        now = time.time()
        tx.execute("DELETE FROM compactions WHERE created_at < ?", (now - COMPACTIONS_KEPT_S,))
        sql = (
            "INSERT INTO compactions SELECT ?, ?, id, CAST(? AS DOUBLE PRECISION), CAST(? AS INTEGER), ? FROM sessions "
            "WHERE id = ? ON CONFLICT (owner, digest) DO UPDATE SET session_id = excluded.session_id, "
            "created_at = excluded.created_at, first_kept = excluded.first_kept, messages = excluded.messages"
        )
        tx.execute(sql, (owner, digest, now, first_kept, pack(list(messages)), session_id))

    @reads
    def find_compaction(self, tx: Tx, owner: str, digests: Sequence[str]) -> tuple[str, int, list[JsonObject]] | None:
        """The last of these hashes that has a compaction, how many messages stay, and what follows them."""
        for digest in reversed(digests):
            sql = "SELECT first_kept, messages FROM compactions WHERE owner = ? AND digest = ?"
            if (row := tx.row(sql, (owner, digest))) is not None:
                return digest, row["first_kept"], unpack(row["messages"])
        return None

    @writes
    def rewind_to_message(self, tx: Tx, session_id: str, message_id: int) -> JsonObject:
        """Remove a user message and all that follows from the conversation."""
        require(tx, session_id)
        before, removed = _split_transcript(tx, session_id, message_id)
        if not removed or removed[0].role != "user":
            raise ValueError(f"{message_id} is not a user message of this session.")
        _take_back(tx, session_id, before, removed)
        return {
            "rewound_count": len(removed),
            "target_message": _public_fields(removed[0]),
            "new_head_id": before[-1].id if before else None,
        }

    @writes
    def rewind_to_calls(
        self, tx: Tx, session_id: str, call_ids: Sequence[str], *, lease_token: int | None = None
    ) -> int:
        """Hide the outputs that a client gave for its calls, and all that follows, so that it can give them again."""
        if lease_token is not None:
            check_token(tx, session_id, lease_token)
        live, ids = rows.live(tx, session_id), set(call_ids)
        call_indexes = [
            index for index, row in enumerate(live) if ids & {call.get("id") for call in row.tool_calls or ()}
        ]
        if not call_indexes:
            return 0
        following = live[call_indexes[-1] + 1 :]
        first = next((row for row in following if row.role != "tool" or row.tool_call_id in ids), None)
        return _take_back_from(tx, session_id, first) if first is not None else 0

    @writes
    def hide_last_notes(self, tx: Tx, session_id: str, *, lease_token: int | None = None) -> None:
        """Hide what was written after the last message of a turn without an answer, so that it can be continued."""
        if lease_token is not None:
            check_token(tx, session_id, lease_token)
        live = rows.live(tx, session_id)
        notes = list(takewhile(lambda row: row.synthetic and row.role == "assistant", reversed(live)))
        if notes:
            _take_back_from(tx, session_id, notes[-1])


def _visible(include_inactive: bool) -> str:
    return f"NOT {rows.CONTINUATION}" if include_inactive else rows.TRANSCRIPT


def _split_transcript(tx: Tx, session_id: str, message_id: int) -> tuple[list[Row], list[Row]]:
    """The transcript before a message, and from that message on; the latter is empty if there is no such message."""
    transcript = rows.read(tx, f"session_id = ? AND {rows.TRANSCRIPT} ORDER BY id", (session_id,))
    index = next((index for index, row in enumerate(transcript) if row.id == message_id), len(transcript))
    return transcript[:index], transcript[index:]


def _take_back_from(tx: Tx, session_id: str, first: Row) -> int:
    """Rewind to before a message; returns how many were removed."""
    before, removed = _split_transcript(tx, session_id, first.id or 0)
    if removed:
        _take_back(tx, session_id, before, removed)
    return len(removed)


def _take_back(tx: Tx, session_id: str, before: list[Row], removed: list[Row]) -> None:
    live_ids = {row.id for row in rows.live_up_to(before, removed, rows.live(tx, session_id))}
    hidden = "UPDATE messages SET active = FALSE, compacted = FALSE WHERE session_id = ? AND id >= ? AND NOT model_only"
    tx.execute(hidden, (session_id, removed[0].id))
    tx.execute("UPDATE messages SET active = FALSE WHERE session_id = ? AND active AND model_only", (session_id,))
    tx.many("UPDATE messages SET active = TRUE, compacted = FALSE WHERE id = ?", [(row_id,) for row_id in live_ids])
    if any(not row.active for row in before if row.id in live_ids):  # the transcript is ordered by ids
        tx.execute("UPDATE messages SET position = NULL WHERE session_id = ? AND active", (session_id,))
    rows.recount(tx, session_id)


def _check_kinds(
    content: object, api_content: object, tool_calls: object, token_count: object, timestamp: object
) -> None:
    for name, value in (("content", content), ("api_content", api_content)):
        if not (value is None or isinstance(value, str) or _objects(value)):
            raise ValueError(f"`{name}` is a text or a list of parts.")
    if not (tool_calls is None or _objects(tool_calls)):
        raise ValueError("`tool_calls` is a list of calls.")
    if not (token_count is None or (isinstance(token_count, int) and 0 <= token_count < 2**63)):
        raise ValueError("`token_count` must be a non-negative integer.")
    if not (timestamp is None or (isinstance(timestamp, int | float) and math.isfinite(timestamp))):
        raise ValueError("`timestamp` is a number of seconds.")


def _objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(part, dict) for part in value)


def _public_fields(row: Row) -> JsonObject:
    return {name: getattr(row, name) for name in _PUBLIC_FIELDS}
