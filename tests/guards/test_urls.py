"""The URL guard: what is refused under which rule, and that a connection goes where the check said."""

from __future__ import annotations

import asyncio
import base64
import gzip
import os
import random
import socket
import threading
import zlib
from collections.abc import AsyncIterator
from ipaddress import IPv4Address, IPv6Address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st

from guards.stage import ELSEWHERE, WORLD, WORLD_6, Stage, certificate, serving
from hermes.core.home import Home
from hermes.core.threads import Threads
from hermes.guards import network as network_module
from hermes.guards import urls as urls_module
from hermes.guards.network import Network, address_kinds
from hermes.guards.secrets import Secrets
from hermes.guards.url_text import parse
from hermes.guards.urls import DOCUMENTS, FETCHED_BYTES_MAX, IMAGES, FetchFailed, UrlGuard, UrlRefused
from hermes.http_client.exchange import Timeouts
from hermes.settings import config

SECRET = "correct-horse-9"


def guard_of(stage: Network, tmp_path: Path, *, own: tuple[int, ...] = (), **settings: Any) -> UrlGuard:
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    return UrlGuard(stage, config.load(Home(tmp_path / "none"), flags, {}), Secrets([SECRET]), lambda: own)


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    threads = Threads(4)
    yield threads
    threads.close()


@pytest.fixture
async def stage(threads: Threads) -> Stage:
    """The name `page.test` at one address of the world, `other.test` at another."""
    stage = Stage(threads)
    stage.answers |= {"page.test": [[WORLD]], "other.test": [[ELSEWHERE]]}
    return stage


async def why(url: str, guard: UrlGuard, **more: Any) -> str:
    """The rule that a fetch ends by, or nothing."""
    try:
        await guard.fetch(url, **more)
    except FetchFailed as failed:
        assert url not in str(failed) and SECRET not in str(failed)
        return failed.rule
    return ""


async def hello(_: web.Request) -> web.StreamResponse:
    return web.Response(text="hello")


# ---- what a URL says


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("http://example.com", "http://example.com/"),
        (" HTTPS://Example.COM.:443/a?b=c#d\n", "https://example.com/a?b=c"),
        ("http://example.com:8080?x", "http://example.com:8080/?x"),
        ("http://bücher.example/ä", "http://xn--bcher-kva.example/ä"),
        ("http://EXAMPLE。com/", "http://example.com/"),
        ("http://my_service:3000/", "http://my_service:3000/"),
        ("http://93.184.216.34/", "http://93.184.216.34/"),
        ("http://[2606:2800:0220:0001::0001]:81/", "http://[2606:2800:220:1::1]:81/"),
        ("http://example.com:/", "http://example.com/"),
    ],
)
def test_url_normalisation(url: str, plain: str) -> None:
    assert parse(url).url == plain


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        *((f"{scheme}://example.com/", "scheme") for scheme in ("ftp", "file", "gopher", "data", "javascript", "ws")),
        ("file:///etc/passwd", "scheme"),
        ("example.com", "malformed"),
        ("", "malformed"),
        ("http://example.com/a b", "malformed"),
        ("http://example.com\\@evil.example/", "malformed"),
        ("http://exam\tple.com/", "malformed"),
        ("http://[::1/", "malformed"),
        ("http://a\u2100b.example/", "malformed"),
        ("http://example.com/" + "a" * 8192, "malformed"),
        ("http://user@example.com/", "user_info"),
        ("http://user:word@example.com/", "user_info"),
        ("http://example.com@127.0.0.1/", "user_info"),
        ("http:///path", "host"),
        ("http:example.com", "host"),
        ("http://exa%6dple.com/", "host"),
        ("http://127%2e0.0.1/", "host"),
        ("http://a..b/", "host"),
        ("http://-a.example/", "host"),
        ("http://" + "a" * 64 + ".example/", "host"),
        ("http://☃.example/", "host"),
        ("http://[fe80::1%25eth0]/", "host|malformed"),
        ("http://[::1]evil.example/", "host|malformed"),
        ("http://example.com:x/", "host"),
        *((f"http://example.com:{port}/", "port") for port in (0, 22, 25, 53, 445, 3306, 5432, 6379, 11211, 65536)),
        *(
            (f"http://{host}/", "numeric_host")
            for host in ("2130706433", "0x7f000001", "017700000001", "127.1", "127.0.1", "0177.0.0.1", "0x7f.0.0.1")
        ),
        *((f"http://{host}/", "numeric_host") for host in ("127.0.0.01", "127.0.0.1.1", "256.1.1.1", "1.2.3.", "0x")),
        ("http://[127.0.0.1]/", "numeric_host|malformed"),
        ("http://①②⑦.1/", "numeric_host"),
    ],
)
def test_ambiguous_url_is_rejected(url: str, rule: str) -> None:
    with pytest.raises(UrlRefused) as refused:
        parse(url)
    assert refused.value.rule in rule.split("|") and refused.value.code == "url_refused"


