"""The pages beside the conversations, and what axe-core says about all of them."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from playwright.async_api import Page, expect

from support.browser import Site, say
from support.model_server import Call, Reply

pytestmark = pytest.mark.asyncio(loop_scope="session")

AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
PAGES = {
    "runs": "Runs",
    "jobs": "Jobs",
    "skills": "Skills",
    "memory": "Memory",
    "usage": "Usage",
    "health": "Health",
    "mcp": "MCP servers",
    "keys": "API keys",
    "model": "Model",
    "settings": "Settings",
}


async def faults(page: Page) -> list[str]:
    """What axe-core finds, with the first place of each; of dark colours only their contrast is looked at."""
    if not await page.evaluate("'axe' in window"):
        # Evaluated by the debugger, so that the page's policy does not have to allow it.
        await page.evaluate(AXE.read_text())
    report = await page.evaluate("axe.run({resultTypes: ['violations']})")
    await page.emulate_media(color_scheme="dark")
    dark = await page.evaluate("axe.run({resultTypes: ['violations'], runOnly: ['color-contrast']})")
    await page.emulate_media(color_scheme="light")
    return [
        f"{violation['id']}: {violation['help']} {[node['html'][:200] for node in violation['nodes'][:2]]}"
        for violation in report["violations"] + dark["violations"]
    ]


async def test_axe_finds_nothing(site: Site) -> None:
    site.model.script = [
        Reply(text="Look:", reasoning="Hm.", tool_calls=[Call("terminal", {"command": "echo hello"}, id="call_1")]),
        Reply(
            text="# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n- [x] done\n\n> quoted `code` [link](https://example.org)\n\n```python\nprint('x') # y\n```\n\n$x^2$"
        ),
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"}, id="call_2")]),
    ]
    page = await site.open()
    await expect(page.locator(".tries")).to_be_visible()
    assert await faults(page) == []
    await say(page, "Look around")
    await expect(page.locator(".prose math")).to_be_visible()
    await page.locator(".tool-head").click()
    await page.get_by_role("button", name="Details").click()
    await expect(page.locator(".code .hljs-built_in")).to_be_visible()
    assert await faults(page) == []
    await say(page, "Clean up")
    await expect(page.get_by_role("alertdialog")).to_be_visible()
    assert await faults(page) == []
    await page.keyboard.press("Control+k")
    await expect(page.get_by_role("combobox", name="Search for commands")).to_be_focused()
    assert await faults(page) == []
    await page.keyboard.press("Escape")
    for name, title in PAGES.items():
        await page.goto(f"{site.gateway.url}/#/{name}")
        await expect(page.get_by_role("heading", name=title, exact=True).first).to_be_visible()
        await expect(page.locator(".page-body > *").first).to_be_visible()
        await expect(page.get_by_text("Loading…")).to_have_count(0)
        if name == "settings":
            # A few rows show what two hundred do.
            await page.get_by_role("searchbox", name="Filter").fill("agent.max")
        assert await faults(page) == [], name


async def test_axe_finds_nothing_at_the_sign_in(empty_site: Site) -> None:
    await empty_site.serve(api_server={"key": "sk-correct-horse-battery"})
    page = await empty_site.open()
    await expect(page.get_by_label("Key")).to_be_visible()
    assert await faults(page) == []


async def test_a_run_has_a_timeline(site: Site) -> None:
    site.model.script = [
        Reply(tool_calls=[Call("terminal", {"command": "sleep 0.2"}, id="call_1")]),
        Reply(text="Done."),
    ]
    page = await site.open()
    await say(page, "Sleep")
    await expect(page.get_by_text("Done.")).to_be_visible()
    await page.get_by_role("link", name="Timeline of this turn").click()
    rows = page.get_by_role("region", name="Timeline").locator("tbody tr")
    await expect(rows.locator(".span-model")).to_have_count(2)
    await expect(rows.locator(".span-tool")).to_have_count(1)
    await expect(page.get_by_text("completed")).to_be_visible()
    await page.get_by_role("link", name="To the conversation").click()
    await expect(page.get_by_text("Done.")).to_be_visible()
    await page.goto(f"{site.gateway.url}/#/runs")
    await expect(page.get_by_role("region", name="Runs").get_by_role("link", name="Sleep")).to_be_visible()


async def test_jobs_are_made_run_and_paused(empty_site: Site) -> None:
    site = empty_site
    await site.serve(cron={"enabled": True})
    site.model.script = [Reply(text="All is well.")]
    page = await site.open("#/jobs")
    await page.get_by_role("button", name="New job").click()
    await page.get_by_label("Name").fill("Look at the garden")
    await page.get_by_label("Schedule").fill("nonsense")
    await page.get_by_label("What to do").fill("Say how the garden is.")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_role("alert")).to_contain_text("nonsense")
    await page.get_by_label("Schedule").fill("every 2h")
    await page.get_by_role("button", name="Save").click()
    row = page.locator("tr", has_text="Look at the garden")
    await expect(row).to_contain_text("every 2h")
    await row.get_by_role("button", name="Actions").click()
    await page.get_by_role("menuitem", name="Run now").click()
    await expect(row.locator(".badge")).to_have_text("completed")
    await row.get_by_role("button", name="Actions").click()
    await page.get_by_role("menuitem", name="History").click()
    await expect(page.get_by_role("dialog").get_by_text("completed")).to_be_visible()
    await page.keyboard.press("Escape")
    await row.get_by_role("button", name="Actions").click()
    await page.get_by_role("menuitem", name="Pause").click()
    await expect(row).to_contain_text("paused")
    await row.get_by_role("button", name="Actions").click()
    await page.get_by_role("menuitem", name="Delete").click()
    element = page.get_by_role("dialog", name="Delete “Look at the garden”?")
    await element.get_by_role("button", name="Cancel").click()
    await expect(row).to_be_visible()
    await row.get_by_role("button", name="Actions").click()
    await page.get_by_role("menuitem", name="Delete").click()
    await element.get_by_role("button", name="Delete").click()
    await expect(page.get_by_text("No jobs yet.")).to_be_visible()


async def test_a_key_is_made_and_works_once_it_is_configured(site: Site) -> None:
    page = await site.open("#/keys")
    name = page.get_by_label("Name")
    await name.fill("Not a name")
    await page.get_by_role("button", name="Make a key").click()
    assert await name.evaluate("field => field.validity.patternMismatch")
    await name.fill("kitchen-tablet")
    await page.get_by_role("button", name="Make a key").click()
    key = await page.locator("form .line code").inner_text()
    entry = yaml.safe_load(await page.locator("form .output pre").inner_text())
    assert key not in str(entry)
    await expect(page.get_by_role("heading", name="Revoke a key")).to_be_visible()
    config = site.folder / "home" / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | entry))
    await site.gateway.end()
    await site.gateway.start()
    second = await site.open()
    await second.get_by_label("Key").fill(key)
    await second.get_by_role("button", name="Sign in").click()
    await expect(second.locator(".foot-row")).to_contain_text("kitchen-tablet")


async def test_keys_are_listed_with_their_scopes(empty_site: Site) -> None:
    site, key = empty_site, "sk-correct-horse-battery"
    names = ["kitchen", "garage", "attic", "cellar", "garden", "porch"]
    keys = [{"name": name, "key": f"sk-{name}-{name}-{name}", "scopes": ["chat", "runs"]} for name in names]
    await site.serve(api_server={"key": key, "keys": keys})
    page = await site.open("#/keys", viewport={"width": 1280, "height": 600})
    await page.get_by_label("Key", exact=True).fill(key)
    await page.get_by_role("button", name="Sign in").click()
    rows = page.get_by_role("region", name="API keys").locator("tbody tr")
    await expect(rows.first).to_contain_text("this sign-in")
    await expect(rows.last).to_contain_text("chat, runs")
    await expect(rows).to_have_count(7)
    for row in await rows.all():
        await row.scroll_into_view_if_needed()
        await expect(row).to_be_in_viewport()


async def test_jobs_that_are_turned_off_say_how_to_turn_them_on(site: Site) -> None:
    page = await site.open("#/jobs")
    await expect(page.get_by_role("alert")).to_contain_text("hermes config set cron.enabled true")
    await expect(page.get_by_role("button", name="New job")).to_have_count(0)


async def test_memory_and_skills_are_edited(site: Site) -> None:
    page = await site.open("#/memory")
    notes = page.get_by_role("region", name="Notes")
    await notes.get_by_role("textbox").fill("The bins go out on Monday.")
    await notes.get_by_role("button", name="Add").click()
    await expect(notes.locator("li")).to_have_text(["The bins go out on Monday."])
    await notes.get_by_role("button", name="Edit").click()
    await notes.locator("li textarea").fill("The bins go out on Tuesday.")
    await notes.get_by_role("button", name="Save").click()
    await expect(notes.locator("li")).to_have_text(["The bins go out on Tuesday."])
    assert "Tuesday" in str(await site.gateway.get("/api/memory"))
    await notes.get_by_role("button", name="Delete").click()
    await expect(notes).to_contain_text("Nothing yet.")
    await page.locator(".toast", has_text="Entry deleted.").get_by_role("button", name="Undo").click()
    await expect(notes.locator("li")).to_have_text(["The bins go out on Tuesday."])
    await page.goto(f"{site.gateway.url}/#/skills/+")
    await page.get_by_label("Name").fill("water-plants")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_role("button", name="Delete")).to_be_visible()
    text = page.get_by_label("Text (SKILL.md)")
    await expect(text).to_have_value(
        "---\nname: water-plants\ndescription: When to use it, in a sentence.\n---\n\n# Steps\n\n1. …\n"
    )
    await text.fill("---\nname: water-plants\ndescription: Water the plants.\n---\n\n# Steps\n\n1. Slowly.\n")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_text("Saved.")).to_be_visible()
    await page.goto(f"{site.gateway.url}/#/skills")
    await expect(page.locator(".cards li", has_text="water-plants")).to_contain_text("Water the plants.")
    await page.get_by_role("link", name="water-plants").click()
    await page.get_by_role("button", name="Delete").click()
    await page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    await expect(page.locator(".cards li", has_text="water-plants")).to_have_count(0)


async def test_settings_show_their_source_and_are_changed(site: Site) -> None:
    page = await site.open("#/settings")
    await page.get_by_role("searchbox", name="Filter").fill("agent.max_turns")
    row = page.locator("tr", has_text="agent.max_turns")
    await expect(row).to_contain_text("default")
    await expect(row).to_contain_text("How often the model may be asked")
    # What a setting does is searched too.
    await page.get_by_role("searchbox", name="Filter").fill("How often the MODEL")
    await expect(row).to_be_visible()
    await row.get_by_role("button", name="Change agent.max_turns").click()
    await row.get_by_role("textbox").fill("37")
    await row.get_by_role("button", name="Save").click()
    await expect(row).to_contain_text("config.yaml")
    await expect(row).to_contain_text("37")
    assert "37" in (site.folder / "home" / "config.yaml").read_text()


USED = {
    **dict.fromkeys(("turns", "input_tokens", "output_tokens", "tool_calls", "cache_read_tokens"), 4000),
    **dict.fromkeys(("failed", "tool_errors"), 1),
    "cost_usd": 0.0034,
    "first_token_p50": 0.2,
    "first_token_p95": 0.4,
    "turn_seconds": 600,
    "tool_seconds": 119.7,
}


@pytest.mark.parametrize(("locale", "texts"), [("en-GB", ["4,000", "$0.0034"]), ("de-DE", ["4.000", "0,0034\xa0$"])])
async def test_usage_is_shown_by_day_model_and_owner(empty_site: Site, locale: str, texts: list[str]) -> None:
    site, key = empty_site, "sk-correct-horse-battery"
    keys = [{"name": "kitchen", "key": "sk-kitchen-kitchen", "scopes": ["chat"]}]
    await site.serve(api_server={"key": key, "keys": keys})
    page = await site.open(locale=locale)
    await page.locator("form input").fill(key)
    await page.keyboard.press("Enter")
    await expect(page.locator(".tries")).to_be_visible()
    row = {**USED, "day": datetime.now(UTC).date().isoformat(), "model": "large", "owner": "kitchen"}
    await page.route("**/api/usage?*", lambda route: route.fulfill(json={"data": [row], "total": USED}))
    await page.evaluate("location.hash = '#/usage'")
    await expect(page.locator(".plot canvas")).to_have_count(6)
    for group in ("large", "kitchen"):
        figures = page.locator("tr", has_text=group)
        for text in (*texts, "200 ms", "2 min"):
            await expect(figures).to_contain_text(text)


async def test_another_model_is_connected(site: Site) -> None:
    site.model.models = [{"id": "better", "object": "model"}]
    site.model.script = [Reply(text="ready")] * 4
    page = await site.open("#/model")
    await page.get_by_label("Service").select_option("Another address")
    await page.get_by_role("textbox", name="Address").fill(site.model.url + "/v1")
    await page.get_by_label("Key", exact=True).fill("sk-of-the-model-service")
    await page.get_by_role("button", name="Ask for models").click()
    await expect(page.get_by_role("combobox", name="Model")).to_have_value("better")
    await page.get_by_role("button", name="Try").click()
    await expect(page.get_by_text("It answers")).to_be_visible()
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_text("is used from now on")).to_be_visible()
    await expect(page.locator(".tile").first).to_contain_text("better")
    stored = await page.evaluate("JSON.stringify([localStorage, sessionStorage])")
    assert "sk-of-the-model-service" not in stored


async def test_every_page_has_an_empty_state(site: Site) -> None:
    page = await site.open()
    texts = {
        "runs": "No runs yet.",
        "skills": "No skills yet.",
        "memory": "Nothing yet.",
        "usage": "No turns in this time.",
        "mcp": "No MCP servers are configured.",
        "keys": "No keys",
        "nonsense": "There is no such page",
    }
    for name, text in texts.items():
        await page.evaluate("name => { location.hash = `#/${name}` }", name)
        await expect(page.get_by_text(text).first).to_be_visible()
    await page.get_by_role("button", name="Archive", exact=True).click()
    await expect(page.get_by_text("The archive is empty.")).to_be_visible()
    await page.evaluate("location.hash = '#/settings'")
    await page.get_by_role("searchbox", name="Filter").fill("nothing of this name")
    await expect(page.get_by_text("No setting fits.")).to_be_visible()


async def test_every_page_shows_errors(site: Site) -> None:
    page = await site.open()
    await expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    fault = {"error": {"message": "The disk is away.", "type": "server_error", "param": None, "code": "x"}}
    wanted = re.compile(r"/(api/(jobs|memory|usage|mcp|keys|model|settings)|v1/(runs|skills)|health/detailed)")
    await page.route(wanted, lambda route: route.fulfill(status=503, json=fault))
    for name in PAGES:
        await page.evaluate("name => { location.hash = `#/${name}` }", name)
        alert = page.get_by_role("alert").filter(has_text="The disk is away.").first
        await expect(alert).to_be_visible()
        await expect(alert.get_by_role("button", name="Try again")).to_be_visible()
    await page.unroute(wanted)
    await page.get_by_role("alert").first.get_by_role("button", name="Try again").click()
    await expect(page.locator("tr", has_text="agent.max_turns")).to_be_visible()


async def test_page_reports_a_script_that_fails_to_load(site: Site) -> None:
    page = await site.open()
    await expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    await page.route("**/assets/health-*.js", lambda route: route.abort())
    await page.evaluate("location.hash = '#/health'")
    await expect(page.get_by_role("alert")).to_contain_text("did not load")
    await expect(page.get_by_role("button", name="Reload")).to_be_visible()


async def test_window_title_names_the_open_page(site: Site) -> None:
    site.model.script = [Reply(text="Done.")]
    page = await site.open()
    await expect(page).to_have_title("Hermes")
    await say(page, "Water the plants")
    await expect(page).to_have_title("Water the plants – Hermes")
    await page.evaluate("location.hash = '#/health'")
    await expect(page).to_have_title("Health – Hermes")


async def test_rows_of_tables_are_blocks_on_a_phone(site: Site) -> None:
    page = await site.open("#/health", viewport={"width": 320, "height": 640})
    row = page.locator("tr", has_text="Disk")
    await expect(row.locator("td").first).to_have_attribute("data-label", "State")
    place = page.get_by_role("region", name="Checks")
    assert await place.evaluate("node => node.scrollWidth <= node.clientWidth")


async def test_a_menu_gives_the_focus_back(site: Site) -> None:
    site.model.script = [Reply(text="Done.")]
    page = await site.open()
    await say(page, "Water the plants")
    button = page.locator(".entry").get_by_role("button")
    await button.focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("menuitem", name="Pin")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(button).to_be_focused()
    await expect(page.get_by_role("menu")).to_have_count(0)


async def test_form_in_a_dialog_stays_when_text_is_selected_beyond_its_edge(empty_site: Site) -> None:
    await empty_site.serve(cron={"enabled": True})
    page = await empty_site.open("#/jobs")
    await page.get_by_role("button", name="New job").click()
    name = page.get_by_label("Name")
    await name.fill("Look at the garden")
    box = await name.bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + 60, box["y"] + 10)
    await page.mouse.down()
    await page.mouse.move(5, box["y"] + 10)
    await page.mouse.up()
    await expect(name).to_have_value("Look at the garden")
    await page.mouse.click(5, 5)
    await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_first_key_is_explained_where_there_is_none(site: Site) -> None:
    page = await site.open("#/keys", viewport={"width": 320, "height": 600})
    await expect(page.get_by_text("Make your own first")).to_contain_text("hermes gateway key")
    await page.get_by_label("Name").fill("kitchen-tablet")
    await page.get_by_role("button", name="Make a key").click()
    body = page.locator(".page-body")
    await expect(body.locator("form .line code")).to_be_visible()
    assert await body.evaluate("body => body.scrollWidth <= body.clientWidth")


async def test_page_of_a_profile_stays_in_its_profile(empty_site: Site) -> None:
    site = empty_site
    folder = site.folder / "home" / "profiles" / "garden"
    (folder / "workspace").mkdir(parents=True)
    (folder / "workspace" / "plan.pdf").write_bytes(b"%PDF-1.7 the beds")
    model = {"provider": "custom", "default": "m", "base_url": site.model.url + "/v1", "api_key": "k"}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    await site.serve(api_server={"profiles": ["garden"]})
    site.model.script = [Reply(text="Here: MEDIA:plan.pdf")]
    page = await site.open("p/garden/")
    await say(page, "Where is the plan?")
    async with page.expect_download() as download:
        await page.locator(".answer a", has_text="plan.pdf").click()
    assert (await (await download.value).path()).read_bytes() == b"%PDF-1.7 the beds"
    await page.get_by_role("button", name="New conversation").first.click()
    await page.get_by_role("textbox", name="Message").fill("For the garden")
    await page.goto(site.gateway.url)
    await expect(page.get_by_text("No conversations yet.")).to_be_visible()
    await expect(page.get_by_role("textbox", name="Message")).to_have_value("")
