"""Signing in with a browser: the cookie, whom it lets in, whose requests it counts for, and how it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from hermes.core.home import Home
from hermes.core.limits import SIGN_IN_KEPT_S, WRONG_KEYS_PER_MINUTE_MAX
from hermes.server.keys import WrongKeys
from support.model_server import Reply

from .clients import Json, read_error, read_json, stream_of
from .conftest import KEY, Api, Start
from .test_gate import PROFILE_KEY, ROOT_KEY, configure
from .test_keys import ANNA, KEYS, bearer
from .test_runner import serving

PAGE = {"X-Hermes-Page": "1"}
NOBODY = {"object": "hermes.auth.session", "key_required": True, "signed_in": False, "owner": None, "scopes": []}
NOBODY |= {"sees_all": False, "expires_at": None}


@asynccontextmanager
async def browser(**headers: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that keeps cookies and has no key."""
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(cookie_jar=jar, headers={"Sec-Fetch-Site": "same-origin", **headers}) as client:
        yield client


async def sign_in(client: aiohttp.ClientSession, url: str, key: str = KEY) -> Json:
    async with client.post(f"{url}/api/auth/login", json={"key": key}, headers=PAGE) as response:
        return await read_json(response)


async def who(client: aiohttp.ClientSession, url: str) -> Json:
    async with client.get(f"{url}/api/auth/session") as response:
        assert response.headers["Cache-Control"] == "no-store"
        return await read_json(response)


async def test_open_server_needs_no_sign_in(start: Start) -> None:
    api = await start(key="")
    async with browser() as client:
        session = await who(client, api.url)
        assert (session["key_required"], session["signed_in"], session["owner"]) == (False, True, "default")
        assert "admin" in session["scopes"]
        assert await sign_in(client, api.url, "anything") == session
        assert not list(client.cookie_jar)


async def test_sign_in_replaces_the_key_with_a_cookie(start: Start) -> None:
    api = await start(Reply(text="Hello."))
    async with browser() as client:
        assert await who(client, api.url) == NOBODY
        async with client.get(f"{api.url}/v1/models") as response:
            await read_error(response, 401, "invalid_api_key")
        async with client.post(f"{api.url}/api/auth/login", json={"key": KEY}, headers=PAGE) as response:
            session = await read_json(response)
            [cookie] = SimpleCookie(response.headers["Set-Cookie"]).values()
        assert (session["signed_in"], session["owner"], session["key_required"]) == (True, "default", True)
        assert session["scopes"] == ["chat", "sessions:read", "sessions:write", "runs", "jobs", "admin"]
        assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/")
        assert (cookie["max-age"], cookie["domain"], cookie["secure"]) == (str(int(SIGN_IN_KEPT_S)), "", "")
        assert KEY not in cookie.value and len(cookie.value) >= 43
        assert await who(client, api.url) == session
        async with client.get(f"{api.url}/v1/models") as response:
            await read_json(response)
            assert response.headers["Cache-Control"] == "no-store"
        body = {"input": "hi", "session_id": "s"}
        async with client.post(f"{api.url}/v1/runs", json=body, headers=PAGE) as response:
            run_id = (await read_json(response, 202))["run_id"]
        async with client.get(f"{api.url}/v1/runs/{run_id}/events") as response:
            assert (await stream_of(response))[-1].data["event"] == "run.completed"
    stored = api.app.store.blocking.engine.read(lambda tx: [tuple(row) for row in tx.rows("SELECT * FROM sign_ins")])
    assert cookie.value not in repr(stored) and KEY not in repr(stored)


