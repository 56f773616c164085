"""The pages and the API's description: complete, valid in itself, true to the server, and with nothing foreign."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import pytest

import hermes
from hermes.server import documents, openapi, web_page
from hermes.server.routes import ROUTES
from support.model_server import Reply

from .clients import SECURITY, Json, check_headers, read_error, read_json, user
from .conftest import Api, Start


@pytest.fixture(autouse=True)
def no_built_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is at `/` without the page; `test_web_page.py` is about the page."""
    monkeypatch.setattr(web_page, "FOLDER", tmp_path / "web")


VOID = {"meta", "link", "br", "img", "input", "hr"}


def without_key(api: Api, path: str, **headers: str) -> Any:
    return aiohttp.request("GET", api.url + path, headers=headers)


async def document_of(api: Api) -> Json:
    async with without_key(api, "/openapi.json") as response:
        return await read_json(response)


class Page(HTMLParser):
    """A page read strictly: every element is closed in order; ids, links and what is loaded are kept."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.tags: set[str] = set()
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.add(tag)
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes), (tag, attributes)
        if attributes.get("id"):
            assert attributes["id"] not in self.ids, f"{attributes['id']} twice"
            self.ids.add(attributes["id"])
        if tag == "a":
            self.links.add(attributes["href"] or "")
        elif "href" in attributes or "src" in attributes:
            self.loaded.add(attributes.get("href") or attributes.get("src") or "")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def nodes(value: Any) -> Iterator[Json]:
    """Every object within a value."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from nodes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from nodes(inner)


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, ways in document["paths"].items():
        for way, operation in ways.items():
            yield way.upper(), path, operation


def at(document: Json, ref: str) -> Any:
    node: Any = document
    for part in ref.removeprefix("#/").split("/"):
        node = node[part]
    return node


# --- the description -------------------------------------------------------------------------------------------------


async def test_openapi_describes_every_route_once(api: Api) -> None:
    document = await document_of(api)
    assert document["openapi"] == "3.1.0" and document["info"]["version"] == hermes.__version__
    by_id = {operation["operationId"]: (way, path) for way, path, operation in operations(document)}
    assert by_id == {route.name: (route.method, route.path) for route in ROUTES}


async def test_openapi_references_resolve(api: Api) -> None:
    document = await document_of(api)
    refs = {node["$ref"] for node in nodes(document) if "$ref" in node}
    assert refs
    for ref in refs:
        assert at(document, ref)
    used = {ref.rpartition("/")[2] for ref in refs}
    assert set(document["components"]["schemas"]) <= used | {"Error"}


async def test_openapi_schemas_are_valid(api: Api) -> None:
    document = await document_of(api)
    for name in document["components"]["schemas"]:
        whole = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema_rs.Draft202012Validator(whole)


async def test_openapi_parameters_are_complete(api: Api) -> None:
    for _, path, operation in operations(await document_of(api)):
        parameters = [(parameter["in"], parameter["name"]) for parameter in operation["parameters"]]
        assert len(parameters) == len(set(parameters))
        assert [name for where, name in parameters if where == "path"] == re.findall(r"{(\w+)}", path)
        assert all(p["required"] for p in operation["parameters"] if p["in"] == "path")


async def test_openapi_lists_possible_answers(api: Api) -> None:
    document = await document_of(api)
    for _, _, operation in operations(document):
        route = next(route for route in ROUTES if route.name == operation["operationId"])
        statuses = {int(status) for status in operation["responses"]}
        assert {route.status, *route.faults, 400, 403, 408, 431, 500} <= statuses
        assert (route.scope is not None) is bool(operation["security"])
        assert (401 in statuses) is (route.scope is not None or 401 in route.faults)
        assert ({413, 415} <= statuses) is (route.body is not None) is ("requestBody" in operation)
        assert not statuses & {502, 504} - set(route.faults)
        streams = "text/event-stream" in operation["responses"][str(route.status)].get("content", {})
        assert streams is bool(route.stream)


