"""The URL guard: URLs are checked at every redirect, and connected to at the checked addresses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urljoin

from hermes.guards.network import CONNECT_S_MAX, Network, address_kinds
from hermes.guards.secrets import Secrets
from hermes.guards.url_text import FetchFailed, Target, UrlRefused, domain_suffix, has_secret, parse
from hermes.http_client.exchange import Answer, RequestTimeout, StaleStream, Timeouts, TlsFailed, TransportError
from hermes.http_client.inflate import ENCODINGS, InflateError, Inflater
from hermes.settings.config import Settings

__all__ = ["DOCUMENTS", "IMAGES", "FetchFailed", "Fetched", "Opened", "UrlGuard", "UrlRefused"]

REDIRECTS_MAX = 5
FETCH_S_MAX = 30.0
FETCHED_BYTES_MAX = 10 * 1024 * 1024
TIMEOUTS = Timeouts(FETCH_S_MAX, FETCH_S_MAX)

DOCUMENTS = frozenset({"text", "html", "json", "xml", "pdf"})
IMAGES = frozenset({"image"})
_KINDS = [
    (re.compile(r"text/html|application/xhtml\+xml"), "html"),
    (re.compile(r"(application|text)/json|.*\+json"), "json"),
    (re.compile(r"(application|text)/xml|.*\+xml"), "xml"),
    (re.compile(r"application/pdf"), "pdf"),
    (re.compile(r"image/.*"), "image"),
    (re.compile(r"text/.*|application/(javascript|x-javascript|yaml|x-yaml|toml|x-ndjson)"), "text"),
]
_METADATA = re.compile(
    r"(.*\.)?(metadata|metadata\.(google\.internal|goog|azure\.(internal|com)|tencentyun\.com|packet\.net|"
    r"platformequinix\.com)|instance-data(\.ec2\.internal)?|rancher-metadata)"
)
# Kinds of addresses that no setting allows.
_ALWAYS_REFUSED = frozenset({"metadata", "link_local"})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Request headers that are sent to another server after a redirect; any other may hold a credential.
_PASSED_HEADERS = frozenset({"accept", "accept-encoding", "accept-language", "content-type", "user-agent"})


class Fetched(NamedTuple):
    final_url: str
    status: int
    content_type: str
    charset: str
    data: bytes


class Opened:
    def __init__(self, url: str, answer: Answer, bytes_max: int | None) -> None:
        self.url, self.status, self.headers = url, answer.status, answer.headers
        self._answer, self._bytes_max = answer, bytes_max
        encoding = answer.headers.get("Content-Encoding", "").strip().lower().removeprefix("identity")
        if encoding not in ("", *ENCODINGS):
            raise FetchFailed("encoding", "The answer is compressed in an unknown way.")
        self._inflater = Inflater(encoding) if encoding else None
        self._size = 0

    async def read(self) -> bytes:
        """The next piece, decompressed; empty at the end. Raises FetchFailed, also beyond the size limit."""
        try:
            piece = await self._next_piece()
        except TransportError as error:
            raise _as_fetch_failure(error) from error
        except InflateError as error:
            raise FetchFailed(error.reason, f"The answer {error}.") from None
        # A few bytes can decompress to many pieces: others have their turn in between.
        await asyncio.sleep(0)
        self._size += len(piece)
        if self._bytes_max is not None and self._size > self._bytes_max:
            raise FetchFailed("too_large", f"The answer is longer than {self._bytes_max} bytes.")
        return piece

    async def _next_piece(self) -> bytes:
        if self._inflater is None:
            return await self._answer.read()
        while not (piece := self._inflater.read()):
            if not (data := await self._answer.read()):
                self._inflater.finish()
                return b""
            self._inflater.feed(data)
        return piece


def _as_fetch_failure(error: TransportError) -> FetchFailed:
    """The error without the HTTP client's text, which may hold the URL."""
    if isinstance(error, TlsFailed):
        return FetchFailed("tls", "The certificate could not be verified.")
    if isinstance(error, RequestTimeout | StaleStream):
        return FetchFailed("timeout", "The answer took too long.")
    if error.answered:
        return FetchFailed("broken", "The answer was cut, or is not what it says it is.")
    return FetchFailed("connect", "No connection could be made.")


