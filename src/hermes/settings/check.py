"""Validates values against the table of settings: types, ranges, unknown names, `${NAME}`, and secrets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_origin

import msgspec

from hermes.core.formatting import words
from hermes.core.json_types import JsonMapping
from hermes.core.text import FLAG_WORDS
from hermes.settings.files import Document
from hermes.settings.keys import SHORT_FORMS, SPELLINGS, Key, KeyPath, Tree, at, canonical, did_you_mean, nearest

Severity = Literal["warn", "error"]
MASK = "***"
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET_FIELD = re.compile(
    r"(?:.*[_-])?(?:keys?|tokens?|secrets?|passwords?|passwd|credentials?|authorization)|apikey", re.IGNORECASE
)
_SCHEME = re.compile(r"(?:Bearer|Basic|Token) +", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_URL_FIELD = re.compile(r"(?<=[?&])((?:[\w-]*(?:key|token|secret|password))=)[^&#\s]+", re.IGNORECASE)
_SHOWN_CHARS_MAX = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault of the settings. `key` is the setting, or the unknown name as written."""

    severity: Severity
    key: str
    line: int | None
    message: str
    nearest: str = ""
    where: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


@dataclass(frozen=True, slots=True)
class Entry:
    """A setting in the file: `path` in the table, `written` in the file."""

    key: Key
    path: KeyPath
    written: KeyPath
    raw: Any = field(repr=False)
    line: int


class UnknownVariable(Exception):
    pass


# ---- types and ranges


def _int(value: object) -> Any:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    return int(value) if isinstance(value, float | str) else value


def _float(value: object) -> Any:
    number = float(value) if isinstance(value, str) else value
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError
    return number


def _bool(value: object) -> bool | None:
    return FLAG_WORDS.get(str(value).strip().lower()) if isinstance(value, bool | int | str) else None


def _list(value: object) -> Any:
    return words(value) if isinstance(value, str) else value


_READ: Mapping[Any, Callable[[Any], Any]] = {
    int: _int,
    float: _float,
    bool: _bool,
    Sequence[str]: _list,
    Sequence[Any]: _list,
}


def coerce(key: Key, value: object) -> Any:
    """The value with its setting's type. Raises ValueError, without a text, for one that does not fit."""
    if key.choices:
        # YAML reads a bare `off` as false.
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value).strip()
        for choice in key.choices:
            if word.lower() == choice.lower():
                return choice
        if key.base is None:
            raise ValueError
    read = _READ.get(key.base)
    try:
        fitting = msgspec.convert(read(value) if read else value, key.type)
    except (msgspec.ValidationError, OverflowError):
        raise ValueError from None
    return int(fitting) if isinstance(fitting, float) and fitting.is_integer() else fitting


def misfit(name: str, key: Key, value: object) -> str:
    return f"{name} must be {key.expected}, not {_described(key, value)}."


def _described(key: Key, value: object) -> str:
    if key.mark.secret or key.mark.names_variable:
        return "what is there"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "this list" if get_origin(key.base) is Sequence else "a list"
    text = repr(masked(key, value)) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}…"


def remedy(name: str, key: Key) -> str:
    """The command that fixes a bad value in the file."""
    if isinstance(key.default, bool):
        return f"hermes config set {name} {str(key.default).lower()}"
    if isinstance(key.default, int | float | str) and key.default != "" and "<" not in str(key.default):
        return f"hermes config set {name} {key.default}"
    return f"hermes config unset {name}"


# ---- secrets and references


def masked(key: Key, value: object) -> Any:
    if key.mark.secret and value:
        return [MASK] * len(value) if isinstance(value, list) else MASK
    return _mask_inside(value)


