"""Redaction of secrets in text, by value and by pattern."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus

from hermes.core.limits import SECRET_CHARS_MIN, SECRET_HELD_CHARS_MIN

MARK = "[redacted]"


def _any_case(word: str) -> str:
    """A pattern for a word in any case. Character classes are faster than ignoring case."""
    return "".join(f"[{char}{char.upper()}]" if char.isalpha() else char for char in word)


# A credential's name, up to where its value begins. A plural (max_tokens) counts things and names no secret.
_KINDS = ("api", "access", "account", "private", "secret")
_KEYS = "|".join(f"(?<={_any_case(kind)}{link}[kK][eE][yY])" for kind in _KINDS for link in ("", "[_-]"))
_NAMES = "|".join(map(_any_case, ("secret", "token", "password", "passwd", "pwd"))) + "(?!=/)"  # a shell's folder
_NAME = rf"((?:[kK][eE][yY](?:{_KEYS})|{_NAMES})(?![A-Za-z])[\\\"']*+\s*+[:=]\s*+)"
_NAMED = ("key", "secret", "token", "passw", "pwd")
_TYPES = r"(?:string|number|boolean|undefined|object|str|int|bool|None|null|true|false)\b"
# A secret that is hidden already, here or in the content of a file, where the mark tells its kind.
_HIDDEN = r"\[redacted\]|«redacted:[a-z_]+»"
# The value of a named credential in quotes of either kind, which may themselves be escaped; the quotes are groups.
_QUOTED = "|".join(
    f"({quote})(?!{_HIDDEN})(?:{inner}){{6,500}}+(?={quote})"
    for quote, inner in (
        ('"', r'[^"\n]'),
        ("'", r"[^'\n]"),
        (r"\\\"", r"[^\\\n]|\\(?!\")"),
        (r"\\'", r"[^\\\n]|\\(?!')"),
    )
)
_CHARS = r"[A-Za-z0-9_-]"
_REST = rf"{_CHARS}*+()"
_PREFIXES = ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "hf_", "gsk_", "r8_", "npm_", "fw_", "whsec_")
_DASHED = ("glpat-", "xoxa-", "xoxb-", "xoxp-", "xoxr-", "xoxs-", "xapp-", "tvly-", "pypi-", "xai-", "nvapi-", "pplx-")


def _key(chars_min: int) -> str:
    """A pattern for what follows a key's prefix: at least `chars_min` characters, one a digit. See `_mark_key`."""
    return rf"(?:(?=[A-Za-z_-]*+[0-9]){_CHARS}{{{chars_min},}}+|{_REST})"


def _mark_key(match: re.Match[str]) -> str:
    """The mark for a key; a run of characters that holds none (`_REST`, which sets a group) stays as it is.

    Where no key follows the first prefix in a run, none follows a later one. Matching the run as a whole keeps the
    search linear: trying again at each further prefix would read the run as often as it holds one.
    """
    return match[0] if match.lastindex else MARK


# Each pattern looks at a character a bounded number of times, whatever the text: repetitions are possessive, and what
# follows one begins with a character that it cannot hold.
# What must be in a text, in small letters, for the pattern to be looked for; the pattern; what is put in its place.
_ROWS: list[tuple[tuple[str, ...], str, str | Callable[[re.Match[str]], str], int]] = [
    (
        ("-----begin",),
        r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
        MARK,
        re.S,
    ),
    (("sk-", "pk-", "rk-"), rf"\b(?:sk|pk|rk|csk)-{_key(8)}", _mark_key, 0),
    (("k_live_", "k_test_"), rf"\b(?:sk|pk|rk)_(?:live|test)_{_key(8)}", _mark_key, 0),
    (_PREFIXES, rf"\b(?:{'|'.join(_PREFIXES)}){_key(16)}", _mark_key, 0),
    (_DASHED, rf"\b(?:{'|'.join(_DASHED)}){_key(16)}", _mark_key, 0),
    (("aiza",), rf"\bAIza{_CHARS}{{20,}}+", MARK, 0),
    (("akia", "asia"), r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}+", MARK, 0),
    (("sg.",), rf"\bSG\.{_CHARS}{{16,}}+\.{_CHARS}{{16,}}+", MARK, 0),
    (("ya29.",), rf"\bya29\.{_CHARS}{{20,}}+", MARK, 0),
    (("eyj",), rf"\beyJ(?:{_CHARS}{{8,}}+\.{_CHARS}{{4,}}+(?:\.{_CHARS}*+)?+|{_REST})", _mark_key, 0),
    (
        ("authorization",),
        r"(\bAuthorization[\"']?\s*+[:=]\s*+[\"']?(?:[A-Za-z]{1,12}+\s++)?)[A-Za-z0-9._~+/=-]{8,}+",
        r"\1" + MARK,
        re.I,
    ),
    (("bearer", "basic"), r"\b((?:Bearer|Basic)\s++)[A-Za-z0-9._~+/=-]{8,}+", r"\1" + MARK, re.I),
    (("://",), rf"(://[^\s/:@]{{0,200}}+:)(?!(?:{_HIDDEN})@)[^\s/]+(@)", r"\1" + MARK + r"\2", 0),
    (_NAMED, rf"{_NAME}(?:{_QUOTED})", r"\1\2\3\4\5" + MARK, 0),
    (_NAMED, _NAME + rf"(?!{_HIDDEN}|{_TYPES})[^\s\"'\\&,;{{}}\[\]]{{6,}}+", r"\1" + MARK, 0),
]
_PATTERNS = tuple((needles, re.compile(pattern, flags), replacement) for needles, pattern, replacement, flags in _ROWS)


