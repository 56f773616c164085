"""What the local model is told: few tools, in short, with examples, and a form that it cannot leave."""

from __future__ import annotations

import json
from typing import Any

from hermes.local import CHOOSES
from hermes.providers.base import Prompt, ToolSchema, ToolSchemas, WireRequest
from hermes.providers.local import PROVIDER, forms
from hermes.providers.routes import LOCAL
from hermes.tools.framework.toolsets import builtin

TOOLS = [
    ToolSchema(tool.name, tool.description, tool.parameters)
    for tool in builtin().all()
    if tool.toolset in ("file", "terminal", "web")
]


def request(question: str = "hello", tools: list[ToolSchema] | None = None, **more: Any) -> WireRequest:
    messages = more.pop("messages", [{"role": "user", "content": question}])
    return PROVIDER.request(
        LOCAL, None, Prompt(["You are Hermes."], messages, ToolSchemas(TOOLS if tools is None else tools), **more)
    )


def names(wire: WireRequest) -> list[str]:
    calls = [form["properties"].get("tool") for form in wire.body["json_schema"]["oneOf"]]
    return [call["const"] for call in calls if call]


def test_example_calls_match_tool_schemas() -> None:
    from hermes.tools.framework.arguments import check

    shown = [shot for shot in forms()["shots"] if "tool" in shot]
    assert len(shown) >= 8 and len(forms()["shots"]) >= 10
    for shot in shown:
        tool = builtin().get(shot["tool"])
        assert tool is not None and check(shot["arguments"], tool.parameters) == (shot["arguments"], "")


def test_tool_forms_match_real_tools() -> None:
    for name, form in forms()["tools"].items():
        tool = builtin().get(name)
        assert tool is not None and set(form.get("parameters", ())) <= set(tool.parameters["properties"])


def test_first_request_is_short() -> None:
    # Some three characters to a token; a small machine reads eighty tokens in a second.
    assert sum(len(message["content"]) for message in request().body["messages"]) < 2_600


def test_misleading_tool_is_offered_only_when_mentioned() -> None:
    assert "web_extract" not in names(request("what is in config.json?"))
    wire = request("what does http://a.org say?")
    assert "web_extract" in names(wire) and "http://a.org" in json.dumps(wire.body["messages"])


def test_other_tool_uses_own_description_and_simplified_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 5, "format": "x"}, "b": {"$ref": "#/nowhere"}},
        "required": ["a"],
    }
    wire = request(tools=[ToolSchema("mcp_home_light", "Turns the light. More words.", schema)])
    assert "- mcp_home_light(a, b): Turns the light" in wire.body["messages"][0]["content"]
    call = wire.body["json_schema"]["oneOf"][0]["properties"]["arguments"]
    assert call["properties"]["a"] == {"type": "string"} and call["required"] == ["a"]
    assert not any("read_file" in message["content"] for message in wire.body["messages"])


def test_request_without_tools_is_free_text() -> None:
    wire = request(tools=[])
    assert "json_schema" not in wire.body and CHOOSES not in wire.headers
    assert [message["role"] for message in wire.body["messages"]] == ["system", "user"]


def test_response_format_constrains_answer() -> None:
    wanted = {"type": "object", "properties": {"city": {"type": "string"}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}}
    assert request(tools=[], response_format=response_format).body["json_schema"] == wanted
    choices = request(response_format=response_format).body["json_schema"]["oneOf"]
    assert choices[-1]["properties"]["answer"] == wanted


def test_tool_choice_constrains_calls() -> None:
    assert len(names(request(tool_choice="required"))) == len(
        request(tool_choice="required").body["json_schema"]["oneOf"]
    )
    assert names(request(tool_choice={"type": "function", "function": {"name": "terminal"}})) == ["terminal"]


def test_conversation_is_translated_to_same_form() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
    result = {"output": "a.txt\n", "exit_code": 0, "status": "ok", "error": None, "cwd": "/w", "duration_ms": 5}
    messages = [
        {"role": "user", "content": "which files?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": json.dumps(result)},
        {"role": "assistant", "content": "Only a.txt."},
        {"role": "user", "content": "thanks"},
        {"role": "user", "content": "and now?"},
    ]
    told = [(message["role"], message["content"]) for message in request(messages=messages).body["messages"][-5:]]
    assert told == [
        ("user", f"{forms()['begin']}\nwhich files?"),
        ("assistant", '{"tool": "terminal", "arguments": {"command": "ls"}}'),
        ("user", "[result] a.txt\n"),
        ("assistant", '{"answer": "Only a.txt."}'),
        ("user", "thanks\nand now?"),
    ]
