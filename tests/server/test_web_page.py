"""The page at `/`: its files, how they are cached and compressed, and that nothing else can be had there."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hermes.server import web_page

from .clients import check_headers, read_error, read_json
from .conftest import Api, Start

HTML = "<!doctype html><title>Hermes</title><script type=module src=./assets/page-1a2b3c.js></script>"
SCRIPT = b"export const hello = 'world';\n" * 10


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built page, and beside it a file that is none of its own."""
    built = tmp_path / "web"
    (built / "assets" / "deeper").mkdir(parents=True)
    (built / "index.html").write_text(HTML)
    (built / "index.html.gz").write_bytes(gzip.compress(HTML.encode()))
    for name, content in {
        "page-1a2b3c.js": SCRIPT,
        "page-1a2b3c.js.gz": gzip.compress(SCRIPT),
        "page-1a2b3c.js.br": b"brotli is only passed on",
        "letters-4d5e6f.woff2": b"\x00font",
        "notes.sh": b"#!/bin/sh",
        "deeper/more.js": SCRIPT,
    }.items():
        (built / "assets" / name).write_bytes(content)
    (tmp_path / "secret.js").write_text("not for anybody")
    monkeypatch.setattr(web_page, "FOLDER", built)
    return built


def raw_request(api: Api, path: str, method: str = "GET", **headers: str) -> Any:
    """A request without a key that decompresses nothing."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return aiohttp.request(method, api.url + path, headers={"Accept-Encoding": "", **names}, auto_decompress=False)


async def test_the_page_and_its_assets_need_no_key(folder: Path, api: Api) -> None:
    async with raw_request(api, "/", Accept="text/html") as response:
        assert (response.status, await response.text()) == (200, HTML)
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["Vary"] == "Accept, Accept-Encoding"
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; " in policy
        assert "unsafe" not in policy and "form-action 'none'" in policy
        check_headers({**response.headers, "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'"})
    async with raw_request(api, "/assets/page-1a2b3c.js") as response:
        assert (response.status, await response.read()) == (200, SCRIPT)
        assert response.headers["Content-Type"] == "text/javascript; charset=utf-8"
        assert response.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    async with raw_request(api, "/assets/letters-4d5e6f.woff2") as response:
        assert (response.headers["Content-Type"], await response.read()) == ("font/woff2", b"\x00font")
    async with raw_request(api, "/", Accept="application/json") as response:
        assert (await read_json(response))["name"] == "hermes"


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip, deflate, br, zstd", "br"),
        ("gzip;q=1.0, br;q=0", "gzip"),
        ("GZIP", "gzip"),
        ("br; q=0.000,gzip;q=0", None),
        ("zstd", None),
        ("", None),
    ],
)
async def test_the_form_that_the_client_takes_is_sent(
    folder: Path, api: Api, accepted: str, coding: str | None
) -> None:
    sent = {"br": b"brotli is only passed on", "gzip": gzip.compress(SCRIPT, mtime=0), None: SCRIPT}
    async with raw_request(api, "/assets/page-1a2b3c.js", Accept_Encoding=accepted) as response:
        body = await response.read()
        assert response.headers.get("Content-Encoding") == coding
        assert response.headers["Vary"] == "Accept-Encoding"
        assert gzip.decompress(body) == SCRIPT if coding == "gzip" else body == sent[coding]
        assert int(response.headers["Content-Length"]) == len(body)


async def test_a_file_that_is_known_is_not_sent_again(folder: Path, api: Api) -> None:
    for path in ("/", "/assets/page-1a2b3c.js"):
        async with raw_request(api, path, Accept_Encoding="gzip") as response:
            tag = response.headers["ETag"]
        async with raw_request(api, path, Accept_Encoding="gzip", If_None_Match=f'"other", {tag}') as response:
            assert (response.status, await response.read()) == (304, b"")
            assert response.headers["ETag"] == tag
        async with raw_request(api, path, If_None_Match=tag) as response:  # the plain form is another one
            assert response.status == 200
        async with raw_request(api, path, "HEAD") as response:
            assert response.status == 200 and await response.read() == b""
            assert int(response.headers["Content-Length"]) > 80


@pytest.mark.parametrize(
    "path",
    [
        "/assets/none.js",
        "/assets/notes.sh",
        "/assets/page-1a2b3c.js.br",
        "/assets/index.html",
        "/index.html",
        "/assets/deeper/more.js",
        "/assets/deeper%2Fmore.js",
        "/assets/..%2f..%2fsecret.js",
        "/assets/%2e%2e%2f%2e%2e%2fsecret.js",
        "/assets/%2Fetc%2Fpasswd",
        "/assets/x%00.js",
    ],
)
async def test_nothing_else_is_served(folder: Path, api: Api, path: str) -> None:
    from yarl import URL

    async with aiohttp.request("GET", URL(api.url + path, encoded=True)) as response:
        await read_error(response, 404, "not_found", None)


async def test_only_get_and_head(folder: Path, api: Api) -> None:
    async with raw_request(api, "/assets/page-1a2b3c.js", "POST") as response:
        await read_error(response, 405, "method_not_allowed", None)


async def test_disabled_page_is_not_found(folder: Path, start: Start) -> None:
    api = await start(ui=False)
    for path in ("/", "/assets/page-1a2b3c.js"):
        async with raw_request(api, path) as response:
            await read_error(response, 404, "not_found", None)
    async with api.get("/v1/capabilities") as response:
        assert (await read_json(response))["features"]["web_ui"] is False


async def test_missing_page_build_has_a_hint(api: Api, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(web_page, "FOLDER", tmp_path / "nowhere")
    async with raw_request(api, "/") as response:
        assert response.status == 200 and "make setup" in await response.text()
    async with raw_request(api, "/assets/page-1a2b3c.js") as response:
        await read_error(response, 404, "not_found", None)
    async with api.get("/v1/capabilities") as response:
        assert (await read_json(response))["features"]["web_ui"] is False


async def test_capabilities_tell_of_the_page(folder: Path, api: Api) -> None:
    async with api.get("/v1/capabilities") as response:
        assert (await read_json(response))["features"]["web_ui"] is True
