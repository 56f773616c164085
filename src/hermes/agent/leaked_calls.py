"""Tool calls that a provider passed on as text: where a block begins and ends, and its calls. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from hermes.core.json_types import JsonObject
from hermes.core.limits import LEAKED_CALL_HEAD_CHARS_MAX

# A call's name, and its arguments: an object, or the text of one.
LeakedCall = tuple[str, JsonObject | str]

_NAME = r"[\w.:/-]{1,64}"


@dataclass(frozen=True, slots=True)
class Opening:
    """The start of a block. What follows must match `starts`; while it matches `may_start` it is too short to decide.
    Without `closing` a block ends with the message."""

    closing: str
    starts: re.Pattern[str]
    may_start: re.Pattern[str]

    def begins(self, text: str, at: int) -> bool | None:
        """Whether a block starts here rather than a mention of one; None if the text ends too early to decide."""
        if self.starts.match(text, at):
            return True
        end = at + LEAKED_CALL_HEAD_CHARS_MAX
        return None if len(text) < end and self.may_start.fullmatch(text, at) else False


def _opening(closing: str, starts: str, may_start: str) -> Opening:
    return Opening(closing, re.compile(starts), re.compile(may_start))


_INNER = r"<(?:function|invoke|tool_call|arg_key|parameter)"
_STARTS = rf"\s{{0,40}}(?:[{{\[]|{_INNER})|{_NAME}\s{{0,8}}(?:\{{|\[(?:ARGS|CALL)|<arg_key|</)"
_MAY_START = rf"\s{{0,40}}(?:<[a-z_]{{0,9}})?|{_NAME}\s{{0,8}}(?:<[a-z_]{{0,9}}|\[[A-Z]{{0,4}})?"
_TAG_END = r"\s?(?:>\s{0,40}(?:<[/a-z]{0,9})?)?"

OPENINGS: dict[str, Opening] = {
    **{
        f"<{tag}>": _opening(f"</{tag}>", _STARTS, _MAY_START)
        for tag in ("tool_call", "tool_calls", "function_call", "function_calls")
    },
    "<function=": _opening(
        "</function>",
        rf"[\"']?{_NAME}[\"']?\s?>\s{{0,40}}(?:\{{|<parameter|</function)",
        rf"[\"']?(?:{_NAME})?[\"']?{_TAG_END}",
    ),
    '<invoke name="': _opening(
        "</invoke>", rf"{_NAME}\"\s?>\s{{0,40}}<(?:parameter|/invoke)", rf"(?:{_NAME})?\"?{_TAG_END}"
    ),
    "[TOOL_CALLS]": _opening("", _STARTS, _MAY_START),
    "<|python_tag|>": _opening("", r"\s{0,40}\{", r"\s{0,40}"),
    "<|tool_call": _opening(
        "", r"\|>\s{0,40}[\[{]|(?:s_section_begin|s_begin|_begin)\|>", r"[a-z_]{0,16}(?:\|(?:>\s{0,40})?)?"
    ),
    "<｜tool▁call": _opening("", r"s?▁begin｜>", r"s?[a-z▁]{0,6}｜?"),
}
CLOSINGS = frozenset(opening.closing for opening in OPENINGS.values() if opening.closing not in ("", "</function>"))

_XML_HEAD = re.compile(r"(?:<[a-z_:]{1,20}>\s{0,40}){0,3}<(?:function|invoke)[ =]")
_XML = re.compile(r"<(/)?(function|invoke|parameter)\b([^<>]{0,200})>")
_XML_NAME = re.compile(rf"\s?(?:=|name\s?=)\s?[\"']?({_NAME})")
_ARG_TAG = re.compile(r"<(/)?arg_(key|value)>")
_NAME_BEFORE_KEYS = re.compile(rf"<tool_call>\s{{0,40}}({_NAME})\s{{0,8}}(?=<|\Z)")
_CALL_TOKENS = re.compile(rf"<\|tool_call_begin\|>\s{{0,40}}({_NAME})\s{{0,40}}<\|tool_call_argument_begin\|>")
_WIDE_CALL_TOKENS = re.compile(
    rf"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?({_NAME})(?:<｜tool▁sep｜>|\s{{0,8}})(?:```json)?(?=\s{{0,8}}\{{)"
)
_ARGS = r"(?:\[CALL_ID\][\w-]{1,64})?(?:\[ARGS\])?"
_VALUE = re.compile(rf"(?:[\s,;]|<[^<>]{{1,40}}>)*+(?:({_NAME})\s{{0,8}}{_ARGS}\s{{0,8}})?(?=[{{\[])")
_END_TOKENS = re.compile(r"(?:\s|```|<\|[\w/]{1,40}\|>|<｜[\w▁]{1,40}｜>|</?[a-z_:]{1,20}>)*+")
_decode = json.JSONDecoder(strict=False).raw_decode


def parse(block: str) -> tuple[list[LeakedCall], str]:
    """The calls in a block, and the text after them if only the message's end closes such a block."""
    if _XML_HEAD.match(block):
        return _parse_xml(block), ""
    if name_match := _NAME_BEFORE_KEYS.match(block):
        return [(name_match[1], _parse_keyed_arguments(block, name_match.end()))], ""
    for head in (_CALL_TOKENS, _WIDE_CALL_TOKENS):
        if heads := list(head.finditer(block)):
            return _parse_tokens(block, heads)
    return _parse_json(block)


