"""Which stored conversation a caller means who brings its own history: found by content, not by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hermes.limits import BOUND_SESSIONS_MAX
from hermes.store import rows
from hermes.store.coding import checked_id, clean, text_of
from hermes.store.connections import Tx
from hermes.store.leases import held_by
from hermes.store.parts import Part, reads


class Binding(Part):
    """Equal openings of two people stay apart; one person's conversation is found again."""

    @reads
    def bind_session(
        self,
        tx: Tx,
        base_id: str,
        history: Sequence[Mapping[str, Any]],
        *,
        owner: str = "default",
        session_key: str | None = None,
    ) -> str:
        """The id of the session that holds this history, or a free one for a session that will begin with it."""
        return bound(tx, base_id, history, owner, session_key)[0]


def bound(
    tx: Tx, base_id: str, history: Sequence[Mapping[str, Any]], owner: str, session_key: str | None
) -> tuple[str, bool]:
    """The same, and whether there is no such session yet, which nobody holds either."""
    checked_id(base_id)
    given = list(_turns(history))
    digest = None
    for question, _ in given:
        digest = rows.continued(digest, question)
    if not given:
        return _free(tx, base_id), True
    same = tx.rows(
        "SELECT id, transcript_digest FROM sessions WHERE base_id = ? AND owner = ? AND session_key IS ? "
        "ORDER BY last_active DESC LIMIT ?",
        (base_id, owner, session_key, BOUND_SESSIONS_MAX),
    )
    for session_id, known in same:
        if known == digest and not held_by(tx, f"session:{session_id}") and _same_answers(tx, session_id, given):
            return str(session_id), False
    return _free(tx, base_id), True


def _free(tx: Tx, base_id: str) -> str:
    taken = int(tx.value("SELECT count(*) FROM sessions WHERE base_id = ?", (base_id,)))
    number, wanted = max(1, taken), base_id
    while tx.value("SELECT 1 FROM sessions WHERE id = ?", (wanted,)) is not None or held_by(tx, f"session:{wanted}"):
        number += 1
        wanted = f"{base_id}-{number}"
    return wanted


def _same_answers(tx: Tx, session_id: str, given: list[tuple[str, list[str]]]) -> bool:
    """Turn by turn, each answer either the last message of the turn or all of its text."""
    held = rows.read(tx, f"session_id = ? AND {rows.HELD} ORDER BY id", (session_id,))
    known = list(_turns([{"role": row.role, "content": row.content} for row in held]))
    if len(known) != len(given):
        return False
    return all(_answered(theirs) <= _answered(ours) for (_, theirs), (_, ours) in zip(given, known, strict=True))


def _answered(texts: list[str]) -> set[str]:
    """The ways to tell an answer of several messages."""
    spoken = [text for text in texts if text]
    return {spoken[-1], "\n\n".join(spoken)} if spoken else {""}


def _turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Each question of the user with the texts that answered it."""
    question: str | None = None
    answers: list[str] = []
    for message in messages:
        if message.get("role") == "user":
            if question is not None:
                yield question, answers
            question, answers = clean(text_of(message.get("content")) or ""), []
        elif message.get("role") == "assistant":
            answers.append(clean(text_of(message.get("content")) or ""))
    if question is not None:
        yield question, answers
