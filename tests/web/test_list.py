"""The list of conversations, the keyboard, and the palette."""

import contextlib

import pytest
from playwright.async_api import Page, expect

from hermes.store.sessions import SessionDB
from support.browser import Site, say
from support.model_server import Reply
from support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def create_conversations(site: Site, *texts: str) -> None:
    """Conversations with one message each, the last one first in the list."""
    site.model.script = [Reply(text=f"Answer to {text}") for text in texts]
    for text in texts:
        session = (await site.gateway.post("/api/sessions", {}, 201))["session"]["id"]
        await site.gateway.post(f"/api/sessions/{session}/chat", {"message": text})


async def has_sessions(site: Site, count: int) -> None:
    await until(lambda: site.gateway.get("/api/sessions?archived=all"), lambda body: body["total"] == count)


def entry(page: Page, title: str):  # type: ignore[no-untyped-def]
    return page.locator(".entry", has_text=title)


async def choose(page: Page, title: str, action: str) -> None:
    await entry(page, title).hover()
    await entry(page, title).get_by_role("button").click()
    await page.get_by_role("menuitem", name=action, exact=True).click()


async def test_search_as_you_type(site: Site) -> None:
    await create_conversations(site, "Plant the red tulips", "Paint the garden fence")
    page = await site.open()
    await page.get_by_role("searchbox", name="Search").press_sequentially("tuli")
    await expect(page.locator(".match mark").first).to_have_text("tuli")
    await expect(page.locator(".match", has_text="fence")).to_have_count(0)
    await page.locator(".match").first.click()
    await expect(page.locator(".bubble")).to_have_text("Plant the red tulips")
    await page.get_by_role("searchbox", name="Search").press("Escape")
    await expect(page.locator(".entry")).to_have_count(2)


async def test_pin_rename_archive_and_delete_with_undo(site: Site) -> None:
    await create_conversations(site, "Alpha", "Beta", "Gamma")
    page = await site.open()
    await expect(page.locator(".entry a")).to_have_text(["Gamma", "Beta", "Alpha"])
    await choose(page, "Alpha", "Pin")
    await expect(page.locator(".entry a")).to_have_text(["Alpha", "Gamma", "Beta"])
    await expect(page.get_by_role("region", name="Pinned")).to_contain_text("Alpha")
    await choose(page, "Beta", "Rename")
    field = page.get_by_role("textbox", name="Rename")
    await field.fill("Delta")
    await field.press("Enter")
    await expect(page.locator(".entry a")).to_have_text(["Alpha", "Gamma", "Delta"])
    await choose(page, "Gamma", "Archive")
    await expect(page.locator(".entry a")).to_have_text(["Alpha", "Delta"])
    await choose(page, "Delta", "Delete")
    await expect(page.locator(".entry a")).to_have_text(["Alpha"])
    await page.locator(".toast", has_text="deleted").get_by_role("button", name="Undo").click()
    await expect(page.locator(".entry a")).to_have_text(["Alpha", "Delta"])
    await page.get_by_role("button", name="Archive", exact=True).click()
    await expect(page.locator(".entry a")).to_have_text(["Gamma"])
    await choose(page, "Gamma", "Delete")
    # Whoever closes the message does not want to undo it.
    await page.locator(".toast", has_text="deleted").get_by_role("button", name="Close").click()
    await has_sessions(site, 2)


async def test_deletion_is_committed_when_its_toast_closes(site: Site) -> None:
    await create_conversations(site, "Alpha", "Beta")
    page = await site.open(context=await site.context(message_times=0.1))
    await choose(page, "Beta", "Delete")
    await has_sessions(site, 1)


async def forked(site: Site, text: str) -> str:
    """A conversation with three branches; the first of them."""
    await create_conversations(site, text)
    first: str = (await site.gateway.get("/api/sessions"))["data"][0]["id"]
    site.model.script = [Reply(text="Second answer"), Reply(text="Third answer")]
    for number in (2, 3):
        fork = (await site.gateway.post(f"/api/sessions/{first}/fork", {}, 201))["session"]["id"]
        await site.gateway.post(f"/api/sessions/{fork}/chat", {"message": f"{text}, otherwise {number}"})
    return first


