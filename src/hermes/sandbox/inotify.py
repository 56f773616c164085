"""New and changed files in folders, by inotify."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import termios
from collections.abc import Iterator

MODIFY = 0x2
_MOVED_TO, _CREATE, _Q_OVERFLOW, _IGNORED = 0x80, 0x100, 0x4000, 0x8000
_ONLYDIR, _EXCL_UNLINK, _MASK_ADD = 0x1000000, 0x4000000, 0x20000000
_APPEARS = _CREATE | _MOVED_TO | _ONLYDIR | _EXCL_UNLINK
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """`exhausted`: the system has no more watches, so not every folder is watched. `overflowed`: events were lost."""

    def __init__(self) -> None:
        self.fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._folders: dict[int, str] = {}
        self.exhausted = self.overflowed = False

    def watch(self, fd: int, path: str, more: int = 0) -> None:
        """Report what appears in the folder of this descriptor as below `path`; `more` are further kinds of events."""
        name = f"/proc/self/fd/{fd}".encode()
        watch = _libc.inotify_add_watch(self.fd, name, _APPEARS | more | (_MASK_ADD if more else 0))
        if watch >= 0:
            self._folders[watch] = path
        elif ctypes.get_errno() in (errno.ENOSPC, errno.ENOMEM):
            self.exhausted = True

    def events(self) -> Iterator[tuple[str, bool]]:
        """The paths of pending events with whether they are new. Later events are left for the next call."""
        (left,) = struct.unpack("i", fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)))
        while left > 0:
            data = os.read(self.fd, 65_536)
            left -= len(data)
            at = 0
            while at < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, at)
                name = os.fsdecode(data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0"))
                at += _EVENT.size + length
                if mask & _Q_OVERFLOW:
                    self.overflowed = True
                elif mask & _IGNORED:
                    self._folders.pop(watch, None)
                elif (folder := self._folders.get(watch)) is not None and name:
                    yield f"{folder}/{name}", bool(mask & (_CREATE | _MOVED_TO))

    def close(self) -> None:
        os.close(self.fd)
