"""Restores the media tags of an answer from their rendered form. Pure."""

from __future__ import annotations

import re

BEGIN = "MEDIA:"
# Short images may be the model's own text, and need no shortening.
_MADE = re.compile(
    # Brackets in a name are escaped: no name starts at an escaped one.
    r"!?(?<!\\)\[((?:\\.|[^\[\]\\\n])++)\]"
    r"\((?:data:image/\w+;base64,[A-Za-z0-9+/=]{1000,}|/api/sessions/[^/)\s]+/files/file_[0-9a-f]{24})\)"
)


def strip_rendered_media(text: str) -> str | None:
    """The text with tags in place of rendered media, as the model knows it; None if there are none."""
    if "](data:image/" not in text and "](/api/sessions/" not in text:
        return None
    plain = _MADE.sub(_tag_of, text)
    return plain if plain != text else None


def _tag_of(match: re.Match[str]) -> str:
    path = re.sub(r"\\(.)", r"\1", match[1])
    return BEGIN + (path if re.fullmatch(r"""[^\s"'`<>|]+""", path) else f'"{path}"')
