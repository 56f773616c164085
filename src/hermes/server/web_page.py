"""The page at `/`: files built from `web/`, served from a table that is read once; no path is looked up."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from hermes.server.errors import ApiError
from hermes.server.routes import route

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

# The build's output.
FOLDER: Any = files("hermes.server").joinpath("web")
INDEX = "index.html"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# content coding: file extension; the first that the client accepts is sent
_CODINGS = {"br": ".br", "gzip": ".gz"}
_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "mjs": "text/javascript",
    "json": "application/json",
    "map": "application/json",
    "webmanifest": "application/manifest+json",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpg": "image/jpeg",
    "gif": "image/gif",
    "webp": "image/webp",
    "avif": "image/avif",
    "ico": "image/x-icon",
    "woff": "font/woff",
    "woff2": "font/woff2",
    "ttf": "font/ttf",
    "txt": "text/plain",
}
_REFUSED = re.compile(r"q=0(\.0*)?")
_TEXTS = ("text/", "application/json", "application/manifest+json")


class PageFile(NamedTuple):
    """A file by content coding; the plain one is `identity`."""

    type: str
    tag: str
    forms: dict[str, bytes]


@functools.cache
def _read(folder: Traversable) -> dict[str, PageFile]:
    """Every file of a known type, by its path in the folder. Blocks."""
    files: dict[str, PageFile] = {}
    for path, place in (("", folder), ("assets/", folder.joinpath("assets"))):
        contents = {file.name: file for file in place.iterdir() if file.is_file()} if place.is_dir() else {}
        for name, file in contents.items():
            if (kind := _TYPES.get(name.rpartition(".")[2])) is not None:
                plain = file.read_bytes()
                coded = {coding: contents.get(name + end) for coding, end in _CODINGS.items()}
                forms = {coding: form.read_bytes() for coding, form in coded.items() if form is not None}
                tag = hashlib.sha256(plain).hexdigest()[:32]
                files[path + name] = PageFile(kind, tag, {**forms, "identity": plain})
    return files


async def page_files() -> dict[str, PageFile]:
    """Empty where the page is not built."""
    return await asyncio.to_thread(_read, FOLDER)


async def is_built() -> bool:
    return INDEX in await page_files()


@route("GET /assets/{asset}", "ui_asset", "File of the web page", scope=None, types=("*/*",), faults=(404,))
async def asset(context: ServerContext, request: web.Request) -> web.Response:
    file = (await page_files()).get(f"assets/{request.match_info['asset']}") if context.options.ui else None
    if file is None:
        raise ApiError(404, f"There is nothing at {request.method} {request.path}.", "not_found")
    # Names of assets hold a hash of their content.
    return _sent(request, file, {"Cache-Control": "public, max-age=31536000, immutable"})


async def index(request: web.Request) -> web.Response | None:
    """None where the page is not built."""
    file = (await page_files()).get(INDEX)
    return None if file is None else _sent(request, file, {"Cache-Control": "no-cache", "Vary": "Accept, "})


def _sent(request: web.Request, file: PageFile, headers: dict[str, str]) -> web.Response:
    accepted = _accepted(request.headers.get("Accept-Encoding", ""))
    coding = next((coding for coding in file.forms if coding in accepted), "identity")
    tag = f"{file.tag}-{coding}"
    headers |= {
        "ETag": f'"{tag}"',
        "Vary": headers.get("Vary", "") + "Accept-Encoding",
        "Content-Security-Policy": CSP,
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    if any(known.value in (tag, "*") for known in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    if coding != "identity":
        headers["Content-Encoding"] = coding
    charset = "utf-8" if file.type.startswith(_TEXTS) else None
    return web.Response(body=file.forms[coding], content_type=file.type, charset=charset, headers=headers)


def _accepted(header: str) -> set[str]:
    """The content codings that a client accepts; weight 0 means refused."""
    parts = (part.partition(";") for part in header.lower().replace(" ", "").split(","))
    return {name for name, _, weight in parts if not _REFUSED.fullmatch(weight)}
