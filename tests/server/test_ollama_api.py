"""The Ollama protocol: off unless it is switched on, models to be found, and chats as lines of JSON."""

from __future__ import annotations

import base64
import json
from typing import Any

import aiohttp
import pytest

from support.model_server import Call, Reply

from .clients import HeldModel, Json, check_headers, function, sent_messages
from .conftest import Api, Start

CHAT, GENERATE = "/api/chat", "/api/generate"
LAMP = function("lamp", room={"type": "string"})
HALL = Call("lamp", {"room": "hall"}, id="call_lamp")
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 16).decode()


@pytest.fixture
async def api(start: Start) -> Api:
    return await start(ollama=True)


def user(text: str = "hi", **fields: Any) -> Json:
    return {"model": "hermes-agent", "messages": [{"role": "user", "content": text}], **fields}


async def lines(api: Api, path: str, body: Json) -> list[Json]:
    async with api.post(path, body) as response:
        text = await response.text()
        assert response.status == 200, text
        check_headers(response.headers)
        assert response.headers["Content-Type"] == "application/x-ndjson"
        return [json.loads(line) for line in text.splitlines()]


async def whole(api: Api, path: str, body: Json) -> Json:
    async with api.post(path, {**body, "stream": False}) as response:
        text = await response.text()
        assert response.status == 200, text
        answer: Json = json.loads(text)
        return answer


async def read_ollama_error(response: aiohttp.ClientResponse, status: int, code: str) -> str:
    body = json.loads(await response.text())
    assert (response.status, body["code"]) == (status, code), body
    check_headers(response.headers)
    assert isinstance(body["error"], str) and body["error"]
    return str(body["error"])


async def test_routes_are_off_by_default(start: Start) -> None:
    api = await start()
    routes = [("GET", f"/api/{name}") for name in ("version", "tags", "ps")]
    for method, path in (*routes, ("POST", "/api/show"), ("POST", CHAT), ("POST", GENERATE)):
        async with api.client.request(method, api.url + path, json=user()) as response:
            await read_ollama_error(response, 404, "not_found")
    async with api.get("/v1/capabilities") as response:
        assert (await response.json())["features"]["ollama"] is False


async def test_models_are_found(api: Api) -> None:
    async with aiohttp.ClientSession() as nobody:
        async with nobody.get(f"{api.url}/api/version") as response:
            assert set(await response.json()) == {"version"}
        async with nobody.get(f"{api.url}/api/tags") as response:
            await read_ollama_error(response, 401, "invalid_api_key")
    async with api.get("/api/tags") as response:
        [model] = (await response.json())["models"]
    assert (model["name"], model["model"]) == ("hermes-agent", "hermes-agent")
    async with api.get("/api/ps") as response:
        [loaded] = (await response.json())["models"]
    assert loaded.items() >= model.items() and loaded["expires_at"] > model["modified_at"]
    for fields in ({"model": "hermes-agent:latest"}, {"name": "hermes-agent"}):
        async with api.post("/api/show", fields) as response:
            body = await response.json()
        assert {"completion", "tools"} <= set(body["capabilities"])
        info = body["model_info"]
        assert info["hermes.context_length"] > 1000 and info["general.basename"] == "hermes-agent"
    async with api.post("/api/show", {"model": "gone"}) as response:
        await read_ollama_error(response, 404, "model_not_found")
    async with api.post("/api/show", {}) as response:
        await read_ollama_error(response, 400, "missing_required_parameter")


@pytest.mark.parametrize("place", ["POST /api/pull", "POST /api/embed", "DELETE /api/delete", "POST /api/push"])
async def test_what_is_not_offered_is_refused_in_the_form_of_the_protocol(api: Api, place: str) -> None:
    method, path = place.split()
    async with api.client.request(method, api.url + path, json={"model": "x"}) as response:
        assert "There is nothing at" in await read_ollama_error(response, 404, "not_found")


async def test_chat_is_streamed_by_default(api: Api) -> None:
    api.model.script = [Reply(text=["Hel", "lo, ", "Wörld"])]
    options = {"temperature": 0.5, "num_predict": 50, "num_ctx": 4096, "stop": ["END"]}
    answer_lines = await lines(api, CHAT, user(options=options, keep_alive="5m"))
    assert "".join(line["message"]["content"] for line in answer_lines) == "Hello, Wörld"
    assert [line["done"] for line in answer_lines] == [False] * (len(answer_lines) - 1) + [True]
    assert (answer_lines[-1]["done_reason"], answer_lines[-1]["prompt_eval_count"], answer_lines[-1]["eval_count"]) == (
        "stop",
        10,
        5,
    )
    assert answer_lines[-1]["total_duration"] > 0
    request = api.model.requests[0].body
    assert (request["temperature"], request["max_tokens"], request["stop"]) == (0.5, 50, ["END"])


async def test_chat_as_one_object(api: Api) -> None:
    api.model.script = [Reply(text="Hello.", finish="length")]
    async with api.post(CHAT, user(stream=False, options={"num_ctx": 1, "num_predict": 9}, keep_alive=0)) as response:
        answer = await response.json()
        assert response.headers["X-Hermes-Ignored"] == "keep_alive, options.num_ctx"
    assert answer["message"] == {"role": "assistant", "content": "Hello."}
    assert (answer["done"], answer["done_reason"]) == (True, "length")


async def test_parameter_that_the_provider_rejects_is_named_as_in_the_request(api: Api) -> None:
    api.model.handler = lambda _: Reply(text="Fine.", reject_option="seed")
    async with api.post(CHAT, user(stream=False, options={"seed": 7})) as response:
        assert (response.status, response.headers["X-Hermes-Ignored"]) == (200, "options.seed")


