"""The tool `vision_analyze`: where images come from, how large they may be, and which model looks at them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent.conftest import MakeHarness
from agent.harness import Harness, Json
from guards.stage import WORLD, Stage, serving
from hermes.core import limits
from hermes.tools import vision
from hermes.tools.vision import TOOL
from support.model_server import Call, ModelServer, Reply, Request

from .turns import answers

Image = pytest.importorskip("PIL.Image")


def picture(width: int = 8, height: int = 4, form: str = "PNG", mode: str = "RGB", color: Any = "red") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (width, height), color).save(out, form)
    return out.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def images_of(request: Request) -> list[str]:
    """The images in a request to a model, as it got them."""
    parts = [part for m in request.body["messages"] if isinstance(m["content"], list) for part in m["content"]]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


async def look(
    harness: Harness, server: ModelServer, *places: str, description: str | None = "A red box."
) -> list[Json]:
    """A turn in which the model asks about images; another call of it answers, or does not."""
    harness.offer(TOOL)
    calls = [Call(TOOL.name, {"image_url": place, "question": "What is it?"}) for place in places]
    steps = [Reply(tool_calls=calls), Reply(text="Done.")]

    def handle(request: Request) -> Reply:
        if images_of(request):
            return Reply(text=description) if description is not None else Reply(status=400)
        return steps.pop(0)

    server.handler = handle
    run = await harness.run(server, workdir=None)
    assert run.result["final_response"] == "Done."
    return answers(run)


def sent_image(server: ModelServer) -> Any:
    """The one image that a model was shown, decoded, and its type."""
    [url] = [url for request in server.requests for url in images_of(request)]
    head, _, text = url.partition(";base64,")
    return Image.open(io.BytesIO(base64.b64decode(text))), head.removeprefix("data:")


async def test_vision_data_url_uses_main_route(harness: Harness, server: ModelServer) -> None:
    [answer] = await look(harness, server, data_url(picture()))
    assert answer == {"answer": "A red box.", "model": "m"}
    image, kind = sent_image(server)
    assert (image.size, kind) == ((8, 4), "image/png")
    [request] = [request for request in server.requests if images_of(request)]
    assert "What is it?" in request.turns[-1].text and "tools" not in request.body


async def test_vision_usage_is_recorded_under_task(harness: Harness, server: ModelServer) -> None:
    harness.offer(TOOL)
    server.handler = lambda request: (
        Reply(text="A box.", usage={"input": 7, "output": 3})
        if images_of(request)
        else Reply(text="Done.")
        if len(server.requests) > 1
        else Reply(tool_calls=[Call(TOOL.name, {"image_url": data_url(picture()), "question": "?"})])
    )
    run = await harness.run(server, persist=True)
    [usage] = [event for event in run.events_of("usage") if event["task"] == "vision"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (7, 3)


async def test_vision_auxiliary_route(make_harness: MakeHarness, server: ModelServer) -> None:
    async with ModelServer() as other:
        other.handler = lambda _: Reply(text="Seen elsewhere.")
        provider = {"base_url": f"{other.url}/v1", "api_key": "k-0123456789", "api_mode": "chat_completions"}
        own = {"provider": "eyes", "model": "sees"}
        harness = make_harness({"providers": {"eyes": provider}, "auxiliary": {"vision": own}})
        [answer] = await look(harness, server, data_url(picture()))
        assert answer == {"answer": "Seen elsewhere.", "model": "sees"}
        assert len(other.requests) == 1


async def test_vision_without_vision_model_is_unavailable(harness: Harness, server: ModelServer) -> None:
    [answer] = await look(harness, server, data_url(picture()), description=None)
    assert answer["code"] == "tool_unavailable" and "auxiliary.vision" in answer["hint"]


async def test_disabled_vision_is_not_offered(make_harness: MakeHarness) -> None:
    harness = make_harness({"auxiliary": {"vision": {"enabled": False}}})
    assert TOOL.available(harness.app.settings)


# ---- from the web and from files


async def test_vision_web_image_passes_url_guard(harness: Harness, server: ModelServer) -> None:
    harness.configure({"web": {"ask_hosts": False}})
    stage = Stage(harness.app.services.files)
    stage.answers["page.test"] = [[WORLD]]
    harness.app.services.outside.network = stage

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/gone":
            return web.Response(status=404, body=picture(), content_type="image/png")
        kind = "text/html" if request.path == "/page" else "image/png"
        return web.Response(body=picture(), content_type=kind)

    async with serving(handler) as port:
        stage.servers[WORLD] = port
        places = [f"http://page.test/{name}" for name in ("a.png", "gone", "page")]
        described, missing, page, private = await look(harness, server, *places, "http://127.0.0.1/a.png")
    assert described["answer"] == "A red box."
    assert missing["code"] == page["code"] == "fetch_failed"
    assert private["code"] == "url_refused"


async def test_vision_file_passes_path_guard(harness: Harness, server: ModelServer, tmp_path: Path) -> None:
    harness.home.workspace.mkdir(parents=True)
    (harness.home.workspace / "box.png").write_bytes(picture())
    (harness.home.workspace / "text.png").write_text("no image")
    harness.home.env_file.write_text("SOME_TOKEN=0123456789abcdef\n")
    places = ["box.png", "text.png", "none.png", str(harness.home.env_file), "."]
    box, text, none, secret, folder = await look(harness, server, *places)
    assert box["answer"] == "A red box."
    assert text["code"] == "image_unreadable"
    assert none["code"] == "path_not_found"
    assert secret["code"] == "path_refused"
    assert "error" in folder


# ---- sizes and kinds


@pytest.mark.parametrize(("wide", "kind"), [(2048, "image/png"), (2049, "image/jpeg")])
async def test_vision_wide_image_is_scaled(harness: Harness, server: ModelServer, wide: int, kind: str) -> None:
    await look(harness, server, data_url(picture(wide, 16)))
    image, sent_as = sent_image(server)
    assert (image.width, sent_as) == (2048, kind)


@pytest.mark.parametrize(
    ("form", "kind"), [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("GIF", "image/gif"), ("WEBP", "image/webp")]
)
def test_vision_usual_formats_are_sent_unchanged(form: str, kind: str) -> None:
    data = picture(form=form)
    assert vision.fit_image(data) == (kind, data)


@pytest.mark.parametrize(("form", "mode"), [("BMP", "RGB"), ("TIFF", "CMYK"), ("ICO", "RGBA"), ("PPM", "L")])
def test_vision_other_formats_become_jpeg(form: str, mode: str) -> None:
    kind, data = vision.fit_image(picture(16, 16, form, mode, 0))
    assert kind == "image/jpeg" and Image.open(io.BytesIO(data)).size == (16, 16)


def test_vision_transparency_becomes_white() -> None:
    kind, data = vision.fit_image(picture(3000, 10, "PNG", "RGBA", (0, 0, 0, 0)))
    assert kind == "image/jpeg" and Image.open(io.BytesIO(data)).getpixel((5, 5)) == (255, 255, 255)


def test_vision_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    Image.new("RGB", (3000, 100)).save(out, "JPEG", exif=exif)
    _, data = vision.fit_image(out.getvalue())
    image = Image.open(io.BytesIO(data))
    assert image.height > image.width


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "image_unreadable"),
        (b"no image", "image_unreadable"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image_unreadable"),
        (picture()[:45], "image_unreadable"),
        (picture(form="JPEG")[:300], "image_unreadable"),
    ],
)
def test_vision_unreadable_image_is_rejected(data: bytes, code: str) -> None:
    with pytest.raises(vision.ToolError) as refused:
        vision.fit_image(data)
    assert refused.value.answer["code"] == code and refused.value.answer["hint"]


def test_vision_pixel_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision.limits, "IMAGE_PIXELS_MAX", 100)
    assert vision.fit_image(picture(10, 10))
    with pytest.raises(vision.ToolError) as refused:
        vision.fit_image(picture(10, 11))
    assert refused.value.answer["code"] == "too_large"


async def test_vision_byte_limit(harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    data = picture()
    monkeypatch.setattr(vision.limits, "IMAGE_BYTES_MAX", len(data))
    good, bad = await look(harness, server, data_url(data), data_url(data + b"\0"))
    assert "answer" in good and bad["code"] == "too_large"
    monkeypatch.undo()
    assert limits.IMAGE_BYTES_MAX == 20 * 1024 * 1024


@pytest.mark.parametrize("place", ["data:image/png;base64,a!b", "data:image/png,abc", "data:image/png;base64"])
async def test_vision_invalid_data_urls(harness: Harness, server: ModelServer, place: str) -> None:
    [answer] = await look(harness, server, place)
    assert answer["code"] in ("image_unreadable", "invalid_arguments")


def test_vision_without_pillow_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "can_shrink", lambda: False)
    data = picture()
    monkeypatch.setattr(vision.limits, "IMAGE_UNSCALED_BYTES_MAX", len(data))
    assert vision.fit_image(data) == ("image/png", data)
    with pytest.raises(vision.ToolError) as large:
        vision.fit_image(data + b"\0")
    assert large.value.answer["code"] == "too_large" and "hermes install images" in large.value.answer["hint"]
    with pytest.raises(vision.ToolError) as other:
        vision.fit_image(picture(form="BMP"))
    assert other.value.answer["code"] == "image_unreadable"


@pytest.mark.parametrize(("length", "good"), [(10_000, True), (10_001, False)])
async def test_vision_question_length(harness: Harness, server: ModelServer, length: int, good: bool) -> None:
    harness.offer(TOOL)
    steps = [
        Reply(tool_calls=[Call(TOOL.name, {"image_url": data_url(picture()), "question": "x" * length})]),
        Reply(text="Done."),
    ]
    server.handler = lambda request: Reply(text="Seen.") if images_of(request) else steps.pop(0)
    [answer] = answers(await harness.run(server))
    assert answer.get("code") == (None if good else "invalid_arguments")
