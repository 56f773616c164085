"""Single blocking model calls for embedding programs, on a vendor's own client, with the same assembler and `decide`."""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec

from hermes.agent.assembler import Assembler, ReasoningDelta, TextDelta
from hermes.agent.call import facts_of
from hermes.agent.decisions import Action, CallState, decide
from hermes.agent.step import stalled_warning
from hermes.core.failures import classify
from hermes.core.json_types import JsonObject
from hermes.core.stream_parts import Assembled
from hermes.providers.base import WireEvent
from hermes.providers.registry import provider_for

# A client, a stream or an answer of a vendor's own library, which need not be installed.
Vendor = Any
RECEIVING = "receiving stream response"


class SingleCalls:
    """The single-call methods of `AIAgent`. A turn does not pass through them."""

    api_mode: str
    base_url: str
    _api_key: str
    stream_delta_callback: Callable[[str | None], object] | None
    reasoning_callback: Callable[[str], object] | None
    _stream_callback: Callable[[str], object] | None
    _interrupt_requested: bool
    _disable_streaming: bool
    _anthropic_client: Vendor
    _live_client: Vendor
    _live_stream: Vendor
    _current_streamed_assistant_text: str

    # --- what callers may replace -------------------------------------------------------------------------------

    def _create_request_openai_client(self) -> Vendor:
        from openai import OpenAI

        return OpenAI(api_key=self._api_key or "none", base_url=self.base_url or None, max_retries=0)

    def _close_request_openai_client(self, client: Vendor) -> None:
        client.close()

    def _touch_activity(self, description: str) -> None:
        """A hook for embedding programs."""

    def _has_stream_consumers(self) -> bool:
        return self.stream_delta_callback is not None or self._stream_callback is not None

    def _fire_stream_delta(self, text: str) -> None:
        self._current_streamed_assistant_text += text
        for callback in (self.stream_delta_callback, self._stream_callback):
            if callback is not None:
                callback(text)

    def _fire_reasoning_delta(self, text: str) -> None:
        if self.reasoning_callback is not None:
            self.reasoning_callback(text)

    # --- the calls ----------------------------------------------------------------------------------------------

    def _interruptible_streaming_api_call(
        self, api_kwargs: JsonObject, on_first_delta: Callable[[], object] | None = None
    ) -> Vendor:
        """One streamed call in the form of the agent's `api_mode`; returns the vendor's kind of answer."""
        if self.api_mode == "codex_responses":
            return self._run_codex_stream(api_kwargs, on_first_delta=on_first_delta)
        if self.api_mode == "anthropic_messages":
            return self._anthropic_stream(api_kwargs, on_first_delta)
        usage: list[Vendor] = []

        def stream(client: Vendor) -> Iterator[Vendor]:
            for chunk in self._opened(client.chat.completions.create(**{**api_kwargs, "stream": True})):
                if getattr(chunk, "usage", None) is not None:
                    usage[:] = [chunk.usage]
                yield chunk

        message, _ = self._attempts("chat_completions", self._request_client, stream, on_first_delta)
        return _as_completion(message, usage[0] if usage else None)

    def _run_codex_stream(
        self, api_kwargs: JsonObject, client: Vendor = None, on_first_delta: Callable[[], object] | None = None
    ) -> Vendor:
        """A Responses call through the streaming helper; when connections keep breaking, once through plain create."""

        def stream(live: Vendor) -> Iterator[Vendor]:
            with live.responses.stream(**api_kwargs) as events:
                yield from self._opened(events)
                final.append(events.get_final_response())

        final: list[Vendor] = []
        try:
            message, whole = self._attempts("codex_responses", self._given_or_own(client), stream, on_first_delta)
        except Exception as error:
            if classify(facts_of(error)) not in ("connect", "stream_lost") or self._interrupt_requested:
                raise
            return self._run_codex_create_stream_fallback(api_kwargs, client=client)
        return final[-1] if whole and final else _as_response(message)

    def _run_codex_create_stream_fallback(self, api_kwargs: JsonObject, client: Vendor = None) -> Vendor:
        final: list[Vendor] = []

        def stream(live: Vendor) -> Iterator[Vendor]:
            events = self._opened(live.responses.create(**{**api_kwargs, "stream": True}))
            try:
                for event in events:
                    if (
                        getattr(event, "response", None) is not None
                        and getattr(event, "type", "") == "response.completed"
                    ):
                        final[:] = [event.response]
                    yield event
            finally:
                if callable(close := getattr(events, "close", None)):
                    close()

        message, whole = self._attempts("codex_responses", self._given_or_own(client), stream, None)
        return final[0] if whole and final else _as_response(message)

    def _anthropic_stream(self, api_kwargs: JsonObject, on_first_delta: Callable[[], object] | None) -> Vendor:
        final: list[Vendor] = []

        def stream(client: Vendor) -> Iterator[Vendor]:
            with client.messages.stream(**api_kwargs) as events:
                yield from self._opened(events)
                final.append(events.get_final_message())

        @contextmanager
        def client() -> Iterator[Vendor]:
            if self._anthropic_client is None:
                from anthropic import Anthropic

                self._anthropic_client = Anthropic(api_key=self._api_key, base_url=self.base_url or None, max_retries=0)
            yield self._anthropic_client

        message, whole = self._attempts("anthropic_messages", client, stream, on_first_delta)
        return final[-1] if whole and final else _as_anthropic(message)

    def _opened(self, stream: Vendor) -> Vendor:
        """Remember the open stream, so that an interrupt can end it."""
        self._live_stream = stream
        return stream

    def _cut_off(self) -> None:
        """End a blocked read from another thread: closing a socket does not wake the reader, shutting it down does."""
        for name in ("response", "_response"):
            extensions = getattr(getattr(self._live_stream, name, None), "extensions", None)
            if isinstance(extensions, dict) and "network_stream" in extensions:
                with suppress(OSError):
                    extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
                return

    # --- one mechanism for all ----------------------------------------------------------------------------------

    def _attempts(
        self,
        api_mode: str,
        open_client: Callable[[], Vendor],
        stream: Callable[[Vendor], Iterable[Vendor]],
        on_first_delta: Callable[[], object] | None,
    ) -> tuple[Assembled, bool]:
        """The answer, and whether it is complete. Of the decisions only `reconnect` and `keep_partial` apply here."""
        tried: Counter[Action] = Counter()
        self._current_streamed_assistant_text = ""
        while True:
            receiver = _Receiver(self, api_mode, on_first_delta)
            try:
                with open_client() as client:
                    self._live_client = client
                    for event in stream(client):
                        receiver.take(event)
                receiver.end()
                return receiver.assembler.message(), True
            except Exception as error:
                if receiver.assembler.delivered:
                    return receiver.partial(), False
                if self._interrupt_requested:
                    raise InterruptedError("The call was interrupted.") from error
                if not self._may_reconnect(error, tried, receiver.assembler):
                    raise
            finally:
                self._live_client = self._live_stream = None

    def _may_reconnect(self, error: Exception, tried: Counter[Action], assembler: Assembler) -> bool:
        """Whether to retry, after the backoff."""
        kind = classify(replace(facts_of(error), drafting=assembler.drafting))
        retries = os.environ.get("HERMES_STREAM_RETRIES", "")
        state = CallState(
            tried=tried,
            reconnects_max=int(retries) if retries.isdigit() else 2,
            possible=frozenset({"unstream"}),
            drafting=assembler.drafting,
            jitter=random.random(),  # noqa: S311  (spreads reconnects, guards nothing)
        )
        decision = decide(kind, state)
        if decision.action == "unstream":
            self._disable_streaming = True
        if decision.action != "reconnect":
            return False
        tried["reconnect"] += 1
        time.sleep(decision.wait_seconds)
        return True

    @contextmanager
    def _request_client(self) -> Iterator[Vendor]:
        client = self._create_request_openai_client()
        try:
            yield client
        finally:
            self._close_request_openai_client(client)

    def _given_or_own(self, client: Vendor) -> Callable[[], object]:
        @contextmanager
        def given() -> Iterator[Vendor]:
            yield client

        return self._request_client if client is None else given


