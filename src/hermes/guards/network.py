"""DNS, certificates and connections for the URL guard: connections go to the checked addresses only."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

from hermes.http_client.client import HttpClient, Pending

RESOLVE_S_MAX = 5.0
CONNECT_S_MAX = 10.0


class Network:
    def __init__(
        self, lookup: Callable[[Callable[[], Any]], Pending], *, ca_bundle: str | None = None, proxy: str | None = None
    ) -> None:
        self._lookup, self._ca_bundle, self._proxy = lookup, ca_bundle, proxy
        self._tls: ssl.SSLContext | None = None

    async def addresses(self, host: str, port: int) -> list[str]:
        """Every address of a name. Raises OSError (including TimeoutError)."""
        async with asyncio.timeout(RESOLVE_S_MAX):
            infos = await self._in_thread(partial(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM))
        return list(dict.fromkeys(at[0] for *_, at in infos))

    def dial(self, address: str, port: int) -> tuple[str, int]:
        return address, port

    def is_here(self, address: str) -> bool:
        return any(_can_bind(str(inner)) for inner in unwrap_address(address))

    async def client(self, host: str, addresses: list[str]) -> HttpClient:
        """A client for one exchange with this host, at these addresses and no others."""
        if self._tls is None:
            self._tls = await self._in_thread(partial(ssl.create_default_context, cafile=self._ca_bundle))
        return _PinnedClient(self, self._tls, {host: addresses}, self._proxy)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        job = self._lookup(function)
        try:
            return await job.future
        except asyncio.CancelledError:
            job.abandon()
            raise


def _can_bind(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


class _PinnedClient(HttpClient):
    """An HTTP client without pool and decompression, which connects to the addresses that were checked whatever the name
    resolves to by now. A proxy is the operator's: it gets the name that was checked, and looks it up itself."""

    _keeps = _unpacks = False

    def __init__(self, network: Network, tls: ssl.SSLContext, pinned: dict[str, list[str]], proxy: str | None) -> None:
        super().__init__(proxy=proxy)
        self._network, self._tls, self._pinned = network, tls, pinned

    async def _addresses(self, host: str, port: int) -> list[tuple[str, int]]:
        addresses = await self._network.addresses(host, port) if self._proxy else self._pinned.get(host, [])
        if not addresses:
            raise OSError("there is no address that may be used")
        return [self._network.dial(address, port) for address in addresses]

    @staticmethod
    def _connect_s() -> float:
        return CONNECT_S_MAX


# ---- what kind of place an IP address is, whatever it is wrapped in

Address = IPv4Address | IPv6Address

# Every kind that is not global, the gravest first. The library's own verdicts change with its version.
_KINDS = {
    kind: tuple(map(ip_network, networks.split()))
    for kind, networks in {
        "metadata": "169.254.169.254 169.254.170.2 169.254.170.23 100.100.100.200 168.63.129.16 192.0.0.192 "
        "fd00:ec2::254 fd00:ec2::23 fd20:ce::254 fe80::a9fe:a9fe",
        "link_local": "169.254.0.0/16 fe80::/10",
        "loopback": "127.0.0.0/8 ::1",
        "unspecified": "0.0.0.0/8 ::",
        "private": "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 fc00::/7 fec0::/10 64:ff9b:1::/48",
        "cgnat": "100.64.0.0/10",
        "broadcast": "255.255.255.255",
        "multicast": "224.0.0.0/4 ff00::/8",
        "reserved": "192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 "
        "240.0.0.0/4 ::/96 ::ffff:0:0:0/96 100::/64 2001:2::/48 2001:10::/28 2001:20::/28 2001:db8::/32 3fff::/20",
    }.items()
}
_UNICAST = ip_network("2000::/3")
# Those that hold an IPv4 address in their last 32 bits.
_ENDING = tuple(map(ip_network, ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48")))
# Those that are as good as the address in them, though they are outside the range for hosts.
_CARRIERS = tuple(map(ip_network, ("::ffff:0:0/96", "64:ff9b::/96")))
_ISATAP = (0x00005EFE, 0x02005EFE)


def unwrap_address(text: str) -> tuple[Address, ...]:
    address = ip_address(text.partition("%")[0])
    return (address, *_embedded_addresses(address)) if isinstance(address, IPv6Address) else (address,)


def _embedded_addresses(address: IPv6Address) -> Iterator[IPv4Address]:
    if any(address in network for network in _ENDING) or (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
        yield IPv4Address(int(address) & 0xFFFFFFFF)
    if address.sixtofour is not None:
        yield address.sixtofour
    yield from address.teredo or ()


def address_kinds(text: str) -> list[str]:
    """The kinds of an address and of those embedded in it, the gravest first; none if it is global."""
    addresses = unwrap_address(text)
    if len(addresses) > 1 and any(addresses[0] in network for network in _CARRIERS):
        addresses = addresses[1:]
    kinds = [kind for kind, networks in _KINDS.items() if any(a in network for a in addresses for network in networks)]
    outside = any(isinstance(a, IPv6Address) and a not in _UNICAST for a in addresses)
    return kinds or (["reserved"] if outside else [])
