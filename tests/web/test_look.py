"""First visit, sign-in, faults that say what to do, sizes, colours and languages."""

import re

import pytest
import yaml
from playwright.async_api import Page, expect

from support.browser import Site, say
from support.model_server import Reply

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "sk-correct-horse-battery"


# Tables scroll sideways only: what is below is reached by scrolling the page.
CUT_TABLES = (
    "[...document.querySelectorAll('.table-place')].some((table) => table.scrollHeight > table.clientHeight + 1)"
)


async def overflow(page: Page) -> int:
    return int(await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


async def test_first_visit(site: Site) -> None:
    page = await site.open()
    await expect(page.get_by_role("heading", name="What shall we do?")).to_be_visible()
    tries = page.locator(".tries button")
    await expect(tries).to_have_count(3)
    await tries.nth(2).click()
    await expect(page.get_by_role("textbox", name="Message")).to_have_value(re.compile("hash function"))


async def test_sign_in_keeps_no_key(empty_site: Site) -> None:
    site = empty_site
    await site.serve(api_server={"key": KEY})
    site.model.script = [Reply(text="Hello.")]
    context = await site.context()
    page = await site.open(context=context)
    field = page.get_by_label("Key")
    await field.fill("wrong")
    await field.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("not a key of this server")
    await field.fill(KEY)
    await field.press("Enter")
    await say(page, "Hi")
    await expect(page.get_by_text("Hello.")).to_be_visible()
    await page.reload()
    await expect(page.get_by_text("Hello.")).to_be_visible()
    stored = await page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
    assert KEY not in stored
    assert [(cookie["httpOnly"], cookie["sameSite"]) for cookie in await context.cookies()] == [(True, "Strict")]
    async with page.expect_event("load"):  # the page begins anew
        await page.get_by_role("button", name="Sign out").click()
    await expect(field).to_be_visible()
    await page.reload()
    await expect(field).to_be_visible()


async def look_again(page: Page) -> None:
    """What a page asks the server when somebody returns to it; otherwise it asks every 4 or 15 s."""
    await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


async def sign_in(page: Page, key: str) -> None:
    await page.get_by_label("Key", exact=True).fill(key)
    await page.get_by_role("button", name="Sign in").click()


async def test_the_next_owner_sees_nothing_of_the_last(empty_site: Site) -> None:
    site = empty_site
    other = {
        "name": "other",
        "key": "sk-other-other-other",
        "scopes": ["chat", "runs", "sessions:read", "sessions:write"],
    }
    await site.serve(api_server={"key": KEY, "keys": [other]})
    site.model.script = [Reply(text="A private answer.")]
    context = await site.context()
    page = await site.open(context=context)
    box = page.get_by_role("textbox", name="Message")

    async def nothing_is_left() -> None:
        await expect(page.get_by_role("heading", name="What shall we do?")).to_be_visible()
        await expect(page.get_by_text("No conversations yet.")).to_be_visible()
        await expect(page.get_by_text("private")).to_have_count(0)
        await expect(box).to_have_value("")
        assert "private" not in await page.evaluate("JSON.stringify(sessionStorage)")

    await sign_in(page, KEY)
    await say(page, "A private question")
    await expect(page.get_by_text("A private answer.")).to_be_visible()
    conversation = page.url
    await box.fill("A private draft")
    await page.get_by_role("button", name="Sign out").click()
    await sign_in(page, other["key"])
    await nothing_is_left()
    # The same without a sign-out: the sign-in has ended by itself.
    await page.get_by_role("button", name="Sign out").click()
    await sign_in(page, KEY)
    await page.locator(".entry a", has_text="A private question").click()
    await expect(page.get_by_text("A private answer.")).to_be_visible()
    assert page.url == conversation
    await box.fill("A private draft")
    await context.clear_cookies()
    await look_again(page)
    await sign_in(page, other["key"])
    await nothing_is_left()


async def test_a_link_to_a_conversation_leads_there_after_the_sign_in(empty_site: Site) -> None:
    site = empty_site
    await site.serve(api_server={"key": KEY})
    site.model.script = [Reply(text="Hello.")]
    first = await site.open()
    await sign_in(first, KEY)
    await say(first, "Hi")
    await expect(first.get_by_text("Hello.")).to_be_visible()
    page = await site.open(first.url.split("/", 3)[3])
    await sign_in(page, KEY)
    await expect(page.get_by_text("Hello.")).to_be_visible()
    await expect(page.locator(".toast")).to_have_count(0)
    # What happens elsewhere is found, as after a reload.
    site.model.script = [Reply(text="Later.")]
    await (
        first.get_by_role("link", name="New conversation")
        .or_(first.get_by_role("button", name="New conversation"))
        .first.click()
    )
    await say(first, "Elsewhere")
    await expect(first.get_by_text("Later.")).to_be_visible()
    await look_again(page)
    await expect(page.locator(".entry", has_text="Elsewhere")).to_be_visible()


async def test_page_offers_only_what_the_key_allows(empty_site: Site) -> None:
    site = empty_site
    keys = [{"name": "reader", "key": "sk-reader-reader-reader", "scopes": ["sessions:read"]}]
    await site.serve(api_server={"key": KEY, "keys": keys})
    page = await site.open()
    await page.get_by_label("Key").fill("sk-reader-reader-reader")
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_text("may read conversations, not continue them")).to_be_visible()
    await page.get_by_text("Pages").click()
    await expect(page.locator(".tries button")).to_have_count(0)
    await expect(page.get_by_role("button", name="New conversation")).to_have_count(0)
    pages = page.get_by_role("navigation", name="Pages")
    await expect(pages.get_by_role("link", name="Usage")).to_be_visible()
    await expect(pages.get_by_role("link", name="API keys")).to_have_count(0)
    await expect(pages.get_by_role("link", name="Jobs")).to_have_count(0)


