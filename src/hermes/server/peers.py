"""Which user is at the other end of a local connection, as the kernel reports it."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _NLMSG_ERROR = 4, 20, 1, 2
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI")
_PORTS = struct.Struct("!HH")
_ANY_INTERFACE_AND_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_ID_BYTES = 48
_TUPLE_BYTES = 36
_UID_AND_INODE = struct.Struct("=II")
_UID_AT = _HEADER.size + 4 + _ID_BYTES + 12
_ALL_STATES = 0xFFFFFFFF
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_CREDENTIALS = struct.Struct("=iII")

Address = tuple[IPv4Address | IPv6Address, int]


class _Unsupported(Exception):
    """The kernel does not report a socket's user."""


class _SocketOwner(NamedTuple):
    """A socket's user. A closed socket has inode 0, and its uid is not reliable."""

    uid: int
    inode: int


def is_same_user(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer is the user of this process, or root; true where the system cannot tell.

    False for a local peer that has already closed its socket: it could be any user's.
    """
    sock = transport.get_extra_info("socket")
    try:
        if sock is not None and sock.family == socket.AF_UNIX:
            uid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
            return uid in (os.geteuid(), 0)
        client = _address(transport.get_extra_info("peername"))
        server = _address(transport.get_extra_info("sockname"))
        if not client[0].is_loopback and client[0] != server[0]:
            return True
        try:
            owner = _query_kernel(client, server)
        except (_Unsupported, OSError):
            owner = _search_tables(client, server)
    except (_Unsupported, OSError, ValueError, TypeError, AttributeError):
        return True
    return owner is not None and owner.inode != 0 and owner.uid in (os.geteuid(), 0)


def _address(socket_name: tuple[str, int]) -> Address:
    """An address as in the kernel's TCP tables: an IPv4-mapped one as IPv4."""
    address = ip_address(socket_name[0].partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address, socket_name[1]


def _query_kernel(local: Address, remote: Address) -> _SocketOwner | None:
    """Ask the kernel for one socket, in constant time; None: there is no such socket any more."""
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    ends = _ends(local[1], remote[1], local[0].packed, remote[0].packed)
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES) + ends + _ANY_INTERFACE_AND_COOKIE
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.sendto(head + body, (0, 0))
        answer = kernel.recv(4096)
    kind = _HEADER.unpack_from(answer)[1]
    if kind == _NLMSG_ERROR:
        if struct.unpack_from("=i", answer, _HEADER.size)[0] == -2:  # ENOENT
            return None
        raise _Unsupported
    if kind != _SOCK_DIAG_BY_FAMILY or len(answer) < _UID_AT + _UID_AND_INODE.size:
        raise _Unsupported
    # Without such a connection, the answer may be about the listening socket.
    reported_ends = answer[_HEADER.size + 4 :][:_TUPLE_BYTES]
    same = reported_ends == ends or reported_ends == _ends(
        local[1], remote[1], _packed(local, mapped=True), _packed(remote, mapped=True)
    )
    return _SocketOwner(*_UID_AND_INODE.unpack_from(answer, _UID_AT)) if same else None


def _ends(local_port: int, remote_port: int, local: bytes, remote: bytes) -> bytes:
    """Both ends of a connection as in a netlink message."""
    return _PORTS.pack(local_port, remote_port) + local.ljust(16, b"\0") + remote.ljust(16, b"\0")


def _packed(end: Address, mapped: bool) -> bytes:
    """`mapped`: as an IPv4-mapped IPv6 address."""
    data = end[0].packed
    return b"\0" * 10 + b"\xff\xff" + data if mapped and len(data) == 4 else data


def _search_tables(local: Address, remote: Address) -> _SocketOwner | None:
    """Look the socket up in the list of all sockets."""
    wanted = {(_row(local, mapped), _row(remote, mapped)) for mapped in (False, True)}
    for table in _TABLES if os.path.exists(_TABLES[1]) else _TABLES[:1]:
        with open(table, encoding="ascii") as file:
            for row in map(str.split, file):
                if (row[1], row[2]) in wanted:
                    return _SocketOwner(int(row[7]), int(row[9]))
    return None


def _row(end: Address, mapped: bool) -> str:
    """An address as /proc/net/tcp writes it: 32-bit groups in host byte order."""
    data = _packed(end, mapped)
    groups = struct.unpack(f"={len(data) // 4}I", data)
    return "".join(f"{word:08X}" for word in groups) + f":{end[1]:04X}"
