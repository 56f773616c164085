"""Parses config.yaml and .env into plain data with the line of every entry, and errors that say where."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes.core.errors import ConfigError
from hermes.core.json_types import JsonObject
from hermes.settings.keys import KeyPath

if TYPE_CHECKING:
    import yaml

FILE_BYTES_MAX = 1_048_576
DEPTH_MAX = 32
NODES_MAX = 100_000
_MERGE_TAG = "tag:yaml.org,2002:merge"
_NULL_TAG = "tag:yaml.org,2002:null"
_LONG_QUOTE = re.compile(r"'[^']{4,}'|\"[^\"]{4,}\"")
_ENV_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=(.*)")
_SINGLE = re.compile(r"'([^']*)'\s*(?:#.*)?")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(slots=True)
class Document:
    """`lines`: where an entry is; `twice`: entries that occur more than once."""

    name: str
    data: JsonObject = field(default_factory=dict, repr=False)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    twice: list[tuple[KeyPath, int]] = field(default_factory=list)


@dataclass(slots=True)
class EnvFile:
    """.env: its variables, the line of each, and the invalid lines."""

    values: dict[str, str] = field(default_factory=dict, repr=False)
    lines: dict[str, int] = field(default_factory=dict)
    bad_lines: list[int] = field(default_factory=list)


def read_bytes(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", where=path.name, hint=f"ls -l {path}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is longer than {FILE_BYTES_MAX} bytes.", where=path.name, hint="hermes config path")
    return data


def read_yaml(path: Path) -> Document:
    data = read_bytes(path)
    return parse_yaml(data, path) if data else Document(path.name)


def parse_yaml(data: bytes, path: Path) -> Document:
    """Raises ConfigError with line and column for what is not YAML, or not a mapping of settings."""
    import yaml

    text = _decode(data, path)
    document = Document(path.name)
    try:
        loader = make_loader(text)
        node = loader.get_single_node()
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _NULL_TAG):
            return document
        if not isinstance(node, yaml.MappingNode):
            raise _unusable(path, node.start_mark.line + 1, 1, "settings have the form 'name: value'")
        document.data = _Builder(loader, document, path).value(node, ())
        return document
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise _unusable(path, line, column, error.problem or "this is not YAML") from None
    except yaml.YAMLError as error:
        before = text[: getattr(error, "position", 0)]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise _unusable(path, line, column, "there is a character that YAML does not allow") from None
    except RecursionError:
        raise _unusable(path, 1, 1, "it is nested too deeply") from None


def make_loader(text: str) -> yaml.CSafeLoader | yaml.SafeLoader:
    import yaml

    return (yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)(text)


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        raise _unusable(path, line, column, "the text is not UTF-8") from None


def _unusable(path: Path, line: int, column: int, problem: str) -> ConfigError:
    # Quoted text comes from the file, and may be a password that starts with a YAML character.
    problem = _LONG_QUOTE.sub("'…'", problem)
    return ConfigError(
        f"{path} cannot be read as YAML: {problem}.",
        where=f"{path.name} line {line}, column {column}",
        hint="hermes config edit",
    )


class _Builder:
    """Plain data from YAML nodes. Counting nodes also stops aliases that multiply or form a cycle."""

    def __init__(self, loader: yaml.CSafeLoader | yaml.SafeLoader, document: Document, path: Path) -> None:
        self._loader = loader
        self._document = document
        self._path = path
        self._count = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        import yaml

        self._count += 1
        if len(path) > DEPTH_MAX or self._count > NODES_MAX:
            raise _unusable(self._path, node.start_mark.line + 1, 1, "it is nested too deeply")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(i))) for i, item in enumerate(node.value)]
        try:
            return self._loader.construct_object(node)
        except ValueError:
            # Not a valid date or number after all: text.
            return node.value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> JsonObject:
        own_count = sum(key.tag != _MERGE_TAG for key, _ in node.value)
        self._loader.flatten_mapping(node)
        merged_count = len(node.value) - own_count
        mapping: JsonObject = {}
        own_names: set[str] = set()
        for i, (key, below) in enumerate(node.value):
            name = key.value if isinstance(key.value, str) else "?"
            entry = (*path, name)
            line = key.start_mark.line + 1
            if name in own_names:
                self._document.twice.append((entry, line))
            if i >= merged_count:
                own_names.add(name)
            mapping[name] = self.value(below, entry)
            self._document.lines[entry] = line
        return mapping


def read_env(path: Path) -> EnvFile:
    return parse_env(read_bytes(path))


def parse_env(data: bytes) -> EnvFile:
    """NAME=value by line, with `export`, quotes and comments. A later line wins, as in a shell."""
    parsed = EnvFile()
    text = data.decode("utf-8-sig", "surrogateescape")
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _ENV_LINE.fullmatch(line)
        value = _env_value(match[2]) if match else None
        if match is None or value is None:
            parsed.bad_lines.append(number)
            continue
        parsed.values[match[1]] = value
        parsed.lines[match[1]] = number
    return parsed


def _env_value(raw: str) -> str | None:
    text = raw.strip()
    if text.startswith("'"):
        match = _SINGLE.fullmatch(text)
        return match[1] if match else None
    if text.startswith('"'):
        match = _DOUBLE.fullmatch(text)
        return _ESCAPE.sub(lambda m: _ESCAPES.get(m[1], m[1]), match[1]) if match else None
    # A # starts a comment after white space only: a password may start with it.
    return re.split(r"\s#", raw, maxsplit=1)[0].strip()