@pytest.mark.parametrize(
    "url",
    [
        f"https://page.test/{SECRET}",
        f"https://page.test/?q=my+{SECRET}",
        f"https://page.test/?q={SECRET.upper()}",
        f"https://{SECRET}.page.test/",
        f"https://page.test/#{SECRET}",
        "https://page.test/?q=" + "".join(f"%{ord(c):02x}" for c in SECRET),
        "https://page.test/?q=" + quote(quote(SECRET.replace("-", "%2D"), safe=""), safe=""),
        *(
            f"https://page.test/a/{code(text.encode()).decode().rstrip('=')}"
            for code in (base64.b64encode, base64.urlsafe_b64encode)
            for text in (SECRET, f"user:{SECRET}", f"xy{SECRET}z")
        ),
        f"https://page.test/?d={SECRET.encode().hex()}",
        *(
            f"https://page.test/?a=1&{name}=x"
            for name in [
                "api_key",
                "apikey",
                "API-Key",
                "access_token",
                "accessToken",
                "token",
                "client_secret",
                "password",
                "pwd",
                "auth",
            ]
        ),
        "https://page.test/?a=1;token=x",
        "https://page.test/?X-Amz-Security-Token=x",
        "https://page.test/?key=AIzaSyD4567890123456",
    ],
)
async def test_url_with_secret_is_rejected(stage: Stage, tmp_path: Path, url: str) -> None:
    with pytest.raises(UrlRefused) as refused:
        await guard_of(stage, tmp_path).fetch(url)
    assert refused.value.code == "url_has_secret" and SECRET not in str(refused.value)
    assert not stage.requests, "not even its name is looked up"


@pytest.mark.parametrize(
    "query", ["q=token", "max_tokens=5", "page_token=abc", "nextToken=x", "key=title", "author=x", "passage=1", "a=1&b"]
)
async def test_url_without_secret_is_accepted(stage: Stage, tmp_path: Path, query: str) -> None:
    assert guard_of(stage, tmp_path).check(f"https://page.test/correct/horse?{query}").host == "page.test"


async def test_website_blocklist_includes_subdomains(stage: Stage, tmp_path: Path) -> None:
    listed = ["blocked.example", "*.starred.example", ".dotted.example.", "Bücher.example", "no host"]
    guard = guard_of(stage, tmp_path, security__website_blocklist=listed)
    blocked = "blocked.example a.b.BLOCKED.example. x.starred.example dotted.example xn--bcher-kva.example"
    for host in blocked.split():
        assert await why(f"http://{host}/", guard) == "website_blocklist"
    for host in ("unblocked.example", "blocked.example.com"):
        assert await why(f"http://{host}/", guard) == "unresolvable"


# ---- addresses

