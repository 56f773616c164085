"""Settings: an immutable snapshot of flags, environment, .env and config.yaml, with the source of every value."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import msgspec

from hermes.core.errors import ConfigError
from hermes.core.home import Home
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.settings.check import (
    Problem,
    UnknownVariable,
    coerce,
    entries,
    has_reference,
    masked,
    misfit,
    remedy,
    secrets_inside,
    substitute,
)
from hermes.settings.files import Document, EnvFile, read_bytes, read_env, read_yaml
from hermes.settings.keys import (
    KEYS,
    REFUSED_WHEN_BAD,
    Key,
    KeyPath,
    UnknownKey,
    at,
    build,
    closest,
    did_you_mean,
    find,
    nest,
)
from hermes.settings.schema import Root
from hermes.settings.write import BadValue, Written, set_value, unset_value

__all__ = [
    "REFUSED_WHEN_BAD",
    "BadValue",
    "ConfigError",
    "Problem",
    "Settings",
    "Source",
    "UnknownKey",
    "Value",
    "Written",
    "load",
    "reload_if_changed",
    "set_value",
    "unset_value",
]

Source = Literal["flag", "environment", ".env", "file", "default"]
Stamp = tuple[tuple[int, int, int] | None, ...]
_SECRET_CHARS_MIN = 8
_URL_PASSWORD = re.compile(r"://(?:[^/@\s:]*:)?([^/@\s]+)@")
_SERVER_PREFIX = "API_SERVER_"


@dataclass(frozen=True, slots=True)
class Value:
    """A value and its source: the kind, and the line or variable."""

    value: Any = field(repr=False)
    source: Source = "default"
    where: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Inputs:
    """What the settings were loaded from, for reloading."""

    flags: JsonMapping
    environ: Mapping[str, str]
    env_file: EnvFile
    safe_mode: bool


class Settings(Root, frozen=True, eq=False, kw_only=True):
    """All settings of one home, section by section: `settings.agent.max_turns`. Immutable: a changed file gives a new
    object."""

    home: Home
    problems: tuple[Problem, ...]
    origins: Mapping[KeyPath, Value]
    inputs: Inputs
    stamp: Stamp

    def __repr__(self) -> str:
        return f"Settings({self.home.profile}, {len(self.origins)} values, {len(self.problems)} problems)"

    def origin(self, name: str) -> Value:
        """The value of a setting with its source. Raises UnknownKey."""
        key, path = find(name)
        return self.origins.get(path) or Value(key.default)

    def source(self, name: str) -> Source:
        return self.origin(name).source

    def as_dict(self) -> JsonObject:
        """A nested copy."""
        fields = {name: getattr(self, name) for name in Root.__struct_fields__}
        return msgspec.to_builtins(fields, builtin_types=(bytes, datetime.date))  # type: ignore[no-any-return]

    def items(self) -> Iterator[tuple[str, Key, Value]]:
        """Every setting with its value, in the order of the table; free names only where they are used."""
        order = {key.name: i for i, key in enumerate(KEYS)}
        rows = [(key, path, value) for path, value in self.origins.items() if isinstance(key := at(path), Key)]
        for key, path, value in sorted(rows, key=lambda row: (order[row[0].name], row[1])):
            yield ".".join(path), key, value

    def shown(self, name: str) -> Any:
        """The value with secrets masked."""
        return masked(find(name)[0], self.origin(name).value)

    def variable(self, name: str) -> str | None:
        """An environment variable: of the process as it is now, else of .env."""
        return self.inputs.environ.get(name, self.inputs.env_file.values.get(name))

    def secret_values(self) -> frozenset[str]:
        """What must never be shown, from 8 characters on: everything in .env, and everything called a secret in the
        settings, the environment and the files named auth."""
        texts = {*self.inputs.env_file.values.values(), *secrets_inside(dict(self.inputs.environ))}
        for path in self.home.path.glob("auth*.json"):
            with contextlib.suppress(ConfigError, ValueError):
                texts.update(secrets_inside(json.loads(read_bytes(path))))
        for name, key, value in self.items():
            of_free_name = {name.rpartition(".")[2]: value.value} if key.base is Any else value.value
            texts.update(secrets_inside(of_free_name, key.mark.secret))
            if key.mark.names_variable and value.value:
                texts.add(self.variable(value.value) or "")
        for url in (self.bus.url, self.storage.url):
            texts.update(_URL_PASSWORD.findall(url))
        return frozenset(text for text in texts if len(text) >= _SECRET_CHARS_MIN)

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")

    def require_valid(self, *names: str) -> None:
        """Raise ConfigError for the first error; with names, only for one in those settings."""
        for problem in self.errors:
            if not names or any(f"{name}.".startswith(f"{problem.key}.") for name in names):
                raise ConfigError(problem.message, where=problem.where, hint=problem.hint)


# ---- loading


def load(
    home: Home,
    flags: JsonMapping | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    safe_mode: bool = False,
) -> Settings:
    """Raises ConfigError only for an unreadable file; other faults are `problems`.

    `flags` maps setting names to values, None where a flag was not given. `safe_mode` ignores config.yaml.
    """
    stamp = _stamp(home)
    env_file = read_env(home.env_file)
    document = Document(home.config_file.name) if safe_mode else read_yaml(home.config_file)
    set_flags = {name: value for name, value in (flags or {}).items() if value is not None}
    inputs = Inputs(set_flags, os.environ if environ is None else environ, env_file, safe_mode)
    loader = _Loader(home, inputs)
    loader.from_file(document)
    loader.from_env_file()
    loader.from_variables(inputs.environ, "environment", {})
    loader.from_flags()
    loader.follow()
    tree: JsonObject = {}
    for path, value in loader.values.items():
        nest(tree, path, value.value)
    return Settings(
        home=home, problems=tuple(loader.problems), origins=loader.values, inputs=inputs, stamp=stamp, **build(tree)
    )


def reload_if_changed(settings: Settings) -> tuple[Settings, str | None]:
    """The settings as the files are now, and a notice if there is something to say.

    A file that is unreadable or has a new error changes nothing: the last good settings stay.
    """
    stamp = _stamp(settings.home)
    if stamp == settings.stamp:
        return settings, None
    unchanged = msgspec.structs.replace(settings, stamp=stamp)
    inputs = settings.inputs
    try:
        fresh = load(settings.home, inputs.flags, inputs.environ, safe_mode=inputs.safe_mode)
    except ConfigError as error:
        return unchanged, f"The settings stay as they were. {error}"
    old_errors = {problem.key for problem in settings.errors}
    for problem in fresh.errors:
        if problem.key not in old_errors:
            return unchanged, f"The settings stay as they were. {problem}"
    return fresh, None


def _stamp(home: Home) -> Stamp:
    stamps: list[tuple[int, int, int] | None] = []
    for path in _files(home):
        try:
            status = os.stat(path)
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return stamps[0], stamps[1]


@lru_cache(maxsize=64)
def _files(home: Home) -> tuple[str, str]:
    return str(home.config_file), str(home.env_file)


class _Loader:
    """Applies the sources over the defaults, the weakest first."""

    def __init__(self, home: Home, inputs: Inputs) -> None:
        self._home = home
        self._inputs = inputs
        self.problems: list[Problem] = []
        self.values = {key.path: self._default(key) for key in KEYS if not key.is_pattern}

    def _default(self, key: Key) -> Value:
        default = key.default
        return Value(default.replace("<home>", str(self._home.path)) if isinstance(default, str) else default)

    def _put(self, key: Key, path: KeyPath, raw: object, source: Source, problem: Problem) -> None:
        """`problem` is reported if the value does not fit; its message and some hints are made here."""
        written = raw
        try:
            if source == "file":
                inputs = self._inputs
                raw = substitute(raw, lambda name: inputs.environ.get(name, inputs.env_file.values.get(name)))
            self.values[path] = Value(coerce(key, raw), source, problem.where)
            return
        except UnknownVariable as unknown:
            message = f"{problem.key} names the variable {unknown}, which is not set."
            problem = replace(problem, message=message, hint=f"export {unknown}=…")
        except ValueError:
            # A variable's value may be a secret: the message shows the text as written.
            problem = replace(problem, message=misfit(problem.key, key, written))
        self.problems.append(problem)
        self.values[path] = self._default(key)

    def from_file(self, document: Document) -> None:
        settings, problems = entries(document)
        self.problems.extend(problems)
        for entry in settings:
            name = ".".join(entry.path)
            hint = "hermes config edit" if has_reference(entry.raw) else remedy(name, entry.key)
            problem = Problem("error", name, entry.line, "", where=f"{document.name} line {entry.line}", hint=hint)
            self._put(entry.key, entry.path, entry.raw, "file", problem)
        self.problems.sort(key=lambda problem: problem.line or 0)

    def from_env_file(self) -> None:
        env_file, name = self._inputs.env_file, self._home.env_file.name
        for line in env_file.bad_lines:
            message = "this line is not NAME=value and is left out."
            self.problems.append(
                Problem("warn", "", line, message, where=f"{name} line {line}", hint="hermes config env-path")
            )
        lines = {variable: f"{name} line {line}" for variable, line in env_file.lines.items()}
        self.from_variables(env_file.values, ".env", lines)

    def from_variables(self, variables: Mapping[str, str], source: Source, lines: Mapping[str, str]) -> None:
        keys = {key.env: key for key in KEYS if key.env}
        for variable, key in keys.items():
            # An empty variable means unset, as in container files.
            if text := variables.get(variable):
                hint = "hermes config env-path" if source == ".env" else f"unset {variable}"
                problem = Problem("error", key.name, None, "", where=lines.get(variable, variable), hint=hint)
                self._put(key, key.path, text, source, problem)
        for variable in variables:
            if variable.startswith(_SERVER_PREFIX) and variable not in keys:
                near = closest(variable, keys)
                message = f"{variable} sets nothing.{did_you_mean(near)}"
                where = lines.get(variable, "environment")
                self.problems.append(Problem("warn", variable, None, message, near, where))

    def from_flags(self) -> None:
        for name, value in self._inputs.flags.items():
            key, path = find(name)
            self._put(key, path, value, "flag", Problem("error", ".".join(path), None, "", where="command line"))

    def follow(self) -> None:
        """Give unset settings the value of the one they follow."""
        for key in KEYS:
            if key.mark.follows and self.values[key.path].source == "default":
                path = tuple(key.mark.follows.split("."))
                self.values[key.path] = self.values.get(path, self.values[key.path])