async def test_a_key_that_may_make_no_branch_is_offered_none(empty_site: Site) -> None:
    site = empty_site
    guest = {"name": "guest", "key": "sk-guest-guest-guest", "scopes": ["chat", "sessions:read"]}
    await site.serve(api_server={"key": KEY, "keys": [guest]})
    site.model.script = [Reply(text="Hello.")]
    turn = {"messages": [{"role": "user", "content": "Hi"}]}
    headers = {"Authorization": f"Bearer {guest['key']}", "X-Hermes-Session-Id": "talk"}
    async with site.gateway.client.post("/v1/chat/completions", json=turn, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    page = await site.open("#/c/talk")
    await sign_in(page, guest["key"])
    await expect(page.get_by_text("Hello.")).to_be_visible()
    await expect(page.get_by_role("button", name="Copy message")).to_have_count(1)
    for name in ("Edit", "Try again", "Send"):
        await expect(page.get_by_role("button", name=name, exact=True)).to_have_count(0)


@pytest.mark.parametrize(
    ("scopes", "note"),
    [(["chat"], "may not read conversations"), (["runs"], "may continue conversations, not begin them")],
)
async def test_page_has_no_composer_for_a_key_without_chat_scope(
    empty_site: Site, scopes: list[str], note: str
) -> None:
    site = empty_site
    keys = [{"name": "some", "key": "sk-some-some-some-some", "scopes": scopes}]
    await site.serve(api_server={"key": KEY, "keys": keys})
    page = await site.open()
    await page.get_by_label("Key").fill("sk-some-some-some-some")
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_text(note)).to_be_visible()
    await expect(page.get_by_role("textbox", name="Message")).to_have_count(0)


async def test_a_model_that_refuses_its_key(site: Site) -> None:
    site.model.script = [Reply(status=401, error="bad key")]
    page = await site.open()
    await say(page, "Hi")
    fault = page.get_by_role("alert")
    await expect(fault).to_contain_text("Check the key of the model service")
    await expect(fault.get_by_role("link", name="Model settings")).to_be_visible()
    site.model.script = [Reply(text="Better.")]
    await fault.get_by_role("button", name="Try again").click()
    await expect(page.get_by_text("Better.")).to_be_visible()


