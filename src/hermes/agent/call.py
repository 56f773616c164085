"""One attempt at asking a model: the request out, the stream in, and the facts when it did not work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from hermes.agent.assembler import Assembler, Delta
from hermes.agent.chunk_template import ChunkTemplate
from hermes.core.failures import FailureFacts
from hermes.core.limits import (
    ANSWER_CHARS_MAX,
    COMMENTS_STRETCH,
    EVENT_BYTES_MAX,
    ITEMS_AT_ONCE_MAX,
    JSON_VALUES_MAX,
    MODEL_WAITING_S,
    QUIET_LINES_MAX,
)
from hermes.core.stream_parts import Finish, Text
from hermes.core.text import whole_tree
from hermes.http_client.client import Transport
from hermes.http_client.exchange import Answer, StaleStream, StreamBroken, Timeouts, TransportError
from hermes.http_client.sse import SseDecoder
from hermes.providers.base import Encoded, Provider, WireEvent, WireRequest
from hermes.runs.control import Stop, Stopped

# What is to be done with a piece of an answer; some pieces take their time.
Deliver = Callable[[Delta], Awaitable[None] | None]


@dataclass(slots=True)
class Attempt:
    """What came of one request. Without `facts` the answer is whole."""

    assembler: Assembler
    facts: FailureFacts | None


_LONG_CHARS = 64 * 1024
_TOO_LONG = "The answer has more characters than it may have."


class AnswerTooLong(TransportError):
    """More came than an answer may have."""


class Caller:
    """Carries requests out. It knows no policy: what to do next is decided elsewhere."""

    def __init__(
        self,
        stop: Stop,
        deliver: Deliver,
        waiting: Callable[[float], None],
        *,
        joins: bool = False,
        at_once: Callable[[str], bool] | None = None,
        chars_max: int = ANSWER_CHARS_MAX,
    ) -> None:
        self._stop, self._deliver, self._waiting = stop, deliver, waiting
        # Texts that come together are one; `at_once` says which of them can be delivered without being waited for.
        self._joins, self._at_once, self._chars_max = joins, at_once, chars_max

    async def ask(
        self,
        via: Transport,
        provider: Provider,
        wire: WireRequest,
        timeouts: Timeouts,
        assembler: Assembler,
        *,
        streaming: bool,
    ) -> Attempt:
        """One request and its answer, assembled as it comes."""
        facts: FailureFacts | None
        silence = _Silence(self._waiting)
        try:
            async with (
                self._stop.scope(),
                via.send(wire.method, wire.url, wire.headers, _encode(wire.body), timeouts) as answer,
            ):
                wire.body.clear()  # an answer may take long, and its question is the larger part of it
                silence.broken()
                if answer.status >= 300:
                    return Attempt(
                        assembler, provider.facts(answer.status, answer.headers, await answer.body(EVENT_BYTES_MAX))
                    )
                if answer.is_stream or (streaming and not answer.is_json):
                    await self._stream(answer, provider, assembler, timeouts, silence)
                else:
                    for part in provider.parts(WireEvent("", _decode(await answer.body(EVENT_BYTES_MAX)), whole=True)):
                        await carry(assembler.feed(part), self._deliver)
            facts = await self._end(assembler)
        except Stopped:
            deadline = self._stop.reason == "deadline"
            facts = FailureFacts("stream", deadline=deadline, interrupted=not deadline)
        except AnswerTooLong:
            facts = FailureFacts("stream", code="answer_too_long")
        except TransportError as error:
            facts = await self._end(assembler) if assembler.finished else facts_of(error)
        finally:
            silence.end()
        if facts is not None:
            facts = replace(facts, delivered=assembler.delivered, drafting=assembler.drafting)
        return Attempt(assembler, facts)

    async def _stream(
        self,
        answer: Answer,
        provider: Provider,
        assembler: Assembler,
        timeouts: Timeouts,
        silence: _Silence,
    ) -> None:
        decoder = SseDecoder()
        loop = asyncio.get_running_loop()
        last_part = quiet_since = loop.time()
        events = quiet_bytes = quiet_lines = 0
        parts, ends = provider.parts, provider.ends
        plain = provider.texts if self._joins else None
        alike = ChunkTemplate(plain) if plain is not None else None

        def cut(text: str) -> str:
            """The text up to where the answer is too long."""
            room = self._chars_max - assembler.chars
            return text if len(text) <= room else text[: max(room, 0) + 1]

        def take(chunk: bytes) -> bool:
            """Text that comes while it is waited for goes on at once, without a task that has to be woken for it."""
            nonlocal last_part
            found, size = alike.texts(chunk) if alike is not None and decoder.between else ([], 0)
            if size != len(chunk):
                wires = decoder.whole(chunk)
                found = plain(wires, 0) if plain is not None and wires else []
                if len(found) != len(wires):
                    return False
            text = "".join(found)
            if not text or self._at_once is None or assembler.inline.holds or not self._at_once(text):
                return False
            silence.broken()
            last_part = loop.time()
            try:
                for delta in assembler.feed_text(text if len(text) < _LONG_CHARS else cut(text)):
                    self._deliver(delta)
                if assembler.chars > self._chars_max:
                    answer.fail(AnswerTooLong(_TOO_LONG))
            except Exception as error:  # noqa: BLE001  (it is met where the answer is read)
                answer.fail(error)
            return True

        if plain is not None and self._at_once is not None:
            answer.sink = take
        while chunk := await answer.read():
            silence.broken()
            over = brought = False
            texts: list[str] = []  # those that come together are one
            try:
                for found, names, wires in _runs(decoder, alike, chunk):
                    texts += found
                    at = 0
                    while at < len(wires):
                        if plain is not None and (found := plain(wires, at)):
                            texts += found
                            at += len(found)
                            continue
                        name, data = names[at] if names else "", wires[at]
                        at += 1
                        if data == b"[DONE]":
                            over = True
                            break
                        events += 1
                        if not events % ITEMS_AT_ONCE_MAX:
                            await asyncio.sleep(0)  # others have their turn in between
                        event = WireEvent(name, _decode(data))
                        for part in parts(event):
                            brought = True
                            if self._joins and type(part) is Text:
                                texts.append(part.text)
                                continue
                            if texts:
                                await carry(assembler.feed_text(cut("".join(texts))), self._deliver)
                                texts = []
                            await carry(assembler.feed(part), self._deliver)
                        if assembler.error is not None or (ends and (name or _type_of(event)) in ends):
                            return
                    if over:
                        break
            finally:
                if texts:
                    brought = True
                    for delta in assembler.feed_text(cut("".join(texts))):
                        if (work := self._deliver(delta)) is not None:
                            await work
            if over:
                if not assembler.finished:
                    assembler.feed(Finish("stop"))
                return
            if assembler.chars > self._chars_max:
                raise AnswerTooLong(_TOO_LONG)
            if brought:
                last_part = loop.time()
                continue
            # A part may also have come by way of `take`.
            if quiet_since != last_part:
                quiet_since, quiet_bytes, quiet_lines = last_part, 0, 0
            quiet_bytes += len(chunk)
            quiet_lines += chunk.count(b"\n")
            if quiet_bytes > 2 * EVENT_BYTES_MAX or quiet_lines > QUIET_LINES_MAX:
                raise StreamBroken(f"{quiet_bytes} bytes came with nothing of an answer.", answered=True)
            if loop.time() - last_part > timeouts.stale_s * COMMENTS_STRETCH:
                raise StaleStream("Nothing of an answer came.", answered=True)

    async def _end(self, assembler: Assembler) -> FailureFacts | None:
        if (error := assembler.error) is not None:
            return FailureFacts(
                "stream", status=error.status, code=error.code, message=error.message, exception=("ServerErrorEvent",)
            )
        if not assembler.finished:
            return FailureFacts(
                "stream", exception=("StreamBroken",), message="The stream ended before its answer did."
            )
        await carry(assembler.finish(), self._deliver)
        return None


def _runs(
    decoder: SseDecoder, alike: ChunkTemplate | None, chunk: bytes
) -> Iterator[tuple[list[str], list[str], list[bytes]]]:
    """What a chunk brings, in order: texts, or events, these with their names where any has one."""
    if alike is not None and alike.looks and (whole := decoder.taken_back(chunk)) is not None:
        chunk = whole
        found, size = alike.texts(chunk)
        if not size and 1 < (end := chunk.find(b"\n\n") + 2) < len(chunk):  # an answer may begin with something else
            yield [], *_events(decoder, chunk[:end])
            chunk = chunk[end:]
            found, size = alike.texts(chunk)
        if size:
            yield found, [], []
            chunk = chunk[size:]
    if chunk:
        yield [], *_events(decoder, chunk)


def _events(decoder: SseDecoder, chunk: bytes) -> tuple[list[str], list[bytes]]:
    if wires := decoder.whole(chunk):
        return [], wires
    events = decoder.feed(chunk)
    return [name for name, _ in events], [data for _, data in events]


async def carry(deltas: Iterable[Delta], deliver: Deliver) -> None:
    """Deliver one after the other."""
    for delta in deltas:
        if (work := deliver(delta)) is not None:
            await work


def _type_of(event: WireEvent) -> str:
    kind = event.data.get("type") if isinstance(event.data, dict) else None
    return kind if isinstance(kind, str) else ""


class _Silence:
    """Calls `tell` for every half minute in which nothing comes."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(MODEL_WAITING_S, self._look)

    def broken(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        silent = self._loop.time() - self._since
        if silent >= MODEL_WAITING_S:
            self._tell(silent)
            silent = 0.0
        self._timer = self._loop.call_later(MODEL_WAITING_S - silent, self._look)


def facts_of(error: BaseException) -> FailureFacts:
    """The facts of an exception of the transport, or of a vendor's client library."""
    answered = getattr(error, "answered", False)
    status = getattr(error, "status_code", None)
    return FailureFacts(
        "stream" if answered else "connect",
        status=status if isinstance(status, int) else None,
        code=str(getattr(error, "code", None) or ""),
        exception=tuple(cls.__name__ for cls in type(error).__mro__),
        message=str(error),
        stale=isinstance(error, StaleStream),
    )


def _encode(body: Mapping[str, Any]) -> bytes:
    tools = body.get("tools")
    try:
        return msgspec.json.encode({**body, "tools": tools.raw} if type(tools) is Encoded else body)
    except UnicodeEncodeError:
        return msgspec.json.encode(whole_tree(body))


def _decode(data: bytes) -> object:
    # Lists and objects take many times as much memory as their text.
    if len(data) > JSON_VALUES_MAX and data.count(b",") + data.count(b"[") + data.count(b"{") > JSON_VALUES_MAX:
        raise StreamBroken(f"An event has more than {JSON_VALUES_MAX} fields and items.", answered=True)
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError) as error:
        fault = error
    try:
        # Halves of characters are legal in JSON, though they are no text.
        return whole_tree(json.loads(data))
    except (ValueError, RecursionError):
        raise StreamBroken(f"An event is not valid JSON: {fault}", answered=True) from None
