"""Prompts, stored once by the hash of their text; sessions and runs refer to the hash."""

from __future__ import annotations

import hashlib
import time

from hermes.core.limits import PROMPT_USE_NOTED_S, SWEEP_BATCH_ROWS
from hermes.store.dialect import placeholders
from hermes.store.engine import Tx
from hermes.store.repository import Repository, blocks, reads_slowly, writes

# An existing prompt is not written unless its last use was noted long ago, nor is its row locked: PostgreSQL's ON
# CONFLICT would lock it even without a change, and all turns share the same few prompts.
_PUT = (
    "INSERT INTO prompts SELECT ?, CAST(? AS DOUBLE PRECISION), ? "
    "WHERE NOT EXISTS (SELECT 1 FROM prompts WHERE sha256 = ? AND used_at >= ?) "
    "ON CONFLICT (sha256) DO UPDATE SET used_at = excluded.used_at"
)
_UNUSED = (
    "SELECT sha256 FROM prompts WHERE used_at < ? "
    "AND sha256 NOT IN (SELECT prompt_sha256 FROM sessions WHERE prompt_sha256 IS NOT NULL) "
    "AND sha256 NOT IN (SELECT instructions_sha256 FROM runs WHERE instructions_sha256 IS NOT NULL)"
)


class Prompts(Repository):
    @blocks
    def remove_unused_prompts(self, now: float | None = None) -> int:
        """Delete prompts that nothing refers to; returns how many."""
        # Whoever refers to a prompt notes its use first, so that none of these can have been referred to since the
        # query.
        before = (time.time() if now is None else now) - 2 * PROMPT_USE_NOTED_S
        digests = self._unused(before)
        steps = range(0, len(digests), SWEEP_BATCH_ROWS)
        return sum(self._remove(digests[at : at + SWEEP_BATCH_ROWS], before) for at in steps)

    @reads_slowly
    def _unused(self, tx: Tx, before: float) -> list[str]:
        return [row[0] for row in tx.rows(_UNUSED, (before,))]

    @writes
    def _remove(self, tx: Tx, digests: list[str], before: float) -> int:
        return tx.change(
            f"DELETE FROM prompts WHERE sha256 IN ({placeholders(digests)}) AND used_at < ?", (*digests, before)
        )


def put(tx: Tx, text: str) -> str:
    sha256, now = hashlib.sha256(text.encode()).hexdigest(), time.time()
    tx.execute(_PUT, (sha256, now, text, sha256, now - PROMPT_USE_NOTED_S))
    return sha256