async def test_a_forked_conversation_is_one_entry_that_is_archived_and_deleted_as_a_whole(site: Site) -> None:
    first = await forked(site, "Alpha")
    await create_conversations(site, "Beta")
    page = await site.open(f"#/c/{first}")
    entries = page.locator(".entry a")
    await expect(entries).to_have_count(2)
    # The entry is marked whichever of its branches is looked at.
    await expect(page.locator(".entry.open")).to_contain_text("Alpha")
    await choose(page, "Alpha", "Pin")
    await expect(page.get_by_role("region", name="Pinned").locator(".entry")).to_have_count(1)
    await expect(entries).to_have_count(2)
    await choose(page, "Alpha", "Unpin")
    await expect(page.get_by_role("region", name="Pinned")).to_have_count(0)
    await choose(page, "Alpha", "Archive")
    await expect(entries).to_have_text(["Beta"])
    await page.locator(".toast", has_text="Archived").get_by_role("button", name="Undo").click()
    await expect(entries).to_have_count(2)
    await choose(page, "Alpha", "Delete with all branches")
    await expect(entries).to_have_text(["Beta"])
    deleted = page.locator(".toast", has_text="Conversation deleted, with its 3 branches.")
    await deleted.get_by_role("button", name="Undo").click()
    await expect(entries).to_have_count(2)
    assert (await site.gateway.get("/api/sessions"))["total"] == 4
    await choose(page, "Alpha", "Delete with all branches")
    await expect(entries).to_have_text(["Beta"])
    await page.close()
    await has_sessions(site, 1)


@pytest.mark.parametrize("action", ["Archive", "Delete"])
async def test_a_refused_action_is_shown_and_nothing_is_done(site: Site, action: str) -> None:
    await create_conversations(site, "Alpha", "Beta")
    page = await site.open()
    await expect(page.locator(".entry a")).to_have_text(["Beta", "Alpha"])
    fault = {"error": {"message": "No room is left.", "type": "server_error", "code": None, "param": None}}
    await page.route("**/api/sessions/*", lambda route: route.fulfill(status=503, json=fault))
    await choose(page, "Beta", action)
    await expect(page.locator(".toast", has_text="No room is left.")).to_be_visible()
    await expect(page.locator(".toast", has_text="rchived")).to_have_count(0)
    await expect(page.locator(".toast", has_text="eleted")).to_have_count(0)
    await expect(page.locator(".entry a")).to_have_text(["Beta", "Alpha"])


async def test_deletion_is_committed_when_the_page_is_closed(site: Site) -> None:
    await create_conversations(site, "Alpha", "Beta")
    page = await site.open()
    await choose(page, "Beta", "Delete")
    await expect(page.locator(".toast", has_text="deleted")).to_be_visible()
    await page.close()
    await has_sessions(site, 1)


async def test_more_conversations_than_a_page_of_the_api_are_listed(site: Site) -> None:
    with contextlib.closing(SessionDB(site.gateway.folder / "state.db")) as sessions:
        for number in range(230):
            sessions.create_session(f"many-{number}", "api_server")
            sessions.append_message(f"many-{number}", "user", f"Number {number}")
    page = await site.open()
    await expect(page.locator(".entry")).to_have_count(60)
    for count in (120, 180, 230):
        await page.get_by_role("button", name="Show more").click()
        await expect(page.locator(".entry")).to_have_count(count)


async def test_a_conversation_is_exported(site: Site) -> None:
    await create_conversations(site, "Alpha")
    page = await site.open()
    async with page.expect_download() as download:
        await choose(page, "Alpha", "Export")
    path = await (await download.value).path()
    assert "Answer to Alpha" in path.read_text()


async def test_keys_do_everything(site: Site) -> None:
    await create_conversations(site, "Alpha", "Beta")
    site.model.script = [Reply(text="By key.")]
    page = await site.open()
    palette = page.get_by_role("combobox", name="Search for commands")
    await expect(page.locator(".entry")).to_have_count(2)
    await page.locator(".brand").focus()
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog", name="Keys")).to_contain_text("Command palette")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await page.keyboard.press("j")
    await expect(page.locator(".bubble")).to_have_text("Beta")
    await page.keyboard.press("Control+k")
    await expect(palette).to_be_focused()
    await page.keyboard.type("alph")
    await page.keyboard.press("Enter")
    await expect(page.locator(".bubble")).to_have_text("Alpha")
    await page.keyboard.press("Control+k")
    await expect(palette).to_be_focused()
    await page.keyboard.type("health")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Health")).to_be_visible()
    await page.locator(".brand").focus()
    await page.keyboard.press("n")
    await expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    await page.keyboard.type("Written")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("By key.")).to_be_visible()
    await page.locator(".messages").focus()
    await page.keyboard.press("t")
    await expect(page.locator("html")).to_have_attribute("data-theme", "light")
    await page.keyboard.press("s")
    await expect(page.locator(".sidebar")).to_have_count(0)
    await page.keyboard.press("/")
    await expect(page.get_by_role("searchbox", name="Search")).to_be_focused()


