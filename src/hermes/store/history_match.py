"""Finds the stored conversation that a request continues, by the content of the history it brings."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import NamedTuple

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import BOUND_ROWS_MAX, BOUND_SESSIONS_MAX, BOUND_TURN_ROWS_MAX
from hermes.store import rows
from hermes.store.base import Row
from hermes.store.codec import checked_id, clean, text_of
from hermes.store.dialect import is_same, placeholders
from hermes.store.digests import continued, digest_of, is_current
from hermes.store.engine import Record, Tx
from hermes.store.leases import LEASE_COLUMNS, NEXT_TOKEN, held_by, is_free
from hermes.store.repository import Repository, reads

Message = JsonMapping


class Binding(Repository):
    @reads
    def bind_session(
        self,
        tx: Tx,
        base_id: str,
        history: Sequence[Message],
        *,
        owner: str = "default",
        session_key: str | None = None,
    ) -> str:
        """The id of the session that holds this history, or of a new session that will begin with it."""
        return find_session(tx, base_id, history, owner, session_key).session_id


@dataclass(slots=True)
class Bound:
    """Where a turn is recorded. `new`: the session does not exist yet, so nobody holds it. `history` is the given one
    plus what the server did in between and its client never saw; None if there is nothing to add."""

    session_id: str
    new: FreeSession | None
    history: list[JsonObject] | None = None


class FreeSession(NamedTuple):
    """The id of a session that does not exist and that nobody is about to create, with the token `acquire_free`
    needs."""

    id: str
    next_token: int | None


def find_session(
    tx: Tx,
    base_id: str,
    history: Sequence[Message],
    owner: str,
    session_key: str | None,
    call_ids: Sequence[str] = (),
    *,
    shown_tools: bool = False,
) -> Bound:
    """The session whose messages match the given history, turn by turn. `call_ids` are the calls that the client
    answers now; with `shown_tools` it has also seen the server's own calls."""
    checked_id(base_id)
    if not history:
        free = find_free_session(tx, base_id)
        return Bound(free.id, free)
    digests = [digest_of(message) for message in history]
    transcript: str | None = None
    for message, digest in zip(history, digests, strict=True):
        transcript = continued(transcript, digest) if message.get("role") == "user" else transcript

    sessions: list[Record] = []
    for condition in ("id = ? AND base_id = id", "base_id = ? AND base_id <> id"):
        sql = f"SELECT id, transcript_digest, last_active FROM sessions WHERE {condition} AND owner = ? "
        sql += f"AND {is_same('session_key')} ORDER BY last_active DESC LIMIT ?"
        sessions += tx.rows(sql, (base_id, owner, session_key, BOUND_SESSIONS_MAX))
    sessions = sorted(sessions, key=lambda row: float(row["last_active"]), reverse=True)[:BOUND_SESSIONS_MAX]
    waiting = _waiting_sessions(tx, call_ids, owner, session_key)
    candidates = waiting | {
        str(session["id"]): True
        for session in sessions
        if session["transcript_digest"] == transcript or not is_current(session["transcript_digest"])
    }
    matches: dict[str, Match] = {}
    rows_read = 0
    for session_id in candidates:
        if rows_read >= BOUND_ROWS_MAX:  # the store waits meanwhile: stop looking
            break
        stored = rows.conversation_rows(tx, session_id)
        rows_read += len(stored)
        if (result := match(history, stored, digests, shown_tools=shown_tools)) is not None:
            matches[session_id] = result
    complete = [session_id for session_id, result in matches.items() if not result.remaining]
    # If no session ends there, a client may repeat outputs for a turn that was continued since.
    chosen = list(matches) if complete else [session_id for session_id in matches if session_id in waiting]
    with_unseen = matches[chosen[0]].with_unseen() if len(chosen) == 1 else None
    for session_id in complete:
        if candidates[session_id] and not held_by(tx, f"session:{session_id}"):
            return Bound(session_id, None, with_unseen)
    free = find_free_session(tx, base_id)
    return Bound(free.id, free, with_unseen)


def _waiting_sessions(tx: Tx, call_ids: Sequence[str], owner: str, session_key: str | None) -> dict[str, bool]:
    """Sessions in which these calls wait for the client, and whether a turn may be recorded there by content."""
    if not call_ids:
        return {}
    sql = (
        "SELECT DISTINCT s.id, s.base_id FROM pending_calls p JOIN sessions s ON s.id = p.session_id "
        f"WHERE p.owner = ? AND p.call_id IN ({placeholders(call_ids)}) AND p.expires_at > ? AND s.owner = ? "
        f"AND {is_same('s.session_key')}"
    )
    sessions = tx.rows(sql, (owner, *call_ids, time.time(), owner, session_key))
    return {str(row["id"]): row["base_id"] is not None for row in sessions}


_FREE_SESSION, _FREE_SESSION_TO_READ = (
    f"SELECT one.taken, {LEASE_COLUMNS}, {token} AS next_token "
    "FROM (SELECT EXISTS (SELECT 1 FROM sessions WHERE id = ?) AS taken) AS one LEFT JOIN leases l ON l.name = ?"
    for token in (NEXT_TOKEN, "NULL")
)


def find_free_session(tx: Tx, base_id: str) -> FreeSession:
    number, session_id = 0, base_id
    lookup = _FREE_SESSION_TO_READ if tx.read_only else _FREE_SESSION
    while True:
        seen = tx.rows(lookup, (session_id, f"session:{session_id}"))[0]
        if not seen["taken"] and is_free(seen):
            return FreeSession(session_id, seen["next_token"])
        sql = "SELECT 1 + count(*) FROM sessions WHERE base_id = ? AND base_id <> id"
        number = 1 + (number or int(tx.value(sql, (base_id,))))
        session_id = f"{base_id}-{number}"


