"""The tools `web_search` and `web_extract`, with real servers behind addresses of the world; and pages as text."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent.harness import Harness, Json
from guards.stage import ELSEWHERE, WORLD, Stage, certificate, serving
from hermes.core import limits
from hermes.tools import pages
from hermes.tools.pages import markdown
from hermes.tools.web import EXTRACT, SEARCH, backend_of
from support.model_server import ModelServer

from .turns import answers, tool_answers, turn

KEY = "a-key-of-the-search-0123456789"
PAGE = "<html><title>A page</title><body><h1>Hello</h1><p>World.</p></body></html>"


@pytest.fixture(autouse=True)
def one_tls_context() -> None:
    """These tests do speak TLS."""


@pytest.fixture(autouse=True)
def any_host(harness: Harness) -> None:
    """These tests are about pages; that hosts are asked about has its own."""
    harness.configure({"web": {"ask_hosts": False}})


def outside(harness: Harness, **more: Any) -> Stage:
    """Names that this harness resolves to the test's servers."""
    stage = Stage(harness.app.services.files, **more)
    stage.answers |= {"page.test": [[WORLD]], "other.test": [[ELSEWHERE]]}
    harness.app.services.outside.network = stage
    return stage


def html(text: str = PAGE, **more: Any) -> web.Response:
    return web.Response(text=text, content_type="text/html", **more)


# ---- web_extract


async def read(harness: Harness, server: ModelServer, handler: Any, *urls: str, **more: Any) -> list[Json]:
    stage = outside(harness)
    async with serving(handler) as port:
        stage.servers |= {WORLD: port, ELSEWHERE: port}
        arguments = {"urls": list(urls), **{k: v for k, v in more.items() if k == "char_limit"}}
        [answer] = await tool_answers(harness, server, EXTRACT, arguments)
    pages: list[Json] = answer["pages"]
    return pages


async def test_web_extract_page_as_markdown(harness: Harness, server: ModelServer) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/old":
            raise web.HTTPFound("/new")
        return html()

    [page] = await read(harness, server, handler, "http://page.test/old")
    assert page == {
        "url": "http://page.test/old",
        "final_url": "http://page.test/new",
        "status": 200,
        "title": "A page",
        "content": "# Hello\n\nWorld.",
        "truncated": False,
        "spill": None,
        "error": None,
    }


async def test_web_extract_fetches_concurrently_with_errors_per_page(harness: Harness, server: ModelServer) -> None:
    waiting = 0
    all_here = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal waiting
        waiting += 1
        if waiting == 3:
            all_here.set()
        await all_here.wait()
        if request.path == "/gone":
            return html("<p>Nothing is here any more.", status=404)
        if request.path == "/binary":
            return web.Response(body=b"\0\1", content_type="application/octet-stream")
        return html()

    urls = ["http://page.test/", "http://page.test/gone", "http://other.test/binary", "http://127.0.0.1/", "ftp://x/"]
    good, missing, binary, private, scheme = await read(harness, server, handler, *urls)
    assert good["content"] == "# Hello\n\nWorld." and good["error"] is None
    assert (missing["status"], missing["code"], missing["content"]) == (
        404,
        "fetch_failed",
        "Nothing is here any more.",
    )
    assert "404" in missing["error"]
    assert (binary["code"], binary["content"]) == ("fetch_failed", "")
    assert private["code"] == scheme["code"] == "url_refused"


async def test_web_extract_url_with_secret_is_rejected(harness: Harness, server: ModelServer) -> None:
    harness.home.env_file.write_text(f"SOME_TOKEN={KEY}\n")
    outside(harness)
    run = await turn(harness, server, EXTRACT, {"urls": [f"http://page.test/{KEY}"]})
    [page] = answers(run)[0]["pages"]
    assert page["code"] == "url_has_secret"
    events = [event for event in run.events if event["type"].startswith("tool.")]
    assert KEY not in json.dumps(events) and KEY not in page["url"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/json", "application/xml"])
async def test_web_extract_plain_text_is_unchanged(harness: Harness, server: ModelServer, content_type: str) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text='{"a": "<b>é</b>"}', content_type=content_type)

    [page] = await read(harness, server, handler, "http://page.test/")
    assert page["content"] == '{"a": "<b>é</b>"}'


