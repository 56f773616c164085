"""A TCP proxy before PostgreSQL that loses the connection around a COMMIT."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

# Which part of a COMMIT is lost: what asks for it; only the word itself, so that the rest of the transaction has arrived;
# the answer. `late`: what asks for it arrives after the client has gone.
Loss = Literal["request", "word", "answer", "late"]


class CommitProxy:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self._server = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        user = parts.netloc.rpartition("@")[0]
        self.url = urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{self._listener.getsockname()[1]}"))
        self._losses: list[Loss] = []
        self._late: list[tuple[socket.socket, bytes]] = []
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_next(self, loss: Loss) -> None:
        """Lose this part of the next COMMIT."""
        self._losses.append(loss)

    @property
    def is_due(self) -> bool:
        return bool(self._losses)

    def deliver_late(self) -> None:
        """Send the withheld data, and return when the server has processed it."""
        server, data = self._late.pop()
        with contextlib.suppress(OSError):  # the server may have closed the connection
            server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            while server.recv(65536):
                pass

    def close(self) -> None:
        for sock in (self._listener, *self._open):
            _close(sock)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                try:
                    server = socket.create_connection(self._server)
                except OSError:
                    _close(client)
                    continue
                self._open.append(server)
                threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        muted = threading.Event()
        answering = threading.Thread(target=_copy, args=(server, client, muted), daemon=True)
        answering.start()
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                if self._losses and b"COMMIT" in data:
                    muted.set()
                    self._lose(self._losses.pop(0), data, client, server)
                    return
                server.sendall(data)
        _close(server)

    def _lose(self, loss: Loss, data: bytes, client: socket.socket, server: socket.socket) -> None:
        if loss == "answer":
            server.sendall(data)
            server.shutdown(socket.SHUT_WR)  # the server ends when it has done everything, and then the client is left
            return
        _close(client)
        if loss == "request":
            _close(server)
        elif loss == "late":
            self._late.append((server, data))
        else:
            # A message begins with its type and length: `P`, four bytes, the statement's name, the statement.
            server.sendall(data[: data.index(b"COMMIT") - 6] + b"H\x00\x00\x00\x04")


def _copy(source: socket.socket, target: socket.socket, muted: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 20):
            if not muted.is_set():
                target.sendall(data)
        _close(target)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


@contextlib.contextmanager
def commit_proxy(url: str) -> Iterator[CommitProxy]:
    proxy = CommitProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