async def test_no_model(empty_site: Site) -> None:
    site = empty_site
    nobody = {"provider": "custom", "default": "m", "base_url": "http://127.0.0.1:9/v1", "api_key": "k"}
    await site.serve(model=nobody, agent={"api_max_retries": 0})
    page = await site.open()
    await say(page, "Hi")
    await expect(page.get_by_role("alert")).to_contain_text("The model service does not answer")


async def test_phone(site: Site) -> None:
    site.model.script = [
        Reply(
            text="| a | b | c | d |\n|---|---|---|---|\n"
            + "| a long cell | another long cell | and one | more |\n\n"
            + "`"
            + "x" * 200
            + "`"
        )
    ]
    page = await site.open(viewport={"width": 320, "height": 600}, has_touch=True, is_mobile=True)
    await say(page, "A table, please")
    await expect(page.locator(".prose table")).to_be_visible()
    assert await overflow(page) <= 0
    # While a turn runs there are more buttons.
    site.model.script = [Reply(text=["word "] * 6000, gap_s=0.05)]
    await say(page, "Talk")
    await expect(page.locator(".prose").last).to_contain_text("word")
    await page.locator(".composer textarea").fill("Next")
    stop = page.get_by_role("button", name="Stop")
    assert await stop.evaluate(
        "button => button.getBoundingClientRect().right <= button.closest('.composer').getBoundingClientRect().right"
    )
    await stop.click()
    await expect(page.get_by_text("Stopped.")).to_be_visible()
    await page.get_by_role("button", name="Conversations and pages").click()
    await expect(page.locator(".sidebar")).to_be_visible()
    assert await overflow(page) <= 0
    await page.locator(".entry a").click()
    await expect(page.locator(".sidebar")).to_have_count(0)
    for name in ("runs", "jobs", "usage", "settings", "health", "memory", "skills", "mcp", "keys", "model"):
        await page.evaluate("name => { location.hash = `#/${name}` }", name)
        await expect(page.locator(".page-body > *").first).to_be_visible()
        await expect(page.get_by_text("Loading…")).to_have_count(0)
        assert await overflow(page) <= 0, name
        assert not await page.evaluate(CUT_TABLES), name


async def test_dark_by_system_and_by_switch(site: Site) -> None:
    page = await site.open(color_scheme="dark")
    await expect(page.locator(".composer")).to_be_visible()
    body = page.locator("body")
    await expect(body).to_have_css("background-color", "rgb(23, 24, 27)")
    await page.get_by_role("button", name="Colours").click()
    await expect(body).to_have_css("background-color", "rgb(253, 253, 252)")
    await page.reload()
    await expect(page.locator(".composer")).to_be_visible()
    await expect(body).to_have_css("background-color", "rgb(253, 253, 252)")


async def test_german_and_right_to_left(site: Site) -> None:
    site.model.script = [Reply(text="مرحبا بالعالم")]
    page = await site.open(locale="de-DE")
    await expect(page.get_by_role("heading", name="Was wollen wir tun?")).to_be_visible()
    await expect(page.locator("html")).to_have_attribute("lang", "de")
    box = page.get_by_role("textbox", name="Nachricht")
    await box.fill("שלום")
    await box.press("Enter")
    await expect(page.get_by_text("مرحبا بالعالم")).to_be_visible()
    await expect(page.get_by_role("region", name="Heute")).to_be_visible()
    await page.get_by_role("button", name="Einzelheiten").click()
    await expect(page.get_by_role("checkbox", name="Dateien")).to_be_checked()
    for selector in (".bubble", ".prose .block > p"):
        await expect(page.locator(selector)).to_have_css("direction", "rtl")
    await page.goto(f"{site.gateway.url}/#/settings")
    await page.get_by_label("Sprache").select_option("en")
    await expect(page.get_by_role("heading", name="This browser")).to_be_visible()


