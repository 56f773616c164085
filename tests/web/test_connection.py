"""A lost connection is not felt: nothing is shown twice, and nothing is lost."""

import pytest
from playwright.async_api import Page, expect
from test_chat import slowly

from support.browser import Site, say
from support.model_server import Call, Reply

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORDS = " ".join(f"w{number}" for number in range(160))


async def shown_whole(page: Page) -> None:
    await expect(page.locator(".turn-end")).to_be_visible()
    await expect(page.locator(".answer")).to_have_text([WORDS])
    await expect(page.locator(".bubble")).to_have_count(1)


async def test_reload_in_mid_stream(site: Site) -> None:
    site.model.script = [slowly(WORDS, 0.02)]
    page = await site.open()
    await say(page, "Count.")
    await expect(page.locator(".prose")).to_contain_text("w10 ")
    await page.reload()
    await expect(page.locator(".prose")).to_contain_text("w10 ")
    await shown_whole(page)
    assert len(site.model.requests) == 1


async def test_two_tabs_see_the_same(site: Site) -> None:
    site.model.script = [slowly(WORDS, 0.02), Reply(text="From the other.")]
    context = await site.context()
    first = await site.open(context=context)
    await say(first, "Count.")
    await expect(first.locator(".prose")).to_contain_text("w5 ")
    second = await site.open(first.url.split("/", 3)[3], context=context)
    for page in (first, second):
        await shown_whole(page)
    await say(second, "And you?")
    for page in (second, first):
        await expect(page.locator(".answer")).to_have_text([WORDS, "From the other."])
        await expect(page.locator(".bubble")).to_have_text(["Count.", "And you?"])


async def test_server_killed_in_mid_stream(site: Site) -> None:
    site.model.script = [slowly(WORDS, 0.02), slowly(WORDS, 0.02)]
    page = await site.open()
    await say(page, "Count.")
    await expect(page.locator(".prose")).to_contain_text("w20 ")
    await site.gateway.end()
    await expect(page.get_by_text("Connection lost.")).to_be_visible()
    await expect(page.locator(".prose")).to_contain_text("w20 ")
    await site.gateway.start()
    await expect(page.get_by_text("Connection lost.")).to_have_count(0)
    await shown_whole(page)
    await page.reload()
    await shown_whole(page)


async def test_server_restarted_while_a_tool_runs(site: Site) -> None:
    site.model.script = [
        Reply(
            text="First.",
            tool_calls=[Call("terminal", {"command": "until [ -e go ]; do sleep 0.05; done"}, id="call_1")],
        ),
        Reply(text="Done."),
    ]
    page = await site.open()
    await say(page, "Wait.")
    await expect(page.get_by_role("article", name="terminal")).to_be_visible()
    await site.gateway.end()
    await expect(page.get_by_text("Connection lost.")).to_be_visible()
    # What is sent meanwhile is sent when the server is back.
    await say(page, "Are you there?")
    (site.folder / "home" / "workspace" / "go").touch()
    site.model.script = [Reply(text="Done."), Reply(text="Here.")]
    await site.gateway.start()
    await expect(page.get_by_text("Here.")).to_be_visible()
    await expect(page.locator(".answer")).to_have_text(["First.", "Done.", "Here."])
    await expect(page.locator(".bubble")).to_have_text(["Wait.", "Are you there?"])


async def test_network_away_for_a_while(site: Site) -> None:
    site.model.script = [slowly(WORDS, 0.02)]
    context = await site.context()
    page = await site.open(context=context)
    await say(page, "Count.")
    await expect(page.locator(".prose")).to_contain_text("w10 ")
    await context.set_offline(True)
    await context.set_offline(False)
    await shown_whole(page)
