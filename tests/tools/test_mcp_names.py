"""What MCP servers tell, made fit: pure tables."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from hermes.tools import mcp_names as names
from hermes.tools.mcp_names import Unfit


@pytest.mark.parametrize(
    ("server", "tool", "name"),
    [
        ("github", "create_issue", "mcp_github_create_issue"),
        ("Git-Hub", "create.issue", "mcp_git_hub_create_issue"),
        ("büro", "öffnen!", "mcp_b_ro__ffnen_"),
        ("s", "x" * 58, "mcp_s_" + "x" * 58),
    ],
)
def test_mcp_tool_names_are_plain(server: str, tool: str, name: str) -> None:
    assert names.toolname(server, tool, {}) == name


def test_mcp_tool_names_are_short_unique_and_stable() -> None:
    names_in_use: dict[str, str] = {}
    tools = [("a", "b_c"), ("a_b", "c"), ("A", "b_c"), ("a", "b-c"), ("s", "x" * 100), ("s", "x" * 101)]
    names_given = [names.toolname(server, tool, names_in_use) for server, tool in tools]
    assert names_given[0] == "mcp_a_b_c" and len(set(names_given)) == len(names_given)
    assert all(len(name) <= 64 and name.replace("_", "").isalnum() for name in names_given)
    assert [names.toolname(server, tool, names_in_use) for server, tool in tools] == names_given


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({}, {"type": "object", "properties": {}}),
        ({"type": "object", "title": "T", "$schema": "x"}, {"type": "object", "properties": {}}),
        (
            {"type": "object", "properties": {"title": {"type": "string", "title": "T"}}},
            {"type": "object", "properties": {"title": {"type": "string"}}},
        ),
        ({"type": "object", "oneOf": [{}], "$ref": "#/$defs/x"}, {"type": "object", "properties": {}}),
    ],
)
def test_mcp_schemas_are_sanitised(schema: Any, expected: Any) -> None:
    assert names.schema(schema) == expected


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (None, "no object"),
        ({"type": "string"}, "no object"),
        ({"properties": []}, "malformed"),
        ({"properties": {"a": {"type": "strong"}}}, "malformed"),
        ({"properties": {"a": {"$ref": "#/$defs/missing"}}}, "not in it"),
        ({"properties": {"a": {"pattern": "(["}}}, "malformed"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "another document"),
        ({"properties": {"a": {"items": [{"$dynamicRef": "https://x"}]}}}, "another document"),
        ({"properties": {"a": {"default": "x" * 33_000}}}, "32 KB"),
        (json.loads('{"items":' * 50 + "{}" + "}" * 50), "deeply"),
    ],
)
def test_unusable_mcp_schemas_are_rejected(schema: Any, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        names.schema(schema)


def test_mcp_descriptions_are_truncated_and_marked() -> None:
    description = names.description("s", "t", "d" * 2000)
    assert (
        description.startswith("The tool 't' of the MCP server 's', which says of it: ddd") and len(description) < 1_100
    )
    assert names.description("s", "t", None) == "The tool 't' of the MCP server 's'."
    assert names.schema({"description": "d" * 2000})["description"] == "d" * 1024


@pytest.mark.parametrize(
    ("hints", "effect", "needs_approval"),
    [
        ({}, "effect", True),
        ({"readOnlyHint": True}, "read", False),
        ({"readOnlyHint": "yes"}, "effect", True),
        ({"idempotentHint": True}, "idempotent", True),
        ({"destructiveHint": False}, "effect", False),
        ({"destructiveHint": True, "idempotentHint": True}, "idempotent", True),
    ],
)
def test_mcp_annotations_to_effect_and_approval(hints: Any, effect: str, needs_approval: bool) -> None:
    assert names.effect(hints) == effect
    assert names.needs_approval("destructive", hints) is needs_approval
    assert names.needs_approval("always", hints) and not names.needs_approval("never", hints)


def test_mcp_tools_that_fit_are_kept_in_order() -> None:
    assert names.fit_into_window([("a", 5), ("b", 7), ("c", 4)], 10) == ({"a", "c"}, ["b"])
    assert names.fit_into_window([("a", 5)], -1) == (set(), ["a"])


def test_mcp_result_content() -> None:
    picture = {"type": "image", "mimeType": "image/png", "data": base64.b64encode(b"png").decode()}
    inner = {"type": "resource", "resource": {"uri": "a://b", "text": "inner"}}
    link = {"type": "resource_link", "uri": "a://c", "name": "c", "size": 3}
    answer, blobs = names.answer([{"type": "text", "text": "one"}, picture, inner, link])
    assert answer == {"text": "one\ninner", "resources": [{"uri": "a://c", "name": "c"}]}
    assert blobs == [names.Blob("image/png", b"png")]
    assert names.answer([{"type": "text", "text": '{"a": 1}'}], {"a": 1})[0] == {"structured": {"a": 1}}
    assert names.answer([{"type": "text", "text": "1"}], {"result": 1})[0] == {"structured": {"result": 1}}
    assert names.answer([{"type": "text", "text": "x"}], {"a": 1})[0] == {"structured": {"a": 1}, "text": "x"}
    assert names.answer([{"type": "odd"}])[0] == {}
    assert names.answer([{"type": "text", "text": "x" * 200_001}])[0]["text"].endswith("200001 characters in all]")