async def test_openapi_bodies_match_validation(api: Api) -> None:
    schemas = (await document_of(api))["components"]["schemas"]
    chat = schemas["ChatRequest"]
    assert chat["required"] == ["messages"] and chat["properties"]["messages"]["minItems"] == 1
    assert chat["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert set(schemas["ChatMessage"]["properties"]["role"]["enum"]) >= {"user", "assistant", "tool"}
    by_name = {operation["operationId"]: operation for _, _, operation in operations(await document_of(api))}
    assert by_name["chat_completions"]["requestBody"]["required"] is True
    assert by_name["session_create"]["requestBody"]["required"] is False


async def test_openapi_document_is_cached(api: Api) -> None:
    assert openapi.document() is openapi.document()
    assert json.loads(openapi.encoded()) == await document_of(api)


async def test_answers_match_openapi(start: Start) -> None:
    api = await start(ollama=True)
    document = await document_of(api)
    answering = {route.name for route in ROUTES if route.answers is not None}
    for _, path, operation in operations(document):
        if "{" in path or operation["operationId"] not in answering or operation.get("requestBody"):
            continue
        if any(parameter.get("required") for parameter in operation["parameters"]):
            continue
        async with api.get(path, headers={"Accept": "application/json"}) as response:
            check(document, operation, response.status, await read_json(response))


async def test_errors_match_openapi(api: Api) -> None:
    document = await document_of(api)
    by_name = {operation["operationId"]: operation for _, _, operation in operations(document)}
    async with api.get("/v1/models/nobody") as response:
        check(document, by_name["model"], 404, await read_json(response, 404))
    async with api.post("/v1/chat/completions", {"messages": []}) as response:
        check(document, by_name["chat_completions"], 400, await read_json(response, 400))
    await api.app.engine.drain(0)
    async with api.get("/health/ready") as response:
        check(document, by_name["health_ready"], 503, await read_json(response, 503))


async def test_chat_completion_matches_openapi(start: Start) -> None:
    api = await start(Reply(text="Hello."))
    document = await document_of(api)
    async with api.post("/v1/chat/completions", user()) as response:
        operation = document["paths"]["/v1/chat/completions"]["post"]
        check(document, operation, 200, json.loads(await response.text()))
        assert set(response.headers) & set(operation["responses"]["200"]["headers"])


def check(document: Json, operation: Json, status: int, body: Json) -> None:
    response = operation["responses"][str(status)]
    response = at(document, response["$ref"]) if "$ref" in response else response
    schema = response["content"]["application/json"]["schema"]
    jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]}).validate(body)


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_load_nothing_external(api: Api, path: str) -> None:
    async with without_key(api, path) as response:
        assert response.status == 200 and response.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = response.headers["Content-Security-Policy"]
        assert policy == (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            "frame-ancestors 'none'"
        )
        check_headers({**response.headers, "Content-Security-Policy": SECURITY["Content-Security-Policy"]})
        page = Page(await response.text())
    assert page.loaded == {"data:,", "?asset=page.css"} and not page.tags & {"script", "style", "img", "iframe"}
    async with without_key(api, f"{path}?asset=page.css") as response:
        assert response.headers["Content-Type"] == "text/css; charset=utf-8"
        style = await response.text()
    assert "url(" not in style and "@import" not in style
    for link in page.links:
        assert link.startswith(("/", "#"))
        if link.startswith("/"):
            async with api.get(link) as response:
                assert response.status == 200, link


async def test_docs_page_describes_everything(api: Api) -> None:
    document = await document_of(api)
    async with without_key(api, "/docs") as response:
        page = Page(await response.text())
    assert {operation["operationId"] for _, _, operation in operations(document)} <= page.ids
    assert {f"schema-{name}" for name in document["components"]["schemas"]} <= page.ids
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids
    text = "".join(page.words)
    for phrase in ("/v1/chat/completions", "X-Hermes-Session-Key", "starting_after", "≤ 2", "xhigh", "sessions:read"):
        assert phrase in text


def test_docs_page_escapes_html(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "<script>alert('1')</script>\"'&"
    document = openapi.document()
    operation = {
        "operationId": evil,
        "summary": evil,
        "description": f"`{evil}`",
        "tags": [evil],
        "security": [],
        "parameters": [{"name": evil, "in": evil, "description": evil, "schema": {"enum": [evil], "default": evil}}],
        "requestBody": {"content": {"application/json": {"schema": {"$ref": f"#/{evil}"}, "example": {evil: evil}}}},
        "responses": {evil: {"description": evil, "content": {evil: {"schema": {"pattern": evil, "type": evil}}}}},
    }
    doubtful = {
        "info": {"title": evil, "version": evil, "description": evil},
        "tags": [{"name": evil}],
        "paths": {evil: {"get": operation}},
        "components": {"responses": {}, "schemas": {evil: {"description": evil, "properties": {evil: {}}}}},
    }
    monkeypatch.setattr(openapi, "document", lambda: {**document, **doubtful})
    page = Page(documents._docs_page.__wrapped__())
    assert "script" not in page.tags and "alert('1')" in "".join(page.words)


async def test_root_page_content_negotiation(api: Api) -> None:
    async with without_key(api, "/", Accept="application/json") as response:
        assert await read_json(response) == {"name": "hermes", "version": hermes.__version__, "docs": "/docs"}
    async with without_key(api, "/", Accept="text/html,application/xhtml+xml,application/json;q=0.9") as response:
        assert response.content_type == "text/html"


async def test_pages_can_be_disabled(start: Start) -> None:
    api = await start(ui=False, docs=False)
    for path in ("/", "/docs", "/openapi.json", "/docs?asset=page.css"):
        async with without_key(api, path) as response:
            await read_error(response, 404, "not_found", None)
    async with without_key(api, "/", Accept="application/json") as response:
        await read_error(response, 404, "not_found", None)


async def test_root_page_without_docs_links_none(start: Start) -> None:
    api = await start(docs=False)
    async with without_key(api, "/") as response:
        assert not {"/docs", "/openapi.json"} & Page(await response.text()).links


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json"])
async def test_head_of_page(api: Api, path: str) -> None:
    async with aiohttp.request("HEAD", api.url + path) as response:
        assert response.status == 200 and int(response.headers["Content-Length"]) > 100
        assert await response.read() == b""
