"""Events that differ in their text alone are read like the first of them, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.agent.assembler import Assembler, Delta, TextDelta
from hermes.agent.call import Caller
from hermes.http_client.exchange import Timeouts
from hermes.providers.base import WireRequest
from hermes.providers.chunk_reader import LOOKS_MAX, ChunkTemplate
from hermes.providers.registry import provider_for
from hermes.runs.control import Stop
from support.cutting import any_cut

PROVIDER = provider_for("chat_completions")
assert PROVIDER.texts is not None
READ = PROVIDER.texts
ODD = [
    "",
    " ",
    "a",
    "+",
    "-",
    '"',
    "\\",
    '\\"',
    "\n",
    "\n\ndata: ",
    '"}}]}',
    "é😀",
    "\u2028",
    "chat.completion.chunk",
    "c1",
]


def chunk(text: str | None, *, ident: str = "c1", ascii_only: bool = True, tight: bool = False, **more: Any) -> bytes:
    """A frame with a text, or, without one, with whatever `more` says."""
    delta = {"content": text} if text is not None else {}
    chunk = {"id": ident, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta} | more]}
    written = json.dumps(chunk, ensure_ascii=ascii_only, separators=(",", ":") if tight else None)
    return b"data: " + written.encode() + b"\n\n"


def frames(texts: Sequence[str], **how: Any) -> bytes:
    return b"".join(chunk(text, **how) for text in texts)


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("first", ODD)
def test_chunk_template_finds_any_text(first: str, ascii_only: bool, tight: bool) -> None:
    body = frames([first, *ODD], ascii_only=ascii_only, tight=tight)
    assert ChunkTemplate(READ).texts(body) == ([first, *ODD], len(body))


def test_chunk_template_leaves_other_events() -> None:
    texts, rest = frames(["a", "b"]), chunk(None, finish_reason="stop") + b"data: [DONE]\n\n"
    assert ChunkTemplate(READ).texts(texts + rest) == (["a", "b"], len(texts))
    for end in range(1, len(texts) // 2):  # nor is the beginning of an event taken for one
        assert ChunkTemplate(READ).texts(texts[:-end]) == (["a"], len(texts) // 2)


@pytest.mark.parametrize(
    "other",
    [
        chunk("b", ident="c2"),
        chunk("b", finish_reason="stop"),
        chunk(None, delta={"reasoning_content": "b"}),
        chunk(None, delta={"content": "b", "role": "assistant"}),
        b": a comment\n\n",
        b"event: x\n" + chunk("b"),
        b"\n" + chunk("b"),
        chunk("b").replace(b"\n", b"\r\n"),
        chunk("b").replace(b'"b"', b"null"),
        chunk("b").replace(b'"b"', b'"\xff"'),
        chunk("b").replace(b'"b"', b'"\\ud83d"'),
        chunk("b").replace(b'"b"', b'"b\\"'),
        chunk("b").replace(b'"b"', b'"b","refusal":"c"'),
    ],
)
def test_chunk_template_rejects_different_events(other: bytes) -> None:
    """Texts are found up to the first different event, or not at all; reading on from there misses nothing."""
    known = frames(["a"])
    alike = ChunkTemplate(READ)
    assert alike.texts(known) == (["a"], len(known))
    for body in (known + other, known + other + frames(["c"])):
        text, size = alike.texts(body)
        assert (text, size) in ((["a"], len(known)), ([], 0))
    assert alike.texts(known) == (["a"], len(known))


@pytest.mark.parametrize(
    "first", [b"", b"data: x\n\n", b"data: {}\n\n", b"data: [DONE]\n\n", chunk(None), b"event: e\n\n"]
)
def test_chunk_template_without_text_finds_nothing(first: bytes) -> None:
    assert ChunkTemplate(READ).texts(first + frames(["a"]) if first else first) == ([], 0)


def test_chunk_template_reasoning_first_uses_no_attempt() -> None:
    alike = ChunkTemplate(READ)
    for _ in range(3 * LOOKS_MAX):
        assert alike.texts(chunk(None, delta={"reasoning_content": "hm"})) == ([], 0)
    body = frames(["a", "b"])
    assert alike.texts(body) == (["a", "b"], len(body))


def test_chunk_template_gives_up_on_varying_events() -> None:
    looks: list[bytes] = []

    def read(events: Sequence[bytes], at: int) -> list[str]:
        looks.append(events[at])
        return READ(events, at)

    alike = ChunkTemplate(read)
    for n in range(100):
        alike.texts(chunk("a", ident=f"c{n}"))
    assert not alike.looks
    assert len(looks) == 2 * LOOKS_MAX


def test_chunk_template_tolerates_occasional_change() -> None:
    """For example, an answer whose events carry the second in which they were created."""
    alike = ChunkTemplate(READ)
    for second in range(3 * LOOKS_MAX):
        for _ in range(2):
            body = chunk("a", ident=f"at {second}")
            assert alike.texts(body) == (["a"], len(body))
    assert alike.looks


# --- in a stream -----------------------------------------------------------------------------------------------------


class PacketResponse:
    """An answer that comes in these packets, to the sink first where it has one."""

    status, headers, is_stream, is_json = 200, {}, True, False  # type: ignore[var-annotated]
    sink: Callable[[bytes], bool] | None = None

    def __init__(self, packets: Sequence[bytes]) -> None:
        self._packets = [packet for packet in packets if packet]

    @contextlib.asynccontextmanager
    async def send(self, *_: object) -> AsyncIterator[Any]:
        yield self

    async def read(self) -> bytes:
        while self._packets:
            packet = self._packets.pop(0)
            if self.sink is None or not self.sink(packet):
                return packet
        return b""

    def fail(self, error: BaseException) -> None:
        raise error


async def read_packets(packets: Sequence[bytes], *, joins: bool) -> tuple[str, Any, Any]:
    """The text that was delivered, the message, and what went wrong."""
    delivered: list[str] = []

    def deliver(delta: Delta) -> None:
        if isinstance(delta, TextDelta):
            delivered.append(delta.text)

    caller = Caller(Stop(), deliver, lambda _: None, joins=joins, at_once=(lambda _: True) if joins else None)
    wire = WireRequest("POST", "http://model", {}, {})
    answer = await caller.ask(PacketResponse(packets), PROVIDER, wire, Timeouts(), Assembler("r:1"), streaming=True)  # type: ignore[arg-type]
    return "".join(delivered), answer.assembler.message(), answer.facts


TOOL = [{"index": 0, "id": "t1", "function": {"name": "f", "arguments": "{}"}}]
EVENTS = st.sampled_from(
    [
        *(chunk(text) for text in ODD),
        chunk("b", ident="c2"),
        chunk(None, delta={"role": "assistant", "content": ""}),
        chunk(None, delta={"reasoning_content": "thought"}),
        chunk(None, delta={"tool_calls": TOOL}),
        chunk("b", tight=True),
        chunk("b").replace(b"\n", b"\r\n"),
        b": a comment\n\n",
        b"event: x\n" + chunk("named"),
        chunk("b").replace(b'"b"', b'"\xff"'),
    ]
)
END = chunk(None, finish_reason="stop") + b"data: [DONE]\n\n"


@given(st.lists(EVENTS, max_size=12), st.data())
def test_chunk_template_result_equals_plain_parsing(events: list[bytes], data: st.DataObject) -> None:
    body = b"".join([*events, END])
    one_by_one = [*events, END]
    expected = asyncio.run(read_packets(one_by_one, joins=False))
    assert asyncio.run(read_packets([body], joins=True)) == expected
    assert asyncio.run(read_packets(any_cut(data, body), joins=True)) == expected
    assert asyncio.run(read_packets(one_by_one, joins=True)) == expected
