"""Which stored conversation a caller means who brings its own history: found by content, not by name."""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import BOUND_ROWS_MAX, BOUND_SESSIONS_MAX, BOUND_TURN_ROWS_MAX
from hermes.store import rows
from hermes.store.base import Row
from hermes.store.codec import checked_id, clean, text_of
from hermes.store.connections import Tx
from hermes.store.digests import continued, digest_of, is_current
from hermes.store.leases import held_by
from hermes.store.repository import Repository, reads

Message = JsonMapping


class Binding(Repository):
    """Equal openings of two people stay apart; one person's conversation is found again."""

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
        """The id of the session that holds this history, or a free one for a session that will begin with it."""
        return bound(tx, base_id, history, owner, session_key).session_id


@dataclass(slots=True)
class Bound:
    """Where a turn is recorded. `new`: there is no such session yet, and nobody holds it. `history` is the given one
    with what the server did in between and its client never saw; None where nothing is to be added."""

    session_id: str
    new: bool
    history: list[JsonObject] | None = None


def bound(
    tx: Tx,
    base_id: str,
    history: Sequence[Message],
    owner: str,
    session_key: str | None,
    call_ids: Sequence[str] = (),
    *,
    shown_tools: bool = False,
) -> Bound:
    """The session whose messages are those of the given history, turn by turn. `call_ids` are calls that the caller
    answers now; with `shown_tools` it has seen the server's own calls too."""
    checked_id(base_id)
    if not history:
        return Bound(free_session_id(tx, base_id), True)
    digests = [digest_of(message) for message in history]
    asked: str | None = None
    for message, digest in zip(history, digests, strict=True):
        asked = continued(asked, digest) if message.get("role") == "user" else asked

    same: list[sqlite3.Row] = []
    for condition in ("id = ? AND base_id = id", "base_id = ? AND base_id <> id"):
        sql = f"SELECT id, transcript_digest, last_active FROM sessions WHERE {condition} AND owner = ? "
        sql += "AND session_key IS ? ORDER BY last_active DESC LIMIT ?"
        same += tx.rows(sql, (base_id, owner, session_key, BOUND_SESSIONS_MAX))
    same = sorted(same, key=lambda row: float(row["last_active"]), reverse=True)[:BOUND_SESSIONS_MAX]
    waiting = _waiting(tx, call_ids, owner, session_key)
    possible = waiting | {str(one[0]): True for one in same if one[1] == asked or not is_current(one[1])}
    found: dict[str, Match] = {}
    rows_read = 0
    for one in possible:
        if rows_read >= BOUND_ROWS_MAX:  # the store waits meanwhile: what is further away is not looked at
            break
        held = rows.held(tx, one)
        rows_read += len(held)
        if (how := match(history, held, digests, shown_tools=shown_tools)) is not None:
            found[one] = how
    whole = [one for one, how in found.items() if not how.left]
    # Where none ends there, a client may send outputs again to a turn that was gone on with since.
    meant = list(found) if whole else [one for one in found if one in waiting]
    added = found[meant[0]].with_unseen() if len(meant) == 1 else None
    for one in whole:
        if possible[one] and not held_by(tx, f"session:{one}"):
            return Bound(one, False, added)
    return Bound(free_session_id(tx, base_id), True, added)


def _waiting(tx: Tx, call_ids: Sequence[str], owner: str, session_key: str | None) -> dict[str, bool]:
    """Sessions in which these calls were left to the client, and whether a turn may be recorded there by content."""
    if not call_ids:
        return {}
    marks = ", ".join("?" * len(call_ids))
    sql = (
        "SELECT DISTINCT s.id, s.base_id FROM pending_calls p JOIN sessions s ON s.id = p.session_id "
        f"WHERE p.owner = ? AND p.call_id IN ({marks}) AND p.expires_at > ? AND s.owner = ? AND s.session_key IS ?"
    )
    found = tx.rows(sql, (owner, *call_ids, time.time(), owner, session_key))
    return {str(row["id"]): row["base_id"] is not None for row in found}


def free_session_id(tx: Tx, base_id: str) -> str:
    """The id of a session that is not there and that nobody is about to make."""
    number, wanted = 0, base_id
    while tx.value("SELECT 1 FROM sessions WHERE id = ?", (wanted,)) is not None or held_by(tx, f"session:{wanted}"):
        sql = "SELECT 1 + count(*) FROM sessions WHERE base_id = ? AND base_id <> id"
        number = 1 + (number or int(tx.value(sql, (base_id,))))
        wanted = f"{base_id}-{number}"
    return wanted


