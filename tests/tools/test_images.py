"""Images that a model refuses: made smaller, or into words."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest

from hermes.core.json_types import Message
from hermes.tools import images

WEB: Message = {"type": "image_url", "image_url": {"url": "https://h.test/a.png", "detail": "high"}}
WORDS: Message = {"type": "text", "text": "What is this?"}


def message(*parts: Message) -> Message:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    ("messages", "there"),
    [
        ([], False),
        ([{"role": "user", "content": "an image"}], False),
        ([{"role": "assistant", "content": None}], False),
        ([message(WORDS)], False),
        ([message(WORDS, WEB)], True),
        ([{"role": "user", "content": "x"}, message(WEB)], True),
    ],
)
def test_conversation_has_images(messages: list[Message], there: bool) -> None:
    assert images.has_images(messages) is there


def picture(width: int, height: int, mode: str = "RGB") -> Message:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new(mode, (width, height)).save(out, "PNG")
    data = base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def size_of(part: Any) -> tuple[int, int]:
    image = pytest.importorskip("PIL.Image")
    data = base64.b64decode(part["image_url"]["url"].partition(";base64,")[2])
    with image.open(io.BytesIO(data)) as opened:
        return opened.size  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("size", "mode", "smaller"),
    [((2048, 512), "RGB", (1024, 256)), ((3000, 3000), "RGBA", (1024, 1024)), ((40, 30), "P", (40, 30))],
)
def test_inline_images_are_scaled_down(size: tuple[int, int], mode: str, smaller: tuple[int, int]) -> None:
    before = message(WORDS, picture(*size, mode))
    ((note, after),) = [images.shrink_images([before])[0]["content"]]
    assert (note, size_of(after), after["image_url"]["detail"]) == (WORDS, smaller, "low")
    assert size_of(before["content"][1]) == size, "the stored message is not touched"


def test_remote_images_use_low_detail() -> None:
    (after,) = images.shrink_images([message(WEB)])
    assert after["content"] == [{"type": "image_url", "image_url": {"url": "https://h.test/a.png", "detail": "low"}}]


@pytest.mark.parametrize("data", ["bm90IGFuIGltYWdl", "%%%", ""])
def test_unreadable_image_is_sent_unchanged(data: str) -> None:
    pytest.importorskip("PIL.Image")
    url = f"data:image/png;base64,{data}"
    (after,) = images.shrink_images([message({"type": "image_url", "image_url": {"url": url}})])
    assert after["content"][0]["image_url"]["url"] == url


async def test_every_image_is_described_once() -> None:
    urls: list[str] = []

    async def describe(part: Message) -> str:
        urls.append(part["image_url"]["url"])
        return f"picture {len(urls)}"

    other = {"type": "image_url", "image_url": {"url": "https://h.test/b.png"}}
    plain = {"role": "assistant", "content": "hm"}
    after = await images.replace_by_descriptions([message(WORDS, WEB), plain, message(WEB, other)], describe)
    assert urls == ["https://h.test/a.png", "https://h.test/b.png"]
    texts = [[part["text"] for part in m["content"]] for m in (after[0], after[2])]
    assert texts == [["What is this?", "[An image: picture 1]"], ["[An image: picture 1]", "[An image: picture 2]"]]
    assert after[1] is plain
