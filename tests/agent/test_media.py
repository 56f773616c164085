"""Tags of files in a text that comes in pieces, and the same text as the model knows it."""

from __future__ import annotations

import asyncio

import pytest

from hermes.agent.media import MediaTagFilter
from hermes.agent.media_tags import strip_rendered_media
from hermes.core.limits import MEDIA_PIECE_CHARS, MEDIA_TAG_CHARS_MAX
from hermes.tools import files
from runs.test_resume import MESSAGE, SESSION, OrphanedRun
from support.model_server import ModelServer, Reply

from .harness import Harness, rebuilt, sent_messages, stall_after

FILES = {"/w/a.png": "![a](data:)", "/w/b (1).pdf": "[b](/x)", "/w/c_": "[c](/y)"}


async def exported_text(*pieces: str) -> tuple[str, list[str]]:
    """What is written of a text, and what was written before its end."""
    out: list[str] = []

    async def export(path: str) -> str | None:
        return FILES.get(path)

    outgoing = MediaTagFilter(out.append, export)
    for piece in pieces:
        await outgoing.feed(piece)
    early = list(out)
    await outgoing.feed("", last=True)
    assert outgoing.held == ""
    return "".join(out), early


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MEDIA:/w/a.png", "![a](data:)"),
        ("See MEDIA:/w/a.png\nand more", "See ![a](data:)\nand more"),
        ("(MEDIA:/w/a.png), MEDIA:/w/a.png.", "(![a](data:)), ![a](data:)."),
        ("**MEDIA:/w/a.png**", "**![a](data:)**"),
        ("MEDIA:\"/w/b (1).pdf\" and MEDIA:'/w/a.png'", "[b](/x) and ![a](data:)"),
        ("MEDIA:`/w/a.png`", "![a](data:)"),
        ("MEDIA:/w/c_ MEDIA:/w/c_,", "[c](/y) MEDIA:/w/c_,"),
        ("MEDIA:/w/none.png stays", "MEDIA:/w/none.png stays"),
        ("MEDIA: /w/a.png", "MEDIA: /w/a.png"),
        ("MEDIA:", "MEDIA:"),
        ("MEDIA:... MED MEDIAMEDIA:/w/a.png", "MEDIA:... MED MEDIA![a](data:)"),
        ('MEDIA:"/w/a.png\nno end', 'MEDIA:"/w/a.png\nno end'),
        ("MMEDIA:/w/a.png M", "M![a](data:) M"),
        ("media:/w/a.png MEDI", "media:/w/a.png MEDI"),
        ("MEDIA:/w/none.pngMEDIA:/w/a.png", "MEDIA:/w/none.pngMEDIA:/w/a.png"),
    ],
)
async def test_media_tag_is_found_for_any_chunking(text: str, expected: str) -> None:
    assert (await exported_text(text))[0] == expected
    assert (await exported_text(*text))[0] == expected
    for at in range(len(text)):
        assert (await exported_text(text[:at], text[at:]))[0] == expected


async def test_media_tag_holds_back_text_until_its_end_only() -> None:
    for at, early in ((6, "Here: "), (7, "Here: "), (12, "Here: "), (20, "Here: ")):
        assert "".join((await exported_text("Here: MEDIA:/w/a.png and more"[:at]))[1]) == early
    assert "".join((await exported_text("Here: MEDIA:/w/a.png and"))[1]) == "Here: ![a](data:) and"


@pytest.mark.parametrize("quote", ["", '"'])
async def test_endless_media_tag_is_released(quote: str) -> None:
    long = f"MEDIA:{quote}" + "x" * MEDIA_TAG_CHARS_MAX
    text, early = await exported_text(long)
    assert text == long and "".join(early) == long
    assert (await exported_text(long[:-10]))[1] == []


async def test_media_lookup_interrupted_by_stop_is_not_lost() -> None:
    out: list[str] = []
    requested = asyncio.Event()

    async def export(path: str) -> str | None:
        if not requested.is_set():
            requested.set()
            await asyncio.Event().wait()
        return FILES.get(path)

    outgoing = MediaTagFilter(out.append, export)
    task = asyncio.create_task(outgoing.feed("a MEDIA:/w/a.png b"))
    await requested.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await outgoing.feed("", last=True)
    assert "".join(out) == "a ![a](data:) b"


