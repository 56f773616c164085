"""Unguessable, unique ids."""

from __future__ import annotations

import hashlib
import os
import re
import threading

_AT_ONCE_BYTES = 4096
# Prefix of the folders of turns that are not stored.
UNRECORDED = "unrecorded-"


class _Pool:
    """Random bytes, read from the system in batches: each read releases the GIL."""

    def __init__(self) -> None:
        self._lock, self._buffer = threading.Lock(), b""

    def hex(self, size: int) -> str:
        with self._lock:
            if len(self._buffer) < size:
                self._buffer = os.urandom(_AT_ONCE_BYTES)
            data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data.hex()


_pool = _Pool()
# A forked child must not repeat its parent's ids.
os.register_at_fork(after_in_child=_pool.__init__)  # type: ignore[misc]
random_hex = _pool.hex


def folder_name(session_id: str) -> str:
    """A session's folder: its id, or where that is no plain name a unique one."""
    if re.fullmatch(r"[\w@-][\w.@-]{0,199}", session_id, re.ASCII):
        return session_id
    return f"~{hashlib.sha256(session_id.encode()).hexdigest()[:32]}"


def scope_name(owner: str, key: str | None) -> str:
    """A folder for one owner and key."""
    return hashlib.sha256(f"{owner}\0{key or ''}".encode()).hexdigest()[:32]
