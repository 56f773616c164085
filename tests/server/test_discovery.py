"""Discovery: health, readiness, models, capabilities, skills and toolsets."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import hermes
from hermes.sandbox.choose import choose_backend
from hermes.server import readiness, status
from hermes.server.routes import ROUTES
from hermes.services import health, models
from hermes.store.sessions import SessionDB
from hermes.tools.framework.registry import ToolDef
from hermes.tools.framework.toolsets import DEFAULTS, builtin
from support.waiting import until

from .clients import HeldModel, Json, read_error, read_json, user
from .conftest import KEY, Api, Start

CHECKS = {"state_db", "response_store", "config", "model", "disk", "gateway", "background_queues", "bus"}
FEATURES = [
    "chat_completions",
    "chat_completions_streaming",
    "chat_client_tools",
    "chat_structured_output",
    "chat_sampling_parameters",
    "file_input",
    "messages_api",
    "messages_streaming",
    "messages_client_tools",
    "messages_count_tokens",
    "messages_resume",
    "ollama",
    "responses_api",
    "responses_streaming",
    "responses_background",
    "responses_resume",
    "responses_cancel",
    "responses_input_items",
    "responses_compact",
    "responses_input_tokens",
    "responses_websocket",
    "responses_client_tools",
    "conversations_api",
    "run_submission",
    "run_list",
    "run_status",
    "run_events_sse",
    "run_events_resume",
    "run_stop",
    "run_steer",
    "run_approval_response",
    "run_clarify",
    "tool_progress_events",
    "approval_events",
    "session_resources",
    "session_search",
    "session_message_paging",
    "session_chat",
    "session_chat_streaming",
    "session_fork",
    "session_compact",
    "session_fork_at_message",
    "session_branches",
    "sign_in",
    "memory_api",
    "skill_texts",
    "settings_api",
    "keys_api",
    "mcp_api",
    "usage_api",
    "model_setup",
    "session_export",
    "session_import",
    "session_files",
    "session_turn_lease",
    "detach",
    "idempotency",
    "owner_isolation",
    "rate_limits",
    "skills_api",
    "toolsets_api",
    "jobs_api",
    "jobs_admin",
    "mcp_server",
    "model_routes",
    "metrics",
    "openapi",
    "web_ui",
    "admin_config_rw",
    "memory_write_api",
    "realtime_voice",
    "audio_api",
    "chat_logprobs",
    "chat_multiple_choices",
    "platform_events",
    "cron_fire_webhook",
    "cors",
    "profiles",
    "strict_models",
    "strict_parameters",
    "reasoning_streaming",
]
NEVER = [
    "admin_config_rw",
    "memory_write_api",
    "realtime_voice",
    "audio_api",
    "chat_logprobs",
    "chat_multiple_choices",
    "platform_events",
    "cron_fire_webhook",
]


def without_key(api: Api, path: str) -> Any:
    return aiohttp.request("GET", api.url + path)


async def health_of(api: Api) -> Json:
    async with api.get("/health/detailed") as response:
        return await read_json(response)


# --- health ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health(api: Api, path: str) -> None:
    async with without_key(api, path) as response:
        assert await read_json(response) == {"status": "ok", "platform": "hermes-agent", "version": hermes.__version__}


async def test_detailed_health_with_key(api: Api) -> None:
    body = await health_of(api)
    assert (body["status"], body["platform"], body["version"]) == ("ok", "hermes-agent", hermes.__version__)
    assert body["pid"] == os.getpid() and body["uptime_seconds"] >= 0
    assert (body["gateway_state"], body["platforms"], body["active_agents"]) == (None, {}, 0)
    assert (body["exit_reason"], body["updated_at"]) == (None, None)
    assert (body["gateway_busy"], body["gateway_drainable"]) == (False, False)
    ready = body["readiness"]
    assert ready["status"] == "ok", ready
    assert set(ready["checks"]) == CHECKS
    assert ready["checks"]["model"] == {"status": "ok", "provider": "custom", "model": "test-model"}
    assert ready["checks"]["background_queues"] == {"status": "ok", "active": 0, "limit": 256}
    assert ready["checks"]["disk"]["free_bytes"] > 0


async def test_health_without_key_shows_check_results_only(start: Start) -> None:
    api = await start(settings={"model": {"provider": "openrouter", "default": "a/model"}})
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        async with aiohttp.request("GET", f"{api.url}/health/detailed", headers=headers) as response:
            checks = (await read_json(response))["readiness"]["checks"]
        assert checks == {name: {"status": "degraded" if name == "model" else "ok"} for name in CHECKS}
    async with without_key(api, "/health/ready") as response:
        body = await read_json(response, 503)
    assert body["readiness"]["checks"] == checks


async def test_open_server_health_is_detailed(start: Start) -> None:
    api = await start(key="")
    checks = (await health_of(api))["readiness"]["checks"]
    assert checks["model"]["model"] == "test-model"


async def test_health_shows_runtime_status(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {
        "gateway_state": "running",
        "platforms": {"api_server": {"state": "connected"}},
        "active_agents": 3,
        "exit_reason": None,
        "updated_at": 1.5,
        "pid": 1,
    }
    monkeypatch.setattr(status, "read_runtime_status", lambda home: state)
    body = await health_of(api)
    assert {name: body[name] for name in state if name != "pid"} == {n: v for n, v in state.items() if n != "pid"}
    assert body["gateway_busy"] and body["gateway_drainable"]
    assert body["pid"] == os.getpid()


async def test_unreadable_runtime_status_is_none(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(home: Any) -> Any:
        raise PermissionError("not yours")

    monkeypatch.setattr(status, "read_runtime_status", fail)
    assert (await health_of(api))["gateway_state"] is None


async def test_health_counts_active_turns(start: Start) -> None:
    async with HeldModel() as model:
        api = await start(settings=model.settings, max_concurrent_runs=1)
        async with api.post("/v1/chat/completions", user(stream=True)):
            await model.wait_for_request()
            body = await health_of(api)
            queue = body["readiness"]["checks"]["background_queues"]
            assert body["gateway_busy"] and body["active_agents"] == queue["active"] == 1
            assert queue["status"] == "degraded", "no further turn would be taken"
            async with api.get("/health/ready") as response:
                await read_error(response, 503, "not_ready")
        await until(lambda: health_of(api), lambda value: not value["gateway_busy"])


async def test_ready(api: Api) -> None:
    async with without_key(api, "/health/ready") as response:
        body = await read_json(response)
    assert body["status"] == body["readiness"]["status"] == "ok"
    assert set(body["readiness"]["checks"]) == CHECKS


async def test_draining_server_is_not_ready(api: Api) -> None:
    await api.app.engine.drain(0)
    async with api.get("/health/ready") as response:
        body = await read_json(response, 503)
        assert response.headers["Retry-After"] == "1"
    assert body["error"]["code"] == "not_ready" and "gateway" in body["error"]["message"]
    assert body["readiness"]["checks"]["gateway"]["state"] == "draining"
    body = await health_of(api)
    assert body["status"] == "ok" and body["readiness"]["status"] == "degraded"


async def test_starting_server_is_not_ready(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "read_runtime_status", lambda home: {"gateway_state": "starting"})
    async with api.get("/health/ready") as response:
        await read_error(response, 503, "not_ready")


async def test_failing_store_is_degraded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def get_session(self, session_id: str) -> None:
            raise OSError(f"the disk is on fire, says {KEY}")

    monkeypatch.setattr(api.context, "session_db", Broken())
    checks = (await health_of(api))["readiness"]["checks"]
    assert checks["state_db"] == {"status": "degraded", "error": "the disk is on fire, says [redacted]"}
    assert checks["response_store"]["status"] == "ok"


async def test_hanging_store_times_out_as_degraded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    class Slow:
        def get_session(self, session_id: str) -> None:
            go_on.wait()

    monkeypatch.setattr(readiness, "CHECK_S_MAX", 0.01)
    monkeypatch.setattr(api.context, "session_db", Slow())
    try:
        check = await readiness._checked(api.context, "state_db")
    finally:
        go_on.set()
    assert check.status == "degraded" and "0.01 seconds" in str(check.error)


async def test_engine_without_answer_is_named(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(readiness, "CHECK_S_MAX", 0.01)
    monkeypatch.setitem(readiness.CHECKS, "response_store", hang)
    check = await readiness._checked(api.context, "response_store")
    assert check.error == "SQLite gave no answer within 0.01 seconds."


async def test_broken_config_file_is_degraded(api: Api, home_folder: Path) -> None:
    (home_folder / "config.yaml").write_text("model: [")
    config = (await health_of(api))["readiness"]["checks"]["config"]
    assert config["status"] == "degraded" and "config.yaml" in config["error"]


async def test_invalid_config_value_is_degraded(api: Api, home_folder: Path) -> None:
    path = home_folder / "config.yaml"
    path.write_text(path.read_text() + "logging: {level: LOUD}\n")
    assert (await health_of(api))["readiness"]["checks"]["config"]["status"] == "degraded"


async def test_unknown_config_names_are_counted_only(start: Start) -> None:
    api = await start(settings={"modle": {"default": "x"}})
    config = (await health_of(api))["readiness"]["checks"]["config"]
    assert config == {"status": "ok", "problems": 1}


async def test_missing_model_is_degraded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "available", lambda mode: False)
    api = await start(settings={"model": {}})
    model = (await health_of(api))["readiness"]["checks"]["model"]
    assert model["status"] == "degraded" and "No model is configured" in model["error"]


async def test_low_disk_space_is_degraded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "DISK_FREE_BYTES_MIN", 2**80)
    disk = (await health_of(api))["readiness"]["checks"]["disk"]
    assert disk["status"] == "degraded" and disk["free_bytes"] > 0


# --- models ----------------------------------------------------------------------------------------------------------

ROUTED = {"fast": {"model": "small/model", "api_key": "sk-hidden-0123456789"}, "org/deep": {"provider": "openrouter"}}


async def test_models_list_without_routes(api: Api) -> None:
    async with api.get("/v1/models") as response:
        body = await read_json(response)
    (entry,) = body["data"]
    created = entry.pop("created")
    assert isinstance(created, int) and 0 <= time.time() - created < 3600
    same = {"id": "hermes-agent", "root": "hermes-agent"}
    assert entry == {"object": "model", "owned_by": "hermes", "permission": [], "parent": None, **same}
    assert set(body) == {"object", "data"} and body["object"] == "list"


async def test_models_list_includes_aliases(start: Start) -> None:
    api = await start(model_name="house", model_routes=ROUTED)
    async with api.get("/v1/models") as response:
        text = await response.text()
        body = await read_json(response)
    assert "sk-hidden" not in text
    assert [(m["id"], m["root"], m["parent"]) for m in body["data"]] == [
        ("house", "house", None),
        ("fast", "small/model", "house"),
        ("org/deep", "house", "house"),
    ]
    for entry in body["data"]:
        async with api.get(f"/v1/models/{entry['id']}") as response:
            assert await read_json(response) == entry


@pytest.mark.parametrize("name", ["nobody", "hermes-agent/x", "a/b/c", "%00", "hermes%2Dagents"])
async def test_unknown_model_is_404(api: Api, name: str) -> None:
    async with api.get(f"/v1/models/{name}") as response:
        await read_error(response, 404, "model_not_found", "model")


# --- capabilities ----------------------------------------------------------------------------------------------------


async def capabilities_of(api: Api) -> Json:
    async with api.get("/v1/capabilities") as response:
        return await read_json(response)


async def test_capabilities(api: Api) -> None:
    body = await capabilities_of(api)
    assert body["object"] == "hermes.api_server.capabilities"
    assert (body["platform"], body["model"], body["version"]) == ("hermes-agent", "hermes-agent", hermes.__version__)
    scopes = ["chat", "sessions:read", "sessions:write", "runs", "jobs", "admin"]
    assert body["auth"] == {"type": "bearer", "required": True, "owner": "default", "scopes": scopes}
    runtime = body["runtime"]
    assert "API-server host" in runtime.pop("description")
    chosen = choose_backend(api.app.settings)
    sandbox = {"backend": chosen.name, "isolated": chosen.isolated}
    assert runtime == {
        "mode": "server_agent",
        "tool_execution": "server",
        "split_runtime": False,
        "sandbox": sandbox,
    }


async def test_capabilities_auth_not_required_on_open_server(start: Start) -> None:
    assert (await capabilities_of(await start(key="")))["auth"]["required"] is False


async def test_capabilities_name_every_feature(api: Api) -> None:
    features = (await capabilities_of(api))["features"]
    texts = {name: value for name, value in features.items() if isinstance(value, str)}
    assert texts == {
        "session_continuity_header": "X-Hermes-Session-Id",
        "session_key_header": "X-Hermes-Session-Key",
        "idempotency_header": "Idempotency-Key",
        "detach_header": "X-Hermes-Detach",
        "tool_progress_header": "X-Hermes-Tool-Progress",
    }
    assert set(features) - set(texts) == set(FEATURES)
    assert all(isinstance(features[name], bool) for name in FEATURES)
    assert not any(features[name] for name in NEVER)


async def test_capabilities_features_match_routes(api: Api) -> None:
    features = (await capabilities_of(api))["features"]
    names = {route.name for route in ROUTES}
    assert features["jobs_api"] is ("jobs" in names)
    assert features["metrics"] is ("metrics" in names)
    assert features["skills_api"] and features["run_status"] and features["session_fork"]


@pytest.mark.parametrize(
    ("options", "feature", "value"),
    [
        ({}, "cors", False),
        ({"cors_origins": ["https://app.example"]}, "cors", True),
        ({"strict_models": True}, "strict_models", True),
        ({"strict_parameters": True}, "strict_parameters", True),
        ({"show_reasoning": True}, "reasoning_streaming", True),
        ({}, "openapi", True),
        ({"docs": False}, "openapi", False),
    ],
)
async def test_capabilities_features_follow_configuration(
    start: Start, options: Json, feature: str, value: bool
) -> None:
    assert (await capabilities_of(await start(**options)))["features"][feature] is value


async def test_capabilities_limits_match_configuration(start: Start) -> None:
    api = await start(max_body_bytes=5000, responses={"max_stored": 7}, settings={"approvals": {"timeout": 17}})
    limits = (await capabilities_of(api))["limits"]
    assert (limits["max_body_bytes"], limits["responses_max_stored"]) == (5000, 7)
    assert (limits["approval_timeout_seconds"], limits["drain_seconds"]) == (17, 30)
    assert (limits["max_text_chars"], limits["max_concurrent_runs"]) == (1_048_576, 256)
    assert limits["max_event_bytes"] == 100_000
    assert (limits["max_header_bytes"], limits["max_client_tools"]) == (16384, 128)
    assert (limits["clarify_timeout_seconds"], limits["idempotency_seconds"]) == (3600, 86400)
    assert all(isinstance(value, int | float) for value in limits.values())
    assert [name for name, value in limits.items() if isinstance(value, float) and value.is_integer()] == []


async def test_capabilities_list_every_route(api: Api) -> None:
    endpoints = (await capabilities_of(api))["endpoints"]
    assert endpoints == {route.name: {"method": route.method, "path": route.path} for route in ROUTES}
    assert endpoints["model"] == {"method": "GET", "path": "/v1/models/{model_id}"}


async def test_capabilities_name_missing_sandbox(start: Start) -> None:
    api = await start(settings={"terminal": {"backend": "docker"}})
    assert (await capabilities_of(api))["runtime"]["sandbox"] == {"backend": "docker", "isolated": True}


# --- skills and toolsets ---------------------------------------------------------------------------------------------


def write_skill(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(text)


async def skills_of(api: Api) -> list[Json]:
    async with api.get("/v1/skills") as response:
        body = await read_json(response)
    assert set(body) == {"object", "data"} and body["object"] == "list"
    data: list[Json] = body["data"]
    return data


async def test_skills_list_is_empty(api: Api) -> None:
    assert await skills_of(api) == []


async def test_skills_are_listed(start: Start, home_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_skill(
        home_folder / "skills" / "writing" / "letters", "---\nname: letters\ndescription: >\n  Long\n  ones.\n---\n"
    )
    write_skill(home_folder / "skills" / "alone", "---\ndescription: By itself\n---\nText\n---\nmore")
    write_skill(home_folder / "skills" / "odd" / "headless", "no head at all")
    write_skill(home_folder / "skills" / "odd" / "broken", "---\nname: [\n---\n")
    write_skill(home_folder / "skills" / "odd" / "listed", "---\n- a\n- b\n---\n")
    write_skill(other / "writing" / "letters", "---\nname: letters\ndescription: second\n---\n")
    write_skill(other / "more" / "extra", "---\nname: extra\ndescription: from elsewhere\n---\n")
    api = await start(settings={"skills": {"external_dirs": [str(other), str(tmp_path / "nowhere")]}})
    assert [(skill["category"], skill["name"], skill["description"]) for skill in await skills_of(api)] == [
        (None, "alone", "By itself"),
        ("more", "extra", "from elsewhere"),
        ("odd", "broken", ""),
        ("odd", "headless", ""),
        ("odd", "listed", ""),
        ("writing", "letters", "Long ones."),
    ]
    path = home_folder / "skills" / "alone" / "SKILL.md"
    path.write_text("---\nname: alone\ndescription: changed\n---\n")
    os.utime(path, ns=(1, 1))
    assert (await skills_of(api))[0]["description"] == "changed"


async def toolsets_of(api: Api) -> dict[str, Json]:
    async with api.get("/v1/toolsets") as response:
        body = await read_json(response)
    assert (body["object"], body["platform"]) == ("list", "api_server")
    return {entry["name"]: entry for entry in body["data"]}


async def test_toolsets_are_listed(api: Api) -> None:
    toolsets = await toolsets_of(api)
    assert list(toolsets) == list(DEFAULTS)
    assert toolsets["todo"] == {
        "name": "todo",
        "label": "Todo",
        "description": "Plan and track work of several steps.",
        "enabled": True,
        "configured": True,
        "available": True,
        "tools": ["todo"],
    }


@pytest.mark.parametrize(
    ("options", "settings"),
    [({"toolsets": ["memory"]}, {}), ({}, {"platform_toolsets": {"api_server": ["memory"]}})],
)
async def test_toolset_can_be_disabled(start: Start, options: Json, settings: Json) -> None:
    toolsets = await toolsets_of(await start(settings=settings, **options))
    assert {name for name, entry in toolsets.items() if entry["enabled"]} == {"memory"}
    assert toolsets["memory"]["available"]
    assert (
        not toolsets["todo"]["available"] and toolsets["todo"]["configured"] and toolsets["todo"]["tools"] == ["todo"]
    )


async def test_tool_with_missing_requirement_is_unavailable(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = ToolDef(
        name="lacks",
        description="Needs a key.",
        toolset="lacking",
        run=lambda context, args: {},
        available=lambda _: "no key",
    )
    monkeypatch.setitem(DEFAULTS, "lacking", frozenset())
    monkeypatch.setitem(builtin()._tools, "lacks", lacking)
    entry = (await toolsets_of(api))["lacking"]
    assert entry["enabled"] and entry["tools"] == ["lacks"]
    assert not entry["configured"] and not entry["available"]


async def test_adapter_without_app_answers(home_folder: Path) -> None:
    from aiohttp.test_utils import TestClient, TestServer

    from hermes.server.application import build
    from hermes.server.compat import APIServerAdapter
    from hermes.server.settings import PlatformConfig

    home_folder.mkdir()
    adapter = APIServerAdapter(PlatformConfig(enabled=True))
    async with TestClient(TestServer(build(adapter.context))) as client:
        for path in ("/health/detailed", "/v1/models", "/v1/capabilities", "/v1/skills", "/v1/toolsets", "/docs", "/"):
            async with client.get(path) as response:
                assert response.status == 200, await response.text()
    assert isinstance(adapter._session_db, SessionDB)
    adapter._session_db.close()
