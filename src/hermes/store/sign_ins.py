"""Browser sign-ins: hashes of random tokens, with the API key each was given for."""

from __future__ import annotations

from typing import NamedTuple

from hermes.core.limits import SIGN_INS_PER_OWNER_MAX
from hermes.store.dialect import CLOCK
from hermes.store.engine import Tx
from hermes.store.repository import Repository, reads, writes


class SignIn(NamedTuple):
    owner: str
    key_sha256: str
    expires_at: float


class SignIns(Repository):
    """Sign-ins by the hash of their token; expired ones are ignored."""

    @writes
    def add(self, tx: Tx, token_sha256: str, owner: str, key_sha256: str, kept_s: float) -> SignIn:
        """The oldest are deleted when an owner has too many."""
        sql = f"INSERT INTO sign_ins VALUES (?, ?, ?, {CLOCK}, {CLOCK} + ?) RETURNING expires_at"
        expires_at = tx.value(sql, (token_sha256, owner, key_sha256, kept_s))
        oldest = "SELECT token_sha256 FROM sign_ins WHERE owner = ? ORDER BY created_at DESC, token_sha256 "
        oldest += f"LIMIT {SIGN_INS_PER_OWNER_MAX} OFFSET {SIGN_INS_PER_OWNER_MAX}"
        tx.execute(f"DELETE FROM sign_ins WHERE token_sha256 IN ({oldest})", (owner,))
        return SignIn(owner, key_sha256, expires_at)

    @reads
    def get(self, tx: Tx, token_sha256: str) -> SignIn | None:
        sql = "SELECT owner, key_sha256, expires_at FROM sign_ins WHERE token_sha256 = ?"
        row = tx.row(f"{sql} AND expires_at > {CLOCK}", (token_sha256,))
        return None if row is None else SignIn(row["owner"], row["key_sha256"], row["expires_at"])

    @writes
    def remove(self, tx: Tx, token_sha256: str) -> bool:
        return tx.change("DELETE FROM sign_ins WHERE token_sha256 = ?", (token_sha256,)) > 0

    @writes
    def remove_all(self, tx: Tx, owner: str) -> int:
        return tx.change("DELETE FROM sign_ins WHERE owner = ?", (owner,))

    @writes
    def sweep(self, tx: Tx) -> int:
        return tx.change(f"DELETE FROM sign_ins WHERE expires_at <= {CLOCK}")