def _encoded_forms(value: str) -> list[str]:
    """A value in its usual encodings, without padding."""
    data = value.encode("utf-8", "surrogatepass")
    quoted = [quote(data, safe=""), quote(data), quote_plus(data)]
    lower = [re.sub("%..", lambda match: match[0].lower(), form) for form in quoted]
    escaped = [json.dumps(value, ensure_ascii=only)[1:-1] for only in (True, False)]
    encoded = [form for code in (base64.b64encode, base64.urlsafe_b64encode) for form in _in_base64(data, code)]
    return list(dict.fromkeys([value, *quoted, *lower, *escaped, *encoded]))


def _in_base64(data: bytes, encode: Callable[[bytes], bytes]) -> Iterator[str]:
    """A value in Base64 by itself, and within a longer text at each offset, without the characters shared with
    neighbours."""
    yield encode(data).decode().rstrip("=")
    for before in range(3):
        text = encode(b"\0" * before + data).decode()
        yield text[-(-before * 4 // 3) : (before + len(data)) * 4 // 3]


class Secrets:
    __slots__ = ("_forms", "_pattern", "_starts", "values")

    def __init__(self, values: Iterable[str] = ()) -> None:
        self.values = tuple(sorted({v for v in values if len(v) >= SECRET_CHARS_MIN}, key=len, reverse=True))
        forms = sorted((form for value in self.values for form in _encoded_forms(value)), key=len, reverse=True)
        self._forms = tuple(forms)
        self._pattern = re.compile("|".join(map(re.escape, forms))) if forms else None
        starts = "|".join(re.escape(form) for form in dict.fromkeys(form[:SECRET_HELD_CHARS_MIN] for form in forms))
        self._starts = re.compile(starts) if starts else None

    def redact(self, text: str) -> str:
        if not text:
            return text
        text = self.mask(text)
        lower = text.lower()
        for needles, pattern, replacement in _PATTERNS:
            for needle in needles:
                if needle in lower:
                    text = pattern.sub(replacement, text)
                    break
        return text

    def mask(self, text: str) -> str:
        for form in self._forms:  # looking for each is much quicker than looking for any
            if form in text and self._pattern is not None:
                return self._pattern.sub(MARK, text)
        return text

    def stream(self) -> StreamMask:
        return StreamMask(self._forms, self._pattern, self._starts)


def redact_tree(value: object, redact: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact(key) if isinstance(key, str) else key: redact_tree(item, redact) for key, item in value.items()}
    if isinstance(value, list):
        return [redact_tree(item, redact) for item in value]
    return value


class StreamMask:
    """Masks known values in a stream of text: a tail that begins like one is held back until it is decided.

    The last few characters shown are remembered, so that a value is still known when its first ones, too few to be
    held back, came in an earlier piece.
    """

    __slots__ = ("_forms", "_held", "_pattern", "_shown", "_starts")

    def __init__(self, forms: tuple[str, ...], pattern: re.Pattern[str] | None, starts: re.Pattern[str] | None) -> None:
        self._forms, self._pattern, self._starts = forms, pattern, starts
        self._shown = ""
        self._held = ""

    def feed(self, text: str) -> str:
        if self._starts is None or self._pattern is None:
            return text
        whole = self._shown + self._held + text
        if not self._starts.search(whole):
            text, self._held = self._held + text, ""
            self._shown = whole[1 - SECRET_HELD_CHARS_MIN :]
            return text
        at = len(self._shown)
        out: list[str] = []
        for match in self._pattern.finditer(whole):
            out += (whole[at : match.start()], MARK)
            at = match.end()
        end = max(at, self._undecided(whole, at))
        out.append(whole[at:end])
        self._held = whole[end:]
        # Of what was just masked nothing is kept.
        start = max(at, end + 1 - SECRET_HELD_CHARS_MIN) if out[:-1] else max(0, end + 1 - SECRET_HELD_CHARS_MIN)
        self._shown = whole[start:end]
        return "".join(out)

    @property
    def held(self) -> str:
        return self._held

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _undecided(self, whole: str, after: int) -> int:
        """Where the end of the text begins that may be the beginning of a value."""
        assert self._starts is not None
        longest = len(self._forms[0]) - 1
        # A beginning may reach into what is shown already, but not into a value that was just masked.
        first = max(0 if after == len(self._shown) else after, len(whole) - longest)
        for start in range(first, len(whole) - SECRET_HELD_CHARS_MIN + 1):
            if self._starts.match(whole, start) and any(form.startswith(whole[start:]) for form in self._forms):
                return start
        return len(whole)
