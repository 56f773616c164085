"""Files that an answer names by a tag: shown in it or linked from it, the same on every surface and later."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hermes.core import limits
from hermes.core.limits import INLINE_IMAGE_BYTES_MAX
from support.model_server import Call, Reply, Request, body_bytes

from .clients import Frame, chat_text, check_headers, frames, read_error, read_json, stream_of, user
from .conftest import Api, Start

Json = dict[str, Any]
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8
INLINE = f"![box.png](data:image/png;base64,{base64.b64encode(PICTURE).decode()})"
LINK = re.compile(r"\[([^]]+)\]\((/api/sessions/[^/]+/files/file_[0-9a-f]{24})\)")
SESSION = {"X-Hermes-Session-Id": "hall"}


@pytest.fixture
def workspace(home_folder: Path) -> Path:
    folder = home_folder / "workspace"
    folder.mkdir(parents=True)
    (folder / "box.png").write_bytes(PICTURE)
    (folder / "plan.pdf").write_bytes(b"%PDF-1.7 first")
    return folder


def reply_with(text: str | list[str]) -> Reply:
    return Reply(text=text, continues=False)


async def ask(api: Api, text: str | list[str], surface: str = "plain") -> str:
    """The text of an answer on one surface, whose every telling of it is the same."""
    api.model.handler = lambda _: reply_with(text)
    if surface == "plain":
        async with api.post("/v1/chat/completions", user(), headers=SESSION) as response:
            return str((await read_json(response))["choices"][0]["message"]["content"])
    if surface == "stream":
        async with api.post("/v1/chat/completions", user(stream=True), headers=SESSION) as response:
            return chat_text(await stream_of(response))
    if surface == "session":
        async with api.post("/api/sessions/hall/chat/stream", {"message": "hi"}) as response:
            return session_text(await stream_of(response))
    async with api.post("/v1/responses", {"input": "hi", "stream": surface == "responses stream"}) as response:
        if surface == "responses":
            body = await read_json(response)
        else:
            body = response_of(await stream_of(response))
    async with api.get(f"/v1/responses/{body['id']}") as response:
        assert (await read_json(response))["output"] == body["output"]
    return output_text(body)


def output_text(body: Json) -> str:
    return str(body["output"][-1]["content"][0]["text"])


def response_of(frames: list[Frame]) -> Json:
    data = [frame.data for frame in frames if isinstance(frame.data, dict)]
    [text] = [item["text"] for item in data if item["type"] == "response.output_text.done"]
    assert "".join(item["delta"] for item in data if item["type"] == "response.output_text.delta") == text
    body: Json = data[-1]["response"]
    assert output_text(body) == text
    return body


def session_text(frames: list[Frame]) -> str:
    deltas = "".join(frame.data["delta"] for frame in frames if frame.event == "assistant.delta")
    [whole] = [frame.data["content"] for frame in frames if frame.event == "assistant.completed"]
    [ended] = [frame.data["messages"][-1]["content"] for frame in frames if frame.event == "run.completed"]
    assert deltas == whole == ended
    return deltas


SURFACES = ["plain", "stream", "session", "responses", "responses stream"]


@pytest.fixture
async def media_api(start: Start, workspace: Path) -> Api:
    api = await start()
    await read_json(await api.post("/api/sessions", {"id": "hall"}), 201)
    return api


@pytest.mark.parametrize("surface", SURFACES)
async def test_media_image_is_inlined_in_answer(media_api: Api, surface: str) -> None:
    assert await ask(media_api, "Here: MEDIA:box.png. Done.", surface) == f"Here: {INLINE}. Done."


@pytest.mark.parametrize("surface", SURFACES)
async def test_media_file_is_linked(media_api: Api, workspace: Path, surface: str) -> None:
    text = await ask(media_api, f"Here: MEDIA:{workspace}/plan.pdf", surface)
    match = LINK.search(text)
    assert match is not None and text == f"Here: {match[0]}" and match[1] == "plan.pdf"
    (workspace / "plan.pdf").write_bytes(b"%PDF-1.7 second")
    async with media_api.get(match[2]) as response:
        assert response.status == 200 and await response.read() == b"%PDF-1.7 first"
        assert response.headers["Content-Type"] == "application/pdf"
        assert response.headers["Content-Disposition"].startswith('attachment; filename="plan.pdf"')
        check_headers(response.headers)
    async with media_api.get(match[2].rpartition("/")[0]) as response:
        [listed] = (await read_json(response))["data"]
    assert (listed["name"], listed["direction"], listed["bytes"]) == ("plan.pdf", "out", 14)


async def test_media_file_is_served_to_owner_only(start: Start, workspace: Path) -> None:
    api = await start()
    match = LINK.search(await ask(api, "MEDIA:plan.pdf"))
    assert match is not None
    async with api.get(match[2], headers={"Authorization": "Bearer wrong"}) as response:
        assert response.status == 401
    await read_json(await api.post("/api/sessions", {"id": "other"}), 201)
    async with api.get(match[2].replace("/hall/", "/other/")) as response:
        await read_error(response, 404, "file_not_found")
    async with api.delete("/api/sessions/hall") as response:
        await read_json(response)
    assert not list(workspace.parent.glob("uploads/hall/*"))


async def test_media_is_same_in_run_and_session_records(media_api: Api) -> None:
    async with media_api.post("/v1/runs", {"input": "hi", "session_id": "hall"}) as response:
        media_api.model.script = [reply_with("Here: MEDIA:box.png")]
        run_id = (await read_json(response, 202))["run_id"]
    for _ in range(2):  # while it runs, and from the store
        async with media_api.get(f"/v1/runs/{run_id}/events") as response:
            data = [frame.data for frame in frames(await response.text())]
        assert "".join(item["delta"] for item in data if item["event"] == "message.delta") == f"Here: {INLINE}"
        assert data[-1]["output"] == f"Here: {INLINE}"
    async with media_api.get("/api/sessions/hall/messages") as response:
        assert (await read_json(response))["data"][-1]["content"] == f"Here: {INLINE}"


async def test_media_tag_is_replayed_to_model(media_api: Api) -> None:
    await ask(media_api, "Here: MEDIA:box.png")
    text = await ask(media_api, "And MEDIA:plan.pdf", "stream")
    assert LINK.search(text)
    await ask(media_api, "Done.")
    contents = [m["content"] for m in media_api.model.requests[-1].body["messages"] if m["role"] == "assistant"]
    assert contents == ["Here: MEDIA:box.png", "And MEDIA:plan.pdf"]


async def test_media_conversation_sent_by_client_is_bound(media_api: Api, workspace: Path) -> None:
    (workspace / "big.png").write_bytes(bytes(1_500_000))
    media_api.model.handler = lambda _: reply_with("Here: MEDIA:big.png")
    first = (await media_api.ask("hi"))["choices"][0]["message"]["content"]
    assert len(first) > 1_048_576
    media_api.model.handler = lambda _: reply_with("Done.")
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first}]
    body = {"messages": [*history, {"role": "user", "content": "more"}]}
    data, kind = io.BytesIO(json.dumps(body).encode()), {"Content-Type": "application/json"}
    async with media_api.post("/v1/chat/completions", data=data, headers=kind) as response:
        await read_json(response)
    assert [turn.text for turn in media_api.model.requests[-1].turns if turn.role == "assistant"] == [
        "Here: MEDIA:big.png"
    ]


async def test_media_response_chain(media_api: Api) -> None:
    media_api.model.handler = lambda _: reply_with("Here: MEDIA:box.png")
    async with media_api.post("/v1/responses", {"input": "hi"}) as response:
        first = await read_json(response)
    media_api.model.handler = lambda _: reply_with("Done.")
    async with media_api.post("/v1/responses", {"input": "more", "previous_response_id": first["id"]}) as response:
        assert output_text(await read_json(response)) == "Done."
    texts = [turn.text for turn in media_api.model.requests[-1].turns if turn.role == "assistant"]
    assert texts == ["Here: MEDIA:box.png"]


TAGGED = "Here: MEDIA:box.png done"


@pytest.mark.parametrize("at", range(6, 21))
async def test_media_tag_is_hidden_for_any_chunking(media_api: Api, at: int) -> None:
    media_api.model.handler = lambda _: reply_with([TAGGED[:at], TAGGED[at:]])
    async with media_api.post("/v1/chat/completions", user(stream=True)) as response:
        frames = await stream_of(response)
    assert chat_text(frames) == f"Here: {INLINE} done"


@pytest.mark.parametrize(
    "path",
    ["none.png", ".env", "/etc/shadow", "~/.ssh/id_rsa", ".", "/dev/zero", "../config.yaml", "/proc/self/environ"],
)
async def test_media_forbidden_path_stays_text(media_api: Api, workspace: Path, path: str) -> None:
    (workspace / ".env").write_text("SOME_TOKEN=0123456789abcdef\n")
    assert await ask(media_api, f"Here: MEDIA:{path} there") == f"Here: MEDIA:{path} there"


async def test_media_link_out_of_workspace_is_not_followed(media_api: Api, workspace: Path) -> None:
    (workspace / "box.gif").symlink_to(workspace.parent / "config.yaml")
    assert await ask(media_api, "MEDIA:box.gif") == "MEDIA:box.gif"


@pytest.mark.parametrize(("more", "inline"), [(0, True), (1, False)])
async def test_media_large_image_is_linked(media_api: Api, workspace: Path, more: int, inline: bool) -> None:
    (workspace / "large.JPG").write_bytes(bytes(INLINE_IMAGE_BYTES_MAX + more))
    text = await ask(media_api, "MEDIA:large.JPG")
    assert text.startswith("![large.JPG](data:image/jpeg;base64,AAAA") if inline else LINK.fullmatch(text)


async def test_media_huge_file_stays_text(media_api: Api, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OUTGOING_BYTES_MAX", 14)
    assert LINK.fullmatch(await ask(media_api, "MEDIA:plan.pdf"))
    (workspace / "plan.pdf").write_bytes(b"%PDF-1.7 longer")
    assert await ask(media_api, "MEDIA:plan.pdf") == "MEDIA:plan.pdf"


@pytest.mark.parametrize("name", ["a b.pdf", "a [1].pdf", "x_y.html", "é.txt"])
async def test_media_file_names_with_special_characters(media_api: Api, workspace: Path, name: str) -> None:
    (workspace / name).write_text("text")
    text = await ask(media_api, f'MEDIA:"{name}"')
    where = re.search(r"\((/api/[^)]+)\)$", text)
    assert where is not None, text
    async with media_api.get(where[1]) as response:
        assert await response.text() == "text"
    await ask(media_api, "Done.")
    content = media_api.model.requests[-1].body["messages"][-2]["content"]
    assert content.removeprefix("MEDIA:").strip('"') == name


async def test_media_file_made_by_command(media_api: Api) -> None:
    steps = [
        Reply(tool_calls=[Call("terminal", {"command": "mkdir -p ~/d && cd ~/d && echo made > made.csv"})]),
        reply_with("MEDIA:made.csv and MEDIA:~/d/made.csv"),
    ]
    media_api.model.handler = lambda _: steps.pop(0)
    async with media_api.post("/v1/chat/completions", user(), headers=SESSION) as response:
        text = (await read_json(response))["choices"][0]["message"]["content"]
    links = LINK.findall(text)
    assert len(links) == 2, text
    for _, where in links:
        async with media_api.get(where) as response:
            assert await response.text() == "made\n"


async def test_media_without_file_scope_stays_text(media_api: Api) -> None:
    media_api.model.handler = lambda _: reply_with("MEDIA:box.png")
    async with media_api.post("/v1/runs", {"input": "hi", "toolsets": ["todo"]}) as response:
        run_id = (await read_json(response, 202))["run_id"]
    async with media_api.get(f"/v1/runs/{run_id}/events") as response:
        assert frames(await response.text())[-1].data["output"] == "MEDIA:box.png"


async def test_media_tag_in_truncated_answer_is_continued(media_api: Api) -> None:
    text = "Here: MEDIA:box.png done"

    def handle(request: Request) -> Reply:
        if len(media_api.model.requests) > 1:
            return Reply(text=text)
        reply = Reply(text=list(text))
        whole = body_bytes(request.protocol, reply, request.body, request.key)
        return Reply(text=list(text), cut_at=whole.index(b'"b"'))

    media_api.model.handler = handle
    async with media_api.post("/v1/chat/completions", user(stream=True)) as response:
        assert chat_text(await stream_of(response)) == f"Here: {INLINE} done"
    assert len(media_api.model.requests) == 2


async def test_media_in_json_stays_json(media_api: Api) -> None:
    text = json.dumps({"see": "MEDIA:box.png"})
    assert json.loads(await ask(media_api, text)) == {"see": INLINE}
