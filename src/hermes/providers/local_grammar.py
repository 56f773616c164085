"""The grammar that constrains the embedded model's output, made from schemas, in the GBNF of llama.cpp. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable

from hermes.core.json_types import JsonMapping, JsonObject

# A backslash may stand before any character: a model that means `\d` writes it so. `local.reading` reads it that way.
_RULES = r"""
char ::= [^"\\\x7F\x00-\x1F] | "\\" [^\x7F\x00-\x1F]
string ::= "\"" char* "\""
strict ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
integer ::= "-"? ("0" | [1-9] [0-9]{0,15})
number ::= integer ("." [0-9]{1,16})?
boolean ::= "true" | "false"
null ::= "null"
object ::= "{" (strict ": " value (", " strict ": " value)*)? "}"
array ::= "[" (value (", " value)*)? "]"
value ::= strict | number | boolean | null | object | array
url ::= "\"http" "s"? "://" [^" \\\x7F\x00-\x1F]+ "\""
positive ::= [1-9] [0-9]{0,15}
text ::= "\"" [^"\\I \x7F\x00-\x1F] char* "\""
digit ::= [0-9]
field ::= [0-9*,/-]+
span ::= "\"" digit{1,4} [mhd] "\""
daily ::= "\"" digit{1,2} " " digit{1,2} " * * *\""
schedule ::= "\"" (digit{4} "-" digit{2} "-" digit{2} "T" digit{2} ":" digit{2} | "every "? digit{1,4} [mhd] | field " " field " " field " " field " " [0-9a-z*,/-]+) "\""
"""
_NAMED = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
# Formats that have a rule of their own. A `text` does not begin with what the model says of itself ("I will write …").
_FORMATS = {"uri": "url", "text": "text", "schedule": "schedule", "span": "span", "daily": "daily"}
# The rest of an answer of which the beginning is given.
REST_OF_ANSWER = f'root ::= char* "\\"}}"{_RULES}'


def call_or_answer(calls: Iterable[tuple[str, JsonObject]], answer: JsonObject | None) -> str:
    """Exactly one call of one of the tools, or an answer; `answer` is None if a call is required."""
    choices = [
        _object([("tool", _literal(name), True), ("arguments", _expression(schema, False), True)])
        for name, schema in calls
    ]
    if answer is not None:
        strict = answer.get("type") != "string"
        text = _begun(answer["begins"]) if answer.get("begins") else _expression(answer, strict)
        choices.append(_object([("answer", text, True)]))
    return f"root ::= {' | '.join(choices)}{_RULES}"


def _begun(text: str) -> str:
    """An answer that begins with some text."""
    return f'{_quoted(json.dumps(text, ensure_ascii=False)[:-1])} char* "\\""'


def _expression(schema: JsonMapping, strict: bool) -> str:
    if "const" in schema:
        return _literal(schema["const"])
    if "enum" in schema:
        return _any(_literal(value) for value in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _any(_expression(item, strict) for item in schema[key])
    kind = schema.get("type")
    if isinstance(kind, list):
        return _any(_expression({**schema, "type": name}, strict) for name in kind)
    if kind == "object" and schema.get("properties"):
        required = schema.get("required", ())
        members = [(name, _expression(item, strict), name in required) for name, item in schema["properties"].items()]
        return _object(members)
    if kind == "object" and schema.get("additionalProperties") is False:
        return _quoted("{}")
    if kind == "array" and isinstance(schema.get("items"), dict):
        item = _expression(schema["items"], strict)
        return f'"[" ({item} (", " {item})*){"" if schema.get("minItems") else "?"} "]"'
    if kind == "string":
        return _FORMATS.get(schema.get("format", ""), "strict" if strict else "string")
    if kind == "integer" and schema.get("minimum", 0) >= 1:
        return "positive"
    return kind if kind in _NAMED else "value"


def _object(members: list[tuple[str, str, bool]]) -> str:
    """Required members come first, so that optional ones can follow a comma."""
    pairs = [(f"{_quoted(f'{json.dumps(name)}: ')} {value}", needed) for name, value, needed in members]
    first = ' ", " '.join(pair for pair, needed in pairs if needed)
    others = [pair for pair, needed in pairs if not needed]
    later = [f'(", " {pair})?' for pair in others]
    if first:
        inner = " ".join([first, *later])
    else:
        inner = _any(" ".join([pair, *later[at + 1 :]]) for at, pair in enumerate(others)) + "?"
    return f'"{{" {inner} "}}"'


def _any(choices: Iterable[str]) -> str:
    return f"({' | '.join(choices)})"


def _literal(value: object) -> str:
    return _quoted(json.dumps(value, ensure_ascii=False))


def _quoted(text: str) -> str:
    """JSON's escapes are valid in GBNF."""
    return json.dumps(text, ensure_ascii=False)
