"""Tags of files in a text that comes in pieces, and the same text as the model knows it."""

from __future__ import annotations

import asyncio

import pytest

from hermes.agent.media import MediaTagFilter
from hermes.agent.media_tags import strip_rendered_media
from hermes.core.limits import MEDIA_PIECE_CHARS, MEDIA_TAG_CHARS_MAX
from hermes.tools import files
from runs.test_resume import MESSAGE, SESSION, Left
from support.model_server import ModelServer, Reply

from .house import House, rebuilt, sent, stall_after

FILES = {"/w/a.png": "![a](data:)", "/w/b (1).pdf": "[b](/x)", "/w/c_": "[c](/y)"}


async def written(*pieces: str) -> tuple[str, list[str]]:
    """What is written of a text, and what was written before its end."""
    out: list[str] = []

    async def made(path: str) -> str | None:
        return FILES.get(path)

    outgoing = MediaTagFilter(out.append, made)
    for piece in pieces:
        await outgoing.feed(piece)
    early = list(out)
    await outgoing.feed("", last=True)
    assert outgoing.held == ""
    return "".join(out), early


@pytest.mark.parametrize(
    ("text", "told"),
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
async def test_a_tag_is_found_wherever_the_text_is_cut(text: str, told: str) -> None:
    assert (await written(text))[0] == told
    assert (await written(*text))[0] == told
    for at in range(len(text)):
        assert (await written(text[:at], text[at:]))[0] == told


async def test_text_is_held_back_from_the_tag_to_its_end_and_no_longer() -> None:
    for at, early in ((6, "Here: "), (7, "Here: "), (12, "Here: "), (20, "Here: ")):
        assert "".join((await written("Here: MEDIA:/w/a.png and more"[:at]))[1]) == early
    assert "".join((await written("Here: MEDIA:/w/a.png and"))[1]) == "Here: ![a](data:) and"


@pytest.mark.parametrize("quote", ["", '"'])
async def test_what_has_no_end_is_not_held_back_for_ever(quote: str) -> None:
    long = f"MEDIA:{quote}" + "x" * MEDIA_TAG_CHARS_MAX
    told, early = await written(long)
    assert told == long and "".join(early) == long
    assert (await written(long[:-10]))[1] == []


async def test_a_tag_that_was_being_looked_up_when_the_turn_was_stopped_is_not_lost() -> None:
    out: list[str] = []
    asked = asyncio.Event()

    async def made(path: str) -> str | None:
        if not asked.is_set():
            asked.set()
            await asyncio.Event().wait()
        return FILES.get(path)

    outgoing = MediaTagFilter(out.append, made)
    task = asyncio.create_task(outgoing.feed("a MEDIA:/w/a.png b"))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await outgoing.feed("", last=True)
    assert "".join(out) == "a ![a](data:) b"


async def test_an_image_that_was_being_written_when_the_turn_was_stopped_is_written_whole() -> None:
    out: list[str] = []
    image = "x" * 3 * MEDIA_PIECE_CHARS

    async def made(_: str) -> str:
        return image

    def write(text: str) -> None:
        out.append(text)
        if len(out) == 2:
            task.cancel()

    outgoing = MediaTagFilter(write, made)
    task = asyncio.create_task(outgoing.feed("a MEDIA:b c"))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(out) == 2 and outgoing.holds("d")
    await outgoing.feed("d", last=True)
    assert "".join(out) == f"a {image} cd"


LONG = "data:image/png;base64," + "A" * 2000
LINK = "/api/sessions/s%201/files/file_0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"See ![out/a.png]({LONG}) and [b.pdf]({LINK}).", "See MEDIA:out/a.png and MEDIA:b.pdf."),
        (f"![a \\[1\\].png]({LONG})", 'MEDIA:"a [1].png"'),
        ("![dot](data:image/png;base64,AAAA)", None),
        ("[b](/api/sessions/s/files) and [c](https://x.test/a)", None),
        ("no file", None),
    ],
)
def test_the_model_knows_its_text_with_tags(text: str, said: str | None) -> None:
    assert strip_rendered_media(text) == said


# ---- in a turn


@pytest.fixture
def desk(house: House) -> House:
    house.offer(files.READ)
    house.home.workspace.mkdir(parents=True)
    (house.home.workspace / "a.png").write_bytes(bytes(3000))
    (house.home.workspace / "b.pdf").write_text("text")
    return house


IMAGE = f"![a.png](data:image/png;base64,{'A' * 4000})"


async def test_without_a_session_there_is_nothing_to_link_to(desk: House, server: ModelServer) -> None:
    server.script = [Reply(text="MEDIA:a.png MEDIA:b.pdf")]
    ran = await desk.run(server, workdir=None)
    assert ran.result["final_response"] == ran.text() == f"{IMAGE} MEDIA:b.pdf"
    assert ran.result["messages"][-1]["content"] == "MEDIA:a.png MEDIA:b.pdf"


@pytest.mark.parametrize("source", ["cli", "cron", "subagent"])
async def test_elsewhere_tags_stay(desk: House, server: ModelServer, source: str) -> None:
    server.script = [Reply(text="MEDIA:a.png")]
    ran = await desk.run(server, source=source, workdir=str(desk.home.workspace))
    assert ran.result["final_response"] == "MEDIA:a.png"


@pytest.mark.parametrize(("tag", "told"), [("MEDIA:a.png", IMAGE), ("MEDIA:a.pn", "MEDIA:a.pn"), ("MED", "MED")])
async def test_an_answer_that_ends_too_soon_keeps_what_was_held_back(
    desk: House, server: ModelServer, tag: str, told: str
) -> None:
    server.script = [Reply(text=f"See {tag}", finish="length")]
    ran = await desk.run(server, persist=True, workdir=None, max_output_tokens=5)
    assert ran.result["final_response"] == ran.text() == f"See {told}" and ran.result["partial"]
    row = (await desk.rows(ran.spec.session_id))[-1]
    assert row.content == f"See {told}" and row.as_message()["content"] == f"See {tag}"


async def test_a_turn_that_is_stopped_keeps_its_image(desk: House, server: ModelServer) -> None:
    server.handler = stall_after('"more', Reply(text=["See MEDIA:a.png ", "more"]))
    running = await desk.begin(desk.spec(server, persist=True, workdir=None))
    await running.until(lambda events: f"See {IMAGE} " in rebuilt(events).values())
    await running.control("interrupt")
    ran = await running.end()
    row = (await desk.rows(ran.spec.session_id))[-1]
    assert (row.content, row.api_content) == (f"See {IMAGE} ", "See MEDIA:a.png ")


async def test_a_run_that_was_cut_off_goes_on_in_the_model_s_own_words(desk: House, server: ModelServer) -> None:
    left = await Left(desk, server).begin()
    await left.ask()
    await left.leave_text(f"See {IMAGE} and ")
    server.script = [Reply(text="See MEDIA:a.png and MEDIA:b.pdf")]
    events = await left.taken_up()
    assert ("assistant", "See MEDIA:a.png and ") in sent(server.requests[0])
    text = rebuilt(events)[MESSAGE]
    assert text.startswith(f"See {IMAGE} and [b.pdf](/api/sessions/{SESSION}/files/file_")
    assert (await desk.rows(SESSION))[-1].api_content == "See MEDIA:a.png and MEDIA:b.pdf"
