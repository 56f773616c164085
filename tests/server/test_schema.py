"""The server against its own description: whatever the description allows to send, the answer is one it describes."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.model_server import Reply
from support.waiting import DEADLINE_S

from .clients import Json, check_envelope, check_headers, read_json
from .conftest import Api, Start

# The statuses of the server's own fault that a request may bring about by itself, and their codes.
DOCUMENTED = {
    502: {"structured_output_failed", "agent_incomplete", "provider_rejected_request", "provider_unavailable"},
    503: {"jobs_unavailable", "not_ready"},
}
# A page is no JSON, and the socket is tried elsewhere.
LEFT_OUT = {("GET", "/v1/responses"), ("GET", "/"), ("GET", "/docs")}


async def described(api: Api) -> Json:
    async with api.get("/openapi.json") as response:
        document: Json = json.loads(await response.text())
    assert document["openapi"].startswith("3.1")
    return document


async def things(api: Api) -> dict[str, str]:
    """One of each kind of object, so that not every id is unknown."""
    await read_json(await api.post("/api/sessions", {"id": "s1"}), 201)
    async with api.post("/v1/responses", {"input": "x"}) as response:
        body = await read_json(response)
        run_id = response.headers["X-Hermes-Run-Id"]
    async with api.post("/v1/conversations", {}) as response:
        talk = await read_json(response)
    known = {"session_id": "s1", "response_id": body["id"], "run_id": run_id, "model_id": "hermes-agent"}
    return {**known, "conversation_id": talk["id"], "message_id": run_id.replace("run_", "msg_")}


def hammer(document: Json, url: str, headers: dict[str, str], known: dict[str, str], requests: int) -> int:
    """Send so many generated requests, spread over all operations; returns how many there were."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(document)
    checks = schemathesis.checks
    agreed = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
    operations = [operation.ok() for operation in schema.get_all_operations()]
    operations = [op for op in operations if (op.method.upper(), op.path) not in LEFT_OUT]
    # What is deleted is gone for all that come after.
    operations.sort(key=lambda op: op.method.upper() == "DELETE")
    each = -(-requests // len(operations))
    counter = itertools.count()

    def send_one(operation: Any) -> None:
        @settings(max_examples=each, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
                  database=None, derandomize=True)  # fmt: skip
        @given(case=any_case(operation), real=st.booleans())
        def send(case: Any, real: bool) -> None:
            if real:
                case.path_parameters.update({name: known[name] for name in case.path_parameters if name in known})
            answer = case.call(base_url=url, headers={**(case.headers or {}), **headers}, timeout=DEADLINE_S)
            next(counter)
            check_headers({name: values[0] for name, values in answer.headers.items()}, request_id_of(case))
            if answer.status_code >= 400:
                body = answer.json()
                # What is wrong with a message of MCP is told as JSON-RPC has it.
                error = body["error"] if "jsonrpc" in body else check_envelope(answer.status_code, body)
                allowed = answer.status_code < 500 or error["code"] in DOCUMENTED.get(answer.status_code, ())
                assert allowed, f"{case.as_curl_command()}\n{answer.status_code}: {error}"
            case.validate_response(answer, checks=agreed)

        send()

    for operation in operations:
        send_one(operation)
    return next(counter)


def any_case(operation: Any) -> Any:
    """Requests that the description allows, and some that it does not, where there is anything to get wrong."""
    from schemathesis import GenerationMode

    allowed = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    takes = operation.body or operation.query or operation.headers
    return allowed | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE) if takes else allowed


def request_id_of(case: Any) -> str | None:
    """The id that the answer must bear, if the request has one that is taken."""
    sent = {name.lower(): value for name, value in (case.headers or {}).items()}.get("x-request-id")
    return sent if sent is not None and sent.isascii() and 0 < len(sent) <= 128 and _plain(sent) else None


def _plain(text: str) -> bool:
    return all(letter.isalnum() or letter in "._-" for letter in text)


async def tried(start: Start, requests: int) -> None:
    pytest.importorskip("schemathesis")
    api = await start(
        handler=lambda _: Reply(text="Fine."),
        session_wait_seconds=1,
        run_queue_seconds=1,
        max_body_bytes=200_000,
        ollama=True,
    )
    document, known = await described(api), await things(api)
    headers = {"Authorization": api.client.headers["Authorization"]}
    result = await asyncio.to_thread(hammer, document, api.url, headers, known, requests)
    assert result >= requests
    async with api.get("/health") as response:
        assert (await read_json(response))["status"] == "ok"


@pytest.mark.filterwarnings("ignore")
async def test_sample_requests_match_openapi_property(start: Start) -> None:
    await tried(start, 100)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
async def test_many_requests_match_openapi_property(start: Start) -> None:
    await tried(start, 5000)


async def test_openapi_lists_every_route_of_capabilities(api: Api) -> None:
    document = await described(api)
    async with api.get("/v1/capabilities") as response:
        endpoints = (await read_json(response))["endpoints"]
    listed = {(entry["method"], entry["path"]) for entry in endpoints.values()}
    pairs = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert listed == pairs
