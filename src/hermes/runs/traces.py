"""OpenTelemetry traces of runs: spans from recorded events, with their times and without texts.

OpenTelemetry is not imported before an endpoint is configured."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import hermes
from hermes.core.events import FINAL, Event
from hermes.core.json_types import JsonMapping
from hermes.core.limits import TRACES_SENT_S_MAX
from hermes.runs.engine import LiveRun
from hermes.settings.config import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)
# The trace of the current request, from its header.
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")
_AGENT = "hermes"
_USAGE = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cache_read_tokens": "gen_ai.usage.cache_read.input_tokens",
    "cache_write_tokens": "gen_ai.usage.cache_creation.input_tokens",
}


def traces(settings: Settings) -> Traces | None:
    endpoint = settings.telemetry.endpoint
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning("telemetry.endpoint is set, but no traces are sent: install Hermes with its extra `otel`.")
        return None
    return Traces(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")))


@dataclass(slots=True)
class _Run:
    """The open spans of a run, and the tools it was offered."""

    span: Span
    offered: frozenset[str]
    chat: Span | None = None
    answered: bool = False
    calls: dict[str, Span] = field(default_factory=dict)


class Traces:
    """Turns events into spans and hands them to a processor."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or _AGENT, "service.version": hermes.__version__}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(_AGENT, hermes.__version__)
        self._runs: dict[str, _Run] = {}

    def close(self) -> None:
        """Export the rest, with a short timeout."""
        closing = threading.Thread(target=self._provider.shutdown, name="hermes-traces", daemon=True)
        closing.start()
        closing.join(TRACES_SENT_S_MAX)

    def hear(self, live: LiveRun, event: Event) -> None:
        if event.type in _BEGINNINGS:
            self._on_run_started(live, event)
        elif (run := self._runs.get(event.run_id)) is not None and event.type in _HANDLERS:
            _HANDLERS[event.type](self, run, event)
            if event.type in _ENDS:
                del self._runs[event.run_id]

    # --- runs -------------------------------------------------------------------------------------------------------

    def _on_run_started(self, live: LiveRun, event: Event) -> None:
        spec, state = live.spec, live.log.state
        attributes = {
            "gen_ai.agent.name": _AGENT,
            "gen_ai.conversation.id": spec.session_id,
            "hermes.run.id": spec.run_id,
        }
        attributes |= {"hermes.run.kind": spec.kind, **_model(state.model, state.provider)}
        parent = self._runs.get(spec.parent[0]) if spec.parent else None
        above = parent.calls.get(spec.parent[1], parent.span) if parent and spec.parent else None
        span = self._span("invoke_agent", _AGENT, event, above, attributes)
        self._runs[spec.run_id] = _Run(span, frozenset(event.data.get("tools", ())))

    def _on_run_ended(self, run: _Run, event: Event) -> None:
        error = "" if event.type == "run.completed" else event.data.get("failure") or event.type.removeprefix("run.")
        for span in (*run.calls.values(), run.chat):
            _end(span, event, error)
        run.span.set_attributes(_usage(event.data.get("usage", {})))
        _end(run.span, event, error)

    # --- calls of models --------------------------------------------------------------------------------------------

    def _on_model_started(self, run: _Run, event: Event) -> None:
        model = event.data["model"]
        run.chat = self._span("chat", model, event, run.span, _model(model, event.data["provider"]))
        run.answered = False

    def _on_message_completed(self, run: _Run, event: Event) -> None:
        if run.chat is not None:
            run.chat.set_attribute("gen_ai.response.finish_reasons", [event.data["finish_reason"]])
        run.answered = not event.data["partial"]  # the reason comes with the end of the run

    def _on_usage(self, run: _Run, event: Event) -> None:
        if run.chat is None or event.data["task"]:  # an auxiliary call
            return
        run.chat.set_attributes(_usage(event.data))
        if run.answered:
            _end(run.chat, event)
            run.chat = None

    def _on_attempt_failed(self, run: _Run, event: Event) -> None:
        _end(run.chat, event, event.data["failure"])
        run.chat = None

    # --- calls of tools ---------------------------------------------------------------------------------------------

    def _on_tool_started(self, run: _Run, event: Event) -> Span:
        name, call_id = event.data["name"], event.data["call_id"]
        kind = "extension" if name.startswith("mcp_") else "function"
        attributes = {"gen_ai.tool.name": name, "gen_ai.tool.call.id": call_id, "gen_ai.tool.type": kind}
        above = run.calls.get(event.data.get("parent_call_id") or "", run.span)
        span = run.calls[call_id] = self._span("execute_tool", name, event, above, attributes)
        return span

    def _on_tool_finished(self, run: _Run, event: Event) -> None:
        data = event.data
        if data["call_id"] not in run.calls:  # it was refused; the model may have invented its name
            name = data["name"] if data["name"] in run.offered else "unknown"
            self._on_tool_started(run, Event(event.run_id, event.type, data={**data, "name": name}, ts=event.ts))
        _end(run.calls.pop(data["call_id"]), event, "" if data["status"] == "ok" else data["code"] or data["status"])

    # --- spans ------------------------------------------------------------------------------------------------------

    def _span(self, operation: str, name: str, event: Event, above: Span | None, extra: JsonMapping) -> Span:
        from opentelemetry.context import get_current
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if above is None:
            context = TraceContextTextMapPropagator().extract({"traceparent": TRACEPARENT.get()}, get_current())
        else:
            context = set_span_in_context(above)
        kind = SpanKind.CLIENT if operation == "chat" else SpanKind.INTERNAL
        attributes = {"gen_ai.operation.name": operation, **extra}
        return self._tracer.start_span(f"{operation} {name}", context, kind, attributes, start_time=_ns(event))


_BEGINNINGS = ("run.started", "run.resumed")
_ENDS = FINAL | {"run.interrupted"}
_HANDLERS: dict[str, Callable[[Traces, _Run, Event], object]] = {
    "model.started": Traces._on_model_started,
    "message.completed": Traces._on_message_completed,
    "usage": Traces._on_usage,
    "model.retrying": Traces._on_attempt_failed,
    "tool.started": Traces._on_tool_started,
    "tool.finished": Traces._on_tool_finished,
    **dict.fromkeys(_ENDS, Traces._on_run_ended),
}


def _model(model: str, provider: str) -> dict[str, str]:
    return {"gen_ai.request.model": model, "gen_ai.provider.name": provider or "unknown"}


def _usage(counts: JsonMapping) -> dict[str, int]:
    return {name: counts[ours] for ours, name in _USAGE.items() if counts.get(ours)}


def _ns(event: Event) -> int:
    return int(event.ts * 1e9)


def _end(span: Span | None, event: Event, error: str = "") -> None:
    from opentelemetry.trace import Status, StatusCode

    if span is not None:
        if error:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(_ns(event))