class UrlGuard:
    """The URLs of one run. `own_ports` returns where Hermes itself listens, `may_read` whether a host needs no
    approval; approvals are asked for before."""

    def __init__(
        self,
        network: Network,
        settings: Settings,
        secrets: Secrets,
        own_ports: Callable[[], Collection[int]] = tuple,
        may_read: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._network, self._secrets, self._own_ports, self._may_read = network, secrets, own_ports, may_read
        self._private_ok = settings.security.allow_private_urls
        self._blocked = tuple(map(domain_suffix, settings.security.website_blocklist))

    def check(self, url: str, *, trusted: bool = False, any_host: bool = False) -> Target:
        """The verdict on a URL by its text; its name is resolved when it is opened. `any_host`: its host needs no
        approval, because a trusted server has redirected there."""
        target, secrets = parse(url), self._secrets
        if trusted:
            # Everything in .env counts as secret, also the address of a server that the operator names there.
            secrets = Secrets(value for value in secrets.values if not url.startswith(value.rstrip("/")))
        if has_secret(url, secrets):
            raise UrlRefused("url_has_secret")
        if _METADATA.fullmatch(target.host):
            raise UrlRefused("metadata")
        if f".{target.host}".endswith(self._blocked):
            raise UrlRefused("website_blocklist")
        if not (trusted or any_host or self._may_read(target.host)):
            raise UrlRefused("host_not_approved", f"The host {target.host} was not approved.")
        return target

    async def fetch(
        self,
        url: str,
        *,
        kinds: frozenset[str] = DOCUMENTS,
        bytes_max: int = FETCHED_BYTES_MAX,
        trusted: bool = False,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Fetched:
        """The whole answer, if it is of one of these kinds; a body is posted. Raises UrlRefused, FetchFailed."""
        method = "POST" if body else "GET"
        opening = self.open(url, trusted=trusted, method=method, headers=headers, body=body, bytes_max=bytes_max)
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(FETCH_S_MAX), opening as opened:
                content_type, _, more = opened.headers.get("Content-Type", "").lower().partition(";")
                content_type = content_type.strip()
                while piece := await opened.read():
                    if not any(kind in kinds and pattern.fullmatch(content_type) for pattern, kind in _KINDS):
                        raise FetchFailed("content_type", "The content type of the response is not accepted here.")
                    pieces.append(piece)
        except TimeoutError:
            raise FetchFailed("timeout", f"The answer took longer than {FETCH_S_MAX:g} s.") from None
        charset = re.search(r"charset=[\"']?([\w.:-]+)", more)
        return Fetched(opened.url, opened.status, content_type, charset[1] if charset else "", b"".join(pieces))

    @asynccontextmanager
    async def open(
        self,
        url: str,
        *,
        trusted: bool = False,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        bytes_max: int | None = FETCHED_BYTES_MAX,
        timeouts: Timeouts = TIMEOUTS,
    ) -> AsyncIterator[Opened]:
        """The answer after all redirects, to be read piece by piece. `trusted`: the operator named this server."""
        first = target = self.check(url, trusted=trusted)
        request_headers = {"Accept-Encoding": "gzip, deflate", **(headers or {})}
        for _ in range(REDIRECTS_MAX + 1):
            is_named = trusted and target.host == first.host and target.port in (first.port, 443)
            client = await self._network.client(target.host, await self._addresses(target, is_named))
            try:
                async with client.send(method, target.url, request_headers, body, timeouts) as answer:
                    location = answer.headers.get("Location") if answer.status in _REDIRECTS else None
                    if location is None:
                        yield Opened(target.url, answer, bytes_max)
                        return
            except TransportError as error:
                raise _as_fetch_failure(error) from error
            finally:
                await client.close()
            before, target = target, self._redirected(target, location, trusted)
            if answer.status == 303 or (answer.status < 303 and method == "POST"):
                method, body = "GET", b""
            if target.origin != before.origin:
                request_headers = {
                    name: value for name, value in request_headers.items() if name.lower() in _PASSED_HEADERS
                }
                if body:
                    raise UrlRefused("redirected_body")
        raise UrlRefused("redirects")

    async def connect(self, target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A TCP connection to a target that `check` returned. Every address of its host is checked, and only those are
        connected to. Raises UrlRefused, FetchFailed."""
        client = await self._network.client(target.host, await self._addresses(target, trusted=False))
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                return await client.stream(target.host, target.port)
        except TimeoutError:
            raise FetchFailed("timeout", f"No connection within {CONNECT_S_MAX:g} s.") from None
        except (OSError, TransportError):
            raise FetchFailed("connect", "No connection could be made.") from None

    def _redirected(self, target: Target, location: str, trusted: bool) -> Target:
        try:
            next_target = self.check(urljoin(target.url, location), any_host=trusted)
        except ValueError:
            raise UrlRefused("malformed") from None
        if target.scheme == "https" and next_target.scheme == "http":
            raise UrlRefused("downgrade")
        return next_target

    async def _addresses(self, target: Target, trusted: bool) -> list[str]:
        try:
            addresses = [target.host] if target.is_address else await self._network.addresses(target.host, target.port)
        except (OSError, UnicodeError):
            addresses = []
        if not addresses:
            raise UrlRefused("unresolvable")
        for address in addresses:
            kinds = address_kinds(address)
            if kinds and (not (trusted or self._private_ok) or _ALWAYS_REFUSED.intersection(kinds)):
                raise UrlRefused(kinds[0])
            if target.port in self._own_ports() and self._network.is_here(address):
                raise UrlRefused("own_listener")
        return addresses