# --- comparing -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Match:
    """A given history beside the rows that hold it: each message with the rows it stands for. `left` counts further
    rows."""

    pairs: list[tuple[Message | None, list[Row]]] = field(default_factory=list)
    left: int = 0

    def with_unseen(self) -> list[JsonObject]:
        return [told for given, held in self.pairs for told in _with_unseen(given, held)]


def match(
    given: Sequence[Message],
    held: Sequence[Row],
    digests: Sequence[str] | None = None,
    *,
    shown_tools: bool = False,
) -> Match | None:
    """How the rows hold the given messages; None when they hold something else."""
    out, left = Match(), deque(held)
    for at, message in enumerate(given):
        if message.get("role") == "system":  # no row holds it
            out.pairs.append((message, []))
            continue
        digest = digests[at] if digests else digest_of(message)
        if not shown_tools and message.get("role") != "assistant":
            _skip_unseen(left, out)
        if left and rows.digest_of_row(left[0]) == digest:
            out.pairs.append((message, [left.popleft()]))
            continue
        if shown_tools or message.get("role") != "assistant" or not (stands := _stands_for(message, left)):
            return None
        out.pairs.append((message, stands))
        _take(left, stands)
    if not shown_tools:
        _skip_unseen(left, out)
    out.left = len(left)
    return out


def _take(left: deque[Row], stands: Sequence[Row]) -> None:
    """Take these rows out, which stand near the beginning; outputs of the client may lie between them."""
    taken, kept = {id(row) for row in stands}, []
    while taken:
        row = left.popleft()
        if id(row) in taken:
            taken.remove(id(row))
        else:
            kept.append(row)
    left.extendleft(reversed(kept))


def _stands_for(message: Message, left: deque[Row]) -> list[Row] | None:
    """The rows of which a client sees one answer: its last text or all of them, and the calls that are the client's."""
    said, stands = _text(message.get("content")), list[Row]()
    wanted = digest_of({**message, "content": ""})
    without_calls = digest_of({**message, "content": "", "tool_calls": []})
    compared, joined = 0, True  # so much of what was said are the texts so far, if it begins with them at all
    for row, results in _steps(islice(left, BOUND_TURN_ROWS_MAX)):
        own, clients = _parted(row, results)
        stands += [row, *own]
        text = _text(row.content)
        if text and joined:
            more = f"\n\n{text}" if compared else text
            joined = said.startswith(more, compared)
            compared += len(more)
        if said == text or (joined and compared == len(said)):
            shown = digest_of({**message, "content": "", "tool_calls": clients}) if clients else without_calls
            if shown == wanted:
                return stands
        if clients:
            return None
    return None


def _steps(left: Iterator[Row]) -> Iterator[tuple[Row, list[Row]]]:
    """The messages of the assistant that begin these rows, each with the results of its calls."""
    row = next(left, None)
    while row is not None and row.role == "assistant":
        results, following = list[Row](), next(left, None)
        while following is not None and following.role == "tool":
            results.append(following)
            following = next(left, None)
        yield row, results
        row = following


def _skip_unseen(left: deque[Row], out: Match) -> None:
    """Pass over calls that a client has seen nothing of: the turn ended before it said a word."""
    while left and left[0].role == "assistant" and left[0].tool_calls and not _text(left[0].content):
        results = list(takewhile(lambda row: row.role == "tool", islice(left, 1, None)))
        own, clients = _parted(left[0], results)
        if clients or len(own) != len(results):
            return
        out.pairs.append((None, [left.popleft() for _ in range(1 + len(results))]))


def _parted(row: Row, results: Sequence[Row]) -> tuple[list[Row], list[JsonObject]]:
    """The server's results of a message's calls, and the calls that are the client's: its results name no tool."""
    own = [result for result in results if result.tool_name]
    answered = {result.tool_call_id for result in own}
    return own, [call for call in row.tool_calls or () if call.get("id") not in answered]


def _with_unseen(given: Message | None, held: list[Row]) -> list[JsonObject]:
    if given is None:
        return [row.as_message() for row in held]
    if given.get("role") != "assistant":
        return [dict(given)]
    last = max(at for at, row in enumerate(held) if row.role == "assistant")
    row = held[last]
    told = dict(given)
    if last and _text(given.get("content")) != _text(row.content):
        told["content"] = row.content  # all texts of the turn: the others stand before it
    if row.opaque and "opaque" not in told:
        told["opaque"] = row.opaque
    if row.tool_calls:
        clients = {call.get("id"): call for call in given.get("tool_calls") or ()}
        told["tool_calls"] = [clients.get(call.get("id"), call) for call in row.tool_calls]
    return [*(before.as_message() for before in held[:last]), told, *(after.as_message() for after in held[last + 1 :])]


def _text(content: object) -> str:
    return clean(text_of(content) or "")