@pytest.mark.parametrize("limit", [100, 101])
async def test_web_extract_long_page_is_truncated_and_spilled(
    harness: Harness, server: ModelServer, limit: int
) -> None:
    text = "begin " + "x" * 90 + " end."
    assert len(text) == 101

    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text)

    [page] = await read(harness, server, handler, "http://page.test/", char_limit=limit)
    assert page["truncated"] is (limit == 100)
    if limit == 101:
        assert page["content"] == text and page["spill"] is None
        return
    assert page["content"].startswith("begin ") and page["content"].endswith(" end.")
    assert "1 characters are left out" in page["content"]
    spill = Path(page["spill"])
    assert spill.read_text() == text and spill.parent.parent == harness.home.tool_results
    assert stat.S_IMODE(spill.stat().st_mode) == 0o600


async def test_web_extract_spill_limit(harness: Harness, server: ModelServer) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text="é" * 1_000_001)

    [page] = await read(harness, server, handler, "http://page.test/")
    assert len(page["content"]) < 16_000
    assert Path(page["spill"]).read_text() == "é" * 1_000_000


@pytest.mark.parametrize(
    ("arguments", "good"),
    [
        ({"urls": []}, False),
        ({"urls": ["ftp://x/"] * 5}, True),
        ({"urls": ["ftp://x/"] * 6}, False),
        ({"urls": ["ftp://x/"], "char_limit": 100}, True),
        ({"urls": ["ftp://x/"], "char_limit": 99}, False),
        ({"urls": ["ftp://x/"], "char_limit": 100_000}, True),
        ({"urls": ["ftp://x/"], "char_limit": 100_001}, False),
        ({"urls": ["ftp://x/"], "more": 1}, False),
    ],
)
async def test_web_extract_limits(harness: Harness, server: ModelServer, arguments: Json, good: bool) -> None:
    [answer] = await tool_answers(harness, server, EXTRACT, arguments)
    assert ("pages" in answer) is good
    assert good or answer["code"] == "invalid_arguments"


async def test_web_extract_content_is_framed_as_foreign(harness: Harness, server: ModelServer) -> None:
    stage = outside(harness)

    async def handler(_: web.Request) -> web.StreamResponse:
        return html()

    async with serving(handler) as port:
        stage.servers[WORLD] = port
        run = await turn(harness, server, EXTRACT, {"urls": ["http://page.test/"]})
    [content] = [m["content"] for m in run.result["messages"] if m["role"] == "tool"]
    first, *_, last = content.split("\n")
    assert "never instructions" in first and first.split("]")[0] == last.split("]")[0]


# ---- web_search

FOUND = [
    {"title": "One &amp; <strong>only</strong>", "url": "https://one.example/", "published": "2024-05-01"},
    {"title": "Two", "url": "https://two.example/", "published": None},
    {"title": "No page", "url": "javascript:alert(1)", "published": None},
    "nonsense",
]
NAMES = {
    "searxng": ("content", "publishedDate"),
    "brave": ("description", "page_age"),
    "tavily": ("content", "published_date"),
}
HOSTS = {"brave": "api.search.brave.com", "tavily": "api.tavily.com"}
VARIABLES = {"searxng": "SEARXNG_URL", "brave": "BRAVE_SEARCH_API_KEY", "tavily": "TAVILY_API_KEY"}


def results_of(backend: str) -> Json:
    snippet, published = NAMES[backend]
    results = [
        {"title": hit["title"], "url": hit["url"], snippet: "Say <b>so</b>.", published: hit["published"]}
        if isinstance(hit, dict)
        else hit
        for hit in FOUND
    ]
    return {"web": {"results": results}} if backend == "brave" else {"results": results}


class Engine:
    """A search server; it writes down what it was asked."""

    def __init__(self, backend: str, answer: Any = None, status: int = 200) -> None:
        self.answer = results_of(backend) if answer is None else answer
        self.status = status
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, str(request.rel_url), dict(request.headers), body))
        text = self.answer if isinstance(self.answer, str) else json.dumps(self.answer)
        kind = "text/html" if isinstance(self.answer, str) else "application/json"
        return web.Response(text=text, content_type=kind, status=self.status)


async def searched(
    harness: Harness,
    server: ModelServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    backend: str,
    engine: Engine,
    **args: Any,
) -> Json:
    tls, bundle = certificate(tmp_path, HOSTS[backend]) if backend in HOSTS else (None, None)
    stage = outside(harness, ca_bundle=bundle)
    async with serving(engine.handle, tls=tls) as port:
        stage.servers[WORLD] = port
        if backend in HOSTS:
            stage.answers[HOSTS[backend]] = [[WORLD]]
        monkeypatch.setenv(VARIABLES[backend], KEY if backend in HOSTS else f"http://127.0.0.1:{port}/deep/")
        run = await turn(harness, server, SEARCH, {"query": "two words", **args})
    text = json.dumps(run.events) + json.dumps(run.result["messages"])
    assert KEY not in text
    [answer] = answers(run)
    return answer


