"""The API description as a document and as a page, and the start page. None of it needs scripts."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from aiohttp import web
from msgspec import Struct

import hermes
from hermes.core.json_types import JsonObject
from hermes.server import web_page
from hermes.server.errors import ApiError, answer
from hermes.server.routes import route

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'"
)
_STYLE = "page.css"
_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "minLength": "≥ {} characters",
    "maxLength": "≤ {} characters",
    "minItems": "≥ {} items",
    "maxItems": "≤ {} items",
    "maxProperties": "≤ {} pairs",
    "pattern": "matches {}",
}
_TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "null"}


class About(Struct, kw_only=True):
    name: str = "hermes"
    version: str = hermes.__version__
    docs: str = "/docs"


@route("GET /", "ui", "Web page", scope=None, answers=About, types=("text/html",), faults=(404,))
async def root(context: ServerContext, request: web.Request) -> web.StreamResponse:
    check_on(context, "ui", request)
    accepted = request.headers.get("Accept", "")
    if "application/json" in accepted and "text/html" not in accepted:
        return answer(About(), headers={"Vary": "Accept"})
    return await web_page.index(request) or await _page(request, _root_page, context.options.docs)


@route("GET /docs", "docs", "API reference (HTML)", scope=None, types=("text/html",), faults=(404,))
async def docs(context: ServerContext, request: web.Request) -> web.StreamResponse:
    check_on(context, "docs", request)
    return await _page(request, _docs_page)


@route("GET /openapi.json", "openapi", "OpenAPI description", scope=None, types=("application/json",), faults=(404,))
async def openapi(context: ServerContext, request: web.Request) -> web.StreamResponse:
    check_on(context, "docs", request)
    from hermes.server import openapi as described

    data = await asyncio.to_thread(described.encoded)
    return web.Response(body=data, content_type="application/json", charset="utf-8")


def check_on(context: ServerContext, option: str, request: web.Request) -> None:
    """Refuse with 404 what is switched off."""
    if not getattr(context.options, option):
        raise ApiError(404, f"There is nothing at {request.method} {request.path}.", "not_found")


async def _page(request: web.Request, render: Any, *arguments: Any) -> web.Response:
    """A page, or the style sheet at the same address."""
    style = request.query.get("asset") == _STYLE
    text = await (asyncio.to_thread(_file, _STYLE) if style else asyncio.to_thread(render, *arguments))
    kind = "text/css" if style else "text/html"
    return web.Response(
        text=text, content_type=kind, charset="utf-8", headers={"Content-Security-Policy": CSP, "Vary": "Accept"}
    )


@functools.cache
def _file(name: str) -> str:
    return files("hermes.server").joinpath("pages", name).read_text(encoding="utf-8")


def _whole_page(title: str, content: str) -> str:
    return Template(_file("page.html")).substitute(title=escape(title), style=f"?asset={_STYLE}", content=content)


# --- where the page is not built --------------------------------------------------------------------------------------------------


@functools.cache
def _root_page(with_docs: bool) -> str:
    links = {"/v1/models": "the models on offer", "/v1/capabilities": "what the server can do", "/health": "its health"}
    if with_docs:
        links = {"/docs": "how it is used", "/openapi.json": "the same for programs", **links}
    rows = "\n".join(f'<li><a href="{escape(to)}">{escape(to)}</a>: {escape(what)}</li>' for to, what in links.items())
    content = f"""<h1>Hermes</h1>
<p>A self-hosted AI agent that speaks OpenAI's protocols. This is its API server, version {escape(hermes.__version__)}.</p>
<p class="note">The page is not built: <code>make setup</code> builds it, and the API works without.</p>
<ul>
{rows}
</ul>
<p class="note">What is not about health needs the server's key, if it has one: <code>Authorization: Bearer …</code></p>"""
    return _whole_page("Hermes", content)


# --- the description, to be read -------------------------------------------------------------------------------------


