"""The asynchronous HTTP client: a connection pool per origin, DNS, proxies, TLS."""

from __future__ import annotations

import asyncio
import base64
import re
import socket
import ssl
from asyncio.staggered import staggered_race
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from yarl import URL

from hermes.core.json_types import JsonObject
from hermes.core.limits import CONNECT_S_MAX, HEAD_BYTES_MAX, KEPT_ALIVE_S, NAMES_KEPT_S, NEXT_ADDRESS_S
from hermes.http_client.exchange import Answer, ConnectFailed, Connection, RequestTimeout, Timeouts, TlsFailed, plain

_P = TypeVar("_P", "Connection", "_Tunnel", "_Stream")


class Transport(Protocol):
    def send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeouts: Timeouts
    ) -> AbstractAsyncContextManager[Answer]: ...


class Pending(Protocol):
    """A call in a thread: its result, and cancelling it."""

    future: asyncio.Future[Any]

    def abandon(self) -> None: ...


class _Endpoint(NamedTuple):
    """The target of a URL."""

    scheme: str
    host: str
    port: int
    authority: str
    target: str
    url: str


@lru_cache(maxsize=256)
def _endpoint(url: str) -> _Endpoint:
    try:
        parsed = URL(url)
        host, port = parsed.raw_host, parsed.port
        if parsed.scheme not in ("http", "https") or not host or port is None:
            raise ValueError
    except (ValueError, UnicodeError):
        raise ConnectFailed("The address is not an http or https URL.") from None
    name = f"[{host}]" if ":" in host else host
    authority = name if parsed.is_default_port() else f"{name}:{port}"
    return _Endpoint(parsed.scheme, host, port, authority, parsed.raw_path_qs, url)


# --- the client ------------------------------------------------------------------------------------------------------


class Exchange:
    def __init__(
        self, client: HttpClient, method: str, url: str, headers: Mapping[str, str], body: bytes, timeouts: Timeouts
    ) -> None:
        self._client, self._timeouts = client, timeouts
        self._call: tuple[str, str, Mapping[str, str], bytes] | None = (method, url, headers, body)
        self._answer: Answer | None = None

    async def __aenter__(self) -> Answer:
        assert self._call is not None, "an exchange is entered once"
        call, self._call = self._call, None
        self._answer = await self._client._ask(*call, self._timeouts)
        return self._answer

    async def __aexit__(self, *_: object) -> None:
        if self._answer is not None:
            self._answer.close()