async def test_state_changing_requests_must_come_from_the_page(start: Start) -> None:
    api = await start(cors_origins=["https://friend.example"])
    own = str(URL(api.url).origin())
    async with browser() as client:
        await sign_in(client, api.url)
        create = f"{api.url}/api/sessions"
        for headers in (
            {},
            {"X-Hermes-Page": "0"},
            {**PAGE, "Sec-Fetch-Site": "cross-site"},
            {**PAGE, "Sec-Fetch-Site": "same-site"},
            {**PAGE, "Origin": "https://friend.example"},
        ):
            async with client.post(create, json={}, headers=headers) as response:
                await read_error(response, 403, "cross_site_request")
        for headers in ({**PAGE, "Origin": own}, PAGE):
            async with client.post(create, json={}, headers=headers) as response:
                await read_json(response, 201)
        for headers in ({"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "cross-site"}):
            async with client.get(create, headers=headers) as response:
                await read_error(response, 403, "cross_site_request")
        async with client.get(create, headers={"Sec-Fetch-Site": "none"}) as response:
            assert len((await read_json(response))["data"]) == 2
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        upgrade["Sec-WebSocket-Key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
        async with client.get(f"{api.url}/v1/responses", headers=upgrade) as response:
            await read_error(response, 403, "cross_site_request")
        async with client.get(f"{api.url}/health", headers={"Sec-Fetch-Site": "same-site"}) as response:
            await read_json(response)
    # What has a key is not asked about it.
    async with api.post("/api/sessions", {}, headers={"Sec-Fetch-Site": "cross-site"}) as response:
        await read_json(response, 201)


@pytest.mark.parametrize("path", ["/api/auth/login", "/api/auth/logout"])
async def test_other_sites_cannot_sign_anybody_in_or_out(api: Api, path: str) -> None:
    async with browser() as client:
        for headers in ({}, {**PAGE, "Sec-Fetch-Site": "cross-site"}):
            async with client.post(api.url + path, json={"key": KEY}, headers=headers) as response:
                await read_error(response, 403, "cross_site_request")
        assert not list(client.cookie_jar)


async def test_a_key_that_is_shown_counts_before_the_cookie(start: Start) -> None:
    api = await start(keys=KEYS)
    async with browser() as client:
        await sign_in(client, api.url)
        async with client.get(f"{api.url}/v1/models", headers=bearer("sk-wrong-0123456789")) as response:
            await read_error(response, 401, "invalid_api_key")
        async with client.get(f"{api.url}/v1/capabilities", headers=bearer(ANNA)) as response:
            assert (await read_json(response))["auth"]["owner"] == "anna"


async def test_sign_in_has_the_scopes_of_its_key(start: Start) -> None:
    api = await start(keys=[*KEYS, {"name": "reader", "key": "sk-reader-0123456789", "scopes": ["sessions:read"]}])
    async with browser() as client:
        session = await sign_in(client, api.url, "sk-reader-0123456789")
        assert (session["owner"], session["scopes"], session["sees_all"]) == ("reader", ["sessions:read"], False)
        async with client.post(f"{api.url}/api/sessions", json={}, headers=PAGE) as response:
            await read_error(response, 403, "insufficient_scope")
        async with client.get(f"{api.url}/api/sessions") as response:
            await read_json(response)
        assert (await sign_in(client, api.url, KEY))["sees_all"] is True
        assert api.app.store.blocking.sign_ins.remove_all("reader") == 0  # the new sign-in has ended the old one


async def test_signing_out(api: Api) -> None:
    async with browser() as here, browser() as there, browser() as elsewhere:
        for client in (here, there, elsewhere):
            await sign_in(client, api.url)
        token = next(iter(here.cookie_jar))
        async with here.post(f"{api.url}/api/auth/logout", json={}, headers=PAGE) as response:
            assert await read_json(response) == NOBODY
        assert not list(here.cookie_jar)
        async with aiohttp.request("GET", f"{api.url}/v1/models", cookies={token.key: token.value}) as response:
            await read_error(response, 401, "invalid_api_key")
        assert (await who(there, api.url))["signed_in"]
        async with there.post(f"{api.url}/api/auth/logout", json={"everywhere": True}, headers=PAGE) as response:
            await read_json(response)
        assert await who(elsewhere, api.url) == NOBODY
        async with here.post(f"{api.url}/api/auth/logout", json={"everywhere": "x"}, headers=PAGE) as response:
            await read_error(response, 400, "invalid_type", "everywhere")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"key": "sk-wrong-0123456789"}, 401, "invalid_api_key", "key"),
        ({"key": ""}, 401, "invalid_api_key", "key"),
        ({"key": "k\ud800é"}, 401, "invalid_api_key", "key"),
        ({}, 400, "missing_required_parameter", "key"),
        ({"key": 5}, 400, "invalid_type", "key"),
        ({"key": "x" * 1001}, 400, "string_above_max_length", "key"),
    ],
)
async def test_refused_sign_in(api: Api, body: Json, status: int, code: str, param: str) -> None:
    async with browser() as client:
        async with client.post(f"{api.url}/api/auth/login", json=body, headers=PAGE) as response:
            await read_error(response, status, code, param)
        assert not list(client.cookie_jar)


async def test_wrong_keys_have_to_wait(api: Api) -> None:
    async with browser() as client:
        for _ in range(WRONG_KEYS_PER_MINUTE_MAX):
            async with client.post(f"{api.url}/api/auth/login", json={"key": "wrong"}, headers=PAGE) as response:
                await read_error(response, 401, "invalid_api_key")
        async with client.post(f"{api.url}/api/auth/login", json={"key": KEY}, headers=PAGE) as response:
            await read_error(response, 429, "rate_limit_exceeded")
            assert 1 <= int(response.headers["Retry-After"]) <= 60


