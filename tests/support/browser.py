"""A real browser with pages of a real server, whose model is scripted."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, async_playwright, expect

from .gateway import Gateway
from .model_server import ModelServer

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDE = {"width": 1280, "height": 820}
# A busy machine takes its time.
TIMEOUT_MS = 60_000
expect.set_options(timeout=TIMEOUT_MS)
# Messages of the page that go by themselves, in milliseconds (`web/src/state/toasts.ts`). A busy machine may take longer to
# look at them than a person does, so windows of tests show them for ten times as long, or where their end is waited for, for
# a tenth of it.
_MESSAGE_TIMES = """
const later = window.setTimeout;
window.setTimeout = (work, ms, ...given) => later(work, [4500, 7000, 9000].includes(ms) ? %s * ms : ms, ...given);
"""
# What the browser says by itself about answers that a test asks for.
_EXPECTED = ("Failed to load resource", "net::ERR_")


def executable() -> str:
    """The machine's own browser; none is ever downloaded."""
    program = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if program is None:
        raise FileNotFoundError("There is no Chromium here. On Debian and Ubuntu: apt-get install chromium")
    return program


@asynccontextmanager
async def started_browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        yield browser
        await browser.close()


async def say(page: Page, text: str) -> None:
    box = page.locator(".composer textarea")
    await box.fill(text)
    await box.press("Enter")


class Site:
    """A server with its scripted model, and browser windows that show its page."""

    def __init__(self, browser: Browser, model: ModelServer, folder: Path) -> None:
        self.browser, self.model, self.folder = browser, model, folder
        self.gateway: Gateway
        self.contexts: list[BrowserContext] = []
        # Of every window, unless it says otherwise.
        self.options: dict[str, Any] = {"viewport": WIDE, "locale": "en-GB"}
        # What no page may ever say: errors of scripts, and violations of the policy.
        self.complaints: list[str] = []

    async def serve(self, **settings: Any) -> None:
        """Start the server; it keeps its address when it is started again."""
        custom = {"provider": "custom", "default": "m", "base_url": self.model.url + "/v1", "api_key": "k"}
        self.gateway = Gateway(self.folder / "home", **{"model": custom, **settings})
        await self.gateway.start()
        self.gateway.port = int(self.gateway.url.rpartition(":")[2])

    async def context(self, *, message_times: float = 10, **options: Any) -> BrowserContext:
        context = await self.browser.new_context(**{**self.options, **options})
        context.set_default_timeout(TIMEOUT_MS)
        await context.add_init_script(_MESSAGE_TIMES % message_times)
        self.contexts.append(context)
        return context

    async def open(self, path: str = "", context: BrowserContext | None = None, **options: Any) -> Page:
        """Open a window with the page."""
        page = await (context or await self.context(**options)).new_page()
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(f"{error}\n{error.stack}"))
        await page.goto(f"{self.gateway.url}/{path}")
        return page

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(word in message.text for word in _EXPECTED):
            self.complaints.append(message.text)

    async def close(self) -> None:
        for context in self.contexts:
            await context.close()
        if hasattr(self, "gateway"):
            await self.gateway.end()
            await self.gateway.client.close()


@asynccontextmanager
async def serving_site() -> AsyncIterator[Site]:
    """A site for scripts outside pytest."""
    async with started_browser() as browser, ModelServer() as model:
        with tempfile.TemporaryDirectory() as folder:
            site = Site(browser, model, Path(folder))
            await site.serve()
            try:
                yield site
            finally:
                await site.close()
