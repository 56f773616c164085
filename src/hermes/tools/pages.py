"""Web documents as text: HTML as Markdown, PDF page by page, other text unchanged. Blocks."""

from __future__ import annotations

import codecs
import io
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import urljoin

from hermes.core.limits import (
    MAIN_PART_CHARS_MIN,
    NESTED_LISTS_SHOWN_MAX,
    PAGE_CHARS_MAX,
    PAGE_READ_S_MAX,
    PLAIN_HTML_CHARS_MAX,
)

_DECLARED = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]+)", re.I)
# Encodings of pages; some others that Python knows are very slow on crafted bytes.
_CHARSETS = re.compile(r"(utf_?(8|16|32)|ascii|latin|iso|cp|mac|shift|euc|gb|big5|koi8|tis|hz|johab|ptcp).*")


class Unreadable(Exception):
    """A document without text; the message says what to do."""

    def __init__(self, message: str, code: str = "fetch_failed") -> None:
        super().__init__(message)
        self.code = code


class Page(NamedTuple):
    """A document. `complete` is False if time or space ran out."""

    title: str
    text: str
    complete: bool = True


def read(data: bytes, content_type: str, charset: str, url: str) -> Page:
    if content_type == "application/pdf":
        return _read_pdf(data)
    is_html = "html" in content_type
    text = _decode(data, charset, is_html).replace("\0", "")
    page = Page(*markdown(text, url)) if is_html else Page("", text)
    if not page.text.strip():
        raise Unreadable("The document holds no text; it may need a browser, or be empty. Try another source.")
    return page


def _decode(data: bytes, charset: str, is_html: bool) -> str:
    for mark, name in ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")):
        if data.startswith(mark):
            return data.decode(name, "replace").removeprefix("\ufeff")
    if not charset and is_html and (declared := _DECLARED.search(data[:4096])):
        charset = declared[1].decode("ascii", "replace")
    try:
        name = codecs.lookup(charset or "utf-8").name.replace("-", "_")
        return data.decode(name if _CHARSETS.fullmatch(name) else "utf-8", "replace")
    except LookupError:
        return data.decode("utf-8", "replace")


# --- PDF -------------------------------------------------------------------------------------------------------------


def _read_pdf(data: bytes) -> Page:
    try:
        pypdf = import_module("pypdf")
    except ImportError:
        message = "PDF files are read with the extra `web`: hermes install web"
        raise Unreadable(message, "tool_unavailable") from None
    until, texts, size = time.monotonic() + PAGE_READ_S_MAX, [""], 0
    complete = True
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        title = str((reader.metadata or {}).get("/Title") or "")
        for page in reader.pages:
            if time.monotonic() > until or size > PAGE_CHARS_MAX:
                complete = False
                break
            texts.append(page.extract_text().strip())
            size += len(texts[-1])
    except Exception as error:  # a broken file breaks the library in many ways
        raise Unreadable("The PDF is damaged or locked and cannot be read. Try another source.") from error
    if not size:
        raise Unreadable("The PDF holds no text, only images of it. Try another source.")
    return Page(" ".join(title.split()), "\n\n".join(filter(None, texts)), complete)


# --- HTML ------------------------------------------------------------------------------------------------------------

_CHUNK_CHARS = 16_384


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VOID = _names("area base br col embed hr img input link meta source track wbr")
_SKIPPED = _names(
    "audio button canvas dialog footer iframe nav noscript object script select style svg template textarea video"
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_BLOCKS = _HEADINGS.keys() | _names(
    "address article aside blockquote body caption center dd details div dl dt fieldset figcaption figure form header "
    "hgroup hr html legend li main ol p pre section summary table tr ul"
)
_MAIN = ("main", "article")
_SPACE, _SPACES, _LINE_END = re.compile(r"\s+"), re.compile(r" {2,}"), re.compile(r" *\n *")
# Elements without a required closing tag: hidden content of these has no recognisable end.
_LEFT_OPEN = _names("p li dt dd tr td th option")
_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.I)


class TimeUp(Exception):
    pass


