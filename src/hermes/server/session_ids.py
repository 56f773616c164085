"""Ids of conversations whose caller names none: made from how they begin. Pure."""

from __future__ import annotations

import hashlib
import json


def _derive_chat_session_id(system_prompt: str | None, first_user_message: str, owner: str = "default") -> str:
    """The same for the same opening; an owner other than `default` is mixed in."""
    opening = [system_prompt, first_user_message, *([owner] if owner != "default" else [])]
    said = json.dumps(opening, ensure_ascii=True).encode()
    return f"api-{hashlib.sha256(said).hexdigest()[:32]}"