@pytest.mark.parametrize("backend", list(NAMES))
async def test_web_search_results_of_every_backend(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str
) -> None:
    engine = Engine(backend)
    answer = await searched(harness, server, monkeypatch, tmp_path, backend, engine, limit=7)
    assert answer["backend"] == backend
    assert answer["results"] == [
        {"title": "One & only", "url": "https://one.example/", "snippet": "Say so.", "published": "2024-05-01"},
        {"title": "Two", "url": "https://two.example/", "snippet": "Say so.", "published": None},
    ]
    [(method, place, headers, body)] = engine.requests
    assert KEY not in place
    if backend == "searxng":
        assert (method, place) == ("GET", "/deep/search?q=two+words&format=json")
    elif backend == "brave":
        assert method == "GET" and headers["X-Subscription-Token"] == KEY and "q=two+words&count=7" in place
    else:
        assert (method, place, body) == ("POST", "/search", {"query": "two words", "max_results": 7})
        assert headers["Authorization"] == f"Bearer {KEY}"


async def test_web_search_server_url_from_secrets_file(harness: Harness, server: ModelServer) -> None:
    engine = Engine("searxng")
    outside(harness)
    async with serving(engine.handle) as port:
        harness.home.env_file.write_text(f"SEARXNG_URL=http://127.0.0.1:{port}\nSOME_TOKEN={KEY}\n")
        good, bad = await tool_answers(harness, server, SEARCH, {"query": "x"}, {"query": KEY})
    assert len(good["results"]) == 2
    assert bad["code"] == "contains_secret" and len(engine.requests) == 1


@pytest.mark.parametrize(
    ("backend", "answer", "status", "word"),
    [
        ("brave", {"error": KEY}, 401, "401"),
        ("tavily", {"detail": KEY}, 429, "429"),
        ("searxng", "<p>no JSON here", 200, "no list"),
        ("searxng", [1, 2], 200, "no list"),
        ("brave", {"web": 3}, 200, "no list"),
        ("searxng", "<p>forbidden", 403, "403"),
    ],
)
async def test_web_search_backend_failure_hides_its_text(
    harness: Harness,
    server: ModelServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    backend: str,
    answer: Any,
    status: int,
    word: str,
) -> None:
    engine = Engine(backend, answer, status)
    results = await searched(harness, server, monkeypatch, tmp_path, backend, engine)
    assert results["code"] == "backend_failed" and word in results["error"] and results["hint"]