async def test_request_without_messages_loads_the_model(api: Api) -> None:
    for path in (CHAT, GENERATE):
        answer = await whole(api, path, {"model": "hermes-agent"})
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert api.model.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_client_tools_without_ids(api: Api, stream: bool) -> None:
    horn = Call("horn", {}, id="call_horn")
    api.model.script = [Reply(tool_calls=[HALL, horn]), Reply(text="Done.")]
    question = user("light", tools=[LAMP, function("horn")])
    answer_lines = await lines(api, CHAT, question) if stream else [await whole(api, CHAT, question)]
    [calls] = [line["message"]["tool_calls"] for line in answer_lines if "tool_calls" in line["message"]]
    plain = [{"function": call["function"]} for call in calls]
    assert [call["function"]["name"] for call in plain] == ["lamp", "horn"]
    assert plain[0]["function"]["arguments"] == {"room": "hall"}
    results = [{"role": "tool", "content": name, "tool_name": name} for name in ("horn", "lamp")]
    message = {"role": "assistant", "content": "", "tool_calls": plain}
    after = await whole(api, CHAT, {**question, "messages": [*question["messages"], message, *results]})
    assert after["message"]["content"] == "Done."
    messages = api.model.requests[1].body["messages"]
    ids = {call["id"]: call["function"]["name"] for call in messages[2]["tool_calls"]}
    assert {ids[m["tool_call_id"]]: m["content"] for m in messages if m["role"] == "tool"} == {
        "horn": "horn",
        "lamp": "lamp",
    }


async def test_images_and_thinking(api: Api) -> None:
    api.model.script = [Reply(reasoning="Hm.", text="A dot."), Reply(reasoning="Hm.", text="A dot.")]
    body = user("what?", think=True)
    body["messages"][0]["images"] = [PNG]
    answer_lines = await lines(api, CHAT, body)
    assert "".join(line["message"].get("thinking", "") for line in answer_lines) == "Hm."
    parts = api.model.requests[0].body["messages"][-1]["content"]
    assert parts[-1]["image_url"]["url"] == f"data:image/png;base64,{PNG}"
    answer = await whole(api, CHAT, {**body, "think": False})
    assert "thinking" not in answer["message"]


async def test_level_of_thinking_shows_it(api: Api) -> None:
    api.model.script = [Reply(reasoning="Hm.", text="Hello.")]
    assert (await whole(api, CHAT, user(think="high")))["message"]["thinking"] == "Hm."


@pytest.mark.parametrize("path", ["/api/show", CHAT, GENERATE])
async def test_json_may_have_the_type_of_a_form(api: Api, path: str) -> None:
    """As `curl -d` sends it."""
    api.model.script = [Reply(text="Hello.")]
    body = json.dumps({**user(stream=False), "prompt": "hi"})
    for kind, status in (("application/x-www-form-urlencoded", 200), ("multipart/form-data; boundary=x", 415)):
        async with api.post(path, data=body, headers={"Content-Type": kind}) as response:
            assert response.status == status, await response.text()


async def test_image_that_is_no_base64_is_refused(api: Api) -> None:
    body = user()
    body["messages"][0]["images"] = ["a!b="]
    async with api.post(CHAT, body) as response:
        assert "messages[0]" in await read_ollama_error(response, 400, "invalid_image_url")


async def test_generate(api: Api) -> None:
    api.model.script = [Reply(text=["Hel", "lo."]), Reply(text='{"a": 1}')]
    body = {"model": "hermes-agent", "prompt": "greet", "system": "Be brief."}
    answer_lines = await lines(api, GENERATE, body)
    assert "".join(line["response"] for line in answer_lines) == "Hello." and answer_lines[-1]["done"]
    assert sent_messages(api.model.requests[0]) == [("user", "greet")]
    answer = await whole(api, GENERATE, {**body, "format": {"type": "object"}})
    assert json.loads(answer["response"]) == {"a": 1}
    async with api.post(GENERATE, {**body, "suffix": "x"}) as response:
        await read_ollama_error(response, 400, "unsupported_parameter")


async def test_failures(api: Api) -> None:
    api.model.script = [Reply(status=500, error="Broken."), Reply(text=["Hel"], error_event={"message": "Broken."})]
    async with api.post(CHAT, user(stream=False)) as response:
        await read_ollama_error(response, 502, "provider_unavailable")
    answer_lines = await lines(api, CHAT, user())
    assert answer_lines[0]["message"]["content"] == "Hel" and set(answer_lines[-1]) == {"error", "code"}
    for body in ({"messages": []}, user(think="much"), user(format="xml"), {"model": "m", "messages": [{"role": "x"}]},
                 {"model": "m", "messages": [{"role": "tool", "content": "x"}]}):  # fmt: skip
        async with api.post(CHAT, body) as response:
            assert response.status == 400, await response.text()


async def test_quiet_stream_stays_lines_of_json(start: Start) -> None:
    async with HeldModel(Reply(text="Late.")) as model:
        api = await start(settings=model.settings, ollama=True, keepalive_seconds=0.1)
        async with api.post(CHAT, user()) as response:
            assert await response.content.readexactly(2) == b"  "
            model.release_all()
            text = await response.text()
    assert json.loads(text.splitlines()[0])["message"]["content"] == "Late."


async def test_failure_after_text_is_an_error(api: Api) -> None:
    api.model.script = [Reply(text=["Hel", "lo"], error_event={"message": "Broken."})] * 2
    assert "error" in (await lines(api, CHAT, user()))[-1]
    async with api.post(CHAT, user(stream=False)) as response:
        assert response.status >= 500 and isinstance((await response.json())["error"], str)
