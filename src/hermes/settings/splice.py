"""Changes one entry in the text of a YAML file: its lines are rewritten, all others stay byte for byte."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from hermes.core.json_types import JsonObject
from hermes.settings.files import make_loader
from hermes.settings.keys import KeyPath

if TYPE_CHECKING:
    import yaml

    Pair = tuple[yaml.Node, yaml.Node]


def replace_entry(text: str, path: KeyPath, target: JsonObject, *, remove: bool) -> str:
    """The text with new lines for the innermost block-style entry that holds the change.

    `target` is the whole new data; with `remove` it lacks the entry at `path`.
    """
    if text and not text.endswith("\n"):
        text += "\n"
    lines = text.splitlines(keepends=True)
    node = _block(make_loader(text).get_single_node())
    if node is None:
        # Only comments, or flow style.
        comments = [] if any(line.strip() and not line.lstrip().startswith("#") for line in lines) else lines
        return "".join(comments + [line for name, value in target.items() for line in _emitted(name, value, 0)])
    last = len(path) - 1
    depth = 0
    while (pair := _pair(node, path[depth])) and depth < last and (below := _block(pair[1], after=pair[0])):
        node, target, depth = below, target[path[depth]], depth + 1
    column = node.value[0][0].start_mark.column
    new = [] if remove and depth == last else _emitted(path[depth], target[path[depth]], column)
    if pair is None:
        start = end = _end_line(lines, node.value[-1], column)
    else:
        start, end = pair[0].start_mark.line, _end_line(lines, pair, column)
        new = _with_comment(new, lines[start], pair)
    return "".join(lines[:start] + new + lines[end:])


def _pair(node: yaml.MappingNode, name: str) -> Pair | None:
    return next(((key, value) for key, value in node.value if key.value == name), None)


def _block(node: yaml.Node | None, after: yaml.Node | None = None) -> yaml.MappingNode | None:
    """The node, if it is a mapping with its own lines; one that starts before its key is an alias."""
    import yaml

    if not isinstance(node, yaml.MappingNode) or node.flow_style or not node.value:
        return None
    return node if after is None or node.start_mark.index > after.start_mark.index else None


def _end_line(lines: list[str], pair: Pair, column: int) -> int:
    """The line after an entry. Comments below it that are not indented deeper belong to what follows."""
    import yaml

    key, value = pair
    if value.start_mark.index < key.start_mark.index:
        return int(key.end_mark.line) + 1
    if isinstance(value, yaml.CollectionNode):
        ends_in_line = bool(value.flow_style)
    else:
        ends_in_line = not isinstance(value, yaml.ScalarNode) or value.style not in ("|", ">")
    if ends_in_line:
        return int(value.end_mark.line) + 1
    end = min(int(value.end_mark.line), len(lines))
    while end > key.start_mark.line + 1:
        line = lines[end - 1]
        bare = line.lstrip()
        if bare and not (bare.startswith("#") and len(line) - len(bare) <= column):
            break
        end -= 1
    return end


def _with_comment(new: list[str], old: str, pair: Pair) -> list[str]:
    """Keep the comment at the end of the key's line."""
    key, value = pair
    comment = ""
    if value.end_mark.line == key.end_mark.line:
        comment = old[value.end_mark.column :]
    elif value.start_mark.line > key.end_mark.line:
        comment = old[key.end_mark.column + 1 :]
    if new and comment.lstrip().startswith("#"):
        return [new[0].rstrip("\n") + comment, *new[1:]]
    return new


def _emitted(name: str, value: object, column: int) -> list[str]:
    from ruamel.yaml import YAML

    writer = YAML()
    writer.width = 1_000_000
    writer.indent(mapping=2, sequence=4, offset=2)
    out = io.StringIO()
    writer.dump({name: _quoted(value)}, out)
    return [" " * column + line for line in out.getvalue().splitlines(keepends=True)]


def _quoted(value: object) -> Any:
    """Quote texts that a YAML 1.1 reader would take for something else."""
    import yaml
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    if isinstance(value, dict):
        return {name: _quoted(below) for name, below in value.items()}
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    if not isinstance(value, str):
        return value
    try:
        plain = "\n" not in value and yaml.safe_load(value) == value
    except (yaml.YAMLError, ValueError):
        plain = False
    return value if plain else DoubleQuotedScalarString(value)
