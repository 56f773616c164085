"""A call's name and arguments: what is repaired, what counts as cut off, what is coerced."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes.tools.framework.arguments import check, nearest, parse, schema_faults, settle_name

# ---- parsing

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("{}", {}),
    (' {"a": 1}\n', {"a": 1}),
    ('{"a": [1, {"b": null}], "c": "x"}', {"a": [1, {"b": None}], "c": "x"}),
    # trailing commas
    ('{"a": 1,}', {"a": 1}),
    ('{"a": [1, 2, ], "b": {"c": 3 ,\n} , }', {"a": [1, 2], "b": {"c": 3}}),
    ('{"a": ",}", "b": ",]",}', {"a": ",}", "b": ",]"}),
    ('{"a": "\\",}",}', {"a": '",}'}),
    # closing brackets missing after a complete value
    ('{"a": "x"', {"a": "x"}),
    ('{"a": "x"\n', {"a": "x"}),
    ('{"a": [1, 2]', {"a": [1, 2]}),
    ('{"a": {"b": ["x"', {"a": {"b": ["x"]}}),
    ('{"a": {}', {"a": {}}),
    ('{"a": "{["', {"a": "{["}),
    ('{"k,": "v"', {"k,": "v"}),
    ('{"a": "b,\\"c"', {"a": 'b,"c'}),
    ('{"a": ["x", "y"', {"a": ["x", "y"]}),
    ('{"a": [1,], "b": {"c": "d"', {"a": [1], "b": {"c": "d"}}),
    # raw control characters in strings
    ('{"a": "one\ntwo\tthree\x01"}', {"a": "one\ntwo\tthree\x01"}),
    ('{"a": "one\ntwo",}', {"a": "one\ntwo"}),
    ('{"a": "one\ntwo"', {"a": "one\ntwo"}),
    # an object written as a string
    ('"{\\"a\\": 1}"', {"a": 1}),
]


@pytest.mark.parametrize(("text", "value"), GOOD)
def test_arguments_are_parsed_and_repaired(text: str, value: dict[str, Any]) -> None:
    parsed = parse(text)
    assert (parsed.state, parsed.value) == ("ok", value)


CUT = [
    "{",
    '{"a"',
    '{"a": ',
    '{"a": "x',
    '{"a": "x\\',
    '{"a": "x\\"',
    '{"a": "x", ',
    '{"a": "x", "b"',
    '{"a": "x", "b":',
    '{"a": 1',
    '{"a": -',
    '{"a": 1.',
    '{"a": 12e',
    '{"a": tru',
    '{"a": [',
    '{"a": [1, 2',
    '{"a": [1,',
    '{"a": {"b": "c", "d',
    '"{\\"a\\": 1',
    '{"command": "rm -rf /tmp/build',
    '{"path": "a.txt", "content": "line 1\nline 2',
]


@pytest.mark.parametrize("text", CUT)
def test_incomplete_arguments_are_cut(text: str) -> None:
    parsed = parse(text)
    assert (parsed.state, parsed.value) == ("cut", None)


BROKEN = [
    "",
    "not json",
    "{'a': 1}",
    '{"a" 1}',
    '{"a": 1 "b": 2}',
    '{"a": 1}}',
    '{"a": 1} and more',
    '{"a": 1}{"b": 2}',
    '{"a": [1}',
    '{"a": 1,,}',
    "{a: 1}",
    "[1, 2]",
    "null",
    "5",
    '"text"',
    "true",
]


@pytest.mark.parametrize("text", BROKEN)
def test_invalid_arguments_are_broken(text: str) -> None:
    parsed = parse(text)
    assert (parsed.state, parsed.value) == ("broken", None)
    assert parsed.fault


def test_argument_fault_names_position() -> None:
    assert "line 2 column 3" in parse('{"a": 1,\n  b: 2}').fault
    assert "array" in parse("[1]").fault


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet='ab"\\{}[],:\n é', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='kx",{:', max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
_objects = st.dictionaries(st.text(alphabet='kx",{:', max_size=4), _json, max_size=4)
_styles = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])


def is_part(part: Any, whole: Any) -> bool:
    """Whether a value is another one with things left out at its end: no scalar in it is changed or shortened."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return list(part) == list(whole)[: len(part)] and all(is_part(v, whole[k]) for k, v in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(is_part(a, b) for a, b in zip(part, whole, strict=False))
    return type(part) is type(whole) and bool(part == whole)


