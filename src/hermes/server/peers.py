"""Which user is at the other end of a connection from this machine, as the kernel tells it."""

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


class _Cannot(Exception):
    """The system does not tell who has a socket."""


class _Found(NamedTuple):
    """A socket's user. A socket that its process has closed has no inode, and its user is not told truly."""

    uid: int
    inode: int


def is_same_user(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer is the user of this process, or root; true where the system cannot tell.

    A peer on this machine that has already closed its socket is nobody's: it could be anybody's.
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
            found = _asked(client, server)
        except (_Cannot, OSError):
            found = _listed(client, server)
    except (_Cannot, OSError, ValueError, TypeError, AttributeError):
        return True
    return found is not None and found.inode != 0 and found.uid in (os.geteuid(), 0)


def _address(socket_name: tuple[str, int]) -> Address:
    """An address as it is kept by the kernel's tables of TCP: an IPv4 one in IPv6 is IPv4."""
    address = ip_address(socket_name[0].partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address, socket_name[1]


def _asked(local: Address, remote: Address) -> _Found | None:
    """The kernel's answer about the socket with these ends, which takes the same time however many there are; None:
    there is no such socket any more."""
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
        raise _Cannot
    if kind != _SOCK_DIAG_BY_FAMILY or len(answer) < _UID_AT + _UID_AND_INODE.size:
        raise _Cannot
    # Where there is no such connection, the answer may be about a socket that listens at its port.
    reported_ends = answer[_HEADER.size + 4 :][:_TUPLE_BYTES]
    same = reported_ends == ends or reported_ends == _ends(
        local[1], remote[1], _packed(local, mapped=True), _packed(remote, mapped=True)
    )
    return _Found(*_UID_AND_INODE.unpack_from(answer, _UID_AT)) if same else None


def _ends(local_port: int, remote_port: int, local: bytes, remote: bytes) -> bytes:
    """Both ends of a connection as they stand in question and answer."""
    return _PORTS.pack(local_port, remote_port) + local.ljust(16, b"\0") + remote.ljust(16, b"\0")


def _packed(end: Address, mapped: bool) -> bytes:
    """The bytes of an address; `mapped`: as that of a socket of IPv6 that speaks IPv4."""
    data = end[0].packed
    return b"\0" * 10 + b"\xff\xff" + data if mapped and len(data) == 4 else data


def _listed(local: Address, remote: Address) -> _Found | None:
    """The same from the list of all sockets."""
    wanted = {(_row(local, mapped), _row(remote, mapped)) for mapped in (False, True)}
    for table in _TABLES if os.path.exists(_TABLES[1]) else _TABLES[:1]:
        with open(table, encoding="ascii") as file:
            for row in map(str.split, file):
                if (row[1], row[2]) in wanted:
                    return _Found(int(row[7]), int(row[9]))
    return None


def _row(end: Address, mapped: bool) -> str:
    """An end of a connection as the list writes it: in words of 32 bits, each in the order of this machine."""
    data = _packed(end, mapped)
    words = struct.unpack(f"={len(data) // 4}I", data)
    return "".join(f"{word:08X}" for word in words) + f":{end[1]:04X}"
