"""What is written but not sent, or sent but not answered, survives a reload and is there once."""

import asyncio

import pytest
from playwright.async_api import Page, Route, expect

from support.browser import Site, say
from support.model_server import Reply
from support.waiting import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

RUNS = "**/v1/runs"
NOTES = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"remember the milk"}


async def start_conversation(site: Site) -> Page:
    """A conversation with one turn."""
    site.model.script = [Reply(text="Hello."), Reply(text="There it is.")]
    page = await site.open()
    await say(page, "Hi")
    await expect(page.locator(".turn-end")).to_be_visible()
    return page


async def lose_answer(page: Page) -> asyncio.Event:
    """Have the server get a message without the page being told; set once the server has answered."""
    received = asyncio.Event()

    async def lose(route: Route) -> None:
        if not received.is_set():
            await route.fetch()
            received.set()
        await route.abort()

    await page.route(RUNS, lose)
    return received


async def attach(page: Page) -> None:
    await page.locator("input[type=file]").set_input_files([NOTES])
    await expect(page.locator(".uploads li")).to_have_text("notes.txt")
    # The browser keeps it a moment later.
    await page.wait_for_function(
        """() => new Promise((resolve, reject) => {
            const opening = indexedDB.open("hermes.files");
            opening.onerror = reject;
            opening.onsuccess = () => {
                const counting = opening.result.transaction("files").objectStore("files").count();
                counting.onsuccess = () => { opening.result.close(); resolve(counting.result === 1); };
            };
        })"""
    )


async def sent_once(page: Page, site: Site) -> None:
    box = page.get_by_role("textbox", name="Message")
    for _ in range(2):
        await expect(page.locator(".answer")).to_have_text(["Hello.", "There it is."])
        await expect(page.locator(".bubble")).to_have_text(["Hi", "Do not lose this"])
        await expect(box).to_have_value("")
        await page.reload()
    assert len(site.model.requests) == 2


async def test_a_message_that_the_server_did_not_get_is_sent_after_a_reload(site: Site) -> None:
    page = await start_conversation(site)
    await page.route(RUNS, lambda route: route.abort())
    await say(page, "Do not lose this")
    await expect(page.locator(".bubble", has_text="Do not lose this")).to_be_visible()
    await page.reload()
    await expect(page.locator(".bubble")).to_have_text(["Hi", "Do not lose this"])
    await expect(page.get_by_text("Connection lost.")).to_be_visible()
    await expect(page.get_by_role("textbox", name="Message")).to_have_value("")
    await page.unroute(RUNS)
    await sent_once(page, site)


@pytest.mark.parametrize("with_file", [False, True])
async def test_a_message_that_the_server_got_unseen_is_shown_once(site: Site, with_file: bool) -> None:
    page = await start_conversation(site)
    if with_file:
        await attach(page)
    received = await lose_answer(page)
    await say(page, "Do not lose this")
    async with asyncio.timeout(DEADLINE_S):
        await received.wait()
    await page.unroute(RUNS)
    await page.reload()
    await sent_once(page, site)
    await expect(page.locator(".file-chip")).to_have_count(int(with_file))


async def test_a_message_that_is_refused_after_a_reload_is_a_draft(site: Site) -> None:
    page = await start_conversation(site)
    fault = {
        "error": {"message": "Too many.", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
    }
    reloaded = asyncio.Event()

    async def answer(route: Route) -> None:
        if reloaded.is_set():
            await route.fulfill(status=429, json=fault)
        else:
            await route.abort()

    await page.route(RUNS, answer)
    await say(page, "Do not lose this")
    await expect(page.locator(".bubble", has_text="Do not lose this")).to_be_visible()
    page.once("framenavigated", lambda _frame: reloaded.set())
    await page.reload()
    await expect(page.get_by_role("textbox", name="Message")).to_have_value("Do not lose this")
    await expect(page.locator(".bubble")).to_have_text(["Hi"])


async def test_a_first_message_is_a_draft_until_its_conversation_is_made(site: Site) -> None:
    page = await site.open()
    box = page.get_by_role("textbox", name="Message")
    await expect(box).to_be_visible()
    requested = asyncio.Event()

    async def hold(route: Route) -> None:
        if route.request.method != "POST":
            await route.continue_()
            return
        requested.set()

    await page.route("**/api/sessions", hold)
    await say(page, "Do not lose this")
    async with asyncio.timeout(DEADLINE_S):
        await requested.wait()
    await page.reload()
    await expect(box).to_have_value("Do not lose this")


async def test_draft_is_kept_when_a_rejected_message_is_restored(site: Site) -> None:
    page = await start_conversation(site)
    box, refuse = page.get_by_role("textbox", name="Message"), asyncio.Event()

    async def hold(route: Route) -> None:
        await refuse.wait()
        await route.fulfill(status=400, json={"error": {"message": "No.", "type": "", "param": None, "code": "no"}})

    await page.route(RUNS, hold)
    await say(page, "First")
    await box.fill("Second")
    refuse.set()
    await expect(box).to_have_value("First\n\nSecond")


async def test_chosen_files_survive_a_reload(site: Site) -> None:
    site.model.script = [Reply(text="Seen.")]
    page = await site.open()
    await attach(page)
    await page.get_by_role("textbox", name="Message").fill("Look")
    await page.reload()
    await expect(page.locator(".uploads li")).to_have_text("notes.txt")
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_text("Seen.")).to_be_visible()
    assert "remember the milk" in str(site.model.requests[0].body)
    # What was sent is not kept.
    await page.reload()
    await expect(page.get_by_text("Seen.")).to_be_visible()
    await expect(page.locator(".uploads")).to_have_count(0)


