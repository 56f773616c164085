"""`/metrics`: what is counted, under which names and labels, and who may see it."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

import hermes
from hermes.runs.traces import Traces
from hermes.server import metrics
from support.model_server import Call, Reply, Request
from support.waiting import until

from .clients import HeldModel, RawConnection, check_headers, read_error, read_json, user
from .conftest import KEY, Api, Start

CHAT = "/v1/chat/completions"
FAMILIES = {
    "hermes_build_info": ("gauge", {"version"}),
    "hermes_http_requests_total": ("counter", {"route", "method", "status"}),
    "hermes_http_request_seconds": ("histogram", set()),
    "hermes_turns_total": ("counter", {"kind", "outcome"}),
    "hermes_turns_active": ("gauge", {"kind"}),
    "hermes_turn_seconds": ("histogram", set()),
    "hermes_first_delta_seconds": ("histogram", set()),
    "hermes_tokens_total": ("counter", {"direction"}),
    "hermes_tool_calls_total": ("counter", {"tool", "outcome"}),
    "hermes_provider_errors_total": ("counter", {"code"}),
    "hermes_refused_total": ("counter", {"code"}),
    "hermes_session_wait_seconds": ("histogram", set()),
    "hermes_sse_streams_active": ("gauge", set()),
    "hermes_disconnects_total": ("counter", {"action"}),
    "hermes_store_rows": ("gauge", {"store"}),
    "hermes_process_resident_bytes": ("gauge", set()),
}
TODO = Call("todo", {"todos": [{"id": "1", "content": "x", "status": "pending"}]})


async def text_of(api: Api) -> str:
    async with api.get("/metrics") as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        check_headers(response.headers)
        return await response.text()


class Samples(dict[tuple[str, ...], float]):
    """Every sample: its name and the values of its labels, in the order of the labels' names."""

    def __missing__(self, key: tuple[str, ...]) -> float:
        return 0.0


async def read_samples(api: Api) -> Samples:
    families = text_string_to_metric_families(await text_of(api))
    samples = [sample for family in families for sample in family.samples]
    return Samples(
        {(s.name.removeprefix("hermes_"), *(v for _, v in sorted(s.labels.items()))): s.value for s in samples}
    )


async def test_metric_names_types_and_labels(start: Start) -> None:
    api = await start(Reply(status=500), Reply(tool_calls=[TODO]), Reply(text="Done."))
    async with api.post(CHAT, user()) as response:
        await read_error(response, 502, "provider_unavailable")
    await api.ask("hi")
    async with api.post(CHAT, {}) as response:
        await read_error(response, 400, "missing_required_parameter")
    text = await text_of(api)
    lines = [line.split() for line in text.splitlines()]
    assert {line[2]: line[3] for line in lines if line[1] == "TYPE"} == {n: kind for n, (kind, _) in FAMILIES.items()}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == FAMILIES[name][1], sample
    assert f'hermes_build_info{{version="{hermes.__version__}"}} 1.0' in text


async def test_metrics_count_turn(start: Start) -> None:
    usage = {"input": 10, "output": 5}
    calls = [TODO, Call("made_up_by_the_model"), Call("mcp_files_read")]
    api = await start(Reply(tool_calls=calls, usage=usage), Reply(text="Done.", usage=usage))
    await api.ask("hi")
    counted = await read_samples(api)
    assert counted["turns_total", "chat", "completed"] == 1
    assert counted["http_requests_total", "POST", CHAT, "200"] == 1
    assert (counted["tokens_total", "input"], counted["tokens_total", "output"]) == (20, 10)
    assert {key[1:]: n for key, n in counted.items() if key[0] == "tool_calls_total"} == {
        ("ok", "todo"): 1,
        ("error", "other"): 1,
        ("error", "mcp"): 1,
    }
    for name in ("turn_seconds", "first_delta_seconds", "session_wait_seconds", "http_request_seconds"):
        buckets = [value for key, value in counted.items() if key[0] == f"{name}_bucket"]
        assert counted[f"{name}_count",] == 1 == buckets[-1] and buckets == sorted(buckets)
        assert 0 < counted[f"{name}_sum",] < 60
    assert counted["turn_seconds_sum",] > counted["first_delta_seconds_sum",]
    assert counted["turns_active", "chat"] == 0
    assert (counted["store_rows", "sessions"], counted["store_rows", "messages"]) == (1, 6)
    assert counted["process_resident_bytes",] > 1_000_000


