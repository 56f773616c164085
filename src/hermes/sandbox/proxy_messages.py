"""HTTP requests as the egress proxy reads them: strict, so that no server reads the same bytes in another way."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from hermes.core.limits import CHUNK_BYTES_MAX, EGRESS_HEAD_BYTES_MAX, EGRESS_HEAD_S_MAX

Headers = list[tuple[str, str]]

_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/(1\.[01])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t -~\x80-\xff]*)?\r\n")
_HOP_BY_HOP_TEXT = "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer upgrade"
_HOP_BY_HOP = frozenset(_HOP_BY_HOP_TEXT.split())
# What the proxy writes anew: where the body ends, and the host that was checked.
FRAMING = frozenset({"host", "content-length", "transfer-encoding"})


class Refused(Exception):
    """A request that is answered with an error. The reason is one line of ASCII."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str
    version: str
    headers: Headers

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


async def read_request(reader: asyncio.StreamReader) -> Request:
    try:
        async with asyncio.timeout(EGRESS_HEAD_S_MAX):
            head = await reader.readuntil(b"\r\n\r\n")
    except TimeoutError:
        raise Refused(408, "Hermes: the request took too long to arrive.") from None
    except asyncio.LimitOverrunError:
        raise Refused(431, f"Hermes: the request head is longer than {EGRESS_HEAD_BYTES_MAX} bytes.") from None
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    request_line, headers = _REQUEST_LINE.fullmatch(first), [_HEADER.fullmatch(line) for line in lines]
    if request_line is None:
        raise Refused(400, "Hermes: the request line is malformed.")
    method, target, version = request_line.groups()
    parsed = [(header[1], header[2].strip(" \t")) for header in headers if header is not None]
    if len(parsed) != len(headers):
        raise Refused(400, "Hermes: a header of the request is malformed.")
    return Request(method, target, version, parsed)


def body_length(request: Request) -> int | None:
    """The length of the body; None where it is chunked. What two parsers could read differently is refused: that is how
    a second request is hidden inside a first one."""
    encodings, lengths = request.values("transfer-encoding"), request.values("content-length")
    if encodings:
        if lengths or request.version == "1.0" or [value.lower() for value in encodings] != ["chunked"]:
            raise Refused(400, "Hermes: the Transfer-Encoding of the request is not accepted.")
        length = None
    elif not lengths:
        return 0
    elif len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise Refused(400, "Hermes: the Content-Length of the request is malformed.")
    else:
        length = int(lengths[0])
    if request.method == "CONNECT" and length != 0:
        raise Refused(400, "Hermes: CONNECT takes no body.")
    return length


async def read_body(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    if length is not None:
        async for data in _exactly(reader, length):
            yield data
        return
    while size := await _chunk_size(reader):
        async for data in _exactly(reader, size):
            yield data
        if await reader.readexactly(2) != b"\r\n":
            raise Refused(400, "Hermes: a chunk of the request is malformed.")
    trailer_bytes = 0
    while (line := await _line(reader)) != b"\r\n":  # dropped
        trailer_bytes += len(line)
        if trailer_bytes > EGRESS_HEAD_BYTES_MAX:
            raise Refused(400, "Hermes: the trailer of the request is too long.")


async def _exactly(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    while length:
        data = await reader.read(min(length, CHUNK_BYTES_MAX))
        if not data:
            raise ConnectionResetError("the client has gone")
        length -= len(data)
        yield data


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    if (line := _CHUNK_LINE.fullmatch(await _line(reader))) is None:
        raise Refused(400, "Hermes: a chunk of the request is malformed.")
    return int(line[1], 16)


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError:
        raise Refused(400, "Hermes: a line of the request's body is too long.") from None


def hop_by_hop(headers: Headers) -> frozenset[str]:
    """The headers that are not passed on, in lower case. Those that frame the body always are."""
    named = {name.strip().lower() for key, value in headers if key.lower() == "connection" for name in value.split(",")}
    return _HOP_BY_HOP | (named - FRAMING)


def format_head(first: str, headers: Iterable[tuple[str, str]]) -> bytes:
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in headers), "", ""]).encode("latin-1")
