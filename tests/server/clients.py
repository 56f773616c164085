"""HTTP clients of the server tests: strict readers of responses, event streams, and raw sockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

from support.model_server import ModelServer, Request
from support.waiting import DEADLINE_S
from support.wire import stream_parts

from .conftest import PROVIDER_KEY

Json = dict[str, Any]

SECURITY = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Strict-Transport-Security": "max-age=31536000; includeSubDomains",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "X-XSS-Protection": "0",
    "Referrer-Policy": "no-referrer",
    "Server": "hermes",
}
JSON_TYPE = "application/json; charset=utf-8"
MADE_ID = re.compile(r"req_[0-9a-f]{32}")
TYPES = {429: "rate_limit_error", 403: "permission_error"}
MESSAGES_TYPES = {
    **TYPES,
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}

# --- answers ---------------------------------------------------------------------------------------------------------


def check_headers(headers: Mapping[str, str], request_id: str | None = None) -> None:
    """Check the headers of every response."""
    by_name = {name.lower(): value for name, value in headers.items()}
    assert {name: by_name.get(name.lower()) for name in SECURITY} == SECURITY
    if request_id is None:
        assert MADE_ID.fullmatch(by_name["x-request-id"]), by_name["x-request-id"]
    else:
        assert by_name["x-request-id"] == request_id


def check_envelope(status: int, body: Any) -> Json:
    """Check an error envelope, and return the error object."""
    assert isinstance(body, dict), body
    error, types, other = body["error"], TYPES, "server_error"
    if isinstance(error, str):  # of the Ollama protocol
        assert error and set(body) == {"error", "code"}, body
        return {"message": error, "code": body["code"]}
    if "type" in body and "sequence_number" not in body:  # of the Messages protocol; numbered events are of Responses
        assert body["type"] == "error" and body["request_id"], body
        types, other = MESSAGES_TYPES, "api_error"
    assert {"message", "type", "param", "code"} <= set(error), error
    assert isinstance(error["message"], str), error
    assert error["message"], error
    assert error["param"] is None or isinstance(error["param"], str), error
    kind = types.get(status, other if status >= 500 else "invalid_request_error")
    assert error["type"] == kind, (status, error)
    return dict(error)


async def read_json(response: aiohttp.ClientResponse, status: int = 200) -> Json:
    """Check status and headers, and return the JSON body."""
    text = await response.text()
    assert response.status == status, f"{response.status}: {text}"
    assert response.headers["Content-Type"] == JSON_TYPE
    check_headers(response.headers)
    body: Json = json.loads(text)
    if status >= 400:
        check_envelope(status, body)
    return body


async def read_error(response: aiohttp.ClientResponse, status: int, code: str, param: str | Any | None = ...) -> Json:
    """Check status and code of an error response, and return the error object."""
    error: Json = (await read_json(response, status))["error"]
    assert error["code"] == code, error
    if param is not ...:
        assert error["param"] == param, error
    return error


def user(text: Any = "hi", **fields: Any) -> Json:
    """A chat completion's body with one user message."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def function(name: str, **properties: Json) -> Json:
    """A client's tool, in the form of chat completions."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


def responses_tool(tool: Json) -> Json:
    """A tool in the form of the Responses API."""
    return {"type": "function", **tool["function"]}


# --- streams ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """A server-sent event; `data` is parsed unless it is `[DONE]`."""

    data: Any
    event: str | None = None
    id: str | None = None


def frame(block: str) -> Frame | None:
    """One block of lines as a frame; None for a comment."""
    lines = [line for line in block.split("\n") if line]
    if all(line.startswith(":") for line in lines):
        return None
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        assert name in ("event", "data", "id"), f"a line that is no field: {line!r}"
        assert name not in fields, f"a second {name} in {block!r}"
        fields[name] = value
    data = fields["data"]
    return Frame(data if data == "[DONE]" else json.loads(data), fields.get("event"), fields.get("id"))


def frames(text: str) -> list[Frame]:
    """All frames of a whole stream, comments left out."""
    assert text.endswith("\n\n"), text[-200:]
    return [parsed for block in text.split("\n\n") if block and (parsed := frame(block)) is not None]


class Stream:
    """Reads a stream of server-sent events incrementally."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.comments: list[str] = []
        self._left = ""

    async def block(self, timeout: float = DEADLINE_S) -> str | None:
        """Read the next block of lines, a comment or a frame; None at EOF."""
        async with asyncio.timeout(timeout):
            while "\n\n" not in self._left:
                data = await self.response.content.readany()
                if not data:
                    assert not self._left, self._left
                    return None
                self._left += data.decode()
        block, self._left = self._left.split("\n\n", 1)
        return block

    async def next(self, timeout: float = DEADLINE_S) -> Frame:
        """The next frame."""
        while (block := await self.block(timeout)) is not None:
            if (parsed := frame(block)) is not None:
                return parsed
            self.comments.append(block)
        raise EOFError("the stream is over")

    async def until(self, condition: Callable[[Frame], Any]) -> list[Frame]:
        """Read frames up to and including the first that fulfils the condition."""
        frames = [await self.next()]
        while not condition(frames[-1]):
            frames.append(await self.next())
        return frames

    async def rest(self) -> list[Frame]:
        """Read all remaining frames."""
        frames = []
        while True:
            try:
                frames.append(await self.next())
            except EOFError:
                return frames


