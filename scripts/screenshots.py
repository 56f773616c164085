"""Write the pictures of docs/images: the main states of the page, wide and on a phone, light and dark."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from playwright.async_api import Page  # noqa: E402

from support.browser import Site, say, serving_site  # noqa: E402
from support.model_server import Call, Reply  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WIDE: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 780},
    "device_scale_factor": 2,
    "has_touch": True,
    "is_mobile": True,
}

ANSWER = """The tests pass now. The parser read an empty line as the end of the file:

```python
def entries(text: str) -> list[str]:
    # An empty line separates entries, it does not end the file.
    return [part.strip() for part in text.split("\\n\\n") if part.strip()]
```

| step | before | after |
|---|---:|---:|
| read | 41 ms | 12 ms |
| parse | 97 ms | 30 ms |

- [x] fix the parser
- [x] add a test
- [ ] measure with a large file

The mean of $n$ runs is $\\bar{x} = \\frac{1}{n} \\sum_{i=1}^{n} x_i$.
"""
EARLIER = [
    "Water the tomatoes every second day",
    "Compare three heat pumps",
    "Letter to the school",
    "Sort the photos of Crete",
]


async def fill(site: Site) -> None:
    """Conversations of the last days, so that the list looks as it does in use."""
    now = time.time()
    sessions = [
        {
            "format": "hermes.session/1",
            "id": f"earlier-{number}",
            "title": title,
            "started_at": now - number * 90_000 - 60_000,
            "messages": [
                {"role": "user", "content": title, "timestamp": now - number * 90_000 - 60_000},
                {"role": "assistant", "content": "Done.", "timestamp": now - number * 90_000 - 59_000},
            ],
        }
        for number, title in enumerate(EARLIER)
    ]
    await site.gateway.post("/api/sessions/import", {"sessions": sessions})


async def conversation(site: Site) -> str:
    """A conversation with a tool, a change of a file and an answer; its address."""
    site.model.script = [
        Reply(
            text="I look at the failing test first.",
            reasoning="The test names the parser; run it, then read the file.",
            tool_calls=[
                Call(
                    "terminal",
                    {"command": "printf 'test_entries ... ok\\ntest_empty_line ... FAILED\\n'; sleep 0.4"},
                    id="call_1",
                ),
                Call(
                    "write_file",
                    {"path": "parser.py", "content": "def entries(text):\n    return text.split()\n"},
                    id="call_2",
                ),
            ],
        ),
        Reply(text=ANSWER),
    ]
    page = await site.open(**WIDE)
    await say(page, "Why does test_empty_line fail? Please fix it.")
    await page.wait_for_selector(".turn-end")
    await page.wait_for_selector(".prose math")
    await asyncio.sleep(1)
    return page.url.split("/", 3)[3]


async def shoot(page: Page, name: str, ready: str = ".composer textarea") -> None:
    """Take a picture once everything that belongs to it is there, and nothing moves any more."""
    await page.wait_for_selector(ready)
    await asyncio.sleep(1)
    await page.screenshot(path=IMAGES / f"{name}.png")
    print(f"docs/images/{name}.png")


async def approval(site: Site) -> None:
    site.model.script = [
        Reply(
            text="The build folder is in the way.",
            tool_calls=[Call("terminal", {"command": "rm -rf build dist"}, id="call_9")],
        )
    ]
    page = await site.open(color_scheme="dark", **WIDE)
    await say(page, "Clean up and build it anew")
    await page.wait_for_selector(".approval")
    await shoot(page, "approval-dark")
    await page.get_by_role("button", name="Deny").click()


async def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    async with serving_site() as site:
        await fill(site)
        await shoot(await site.open(**WIDE), "welcome-light")
        address = await conversation(site)
        for scheme in ("light", "dark"):
            for screen, name in ((WIDE, "conversation"), (PHONE, "phone")):
                page = await site.open(address, color_scheme=scheme, **screen)
                await page.wait_for_selector(".code .hljs-built_in")
                await shoot(page, f"{name}-{scheme}", ".prose math")
        await approval(site)
        page = await site.open(address, **WIDE)
        await page.locator(".messages").evaluate("node => { node.scrollTop = 0 }")
        for card in await page.locator(".tool-head").all():
            await card.click()
        await page.locator(".head").get_by_role("button", name="Details").click()
        await shoot(page, "tools-light")
        run = (await site.gateway.get("/v1/runs?limit=5"))["data"][-1]["run_id"]
        await shoot(await site.open(f"#/runs/{run}", color_scheme="dark", **WIDE), "timeline-dark", ".span-bar")
        await shoot(await site.open("#/usage", **WIDE), "usage-light", ".plot:last-child canvas")
        await shoot(await site.open("#/settings", **WIDE), "settings-light", "tr >> text=agent.max_turns")
        phone = await site.open(**PHONE)
        await phone.get_by_role("button", name="Conversations and pages").click()
        await shoot(phone, "phone-list-light")


if __name__ == "__main__":
    asyncio.run(main())
