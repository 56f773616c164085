"""Traces: what spans a turn leaves, how they are nested, what is not in them, and that they cost nothing when off."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from hermes.runs.traces import TRACEPARENT, Traces
from hermes.tools import delegation
from hermes.tools.framework.registry import ToolError
from support.model_server import Call, ModelServer, Reply, Request
from support.ports import refusing_port

from .conftest import MakeHarness
from .harness import Harness, Json, Running, tool

SECRET = "words-that-nobody-else-may-read"
USAGE = {"input": 10, "output": 5}


def traced(harness: Harness) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    harness.engine.listeners.append(Traces(SimpleSpanProcessor(exporter)).hear)
    return exporter


def attributes_of(span: ReadableSpan, *names: str) -> tuple[Any, ...]:
    attributes = span.attributes or {}
    return tuple(attributes.get(name) for name in names)


def inside(spans: Iterable[ReadableSpan], outer: ReadableSpan) -> list[ReadableSpan]:
    """The spans right below one, as they began."""
    assert outer.context is not None
    below = [s for s in spans if s.parent is not None and s.parent.span_id == outer.context.span_id]
    assert all(span.context and span.context.trace_id == outer.context.trace_id for span in below)
    return sorted(below, key=lambda span: span.start_time or 0)


def the(spans: Iterable[ReadableSpan], name: str) -> ReadableSpan:
    [span] = [span for span in spans if span.name == name]
    return span


async def refuse(_: Any, args: Json) -> Json:
    raise ToolError(SECRET, "not_found", SECRET)


@pytest.mark.usefixtures("quick")
async def test_trace_of_turn_with_tools_and_retry(harness: Harness, server: ModelServer) -> None:
    spans = traced(harness)
    harness.offer(tool("look"), tool("lose", refuse))
    calls = [Call("look", {"a": SECRET}, id="c1"), Call("lose", {"a": SECRET}, id="c2"), Call(SECRET, {}, id="c3")]
    server.script = [
        Reply(status=500, error=SECRET),
        Reply(text=SECRET, tool_calls=calls, usage=USAGE),
        Reply(text=SECRET, usage=USAGE),
    ]
    completed = await harness.run(server, SECRET, provider="openai", session_id="s-1")
    assert completed.result["completed"]
    spans_seen = spans.get_finished_spans()
    run = the(spans_seen, "invoke_agent hermes")
    assert run.parent is None and run.status.status_code is StatusCode.UNSET
    assert dict(run.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "hermes",
        "gen_ai.conversation.id": "s-1",
        "gen_ai.request.model": "m",
        "gen_ai.provider.name": "openai",
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 10,
        "hermes.run.id": completed.spec.run_id,
        "hermes.run.kind": "run",
    }
    below = inside(spans_seen, run)
    assert len(below) == len(spans_seen) - 1
    chats = [span for span in below if span.name == "chat m"]
    fields = ("gen_ai.operation.name", "gen_ai.request.model", "gen_ai.provider.name")
    assert {attributes_of(span, *fields) for span in chats} == {("chat", "m", "openai")}
    assert {span.kind for span in chats} == {SpanKind.CLIENT}
    fields = ("gen_ai.response.finish_reasons", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "error.type")
    assert [attributes_of(span, *fields) for span in chats] == [
        (None, None, None, "server_error"),
        (("tool_calls",), 10, 5, None),
        (("stop",), 10, 5, None),
    ]
    assert [s.status.status_code for s in chats] == [StatusCode.ERROR, StatusCode.UNSET, StatusCode.UNSET]
    fields = ("gen_ai.operation.name", "gen_ai.tool.name", "gen_ai.tool.call.id", "gen_ai.tool.type", "error.type")
    tools = [span for span in below if span not in chats]
    assert {span.name: attributes_of(span, *fields) for span in tools} == {
        "execute_tool look": ("execute_tool", "look", "c1", "function", None),
        "execute_tool lose": ("execute_tool", "lose", "c2", "function", "not_found"),
        "execute_tool unknown": ("execute_tool", "unknown", "c3", "function", "unknown_tool"),
    }
    at = {event["type"]: int(event["ts"] * 1e9) for event in completed.events}
    assert (run.start_time, run.end_time) == (at["run.started"], at["run.completed"])
    assert all(run.start_time <= s.start_time <= s.end_time <= run.end_time for s in below)  # type: ignore[operator]
    assert SECRET not in json.dumps([span.to_json() for span in spans_seen])


async def test_trace_of_turn_failing_mid_answer(harness: Harness, server: ModelServer) -> None:
    spans = traced(harness)
    server.script = [Reply(text="Half of", finish="content_filter")]
    assert (await harness.run(server)).result["partial"]
    chat, run = spans.get_finished_spans()
    assert attributes_of(chat, "error.type", "gen_ai.response.finish_reasons") == ("filtered", ("content_filter",))
    assert attributes_of(run, "error.type") == ("filtered",)
    assert run.status.status_code is chat.status.status_code is StatusCode.ERROR


async def test_trace_of_interrupted_turn_has_no_open_span(harness: Harness, server: ModelServer) -> None:
    spans = traced(harness)

    async def wait(ctx: Any, args: Json) -> Json:
        await running.control("cancel")
        await asyncio.Event().wait()
        return {}

    harness.offer(tool("wait", wait))
    server.script = [Reply(tool_calls=[Call("wait")])]
    running: Running = await harness.begin(harness.spec(server))
    await running.end()
    ended = {span.name: attributes_of(span, "error.type") for span in spans.get_finished_spans()}
    assert ended == {
        "chat m": (None,),
        "execute_tool wait": ("interrupted",),
        "invoke_agent hermes": ("cancelled",),
    }


async def test_trace_of_subagents_is_nested(harness: Harness, server: ModelServer) -> None:
    spans = traced(harness)
    harness.offer(delegation.TOOL)
    call = Call("delegate_task", {"tasks": [{"goal": "count"}, {"goal": "count"}]}, id="call_d")
    parent = [Reply(tool_calls=[call]), Reply(text="All done.")]

    def handle(request: Request) -> Reply:
        first = next(turn.text for turn in request.turns if turn.role == "user")
        return Reply(text="Three.") if first == "count" else parent.pop(0)

    server.handler = handle
    await harness.run(server)
    observed = spans.get_finished_spans()
    root = next(span for span in observed if span.parent is None)
    [delegated] = [span for span in inside(observed, root) if span.name == "execute_tool delegate_task"]
    children = inside(observed, delegated)
    assert [span.name for span in children] == ["invoke_agent hermes"] * 2
    assert [[s.name for s in inside(observed, child)] for child in children] == [["chat m"]] * 2


async def test_trace_continues_incoming_traceparent(harness: Harness, server: ModelServer) -> None:
    spans = traced(harness)
    server.script = [Reply(text="One."), Reply(text="Two.")]
    TRACEPARENT.set("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    await harness.run(server)
    TRACEPARENT.set("nonsense")
    await harness.run(server)
    first, second = [span for span in spans.get_finished_spans() if span.name == "invoke_agent hermes"]
    assert first.context and first.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert first.parent and first.parent.span_id == 0xB7AD6B7169203331
    assert second.parent is None


async def test_traces_are_exported_to_configured_endpoint(make_harness: MakeHarness, server: ModelServer) -> None:
    sent: list[tuple[str, bytes]] = []

    async def take(request: web.Request) -> web.Response:
        sent.append((request.path, await request.read()))
        return web.Response()

    collector = web.Application()
    collector.router.add_post("/{path:.*}", take)
    runner = web.AppRunner(collector)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    harness = make_harness({"telemetry": {"endpoint": f"http://127.0.0.1:{runner.addresses[0][1]}/"}})
    server.script = [Reply(text="Hello.")]
    await harness.run(server)
    await harness.close()
    await runner.cleanup()
    [(path, body)] = sent
    assert path == "/v1/traces"
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    assert "hermes" in [item.value.string_value for item in resource.resource.attributes if item.key == "service.name"]
    [scope] = resource.scope_spans
    assert [span.name for span in scope.spans] == ["chat m", "invoke_agent hermes"]


async def test_traces_without_extra_log_a_warning(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, server: ModelServer
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with refusing_port() as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        harness = make_harness()
        server.script = [Reply(text="Hello.")]
        assert (await harness.run(server)).result["completed"]
    assert [(r.levelno, "otel" in r.getMessage()) for r in caplog.records if r.name == "hermes.runs.traces"] == [
        (logging.WARNING, True)
    ]
    assert not any(hear.__module__ == "hermes.runs.traces" for hear in harness.engine.listeners)


WITHOUT = """
import asyncio, sys
from hermes import app
from hermes.core.spec import RouteChoice, RunSpec
import hermes.server.compat

async def main():
    made = await app.current()
    route = RouteChoice(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", model="m", api_mode="chat_completions", fallbacks=())
    result = await made.engine.run(RunSpec("hi", session_id="s", persist=False, route=route))
    assert result["failed"] and made._traces is None
    await made.close()

asyncio.run(main())
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_traces_off_load_no_library(make_harness: MakeHarness) -> None:
    make_harness({"agent": {"api_max_retries": 0}})
    with refusing_port() as port:
        command = [sys.executable, "-c", WITHOUT, str(port)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