def chat_text(frames: Iterable[Frame], key: str = "content") -> str:
    """The text of a chat stream's deltas."""
    chunks = [item.data for item in frames if item.event is None and item.data != "[DONE]"]
    return "".join(choice["delta"].get(key) or "" for chunk in chunks for choice in chunk["choices"])


async def stream_of(response: aiohttp.ClientResponse) -> list[Frame]:
    """Check that a response is an event stream, and return all frames."""
    text = await response.text()
    assert response.status == 200, text
    check_stream_headers(response.headers)
    return frames(text)


def check_stream_headers(headers: Mapping[str, str]) -> None:
    """Check the headers of every stream."""
    check_headers(headers)
    assert headers["Content-Type"].split(";")[0] == "text/event-stream"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Accel-Buffering"] == "no"


# --- bare sockets ----------------------------------------------------------------------------------------------------


@dataclass
class RawResponse:
    """A response read from a raw socket."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RawConnection:
    """A raw HTTP connection: the test writes every byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, url: str, receive_buffer: int | None = None) -> Self:
        host, port = url.removeprefix("http://").split(":")
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        limit = 2**16 if receive_buffer is None else receive_buffer
        return cls(*await asyncio.open_connection(sock=sock, limit=limit))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, data: bytes | str) -> None:
        self.writer.write(data.encode() if isinstance(data, str) else data)
        await self.writer.drain()

    async def request(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        """Send a request, with a JSON body if given."""
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + data)

    async def head(self, timeout: float = DEADLINE_S) -> RawResponse:
        """Read status and headers of the next response."""
        async with asyncio.timeout(timeout):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        pairs = [line.split(": ", 1) for line in lines]
        names = [name.lower() for name, _ in pairs]
        assert len(names) == len(set(names)), f"a header twice: {head}"
        return RawResponse(int(first.split(" ")[1]), dict(pairs))

    async def answer(self, timeout: float = DEADLINE_S) -> RawResponse:
        """Read the next response with its body (Content-Length)."""
        response = await self.head(timeout)
        length = next(value for name, value in response.headers.items() if name.lower() == "content-length")
        async with asyncio.timeout(timeout):
            response.body = await self.reader.readexactly(int(length))
        return response

    async def read_until(self, marker: bytes, timeout: float = DEADLINE_S) -> bytes:
        async with asyncio.timeout(timeout):
            return await self.reader.readuntil(marker)

    async def close(self) -> None:
        """Close normally: the peer reads EOF."""
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return

    async def half_close(self) -> None:
        """Shut down the sending side."""
        self.writer.write_eof()

    def reset(self) -> None:
        """Abort the connection with a TCP reset."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


# --- a provider that waits -------------------------------------------------------------------------------------------


class HeldModel(ModelServer):
    """A scripted provider that holds each piece of its answer until the test releases it."""

    def __init__(self, *script: Any, **fields: Any) -> None:
        super().__init__(*script, **fields)
        self._gate = asyncio.Semaphore(0)
        self._open = False

    def release(self, pieces: int = 1) -> None:
        """Release that many pieces."""
        for _ in range(pieces):
            self._gate.release()

    def release_all(self) -> None:
        """Release this and all later answers."""
        self._open = True
        self.release(1000)

    @property
    def settings(self) -> Json:
        """Settings that make this the model of the server."""
        return {"model": {"default": "test-model", "base_url": f"{self.url}/v1", "api_key": PROVIDER_KEY}}

    async def _answer(self, raw: web.Request, record: Request) -> web.StreamResponse:
        record.reply = reply = await self._next_reply(record)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(raw)
        for piece, data in stream_parts(record.protocol, reply, record.body, record.key):
            if piece and not self._open:
                await self._gate.acquire()
            await response.write(data)
            record.sent += len(data)
        return response

    async def wait_for_request(self, count: int = 1) -> Request:
        """Wait for the request of that number."""
        await self.until(lambda: len(self.requests) >= count)
        return self.requests[count - 1]


async def pieces(response: aiohttp.ClientResponse) -> AsyncIterator[Frame]:
    """Iterate over the frames of a stream."""
    stream = Stream(response)
    while True:
        try:
            yield await stream.next()
        except EOFError:
            return


def sent_messages(request: Request, *roles: str) -> list[tuple[str, str]]:
    """A provider request's messages as pairs of role and text, without the instructions."""
    return [
        (turn.role, turn.text) for turn in request.turns if turn.role != "system" and (not roles or turn.role in roles)
    ]


def system_of(request: Request) -> str:
    """The system prompt of a provider request."""
    return "\n".join(turn.text for turn in request.turns if turn.role == "system")


def tool_names(request: Request) -> list[str]:
    """The names of the tools that the model was offered."""
    return [entry["function"]["name"] for entry in request.body.get("tools") or []]
