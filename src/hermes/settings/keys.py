"""The table of settings by dotted name, derived from the schema, and looking names up in it."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import Meta

from hermes.core.errors import ConfigError
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.settings.schema import Root
from hermes.settings.schema_types import Mark, Section

KeyPath = tuple[str, ...]

ANY = "*"
_INT_MAX = 2**53
# Descriptions of types, for error messages.
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


class UnknownKey(ConfigError):
    exit_code = 5

    def __init__(self, name: str) -> None:
        self.nearest = nearest(tuple(name.split(".")))
        super().__init__(f"{name} is not a setting.{did_you_mean(self.nearest)}", hint="hermes config show")


@dataclass(frozen=True, slots=True)
class Key:
    """One setting. `*` in its path stands for any one name.

    `type` is what msgspec converts its values to, and `base` that type without its limits. `choices` are texts that the
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
        if self.meta.max_length is not None:
            text += f" with at most {self.meta.max_length} entries"
        if high is not None and high < _INT_MAX:
            text += f" from {low:.15g} to {high:.15g}"
        elif low is not None:
            text += f" of at least {low:.15g}"
        return f"{text}, or {choices}" if choices else text


Tree = dict[str, "Tree | Key"]


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


def _merged(mark: Mark, other: Mark) -> Mark:
    """The marks of a field's type and of the field itself, whose own come first."""
    given = {name: value for name, value in asdict(other).items() if value != getattr(Mark(), name)}
    return replace(mark, **given)


def _key(path: KeyPath, hint: object, default: object) -> Key:
    base, choices, meta, mark = None, (), Meta(), Mark()
    for part in _parts(hint):
        if isinstance(part, Meta):
            meta = part
        elif isinstance(part, Mark):
            mark = _merged(mark, part)
        elif get_origin(part) is Literal:
            choices = get_args(part)
        elif part is not type(None):
            base = part
    if base is int and meta.le is None:
        meta = Meta(ge=meta.ge, le=_INT_MAX)
    has_limits = meta != Meta()
    # Every server setting that fits into one line has an environment variable.
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
    """The type below the free names of a section; None for anything else."""
    return get_args(hint)[1] if get_origin(hint) is Mapping else None


def _is_section(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def _tree(hint: Any, path: KeyPath, default: object) -> Tree | Key:
    if _is_section(hint):
        return {
            name: _tree(below, (*path, name), getattr(default, name)) for name, below in hint.__annotations__.items()
        }
    if (free := _free(hint)) is not None:
        return {ANY: _tree(free, (*path, ANY), free() if _is_section(free) else None)}
    return _key(path, hint, default)


def _leaves(node: Tree | Key) -> Iterator[Key]:
    if isinstance(node, Key):
        yield node
    else:
        for below in node.values():
            yield from _leaves(below)


def build(values: JsonMapping, section: type[Section] = Root) -> JsonObject:
    """The fields of a section in the schema's types, unchecked."""
    types = section.__annotations__
    return {name: _built(types[name], value) for name, value in values.items()}


def _built(hint: Any, value: Any) -> Any:
    if _is_section(hint):
        return hint(**build(value, hint))
    free = _free(hint)
    return value if free is None else {name: _built(free, below) for name, below in value.items()}


TREE = _tree(Root, (), Root())
KEYS = tuple(_leaves(TREE))
_PLAIN = {key.name: key for key in KEYS if not key.is_pattern}

# A section that may be written as one value, and that value's setting.
SHORT_FORMS: Mapping[str, str] = {"model": "model.default"}
# Other places of `api_server` in the file; the first that has a setting wins.
SPELLINGS: tuple[KeyPath, ...] = (
    ("api_server",),
    ("gateway", "api_server"),
    ("platforms", "api_server"),
    ("platforms", "api_server", "extra"),
    ("gateway", "platforms", "api_server"),
    ("gateway", "platforms", "api_server", "extra"),
)
# A server does not start with an invalid value here; elsewhere it warns and uses the default.
REFUSED_WHEN_BAD = ("api_server.key", "api_server.keys", "bus.url", "bus.namespace")


def canonical(path: KeyPath) -> KeyPath:
    """The path with another spelling of `api_server`, or a short form, replaced."""
    for spelling in reversed(SPELLINGS):
        if path[: len(spelling)] == spelling:
            return ("api_server", *path[len(spelling) :])
    short = SHORT_FORMS.get(".".join(path))
    return tuple(short.split(".")) if short else path


def at(path: KeyPath) -> Tree | Key | None:
    """The setting or section at a path; None where there is neither."""
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


def find(name: str) -> tuple[Key, KeyPath]:
    """The setting of a dotted name, and its path. A free name may itself hold dots, as a model's does.

    Raises UnknownKey.
    """
    dotted = ".".join(canonical(tuple(name.split("."))))
    if dotted in _PLAIN:
        return _PLAIN[dotted], _PLAIN[dotted].path
    for key, pattern in _patterns():
        if match := pattern.fullmatch(dotted):
            free = iter(match.groups())
            return key, tuple(next(free) if part == ANY else part for part in key.path)
    raise UnknownKey(name)


def nearest(path: KeyPath) -> str:
    """The most similar setting or section to an unknown one, or an empty string."""
    candidates: set[str] = set()
    for key in KEYS:
        # A free name is taken as written.
        parts = [path[i] if part == ANY and i < len(path) else part for i, part in enumerate(key.path)]
        candidates.update(".".join(parts[:end]) for end in range(1, len(parts) + 1) if ANY not in parts[:end])
    return closest(".".join(canonical(path)), sorted(candidates))


def closest(name: str, candidates: Iterable[str]) -> str:
    import difflib

    return "".join(difflib.get_close_matches(name, candidates, n=1, cutoff=0.6))


def did_you_mean(name: str) -> str:
    return f" Did you mean {name}?" if name else ""


def nest(tree: JsonObject, path: KeyPath, value: object) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