async def test_metrics_cache_store_rows(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    api = await start(Reply(text="One."))
    assert (await read_samples(api))["store_rows", "runs"] == 0
    await api.ask("hi")
    assert (await read_samples(api))["store_rows", "runs"] == 0
    monkeypatch.setattr(metrics, "ROWS_COUNTED_S", 0.0)
    assert (await read_samples(api))["store_rows", "runs"] == 1


async def test_metrics_show_active_work(start: Start) -> None:
    async with HeldModel(Reply(text="One two three.")) as model:
        api = await start(settings=model.settings)
        async with api.post(CHAT, user(stream=True)) as response:
            await model.wait_for_request()
            counted = await read_samples(api)
            assert counted["sse_streams_active",] == counted["turns_active", "chat"] == 1
            model.release_all()
            await response.read()
        await until(
            lambda: read_samples(api), lambda now: not now["sse_streams_active",] and not now["turns_active", "chat"]
        )


async def test_metrics_count_provider_failures(start: Start) -> None:
    failing = [Reply(status=429), Reply(text="Fine."), Reply(status=401), Reply(text="Half", finish="content_filter")]
    api = await start(*failing, settings={"agent": {"api_max_retries": 1}})
    for status in (200, 502, 200):
        async with api.post(CHAT, user()) as response:
            assert response.status == status, await response.text()
    counted = await read_samples(api)
    assert {key[1]: n for key, n in counted.items() if key[0] == "provider_errors_total"} == {
        "provider_rate_limited": 1,
        "provider_auth_failed": 1,
    }
    assert (counted["turns_total", "chat", "completed"], counted["turns_total", "chat", "failed"]) == (1, 2)
    assert not any(key[0] == "refused_total" for key in counted)


async def test_metrics_count_rejected_turns(start: Start) -> None:
    async with HeldModel(Reply(text="One two three.")) as model:
        api = await start(settings=model.settings, max_concurrent_runs=1)
        async with api.post(CHAT, user(stream=True)) as response:
            await model.wait_for_request()
            async with api.post("/v1/runs", {"input": "hi"}, headers={"Idempotency-Key": "k"}) as other:
                await read_error(other, 429, "rate_limit_exceeded")
            async with api.post(CHAT, user(), headers={"Authorization": "Bearer wrong"}) as other:
                await read_error(other, 401, "invalid_api_key")
            async with api.client.ws_connect(f"{api.url}/v1/responses") as socket:
                await socket.send_json({"type": "response.create", "input": "hi"})
                assert (await socket.receive_json())["error"]["code"] == "rate_limit_exceeded"
            async with api.get("/api/sessions/none") as other:
                await read_error(other, 404, "session_not_found")
            model.release_all()
            await response.read()
    counted = await read_samples(api)
    assert {key[1]: n for key, n in counted.items() if key[0] == "refused_total"} == {
        "rate_limit_exceeded": 2,
        "invalid_api_key": 1,
    }


@pytest.mark.parametrize(("headers", "action"), [({}, "interrupt"), ({"X-Hermes-Detach": "true"}, "detach")])
@pytest.mark.parametrize("stream", [True, False])
async def test_metrics_count_disconnects(start: Start, headers: dict[str, str], action: str, stream: bool) -> None:
    async with HeldModel(Reply(text="One two three.")) as model:
        api = await start(settings=model.settings)
        async with await RawConnection.open(api.url) as wire:
            await wire.request("POST", CHAT, user(stream=stream), Authorization=f"Bearer {KEY}", **headers)
            await model.wait_for_request()
        counted = await until(lambda: read_samples(api), lambda now: now["disconnects_total", action])
        assert [key for key in counted if key[0] == "disconnects_total"] == [("disconnects_total", action)]
        if action == "detach":
            model.release_all()
        outcome = {"interrupt": "cancelled", "detach": "completed"}[action]
        await until(lambda: read_samples(api), lambda now: now["turns_total", "chat", outcome])


async def test_metrics_labels_contain_no_client_input(start: Start) -> None:
    api = await start(Reply(text="Hello."))
    word = "a-word-of-the-client"
    await api.ask(word, model=word, metadata={"a": word})
    async with api.client.request("PROPFIND", f"{api.url}/{word}") as response:
        assert response.status in (404, 405)
    for path in (f"/v1/responses/{word}", f"/api/sessions/{word}", f"/v1/models/{word}/{word}", f"/p/{word}/v1/models"):
        async with api.get(path) as response:
            assert response.status in (200, 404)
    async with api.client.head(f"{api.url}/v1/models") as response:
        assert response.status == 200
    assert word not in await text_of(api)
    counted = await read_samples(api)
    requests = {key[1:] for key in counted if key[0] == "http_requests_total"}
    assert {("GET", "/v1/responses/{response_id}", "404"), ("HEAD", "/v1/models", "200")} <= requests
    assert {method for method, _, _ in requests} == {"GET", "POST", "HEAD", "other"}
    assert ("GET", "other", "404") in requests


async def test_metrics_access(start: Start) -> None:
    keys = [{"name": "anna", "key": "sk-anna-0123456789abcdef", "scopes": ["chat", "runs"]}]
    api = await start(keys=keys)
    for key, status, code in (("sk-anna-0123456789abcdef", 403, "insufficient_scope"), ("", 401, "invalid_api_key")):
        async with api.get("/metrics", headers={"Authorization": f"Bearer {key}"}) as response:
            await read_error(response, status, code)
    assert "hermes_build_info" in await text_of(api)


async def test_metrics_public_setting(start: Start) -> None:
    api = await start(metrics_public=True)
    async with api.get("/metrics", headers={"Authorization": ""}) as response:
        assert response.status == 200


async def test_metrics_can_be_disabled(start: Start) -> None:
    api = await start(metrics=False, metrics_public=True)
    async with api.get("/metrics") as response:
        await read_error(response, 404, "not_found")
    async with api.get("/v1/capabilities") as response:
        assert (await read_json(response))["features"]["metrics"] is False


async def test_metrics_without_store(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    api = await start()
    api.app.store.blocking.engine.release()
    counted = await read_samples(api)
    assert ("build_info", hermes.__version__) in counted and ("store_rows", "runs") not in counted


async def test_metrics_count_subagent_tokens_once(start: Start) -> None:
    usage = {"input": 10, "output": 5}
    parent = [Reply(tool_calls=[Call("delegate_task", {"tasks": [{"goal": "count"}]})], usage=usage)]
    parent.append(Reply(text="Done.", usage=usage))

    def handle(request: Request) -> Reply:
        first = next(turn.text for turn in request.turns if turn.role == "user")
        return Reply(text="Three.", usage=usage) if first == "count" else parent.pop(0)

    api = await start(handler=handle, toolsets=["delegation"])
    await api.ask("hi")
    counted = await read_samples(api)
    assert (counted["tokens_total", "input"], counted["tokens_total", "output"]) == (30, 15)
    assert counted["turns_total", "subagent", "completed"] == counted["turns_total", "chat", "completed"] == 1


async def test_request_continues_traceparent(start: Start) -> None:
    api = await start(Reply(text="One."), Reply(text="Two."))
    exporter = InMemorySpanExporter()
    api.app.engine.listeners.append(Traces(SimpleSpanProcessor(exporter)).hear)
    header = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    for headers in (header, {}):
        async with api.post(CHAT, user(), headers=headers) as response:
            await read_json(response)
    parents: list[Any] = [s.parent and s.parent.span_id for s in exporter.get_finished_spans() if "agent" in s.name]
    assert parents == [0xB7AD6B7169203331, None]
