"""Words as the search indexes compare them, ignoring case, accents and punctuation. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

_LETTER = r"[^\W_]|[\ue000-\uf8ff\U000f0000-\U0010fffd]"  # and private use, as in SQLite's index
WORD = re.compile(rf"(?:{_LETTER})(?:{_LETTER}|[\u0300-\u036f])*+")
_MARKS = re.compile("[\u0300-\u036f]+")
# PostgreSQL's limits on the length and position of a lexeme.
_LEXEME_BYTES_MAX, _POSITION_MAX = 2046, 16_383


def line_of(words: Iterable[re.Match[str]]) -> str:
    """The compared form of the words, with a space before and after each."""
    line = f" {' '.join(word[0] for word in words)} "
    return line.lower() if line.isascii() else _MARKS.sub("", unicodedata.normalize("NFD", line.casefold()))


def ts_vector(text: str | None, tool_name: str | None) -> str | None:
    """A message as a `tsvector` of PostgreSQL, computed here so that both databases match the same words."""
    positions: dict[str, list[int]] = {}
    position = 0
    for part in (text, tool_name):
        for word in _lexemes(part or ""):
            position = min(position + 1, _POSITION_MAX)
            positions.setdefault(word, []).append(position)
        position += 1  # no phrase spans both
    return " ".join(f"'{word}':{','.join(map(str, places))}" for word, places in positions.items()) or None


def ts_phrase(text: str, *, prefix: bool) -> str:
    """A word or phrase of a `tsquery`; empty if there is no word."""
    lexemes = [f"'{word}'" for word in _lexemes(text)]
    if not lexemes:
        return ""
    if prefix:
        lexemes[-1] += ":*"
    return lexemes[0] if len(lexemes) == 1 else f"({' <-> '.join(lexemes)})"


def _lexemes(text: str) -> list[str]:
    words = line_of(WORD.finditer(text)).split()
    if all(len(word) <= _LEXEME_BYTES_MAX // 4 for word in words):
        return words
    return [word.encode()[:_LEXEME_BYTES_MAX].decode(errors="ignore") for word in words]