async def test_media_image_interrupted_by_stop_is_completed() -> None:
    out: list[str] = []
    image = "x" * 3 * MEDIA_PIECE_CHARS

    async def export(_: str) -> str:
        return image

    def write(text: str) -> None:
        out.append(text)
        if len(out) == 2:
            task.cancel()

    outgoing = MediaTagFilter(write, export)
    task = asyncio.create_task(outgoing.feed("a MEDIA:b c"))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(out) == 2 and outgoing.holds("d")
    await outgoing.feed("d", last=True)
    assert "".join(out) == f"a {image} cd"


LONG = "data:image/png;base64," + "A" * 2000
LINK = "/api/sessions/s%201/files/file_0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"See ![out/a.png]({LONG}) and [b.pdf]({LINK}).", "See MEDIA:out/a.png and MEDIA:b.pdf."),
        (f"![a \\[1\\].png]({LONG})", 'MEDIA:"a [1].png"'),
        ("![dot](data:image/png;base64,AAAA)", None),
        ("[b](/api/sessions/s/files) and [c](https://x.test/a)", None),
        ("no file", None),
    ],
)
def test_strip_rendered_media_restores_tags(text: str, expected: str | None) -> None:
    assert strip_rendered_media(text) == expected


# ---- in a turn


@pytest.fixture
def media_harness(harness: Harness) -> Harness:
    harness.offer(files.READ)
    harness.home.workspace.mkdir(parents=True)
    (harness.home.workspace / "a.png").write_bytes(bytes(3000))
    (harness.home.workspace / "b.pdf").write_text("text")
    return harness


IMAGE = f"![a.png](data:image/png;base64,{'A' * 4000})"


async def test_media_without_session_is_inlined(media_harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="MEDIA:a.png MEDIA:b.pdf")]
    run = await media_harness.run(server, workdir=None)
    assert run.result["final_response"] == run.text() == f"{IMAGE} MEDIA:b.pdf"
    assert run.result["messages"][-1]["content"] == "MEDIA:a.png MEDIA:b.pdf"


@pytest.mark.parametrize("source", ["cli", "cron", "subagent"])
async def test_media_tags_stay_on_other_surfaces(media_harness: Harness, server: ModelServer, source: str) -> None:
    server.script = [Reply(text="MEDIA:a.png")]
    run = await media_harness.run(server, source=source, workdir=str(media_harness.home.workspace))
    assert run.result["final_response"] == "MEDIA:a.png"


@pytest.mark.parametrize(("tag", "expected"), [("MEDIA:a.png", IMAGE), ("MEDIA:a.pn", "MEDIA:a.pn"), ("MED", "MED")])
async def test_truncated_answer_keeps_held_back_media_tag(
    media_harness: Harness, server: ModelServer, tag: str, expected: str
) -> None:
    server.script = [Reply(text=f"See {tag}", finish="length")]
    run = await media_harness.run(server, persist=True, workdir=None, max_output_tokens=5)
    assert run.result["final_response"] == run.text() == f"See {expected}" and run.result["partial"]
    row = (await media_harness.rows(run.spec.session_id))[-1]
    assert row.content == f"See {expected}" and row.as_message()["content"] == f"See {tag}"


async def test_interrupted_turn_keeps_its_image(media_harness: Harness, server: ModelServer) -> None:
    server.handler = stall_after('"more', Reply(text=["See MEDIA:a.png ", "more"]))
    running = await media_harness.begin(media_harness.spec(server, persist=True, workdir=None))
    await running.until(lambda events: f"See {IMAGE} " in rebuilt(events).values())
    await running.control("interrupt")
    run = await running.end()
    row = (await media_harness.rows(run.spec.session_id))[-1]
    assert (row.content, row.api_content) == (f"See {IMAGE} ", "See MEDIA:a.png ")


async def test_resumed_run_sends_media_tags_to_model(media_harness: Harness, server: ModelServer) -> None:
    orphan = await OrphanedRun(media_harness, server).begin()
    await orphan.ask()
    await orphan.leave_text(f"See {IMAGE} and ")
    server.script = [Reply(text="See MEDIA:a.png and MEDIA:b.pdf")]
    events = await orphan.taken_up()
    assert ("assistant", "See MEDIA:a.png and ") in sent_messages(server.requests[0])
    text = rebuilt(events)[MESSAGE]
    assert text.startswith(f"See {IMAGE} and [b.pdf](/api/sessions/{SESSION}/files/file_")
    assert (await media_harness.rows(SESSION))[-1].api_content == "See MEDIA:a.png and MEDIA:b.pdf"
