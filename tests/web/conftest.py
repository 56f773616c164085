"""Fixtures of the tests of the page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from playwright.async_api import Browser

from support.browser import Site, started_browser
from support.model_server import ModelServer


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with started_browser() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="session")
async def empty_site(browser: Browser, tmp_path: Path) -> AsyncIterator[Site]:
    """A site whose server the test starts itself."""
    async with ModelServer() as model:
        site = Site(browser, model, tmp_path)
        # Animations cost an eighth of a core while a test waits.
        site.options["reduced_motion"] = "reduce"
        try:
            yield site
        finally:
            await site.close()
        assert site.complaints == []


@pytest_asyncio.fixture(loop_scope="session")
async def site(empty_site: Site) -> Site:
    await empty_site.serve()
    return empty_site
