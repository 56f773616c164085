"""Between processes of one home: each serving process answers the others at a Unix socket of its own.

A request and its answers travel on one connection, as frames: a length, then the value (`bus/frames.py`). A connection that ends before its answer does tells that the process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hermes.bus import frames
from hermes.core.home import FILE_MODE, make_private_folder
from hermes.core.json_types import JsonObject
from hermes.core.limits import PEER_ANSWER_S_MAX, PEER_BACKLOG, PEER_FRAME_BYTES_MAX, PEER_IDLE_S
from hermes.core.processes import this_process
from hermes.core.unix_sockets import is_same_user, reachable

log = logging.getLogger(__name__)
_PREFIX, _SUFFIX = "peer-", ".sock"
_NAME = re.compile(r"peer-[0-9a-f]{24}\.sock")
_END, _VALUE, _FAILED = 0, 1, 2
Operation = Callable[..., Awaitable[Any]]
Stream = Callable[..., AsyncGenerator[Any, None]]


class PeerGone(Exception):
    """No answer came: the process is gone, does not listen, or could not answer."""


def name_of(holder: str) -> str:
    """The socket's name of a process, made of what it signs as a holder."""
    return f"{_PREFIX}{hashlib.sha256(holder.encode()).hexdigest()[:24]}{_SUFFIX}"


def is_name(name: str) -> bool:
    """Whether a text can be what `name_of` gives."""
    return _NAME.fullmatch(name) is not None


def _frame(value: object) -> bytes:
    data = frames.encode(value)
    return len(data).to_bytes(4, "big") + data


async def _read(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if not 0 < size <= PEER_FRAME_BYTES_MAX:
        raise PeerGone("a frame has no possible size")
    return frames.decode(await reader.readexactly(size))


class AnyPeerServer(Protocol):
    """What answers other processes."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class PeerServer:
    """Answers other processes of this user: `operations` with one value, `streams` with many."""

    def __init__(self, folder: Path, operations: Mapping[str, Operation], streams: Mapping[str, Stream]) -> None:
        self._folder, self._operations, self._streams = folder, operations, streams
        self._path = folder / name_of(this_process())
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. The socket gets its name once it listens, so whoever finds it and is refused knows it for dead."""
        make_private_folder(self._folder)
        draft = self._path.with_name(f".{self._path.name}.{os.urandom(4).hex()}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with reachable(draft) as path:
                sock.bind(path)
                os.chmod(draft, FILE_MODE)
            sock.listen(PEER_BACKLOG)
            self._server = await asyncio.start_unix_server(self._connected, sock=sock)
            os.replace(draft, self._path)
        except BaseException:
            sock.close()
            draft.unlink(missing_ok=True)
            raise

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        self._path.unlink(missing_ok=True)
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if is_same_user(writer.get_extra_info("socket").fileno()):
                await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, PeerGone):
            pass  # it has left
        except Exception:
            log.exception("another process could not be answered")
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, arguments = await _read(reader)
        if name in self._streams:
            # Whoever asked says nothing more: what comes next is its end.
            disconnected = asyncio.ensure_future(reader.read(1))
            sending = asyncio.ensure_future(self._send_all(self._streams[name](*arguments), writer))
            try:
                await asyncio.wait([disconnected, sending], return_when=asyncio.FIRST_COMPLETED)
            finally:
                disconnected.cancel()
                sending.cancel()
                await asyncio.wait([disconnected, sending])
            if not sending.cancelled():
                sending.result()
        elif name in self._operations:
            try:
                answer = [_VALUE, await self._operations[name](*arguments)]
            except Exception as error:  # noqa: BLE001  (told to whoever asked)
                answer = [_FAILED, f"{type(error).__name__}: {error}"]
            writer.write(_frame(answer))
            await writer.drain()

    async def _send_all(self, values: AsyncGenerator[Any, None], writer: asyncio.StreamWriter) -> None:
        async with contextlib.aclosing(values):
            async for value in values:
                writer.write(_frame([_VALUE, value]))
                await writer.drain()
        writer.write(_frame([_END, None]))
        await writer.drain()


class Peers:
    """Asks other processes of a home; without a folder there are none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        own_name, socket_names = name_of(this_process()), list[str]()
        if self._folder is not None:
            with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
                socket_names = [
                    entry.name for entry in entries if entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX)
                ]
        return [name for name in socket_names if name != own_name]

    async def ask(self, name: str, operation: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(PEER_ANSWER_S_MAX), self._connected(name, operation, arguments) as reader:
                kind, value = await _read(reader)
        except (OSError, asyncio.IncompleteReadError) as error:  # a TimeoutError is an OSError
            raise PeerGone(str(error)) from error
        if kind != _VALUE:
            raise PeerGone(str(value))
        return value

    async def ask_all(self, operation: str, *arguments: Any) -> JsonObject:
        names = self.names()
        answers = await asyncio.gather(
            *(self.ask(name, operation, *arguments) for name in names), return_exceptions=True
        )
        return {
            name: answer for name, answer in zip(names, answers, strict=True) if not isinstance(answer, BaseException)
        }

    async def follow(self, name: str, stream: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """What a process tells, to its end or to that of the process; an empty list after a long silence, which is all
        that is told then."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, PeerGone):
            async with self._connected(name, stream, arguments) as reader:
                while True:
                    try:
                        async with asyncio.timeout(PEER_IDLE_S):
                            kind, value = await _read(reader)
                    except TimeoutError:
                        kind, value = _VALUE, []
                    if kind != _VALUE:
                        return
                    yield value
                    if not value:
                        return

    @contextlib.asynccontextmanager
    async def _connected(
        self, name: str, operation: str, arguments: object
    ) -> AsyncGenerator[asyncio.StreamReader, None]:
        if self._folder is None:
            raise PeerGone("there are no others")
        path = self._folder / name
        try:
            with reachable(path) as short:
                reader, writer = await asyncio.open_unix_connection(short)
        except ConnectionRefusedError:  # what a process has left that is gone
            path.unlink(missing_ok=True)
            raise
        try:
            if not is_same_user(writer.get_extra_info("socket").fileno()):
                raise PeerGone("another user listens")
            writer.write(_frame([operation, arguments]))
            yield reader
        finally:
            writer.close()