class HttpClient:
    """Connections of the running loop, kept for a while after an exchange. The constructor does no I/O. `lookup` runs a
    function in a thread, for DNS. With `unix` all connections go to that socket."""

    _keeps = _unpacks = True

    def __init__(
        self,
        lookup: Callable[[Callable[[], Any]], Pending] | None = None,
        *,
        ca_bundle: str | None = None,
        proxy: str | None = None,
        unix: str | None = None,
    ) -> None:
        self._lookup, self._ca_bundle, self._unix = lookup, ca_bundle, unix
        self._proxy = proxy or None
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[tuple[str, ...], list[Connection]] = {}
        self._connections: set[Connection] = set()
        self._resolved: dict[tuple[str, int], tuple[float, list[tuple[str, int]]]] = {}
        self._lookups: dict[tuple[str, int], tuple[Pending, int]] = {}

    def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeouts: Timeouts) -> Exchange:
        return Exchange(self, method, url, headers, body, timeouts)

    async def close(self) -> None:
        for connection in tuple(self._connections):
            connection.drop()
        self._idle.clear()
        await asyncio.sleep(0)

    # --- one exchange -------------------------------------------------------------------------------------------

    async def _ask(self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeouts: Timeouts) -> Answer:
        endpoint, began_at = _endpoint(url), asyncio.get_running_loop().time()
        proxy = self._proxy if endpoint.scheme == "http" else None
        head = _head(method, endpoint, tuple(headers.items()), proxy)
        sized = body or method in ("POST", "PUT", "PATCH")
        data = b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body) if sized else head + b"\r\n"

        async def over(connection: Connection) -> Answer:
            answer = Answer(connection, timeouts, began_at, unpacks=self._unpacks)
            try:
                connection.ask(method, answer, data)
                await answer.head()
            except BaseException:
                answer.close()
                raise
            return answer

        key = (endpoint.scheme, endpoint.authority)
        if (idle := self._acquire_idle(key)) is not None:
            try:
                return await over(idle)
            except ConnectFailed:  # it may have been on its way out
                if method not in _REPEATABLE:
                    raise
        try:
            async with asyncio.timeout(min(self._connect_s(), timeouts.total_s)):
                opened = await self._open(endpoint, partial(Connection, self, key))
        except TimeoutError:
            if timeouts.total_s < self._connect_s():
                raise RequestTimeout(f"The exchange took longer than {timeouts.total_s:g} s.") from None
            raise ConnectFailed(f"{self._place(endpoint)}: no connection within {self._connect_s():g} s.") from None
        except ssl.SSLCertVerificationError:
            raise TlsFailed("The certificate could not be verified.") from None
        except (OSError, UnicodeError) as error:
            raise ConnectFailed(f"{self._place(endpoint)}: {plain(error)}") from error
        return await over(opened)

    def _place(self, endpoint: _Endpoint) -> str:
        """Where a connection is made to: the address itself, or the proxy's or socket's, without credentials."""
        if self._unix is not None:
            return str(self._unix)
        target = endpoint if self._proxy is None else _endpoint(self._proxy)
        host = f"[{target.host}]" if ":" in target.host else target.host
        return f"{host}:{target.port}" if target is endpoint else f"the proxy {host}:{target.port}"

    @staticmethod
    def _connect_s() -> float:
        return CONNECT_S_MAX

    # --- connections --------------------------------------------------------------------------------------------

    def _acquire_idle(self, key: tuple[str, ...]) -> Connection | None:
        connections = self._idle.get(key)
        while connections:
            connection = connections.pop()
            if connection.idle_timer is not None:
                connection.idle_timer.cancel()
                connection.idle_timer = None
            if not connection.closed and not connection.transport.is_closing():  # type: ignore[union-attr]
                return connection
        return None

    def release(self, connection: Connection) -> None:
        if self._keeps:
            self._idle.setdefault(connection.key, []).append(connection)
            connection.idle_timer = asyncio.get_running_loop().call_later(KEPT_ALIVE_S, connection.drop)
        else:
            connection.drop()

    def opened(self, connection: Connection) -> None:
        self._connections.add(connection)

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection.idle_timer is not None:
            connection.idle_timer.cancel()
        with suppress(ValueError, KeyError):
            self._idle[connection.key].remove(connection)

    async def _open(self, endpoint: _Endpoint, make: Callable[[], Connection]) -> Connection:
        if self._unix is not None:
            return (await asyncio.get_running_loop().create_unix_connection(make, self._unix))[1]
        if self._proxy is None:
            return await self._dial(endpoint, make)
        if endpoint.scheme == "http":
            return await self._dial(_endpoint(self._proxy), make)
        return await self._tunnel(endpoint, make())

    async def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            assert self._lookup is not None
            self._tls = await self._lookup(partial(ssl.create_default_context, cafile=self._ca_bundle)).future
        return self._tls

    async def _dial(self, endpoint: _Endpoint, make: Callable[[], _P]) -> _P:
        """Connect to the first address that answers; a slow one is raced against the next."""
        tls: JsonObject = {}
        if endpoint.scheme == "https":
            tls = {"ssl": await self._context(), "server_hostname": endpoint.host.rstrip(".")}
        attempts: list[_P] = []

        def attempt() -> _P:
            attempts.append(make())
            return attempts[-1]

        connect = partial(asyncio.get_running_loop().create_connection, attempt, **tls)
        connects = [partial(connect, *address) for address in await self._addresses(endpoint.host, endpoint.port)]
        winner = None
        try:
            winner, _, errors = await staggered_race(connects, NEXT_ADDRESS_S)
        finally:
            for protocol in attempts:  # two may have got through
                if protocol.transport is not None and (winner is None or protocol is not winner[1]):
                    protocol.transport.abort()
        if winner is None:
            untrusted = (error for error in errors if isinstance(error, ssl.SSLCertVerificationError))
            raise next(untrusted, None) or (errors[-1] if errors else None) or OSError("the name has no address")
        return cast("_P", winner[1])

    async def _addresses(self, host: str, port: int) -> list[tuple[str, int]]:
        """The addresses of a name, cached for a minute."""
        with suppress(ValueError):
            return [(str(ip_address(host)), port)]
        valid_until, addresses = self._resolved.get((host, port), (0.0, []))
        if asyncio.get_running_loop().time() > valid_until:
            infos = await self._look_up(host, port)
            addresses = list(dict.fromkeys((address[0], address[1]) for *_, address in infos))
            self._resolved[host, port] = asyncio.get_running_loop().time() + NAMES_KEPT_S, addresses
        return addresses

    async def _look_up(self, host: str, port: int) -> list[Any]:
        """Resolve a name; concurrent callers share the lookup."""
        job, waiting = self._lookups.get((host, port), (None, 0))
        if job is None:
            assert self._lookup is not None
            job = self._lookup(partial(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM))
        self._lookups[host, port] = job, waiting + 1
        try:
            return list(await asyncio.shield(job.future))
        finally:
            _, waiting = self._lookups.pop((host, port), (job, 1))
            if not job.future.done() and waiting == 1:
                job.abandon()
                job.future.cancel()
            elif waiting > 1:
                self._lookups[host, port] = job, waiting - 1

    async def stream(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw TCP connection, through the proxy if one is set. Raises OSError, ConnectFailed."""
        loop = asyncio.get_running_loop()
        endpoint = _endpoint(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        if self._proxy is None:
            protocol = await self._dial(endpoint, _Stream)
        else:
            protocol, tunnel = _Stream(), await self._through_proxy(endpoint)
            assert tunnel.transport is not None
            tunnel.transport.set_protocol(protocol)
            protocol.connection_made(tunnel.transport)
        assert protocol.transport is not None
        return protocol.reader, asyncio.StreamWriter(protocol.transport, protocol, protocol.reader, loop)

    async def _tunnel(self, endpoint: _Endpoint, connection: Connection) -> Connection:
        loop, tls = asyncio.get_running_loop(), await self._context()
        tunnel = await self._through_proxy(endpoint)
        assert tunnel.transport is not None
        try:
            transport = await loop.start_tls(
                tunnel.transport, connection, tls, server_hostname=endpoint.host.rstrip(".")
            )
        except BaseException:
            tunnel.transport.abort()
            raise
        assert transport is not None
        connection.connection_made(transport)
        return connection

    async def _through_proxy(self, endpoint: _Endpoint) -> _Tunnel:
        assert self._proxy is not None
        tunnel = await self._dial(_endpoint(self._proxy), _Tunnel)
        assert tunnel.transport is not None
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        address = f"{host}:{endpoint.port}"
        lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}", *_basic_auth("Proxy-Authorization", self._proxy)]
        try:
            tunnel.transport.write("\r\n".join([*lines, "", ""]).encode())
            await tunnel.opened
        except BaseException:
            tunnel.transport.abort()
            raise
        return tunnel


class _Stream(asyncio.StreamReaderProtocol):
    def __init__(self) -> None:
        self.reader = asyncio.StreamReader(limit=HEAD_BYTES_MAX)
        self.transport: asyncio.Transport | None = None
        super().__init__(self.reader)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        super().connection_made(transport)


class _Tunnel(asyncio.Protocol):
    """A proxy's answer to CONNECT."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self.opened.done() or (b"\r\n\r\n" not in self._received and len(self._received) <= HEAD_BYTES_MAX):
            return
        status = self._received[:64].split(b"\r\n")[0].split(b" ", 2)
        if len(status) > 1 and status[1] == b"200" and self._received.endswith(b"\r\n\r\n"):
            self.opened.set_result(None)
        else:
            message = b" ".join(status[1:]).decode("latin-1") or "no answer"
            self.opened.set_exception(ConnectFailed(f"The proxy refused: {message}"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.opened.done():
            self.opened.set_exception(ConnectFailed("The proxy closed the connection."))


def _basic_auth(name: str, address: str) -> list[str]:
    url = URL(address)
    if url.user is None:
        return []
    return [f"{name}: Basic " + base64.b64encode(f"{url.user}:{url.password or ''}".encode()).decode()]


@lru_cache(maxsize=64)
def _head(method: str, endpoint: _Endpoint, headers: tuple[tuple[str, str], ...], proxy: str | None) -> bytes:
    """The head of a request without its length and the final empty line."""
    target = endpoint.target if proxy is None else f"http://{endpoint.authority}{endpoint.target}"
    lines = [f"{method} {target} HTTP/1.1", f"Host: {endpoint.authority}"]
    names = {name.lower() for name, _ in headers}
    lines += [f"{name}: {value}" for name, value in _USUAL.items() if name.lower() not in names]
    lines += [f"{name}: {value}" for name, value in headers if name.lower() not in _OURS]
    lines += _basic_auth("Authorization", endpoint.url) if "authorization" not in names else ()
    lines += _basic_auth("Proxy-Authorization", proxy) if proxy is not None else ()
    if not all(_NAME.fullmatch(name) for name, _ in headers) or any(map(_UNFIT.search, lines)):
        raise ConnectFailed("A header of the request has an invalid name, or a line break in its value.")
    return "\r\n".join([*lines, ""]).encode("utf-8", "surrogateescape")


_USUAL = {"User-Agent": "hermes", "Accept": "*/*", "Accept-Encoding": "gzip, deflate"}
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_UNFIT = re.compile("[\r\n\0\ud800-\udc7f\udd00-\udfff]")
_REPEATABLE = frozenset({"GET", "HEAD"})
_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