@functools.cache
def _docs_page() -> str:
    """The description as a page, with an anchor for every operation and schema."""
    from hermes.server import openapi as described

    description = described.document()
    operations = [(way, where, op) for where, ops in description["paths"].items() for way, op in ops.items()]
    groups: dict[str, list[str]] = {tag["name"]: [] for tag in description["tags"]}
    for way, where, operation in operations:
        groups[operation["tags"][0]].append(_operation(way, where, operation, description["components"]["responses"]))
    info = description["info"]
    schemas = description["components"]["schemas"]
    content = [
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>",
        *(f"<p>{_prose(part)}</p>" for part in info["description"].split("\n\n")),
        '<p>For programs: <a href="/openapi.json">/openapi.json</a></p>',
        "<nav><ul>",
        *(
            f'<li><a href="#{escape(op["operationId"])}"><code>{escape(way.upper())} {escape(where)}</code></a></li>'
            for way, where, op in operations
        ),
        "</ul></nav>",
        *(f"<h2>{escape(name.capitalize())}</h2>{''.join(parts)}" for name, parts in groups.items()),
        f"<h2>Schemas</h2>{''.join(_schema(name, schemas[name]) for name in sorted(schemas))}",
    ]
    return _whole_page(f"{info['title']} API", "\n".join(content))


def _operation(way: str, where: str, operation: JsonObject, faults: JsonObject) -> str:
    head = f'<code class="method">{escape(way.upper())}</code> <code>{escape(where)}</code>'
    about = [operation["summary"] + ".", operation.get("description", "")]
    if not operation["security"]:
        about.append("Needs no key.")
    parameters = [
        (
            f"{p['name']}{' *' if p.get('required') else ''}",
            f"{escape(p['in'])}: {_type(p['schema'])}",
            p["description"],
        )
        for p in operation["parameters"]
    ]
    body = ""
    if request_body := operation.get("requestBody"):
        content = request_body["content"]["application/json"]
        body = f"<p>Body: {_type(content['schema'])}</p>"
        if "example" in content:
            body += f"<pre>{escape(json.dumps(content['example'], ensure_ascii=False))}</pre>"
    answers = []
    for status, response in operation["responses"].items():
        if "$ref" in response:
            response = faults[response["$ref"].rpartition("/")[2]]
        types = []
        for kind, what in response.get("content", {}).items():
            text = what["schema"].get("description")
            types.append(f"<code>{escape(kind)}</code>: {_prose(text) if text is not None else _type(what['schema'])}")
        answers.append((status, "; ".join(types), response["description"]))
    return (
        f'<section id="{escape(operation["operationId"])}"><h3>{head}</h3><p>{_prose(" ".join(about))}</p>'
        f"{_table(('parameter', 'where and what', ''), parameters)}{body}"
        f"{_table(('status', 'content', ''), answers)}</section>\n"
    )


def _schema(name: str, schema: JsonObject) -> str:
    needed = schema.get("required", ())
    rows = [
        (f"{field}{' *' if field in needed else ''}", _type(what), what.get("description", ""))
        for field, what in schema.get("properties", {}).items()
    ]
    return (
        f'<section id="schema-{escape(name)}"><h3><code>{escape(name)}</code></h3>'
        f"<p>{_prose(schema.get('description', ''))}</p>{_table(('field', 'what', ''), rows)}</section>\n"
    )


def _table(head: tuple[str, str, str], rows: list[tuple[str, str, str]]) -> str:
    """Rows of name, HTML and description."""
    if not rows:
        return ""
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{what}</td><td>{_prose(about)}</td></tr>\n"
        for name, what, about in rows
    )
    return f"<table><tr>{''.join(f'<th>{escape(word)}</th>' for word in head)}</tr>\n{cells}</table>"


def _type(schema: JsonObject) -> str:
    """A schema in a line of HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#schema-{name}"><code>{name}</code></a>'
    if "anyOf" in schema:
        text = " or ".join(_type(part) for part in schema["anyOf"])
    elif "enum" in schema:
        text = ", ".join(f"<code>{escape(str(word))}</code>" for word in schema["enum"])
    elif schema.get("type") == "array":
        text = f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    elif schema.get("type") == "object":
        values = schema.get("additionalProperties")
        text = f"object of {_type(values)}" if isinstance(values, dict) else "object"
    else:
        text = escape(_TYPES.get(schema.get("type", ""), "anything"))
    bounds = [escape(template.format(schema[name])) for name, template in _BOUNDS.items() if name in schema]
    if schema.get("default") is not None:
        bounds.append(f"else <code>{escape(str(schema['default']))}</code>")
    return f"{text} ({', '.join(bounds)})" if bounds else text


def _prose(text: str) -> str:
    """Text with backticks turned into code elements."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
