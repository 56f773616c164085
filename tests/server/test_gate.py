"""The gate: host, origin, user and key, for every route of every profile; and what a server does not start with."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from hermes.core.errors import HermesError
from hermes.core.home import Home
from hermes.server import application, peers
from hermes.server.errors import code_in
from hermes.server.routes import ROUTES, Route
from hermes.server.runner import GatewayRunner

from .test_runner import serving

ROOT_KEY = "q7Zr-4fJ0_pW2xLs9TnB6vYc1HdK8mGa"
PROFILE_KEY = "Lw5-uE3tRk9_vQ1bXz7JmNc4HyDs8GpA"
HERE, THERE = "https://here.example", "https://there.example"
PREFIXES = ["", "/p/a"]
Json = dict[str, Any]


@pytest.fixture
def home(home_folder: Path) -> Home:
    home_folder.mkdir(mode=0o700)
    return Home(home_folder)


def configure(home: Home, root: Json, profile: Json) -> None:
    """Settings below `api_server` of the default profile and of the profile `a`, which it serves too."""
    folder = home.path / "profiles" / "a"
    folder.mkdir(parents=True, exist_ok=True)
    model = {"default": "m", "base_url": "http://127.0.0.1:9/v1"}
    for path, options in ((home.path, {"profiles": ["a"], **root}), (folder, profile)):
        (path / "config.yaml").write_text(yaml.safe_dump({"model": model, "api_server": options}))


def called(path: str) -> str:
    """The path of a route with something in the place of every name."""
    return re.sub(r"{[^}]*}", "x", path)


async def ask(url: str, method: str, path: str, **headers: str) -> tuple[int, str | None, Any]:
    """The status, the code of the error and the headers."""
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, url + path, headers={k.replace("_", "-"): v for k, v in headers.items()}) as answer,
    ):
        code = None
        if answer.status >= 400 and method != "HEAD":
            code = code_in(await answer.read())
        return answer.status, code, answer.headers


# ---- every route of every profile


EVERYWHERE = [(route.method, called(route.path)) for route in ROUTES] + [
    ("GET", "/nowhere"),
    ("DELETE", "/v1/models"),
    ("OPTIONS", "/v1/models"),
]


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_open_server_rejects_foreign_host_and_origin(home: Home, prefix: str) -> None:
    configure(home, {}, {})
    async with serving(home) as (url, _):
        for method, path in EVERYWHERE:
            answer = await ask(url, method, prefix + path, Host="evil.example")
            assert answer[:2] == (403, "host_not_allowed"), (method, path)
            answer = await ask(url, method, prefix + path, Origin="https://evil.example")
            assert answer[:2] == (403, "origin_not_allowed"), (method, path)
            assert "Access-Control-Allow-Origin" not in answer[2] and answer[2]["X-Frame-Options"] == "DENY"
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        upgrade |= {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Host": "evil.example"}
        assert (await ask(url, "GET", f"{prefix}/v1/responses", **upgrade))[:2] == (403, "host_not_allowed")


@pytest.mark.parametrize("path", ["/", "//", "/p/a/", "//p//a//"])
async def test_every_profile_has_its_page(home: Home, path: str) -> None:
    configure(home, {}, {})
    async with serving(home) as (url, _):
        assert (await ask(url, "GET", path))[:2] == (200, None)


async def test_page_of_a_profile_is_found_without_its_slash(home: Home) -> None:
    configure(home, {}, {})
    async with serving(home) as (url, _), aiohttp.ClientSession() as client:
        async with client.get(f"{url}/p/a", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (308, "a/")
            assert answer.headers["X-Frame-Options"] == "DENY"
        async with client.get(f"{url}/p/a") as answer:
            assert (answer.status, answer.url.path) == (200, "/p/a/")
        assert (await ask(url, "GET", "/p/b"))[:2] == (404, "profile_not_found")


@pytest.mark.parametrize(("prefix", "wrong"), [("", PROFILE_KEY), ("/p/a", ROOT_KEY)])
async def test_key_opens_own_profile_only(home: Home, prefix: str, wrong: str) -> None:
    configure(home, {"key": ROOT_KEY}, {"key": PROFILE_KEY})
    right = ROOT_KEY if wrong == PROFILE_KEY else PROFILE_KEY

    def without_key(route: Route) -> bool:
        return route.scope is None

    async with serving(home) as (url, _):
        for route in ROUTES:
            path = prefix + called(route.path)
            for headers in ({}, {"Authorization": f"Bearer {wrong}"}):
                status, code, _ = await ask(url, route.method, path, **headers)
                assert (code == "invalid_api_key") is not without_key(route), (route.name, status)
            if route.method == "GET" and route.name != "responses_websocket":
                status, code, _ = await ask(url, "GET", path, Authorization=f"Bearer {right}")
                assert status not in (401, 403), (route.name, code)


async def test_cors_origins_are_per_profile(home: Home) -> None:
    configure(home, {"cors_origins": [HERE]}, {"cors_origins": [THERE]})
    async with serving(home) as (url, _):
        for prefix, own, other in (("", HERE, THERE), ("/p/a", THERE, HERE)):
            for method in ("GET", "OPTIONS"):
                status, _, headers = await ask(url, method, f"{prefix}/v1/models", Origin=own)
                assert (status, headers["Access-Control-Allow-Origin"]) == (200, own)
                answer = await ask(url, method, f"{prefix}/v1/models", Origin=other)
                assert answer[:2] == (403, "origin_not_allowed")
                assert "Access-Control-Allow-Origin" not in answer[2]


async def test_environment_key_and_origins_apply_to_own_profile_only(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_SERVER_KEY", ROOT_KEY)
    monkeypatch.setenv("API_SERVER_CORS_ORIGINS", HERE)
    configure(home, {}, {"key": PROFILE_KEY})
    async with serving(home) as (url, _):
        statuses = [
            (await ask(url, "GET", f"{prefix}/v1/models", Authorization=f"Bearer {key}", **origin))[0]
            for prefix, key, origin in (
                ("", ROOT_KEY, {"Origin": HERE}),
                ("/p/a", ROOT_KEY, {}),
                ("/p/a", PROFILE_KEY, {}),
                ("/p/a", PROFILE_KEY, {"Origin": HERE}),
            )
        ]
    assert statuses == [200, 401, 200, 403]


# ---- what it does not start with


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def hashed(value: str) -> Json:
    return {"keys": [{"name": "anna", "key_sha256": value, "scopes": ["chat"]}]}


OPEN_PROFILE = "The profile 'a' has no key, and the profile 'default' has one"
OPEN_ROOT = "The profile 'default' has no key, and the profile 'a' has one"
STAR = "api_server.cors_origins allows every origin ('*'), and there is no key"
WEAK = "the key 'anna' of api_server.keys is"


@pytest.mark.parametrize(
    ("environ", "root", "profile", "host", "message"),
    [
        ({}, {"key": ROOT_KEY}, {}, "127.0.0.1", OPEN_PROFILE),
        ({}, hashed(digest(ROOT_KEY)), {}, "127.0.0.1", OPEN_PROFILE),
        ({"API_SERVER_KEY": ROOT_KEY}, {}, {}, "127.0.0.1", OPEN_PROFILE),
        ({}, {}, {"key": PROFILE_KEY}, "127.0.0.1", OPEN_ROOT),
        ({}, {"profiles": ["default"]}, {}, "127.0.0.1", "api_server.profiles names 'default'"),
        ({}, {"cors_origins": ["*"]}, {}, "127.0.0.1", STAR),
        ({}, {"cors_origins": [HERE, "*"]}, {}, "127.0.0.1", STAR),
        ({"API_SERVER_CORS_ORIGINS": "*"}, {}, {}, "127.0.0.1", STAR),
        ({}, {}, {"cors_origins": ["*"]}, "127.0.0.1", STAR),
        *(
            ({}, hashed(value), {"key": PROFILE_KEY}, "0.0.0.0", WEAK)
            for value in (
                *map(digest, ("", "changeme", "CHANGE-ME", "your-api-key", "your_api_key_here", "sk-changeme")),
                *map(digest, ("password", "secret", "test", "hermes", "x" * 16, "sk-" + "x" * 20, "1234567890")),
                *("0" * 64, "0123456789ABCDEF" * 4, "deadbeef" * 8),
            )
        ),
    ],
)
async def test_insecure_configuration_is_rejected_at_start(
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    root: Json,
    profile: Json,
    host: str,
    message: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    configure(home, root, profile)
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(HermesError) as refused:
        await GatewayRunner(home, host=host, port=0, allow_local_exec=True).serve(stop)
    assert refused.value.exit_code == 78
    assert message in str(refused.value) and "Try: " in str(refused.value)
    assert ROOT_KEY not in str(refused.value)


async def test_hashed_keys_off_loopback(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    configure(home, hashed(digest(ROOT_KEY)), {"key": PROFILE_KEY})
    async with serving(home, host="0.0.0.0", allow_local_exec=True) as (url, _):
        assert (await ask(url, "GET", "/v1/models", Authorization=f"Bearer {ROOT_KEY}"))[0] == 200
    configure(home, hashed(digest("changeme")), {"key": PROFILE_KEY})
    async with serving(home) as (url, _):
        assert (await ask(url, "GET", "/v1/models", Authorization="Bearer changeme"))[0] == 200
    assert WEAK in capfd.readouterr().err


# ---- an open server and other users

NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"
CLIENT = """
import socket, sys
family, host, port, path = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
sock = socket.socket(family)
sock.connect((host, port))
sock.sendall(f"GET {path} HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n".encode())
while (data := sock.recv(65536)):
    sys.stdout.buffer.write(data)
