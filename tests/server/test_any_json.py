"""Whatever JSON comes, to whichever route: no request is a defect of the server, and every refusal has the one form."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.model_server import Reply

from .clients import Json, check_envelope, check_headers, function, responses_tool
from .conftest import Api, Start

# What may be answered with a status of the server's fault, though the request is at fault or a part is switched off.
DOCUMENTED = {
    502: {"structured_output_failed", "agent_incomplete", "provider_rejected_request"},
    503: {"jobs_unavailable"},
}
SAMPLING = {"temperature": 0.5, "stop": ["a"], "seed": 1, "metadata": {"a": "b"}, "max_tokens": 50}
PARTS = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
ITEMS = [
    {"role": "system", "content": "x"},
    {"type": "function_call", "call_id": "c1", "name": "lamp", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "x"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
]
SESSION = {
    "id": "copy",
    "source": "cli",
    "title": "t",
    "messages": [{"role": "user", "content": "x", "timestamp": 1.5}],
}
LAMP = {"name": "lamp", "description": "x", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
BASE64 = {"type": "base64", "media_type": "image/png", "data": "AA=="}
MESSAGES = {
    "model": "m", "system": [{"type": "text", "text": "x"}], "tools": [LAMP],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "x"}, {"type": "image", "source": BASE64},
            {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
            {"type": "search_result", "title": "t", "source": "x", "content": [{"type": "text", "text": "x"}]}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "x", "signature": "x"},
            {"type": "tool_use", "id": "c1", "name": "lamp", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "x"}], "is_error": True}]},
        {"role": "system", "content": "x"},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, "thread": {"type": "create"},
    "tool_choice": {"type": "tool", "name": "lamp", "disable_parallel_tool_use": True},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "x"}, "temperature": 0.5, "top_p": 0.5, "stop_sequences": ["a"], "service_tier": "auto",
}  # fmt: skip
OLLAMA = {
    "model": "m",
    "options": {"temperature": 0.5, "stop": ["a"], "num_predict": 5},
    "format": "json",
    "think": True,
}
CALL = {"name": "ask", "arguments": {"message": "x", "session_id": "s2"}, "_meta": {"progressToken": 1}}
# Each route with a body that it takes.
ROUTES: list[tuple[str, str, Json]] = [
    ("POST", "/v1/chat/completions", {
        "messages": [
            {"role": "system", "content": "x"}, {"role": "user", "content": PARTS},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "lamp", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "x"}, {"role": "user", "content": "x"},
        ],
        "stream_options": {"include_usage": True}, "tools": [function("lamp", a={"type": "string"})],
        "tool_choice": {"type": "function", "function": {"name": "lamp"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "logit_bias": {"5": 1}, **SAMPLING,
    }),
    ("POST", "/v1/responses", {
        "input": ITEMS, "instructions": "x", "conversation": {"id": "kitchen"}, "truncation": "auto",
        "tools": [responses_tool(function("lamp"))], "tool_choice": {"type": "allowed_tools", "tools": [], "mode": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"], "store": True, "max_tool_calls": 3, "temperature": 0.5,
        "conversation_history": [{"role": "user", "content": "x"}], "metadata": {"a": "b"},
    }),
    ("POST", "/v1/messages", {"max_tokens": 50, **MESSAGES}),
    ("POST", "/v1/messages/count_tokens", MESSAGES),
    ("POST", "/api/chat", {
        "messages": [
            {"role": "user", "content": "x", "images": ["AA=="]},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "lamp", "arguments": {}}}]},
            {"role": "tool", "content": "x", "tool_name": "lamp"},
        ],
        "tools": [function("lamp")], **OLLAMA,
    }),
    ("POST", "/api/generate", {"prompt": "x", "system": "x", "images": ["AA=="], **OLLAMA}),
    ("POST", "/api/show", {"model": "m", "verbose": True}),
    ("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}),
    ("POST", "/v1/responses/compact", {"model": "m", "input": ITEMS, "instructions": "x"}),
    ("POST", "/v1/conversations", {"items": ITEMS, "metadata": {"a": "b"}}),
    ("POST", "/v1/conversations/{conversation}", {"metadata": {"a": "b"}}),
    ("POST", "/v1/conversations/{conversation}/items", {"items": ITEMS}),
    ("POST", "/v1/responses/{response}/cancel", {}),
    ("POST", "/v1/runs", {
        "input": ITEMS, "instructions": "x", "session_id": "s2", "toolsets": ["todo"], "model": "m",
        "conversation_history": [{"role": "user", "content": "x"}], **SAMPLING,
    }),
    ("POST", "/v1/runs/{run}/stop", {}),
    ("POST", "/v1/runs/{run}/steer", {"text": "x"}),
    ("POST", "/v1/runs/{run}/approval", {"choice": "deny", "approval_id": "a", "all": False, "comment": "x"}),
    ("POST", "/v1/runs/{run}/clarify", {"request_id": "a", "answer": "x"}),
    ("POST", "/api/sessions", {"id": "new", "title": "t", "model": "m", "system_prompt": "x"}),
    ("PATCH", "/api/sessions/{session}", {"title": "t", "archived": False, "model": "m", "system_prompt": "x"}),
    ("POST", "/api/sessions/import", {"sessions": [SESSION]}),
    ("POST", "/api/sessions/{session}/fork", {"id": "forked", "title": "t", "at_message_id": 1}),
    ("POST", "/api/sessions/{session}/chat", {"message": PARTS, "system_message": "x", **SAMPLING}),
    ("POST", "/api/sessions/{session}/chat/stream", {"message": "x", "instructions": "x", **SAMPLING}),
    ("POST", "/api/jobs", {"name": "n", "schedule": "every 30m", "prompt": "x", "skills": [], "repeat": 1}),
    ("PATCH", "/api/jobs/{job}", {"name": "n", "schedule": "1d", "enabled": False}),
    ("POST", "/api/jobs/{job}/pause", {}),
    ("POST", "/api/jobs/{job}/resume", {}),
    ("POST", "/api/jobs/{job}/run", {}),
    ("POST", "/api/auth/login", {"key": "x"}),
    ("POST", "/api/auth/logout", {"everywhere": True}),
    ("PATCH", "/api/memory/user", {"operations": [{"action": "add", "content": "x", "old_text": "y"}]}),
    ("POST", "/v1/skills", {"name": "tea", "content": "---\nname: tea\ndescription: x\n---\n", "category": "a"}),
    ("PATCH", "/v1/skills/tea", {"content": "x", "file": "references/a.md"}),
    ("PATCH", "/api/settings/agent.reasoning_effort", {"value": "low"}),
    ("POST", "/api/model", {"provider": "nobody", "model": "x", "api_key": "k", "test_only": True, "anyway": False}),
    ("POST", "/api/model/models", {"provider": "nobody", "api_key": "k"}),
]  # fmt: skip

NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0, 1, -1])
ODD = st.sampled_from(
    ["", "\x00", "../..", "user", "auto", "\ud800", "x" * 300, "data:image/png;base64,", "https://", "🙂"]
)
LEAVES = st.none() | st.booleans() | NUMBERS | ODD | st.text(max_size=20)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ODD | st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a body, the body itself aside."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    entries = [(*path, key) for key, _ in pairs]
    return entries + [deeper for key, inner in pairs for deeper in places(inner, (*path, key))]


@st.composite
def near(draw: st.DrawFn, body: Json) -> Any:
    """The body with a few of its values replaced, left out or added to."""
    copied = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        ways = places(copied)
        if not ways:
            return {draw(ODD): draw(VALUES)}
        *way, last = draw(st.sampled_from(ways))
        holder = copied
        for step in way:
            holder = holder[step]
        action = draw(st.sampled_from(["replace", "drop", "swap", "add"]))
        if action == "replace":
            holder[last] = draw(VALUES)
        elif action == "drop":
            del holder[last]
        elif action == "swap":
            holder[last] = [holder[last]] if draw(st.booleans()) else {"type": holder[last]}
        elif isinstance(holder, dict):
            holder[draw(ODD | st.text(max_size=10))] = draw(VALUES)
        else:
            holder.append(draw(VALUES))
    return copied


@pytest.mark.parametrize(("method", "path", "body"), ROUTES, ids=[f"{method} {path}" for method, path, _ in ROUTES])
async def test_random_json_is_never_a_server_error(start: Start, method: str, path: str, body: Json) -> None:
    api = await start(
        handler=lambda _: Reply(text="Fine."), session_wait_seconds=0, max_body_bytes=100_000, ollama=True
    )
    place = path.format(**await things(api, path))

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(near(body) | VALUES)
    def draws(value: Any) -> None:
        drawn.append(json.dumps(value))

    drawn: list[str] = [json.dumps(body)]
    draws()
    for data in drawn:
        async with api.client.request(method, api.url + place, data=data) as response:
            text = await response.text()
        check_headers(response.headers)
        if response.status >= 400:
            answer = json.loads(text)
            # What is wrong with a message of MCP is told as JSON-RPC has it.
            error = answer["error"] if "jsonrpc" in answer else check_envelope(response.status, answer)
            allowed = response.status < 500 or error["code"] in DOCUMENTED.get(response.status, ())
            assert allowed, f"{response.status} {error} for {data}"


async def things(api: Api, path: str) -> dict[str, str]:
    """The ids of the objects that a path names, made as far as they can be."""
    ids = {"session": "s1", "run": "run_0", "conversation": "conv_0", "response": "resp_0", "job": "0" * 12}
    if "{session}" in path:
        await api.post("/api/sessions", {"id": "s1"})
    if "{run}" in path:
        async with api.post("/v1/runs", {"input": "x"}) as response:
            ids["run"] = (await response.json()).get("run_id", "run_0")
    if "{conversation}" in path:
        async with api.post("/v1/conversations", {}) as response:
            ids["conversation"] = (await response.json()).get("id", "conv_0")
    if "{response}" in path:
        async with api.post("/v1/responses", {"input": "x"}) as response:
            ids["response"] = (await response.json()).get("id", "resp_0")
    if "{job}" in path:
        async with api.post("/api/jobs", {"schedule": "every 30m", "prompt": "x"}) as response:
            ids["job"] = ((await response.json()).get("job") or {}).get("id", ids["job"])
    return ids
