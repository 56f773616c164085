"""The tools `web_search` and `web_extract`: the operator's search service, and pages read through the URL guard."""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, NamedTuple
from urllib.parse import urlencode

from msgspec import Meta

from hermes.core import limits
from hermes.core.json_types import JsonMapping
from hermes.guards.urls import Fetched, FetchFailed
from hermes.sandbox.quota import write_spill
from hermes.settings.config import Settings
from hermes.tools.framework import approvals
from hermes.tools.framework.registry import Answer, Prepared, ToolArguments, ToolContext, ToolDef, ToolError

_HEAD_SHARE = 0.75
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,200}>")
_WHOLE = "Give the whole address, which begins with https:// or http://."
_HINTS = {"malformed": _WHOLE, "scheme": _WHOLE}
_HINTS["host_not_approved"] = "Where a page redirects there, ask for an address of that host itself."
_NEXT = {
    "url_refused": "Such addresses are not opened; use another source, or tell the user.",
    "url_has_secret": "Leave the credential out of the address.",
    "fetch_failed": "Try another source, or try again later.",
}


# --- search ----------------------------------------------------------------------------------------------------------


class SearchRequest(NamedTuple):
    """A request to a search server. Credentials go into headers, never into the URL."""

    url: str
    headers: Mapping[str, str] = {}
    body: JsonMapping | None = None


class Backend(NamedTuple):
    """A search service: the variable with its key or address, its request, and the fields of its answer."""

    variable: str
    request: Callable[[str, str, int], SearchRequest]
    results: tuple[str, ...]
    snippet: str
    published: str


BACKENDS = {
    "searxng": Backend(
        "SEARXNG_URL",
        lambda address, query, _: SearchRequest(
            f"{address.rstrip('/')}/search?{urlencode({'q': query, 'format': 'json'})}"
        ),
        ("results",), "content", "publishedDate",
    ),
    "brave": Backend(
        "BRAVE_SEARCH_API_KEY",
        lambda key, query, limit: SearchRequest(
            "https://api.search.brave.com/res/v1/web/search?"
            + urlencode({"q": query, "count": limit, "text_decorations": "false"}),
            {"X-Subscription-Token": key},
        ),
        ("web", "results"), "description", "page_age",
    ),
    "tavily": Backend(
        "TAVILY_API_KEY",
        lambda key, query, limit: SearchRequest(
            "https://api.tavily.com/search",
            {"Authorization": f"Bearer {key}"},
            {"query": query, "max_results": limit},
        ),
        ("results",), "content", "published_date",
    ),
}  # fmt: skip


def backend_of(settings: Settings) -> str | None:
    chosen = settings.web.search_backend
    names = [chosen] if chosen else BACKENDS
    return next((name for name in names if (settings.variable(BACKENDS[name].variable) or "").strip()), None)


def why_no_search(settings: Settings) -> str | None:
    if backend_of(settings) is not None:
        return None
    chosen = settings.web.search_backend
    missing = [BACKENDS[name].variable for name in ([chosen] if chosen else BACKENDS)]
    return f"no search backend is configured: set {' or '.join(missing)}"


class WebSearch(ToolArguments):
    query: Annotated[str, Meta(min_length=1, max_length=limits.WEB_QUERY_CHARS_MAX)]
    limit: Annotated[int, Meta(ge=1, le=limits.WEB_RESULTS_MAX, description="5 if not given.")] = 5


async def _search(ctx: ToolContext, args: WebSearch) -> Answer:
    query, limit = args.query.strip(), args.limit
    if not query:
        raise ToolError("The query is empty.", "invalid_arguments", "Say in a few words what is looked for.")
    if ctx.secrets.mask(query) != query:
        raise ToolError("The query holds a secret.", "contains_secret", "Leave the secret out.")
    name = backend_of(ctx.settings)
    if name is None:
        hint = f"Tell the user: {why_no_search(ctx.settings)}."
        raise ToolError("There is no search backend.", "tool_unavailable", hint)
    backend = BACKENDS[name]
    request = backend.request((ctx.settings.variable(backend.variable) or "").strip(), query, limit)
    headers = {"Accept": "application/json", **request.headers}
    body = b""
    if request.body is not None:
        headers["Content-Type"] = "application/json"
        body = json.dumps(request.body).encode()
    try:
        fetched = await ctx.resources.urls.fetch(request.url, trusted=True, headers=headers, body=body)
    except FetchFailed as failed:
        hint = f"Tell the user to check {backend.variable}, or try again later."
        raise ToolError(f"{name} could not be asked: {failed}", "backend_failed", hint) from None
    results = await ctx.blocking(partial(_results, name, fetched))
    return {"results": results[:limit], "backend": name}


