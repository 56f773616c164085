"""Unix sockets in private folders: paths of any length, and the peer's user."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hermes.core.limits import SOCKET_PATH_BYTES_MAX

_CREDENTIALS = struct.Struct("3i")


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """A path to a socket; one that is too long for the system is reached through its folder's descriptor."""
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def is_same_user(fd: int) -> bool:
    """Whether the peer of a connected Unix socket is this process's user."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())