async def test_files_that_the_browser_does_not_keep_are_asked_for_again(site: Site) -> None:
    context = await site.context()
    await context.add_init_script("Object.defineProperty(window, 'indexedDB', { value: undefined })")
    page = await site.open(context=context)
    await page.locator("input[type=file]").set_input_files([NOTES])
    await expect(page.locator(".uploads li")).to_have_text("notes.txt")
    await page.reload()
    notice = page.get_by_text("please add them again: notes.txt")
    await expect(notice).to_be_visible()
    await expect(page.locator(".uploads")).to_have_count(0)
    await page.locator("input[type=file]").set_input_files([NOTES])
    await expect(notice).to_have_count(0)


async def test_a_conversation_that_cannot_be_loaded_is_tried_again(site: Site) -> None:
    page = await start_conversation(site)
    fault = {"error": {"message": "The disk is away.", "type": "server_error", "param": None, "code": "x"}}
    await page.route("**/messages?*", lambda route: route.fulfill(status=503, json=fault))
    await page.reload()
    await expect(page.get_by_role("alert")).to_contain_text("The disk is away.")
    await page.unroute("**/messages?*")
    await expect(page.locator(".answer")).to_have_text(["Hello."])


async def choose(page: Page, name: str, content: bytes, mime: str = "") -> None:
    await page.locator("input[type=file]").set_input_files([{"name": name, "mimeType": mime, "buffer": content}])
    await expect(page.locator(".uploads li", has_text=name)).to_be_visible()


async def test_chosen_files_belong_to_their_conversation(site: Site) -> None:
    page = await start_conversation(site)
    conversation = page.url
    await attach(page)
    await page.get_by_role("button", name="New conversation").first.click()
    await expect(page.get_by_role("heading", name="What shall we do?")).to_be_visible()
    await expect(page.locator(".uploads")).to_have_count(0)
    await choose(page, "other.txt", b"another file", "text/plain")
    await page.goto(conversation)
    await page.reload()
    await expect(page.locator(".uploads li")).to_have_text("notes.txt")
    await say(page, "Read it")
    await expect(page.get_by_text("There it is.")).to_be_visible()
    assert "remember the milk" in str(site.model.requests[-1].body)
    assert "another file" not in str(site.model.requests[-1].body)
    await page.get_by_role("button", name="New conversation").first.click()
    await expect(page.locator(".uploads li")).to_have_text("other.txt")


async def test_files_of_any_kind_are_shown_as_files(site: Site) -> None:
    site.model.script = [Reply(text="Seen."), Reply(text="Seen again.")]
    page = await site.open()
    await expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    # Models take no drawings as images, and browsers know the types of few source files.
    await choose(
        page, "plan.svg", b"<svg xmlns='http://www.w3.org/2000/svg'><title>ground floor</title></svg>", "image/svg+xml"
    )
    await choose(page, "main.rs", "fn main() {} // grüße".encode())
    await choose(page, "scan.pdf", b"%PDF-1.7\n\xff\xfe\x00", "application/pdf")
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_text("Seen.")).to_be_visible()
    sent = str(site.model.requests[0].body["messages"])
    assert "ground floor" in sent and "grüße" in sent and "image_url" not in sent
    names = [" plan.svg", " main.rs", " scan.pdf"]
    await expect(page.locator(".file-chip")).to_have_text(names)
    await page.reload()
    await expect(page.locator(".file-chip")).to_have_text(names)
    await expect(page.locator(".bubble")).to_have_count(0)
    await page.get_by_role("button", name="Try again").click()
    await expect(page.get_by_text("Seen again.")).to_be_visible()
    await expect(page.locator(".file-chip")).to_have_text(names)
    assert "ground floor" in str(site.model.requests[1].body)


async def test_drafts_need_no_room_in_the_browser(site: Site) -> None:
    site.model.script = [Reply(text="Hello.")]
    context = await site.context()
    await context.add_init_script(
        "Object.defineProperty(window, 'sessionStorage', { get() { throw new Error('off'); } })"
    )
    page = await site.open(context=context)
    await say(page, "Hi")
    await expect(page.get_by_text("Hello.")).to_be_visible()
    await expect(page.get_by_role("textbox", name="Message")).to_have_value("")


async def test_conversation_that_is_deleted_elsewhere_takes_no_messages(site: Site) -> None:
    page = await start_conversation(site)
    await page.get_by_role("textbox", name="Message").fill("Still to be asked")
    await attach(page)
    async with site.gateway.client.delete(f"/api/sessions/{page.url.rpartition('/')[2]}") as answer:
        assert answer.status == 200, await answer.text()
    await expect(page.get_by_text("There is no such conversation")).to_be_visible()
    await expect(page.get_by_role("textbox", name="Message")).to_have_count(0)
    await page.locator("main").get_by_role("link", name="New conversation").click()
    await expect(page.get_by_role("textbox", name="Message")).to_have_value("Still to be asked")
    await expect(page.locator(".uploads li")).to_have_text("notes.txt")