async def test_page_requests_only_its_own_server(site: Site) -> None:
    site.model.script = [Reply(text="![x](https://example.org/track.png) and $x$ and\n\n```js\n1\n```\n")]
    context = await site.context()
    urls: list[str] = []
    context.on("request", lambda request: urls.append(request.url))
    page = await site.open(context=context)
    await say(page, "Hi")
    await expect(page.locator(".prose math")).to_be_visible()
    await expect(page.locator(".prose a", has_text="x")).to_have_attribute("href", "https://example.org/track.png")
    assert [url for url in urls if not url.startswith((site.gateway.url, "data:"))] == []


async def test_unreadable_address_is_a_missing_conversation(site: Site) -> None:
    page = await site.open("#/c/%E0%A4%A")
    await expect(page.get_by_text("There is no such conversation")).to_be_visible()
    await page.locator("main").get_by_role("link", name="New conversation").click()
    await expect(page.get_by_role("heading", name="What shall we do?")).to_be_visible()


async def test_lost_connection_is_shown_on_every_page(site: Site) -> None:
    page = await site.open("#/runs")
    await expect(page.get_by_text("No runs yet.")).to_be_visible()
    await site.gateway.end()
    await expect(page.get_by_text("Connection lost.")).to_be_visible()
    # The file of this page, or what it shows, is not there yet.
    await page.evaluate("location.hash = '#/memory'")
    await expect(page.get_by_role("alert")).to_be_visible()
    await site.gateway.start()
    await expect(page.get_by_text("Nothing yet.").first).to_be_visible()
    await expect(page.get_by_role("alert")).to_have_count(0)
    await expect(page.get_by_text("Connection lost.")).to_have_count(0)


async def test_keys_that_may_not_write_are_offered_no_choices(empty_site: Site) -> None:
    site = empty_site
    runner = {"name": "runner", "key": "sk-runner-runner-runner", "scopes": ["runs", "sessions:read"]}
    await site.serve(api_server={"key": KEY, "keys": [runner]})
    site.model.script = [Reply(text="Hello.")]
    headers = {"Authorization": f"Bearer {runner['key']}"}
    turn = {"input": "Hi", "session_id": "talk"}
    async with site.gateway.client.post("/v1/runs", json=turn, headers=headers) as answer:
        assert answer.status == 202, await answer.text()
    page = await site.open("#/c/talk")
    await sign_in(page, runner["key"])
    await expect(page.get_by_text("Hello.")).to_be_visible()
    await expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    await expect(page.get_by_role("combobox", name="Reasoning effort")).to_have_count(0)
    await page.get_by_role("button", name="Details").click()
    await expect(page.get_by_role("checkbox", name="Terminal")).to_be_disabled()
    # A key that may only read is offered neither turns nor what makes them.
    await site.gateway.end()
    config = site.folder / "home" / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["api_server"]["keys"] = [{**runner, "scopes": ["sessions:read"]}]
    config.write_text(yaml.safe_dump(settings))
    await site.gateway.start()
    await page.reload()
    await expect(page.get_by_text("Hello.")).to_be_visible()
    await expect(page.get_by_text("may read conversations, not continue them")).to_be_visible()
    await page.get_by_text("Pages").click()
    pages = page.get_by_role("navigation", name="Pages")
    await expect(pages.get_by_role("link", name="Usage")).to_be_visible()
    await expect(pages.get_by_role("link", name="Runs")).to_have_count(0)
    await page.keyboard.press("Control+k")
    options = page.locator(".palette-entry")
    await expect(options.filter(has_text="Next conversation")).to_be_visible()
    for command in ("New conversation", "Write a message", "Try again", "Allow the command"):
        await expect(options.filter(has_text=command)).to_have_count(0)
