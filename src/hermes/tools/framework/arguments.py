"""A call's name and arguments: repaired where that is safe, validated, or refused. Pure."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from urllib.parse import unquote

from hermes.core import limits
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.text import whole_text

if TYPE_CHECKING:
    from jsonschema_rs import ValidationError, Validator

Schema = JsonMapping
_ANCHORS, _REFERENCES = ("$anchor", "$dynamicAnchor"), ("$ref", "$dynamicRef", "$recursiveRef")
# An unterminated string takes the rest: it would otherwise be scanned again from every quote in it.
_STRING = re.compile(r'("(?:[^"\\]++|\\.?)*+(?:"|\Z))', re.S)

_TYPE_NAMES = {type(None): "null", list: "an array", str: "a string", bool: "a boolean"}
# What models add to a tool's name: a namespace, the number of the call, the word "tool".
_ADDED = re.compile(r"^(?:functions?|tools?|default_api)[.:/]+|(?:[-_. ]?tool)?(?::\d{1,4})?$", re.I)


@dataclass(frozen=True, slots=True)
class Parsed:
    """`ok` with a value; `cut` where the text ends too early; `broken` with a description of the error."""

    state: Literal["ok", "cut", "broken"]
    value: JsonObject | None = None
    fault: str = ""


def parse(text: str) -> Parsed:
    """Arguments as an object. Only trailing commas, missing closing brackets after a complete value and raw control
    characters in strings are repaired: nothing that could change the meaning."""
    try:
        return _object(json.loads(text, strict=False))
    except ValueError as error:
        fault = f"not valid JSON: {error}"
    except RecursionError:
        return Parsed("broken", fault="nested too deeply")
    closing, in_string, awaiting = _scan(text)
    if in_string or awaiting:
        return Parsed("cut", fault="the arguments end in the middle of a value")
    pieces = _STRING.split(re.sub(r",(\s*)$", r"\1", text) + closing)  # strings are those with an odd number
    repaired = "".join(piece if at % 2 else re.sub(r",(\s*[}\]])", r"\1", piece) for at, piece in enumerate(pieces))
    try:
        return _object(json.loads(repaired, strict=False))
    except (ValueError, RecursionError):
        return Parsed("broken", fault=fault)


def _object(value: object) -> Parsed:
    if isinstance(value, dict):
        return Parsed("ok", value)
    if isinstance(value, str):  # a doubly encoded object
        try:
            inner = json.loads(value, strict=False)
        except ValueError:
            inner = None
        if isinstance(inner, dict):
            return Parsed("ok", inner)
    return Parsed("broken", fault=f"an object is wanted, not {_TYPE_NAMES.get(type(value), 'a number')}")


def _scan(text: str) -> tuple[str, bool, bool]:
    """The missing closing brackets; whether the text ends inside a string; whether it ends before a value."""
    stack: list[str] = []
    in_string = escaped = False
    last = ""
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string, last = False, '"'
            continue
        if char == '"':
            in_string = True
        elif char in "{[":
            stack.append("}" if char == "{" else "]")
        elif char in "}]" and stack:
            stack.pop()
        if not char.isspace():
            last = char
    # A bare word at the end may be the beginning of a longer number or of `true`; a quote may close a key.
    open_word = bool(stack) and re.fullmatch(r"[\w.+-]", text.rstrip()[-1:]) is not None
    open_key = last == '"' and stack[-1:] == ["}"] and re.search(r'[{,]\s*"(?:[^"\\]|\\.)*"\s*$', text) is not None
    return "".join(reversed(stack)), in_string, bool(stack) and (last in ":{[," or open_word or open_key)


def settle_name(name: str, offered: Iterable[str]) -> str | None:
    """The offered name that is meant, if any. Exact, else equal after folding case and separators, else equal by
    letters and digits alone (`ReadFile`), without the namespace, call number and `tool` suffix that models add
    (`functions.read_file:0`, `read_file_tool`). The last two count only if a single offered name fits."""
    names = list(offered)
    if name in names:
        return name
    key = _fold(name)
    if (match := next((each for each in names if _fold(each) == key), None)) is not None:
        return match
    for key in (_letters(name), _letters(_ADDED.sub("", name.strip()))):
        fitting = [each for each in names if key and _letters(each) == key]
        if len(fitting) == 1:
            return fitting[0]
    return None


def nearest(name: str, offered: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(_fold(name), list(offered), n=limits.NEAREST_NAMES_MAX, cutoff=0.0)


def _fold(name: str) -> str:
    return re.sub(r"[-. ]", "_", name.strip().lower())


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def check(args: JsonObject, schema: Schema) -> tuple[JsonObject, str]:
    """The arguments, coerced where that is lossless, and what is wrong with them."""
    args = _coerced(args, schema)
    faults = schema_faults(args, schema)
    return args, "; ".join(faults[:3])


def _coerced(value: object, schema: object) -> Any:
    schema = schema if isinstance(schema, Mapping) else {}
    kind = schema.get("type")
    value = _scalar(value, kind)
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        return {whole_text(name): _coerced(item, properties.get(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_coerced(item, schema.get("items")) for item in value]
    return whole_text(value) if isinstance(value, str) else value


def _scalar(value: object, kind: object) -> object:
    if isinstance(value, str):
        text = value.strip()
        if kind == "integer" and re.fullmatch(r"[+-]?\d{1,18}", text):
            return int(text)
        if kind == "number" and re.fullmatch(r"[+-]?\d{1,18}(\.\d{1,12})?", text):
            number = float(text) if "." in text else int(text)
            return number if Decimal(repr(number)) == Decimal(text) else value
        if kind == "boolean" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind in ("array", "object") and text[:1] in "[{":
            try:
                inner = json.loads(text)
            except ValueError:
                return value
            return inner if isinstance(inner, list if kind == "array" else dict) else value
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "string" and isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    return value


def schema_faults(value: object, schema: Schema) -> list[str]:
    validator = _validator(json.dumps(schema, sort_keys=True))
    faults = []
    for error in validator.iter_errors(value):
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.instance_path).lstrip(".")
        faults.append(f"{path}: {_describe_error(error)}" if path else _describe_error(error))
    return faults


def _describe_error(error: ValidationError) -> str:
    """The error with all allowed options, but with the value cut."""
    text = str(error.message)
    if options := getattr(error.kind, "options", None):
        text = f"{json.dumps(error.instance)} is not one of {', '.join(map(json.dumps, options))}"
    return text if len(text) <= limits.FAULT_CHARS_MAX else f"{text[:100]} […] {text[100 - limits.FAULT_CHARS_MAX :]}"


@lru_cache(maxsize=512)
def _validator(schema: str) -> Validator:
    import jsonschema_rs

    steps = jsonschema_rs.FancyRegexOptions(backtrack_limit=limits.SCHEMA_PATTERN_STEPS_MAX)
    return jsonschema_rs.validator_for(json.loads(schema), retriever=_no_document, pattern_options=steps)


def _no_document(address: str) -> NoReturn:
    raise ValueError(f"{address[: limits.FAULT_CHARS_MAX]} is another document")


def schema_problem(schema: Schema) -> str:
    """Why a schema cannot be used for validation, as the end of a sentence; empty where it can."""
    try:
        if _unfolded_nodes(schema) > limits.SCHEMA_UNFOLDED_NODES_MAX:
            return f"unfolds to more than {limits.SCHEMA_UNFOLDED_NODES_MAX} parts through its references"
        _validator(json.dumps(schema, sort_keys=True))
    except RecursionError:
        return "is nested too deeply"
    except LookupError as error:
        return f"refers to {str(error.args[0])[: limits.FAULT_CHARS_MAX]!r}, which is not in it"
    except (ValueError, TypeError) as error:
        return f"is malformed: {str(error).partition(chr(10))[0][: limits.FAULT_CHARS_MAX]}"
    return ""


def _unfolded_nodes(schema: Schema) -> int:
    """The number of nodes of a schema with all references followed; recursive references count once."""
    anchors = {"": schema}
    sizes: dict[int, int] = {}

    def collect(node: Schema | list[Any]) -> None:
        for item in node.values() if isinstance(node, Mapping) else node:
            if isinstance(item, Mapping | list):
                collect(item)
        if isinstance(node, Mapping):
            anchors.update((node[name], node) for name in _ANCHORS if isinstance(node.get(name), str))

    def size(node: object) -> int:
        if not isinstance(node, Mapping | list):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = 1  # while it is being counted: what refers back to it
            parts = list(node.values() if isinstance(node, Mapping) else node)
            if isinstance(node, Mapping):
                parts += [target(node[name]) for name in _REFERENCES if isinstance(node.get(name), str)]
            sizes[id(node)] = 1 + sum(map(size, parts))
        return sizes[id(node)]

    def target(reference: str) -> Any:
        document, _, pointer = unquote(reference).partition("#")
        try:
            node: Any = None if document else anchors[pointer.partition("/")[0]]
            for step in pointer.split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                node = node[int(step)] if isinstance(node, list) else node[step]
        except (LookupError, ValueError, TypeError):
            raise LookupError(reference) from None
        if node is None:
            raise LookupError(reference)
        return node

    collect(schema)
    return size(schema)
