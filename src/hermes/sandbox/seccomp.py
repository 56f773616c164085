"""Calls of the system that no namespace keeps apart, refused: the kernel's keys, sockets to the host, and io_uring."""

from __future__ import annotations

import errno
import struct
from functools import cache
from typing import NamedTuple

_LOAD, _AND, _IS, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.ENOSYS
_AF_VSOCK = 40
_IO_URING_SETUP = 425  # everywhere; what is done through it no filter sees


class _Calls(NamedTuple):
    """A kind of machine, its numbers of what is refused, and of `socket`, where only one family is."""

    machine: int
    refused: tuple[int, ...]
    socket: int
    bits: int = 0xFFFFFFFF


_KINDS = (
    _Calls(0xC000003E, (248, 249, 250), 41, 0xBFFFFFFF),  # x86_64; the bit is that of its other numbering
    _Calls(0x40000003, (286, 287, 288, 102), 359),  # i386, whose `socketcall` tells nothing of the family
    _Calls(0xC00000B7, (217, 218, 219), 198),  # aarch64
    _Calls(0x40000028, (309, 310, 311), 281),  # arm
    _Calls(0xC00000F3, (217, 218, 219), 198),  # riscv64
)


@cache
def program() -> bytes:
    lines = [_line(_LOAD, _MACHINE)]
    for kind in _KINDS:
        refuse = _line(_RETURN, _REFUSE)
        part = [_line(_LOAD, _NUMBER), _line(_AND, kind.bits)]
        for number in (*kind.refused, _IO_URING_SETUP):
            part += [_line(_IS, number, otherwise=1), refuse]
        part += [_line(_IS, kind.socket, otherwise=3), _line(_LOAD, _FIRST_ARGUMENT)]
        part += [_line(_IS, _AF_VSOCK, otherwise=1), refuse, _line(_RETURN, _ALLOW)]
        lines += [_line(_IS, kind.machine, otherwise=len(part)), *part]
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _line(code: int, value: int, otherwise: int = 0) -> bytes:
    """An instruction; a test that fails goes past so many."""
    return struct.pack("HBBI", code, 0, otherwise, value)