REFUSED = {
    "private": "10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 fc00::1 fd12::1 fec0::1 64:ff9b:1::808:808",
    "loopback": "127.0.0.1 127.255.255.254 ::1 ::ffff:127.0.0.1 ::7f00:1 ::ffff:0:7f00:1 2002:7f00:1::1 64:ff9b::7f00:1",
    "link_local": "169.254.1.1 fe80::1 febf::1 fe80::1%eth0",
    "metadata": "169.254.169.254 169.254.170.2 100.100.100.200 168.63.129.16 fd00:ec2::254 ::ffff:169.254.169.254 "
    "2002:a9fe:a9fe:: 64:ff9b::a9fe:a9fe 64:ff9b:1::a9fe:a9fe 2001:0:a9fe:a9fe::1 2606:4700::5efe:a9fe:a9fe",
    "cgnat": "100.64.0.1 100.127.255.255",
    "multicast": "224.0.0.1 239.255.255.255 ff02::1",
    "broadcast": "255.255.255.255",
    "unspecified": "0.0.0.0 0.1.2.3 ::",
    "reserved": "192.0.0.1 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.1 240.0.0.1 192.88.99.1 100::1 2001:db8::1 3fff::1 "
    "4000::1 ::8.8.8.8",
}
# The address of a Teredo client is written with its bits turned over.
TEREDO_CLIENT = f"2001:0:808:808:0:0:{0xFFFF ^ 0x7F00:x}:{0xFFFF ^ 1:x}"


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        *((address, kind) for kind, addresses in REFUSED.items() for address in addresses.split()),
        (TEREDO_CLIENT, "loopback"),
    ],
)
async def test_non_global_address_is_rejected(stage: Stage, tmp_path: Path, address: str, kind: str) -> None:
    assert address_kinds(address)[0] == kind
    for answers in ([address], [WORLD, address], [address, WORLD_6], [WORLD] * 20 + [address]):
        stage.answers["page.test"] = [answers]
        assert await why("http://page.test/", guard_of(stage, tmp_path)) == kind
    assert not stage.dialled


@pytest.mark.parametrize(
    "address",
    f"{WORLD} {WORLD_6} 8.8.8.8 1.1.1.1 172.32.0.1 100.128.0.1 198.20.0.1 ::ffff:8.8.8.8 2002:808:808::1 64:ff9b::808:808 "
    "2001:4860:4860::8888 2a00::1".split(),
)
def test_global_addresses_are_accepted(address: str) -> None:
    assert address_kinds(address) == []


def spellings(address: IPv4Address) -> list[str]:
    """All notations of an IPv4 address that some resolver accepts."""
    a, b, c, d = address.packed
    whole, low, half = int(address), (c << 8) | d, f"{(a << 8) | b:x}:{(c << 8) | d:x}"
    dotted = str(address)
    numbers = [
        dotted,
        f"{dotted}.",
        str(whole),
        f"0x{whole:x}",
        f"0X{whole:08X}",
        f"0{whole:o}",
        f"{a}.{whole & 0xFFFFFF}",
    ]
    numbers += [
        f"{a}.{b}.{low}",
        f"0{a:o}.0{b:o}.0{c:o}.0{d:o}",
        f"0x{a:x}.0x{b:x}.0x{c:x}.0x{d:x}",
        f"{a}.0x{b:x}.{low}",
    ]
    numbers += [
        f"{a:03}.{b:03}.{c:03}.{d:03}",
        f"00{a:o}.{b}.{c}.{d}",
        f"0x{a:x}.{whole & 0xFFFFFF}",
        f"{whole + 2**32}",
    ]
    wide = dotted.translate({ord("0") + n: chr(0xFF10 + n) for n in range(10)})
    circled = dotted.translate({48: "⓪"} | {48 + n: chr(0x245F + n) for n in range(1, 10)})
    numbers += [
        wide,
        wide.replace(".", "。"),
        circled,
        dotted.replace(".", "．"),
        dotted.replace(".", "%2e"),
        quote(wide),
    ]
    v6 = [
        f"::ffff:{dotted}",
        f"::FFFF:{half}",
        f"0:0:0:0:0:ffff:{half}",
        f"::{half}",
        f"::ffff:0:{half}",
        f"2002:{half}::1",
    ]
    v6 += [
        f"64:ff9b::{half}",
        f"64:ff9b::{dotted}",
        f"64:ff9b:1::{half}",
        f"2001:0:{half}::1",
        f"2606:4700::5efe:{half}",
    ]
    v6 += [f"2001:0:808:808:0:0:{(a << 8 | b) ^ 0xFFFF:x}:{low ^ 0xFFFF:x}", IPv6Address(f"::ffff:{dotted}").exploded]
    return [*numbers, *(f"[{text}]" for text in v6), f"[{dotted}]", f"[::ffff:{dotted}%25lo]", f"example.com@{dotted}"]


class Libc(Stage):
    """Parses unusual IPv4 notations as the system's resolver does, and never connects."""

    async def addresses(self, host: str, port: int) -> list[str]:
        return [info[4][0] for info in socket.getaddrinfo(host, port, flags=socket.AI_NUMERICHOST)]

    async def client(self, host: str, addresses: list[str]) -> Any:
        raise AssertionError(f"connected to {host}: {addresses}")