"""


@pytest.fixture
async def open_url(home: Home) -> AsyncIterator[str]:
    configure(home, {}, {})
    async with serving(home) as (url, _):
        yield url


async def as_user(uid: int, url: str, path: str, family: int = socket.AF_INET, host: str = "127.0.0.1") -> str:
    """The response that a client of this user gets."""
    arguments = [str(int(family)), host, url.rpartition(":")[2], path]
    process = await asyncio.create_subprocess_exec(
        SYSTEM_PYTHON, "-c", CLIENT, *arguments, stdout=subprocess.PIPE, user=uid, group=uid, extra_groups=[]
    )
    return (await process.communicate())[0].decode()


def status_of(answer: str) -> int:
    return int(answer.split(" ")[1])


@pytest.mark.parametrize(
    ("family", "host"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::ffff:127.0.0.1")],
)
@pytest.mark.parametrize("how", ["asked", "listed", "untold"])
async def test_open_server_serves_own_user_only(
    home: Home, monkeypatch: pytest.MonkeyPatch, how: str, family: int, host: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    if host == "::1" and not has_ipv6():
        pytest.skip("there is no IPv6 here")
    if how != "asked":
        monkeypatch.setattr(peers, "_SOCK_DIAG", 99)
    if how == "untold":
        monkeypatch.setattr(peers, "_TABLES", ("/proc/net/none", "/proc/net/none"))
    configure(home, {"host": "::1" if host == "::1" else "127.0.0.1"}, {})
    async with serving(home) as (url, _):
        for prefix in PREFIXES:
            own, other, health = [
                await as_user(uid, url, prefix + path, family, host)
                for uid, path in ((0, "/v1/models"), (NOBODY, "/v1/models"), (NOBODY, "/health"))
            ]
            assert (status_of(own), status_of(health)) == (200, 200)
            assert status_of(other) == (200 if how == "untold" else 401)
            assert ('"code":"other_user"' in other and "hermes gateway key" in other) is (how != "untold")


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def test_closed_connection_is_not_treated_as_root() -> None:
    """The kernel says of a socket without a process that it is root's."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
        with accepted:
            transport = Transport(accepted)
            before = peers.is_same_user(transport)
            client.close()
            assert (before, peers.is_same_user(transport)) == (True, False)