# --- comparing -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Match:
    """A given history with the rows that each of its messages stands for. `remaining` counts the further rows."""

    pairs: list[tuple[Message | None, list[Row]]] = field(default_factory=list)
    remaining: int = 0

    def with_unseen(self) -> list[JsonObject]:
        return [merged for message, stored in self.pairs for merged in _with_unseen(message, stored)]


def match(
    messages: Sequence[Message],
    stored: Sequence[Row],
    digests: Sequence[str] | None = None,
    *,
    shown_tools: bool = False,
) -> Match | None:
    """Match the given messages with the rows; None if the rows hold something else."""
    result, remaining = Match(), deque(stored)
    for index, message in enumerate(messages):
        if message.get("role") == "system":  # no row holds it
            result.pairs.append((message, []))
            continue
        digest = digests[index] if digests else digest_of(message)
        if not shown_tools and message.get("role") != "assistant":
            _skip_unseen(remaining, result)
        if remaining and rows.digest_of_row(remaining[0]) == digest:
            result.pairs.append((message, [remaining.popleft()]))
            continue
        if shown_tools or message.get("role") != "assistant" or not (matched := _matching_rows(message, remaining)):
            return None
        result.pairs.append((message, matched))
        _remove_rows(remaining, matched)
    if not shown_tools:
        _skip_unseen(remaining, result)
    result.remaining = len(remaining)
    return result


def _remove_rows(remaining: deque[Row], matched: Sequence[Row]) -> None:
    """Remove these rows, which are near the beginning; outputs of the client may lie between them."""
    ids, skipped = {id(row) for row in matched}, []
    while ids:
        row = remaining.popleft()
        if id(row) in ids:
            ids.remove(id(row))
        else:
            skipped.append(row)
    remaining.extendleft(reversed(skipped))


def _matching_rows(message: Message, remaining: deque[Row]) -> list[Row] | None:
    """The rows that a client sees as one answer: the last text or all of them, and the calls that are the client's."""
    content, matched = _text(message.get("content")), list[Row]()
    digest = digest_of({**message, "content": ""})
    without_calls = digest_of({**message, "content": "", "tool_calls": []})
    compared, joined = 0, True  # length of the content that the texts so far match, while they match
    for row, results in _steps(islice(remaining, BOUND_TURN_ROWS_MAX)):
        server_results, client_calls = _split_calls(row, results)
        matched += [row, *server_results]
        text = _text(row.content)
        if text and joined:
            piece = f"\n\n{text}" if compared else text
            joined = content.startswith(piece, compared)
            compared += len(piece)
        if content == text or (joined and compared == len(content)):
            visible_digest = (
                digest_of({**message, "content": "", "tool_calls": client_calls}) if client_calls else without_calls
            )
            if visible_digest == digest:
                return matched
        if client_calls:
            return None
    return None


def _steps(remaining: Iterator[Row]) -> Iterator[tuple[Row, list[Row]]]:
    """The assistant messages that begin these rows, each with the results of its calls."""
    row = next(remaining, None)
    while row is not None and row.role == "assistant":
        results, following = list[Row](), next(remaining, None)
        while following is not None and following.role == "tool":
            results.append(following)
            following = next(remaining, None)
        yield row, results
        row = following


def _skip_unseen(remaining: deque[Row], result: Match) -> None:
    """Skip calls that the client has not seen: the turn ended before it produced text."""
    while (
        remaining and remaining[0].role == "assistant" and remaining[0].tool_calls and not _text(remaining[0].content)
    ):
        results = list(takewhile(lambda row: row.role == "tool", islice(remaining, 1, None)))
        server_results, client_calls = _split_calls(remaining[0], results)
        if client_calls or len(server_results) != len(results):
            return
        result.pairs.append((None, [remaining.popleft() for _ in range(1 + len(results))]))


def _split_calls(row: Row, results: Sequence[Row]) -> tuple[list[Row], list[JsonObject]]:
    """The server's results of a message's calls, and the calls that are the client's: its results name no tool."""
    server_results = [result for result in results if result.tool_name]
    answered_ids = {result.tool_call_id for result in server_results}
    return server_results, [call for call in row.tool_calls or () if call.get("id") not in answered_ids]


def _with_unseen(message: Message | None, stored: list[Row]) -> list[JsonObject]:
    if message is None:
        return [row.as_message() for row in stored]
    if message.get("role") != "assistant":
        return [dict(message)]
    last = max(at for at, row in enumerate(stored) if row.role == "assistant")
    row = stored[last]
    merged = dict(message)
    if last and _text(message.get("content")) != _text(row.content):
        merged["content"] = (
            row.content
        )  # the client joined all texts of the turn: the earlier ones stand before this one
    if row.opaque and "opaque" not in merged:
        merged["opaque"] = row.opaque
    if row.tool_calls:
        clients = {call.get("id"): call for call in message.get("tool_calls") or ()}
        merged["tool_calls"] = [clients.get(call.get("id"), call) for call in row.tool_calls]
    return [
        *(before.as_message() for before in stored[:last]),
        merged,
        *(after.as_message() for after in stored[last + 1 :]),
    ]


def _text(content: object) -> str:
    return clean(text_of(content) or "")