@given(_objects, _styles)
def test_argument_prefix_is_never_misread_property(value: dict[str, Any], style: dict[str, Any]) -> None:
    text = json.dumps(value, **style)
    assert parse(text).value == value
    for end in range(len(text)):
        parsed = parse(text[:end])
        if parsed.state == "ok":
            assert is_part(parsed.value, value), text[:end]
            # Nothing but closing brackets was missing: what is there ends with a complete value.
            assert text[:end].rstrip()[-1] in '"}]', text[:end]


@given(_objects, _styles)
@settings(deadline=None)
def test_missing_closing_brackets_are_repaired_property(value: dict[str, Any], style: dict[str, Any]) -> None:
    text = json.dumps(value, **style)
    end = len(text)
    while text[end - 1] in "}] \n":
        end -= 1
        parsed = parse(text[:end])
        assert parsed.state == "cut" or parsed.value == value, text[:end]


@given(st.text(alphabet='{}[]",:\\ \n\ta1-.tn', max_size=30) | st.text(max_size=30))
def test_parsing_never_fails_property(text: str) -> None:
    parsed = parse(text)
    assert (parsed.state == "ok") == isinstance(parsed.value, dict)
    assert (parsed.state == "ok") == (not parsed.fault)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"],
    ids=["arrays", "objects", "closed"],
)
def test_endless_brackets_are_rejected(text: str) -> None:
    assert parse(text).state in ("cut", "broken")


# ---- names

OFFERED = ["read_file", "write_file", "web_search", "todo", "memory", "terminal", "mcp_x_read"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("read_file", "read_file"),
        ("Read_File", "read_file"),
        ("read-file", "read_file"),
        ("read.file", "read_file"),
        ("Read File", "read_file"),
        ("TODO", "todo"),
        ("ReadFile", "read_file"),
        ("readFile", "read_file"),
        ("readfile", "read_file"),
        ("read__file", "read_file"),
        ("read_file_tool", "read_file"),
        ("ReadFileTool", "read_file"),
        ("read-file-tool", "read_file"),
        ("functions.read_file", "read_file"),
        ("functions.read_file:0", "read_file"),
        ("functions:ReadFile", "read_file"),
        ("default_api.read_file", "read_file"),
        ("tools/Read-File", "read_file"),
        ("read_fil", None),
        ("my_read_file", None),
        ("tool", None),
        ("functions.", None),
        ("_", None),
        ("", None),
    ],
)
def test_tool_name_is_settled_without_guessing(name: str, expected: str | None) -> None:
    assert settle_name(name, OFFERED) == expected


def test_exact_tool_name_wins() -> None:
    assert settle_name("a-b", ["a_b", "a-b"]) == "a-b"


@pytest.mark.parametrize(
    ("name", "offered", "expected"),
    [
        ("SearchTool", ["search", "search_tool"], "search_tool"),
        ("search_tool", ["search"], "search"),
        ("a_bc", ["ab_c", "abc_"], None),
        ("ab_c_tool", ["a_bc", "abc_"], None),
        ("mcp_a_b_c", ["mcp__a__b_c", "mcp__a_b__c"], None),
        ("ReadFile", ["read_file", "ReadFile"], "ReadFile"),
        ("readfile", ["read_file", "ReadFile"], "ReadFile"),
    ],
)
def test_loose_tool_name_matches_single_tool(name: str, offered: list[str], expected: str | None) -> None:
    assert settle_name(name, offered) == expected


def test_offered_tool_name_with_other_characters() -> None:
    assert settle_name("my_tool", ["My-Tool"]) == "My-Tool"


def test_nearest_tool_names() -> None:
    nearest_names = nearest("read_fil", OFFERED)
    assert nearest_names[0] == "read_file"
    assert len(nearest_names) == 5
    assert set(nearest_names) <= set(OFFERED)
    assert nearest("Read-Fil", OFFERED)[0] == "read_file"
    assert sorted(nearest("zzz", ["a", "b"])) == ["a", "b"]