def markdown(html: str, url: str) -> tuple[str, str, bool]:
    """The title and visible text of a page, of its main part if it has one; and whether all of it was read."""
    writer = _Writer(url, time.monotonic() + PAGE_READ_S_MAX)
    complete = True
    try:
        complete = _parse(html, writer)
    except (TimeUp, AssertionError):  # the latter is how the plain parser gives up on malformed declarations
        complete = False
    return " ".join("".join(writer.title).split()), writer.text(), complete


def _parse(html: str, writer: _Writer) -> bool:
    """Feed a page to the writer; False if it was too long for the available parser."""
    parser: Any
    text, complete = html, True
    try:
        parser = import_module("lxml.etree").HTMLParser(target=writer, remove_comments=True, remove_pis=True)
    except ImportError:
        # It is slow on crafted pages, more so the longer they are.
        parser, complete = _Plain(writer), len(text) <= PLAIN_HTML_CHARS_MAX
        text = text[:PLAIN_HTML_CHARS_MAX]
    for at in range(0, len(text), _CHUNK_CHARS):
        parser.feed(text[at : at + _CHUNK_CHARS])
    if text:
        parser.close()
    return complete


class _Plain(HTMLParser):
    def __init__(self, writer: _Writer) -> None:
        super().__init__()
        self._writer = writer

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._writer.start(tag, dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        self._writer.end(tag)

    def handle_data(self, data: str) -> None:
        self._writer.data(data)


class _Block(NamedTuple):
    """A paragraph: its kind (adjacent ones of a kind are joined closely), its text, and the main parts it is in."""

    kind: str
    text: str
    parts: frozenset[str]


class _Writer:
    """The target of both HTML parsers: writes Markdown."""

    def __init__(self, url: str, until: float) -> None:
        self.title: list[str] = []
        self._url, self._until = url, until
        self._blocks: list[_Block] = []
        self._inline: list[str] = []
        self._link: tuple[int, str] | None = None
        # The next number of each open list, or 0; the cells so far of the current table row.
        self._lists: list[int] = []
        self._cells = self._quotes = 0
        # Candidates for the main part: how many there were, and how many are open.
        self._main_parts, self._open_parts = Counter[str](), Counter[str]()
        self._mark = self._heading = ""
        self._in_pre = self._in_title = False
        self._skipped, self._depth = "", 0

    def text(self) -> str:
        self._end_pre()
        self._end_block(ends_row=True)
        for name in (name for name in _MAIN if self._main_parts[name] == 1):
            part = _join_blocks([block for block in self._blocks if name in block.parts])
            if len(part) >= MAIN_PART_CHARS_MIN:
                return part
        return _join_blocks(self._blocks)

    # ---- what the parser meets

    def start(self, tag: str, attrs: Mapping[str, str | None]) -> None:
        if time.monotonic() > self._until:
            raise TimeUp
        hidden = "hidden" in attrs or attrs.get("aria-hidden") == "true" or _HIDDEN.search(attrs.get("style") or "")
        if self._skipped:
            self._depth += tag == self._skipped
        elif tag in _SKIPPED or (hidden and tag not in _LEFT_OPEN):
            if tag not in _VOID:
                self._skipped, self._depth = tag, 1
        else:
            self._begin(tag, attrs)

    def end(self, tag: str) -> None:
        if self._skipped:
            self._depth -= tag == self._skipped
            self._skipped = self._skipped if self._depth else ""
        else:
            self._finish(tag)

    def data(self, text: str) -> None:
        if time.monotonic() > self._until:
            raise TimeUp
        if self._in_title and not self._skipped:
            self.title.append(text)
        elif not self._skipped:
            self._inline.append(text if self._in_pre else _SPACE.sub(" ", text))

    def close(self) -> None:
        pass

    def _begin(self, tag: str, attrs: Mapping[str, str | None]) -> None:
        self._in_title = tag == "title"
        if tag in _BLOCKS:
            self._end_block(ends_row=tag in ("table", "tr"))
        if tag in _MAIN:
            self._main_parts[tag] += not self._open_parts[tag]
            self._open_parts[tag] += 1
        if tag == "a":
            self._link = (len(self._inline), attrs.get("href") or "")
        elif tag == "img" and (label := " ".join((attrs.get("alt") or "").split())):
            address = _absolute_url(self._url, attrs.get("src") or "")
            self._inline.append(f"![{label}]({address})" if address else "")
        elif tag in ("br", "code"):
            self._inline.append("\n" if tag == "br" else "" if self._in_pre else "`")
        elif tag in ("ul", "ol"):
            self._lists.append(1 if tag == "ol" else 0)
        elif tag == "li":
            self._mark = self._next_mark()
        elif tag in ("td", "th"):
            self._inline.append(" | " if self._cells else "")
            self._cells += 1
        elif tag == "pre":
            self._in_pre = True
        elif tag == "blockquote":
            self._quotes += 1
        else:
            self._heading = _HEADINGS.get(tag, self._heading)

    def _finish(self, tag: str) -> None:
        self._in_title = self._in_title and tag != "title"
        if tag == "pre":
            self._end_pre()
        if tag in _BLOCKS:
            self._end_block(ends_row=tag in ("table", "tr"))
        if tag in _MAIN and self._open_parts[tag]:
            self._open_parts[tag] -= 1
        if tag == "a":
            self._end_link()
        elif tag == "code" and not self._in_pre:
            self._inline.append("`")
        elif tag in ("ul", "ol"):
            self._mark = ""
            del self._lists[-1:]
        elif tag == "blockquote":
            self._quotes = max(0, self._quotes - 1)
        elif tag in _HEADINGS:
            self._heading = ""

    # ---- what becomes of it

    def _end_link(self) -> None:
        (at, href), self._link = self._link or (len(self._inline), ""), None
        text, address = "".join(self._inline[at:]), _absolute_url(self._url, href)
        if address and text.strip() and not self._in_pre:
            link = f"[{' '.join(text.split())}]({address})"
            self._inline[at:] = [" " * text[:1].isspace(), link, " " * text[-1:].isspace()]

    def _next_mark(self) -> str:
        if not self._lists or not self._lists[-1]:
            return "- "
        self._lists[-1] += 1
        return f"{self._lists[-1] - 1}. "

    def _take(self) -> str:
        text = "".join(self._inline)
        self._inline.clear()
        self._link = (0, self._link[1]) if self._link else None
        return text

    def _end_block(self, *, ends_row: bool = False) -> None:
        kind = "row" if self._cells else ""
        if ends_row:
            self._cells = 0
        if self._in_pre:
            self._inline.append("" if not self._inline or self._inline[-1].endswith("\n") else "\n")
        elif self._cells:  # a cell stays on one line
            self._inline.append(" ")
        elif text := _LINE_END.sub("\n", _SPACES.sub(" ", self._take())).strip():
            self._put(self._heading + text, kind)
            self._heading = ""

    def _end_pre(self) -> None:
        was_in_pre, self._in_pre = self._in_pre, False
        if was_in_pre and not self._cells and (text := self._take().strip("\n")).strip():
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            self._put(f"{fence}\n{text}\n{fence}")

    def _put(self, text: str, kind: str = "") -> None:
        quotes, depth = "> " * min(self._quotes, NESTED_LISTS_SHOWN_MAX), min(len(self._lists), NESTED_LISTS_SHOWN_MAX)
        first = rest = "  " * depth
        if self._mark:
            first, kind, self._mark = "  " * (depth - 1) + self._mark, "item", ""
        lines = [quotes + (rest if n else first) + line for n, line in enumerate(text.split("\n"))]
        parts = frozenset(name for name in _MAIN if self._open_parts[name])
        self._blocks.append(_Block(kind, "\n".join(lines), parts))


def _absolute_url(base: str, href: str) -> str:
    if not href or href.startswith("#"):
        return ""
    try:
        address = urljoin(base, href.strip())
    except ValueError:
        return ""
    return address if address.startswith(("http://", "https://")) and not re.search(r"[\s()<>]", address) else ""


def _join_blocks(blocks: Sequence[_Block]) -> str:
    out: list[str] = []
    before = ""
    for block in blocks:
        out.append(("\n" if block.kind and block.kind == before else "\n\n") + block.text)
        before = block.kind
    return "".join(out).strip()
