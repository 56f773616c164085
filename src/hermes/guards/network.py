"""Names, certificates and connections for the URL guard, so made that a connection goes where its check said."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from hermes.guards.addresses import unwrapped
from hermes.http_client.client import HttpClient, Pending

RESOLVE_S_MAX = 5.0
CONNECT_S_MAX = 10.0


class Network:
    """The outside as the guard sees it; one per process. `lookup` hands a function to a thread."""

    def __init__(
        self,
        lookup: Callable[[Callable[[], Any]], Pending],
        *,
        ca_bundle: str | None = None,
        proxy: str | None = None,
    ) -> None:
        self._lookup, self._ca_bundle, self._proxy = lookup, ca_bundle, proxy
        self._tls: ssl.SSLContext | None = None

    async def addresses(self, host: str, port: int) -> list[str]:
        """Every address of a name. Raises OSError, TimeoutError among them."""
        async with asyncio.timeout(RESOLVE_S_MAX):
            found = await self._in_thread(partial(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM))
        return list(dict.fromkeys(at[0] for *_, at in found))

    def dial(self, address: str, port: int) -> tuple[str, int]:
        return address, port

    def is_here(self, address: str) -> bool:
        """Whether an address is one of this machine's: only those can be bound."""
        return any(_can_bind(str(found)) for found in unwrapped(address))

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
    """The HTTP client without a pool, with its addresses given and bodies as they come.

    It knows a host by the addresses that were checked, whatever its name may stand for by now. A proxy is the operator's:
    it is told the name that was checked, and looks it up for itself.
    """

    _keeps = _unpacks = False

    def __init__(self, network: Network, tls: ssl.SSLContext, known: dict[str, list[str]], proxy: str | None) -> None:
        super().__init__(proxy=proxy)
        self._network, self._tls, self._pinned = network, tls, known

    async def _addresses(self, host: str, port: int) -> list[tuple[str, int]]:
        found = await self._network.addresses(host, port) if self._proxy else self._pinned.get(host, [])
        if not found:
            raise OSError("there is no address that may be used")
        return [self._network.dial(address, port) for address in found]

    @staticmethod
    def _connect_s() -> float:
        return CONNECT_S_MAX