_NETWORKS = "127.0.0.0/8 10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 169.254.0.0/16 100.64.0.0/10 0.0.0.0/8 224.0.0.0/4"
inner = st.one_of([st.ip_addresses(v=4, network=ip_network(text)) for text in _NETWORKS.split()])


@given(address=inner, port=st.sampled_from(["", ":80", ":8080", ":"]), lifted=st.booleans())
@example(address=IPv4Address("169.254.169.254"), port="", lifted=True)
@example(address=IPv4Address("127.0.0.1"), port="", lifted=False)
@example(address=IPv4Address("100.100.100.200"), port="", lifted=True)
def test_every_spelling_of_private_address_is_rejected(
    tmp_path_factory: pytest.TempPathFactory, address: IPv4Address, port: str, lifted: bool
) -> None:
    # What is private may be allowed; what is link-local, and the metadata services, may not.
    lifted = lifted and bool({"metadata", "link_local"}.intersection(address_kinds(str(address))))
    guard = guard_of(Libc(Threads(1)), tmp_path_factory.getbasetemp(), security__allow_private_urls=lifted)

    async def all_refused() -> None:
        for host in spellings(address):
            with pytest.raises(UrlRefused):
                await guard.fetch(f"http://{host}{port}/")

    asyncio.run(all_refused())


@pytest.mark.parametrize(
    "host", ["metadata.google.internal", "METADATA.google.internal.", "a.metadata.goog", "metadata"]
)
async def test_metadata_names_are_always_rejected(stage: Stage, tmp_path: Path, host: str) -> None:
    guard = guard_of(stage, tmp_path, security__allow_private_urls=True)
    assert await why(f"http://{host}/", guard, trusted=True) == "metadata" and not stage.requests


@pytest.mark.parametrize("lifted", ["setting", "trusted"])
@pytest.mark.parametrize(
    "address", ["169.254.169.254", "fd00:ec2::254", "169.254.7.7", "fe80::1", "::ffff:169.254.169.254"]
)
async def test_metadata_and_link_local_addresses_are_always_rejected(
    stage: Stage, tmp_path: Path, address: str, lifted: str
) -> None:
    stage.answers["page.test"] = [["10.0.0.1", address]]
    guard = guard_of(stage, tmp_path, security__allow_private_urls=lifted == "setting")
    assert await why("http://page.test/", guard, trusted=lifted == "trusted") in ("metadata", "link_local")


async def test_private_server_is_reachable_when_allowed(threads: Threads, tmp_path: Path) -> None:
    async with serving(hello) as port:
        for host in ("127.0.0.1", "localhost"):
            url = f"http://{host}:{port}/"
            assert await why(url, guard_of(Network(threads.submit), tmp_path)) == "loopback"
            allowed = guard_of(Network(threads.submit), tmp_path, security__allow_private_urls=True)
            assert (await allowed.fetch(url)).data == b"hello"
            assert (await guard_of(Network(threads.submit), tmp_path).fetch(url, trusted=True)).data == b"hello"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "127.9.9.9", "[::ffff:127.0.0.1]", "own"])
async def test_own_server_is_rejected(threads: Threads, tmp_path: Path, host: str) -> None:
    async with serving(hello, host="0.0.0.0") as port:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))
            host = probe.getsockname()[0] if host == "own" else host
        guard = guard_of(Network(threads.submit), tmp_path, own=(port,), security__allow_private_urls=True)
        assert await why(f"http://{host}:{port}/", guard, trusted=True) == "own_listener"
        async with serving(hello) as other:
            assert await why(f"http://127.0.0.1:{other}/", guard) == ""


# ---- names and connections


async def test_connection_uses_checked_address(stage: Stage, tmp_path: Path) -> None:
    async def inside(_: web.Request) -> web.StreamResponse:
        return web.Response(text="inside")

    async with serving(hello) as outer, serving(inside) as hidden:
        stage.servers |= {WORLD: outer, "127.0.0.1": hidden}
        stage.answers["page.test"] = [[WORLD], ["127.0.0.1"]]
        fetched = await guard_of(stage, tmp_path).fetch("http://page.test/")
        assert (fetched.data, stage.requests, stage.dialled) == (b"hello", ["page.test"], [WORLD])
        assert await why("http://page.test/", guard_of(stage, tmp_path)) == "loopback"