# ---- coercion and the schema


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


KINDS: dict[str, dict[str, Any]] = {
    "i": {"type": "integer"},
    "n": {"type": "number"},
    "b": {"type": "boolean"},
    "s": {"type": "string"},
    "l": {"type": "array", "items": {"type": "string"}},
    "o": {"type": "object"},
}


@pytest.mark.parametrize(
    ("name", "given_", "wanted"),
    [
        ("i", "5", 5),
        ("i", "-12", -12),
        ("i", 5.0, 5),
        ("n", "5", 5),
        ("n", "2.5", 2.5),
        ("n", 5, 5),
        ("b", "true", True),
        ("b", "False", False),
        ("s", 5, "5"),
        ("s", 2.5, "2.5"),
        ("l", '["x"]', ["x"]),
        ("o", '{"k": 1}', {"k": 1}),
        ("s", "5", "5"),
        ("s", "true", "true"),
        ("s", '["x"]', '["x"]'),
    ],
)
def test_lossless_argument_coercion(name: str, given_: Any, wanted: Any) -> None:
    args, fault = check({name: given_}, schema(**KINDS))
    assert (args[name], type(args[name]), fault) == (wanted, type(wanted), "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("i", "5.5"),
        ("i", 5.5),
        ("i", "five"),
        ("i", ""),
        ("i", "0x10"),
        ("i", "1e3"),
        ("i", True),
        ("i", None),
        ("n", "1,5"),
        ("n", "nan"),
        ("n", "inf"),
        ("b", "yes"),
        ("b", "1"),
        ("b", 1),
        ("b", 0),
        ("s", True),
        ("s", None),
        ("s", ["x"]),
        ("l", "x"),
        ("l", '{"k": 1}'),
        ("l", "[broken"),
        ("o", "[1]"),
    ],
)
def test_lossy_argument_is_rejected(name: str, value: Any) -> None:
    args, fault = check({name: value}, schema(**KINDS))
    assert args == {name: value}
    assert name in fault


@given(st.integers(-(10**17), 10**17))
def test_integer_text_is_coerced_property(number: int) -> None:
    assert check({"i": str(number)}, schema(**KINDS)) == ({"i": number}, "")


@given(st.decimals(-(10**9), 10**9, places=6) | st.decimals(10**17, 10**18 - 1, places=12))
def test_number_text_keeps_every_digit_property(number: Decimal) -> None:
    args, _ = check({"n": format(number, "f")}, schema(**KINDS))
    if not isinstance(args["n"], str):
        assert Decimal(str(args["n"])) == number


def test_nested_scalars_are_coerced() -> None:
    item = {"type": "object", "properties": {"id": {"type": "string"}, "n": {"type": "integer"}}}
    args, fault = check({"items": [{"id": 1, "n": "2"}]}, schema(items={"type": "array", "items": item}))
    assert (args, fault) == ({"items": [{"id": "1", "n": 2}]}, "")


def test_argument_fault_names_path() -> None:
    inner = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    files = {"type": "array", "items": inner}
    faults = schema_faults({"files": [{"path": "a"}, {"path": ["x"]}]}, schema(files=files))
    assert len(faults) == 1 and faults[0].startswith("files[1].path: ")
    assert "path" in schema_faults({"files": [{}]}, schema(files=files))[0]


def test_unknown_and_missing_arguments_are_named() -> None:
    wanted = {**schema(**KINDS), "required": ["s"]}
    _, fault = check({"x": 1}, wanted)
    assert "'x'" in fault and '"s"' in fault


def test_at_most_three_argument_faults() -> None:
    _, fault = check({name: {"no": 1} for name in "inbs"}, schema(**KINDS))
    assert len(fault.split("; ")) == 3


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), 10**40, -(10**40), "\ud800", {"k": "\udfff"}, [[[[]]]]],
    ids=["nan", "inf", "big", "small", "half a pair", "half a pair inside", "deep"],
)
def test_unusual_json_values_are_validated(value: Any) -> None:
    for kind in KINDS.values():
        args, fault = check({"v": value}, schema(v=kind))
        assert isinstance(fault, str) and "v" in args
