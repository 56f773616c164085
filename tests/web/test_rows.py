"""Rows of a conversation: what is written or unfolded in them stays while they are not drawn; texts to decide about are whole."""

import asyncio
import struct
import zlib

import pytest
from playwright.async_api import Locator, Page, expect

from support.browser import Site, say
from support.model_server import Call, Reply
from support.waiting import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def import_long(site: Site) -> str:
    """A conversation of which only a part is drawn; its address."""
    messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"message {n}"} for n in range(120)]
    session = {"format": "hermes.session/1", "id": "long", "title": "Long", "messages": messages}
    await site.gateway.post("/api/sessions/import", {"sessions": [session]})
    return "#/c/long"


async def scroll_away_and_back(page: Page, row: Locator) -> None:
    """Scroll until a row is not drawn any more, and to the end again."""
    await page.locator(".messages").hover(position={"x": 5, "y": 5})
    while await row.count():
        await page.mouse.wheel(0, -2000)
        await page.evaluate("new Promise(requestAnimationFrame)")
    await page.get_by_role("button", name="To the newest message").click()


async def test_edited_text_is_kept_while_its_row_is_not_drawn(site: Site) -> None:
    page = await site.open(await import_long(site))
    await page.locator(".user").last.hover()
    await page.get_by_role("button", name="Edit", exact=True).last.click()
    editor = page.get_by_role("textbox", name="Edit your message")
    await expect(editor).to_be_focused()
    await editor.fill("Another question")
    await scroll_away_and_back(page, editor)
    await expect(editor).to_have_value("Another question")
    # Sending fails: the text is still there.
    await page.route("**/fork", lambda route: route.abort())
    await editor.press("Enter")
    await expect(page.locator(".toast")).to_contain_text("The server does not answer")
    await expect(editor).to_have_value("Another question")
    await page.unroute("**/fork")
    site.model.script = [Reply(text="Another answer.")]
    await editor.press("Enter")
    await expect(page.get_by_text("Another answer.")).to_be_visible()
    await expect(editor).to_have_count(0)
    # Given up, it begins with what was sent.
    await page.locator(".user").last.hover()
    await page.get_by_role("button", name="Edit", exact=True).last.click()
    await editor.fill("Never mind")
    await editor.press("Escape")
    await expect(page.get_by_role("button", name="Edit", exact=True).last).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(editor).to_have_value("Another question")


async def test_answer_and_denial_are_kept_while_their_rows_are_not_drawn(site: Site) -> None:
    site.model.script = [
        Reply(tool_calls=[Call("clarify", {"question": "Which colour?", "choices": ["red"]}, id="call_1")]),
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"}, id="call_2")]),
        Reply(text="Done."),
    ]
    page = await site.open(await import_long(site))
    await say(page, "Paint it.")
    answer = page.get_by_role("textbox", name="Your answer")
    await answer.fill("A light blue")
    await scroll_away_and_back(page, answer)
    await expect(answer).to_have_value("A light blue")
    await page.reload()
    await expect(answer).to_have_value("A light blue")
    await answer.press("Enter")
    instead = page.get_by_role("textbox", name="what to do instead")
    await instead.fill("Move it away.")
    await scroll_away_and_back(page, instead)
    await expect(instead).to_have_value("Move it away.")
    await instead.press("Enter")
    await expect(page.get_by_text("Done.")).to_be_visible()
    assert "A light blue" in str(site.model.requests[-1].body)
    assert "Move it away." in str(site.model.requests[-1].body)


async def test_tool_card_stays_open_while_its_row_is_not_drawn(site: Site) -> None:
    site.model.script = [
        Reply(tool_calls=[Call("terminal", {"command": "echo first"}, id="call_1")]),
        Reply(text="Done."),
    ]
    page = await site.open(await import_long(site))
    await say(page, "Look")
    await expect(page.get_by_text("Done.")).to_be_visible()
    card = page.get_by_role("button", name="terminal")
    await card.click()
    await scroll_away_and_back(page, card)
    await expect(card).to_have_attribute("aria-expanded", "true")


async def test_command_to_approve_is_shown_whole_and_as_it_is(site: Site) -> None:
    command = "rm -rf build\r\x1b[8m; echo " + "x" * 50_000 + "; rm -rf everything"
    site.model.script = [Reply(tool_calls=[Call("terminal", {"command": command}, id="call_1")]), Reply(text="Not.")]
    page = await site.open()
    await say(page, "Clean up")
    shown = page.get_by_role("alertdialog").locator("pre")
    await expect(shown).to_contain_text("; rm -rf everything")
    await expect(shown).to_contain_text("rm -rf build")
    await expect(shown.locator("span")).to_have_count(0)
    await page.get_by_role("button", name="Deny").click()
    await expect(page.get_by_text("Not.")).to_be_visible()


