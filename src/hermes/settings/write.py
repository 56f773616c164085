"""Writing settings: one entry of config.yaml changes and every other byte stays; secrets go to .env."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from hermes.core.errors import ConfigError
from hermes.core.home import Home, locked, write_private
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.settings.check import (
    Entry,
    Survey,
    UnknownVariable,
    coerce,
    entries,
    holds_secret,
    misfit,
    substitute,
    without_secret_fields,
)
from hermes.settings.files import parse_env, parse_yaml, read_bytes, read_env
from hermes.settings.keys import SHORT_FORMS, Key, KeyPath, find
from hermes.settings.splice import replace_entry

log = logging.getLogger(__name__)
_REMOVED = object()
_SECRET_COMMENT = re.compile(r"\s*#.*(?:key|token|secret|password)\w*[\"']?\s*[:=]\s*\S", re.IGNORECASE)
_PLAIN_ENV = re.compile(r"[A-Za-z0-9_./:@%+=,-]*")


class BadValue(ConfigError):
    exit_code = 2


@dataclass(frozen=True, slots=True)
class Written:
    """Where a setting was written: the file, and the variable if it is in .env."""

    key: str
    file: Path
    variable: str = ""


def set_value(
    home: Home, key: str, value: object, environ: Mapping[str, str] | None = None, *, by: str = "cli"
) -> Written:
    """Validate a value and write it. A text may hold `${NAME}`; lists may be written `a, b` or `[a, b]`.

    `by` is the credential or surface that asked for it, for the log.
    """
    setting, path = find(key)
    name = ".".join(path)
    fitting = _checked(setting, name, value, home, os.environ if environ is None else environ)
    if setting.mark.secret and not fitting:
        raise BadValue(f"{name} cannot be empty.", hint=f"hermes config unset {name}")
    log.info("the setting %s is changed by %r", name, by)
    with locked(home.path):
        file = _File(home.config_file, read_bytes(home.config_file))
        if not holds_secret(setting, fitting):
            file.change(file.written_path(path), fitting)
            file.save()
            return Written(name, home.config_file)
        variable = setting.env or file.free_variable(path)
        if setting.env:
            file.cut_all(path)
        else:
            file.change(file.written_path(path), f"${{{variable}}}")
        _change_env(home.env_file, variable, _one_line(setting, name, fitting))
        file.save()
    return Written(name, home.env_file, variable)


def unset_value(home: Home, key: str, *, by: str = "cli") -> list[Written]:
    """Remove a setting from config.yaml, under all its spellings, and from .env; returns where it was."""
    setting, path = find(key)
    if not home.path.is_dir():
        return []
    removed: list[Written] = []
    log.info("the setting %s is unset by %r", ".".join(path), by)
    with locked(home.path):
        file = _File(home.config_file, read_bytes(home.config_file))
        variable = setting.env or file.variable_of(path)
        if file.cut_all(path):
            file.save()
            removed.append(Written(".".join(path), home.config_file))
        if variable in read_env(home.env_file).values:
            _change_env(home.env_file, variable, None)
            removed.append(Written(".".join(path), home.env_file, variable))
    return removed


def without_secrets(data: bytes) -> bytes:
    """A config.yaml without its secrets, unknown names, and comments that look like a secret."""
    path = Path("config.yaml")
    file = _File(path, data)
    survey = Survey(parse_yaml(data, path))
    for unknown in survey.unknown:
        file.change(unknown, _REMOVED)
    for entry in survey.entries:
        if holds_secret(entry.key, entry.raw):
            file.change(entry.written, _REMOVED if _is_text(entry.key) else without_secret_fields(entry.raw))
    lines = file.text.splitlines(keepends=True)
    return "".join(line for line in lines if not _SECRET_COMMENT.match(line)).encode()


def _checked(key: Key, name: str, value: object, home: Home, environ: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        value = _parsed(key, name, value)
    env_file = read_env(home.env_file)
    try:
        whole = substitute(value, lambda variable: environ.get(variable, env_file.values.get(variable)))
        fitting = coerce(key, whole)
    except UnknownVariable:
        # The variable may be set where the server runs; `config check` reports it otherwise.
        return value
    except ValueError:
        raise BadValue(misfit(name, key, value), hint=f"hermes config get {name}") from None
    return fitting if whole == value else value


def _is_text(key: Key) -> bool:
    return key.base in (str, Sequence[str]) and not key.mark.names_variable


def _one_line(key: Key, name: str, secret: object) -> str:
    if not _is_text(key):
        message = f"{name} would hold a secret: name its variable instead, as key_env or ${{NAME}}."
        raise BadValue(message, hint="hermes config env-path")
    text = ",".join(secret) if isinstance(secret, list) else str(secret)
    if any(ord(char) < 32 for char in text):
        raise BadValue(f"{name} must be one line of text.", hint=f"hermes config get {name}")
    return text


def _parsed(key: Key, name: str, text: str) -> Any:
    """A command-line text, parsed as YAML where the setting takes more than a text."""
    looks_nested = get_origin(key.base) is Sequence and text.lstrip().startswith("[")
    if not looks_nested and key.base not in (Any, Sequence[JsonMapping]):
        return text
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise BadValue(f"The value for {name} is not YAML.", hint=f"hermes config set {name} '[a, b]'") from None


# ---- .env


def _change_env(path: Path, variable: str, value: str | None) -> None:
    """Set a variable in its line, or at the end; None removes it. Other lines stay as they are."""
    text = read_bytes(path).decode("utf-8-sig", "surrogateescape")
    lines = [f"{line}\n" for line in text.removesuffix("\n").split("\n")] if text else []
    old = [i for i, line in enumerate(lines) if variable in parse_env(line.encode("utf-8", "surrogateescape")).values]
    if value is not None:
        index = old.pop() if old else len(lines)
        export = "export " if index < len(lines) and lines[index].lstrip().startswith("export") else ""
        lines[index : index + 1] = [f"{export}{variable}={_env_quoted(value)}\n"]
    text = "".join(line for i, line in enumerate(lines) if i not in old)
    write_private(path, text.encode("utf-8", "surrogateescape"))


def _env_quoted(value: str) -> str:
    if _PLAIN_ENV.fullmatch(value):
        return value
    if "'" not in value:
        return f"'{value}'"
    return '"' + re.sub(r'(["\\$`])', r"\\\1", value) + '"'


# ---- config.yaml


class _File:
    def __init__(self, path: Path, data: bytes) -> None:
        document = parse_yaml(data, path)
        for twice, line in document.twice:
            where = f"{path.name} line {line}"
            raise ConfigError(
                f"{'.'.join(twice)} is there twice; take one out first.", where=where, hint="hermes config edit"
            )
        self._path = path
        self._data = document.data
        self._before = data
        self.text = data.decode("utf-8-sig")

    def save(self) -> None:
        if self.text.encode() != self._before:
            write_private(self._path, self.text)

    def _entries(self) -> list[Entry]:
        return entries(parse_yaml(self.text.encode(), self._path))[0]

    def written_path(self, path: KeyPath) -> KeyPath:
        """Where a setting is in this file, or should be."""
        for entry in self._entries():
            if entry.path == path:
                return entry.written
        for short, name in SHORT_FORMS.items():
            if name == ".".join(path) and not isinstance(self._data.get(short), dict):
                return (short,)
        return path

    def free_variable(self, path: KeyPath) -> str:
        """A variable name for this setting's secret that no other setting uses."""
        others = {str(entry.raw) for entry in self._entries() if entry.path != path}
        variable = "HERMES_" + re.sub(r"[^A-Z0-9]+", "_", "_".join(path).upper())
        while f"${{{variable}}}" in others:
            variable += "_2"
        return variable

    def variable_of(self, path: KeyPath) -> str:
        """The variable made for this setting's secret; empty where the value is something else."""
        variable = self.free_variable(path)
        return variable if any(e.path == path and e.raw == f"${{{variable}}}" for e in self._entries()) else ""

    def cut_all(self, path: KeyPath) -> bool:
        before = self.text
        while written := next((entry.written for entry in self._entries() if entry.path == path), None):
            self.change(written, _REMOVED)
        return self.text != before

    def change(self, path: KeyPath, value: object) -> None:
        """Change one entry of the text, and verify that nothing else has changed."""
        target = _changed(self._data, path, value)
        text = replace_entry(self.text, path, target, remove=value is _REMOVED)
        try:
            fits = _pruned(parse_yaml(text.encode(), self._path).data) == _pruned(target)
        except ConfigError:
            fits = False
        if not fits:
            message = f"{'.'.join(path)} cannot be changed without touching other lines."
            raise ConfigError(message, where=self._path.name, hint="hermes config edit")
        self._data, self.text = target, text


def _changed(data: JsonObject, path: KeyPath, value: object) -> JsonObject:
    """A copy of the data with one entry set or removed; a short form on the way becomes its long form."""
    target = copy.deepcopy(data)
    node = target
    for depth, part in enumerate(path[:-1], start=1):
        below = node.get(part)
        if not isinstance(below, dict):
            long = SHORT_FORMS.get(".".join(path[:depth]))
            below = {long.split(".")[-1]: below} if long and below is not None else {}
            node[part] = below
        node = below
    if value is _REMOVED:
        node.pop(path[-1], None)
    else:
        node[path[-1]] = value
    return target


def _pruned(value: object) -> Any:
    """Without empty sections, which mean the same as absent ones."""
    if not isinstance(value, dict):
        return value
    pruned = {name: _pruned(below) for name, below in value.items()}
    return {name: below for name, below in pruned.items() if below not in (None, {})}
