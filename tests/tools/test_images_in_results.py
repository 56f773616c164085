"""Images in the answers of tools: from the file or the MCP server to the model, the rows and the streams."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

from agent.conftest import MakeHarness
from agent.harness import PROTOCOLS, CompletedRun, Harness, Json, reading, tool
from hermes.core.text import text_of
from hermes.providers.base import Prompt, Route
from hermes.providers.local import PROVIDER as LOCAL
from hermes.tools import code, files, mcp, vision
from hermes.tools.framework.registry import ToolContext, ToolError
from hermes.tools.images import has_images
from server.clients import frames
from server.conftest import Start, start
from server.tooling import SURFACES, Conversation
from support.model_server import Call, ModelServer, Reply, Request
from support.wire import Protocol

from .test_mcp import house_with, over_pipes
from .test_vision import data_url, picture
from .turns import answers

__all__ = ["start"]

Image = pytest.importorskip("PIL.Image")
PICTURE = picture()
BLIND = "gpt-3.5-turbo"


def put(harness: Harness, **named: bytes) -> None:
    harness.home.workspace.mkdir(parents=True, exist_ok=True)
    for name, data in named.items():
        (harness.home.workspace / name).write_bytes(data)


async def turn(
    harness: Harness, server: ModelServer, *steps: list[Call], protocol: Protocol = "chat", **more: Any
) -> CompletedRun:
    server.script = [*(Reply(tool_calls=calls) for calls in steps), Reply(text="Done.", continues=False)]
    run = await harness.run(server, protocol=protocol, workdir=None, **more)
    assert run.result["final_response"] == "Done."
    return run


def read(name: str) -> list[Call]:
    return [Call("read_file", {"path": name})]


def image_urls(request: Request) -> list[str]:
    """The images that a model was sent, wherever its protocol puts them."""
    urls: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict) and value.get("type") == "image_url":
            urls.append(value["image_url"]["url"])
        elif isinstance(value, dict) and value.get("type") == "input_image":
            urls.append(value["image_url"])
        elif isinstance(value, dict) and value.get("type") == "image":
            urls.append(f"data:{value['source']['media_type']};base64,{value['source']['data']}")
        else:
            for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
                walk(item)

    walk(request.body)
    return urls


def decoded(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2])


def results(run: CompletedRun) -> list[Any]:
    return [message["content"] for message in run.result["messages"] if message["role"] == "tool"]


# ---- read_file


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_read_file_shows_image_to_model(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    harness.offer(files.READ)
    put(harness, box=PICTURE)
    run = await turn(harness, server, read("box"), protocol=protocol)
    assert image_urls(server.requests[-1]) == [data_url(PICTURE)]
    [content] = results(run)
    assert [part["type"] for part in content] == ["text", "image_url"]
    answer = json.loads(content[0]["text"])
    assert (answer["path"], answer["type"], answer["bytes"]) == ("box", "image/png", len(PICTURE))
    assert [text for text in (t.text for t in server.requests[-1].turns) if content[0]["text"] in text]
    assert run.event("tool.finished")["chars"] == len(content[0]["text"])


async def test_large_image_is_scaled_and_other_formats_converted(harness: Harness, server: ModelServer) -> None:
    harness.offer(files.READ)
    put(harness, **{"wide.png": picture(3000, 10), "a.bmp": picture(form="BMP")})
    await turn(harness, server, [*read("wide.png"), *read("a.bmp")])
    sent = image_urls(server.requests[-1])
    assert all(url.startswith("data:image/jpeg;base64,") for url in sent)
    assert [Image.open(io.BytesIO(decoded(url))).size for url in sent] == [(2048, 7), (8, 4)]


@pytest.mark.parametrize("offered", [True, False])
async def test_model_without_vision_gets_file_description(harness: Harness, server: ModelServer, offered: bool) -> None:
    harness.offer(files.READ, *([vision.TOOL] if offered else []))
    put(harness, box=PICTURE)
    run = await turn(harness, server, read("box"), model=BLIND)
    [answer] = answers(run)
    assert (answer["code"], answer["type"], answer["bytes"]) == ("binary_file", "image/png", len(PICTURE))
    assert ("vision_analyze" in answer["hint"]) is offered
    assert image_urls(server.requests[-1]) == []


async def test_image_that_cannot_be_shown_is_reported(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.offer(files.READ)
    put(harness, small=PICTURE, large=PICTURE + b"\0", damaged=PICTURE[:45])
    monkeypatch.setattr(vision.limits, "IMAGE_BYTES_MAX", len(PICTURE))
    run = await turn(harness, server, [*read("small"), *read("large"), *read("damaged")])
    small, large, damaged = results(run)
    assert isinstance(small, list)
    assert [json.loads(content)["code"] for content in (large, damaged)] == ["too_large", "image_unreadable"]


async def test_script_gets_no_image(harness: Harness, server: ModelServer) -> None:
    harness.offer(files.READ, code.TOOL)
    put(harness, box=PICTURE)
    script = "from hermes_tools import read_file\nprint(read_file(path='box')['code'])"
    run = await turn(harness, server, [Call("execute_code", {"code": script})], approvals="off")
    [answer] = answers(run)
    assert answer["stdout"] == "binary_file\n" and image_urls(server.requests[-1]) == []


# ---- what becomes of them


async def test_rows_keep_images_for_next_turn(harness: Harness, server: ModelServer) -> None:
    harness.offer(files.READ)
    put(harness, box=PICTURE)
    run = await turn(harness, server, read("box"), persist=True)
    session = run.spec.session_id
    [row] = [row for row in await harness.rows(session) if row.role == "tool"]
    assert row.content == results(run)[0]
    await turn(harness, server, persist=True, session_id=session)
    assert image_urls(server.requests[-1]) == [data_url(PICTURE)]
    await turn(harness, server, persist=True, session_id=session, model=BLIND)
    assert image_urls(server.requests[-1]) == [] and "cannot be shown" in json.dumps(server.requests[-1].body)


async def test_local_model_gets_text_only() -> None:
    content = [{"type": "text", "text": '{"content": "a box"}'}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    call = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
    messages: list[Json] = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": content},
    ]
    sent = json.dumps(LOCAL.request(Route("local", "m", "", "local"), None, Prompt(messages=messages)).body)
    assert "box" in sent and "data:x" not in sent


async def test_image_rejection_continues_without_images(harness: Harness, server: ModelServer) -> None:
    harness.offer(files.READ)
    put(harness, box=PICTURE)

    def handle(request: Request) -> Reply:
        if image_urls(request):
            return Reply(status=400, error="This model does not support image input.")
        return Reply(text="Done.", continues=False) if len(request.turns) > 2 else Reply(tool_calls=read("box"))

    server.handler = handle
    run = await harness.run(server, workdir=None, persist=True)
    assert run.result["final_response"] == "Done." and run.actions() == ["shrink_images", "describe_images"]
    again = await harness.run(server, persist=True, session_id=run.spec.session_id)
    assert again.result["final_response"] == "Done.", "the session is not lost"


async def test_identical_image_calls_show_image_twice(harness: Harness, server: ModelServer) -> None:
    harness.offer(files.READ)
    put(harness, box=PICTURE)
    first, second = results(await turn(harness, server, [*read("box"), *read("box")]))
    assert first == second and has_images([{"content": first}])


async def test_different_image_of_same_name_is_no_repetition(harness: Harness, server: ModelServer) -> None:
    pictures = iter([picture(color="red"), picture(color="blue"), picture(color="blue")])

    async def look(ctx: ToolContext, _: Json) -> Json:
        ctx.images.append(data_url(next(pictures)))
        return {"seen": True}

    harness.offer(tool("look", look, **reading()))
    run = await turn(harness, server, *[[Call("look", {})]] * 3)
    hints = [json.loads(content[0]["text"]).get("hint") for content in results(run)]
    assert hints[:2] == [None, None] and "same result" in hints[2]


async def test_image_of_spilled_or_failed_result(harness: Harness, server: ModelServer) -> None:
    async def look(ctx: ToolContext, args: Json) -> Json:
        ctx.images.append(data_url(PICTURE))
        if args["a"] == "no":
            raise ToolError("No.", "not_found")
        return {"text": "long " * 50_000}

    harness.offer(tool("look", look, **reading()))
    run = await turn(harness, server, [Call("look", {"a": "yes"}), Call("look", {"a": "no"})])
    spilled, refused = results(run)
    assert "spilled" in json.loads(spilled[0]["text"]) and spilled[1]["type"] == "image_url"
    assert json.loads(refused)["code"] == "not_found"


async def test_steer_is_added_to_text_of_image_result(harness: Harness, server: ModelServer) -> None:
    harness.offer(files.READ)
    put(harness, box=PICTURE)
    steered, steps = asyncio.Event(), [Reply(tool_calls=read("box")), Reply(text="Done.", continues=False)]

    async def handle(_: Request) -> Reply:
        await steered.wait()
        return steps.pop(0)

    server.handler = handle
    running = await harness.begin(harness.spec(server, workdir=None))
    await running.control("steer", text="And mind the colour.")
    steered.set()
    run = await running.end()
    [content] = results(run)
    assert "mind the colour" in content[0]["text"] and content[1]["type"] == "image_url"


# ---- over HTTP


@pytest.mark.parametrize("surface", SURFACES)
async def test_clients_get_text_of_image_result(start: Start, home_folder: Path, surface: str) -> None:
    conversation = await Conversation(await start(), surface, home_folder).begin()
    conversation.workspace.mkdir(parents=True)
    (conversation.workspace / "box").write_bytes(PICTURE)
    turn = await conversation.turn(read("box"))
    assert image_urls(conversation.api.model.requests[-1]) == [data_url(PICTURE)]
    assert turn.answers[0]["type"] == "image/png"


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_store_text_of_image_result(start: Start, home_folder: Path, stream: bool) -> None:
    replies = [Reply(text="Done.", continues=False)] * 2
    api = await start(Reply(tool_calls=read("box")), *replies)
    (home_folder / "workspace").mkdir(parents=True)
    (home_folder / "workspace/box").write_bytes(PICTURE)
    async with api.post("/v1/responses", {"input": "Look.", "stream": stream}) as response:
        text = await response.text()
        assert response.status == 200 and data_url(PICTURE) not in text
    answer = frames(text)[-2].data["response"] if stream else json.loads(text)
    async with api.get(f"/v1/responses/{answer['id']}") as response:
        body = await response.json()
    for rendered in (answer, body):
        [output] = [item["output"] for item in rendered["output"] if item["type"] == "function_call_output"]
        output = output if isinstance(output, str) else output[0]["text"]
        assert json.loads(output)["type"] == "image/png" and output.endswith("}")
    async with api.post("/v1/responses", {"input": "Again.", "previous_response_id": answer["id"]}) as response:
        assert response.status == 200, await response.text()
    assert image_urls(api.model.requests[-1]) == [data_url(PICTURE)]


# ---- MCP


async def test_mcp_images_are_shown_and_kept(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = house_with(make_harness, plain=over_pipes("plain", "stdio"))
    run = await turn(harness, server, [Call("mcp_plain_picture", {})])
    [url] = image_urls(server.requests[-1])
    [content] = results(run)
    assert "data from outside" in content[0]["text"] and "base64" not in content[0]["text"]
    [file] = json.loads(content[0]["text"].split("\n")[1])["files"]
    assert file["shown"] is True and Path(file["path"]).read_bytes() == decoded(url)
    [file] = answers(await turn(harness, server, [Call("mcp_plain_picture", {})], model=BLIND))[0]["files"]
    assert "shown" not in file and image_urls(server.requests[-1]) == []


async def test_mcp_images_are_limited(
    make_harness: MakeHarness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp.limits, "MCP_IMAGES_MAX", 2)
    harness = house_with(make_harness, plain=over_pipes("plain", "stdio"))
    run = await turn(harness, server, [Call("mcp_plain_album", {"count": 3})])
    [content] = results(run)
    files_kept = json.loads(text_of(content).split("\n")[1])["files"]
    assert [file.get("shown", False) for file in files_kept] == [True, True, False, False]
    assert [Path(file["path"]).read_bytes()[:4] for file in files_kept] == [*[b"\x89PNG"] * 3, b"no i"]
    assert len(image_urls(server.requests[-1])) == 2


# ---- errors


async def test_own_mcp_errors_are_not_framed_as_foreign(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = house_with(make_harness, plain=over_pipes("plain", "stdio"))
    run = await turn(harness, server, [Call("mcp_plain_add", {"a": "x"}), Call("mcp_plain_fail", {})])
    ours, theirs = results(run)
    assert json.loads(ours)["code"] == "invalid_arguments"
    assert "data from outside" in theirs


async def test_tool_round_errors_have_hint(harness: Harness, server: ModelServer) -> None:
    async def fall(_: ToolContext, args: Json) -> Json:
        raise ValueError("no")

    async def wait(ctx: ToolContext, args: Json) -> Json:
        await asyncio.Event().wait()
        return {}

    harness.offer(tool("fall", fall, **reading()), tool("wait", wait, timeout_s=0.01, **reading()))
    calls = [Call("fall", {}), Call("wait", {}), Call("fall", {"b": 1}), Call("fall", "[1]")]
    run = await turn(harness, server, calls)
    payloads = [json.loads(content) for content in results(run)]
    assert [answer["code"] for answer in payloads] == ["tool_crashed", "timeout", *["invalid_arguments"] * 2]
    assert all(answer["hint"].endswith(".") for answer in payloads)


async def test_repetition_hint_is_appended_to_tool_hint(harness: Harness, server: ModelServer) -> None:
    async def refuse(_: ToolContext, args: Json) -> Json:
        raise ToolError("No.", "not_found", "Look elsewhere.")

    harness.offer(tool("refuse", refuse, **reading()))
    once, twice = answers(await turn(harness, server, *[[Call("refuse", {})]] * 2))
    assert once["hint"] == "Look elsewhere."
    assert twice["hint"].startswith("Look elsewhere. This very call has failed before")
