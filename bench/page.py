"""`make bench-web`: how large the page is, how soon it can be used, and what it costs while an answer streams."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from playwright.async_api import CDPSession, Page  # noqa: E402

from support.browser import Site, say, serving_site  # noqa: E402
from support.model_server import Reply  # noqa: E402

MESSAGES, TOKENS, GAP_S = 5000, 2000, 0.01
PARAGRAPH = (
    "The quick brown fox jumps over the lazy dog, and `code` with **bold** words makes it a real answer. "
    "Here is a list:\n\n- first\n- second\n\n```python\nfor number in range(10):\n    print(number)\n```\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n"
)


def tokens(count: int) -> list[str]:
    """An answer in pieces of about four characters, as models give them."""
    text = PARAGRAPH * (count * 4 // len(PARAGRAPH) + 1)
    return [text[at : at + 4] for at in range(0, count * 4, 4)]


async def figures(session: CDPSession) -> dict[str, float]:
    metrics = await session.send("Performance.getMetrics")
    return {one["name"]: one["value"] for one in metrics["metrics"]}


async def heap(session: CDPSession) -> float:
    """Megabytes in use after a collection."""
    await session.send("HeapProfiler.collectGarbage")
    return (await figures(session))["JSHeapUsedSize"] / 1e6


async def watched(page: Page) -> CDPSession:
    """Durations are the processor time of the page's main thread, so they hold on a busy machine, too."""
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable", {"timeDomain": "threadTicks"})
    return session


async def first_load(site: Site) -> dict[str, Any]:
    """Bytes over the network, and the time until a message can be written; nothing is cached."""
    page = await (await site.context()).new_page()
    session = await watched(page)
    await session.send("Network.enable")
    sizes: list[float] = []
    names: dict[str, str] = {}
    session.on(
        "Network.responseReceived", lambda params: names.update({params["requestId"]: params["response"]["url"]})
    )
    session.on(
        "Network.loadingFinished",
        lambda params: (
            sizes.append(params["encodedDataLength"]) if _of_page(names.get(params["requestId"], "")) else None
        ),
    )
    started_at = time.perf_counter()
    await page.goto(site.gateway.url + "/")
    await page.wait_for_selector(".composer textarea")
    passed, spent = time.perf_counter() - started_at, (await figures(session))["TaskDuration"]
    return {
        "first load, kB": round(sum(sizes) / 1000, 1),
        "usable after, s": round(passed, 2),
        "usable after, s of processor time": round(spent, 2),
    }


def _of_page(url: str) -> bool:
    return url.endswith("/") or "/assets/" in url


async def long_conversation(site: Site) -> dict[str, Any]:
    messages = [
        {
            "role": "user" if number % 2 == 0 else "assistant",
            "content": f"Number {number}. {PARAGRAPH if number % 2 else ''}",
        }
        for number in range(MESSAGES)
    ]
    whole = [{"format": "hermes.session/1", "id": "long", "title": "Long", "messages": messages}]
    response = await site.gateway.post("/api/sessions/import", {"sessions": whole})
    assert response["imported"] == 1, response
    page = await site.open()
    await page.wait_for_selector(".entry")
    session = await watched(page)
    started_at = time.perf_counter()
    await page.evaluate("location.hash = '#/c/long'")
    await page.wait_for_selector(f"text=Number {MESSAGES - 1}.")
    opened = time.perf_counter() - started_at
    before = await figures(session)
    started_at = time.perf_counter()
    frames = await page.evaluate(
        """async () => {
            const list = document.querySelector(".messages");
            const frames = [];
            let last = performance.now();
            for (let step = 0; step < 240; step++) {
                list.scrollTop -= 400;
                await new Promise(requestAnimationFrame);
                const now = performance.now();
                frames.push(now - last);
                last = now;
            }
            return frames.sort((one, other) => one - other);
        }"""
    )
    passed = time.perf_counter() - started_at
    after = await figures(session)
    return {
        "5,000 messages open after, s": round(opened, 2),
        "scrolling: frames per second": round(240 / passed),
        "scrolling: median and longest frame, ms": [round(frames[120]), round(frames[-1])],
        "scrolling: processor time of a frame, ms": round(
            1000 * (after["TaskDuration"] - before["TaskDuration"]) / len(frames), 1
        ),
        "rows in the document": await page.locator(".row").count(),
    }


async def streaming(site: Site, minutes: float) -> dict[str, Any]:
    site.model.script = [Reply(text=tokens(TOKENS), gap_s=GAP_S)]
    page = await site.open()
    session = await watched(page)
    await say(page, "Speak")
    await page.wait_for_selector(".answer")
    before, started_at = await figures(session), time.perf_counter()
    await page.wait_for_selector(".turn-end", timeout=120_000)
    passed, after = time.perf_counter() - started_at, await figures(session)
    result: dict[str, Any] = {
        "answer of 2,000 tokens took, s": round(passed, 1),
        "streaming: share of a core, %": round(100 * (after["TaskDuration"] - before["TaskDuration"]) / passed, 1),
    }
    started_at = time.monotonic()
    sizes = [(0.0, await heap(session))]
    while time.monotonic() - started_at < minutes * 60:
        site.model.script = [Reply(text=tokens(TOKENS), gap_s=GAP_S / 2, continues=False)]
        turns = await page.locator("[data-key^='e:']").last.get_attribute("data-key")
        await say(page, "On")
        await page.wait_for_function(
            "turns => { const ends = document.querySelectorAll(\"[data-key^='e:']\");"
            " return ends.length && ends[ends.length - 1].dataset.key !== turns }",
            arg=turns,
            timeout=120_000,
        )
        await asyncio.sleep(0.5)
        sizes.append((time.monotonic() - started_at, await heap(session)))
    # What is said is kept; beyond that nothing may grow. The first minute fills caches that have a limit.
    result["heap after each answer, MB"] = [round(size, 1) for _, size in sizes]
    late = [(at, size) for at, size in sizes if at > 60] or sizes
    if len(late) > 1:
        growth = statistics.linear_regression(*zip(*late, strict=True)).slope * 3600
        result["heap, growth in an hour at this pace, MB"] = round(growth, 1)
    return result


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="how long answers are streamed to see whether memory grows"
    )
    args = parser.parse_args()
    async with serving_site() as site:
        report = await first_load(site) | await long_conversation(site) | await streaming(site, args.minutes)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