class _Receiver:
    """Feeds one attempt's events through the translator and the assembler to the callbacks."""

    def __init__(self, owner: SingleCalls, api_mode: str, on_first_delta: Callable[[], object] | None) -> None:
        self._owner = owner
        self._provider = provider_for(api_mode)
        self._on_first = on_first_delta
        self.assembler = Assembler(os.urandom(8).hex())

    def take(self, event: Vendor) -> None:
        owner = self._owner
        owner._touch_activity(RECEIVING)
        if owner._interrupt_requested:
            raise InterruptedError("The call was interrupted.")
        data = plain(event)
        name = data.get("type", "") if isinstance(data, dict) else ""
        for part in self._provider.parts(WireEvent(name if isinstance(name, str) else "", data)):
            self._fire(self.assembler.feed(part))

    def end(self) -> None:
        self._fire(self.assembler.finish())

    def partial(self) -> Assembled:
        self.end()
        message = self.assembler.message()
        text = message.text
        if names := self.assembler.drafting:
            warning = f"\n\n{stalled_warning(names)}"
            self._owner._fire_stream_delta(warning)
            text += warning
        return msgspec.structs.replace(message, text=text, tool_calls=[], finish_reason="length", complete=False)

    def _fire(self, deltas: Iterable[Vendor]) -> None:
        for delta in deltas:
            if self._on_first is not None:
                first, self._on_first = self._on_first, None
                first()
            if type(delta) is TextDelta:
                self._owner._fire_stream_delta(delta.text)
            elif type(delta) is ReasoningDelta:
                self._owner._fire_reasoning_delta(delta.text)


def plain(value: Vendor) -> Vendor:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump(warnings=False))
    return {key: plain(item) for key, item in vars(value).items()} if hasattr(value, "__dict__") else None


def _as_completion(message: Assembled, usage: Vendor) -> SimpleNamespace:
    calls = [
        SimpleNamespace(
            id=call.id,
            type="function",
            function=SimpleNamespace(name=call.name, arguments=call.arguments),
            extra_content=call.extra,
        )
        for call in message.tool_calls
    ]
    answer = SimpleNamespace(
        role="assistant",
        content=message.text or None,
        tool_calls=calls or None,
        reasoning_content=message.reasoning or None,
    )
    choice = SimpleNamespace(index=0, message=answer, finish_reason=message.finish_reason)
    return SimpleNamespace(model=message.model or None, choices=[choice], usage=usage, partial=not message.complete)


def _as_response(message: Assembled) -> SimpleNamespace:
    text = SimpleNamespace(type="output_text", text=message.text)
    item = SimpleNamespace(type="message", role="assistant", content=[text])
    why = SimpleNamespace(reason="max_output_tokens")
    status = "completed" if message.complete else "incomplete"
    return SimpleNamespace(
        output=[item],
        output_text=message.text,
        status=status,
        incomplete_details=None if message.complete else why,
        usage=None,
        partial=not message.complete,
    )


def _as_anthropic(message: Assembled) -> SimpleNamespace:
    block = SimpleNamespace(type="text", text=message.text)
    return SimpleNamespace(
        role="assistant", content=[block], stop_reason="max_tokens", usage=None, partial=not message.complete
    )