def _parse_xml(block: str) -> list[LeakedCall]:
    calls: list[LeakedCall] = []
    name, values_at, key = "", 0, ""
    args: JsonObject = {}

    def end_call(at: int) -> None:
        nonlocal name
        if name:
            body = block[values_at:at].strip()
            calls.append((name, body if not args and body.startswith("{") else dict(args)))
        name = ""

    body_at = 0
    for tag in _XML.finditer(block):
        closes, kind, attributes = tag.groups()
        name_match = _XML_NAME.match(attributes)
        if key and (kind == "parameter" or closes):
            args[key] = _value(block[body_at : tag.start()])
            key = ""
        if kind == "parameter":
            key, body_at = (name_match[1], tag.end()) if name_match and not closes else ("", 0)
        elif closes:
            end_call(tag.start())
        elif not key and name_match:
            end_call(tag.start())
            name, values_at = name_match[1], tag.end()
            args.clear()
    if key:
        args[key] = _value(block[body_at:])
    end_call(len(block))
    return calls


def _parse_keyed_arguments(block: str, at: int) -> JsonObject:
    args: JsonObject = {}
    key = ""
    for tag in _ARG_TAG.finditer(block, at):
        closes, kind = tag.groups()
        if closes and kind == "key":
            key = block[at : tag.start()].strip()
        elif closes and key:
            args[key] = _value(block[at : tag.start()])
        at = tag.end()
    return args


def _value(text: str) -> str:
    """A value between tags; a line break on either side belongs to the tags."""
    return text.removeprefix("\n").removesuffix("\n")


def _parse_tokens(block: str, heads: list[re.Match[str]]) -> tuple[list[LeakedCall], str]:
    calls: list[LeakedCall] = []
    end = 0
    for head in heads:
        if head.start() < end:
            continue
        try:
            value, end = _decode(block, _skip_space(block, head.end()))
        except (ValueError, RecursionError):
            return calls, ""
        if isinstance(value, dict):
            calls.append((head[1], value))
    return calls, _text_after(block, end)


def _parse_json(block: str) -> tuple[list[LeakedCall], str]:
    opening = next(opening for opening in OPENINGS if block.startswith(opening))
    calls: list[LeakedCall] = []
    at = block.find(">") + 1 if opening == "<|tool_call" else len(opening)
    while head := _VALUE.match(block, at):
        try:
            value, end = _decode(block, head.end())
        except (ValueError, RecursionError):
            if calls or (value := _close_and_decode(block[head.end() :])) is None:
                break
            end = len(block)
        if not (found_calls := _calls_of(value, head[1])):
            break
        calls += found_calls
        at = end
    return calls, _text_after(block, at) if calls and not OPENINGS[opening].closing else ""


def _close_and_decode(text: str) -> object:
    for brackets in ("}", "}}", "]", "}]", "}}]"):
        try:
            return json.loads(text.rstrip() + brackets, strict=False)
        except (ValueError, RecursionError):
            continue
    return None


def _calls_of(value: object, name: str | None) -> list[LeakedCall]:
    """The calls in a value: objects with a name, or arguments for the given name."""
    calls: list[LeakedCall] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            continue
        inner = item["function"] if isinstance(item.get("function"), dict) else item
        called = next((n for key in ("name", "function", "tool_name") if isinstance(n := inner.get(key), str)), None)
        if name and not (called and "arguments" in inner):
            calls.append((name, item))
        elif called:
            args: object = next(
                (inner[key] for key in ("arguments", "parameters", "args", "input") if key in inner), {}
            )
            if isinstance(args, dict | str):
                calls.append((called, args))
    return calls


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _text_after(block: str, at: int) -> str:
    tokens = _END_TOKENS.match(block, at)
    return block[tokens.end() :] if tokens else ""