def _results(name: str, fetched: Fetched) -> list[Answer]:
    backend = BACKENDS[name]
    if fetched.status >= 400:
        hint = "Try again later." if fetched.status in (429, 500, 502, 503, 504) else ""
        hint = hint or f"Tell the user to check {backend.variable} and the search server."
        raise ToolError(f"{name} answered with the status {fetched.status}.", "backend_failed", hint)
    try:
        listing = json.loads(fetched.data)
        for step in backend.results:
            listing = listing.get(step) or {}
        entries = [entry for entry in listing if isinstance(entry, dict)]
    except (ValueError, AttributeError, TypeError, RecursionError):
        hint = "Tell the user to check the search server; it has to answer in JSON."
        raise ToolError(f"{name} answered with something that is no list of results.", "backend_failed", hint) from None
    results = [
        {
            "title": _snippet(entry.get("title")),
            "url": str(entry.get("url") or ""),
            "snippet": _snippet(entry.get(backend.snippet)),
            "published": str(entry.get(backend.published) or "")[:40] or None,
        }
        for entry in entries
    ]
    return [entry for entry in results if str(entry["url"]).startswith(("http://", "https://"))]


def _snippet(value: object) -> str:
    text = " ".join(html.unescape(_TAG.sub("", str(value or "")[: 4 * limits.WEB_SNIPPET_CHARS_MAX])).split())
    return text if len(text) <= limits.WEB_SNIPPET_CHARS_MAX else f"{text[: limits.WEB_SNIPPET_CHARS_MAX]}…"


SEARCH = ToolDef(
    name="web_search",
    toolset="web",
    description="Search the web. Answers with titles, addresses and snippets; read what matters with web_extract.",
    arguments=WebSearch,
    run=_search,
    effect="read",
    scope=lambda _: frozenset(),
    available=why_no_search,
    preview=lambda args: args.query,
    foreign=True,
)


# --- pages -----------------------------------------------------------------------------------------------------------


_LIMIT_TEXT = "Characters per page; 15000 if not given."
_CHAR_LIMIT = Meta(ge=limits.EXTRACTED_CHARS_MIN, le=limits.EXTRACTED_CHARS_MAX, description=_LIMIT_TEXT)


class WebExtract(ToolArguments):
    urls: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=limits.EXTRACTED_PAGES_MAX)]
    char_limit: Annotated[int, _CHAR_LIMIT] | None = None


async def _prepare(ctx: ToolContext, args: WebExtract) -> Prepared:
    await approvals.hosts(ctx, args.urls)
    return Prepared()


async def _extract(ctx: ToolContext, args: WebExtract) -> Answer:
    limit = args.char_limit or min(ctx.settings.web.extract_char_limit, limits.EXTRACTED_CHARS_MAX)
    return {"pages": await asyncio.gather(*(_page(ctx, url, limit) for url in args.urls))}


async def _page(ctx: ToolContext, url: str, limit: int) -> Answer:
    from hermes.tools import pages

    answer: Answer = {"url": url, "final_url": None, "status": None, "title": "", "content": ""}
    answer |= {"truncated": False, "spill": None, "error": None}
    try:
        fetched = await ctx.resources.urls.fetch(url)
        answer |= {"final_url": fetched.final_url, "status": fetched.status}
        if fetched.status >= 400:
            message = f"The server answered with the status {fetched.status}. {_NEXT['fetch_failed']}"
            answer |= {"error": message, "code": "fetch_failed"}
        answer |= await ctx.blocking(partial(_render_page, ctx, fetched, limit))
    except FetchFailed as failed:
        answer |= {"error": f"{failed} {_HINTS.get(failed.rule) or _NEXT[failed.code]}", "code": failed.code}
    except pages.Unreadable as failed:
        answer |= {"error": answer["error"] or str(failed), "code": failed.code}
    return answer


def _render_page(ctx: ToolContext, fetched: Fetched, limit: int) -> Answer:
    """A page for the answer; one that is too long is truncated, and written to a file as a whole."""
    from hermes.tools import pages

    page = pages.read(fetched.data, fetched.content_type, fetched.charset, fetched.final_url)
    text = ctx.redact(page.text)  # before truncation, which could hide half a secret
    answer: Answer = {"title": ctx.redact(page.title)[: limits.WEB_SNIPPET_CHARS_MAX], "content": text}
    if len(text) > limit:
        head = int(limit * _HEAD_SHARE)
        tail = limit - head
        cut = f"\n\n[… {len(text) - limit} characters are left out here …]\n\n"
        answer |= {"content": text[:head] + cut + text[-tail:], "truncated": True}
        answer["spill"] = _spill_page(ctx, fetched.final_url, text)
    if not page.complete:
        answer |= {"truncated": True, "note": "The document was too long or too tangled to be read to its end."}
    return answer


def _spill_page(ctx: ToolContext, url: str, text: str) -> str | None:
    name = hashlib.sha256(f"{ctx.call_id}\0{url}".encode("utf-8", "replace")).hexdigest()[:16]
    path = ctx.resources.spill / f"page-{name}.md"
    data = text.encode("utf-8", "replace")[: limits.PAGE_SPILLED_BYTES_MAX]
    try:
        write_spill(path, data.decode("utf-8", "ignore"))
    except OSError:
        return None
    return str(path)


EXTRACT = ToolDef(
    name="web_extract",
    toolset="web",
    description=(
        "Read pages of the web: HTML as Markdown, PDF and other text as text. Long pages keep their head and tail; "
        "`spill` is the file with all of it, for read_file and search_files."
    ),
    arguments=WebExtract,
    run=_extract,
    prepare=_prepare,
    effect="read",
    scope=lambda _: frozenset(),
    preview=lambda args: ", ".join(args.urls),
    foreign=True,
)