async def test_progress_of_a_command_is_one_line(site: Site) -> None:
    command = r"printf '10%%\r\033[32m50%%\r100%%\033[0m\r\nnext\n'; until [ -e go ]; do sleep 0.05; done"
    site.model.script = [Reply(tool_calls=[Call("terminal", {"command": command}, id="call_1")]), Reply(text="Done.")]
    page = await site.open()
    await say(page, "Fetch")
    output = page.locator(".output pre")
    await expect(output).to_have_text("100%\nnext\n")
    await expect(output.locator(".ansi-32")).to_have_text("100%")
    (site.folder / "home" / "workspace" / "go").touch()
    await expect(page.get_by_text("Done.")).to_be_visible()


async def test_long_live_output_shows_its_end(site: Site) -> None:
    command = "seq 1 20000; until [ -e go ]; do sleep 0.05; done"
    site.model.script = [Reply(tool_calls=[Call("terminal", {"command": command}, id="call_1")]), Reply(text="Done.")]
    page = await site.open()
    await say(page, "Count")
    await page.get_by_role("button", name="terminal").click()
    await expect(page.locator(".output pre.live")).to_contain_text("\n20000\n")
    (site.folder / "home" / "workspace" / "go").touch()
    await expect(page.get_by_text("Done.")).to_be_visible()


async def test_every_answer_is_announced(site: Site) -> None:
    site.model.script = [Reply(text="One."), Reply(text="Two.")]
    page = await site.open()
    await say(page, "First")
    live = page.locator("[aria-live=polite] span")
    await expect(live).to_have_text("The answer is complete.")
    announced = await live.element_handle()
    await say(page, "Second")
    await expect(page.get_by_text("Two.")).to_be_visible()
    # Screen readers read a node that is new, not one that is as it was.
    await page.wait_for_function("node => !node.isConnected", arg=announced)
    await expect(live).to_have_text("The answer is complete.")


async def test_turn_that_has_not_begun_is_tried_again_not_continued(site: Site) -> None:
    site.model.script = [Reply(status=401, error="bad key")]
    page = await site.open()
    await say(page, "Hi")
    await expect(page.get_by_role("alert")).to_contain_text("Check the key")
    await expect(page.get_by_role("button", name="Try again")).to_have_count(1)
    await expect(page.get_by_role("button", name="Continue")).to_have_count(0)


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head, rows = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0), (b"\0" + b"\x80" * width) * height
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


async def test_images_keep_their_proportions(site: Site) -> None:
    site.model.script = [Reply(text="Seen.")]
    page = await site.open()
    await expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    files = [("wide.png", png(600, 60)), ("tall.png", png(60, 600))]
    await page.locator("input[type=file]").set_input_files(
        [{"name": name, "mimeType": "image/png", "buffer": content} for name, content in files]
    )
    await say(page, "Look")
    await expect(page.get_by_text("Seen.")).to_be_visible()
    ratios = await page.locator(".user img").evaluate_all("images => images.map(i => i.clientWidth / i.clientHeight)")
    assert ratios == [pytest.approx(10, rel=0.1), pytest.approx(0.1, rel=0.1)]


async def test_key_decides_about_nothing_that_is_not_in_view(site: Site) -> None:
    site.model.script = [
        Reply(text="Look.\n\n" * 10, tool_calls=[Call("terminal", {"command": "rm -rf build"}, id="call_1")]),
        Reply(text="Done."),
    ]
    page = await site.open(await import_long(site))
    await say(page, "Clean up")
    card = page.get_by_role("alertdialog")
    await expect(card).to_be_visible()
    messages = page.locator(".messages")
    await messages.hover(position={"x": 5, "y": 5})
    is_below = "card => card.getBoundingClientRect().top > innerHeight"
    while not await card.evaluate(is_below):
        await page.mouse.wheel(0, -100)
        await page.evaluate("new Promise(requestAnimationFrame)")
    await messages.focus()
    await page.keyboard.press("a")
    await expect(card).to_be_in_viewport(ratio=0.95)
    await expect(card.get_by_role("button", name="Allow once")).to_be_enabled()
    done = page.get_by_text("Done.")
    async with asyncio.timeout(DEADLINE_S):
        while not await done.is_visible():  # rows above may still move the card
            await page.keyboard.press("a")
            await page.evaluate("new Promise(requestAnimationFrame)")


async def test_duration_of_a_tool_stays_when_its_turn_has_ended(site: Site) -> None:
    site.model.script = [
        Reply(tool_calls=[Call("write_file", {"path": "a.txt", "content": "one"}, id="call_1")]),
        Reply(text="Done."),
    ]
    page = await site.open()
    await say(page, "Write")
    await expect(page.get_by_text("Done.")).to_be_visible()
    # Of a stored turn, tokens and duration are not shown.
    await expect(page.get_by_role("link", name="Timeline of this turn")).to_be_visible()
    await expect(page.locator(".turn-end")).not_to_contain_text("tokens")
    await expect(page.get_by_role("article", name="write_file").locator(".tool-state")).to_contain_text("s")