def _mask_inside(value: object) -> Any:
    if isinstance(value, dict):
        return {k: MASK if v and _SECRET_FIELD.fullmatch(str(k)) else _mask_inside(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_mask_inside(item) for item in value]
    if isinstance(value, str):
        return _URL_FIELD.sub(rf"\1{MASK}", _URL_LOGIN.sub(MASK, value))
    return value


def secrets_inside(value: object, is_secret: bool = False) -> Iterator[str]:
    """The secret texts in a value: those of fields named so, or with `is_secret` all."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from secrets_inside(item, is_secret or _SECRET_FIELD.fullmatch(str(name)) is not None)
    elif isinstance(value, list):
        for item in value:
            yield from secrets_inside(item, is_secret)
    elif is_secret and isinstance(value, str):
        yield from (value, _SCHEME.sub("", value, count=1))


def has_reference(value: object) -> bool:
    """Whether a text holds `${NAME}`: then the secret is elsewhere."""
    return isinstance(value, str) and _REFERENCE.search(value) is not None


def holds_secret(key: Key, value: object) -> bool:
    """Whether the value holds a secret itself, not a reference to one."""
    plain = _without_references(value)
    return bool(masked(key, plain) != plain)


def _without_references(value: object) -> Any:
    if isinstance(value, dict):
        return {k: _without_references(v) for k, v in value.items()}
    if isinstance(value, list):
        return [item for item in map(_without_references, value) if item != ""]
    return "" if has_reference(value) else value


def without_secret_fields(value: object) -> Any:
    if isinstance(value, dict):
        return {
            k: without_secret_fields(v)
            for k, v in value.items()
            if has_reference(v) or not _SECRET_FIELD.fullmatch(str(k))
        }
    if isinstance(value, list):
        return [without_secret_fields(item) for item in value]
    return value if has_reference(value) else _mask_inside(value)


def substitute(value: object, lookup: Callable[[str], str | None]) -> Any:
    """Replace `${NAME}` in all texts of a value. Raises UnknownVariable with the name."""
    if isinstance(value, dict):
        return {k: substitute(v, lookup) for k, v in value.items()}
    if isinstance(value, list):
        return [substitute(item, lookup) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    def variable(match: re.Match[str]) -> str:
        text = lookup(match[1])
        if text is None:
            raise UnknownVariable(match[1])
        return text

    return _REFERENCE.sub(variable, value)


# ---- the file against the table


class Survey:
    """A file's settings under any spelling (`entries`), the paths of unknown names, and the problems."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.entries: list[Entry] = []
        self.unknown: list[KeyPath] = []
        self.problems: list[Problem] = []
        self._section(document.data, ())

    def _section(self, data: JsonMapping, above: KeyPath) -> None:
        for name, value in data.items():
            self._look((*above, name), value)

    def _look(self, written: KeyPath, value: object) -> None:
        line = self._document.lines.get(written, 1)
        name = ".".join(written)
        short = name in SHORT_FORMS and not isinstance(value, dict)
        path = canonical(written) if short or written[0] in ("gateway", "platforms") else written
        leads_to_spelling = any(spelling[: len(written)] == written for spelling in SPELLINGS[1:])
        node: Tree | Key | None = {} if leads_to_spelling else at(path)
        if isinstance(node, Key):
            # An empty value means unset, unless null has a meaning.
            value = node.mark.null if value is None else value
            if value is not None:
                self.entries.append(Entry(node, path, written, value, line))
        elif node is None:
            self.unknown.append(written)
            near = nearest(written)
            self.problem(written, line, f"{name} is not a setting.{did_you_mean(near)}", nearest=near)
        elif isinstance(value, dict):
            self._section(value, written)
        elif value is not None:
            self.unknown.append(written)
            self.problem(path, line, f"{name} must be a mapping of settings.", severity="error")

    def problem(
        self, path: KeyPath, line: int, message: str, *, severity: Severity = "warn", nearest: str = ""
    ) -> None:
        where = f"{self._document.name} line {line}"
        self.problems.append(
            Problem(severity, ".".join(path), line, message, nearest, where=where, hint="hermes config edit")
        )


def entries(document: Document) -> tuple[list[Entry], list[Problem]]:
    """A file's settings and faults. Of several spellings of one setting the first by rank wins."""
    survey = Survey(document)
    for path, line in document.twice:
        survey.problem(path, line, f"{'.'.join(path)} is there twice; the later one counts.")
    chosen: dict[KeyPath, Entry] = {}
    for entry in sorted(survey.entries, key=lambda entry: _rank(entry.written)):
        first = chosen.setdefault(entry.path, entry)
        if first is not entry and first.raw != entry.raw:
            winner = f"{'.'.join(first.written)} (line {first.line})"
            survey.problem(entry.written, entry.line, f"{'.'.join(entry.written)} is not used: {winner} comes first.")
    return list(chosen.values()), survey.problems


def _rank(written: KeyPath) -> int:
    return max((i for i, spelling in enumerate(SPELLINGS) if written[: len(spelling)] == spelling), default=0)