async def test_dns_is_asked_once(threads: Threads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] = []

    def turning(host: str, port: int, *_: object) -> list[tuple[Any, ...]]:
        hosts.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{min(len(hosts), 2)}", port))]

    async def second(_: web.Request) -> web.StreamResponse:
        return web.Response(text="second")

    async with serving(hello) as port, serving(second, host="127.0.0.2", port=port):
        monkeypatch.setattr(socket, "getaddrinfo", turning)
        guard = guard_of(Network(threads.submit), tmp_path, security__allow_private_urls=True)
        assert (await guard.fetch(f"http://turning.test:{port}/")).data == b"hello"
        assert hosts == ["turning.test"]
        assert (await guard.fetch(f"http://turning.test:{port}/")).data == b"second"


async def test_dns_rebinding_at_redirect_is_rejected(stage: Stage, tmp_path: Path) -> None:
    async def to_itself(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/again")

    async with serving(to_itself) as port:
        stage.servers[WORLD] = port
        stage.answers["page.test"] = [[WORLD], ["10.0.0.1"]]
        assert await why("http://page.test/", guard_of(stage, tmp_path)) == "private"
        assert stage.dialled == [WORLD]


async def test_unreachable_address_falls_back_to_next(stage: Stage, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        async with serving(hello) as port:
            stage.servers |= {ELSEWHERE: closed.getsockname()[1], WORLD: port}
            stage.answers["page.test"] = [[ELSEWHERE, WORLD]]
            assert (await guard_of(stage, tmp_path).fetch("http://page.test/")).data == b"hello"
            stage.answers["page.test"] = [[ELSEWHERE]]
            assert await why("http://page.test/", guard_of(stage, tmp_path)) == "connect"


async def test_unresolvable_name_is_rejected(
    stage: Stage, threads: Threads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.answers["empty.test"] = [[]]
    for host in ("unknown.test", "empty.test"):
        assert await why(f"http://{host}/", guard_of(stage, tmp_path)) == "unresolvable"
    finished = threading.Event()
    monkeypatch.setattr(network_module, "RESOLVE_S_MAX", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: finished.wait())
    try:
        assert await why("http://slow.test/", guard_of(Network(threads.submit), tmp_path)) == "unresolvable"
        assert threads.abandoned == 1
    finally:
        finished.set()


async def test_certificate_is_verified_for_name(threads: Threads, tmp_path: Path) -> None:
    tls, bundle = certificate(tmp_path, "secure.test")
    async with serving(hello, tls=tls) as port:
        for file, host, rule in (
            (bundle, "secure.test", ""),
            (bundle, "page.test", "tls"),
            (None, "secure.test", "tls"),
        ):
            stage = Stage(threads, ca_bundle=file)
            stage.answers[host] = [[WORLD]]
            stage.servers[WORLD] = port
            assert await why(f"https://{host}/", guard_of(stage, tmp_path)) == rule


async def test_proxy_environment_is_ignored(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serving(hello) as port:
        stage.servers[WORLD] = port
        assert (await guard_of(stage, tmp_path).fetch("http://page.test/")).data == b"hello"


async def test_operator_proxy_is_used_after_check(threads: Threads, tmp_path: Path) -> None:
    lines: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nproxy")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        stage = Stage(threads, proxy=f"http://proxy.internal:{port}")
        stage.answers |= {"page.test": [[WORLD]], "inner.test": [["10.0.0.1"]], "proxy.internal": [["127.0.0.1"]]}
        assert (await guard_of(stage, tmp_path).fetch("http://page.test/x")).data == b"proxy"
        assert await why("http://inner.test/", guard_of(stage, tmp_path)) == "private"
        stage.answers["proxy.internal"] = [[]]
        assert await why("http://page.test/", guard_of(stage, tmp_path)) == "connect"
        del stage.answers["proxy.internal"]
        assert await why("http://page.test/", guard_of(stage, tmp_path)) == "connect"
    assert lines == [b"GET http://page.test/x HTTP/1.1"]


# ---- redirects


async def redirected(
    stage: Stage, tmp_path: Path, place: str, *, first: str = "http://page.test/", **settings: Any
) -> str:
    """The rule that a redirect to this place ends by."""

    async def away(request: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": place})

    async with serving(away) as port, serving(hello) as other:
        stage.servers |= {WORLD: port, ELSEWHERE: other}
        return await why(first, guard_of(stage, tmp_path, **settings))


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ("http://other.test/", ""),
        ("//other.test/x", ""),
        ("http://169.254.169.254/latest/meta-data/", "metadata"),
        ("http://metadata.google.internal/", "metadata"),
        ("http://[::ffff:a9fe:a9fe]/", "metadata"),
        ("http://127.0.0.1/", "loopback"),
        ("http://2130706433/", "numeric_host"),
        ("//10.0.0.1/", "private"),
        ("file:///etc/passwd", "scheme"),
        ("http://user:word@other.test/", "user_info"),
        ("http://other.test:6379/", "port"),
        (f"http://other.test/?q={SECRET}", "url_has_secret"),
        ("http://sub.blocked.example/", "website_blocklist"),
        ("http://[bad/", "malformed"),
        ("/again", "redirects"),
    ],
)
async def test_every_redirect_is_checked(stage: Stage, tmp_path: Path, place: str, rule: str) -> None:
    assert await redirected(stage, tmp_path, place, security__website_blocklist=["blocked.example"]) == rule


async def test_redirect_to_metadata_is_rejected_with_private_urls_allowed(stage: Stage, tmp_path: Path) -> None:
    assert await redirected(stage, tmp_path, "http://169.254.169.254/", security__allow_private_urls=True) == "metadata"


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ("http://127.0.0.1/", "loopback"),
        ("http://named.test:8080/end", "private"),
        ("http://inner.test/end", "private"),
        ("http://page.test/end", ""),
        ("/end", ""),
    ],
)
async def test_trust_does_not_extend_to_redirect_target(stage: Stage, tmp_path: Path, place: str, rule: str) -> None:
    async def away(request: web.Request) -> web.StreamResponse:
        return await hello(request) if request.path == "/end" else web.Response(status=302, headers={"Location": place})

    async with serving(away) as port:
        stage.answers |= {"named.test": [["10.0.0.1"]], "inner.test": [["10.0.0.2"]]}
        stage.servers |= dict.fromkeys(("10.0.0.1", "10.0.0.2", WORLD), port)
        assert await why("http://named.test/", guard_of(stage, tmp_path), trusted=True) == rule


@pytest.mark.parametrize(("hops", "rule"), [(5, ""), (6, "redirects")])
async def test_at_most_five_redirects(stage: Stage, tmp_path: Path, hops: int, rule: str) -> None:
    async def count(request: web.Request) -> web.StreamResponse:
        remaining = int(request.path[1:])
        if not remaining:
            return web.Response(text="there")
        raise web.HTTPFound(f"/{remaining - 1}")

    async with serving(count) as port:
        stage.servers[WORLD] = port
        assert await why(f"http://page.test/{hops}", guard_of(stage, tmp_path)) == rule


async def test_https_to_http_redirect_is_rejected(threads: Threads, tmp_path: Path) -> None:
    tls, bundle = certificate(tmp_path, "secure.test")

    async def away(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("http://secure.test/")

    async with serving(away, tls=tls) as port:
        stage = Stage(threads, ca_bundle=bundle)
        stage.answers["secure.test"] = [[WORLD]]
        stage.servers[WORLD] = port
        assert await why("https://secure.test/", guard_of(stage, tmp_path)) == "downgrade"


async def test_credentials_and_cookies_are_dropped_on_redirect(stage: Stage, tmp_path: Path) -> None:
    requests: list[web.Request] = []

    async def away(request: web.Request) -> web.StreamResponse:
        requests.append(request)
        place = "/next" if request.path == "/" else "http://other.test/end"
        return web.Response(status=302, headers={"Location": place, "Set-Cookie": "id=1"})

    async def end(request: web.Request) -> web.StreamResponse:
        requests.append(request)
        return web.Response(text="end")

    private = {"Authorization": "Bearer abc", "Cookie": "a=b", "X-Api-Key": "abc", "Mcp-Session-Id": "abc"}
    async with serving(away) as first, serving(end) as second:
        stage.servers |= {WORLD: first, ELSEWHERE: second}
        headers = {**private, "Accept": "text/html"}
        fetched = await guard_of(stage, tmp_path).fetch("http://page.test/", headers=headers)
    assert (fetched.final_url, len(requests)) == ("http://other.test/end", 3)
    same, other = requests[1].headers, requests[2].headers
    assert same["Authorization"] == "Bearer abc" and same["Cookie"] == "a=b"
    assert (
        not set(other) & {*private, "Referer", "Content-Type"}
        and other["Accept"] == "text/html"
        and other["Host"] == "other.test"
    )


@pytest.mark.parametrize(
    ("status", "place", "outcome"),
    [
        (307, "/end", ("POST", b"text")),
        (302, "/end", ("GET", b"")),
        (303, "/end", ("GET", b"")),
        (303, "http://other.test/end", ("GET", b"")),
        (308, "http://other.test/end", "redirected_body"),
    ],
)
async def test_body_is_not_sent_to_other_server(
    stage: Stage, tmp_path: Path, status: int, place: str, outcome: object
) -> None:
    observed: list[tuple[str, bytes]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/end":
            observed.append((request.method, await request.read()))
            return web.Response(text="end")
        return web.Response(status=status, headers={"Location": place})

    async with serving(answer) as port:
        stage.servers |= {WORLD: port, ELSEWHERE: port}
        rule = await why("http://page.test/", guard_of(stage, tmp_path), body=b"text")
    assert (rule or observed[0]) == outcome


# ---- what comes back


async def answer_data(stage: Stage, tmp_path: Path, body: bytes, headers: dict[str, str], **more: Any) -> bytes | str:
    """The data that a server's answer gives, or the rule that it ends by."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, headers={"Content-Type": "text/plain", **headers})

    async with serving(answer) as port:
        stage.servers[WORLD] = port
        try:
            return (await guard_of(stage, tmp_path).fetch("http://page.test/", **more)).data
        except FetchFailed as failed:
            assert failed.code == "fetch_failed"
            return failed.rule


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def deflated(data: bytes, bits: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, bits)
    return packer.compress(data) + packer.flush()


NOISE = random.Random(7).randbytes(20_000)
PLENTY = NOISE * 50


@pytest.mark.parametrize(
    ("encoding", "body", "outcome"),
    [
        ("identity", b"text", b"text"),
        ("gzip", gzipped(b"text"), b"text"),
        ("x-gzip", gzipped(b""), b""),
        ("deflate", deflated(b"text", 15), b"text"),
        ("deflate", deflated(b"text", -15), b"text"),
        ("gzip", gzipped(PLENTY), PLENTY),
        ("deflate", deflated(PLENTY, -15), PLENTY),
        ("gzip", gzipped(b"0" * 65_536), b"0" * 65_536),
        ("deflate", deflated(b"0" * 65_536, -15), b"0" * 65_536),
        ("deflate", deflated(b"0" * 65_541, -15), b"0" * 65_541),
        ("gzip", gzipped(bytes(50_000_000)), "too_large"),
        ("gzip", gzipped(bytes(1_000_000)), "too_large"),
        ("deflate", deflated(bytes(1_000_000), 15), "too_large"),
        ("gzip", gzipped(gzipped(bytes(10_000_000))), gzipped(bytes(10_000_000))),
        ("gzip", gzipped(PLENTY * 11), "too_large"),
        ("gzip", gzipped(PLENTY)[:-9], "broken"),
        ("gzip", gzipped(b"text") + b"more", "broken"),
        ("gzip", b"no gzip at all", "broken"),
        ("gzip, gzip", gzipped(gzipped(b"text")), "encoding"),
        ("br", b"text", "encoding"),
    ],
)
async def test_decompression_is_limited(
    stage: Stage, tmp_path: Path, encoding: str, body: bytes, outcome: bytes | str
) -> None:
    assert await answer_data(stage, tmp_path, body, {"Content-Encoding": encoding}) == outcome


@pytest.mark.parametrize(("size", "outcome"), [(1000, b"x" * 1000), (1001, "too_large")])
async def test_response_size_limit_is_exact(stage: Stage, tmp_path: Path, size: int, outcome: bytes | str) -> None:
    assert await answer_data(stage, tmp_path, b"x" * size, {}, bytes_max=1000) == outcome


async def test_endless_response_is_cut_at_limit(stage: Stage, tmp_path: Path) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        while True:
            await response.write(bytes(1 << 20))
            sent += 1 << 20

    async with serving(endless) as port:
        stage.servers[WORLD] = port
        assert await why("http://page.test/", guard_of(stage, tmp_path)) == "too_large"
    assert sent < 3 * FETCHED_BYTES_MAX


@pytest.mark.parametrize(
    ("content_type", "kind"),
    [
        ("text/plain; charset=utf-8", "text"),
        ("text/markdown", "text"),
        ("text/HTML", "html"),
        ("application/xhtml+xml", "html"),
        ("application/json", "json"),
        ("application/ld+json", "json"),
        ("application/rss+xml", "xml"),
        ("application/pdf", "pdf"),
        ("image/png", "image"),
        ("application/octet-stream", ""),
        ("video/mp4", ""),
        ("application/zip", ""),
        ("nonsense", ""),
    ],
)
async def test_content_type_is_checked(stage: Stage, tmp_path: Path, content_type: str, kind: str) -> None:
    for kinds_asked in (DOCUMENTS, IMAGES, frozenset({kind or "text"})):
        result = await answer_data(stage, tmp_path, b"text", {"Content-Type": content_type}, kinds=kinds_asked)
        assert result == (b"text" if kind in kinds_asked else "content_type")


async def test_fetched_response_fields(stage: Stage, tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=404, body=b"\xe4", headers={"Content-Type": 'Text/HTML; Charset="ISO-8859-1"'})

    async with serving(answer) as port:
        stage.servers[WORLD] = port
        response = await guard_of(stage, tmp_path).fetch("http://PAGE.test./x#y")
    assert response == ("http://page.test/x", 404, "text/html", "iso-8859-1", b"\xe4")


@pytest.mark.parametrize("has_started", [False, True])
async def test_slow_server_times_out(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_started: bool
) -> None:
    monkeypatch.setattr(urls_module, "FETCH_S_MAX", 0.2)

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        if has_started:
            await response.prepare(request)
            await response.write(b"a")
        await asyncio.Event().wait()
        return response

    async with serving(slow) as port:
        stage.servers[WORLD] = port
        assert await why("http://page.test/", guard_of(stage, tmp_path)) == "timeout"


async def test_connect_timeout(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "CONNECT_S_MAX", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        stage.servers[WORLD] = silent.getsockname()[1]
        assert await why("https://page.test/", guard_of(stage, tmp_path)) == "connect"


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 9\r\n\r\ncut"]
)
async def test_truncated_response_is_rejected(stage: Stage, tmp_path: Path, answer: bytes) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    async with server:
        stage.servers[WORLD] = server.sockets[0].getsockname()[1]
        assert await why("http://page.test/", guard_of(stage, tmp_path)) == ("broken" if answer else "connect")


async def test_response_can_be_streamed(stage: Stage, tmp_path: Path) -> None:
    read = asyncio.Event()

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await read.wait()
        await response.write(b"data: 2\n\n")
        return response

    async with serving(events) as port:
        stage.servers[WORLD] = port
        guard = guard_of(stage, tmp_path)
        async with guard.open("http://page.test/", bytes_max=None, timeouts=Timeouts(60, 60)) as opened:
            assert (opened.status, await opened.read()) == (200, b"data: 1\n\n")
            read.set()
            assert (await opened.read(), await opened.read()) == (b"data: 2\n\n", b"")


async def test_decompressed_stream_has_small_pieces(stage: Stage, tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=gzipped(PLENTY), headers={"Content-Encoding": "gzip"})

    async with serving(answer) as port:
        stage.servers[WORLD] = port
        sizes = []
        async with guard_of(stage, tmp_path).open("http://page.test/") as opened:
            while piece := await opened.read():
                sizes.append(len(piece))
    assert sum(sizes) == len(PLENTY) and max(sizes) <= 64 * 1024


async def test_cancelled_fetch_leaves_nothing_open(stage: Stage, tmp_path: Path) -> None:
    arrived = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        arrived.set()
        await asyncio.Event().wait()
        return web.Response()

    async with serving(slow) as port:
        stage.servers[WORLD] = port
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        task = asyncio.ensure_future(guard_of(stage, tmp_path).fetch("http://page.test/"))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert before == 0 or len(os.listdir("/proc/self/fd")) <= before + 1, "the server may still hold its side"