def test_wrong_keys_are_counted_by_address_and_forgotten() -> None:
    now = [0.0]
    wrong = WrongKeys(lambda: now[0])
    for number in range(WRONG_KEYS_PER_MINUTE_MAX):
        assert wrong.wait_s("a") == 0, number
        wrong.count("a")
    assert wrong.wait_s("a") > 0 and wrong.wait_s("b") == 0
    now[0] += 60
    assert wrong.wait_s("a") == 0
    for number in range(5000):
        wrong.count(str(number))
    assert len(wrong._buckets) == 1000


@pytest.mark.parametrize("forwarded", ["https", "http"])
async def test_cookie_of_https_is_for_https_only(start: Start, forwarded: str) -> None:
    api = await start(trusted_proxies=["127.0.0.1"])
    headers = {"X-Forwarded-Proto": forwarded, "X-Forwarded-Host": "hermes.example", "X-Forwarded-For": "2001:db8::1"}
    async with (
        browser(**headers) as client,
        client.post(f"{api.url}/api/auth/login", json={"key": KEY}, headers=PAGE) as response,
    ):
        await read_json(response)
        [cookie] = SimpleCookie(response.headers["Set-Cookie"]).values()
    is_secure = forwarded == "https"
    assert (bool(cookie["secure"]), cookie.key.startswith("__Host-")) == (is_secure, is_secure)
    sent = {**headers, "Cookie": f"{cookie.key}={cookie.value}"}
    async with aiohttp.request("GET", f"{api.url}/v1/models", headers=sent) as response:
        await read_json(response)


async def with_token(api: Api, token: str, name: str | None = None) -> int:
    cookie = {name or f"hermes_default_{URL(api.url).port}": token}
    async with aiohttp.request("GET", f"{api.url}/v1/models", cookies=cookie) as response:
        return response.status


async def test_sign_in_outlives_the_server_and_ends_with_its_key(start: Start) -> None:
    api = await start(keys=KEYS)
    async with browser() as client:
        await sign_in(client, api.url, ANNA)
        token = next(iter(client.cookie_jar)).value
    assert await with_token(api, token) == 200
    assert await with_token(await start(keys=KEYS), token) == 200
    changed: list[Json] = [{**KEYS[0], "key": "sk-anna-another-0123456789"}, KEYS[1]]
    assert await with_token(await start(keys=changed), token) == 401
    assert await with_token(await start(keys=KEYS[1:]), token) == 401
    wide: list[Json] = [{**KEYS[0], "scopes": ["chat"], "max_concurrent": 1}, KEYS[1]]
    assert await with_token(await start(keys=wide), token) == 200  # the same key


async def test_expired_and_made_up_tokens_open_nothing(api: Api) -> None:
    async with browser() as client:
        await sign_in(client, api.url)
        token = next(iter(client.cookie_jar)).value
    for made_up in ("", "x", token[:-1], token + "A", "é", "x" * 4000):
        assert await with_token(api, made_up) == 401
    assert await with_token(api, token, "hermes") == 401
    api.app.store.blocking.engine.write(lambda tx: tx.execute("UPDATE sign_ins SET expires_at = 1"))
    assert await with_token(api, token) == 401


async def test_unreachable_store_is_reported(api: Api, monkeypatch: Any) -> None:
    from hermes.store.base import StoreError

    async def fail(*_: Any) -> None:
        raise StoreError("gone")

    async with browser() as client:
        await sign_in(client, api.url)
        monkeypatch.setattr(api.app.store.sign_ins, "get", fail, raising=False)
        async with client.get(f"{api.url}/v1/models") as response:
            await read_error(response, 503, "session_db_unavailable")


async def test_profiles_have_sign_ins_of_their_own(home_folder: Path) -> None:
    home_folder.mkdir(mode=0o700)
    home = Home(home_folder)
    configure(home, {"key": ROOT_KEY}, {"key": PROFILE_KEY})
    async with serving(home) as (url, _), browser() as client:
        await sign_in(client, f"{url}/p/a", PROFILE_KEY)
        assert (await who(client, f"{url}/p/a"))["signed_in"]
        assert await who(client, url) == NOBODY
        async with client.get(f"{url}/v1/models") as response:
            await read_error(response, 401, "invalid_api_key")
        await sign_in(client, url, ROOT_KEY)
        assert (await who(client, f"{url}/p/a"))["signed_in"] and (await who(client, url))["signed_in"]
        [profile_token] = [cookie.value for cookie in client.cookie_jar if "_a_" in cookie.key]
        async with aiohttp.request(
            "GET", f"{url}/v1/models", cookies={f"hermes_default_{URL(url).port}": profile_token}
        ) as response:
            await read_error(response, 401, "invalid_api_key")
