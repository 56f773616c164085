"""One attempt at a model call: send the request, read the stream, report the facts of a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

import msgspec

from hermes.agent.assembler import Assembler, Delta
from hermes.core import limits
from hermes.core.failures import FailureFacts
from hermes.core.json_types import JsonMapping
from hermes.core.stream_parts import Finish, Text
from hermes.core.text import whole_tree
from hermes.http_client.client import Transport
from hermes.http_client.exchange import Answer, StaleStream, StreamBroken, Timeouts, TransportError
from hermes.providers.base import Encoded, Provider, WireEvent, WireRequest, refusal_facts
from hermes.providers.chunk_reader import ChunkReader, decode
from hermes.runs.control import Stop, Stopped

# Delivers a part of an answer; some parts take time.
Deliver = Callable[[Delta], Awaitable[None] | None]


class Attempt(msgspec.Struct):
    """The outcome of one request. Without `facts` the answer is complete."""

    assembler: Assembler
    facts: FailureFacts | None


_LONG_CHARS = 64 * 1024
_TOO_LONG = "The answer has more characters than it may have."


class AnswerTooLong(TransportError):
    pass


class Caller:
    """Executes requests without any policy; `decisions` chooses what to do next."""

    def __init__(
        self,
        stop: Stop,
        deliver: Deliver,
        waiting: Callable[[float], None],
        *,
        joins: bool = False,
        at_once: Callable[[str], bool] | None = None,
        chars_max: int = limits.ANSWER_CHARS_MAX,
    ) -> None:
        self._stop, self._deliver, self._waiting = stop, deliver, waiting
        # Texts that come together are joined; `at_once` says which can be delivered without awaiting.
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
        before_reading: asyncio.Future[None] | None = None,
    ) -> Attempt:
        """Nothing of an answer is read until `before_reading` is done; its error is raised."""
        facts: FailureFacts | None
        silence = _Silence(self._waiting)
        try:
            async with (
                self._stop.scope(),
                via.send(wire.method, wire.url, wire.headers, _encode(wire.body), timeouts) as answer,
            ):
                wire.body.clear()  # an answer may take long, and its request is most of the memory
                if before_reading is not None:
                    await asyncio.shield(before_reading)
                silence.since = asyncio.get_running_loop().time()
                if answer.status >= 300:
                    return Attempt(
                        assembler,
                        refusal_facts(answer.status, answer.headers, await answer.body(limits.EVENT_BYTES_MAX)),
                    )
                if answer.is_stream or (streaming and not answer.is_json):
                    await self._stream(answer, provider, assembler, timeouts.stale_s, silence)
                else:
                    for part in provider.parts(
                        WireEvent("", decode(await answer.body(limits.EVENT_BYTES_MAX)), whole=True)
                    ):
                        await carry(assembler.feed(part), self._deliver)
                    self._check_length(assembler)
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
        self, answer: Answer, provider: Provider, assembler: Assembler, stale_s: float, silence: _Silence
    ) -> None:
        reader = ChunkReader(provider, joins=self._joins)
        time = asyncio.get_running_loop().time
        last_part = quiet_since = time()
        events = quiet_bytes = quiet_lines = 0

        def cut(text: str) -> str:
            room = self._chars_max - assembler.chars
            return text if len(text) <= room else text[: max(room, 0) + 1]

        def take(chunk: bytes) -> bool:
            """Deliver text at once while the stream is awaited, without waking a task."""
            nonlocal last_part
            text = reader.text(chunk)
            if not text or self._at_once is None or assembler.inline.holds or not self._at_once(text):
                return False
            silence.since = last_part = time()
            try:
                for delta in assembler.feed_text(text if len(text) < _LONG_CHARS else cut(text)):
                    self._deliver(delta)
                if assembler.chars > self._chars_max:
                    answer.fail(AnswerTooLong(_TOO_LONG))
            except Exception as error:  # noqa: BLE001  (raised where the answer is read)
                answer.fail(error)
            return True

        if self._joins and provider.texts is not None and self._at_once is not None:
            answer.sink = take
        while chunk := await answer.read():
            silence.since = time()
            received = False
            texts: list[str] = []  # adjacent texts are joined
            try:
                for pieces, parts in reader.feed(chunk):
                    texts += pieces
                    if not pieces and not (events := events + 1) % limits.ITEMS_AT_ONCE_MAX:
                        await asyncio.sleep(0)  # let other tasks run
                    for part in parts:
                        received = True
                        if self._joins and type(part) is Text:
                            texts.append(part.text)
                            continue
                        if texts:
                            await carry(assembler.feed_text(cut("".join(texts))), self._deliver)
                            texts = []
                        if deltas := assembler.feed(part):
                            await carry(deltas, self._deliver)
                    if assembler.error is not None:
                        return
            finally:
                if texts:
                    received = True
                    await carry(assembler.feed_text(cut("".join(texts))), self._deliver)
            self._check_length(assembler)
            if reader.over:
                if reader.done and not assembler.finished:
                    assembler.feed(Finish("stop"))
                return
            if received:
                last_part = time()
                continue
            # A part may also have come through `take`.
            if quiet_since != last_part:
                quiet_since, quiet_bytes, quiet_lines = last_part, 0, 0
            quiet_bytes += len(chunk)
            quiet_lines += chunk.count(b"\n")
            if quiet_bytes > 2 * limits.EVENT_BYTES_MAX or quiet_lines > limits.QUIET_LINES_MAX:
                raise StreamBroken(f"{quiet_bytes} bytes came with nothing of an answer.", answered=True)
            if time() - last_part > stale_s * limits.COMMENTS_STRETCH:
                raise StaleStream("Nothing of an answer came.", answered=True)

    def _check_length(self, assembler: Assembler) -> None:
        if assembler.chars > self._chars_max:
            raise AnswerTooLong(_TOO_LONG)

    async def _end(self, assembler: Assembler) -> FailureFacts | None:
        if (error := assembler.error) is not None:
            return FailureFacts(
                "stream", status=error.status, code=error.code, message=error.message, exception=("ServerErrorEvent",)
            )
        if not assembler.finished:
            return FailureFacts(
                "stream", exception=("StreamBroken",), message="The stream ended before its answer did."
            )
        if deltas := assembler.finish():
            await carry(deltas, self._deliver)
        return None


async def carry(deltas: Iterable[Delta], deliver: Deliver) -> None:
    for delta in deltas:
        if (work := deliver(delta)) is not None:
            await work


class _Silence:
    """Calls `tell` for every half minute without data; `since` is when data came last."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()
        self._timer = self._loop.call_later(limits.MODEL_WAITING_S, self._check_silence)

    def end(self) -> None:
        self._timer.cancel()

    def _check_silence(self) -> None:
        silent = self._loop.time() - self.since
        if silent >= limits.MODEL_WAITING_S:
            self._tell(silent)
            silent = 0.0
        self._timer = self._loop.call_later(limits.MODEL_WAITING_S - silent, self._check_silence)


def facts_of(error: BaseException) -> FailureFacts:
    """The facts of an exception of the transport or of a vendor's client library."""
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


def _encode(body: JsonMapping) -> bytes:
    tools = body.get("tools")
    try:
        return msgspec.json.encode({**body, "tools": tools.raw} if type(tools) is Encoded else body)
    except UnicodeEncodeError:
        return msgspec.json.encode(whole_tree(body))
