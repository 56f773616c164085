"""The settings by their dotted names: the table of keys that follows from the schema, and looking names up in it."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from msgspec import Meta

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.settings.schema import Mark, Root, Section

KeyPath = tuple[str, ...]
T = TypeVar("T")

ANY = "*"
_INT_MAX = 2**53
# What fits a setting, by its type; `None` is the type of one that takes its choices only.
_EXPECTED: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text, in quotes where it looks like a number or a word of YAML",
    Sequence[str]: "a list of texts",
    Sequence[Any]: "a list",
    Sequence[JsonMapping]: "a list of mappings",
    Any: "any value",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One setting. `*` in its path stands for any one name.

    `type` is what msgspec converts its values to, and `base` that type without its limits. `choices` are words that the
    value may be instead; with no type they are all it may be.
    """

    path: KeyPath
    default: Any
    base: Any
    type: Any
    meta: Meta
    choices: tuple[str, ...]
    mark: Mark
    env: str

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def is_pattern(self) -> bool:
        return ANY in self.path

    @property
    def expected(self) -> str:
        choices = ", ".join(choice or '""' for choice in self.choices)
        if self.base is None:
            return f"one of {choices}"
        text = "the name of an environment variable" if self.mark.names_variable else _EXPECTED[self.base]
        low, high = self.meta.ge, self.meta.le
        if high is not None and high < _INT_MAX:
            text += f" from {low:.15g} to {high:.15g}"
        elif low is not None:
            text += f" of at least {low:.15g}"
        return f"{text}, or {choices}" if choices else text


def _parts(hint: object) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        yield from _parts(inner)
        yield from notes
    elif get_origin(hint) in (Union, types.UnionType):
        for inner in get_args(hint):
            yield from _parts(inner)
    else:
        yield hint


def _key(path: KeyPath, hint: object, default: object) -> Key:
    base, choices, meta, mark = None, (), Meta(), Mark()
    for part in _parts(hint):
        if isinstance(part, Meta):
            meta = part
        elif isinstance(part, Mark):
            mark = part
        elif get_origin(part) is Literal:
            choices = get_args(part)
        elif part is not type(None):
            base = part
    if base is int and meta.le is None:
        meta = Meta(ge=meta.ge, le=_INT_MAX)
    has_limits = (meta.ge, meta.le, meta.pattern) != (None, None, None)
    # All of the server's settings that fit into one line of text can come from the environment.
    of_server = path[0] == "api_server" and ANY not in path and base != Sequence[JsonMapping]
    return Key(
        path=path,
        default=None if mark.follows else list(default) if isinstance(default, tuple) else default,
        base=base,
        type=Annotated[base, meta] if has_limits else base,
        meta=meta,
        choices=choices,
        mark=mark,
        env="_".join(path).upper() if of_server else mark.env,
    )


def _free(hint: object) -> Any:
    """The type of what stands below the free names of a section; None for anything else."""
    return get_args(hint)[1] if get_origin(hint) is Mapping else None


def _is_section(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def _keys(hint: object, path: KeyPath, default: object) -> Iterator[Key]:
    if _is_section(hint):
        for name, below in hint.__annotations__.items():
            yield from _keys(below, (*path, name), getattr(default, name))
    elif (free := _free(hint)) is not None:
        yield from _keys(free, (*path, ANY), free() if _is_section(free) else None)
    else:
        yield _key(path, hint, default)


def build(values: JsonMapping, section: type[Section] = Root) -> JsonObject:
    """The fields of a section: its values with everything below them in the schema's types, which are not checked."""
    types = section.__annotations__
    return {name: _built(types[name], value) for name, value in values.items()}


def _built(hint: Any, value: Any) -> Any:
    if _is_section(hint):
        return hint(**build(value, hint))
    free = _free(hint)
    return value if free is None else {name: _built(free, below) for name, below in value.items()}


KEYS: tuple[Key, ...] = tuple(_keys(Root, (), Root()))

# A section that may be given as one value, and the setting which that value is.
SHORT_FORMS: Mapping[str, str] = {"model": "model.default"}
# Other places where `api_server` may stand in the file, in order; the first that holds a setting wins.
SPELLINGS: tuple[str, ...] = (
    "api_server",
    "gateway.api_server",
    "platforms.api_server",
    "platforms.api_server.extra",
    "gateway.platforms.api_server",
    "gateway.platforms.api_server.extra",
)
# A server does not start with a bad value here; anything else bad is a warning and the default.
REFUSED_WHEN_BAD = ("api_server.key", "api_server.keys")


Tree = dict[str, "Tree | Key"]


def _build_tree() -> Tree:
    tree: Tree = {}
    for key in KEYS:
        node = tree
        for part in key.path[:-1]:
            below = node.setdefault(part, {})
            assert isinstance(below, dict), key.name
            node = below
        node[key.path[-1]] = key
    return tree


TREE = _build_tree()
_PLAIN = {key.name: key for key in KEYS if not key.is_pattern}


def canonical(path: KeyPath) -> KeyPath:
    """The path with another spelling of `api_server`, or a short form, put right."""
    for spelling in reversed(SPELLINGS):
        parts = tuple(spelling.split("."))
        if path[: len(parts)] == parts:
            return ("api_server", *path[len(parts) :])
    short = SHORT_FORMS.get(".".join(path))
    return tuple(short.split(".")) if short else path


def at(path: KeyPath) -> Tree | Key | None:
    """The setting or the section at a path of names; None where there is neither."""
    node: Tree | Key | None = TREE
    for part in path:
        if not isinstance(node, dict):
            return None
        node = node.get(part) or node.get(ANY)
    return node


@functools.cache
def _patterns() -> tuple[tuple[Key, re.Pattern[str]], ...]:
    keys = sorted((key for key in KEYS if key.is_pattern), key=lambda key: -len(key.path))
    return tuple((key, re.compile(re.escape(key.name).replace(r"\*", "(.+?)"))) for key in keys)


def find(name: str) -> tuple[Key, KeyPath] | None:
    """The setting of a dotted name, and its path. Where a name is free it may itself hold dots, as a model's does."""
    name = ".".join(canonical(tuple(name.split("."))))
    if name in _PLAIN:
        return _PLAIN[name], _PLAIN[name].path
    for key, pattern in _patterns():
        if match := pattern.fullmatch(name):
            free = iter(match.groups())
            return key, tuple(next(free) if part == ANY else part for part in key.path)
    return None


def nearest(path: KeyPath) -> str:
    """The known setting or section that looks most like an unknown one, or nothing."""
    import difflib

    wanted = ".".join(canonical(path))
    found = difflib.get_close_matches(wanted, sorted(set(_candidates(path))), n=1, cutoff=0.6)
    return found[0] if found else ""


def _candidates(path: KeyPath) -> Iterator[str]:
    for key in KEYS:
        for end in range(1, len(key.path) + 1):
            # A free name is taken to be meant as it was written.
            parts = [path[i] if part == ANY and i < len(path) else part for i, part in enumerate(key.path[:end])]
            if ANY not in parts:
                yield ".".join(parts)
