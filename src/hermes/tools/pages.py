"""Documents of the web as text: HTML as Markdown, PDF page by page, the rest as it is. It blocks, though not for long."""

from __future__ import annotations

import codecs
import io
import re
import time
from importlib import import_module
from typing import NamedTuple

from hermes.core.limits import PAGE_CHARS_MAX, PAGE_READ_S_MAX
from hermes.tools.html_to_markdown import markdown

_DECLARED = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]+)", re.I)
# Encodings of pages; some others that Python knows take very long on purpose-made bytes.
_CHARSETS = re.compile(r"(utf_?(8|16|32)|ascii|latin|iso|cp|mac|shift|euc|gb|big5|koi8|tis|hz|johab|ptcp).*")


class Unreadable(Exception):
    """A document that gives no text; the sentence says what to do."""

    def __init__(self, message: str, code: str = "fetch_failed") -> None:
        super().__init__(message)
        self.code = code


class Page(NamedTuple):
    """A document; not `complete` where there was no time or room for all of it."""

    title: str
    text: str
    complete: bool = True


def read(data: bytes, content_type: str, charset: str, url: str) -> Page:
    """The text of a document that was fetched from a URL. Raises Unreadable."""
    if content_type == "application/pdf":
        return _pdf(data)
    is_html = "html" in content_type
    text = _decoded(data, charset, is_html).replace("\0", "")
    page = Page(*markdown(text, url)) if is_html else Page("", text)
    if not page.text.strip():
        raise Unreadable("The document holds no text; it may need a browser, or be empty. Try another source.")
    return page


def _decoded(data: bytes, charset: str, is_html: bool) -> str:
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


def _pdf(data: bytes) -> Page:
    try:
        pypdf = import_module("pypdf")
    except ImportError:
        raise Unreadable(
            "PDF files are read with the extra `web`: pip install 'hermes[web]'.", "tool_unavailable"
        ) from None
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