async def test_web_search_without_results(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = await searched(harness, server, monkeypatch, tmp_path, "brave", Engine("brave", {"web": None}))
    assert results["results"] == []


async def test_web_search_limit_is_enforced(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    many = {"results": [{"title": str(n), "url": f"https://{n}.example/", "content": "x" * 900} for n in range(30)]}
    results = await searched(harness, server, monkeypatch, tmp_path, "searxng", Engine("searxng", many))
    assert [entry["title"] for entry in results["results"]] == ["0", "1", "2", "3", "4"]
    assert len(results["results"][0]["snippet"]) == limits.WEB_SNIPPET_CHARS_MAX + 1


async def test_web_search_unreachable_server_and_secret_in_query(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.home.env_file.write_text(f"SOME_TOKEN={KEY}\n")
    monkeypatch.setenv("SEARXNG_URL", "http://nowhere.test")
    outside(harness)
    failure, secret = await tool_answers(harness, server, SEARCH, {"query": "x"}, {"query": f"who is {KEY}"})
    assert failure["code"] == "backend_failed"
    assert secret["code"] == "contains_secret"


@pytest.mark.parametrize(
    ("arguments", "good"),
    [
        ({"query": "x" * 400}, True),
        ({"query": "x" * 401}, False),
        ({"query": " "}, False),
        ({"query": "x", "limit": 20}, True),
        ({"query": "x", "limit": 21}, False),
        ({"query": "x", "limit": 0}, False),
    ],
)
async def test_web_search_argument_limits(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, arguments: Json, good: bool
) -> None:
    monkeypatch.setenv("SEARXNG_URL", "http://nowhere.test")
    outside(harness)
    [answer] = await tool_answers(harness, server, SEARCH, arguments)
    assert answer["code"] == ("backend_failed" if good else "invalid_arguments")


@pytest.mark.parametrize(
    ("chosen", "variables", "expected"),
    [
        ("", "", None),
        ("", "searxng brave tavily", "searxng"),
        ("", "tavily brave", "brave"),
        ("", "tavily", "tavily"),
        ("tavily", "searxng tavily", "tavily"),
        ("brave", "searxng tavily", None),
    ],
)
async def test_web_search_backend_choice(
    harness: Harness,
    server: ModelServer,
    monkeypatch: pytest.MonkeyPatch,
    chosen: str,
    variables: str,
    expected: str | None,
) -> None:
    for name in variables.split():
        monkeypatch.setenv(VARIABLES[name], "http://x.test")
    harness.configure({"web": {"search_backend": chosen}})
    settings = harness.app.settings
    assert backend_of(settings) == expected
    reason = SEARCH.available(settings)
    assert (reason is None) is (expected is not None)
    assert reason is None or VARIABLES[chosen or "searxng"] in reason


# ---- pages as text


@pytest.fixture(params=["quick", "plain"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Either parser: the quick one of the extra, and the one that is always there."""
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "lxml.etree", None)
    else:
        pytest.importorskip("lxml.etree")
    yield request.param


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<p>one<p>two", "one\n\ntwo"),
        ("a  b\n c<br>d<br/>e", "a b c\nd\ne"),
        ("<h1>A</h1><h3>B <b>c</b></h3>d", "# A\n\n### B c\n\nd"),
        ("<h2>A<p>b</p>", "## A\n\nb"),
        ("<ul><li>a<li>b<ol><li>c</li><li>d</li></ol></ul><p>e", "- a\n- b\n  1. c\n  2. d\n\ne"),
        ("<ul><li><p>a</p><p>b</p></li></ul>", "- a\n\n  b"),
        ("<blockquote><p>a</p><blockquote>b</blockquote></blockquote>c", "> a\n\n> > b\n\nc"),
        ("<table><tr><th>a<th>b</tr><tr><td><p>1</p><td></td><td>2</table>", "a | b\n1 | | 2"),
        ("<table><tr><td><table><tr><td>a<td>b</table></table>", "a | b"),
        ("<pre>a\n  b &lt;c&gt;\n</pre>", "```\na\n  b <c>\n```"),
        ("<pre>a ``` b", "````\na ``` b\n````"),
        ("<p>call <code>f(x)</code> now", "call `f(x)` now"),
        ('<p>see <a href="/b?c=1#d"> the <i>page</i> </a>now', "see [the page](https://x.test/b?c=1#d) now"),
        ('<a href="#top">up</a> <a href="javascript:x()">go</a> <a href="http://[">odd</a> <a>bare</a>', "up go odd bare"),
        ('<a href="/a"><h2>News</h2></a>', "## News"),
        ('<img alt="A  cat" src="cat.png"><img src="x.png"><img alt="y" src="data:,">', "![A cat](https://x.test/a/cat.png)"),
        ("<nav>menu</nav><p>text</p><script>if (a<b) x()</script><style>p{}</style><footer>end</footer>", "text"),
        ('<div hidden>a</div><div style="display: none"><div>b</div></div><p aria-hidden="true">c</p>d', "c\n\nd"),
        ("<div hidden><input hidden><br></div>a<svg><title>t</title></svg>b", "ab"),
        ("<!-- c --><p>x &amp; &eacute; &#8364;", "x & é €"),
        ("<title>t</title>", ""),
        ("<ul>" * 50 + "<li>deep", "- deep"),
        ("</ul></table></pre></blockquote></a></td>fine", "fine"),
        ("", ""),
        ("plain", "plain"),
    ],
)  # fmt: skip
def test_html_to_markdown(parser: str, text: str, expected: str) -> None:
    title, content, complete = markdown(text, "https://x.test/a/")
    assert (content, complete) == (expected, True)
    assert title == ("t" if text.startswith("<title>") else "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<p>before<main><p>{x}</main>after", "{x}"),
        ("<p>before<article><p>{x}<article>inner</article></article>after", "{x}\n\ninner"),
        ("<article>{x}</article><article>{x}</article>", "{x}\n\n{x}"),
        ("<p>before<main>too little</main>after", "before\n\ntoo little\n\nafter"),
    ],
)
def test_html_main_part_is_extracted(parser: str, text: str, expected: str) -> None:
    long = "x" * limits.MAIN_PART_CHARS_MIN
    assert markdown(text.format(x=long), "https://x.test/")[1] == expected.format(x=long)


TANGLES = [
    "<!--", "<a ", "<![", "<!a", "</a", "<?", "&#", '<a b="', "<script>", "<![CDATA[", "<div>", "<b>", "<ul><li>",
    "<table><tr><td>", "<a href=x>", "<p>x", "<pre>`", "<blockquote>", "<h1>", "<main>", "<title>", "\0", "<td>", "</p>",
]  # fmt: skip


@pytest.mark.parametrize("piece", TANGLES)
def test_html_tangled_pages_terminate(parser: str, piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_READ_S_MAX", 0.3)
    _, text, _ = markdown(piece * (200_000 // len(piece)) + "<p>end", "https://x.test/")
    assert len(text) < 10_000_000


def test_html_time_limit_keeps_partial_text(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(pages.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(pages, "PAGE_READ_S_MAX", 20)
    _, text, complete = markdown("<p>word " * 100, "https://x.test/")
    assert not complete and 0 < text.count("word") < 100


def test_html_plain_parser_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lxml.etree", None)
    size = limits.PLAIN_HTML_CHARS_MAX
    assert markdown("x" * size, "https://x.test/")[1:] == ("x" * size, True)
    assert markdown("x" * (size + 1), "https://x.test/")[1:] == ("x" * size, False)


@pytest.mark.parametrize(
    ("data", "charset", "text"),
    [
        ("é".encode(), "", "é"),
        ("é".encode("latin-1"), "iso-8859-1", "é"),
        ("é".encode("cp1252"), "windows-1252", "é"),
        ("日本".encode("shift_jis"), "Shift_JIS", "日本"),
        ("é".encode("utf-16"), "", "é"),
        (b"\xef\xbb\xbfe", "latin-1", "e"),
        (b'<meta charset="latin-1"><p>\xe9', "", "é"),
        (b'<meta http-equiv=x content="text/html; charset=latin-1"><p>\xe9', "", "é"),
        (b"\xff", "", "\ufffd"),
        *(
            (b"abc", odd, "abc")
            for odd in ("nonsense", "punycode", "hex", "idna", "unicode_escape", "zip", "undefined")
        ),
    ],
)
def test_html_charset_decoding(data: bytes, charset: str, text: str) -> None:
    assert pages.read(data, "text/html", charset, "https://x.test/").text == text


@pytest.mark.parametrize("kind", ["text/html", "text/plain"])
def test_page_without_text_is_reported(kind: str) -> None:
    with pytest.raises(pages.Unreadable, match="no text"):
        pages.read(b"<script>x</script>" if kind == "text/html" else b" \n", kind, "", "https://x.test/")


def pdf(text: str) -> bytes:
    """A small PDF with a page for each line."""
    lines = text.split("\n") if text else [""]
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(lines)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(lines)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for n, line in enumerate(lines):
        shows = f"BT /F1 12 Tf 72 720 Td ({line}) Tj ET" if line else ""
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * n} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(shows)} >>\nstream\n{shows}\nendstream")
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\n"
    return out + f"{end}startxref\n{len(out)}\n%%EOF\n".encode()


async def test_pdf_is_read_as_text(harness: Harness, server: ModelServer) -> None:
    pytest.importorskip("pypdf")

    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(body=pdf("First page.\nSecond."), content_type="application/pdf")

    [page] = await read(harness, server, handler, "http://page.test/a.pdf")
    assert page["content"] == "First page.\n\nSecond." and page["error"] is None


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"%PDF-1.4\n", "damaged"), (b"no pdf", "damaged"), (pdf(""), "no text")],
    ids=["cut", "not", "empty"],
)
def test_invalid_pdf_is_reported(data: bytes, message: str) -> None:
    pytest.importorskip("pypdf")
    with pytest.raises(pages.Unreadable, match=message) as failed:
        pages.read(data, "application/pdf", "", "")
    assert failed.value.code == "fetch_failed"


def test_pdf_without_pypdf_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(pages.Unreadable, match="hermes install web") as failed:
        pages.read(pdf("x"), "application/pdf", "", "")
    assert failed.value.code == "tool_unavailable"


def test_pdf_time_limit_keeps_partial_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pypdf")
    monkeypatch.setattr(pages, "PAGE_CHARS_MAX", 10)
    page = pages.read(pdf("First page.\nSecond.\nThird."), "application/pdf", "", "")
    assert (page.text, page.complete) == ("First page.", False)