async def test_a_message_far_back_is_reached_from_the_search(site: Site) -> None:
    messages = [
        {"role": "user" if number % 2 == 0 else "assistant", "content": f"message number {number}"}
        for number in range(1200)
    ]
    messages[40]["content"] = "the needle in the haystack"
    response = await site.gateway.post(
        "/api/sessions/import",
        {"sessions": [{"format": "hermes.session/1", "id": "long", "title": "Long", "messages": messages}]},
    )
    assert response["imported"] == 1, response
    page = await site.open("#/c/long")
    await expect(page.get_by_text("message number 1199")).to_be_visible()
    # Only what is near is in the document.
    assert await page.locator(".row").count() < 80
    await page.get_by_role("searchbox", name="Search").fill("needle")
    await page.locator(".match").first.click()
    await expect(page.get_by_text("the needle in the haystack").last).to_be_in_viewport()
    await expect(page.get_by_text("message number 42")).to_be_visible()
    await page.get_by_role("button", name="To the newest message").click()
    await expect(page.get_by_text("message number 1199")).to_be_in_viewport()


async def test_the_end_stays_in_view_when_a_message_grows_while_the_list_scrolls(site: Site) -> None:
    messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"message {n}"} for n in range(60)]
    whole = {"format": "hermes.session/1", "id": "grows", "title": "Grows", "messages": messages}
    await site.gateway.post("/api/sessions/import", {"sessions": [whole]})
    page = await site.open("#/c/grows")
    await expect(page.get_by_text("message 59", exact=True)).to_be_in_viewport()
    # The browser tells of the last scrolling when the message has grown already.
    await page.evaluate(
        """() => {
            document.querySelector(".row.last").style.paddingBottom = "600px";
            document.querySelector(".messages").dispatchEvent(new Event("scroll"));
        }"""
    )
    await page.wait_for_function(
        """() => {
            const list = document.querySelector(".messages");
            return list.scrollHeight - list.scrollTop - list.clientHeight < 2;
        }"""
    )
    # Whoever scrolls up stays there.
    await page.locator(".messages").hover()
    await page.mouse.wheel(0, -900)
    await expect(page.get_by_role("button", name="To the newest message")).to_be_visible()
    await page.evaluate("document.querySelector('.row').style.paddingTop = '5px'")
    await expect(page.get_by_role("button", name="To the newest message")).to_be_visible()


async def test_palette_scrolls_to_the_selected_entry(site: Site) -> None:
    page = await site.open(viewport={"width": 1280, "height": 500})
    await expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    await page.keyboard.press("Control+k")
    options = page.locator(".palette-entry")
    await expect(options).to_have_count(12)
    for _ in range(11):
        await page.keyboard.press("ArrowDown")
    await expect(options.last).to_have_attribute("aria-selected", "true")
    await expect(options.last).to_be_in_viewport(ratio=0.9)
    await page.get_by_role("combobox", name="Search for commands").fill("nothing of this name")
    await expect(page.get_by_role("dialog").get_by_text("Nothing found")).to_be_visible()


async def test_rejected_message_is_kept_in_the_composer(site: Site) -> None:
    page = await site.open()
    await expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    await page.route("**/v1/runs", lambda route: route.fulfill(status=429, json=_REFUSED))
    await say(page, "Important")
    await expect(page.locator(".toast")).to_contain_text("Too many. Wait a moment")
    await expect(page.get_by_role("textbox", name="Message")).to_have_value("Important")


_REFUSED = {"error": {"message": "Too many.", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}}


async def test_renaming_ends_where_it_began(site: Site) -> None:
    await create_conversations(site, "Alpha")
    page = await site.open()
    await page.locator(".entry a").click()
    await choose(page, "Alpha", "Rename")
    await expect(page.get_by_role("textbox", name="Rename")).to_be_focused()
    await page.keyboard.type("Beta")
    await page.keyboard.press("Enter")
    await expect(page.locator(".head h1")).to_have_text("Beta")
    await expect(page.locator(".entry a")).to_have_text("Beta")
    await expect(page.locator(".entry a")).to_be_focused()
