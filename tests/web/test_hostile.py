"""Text of a model that tries to be more than text."""

import pytest
from playwright.async_api import expect

from support.browser import Site, say
from support.model_server import Call, Reply

pytestmark = pytest.mark.asyncio(loop_scope="session")

CORPUS = [
    "<script>window.harm = 1</script>",
    "<img src=x onerror='window.harm = 1'>",
    "<svg onload='window.harm = 1'><script>window.harm = 1</script></svg>",
    "<iframe srcdoc='<script>parent.harm = 1</script>'></iframe>",
    "<a href='javascript:window.harm = 1'>press</a>",
    "[press](javascript:window.harm=1)",
    "[press](JaVaScRiPt:window.harm=1)",
    "[press](&#106;avascript:window.harm=1)",
    "[press](java\tscript:window.harm=1)",
    "[press](data:text/html,<script>parent.harm=1</script>)",
    "![x](javascript:window.harm=1)",
    "![x](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9ImFsZXJ0KDEpIi8+)",
    "<style>body { display: none }</style>",
    "<div style='position:fixed;inset:0;background:red'>over everything</div>",
    "<form action='/v1/runs' method='post'><input name='x'><button>press</button></form>",
    "<input autofocus onfocus='window.harm = 1'>",
    "<details open ontoggle='window.harm = 1'>x</details>",
    "<video><source onerror='window.harm = 1'></video>",
    "<math><mtext><table><mglyph><style><img src=x onerror='window.harm = 1'>",
    "<noscript><p title='</noscript><img src=x onerror=window.harm=1>'>",
    "<b id='app'>clobber</b><a id='main' name='location'>clobber</a>",
    "<div class='approval' role='alertdialog'><button class='primary'>Allow once</button></div>",
    "<base href='https://evil.example/'>",
    "<meta http-equiv='refresh' content='0;url=https://evil.example/'>",
    "<object data='javascript:window.harm=1'></object><embed src='javascript:window.harm=1'>",
    "<x contenteditable onblur='window.harm=1'>x</x>",
    "$\\href{javascript:window.harm=1}{x}$ and $\\includegraphics{https://evil.example/a.png}$",
    "$\\class{approval}{x}$ $\\style{position:fixed}{x}$ $\\html{<script>window.harm=1</script>}$",
    "```html\n<script>window.harm = 1</script>\n```",
    "```<img src=x onerror=window.harm=1>\ncode\n```",
    "| <img src=x onerror=window.harm=1> | b |\n|---|---|\n| <script>window.harm=1</script> | 2 |",
    "- [ ] <svg/onload=window.harm=1>",
    "<!--><img src=x onerror=window.harm=1>-->",
    "<![CDATA[<img src=x onerror=window.harm=1>]]>",
    "\u202edesrever \u0000 nul",
    "<" * 3000 + "b" + ">" * 3000,
    "[" * 3000 + "]" * 3000,
    "*" * 5000,
    "> " * 400 + "deep",
    "> " * 3000 + "deeper",
    "- " * 3000 + "deeper",
]
# The address of the turn that has ended last, once it is another than the one before.
LAST_TURN_ENDED = """before => {
    const link = document.querySelector(".row.last .turn-end a[href*='#/runs/']");
    return link && link.href !== before && link.href;
}"""
FORBIDDEN = "script, iframe, object, embed, form:not(.question), input, style, svg, base, meta, video, [style], [class*=approval], [id]"


@pytest.mark.parametrize("part", range(3))
async def test_hostile_text_does_no_harm(site: Site, part: int) -> None:
    corpus = CORPUS[part::3]
    # Each piece streamed in small parts, so that every cut of it is drawn too.
    for text in corpus:
        site.model.script.append(
            Reply(text=[text[at : at + 7] for at in range(0, min(len(text), 700), 7)] + [text[700:]])
        )
    page = await site.open()
    await page.evaluate("window.harm = 0")
    ended = ""
    for number in range(len(corpus)):
        await say(page, f"piece {number}")
        # Rows that are far away are not in the document, the question above a high answer among them, so each piece is looked
        # at once its turn has ended.
        ended = await (await page.wait_for_function(LAST_TURN_ENDED, arg=ended)).json_value()
        links, forbidden = await page.evaluate(
            """forbidden => [
                [...document.querySelectorAll(".prose a")].map((link) => link.href),
                [...document.querySelectorAll(".prose .block, .prose .code code")].flatMap(
                    (block) => [...block.querySelectorAll(forbidden)].map((node) => node.outerHTML)),
            ]""",
            FORBIDDEN,
        )
        assert all(address == "" or address.startswith(("http://", "https://", "data:image/")) for address in links), (
            links
        )
        assert forbidden == []
    assert await page.evaluate("window.harm") == 0
    assert page.url.startswith(site.gateway.url)
    await page.reload()
    await expect(page.locator(".bubble", has_text=f"piece {len(corpus) - 1}")).to_be_visible()
    await expect(page.locator(".answer", has_text="deep").last).to_be_visible()
    assert await page.evaluate("window.harm") is None
    assert await page.locator("body").evaluate("node => getComputedStyle(node).display") == "block"
    # The browser's own guard was not even needed.
    assert site.complaints == []


async def test_hostile_names_arguments_and_output(site: Site) -> None:
    evil = "<img src=x onerror='window.harm = 1'>"
    site.model.script = [
        Reply(tool_calls=[Call("terminal", {"command": f'echo "{evil}"'}, id="call_1")]),
        Reply(tool_calls=[Call("clarify", {"question": evil, "choices": [evil, "no"]}, id="call_2")]),
        Reply(text="Done."),
    ]
    page = await site.open()
    await page.evaluate("window.harm = 0")
    await say(page, evil)
    await expect(page.locator(".bubble")).to_have_text(evil)
    await page.get_by_role("button", name="no", exact=True).click()
    await expect(page.get_by_text("Done.")).to_be_visible()
    for card in await page.locator(".tool-head").all():
        await card.click()
    await expect(page.locator(".output").first).to_contain_text("<img")
    assert await page.evaluate("window.harm") == 0
    assert await page.locator("img").count() == 0