async def test_unix_socket_peer_user() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peers.is_same_user(Transport(ours))
    if os.geteuid() == 0:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path := f"\0hermes-test-{os.getpid()}")
            listening.listen()
            connect = f"import socket,sys; s=socket.socket(1); s.connect({path!r}); sys.stdin.read()"
            with subprocess.Popen([SYSTEM_PYTHON, "-c", connect], user=NOBODY, stdin=subprocess.PIPE) as other:
                with listening.accept()[0] as accepted:
                    assert not peers.is_same_user(Transport(accepted))
                other.communicate()


async def test_peer_user_is_looked_up_once_per_connection(open_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []

    def look(transport: asyncio.BaseTransport) -> bool:
        looked.append(peers.is_same_user(transport))
        return looked[-1]

    monkeypatch.setattr(application, "is_same_user", look)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as client:
        for _ in range(3):
            async with client.get(f"{open_url}/v1/models") as answer:
                assert answer.status == 200
                await answer.read()
    assert looked == [True]


class Transport(asyncio.BaseTransport):
    """A connection as the server holds it."""

    def __init__(self, sock: socket.socket) -> None:
        inet = sock.family != socket.AF_UNIX
        addresses = {"sockname": sock.getsockname(), "peername": sock.getpeername()} if inet else {}
        super().__init__({"socket": sock, **addresses})
