"""A conversation in the browser: streaming, tools, approvals, questions, and control of a turn that is under way."""

import asyncio
import re

import pytest
from playwright.async_api import Route, expect

from support.browser import Site, say
from support.model_server import Call, Reply
from support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


# Minutes of words: it is stopped, never waited for.
UNENDING = "word " * 6000


def slowly(text: str, gap_s: float = 0.05) -> Reply:
    """An answer that comes word by word."""
    return Reply(text=re.findall(r"\S+\s*", text), gap_s=gap_s)


async def test_an_answer_is_streamed_with_a_tool_card(site: Site) -> None:
    site.model.script = [
        Reply(
            text="Let me look.",
            reasoning="The workspace first.",
            tool_calls=[Call("terminal", {"command": "echo first; sleep 0.3; echo second"}, id="call_1")],
        ),
        slowly(
            "There are **two** lines.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint(1)\n```\n\nEuler: $e^{i\\pi}$."
        ),
    ]
    page = await site.open()
    await say(page, "What is there?")
    card = page.get_by_role("article", name="terminal")
    await expect(card).to_contain_text("first")
    await expect(page.locator(".turn-end")).to_be_visible()
    await expect(page.locator(".prose strong")).to_have_text("two")
    await expect(page.locator(".prose td").first).to_have_text("1")
    await expect(page.locator(".code .hljs-built_in")).to_have_text("print")
    await expect(page.locator(".prose math")).to_be_visible()
    await expect(page.locator(".answer")).to_have_count(2)
    await card.get_by_role("button", name="terminal").click()
    await expect(card).to_contain_text("second")
    await expect(card.locator(".tool-state")).to_contain_text("s")
    await page.get_by_text("Reasoning", exact=True).click()
    await expect(page.locator(".reasoning .prose")).to_contain_text("The workspace first.")
    # The conversation is in the list, and what is stored looks the same.
    await expect(page.get_by_role("navigation", name="Conversations").get_by_role("link")).to_have_text(
        "What is there?"
    )
    texts = await page.locator(".answer").all_inner_texts()
    await page.reload()
    await expect(page.locator(".answer")).to_have_count(2)
    await expect(page.locator(".prose math")).to_be_visible()
    assert await page.locator(".answer").all_inner_texts() == texts


async def test_a_command_is_approved_or_denied(site: Site) -> None:
    site.model.script = [
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"}, id="call_1")]),
        Reply(text="It is gone."),
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf other"}, id="call_2")]),
        Reply(text="Then not."),
    ]
    page = await site.open()
    await say(page, "Clean up.")
    element = page.get_by_role("article", name="terminal").get_by_role("alertdialog")
    await expect(element).to_contain_text("rm -rf build")
    await expect(element).to_contain_text("Rule:")
    await element.get_by_role("button", name="Allow once").click()
    await expect(page.get_by_text("Allowed.")).to_be_visible()
    await expect(page.get_by_text("It is gone.")).to_be_visible()
    await say(page, "And the other.")
    await expect(element).to_contain_text("rm -rf other")
    # By key, from outside of the text field.
    await page.locator(".messages").focus()
    await page.keyboard.press("x")
    await expect(page.get_by_text("Then not.")).to_be_visible()
    await expect(page.get_by_text("Denied.")).to_have_count(0)
    await expect(page.locator(".tool.failed")).to_have_count(1)


async def test_denial_can_include_instructions(site: Site) -> None:
    site.model.script = [
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"}, id="call_1")]),
        Reply(text="Moved."),
    ]
    page = await site.open()
    await say(page, "Clean up.")
    element = page.get_by_role("alertdialog")
    instead = element.get_by_role("textbox", name="what to do instead")
    await instead.fill("Move it to the trash.")
    # What is written would be lost with an approval.
    await expect(element.get_by_role("button", name="Allow once")).to_be_disabled()
    await instead.press("Enter")
    await expect(page.get_by_text("Moved.")).to_be_visible()
    assert "Move it to the trash." in str(site.model.requests[-1].body)
    await expect(page.locator(".tool.failed .tool-state")).to_have_text("refused")


async def test_an_approval_that_is_refused_stays_open(site: Site) -> None:
    site.model.script = [
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"}, id="call_1")]),
        Reply(text="Then not."),
    ]
    page = await site.open()
    await say(page, "Clean up.")
    element = page.get_by_role("alertdialog")
    fault = {"error": {"message": "The disk is away.", "type": "server_error", "param": None, "code": "x"}}
    await page.route("**/approval", lambda route: route.fulfill(status=503, json=fault))
    await element.get_by_role("button", name="Deny").click()
    await expect(page.locator(".toast")).to_contain_text("The disk is away.")
    await expect(page.get_by_text("Denied.")).to_have_count(0)
    await page.unroute("**/approval")
    await element.get_by_role("button", name="Deny").click()
    await expect(page.get_by_text("Then not.")).to_be_visible()


async def test_tool_result_with_a_state_field_is_not_failed(site: Site) -> None:
    command = {"command": "sleep 60", "background": True}
    site.model.script = [Reply(tool_calls=[Call("terminal", command, id="call_1")]), Reply(text="It runs.")]
    page = await site.open()
    await say(page, "Start it.")
    await expect(page.get_by_text("It runs.")).to_be_visible()
    await page.reload()
    await expect(page.get_by_text("It runs.")).to_be_visible()
    await expect(page.get_by_role("article", name="terminal")).to_be_visible()
    await expect(page.locator(".tool.failed")).to_have_count(0)


async def test_a_question_is_answered(site: Site) -> None:
    site.model.script = [
        Reply(tool_calls=[Call("clarify", {"question": "Which colour?", "choices": ["red", "blue"]}, id="call_1")]),
        Reply(text="Blue it is."),
    ]
    page = await site.open()
    await say(page, "Paint it.")
    await expect(page.get_by_role("form", name="A question for you")).to_contain_text("Which colour?")
    await page.get_by_role("button", name="blue").click()
    await expect(page.get_by_text("Blue it is.")).to_be_visible()
    assert '"answer": "blue"' in str(site.model.requests[-1].body).replace("\\", "")


async def test_a_turn_is_stopped(site: Site) -> None:
    site.model.script = [slowly(UNENDING), Reply(text="Again.")]
    page = await site.open()
    await say(page, "Talk.")
    await expect(page.locator(".prose")).to_contain_text("word word")
    await page.get_by_role("button", name="Stop").click()
    await expect(page.get_by_text("Stopped.")).to_be_visible()
    await expect(page.get_by_role("button", name="Send")).to_be_visible()
    await say(page, "Go on.")
    await expect(page.get_by_text("Again.")).to_be_visible()


async def test_a_turn_is_steered_and_the_next_message_waits(site: Site) -> None:
    site.model.script = [
        Reply(tool_calls=[Call("terminal", {"command": "until [ -e go ]; do sleep 0.05; done"}, id="call_1")]),
        Reply(text="Steered."),
        Reply(text="And the next."),
    ]
    page = await site.open()
    await say(page, "Wait.")
    await expect(page.get_by_role("article", name="terminal")).to_be_visible()
    box = page.get_by_role("textbox", name="Message")
    await box.fill("Be brief.")
    await box.press("Control+Enter")
    await expect(page.locator(".steer")).to_contain_text("Be brief.")
    await box.fill("What next?")
    await page.get_by_role("button", name="Queue").click()
    await expect(page.get_by_text("Waits for its turn")).to_be_visible()
    # A second window sees both.
    second = await site.open(page.url.split("/", 3)[3])
    await expect(second.get_by_text("Waits for its turn")).to_be_visible()
    await expect(second.locator(".bubble")).to_have_text(["Wait.", "What next?"])
    (site.folder / "home" / "workspace" / "go").touch()
    for window in (page, second):
        await expect(window.get_by_text("And the next.")).to_be_visible()
        await expect(window.locator(".answer")).to_have_text(["Steered.", "And the next."])
        await expect(window.locator(".bubble")).to_have_text(["Wait.", "What next?"])
    assert "Be brief." in str(site.model.requests[1].body)


async def test_queued_message_can_be_withdrawn(site: Site) -> None:
    site.model.script = [slowly(UNENDING), Reply(text="To the third.")]
    page = await site.open()
    await say(page, "First.")
    await expect(page.locator(".prose")).to_contain_text("word")
    await say(page, "Second.")
    await page.get_by_role("button", name="Take out of the queue").click()
    await expect(page.get_by_text("Waits for its turn")).to_have_count(0)
    await page.get_by_role("button", name="Stop").click()
    await expect(page.get_by_role("button", name="Send")).to_be_visible()
    await say(page, "Third.")
    await expect(page.get_by_text("To the third.")).to_be_visible()
    assert len(site.model.requests) == 2 and "Second." not in str(site.model.requests[1].body)


async def test_a_message_is_edited_into_a_branch(site: Site) -> None:
    site.model.script = [Reply(text="Answer one."), Reply(text="Answer two."), Reply(text="Answer three.")]
    page = await site.open()
    await say(page, "Question one")
    await expect(page.get_by_text("Answer one.")).to_be_visible()
    await page.locator(".user").hover()
    await page.get_by_role("button", name="Edit", exact=True).click()
    editor = page.get_by_role("textbox", name="Edit your message")
    await editor.fill("Question two")
    await editor.press("Enter")
    await expect(page.locator(".answer")).to_have_text(["Answer two."])
    await expect(page.locator(".bubble")).to_have_text(["Question two"])
    branches = page.get_by_role("navigation", name="Branches")
    await expect(branches).to_contain_text("2 / 2")
    await branches.get_by_role("link", name="Previous branch").click()
    await expect(page.locator(".answer")).to_have_text(["Answer one."])
    await expect(branches).to_contain_text("1 / 2")
    # Trying again is a branch with the same message.
    await page.get_by_role("button", name="Try again").click()
    await expect(page.locator(".answer")).to_have_text(["Answer three."])
    await expect(page.locator(".bubble")).to_have_text(["Question one"])
    await expect(branches).to_contain_text("3 / 3")
    # A branch is deleted by itself, and comes back when that is undone.
    await branches.get_by_role("button", name="Delete this branch").click()
    await expect(page.locator(".answer")).to_have_text(["Answer one."])
    await expect(branches).to_contain_text("1 / 2")
    # Others go off from this one.
    await expect(branches.get_by_role("button")).to_have_count(0)
    deleted = page.locator(".toast", has_text="Branch deleted.")
    await deleted.get_by_role("button", name="Undo").click()
    await expect(page.locator(".answer")).to_have_text(["Answer three."])
    await expect(branches).to_contain_text("3 / 3")
    await branches.get_by_role("button", name="Delete this branch").click()
    await deleted.get_by_role("button", name="Close").click()
    await until(lambda: site.gateway.get("/api/sessions?archived=all"), lambda body: body["total"] == 2)
    await expect(page.locator(".answer")).to_have_text(["Answer one."])
    assert all("Answer" not in str(request.body["messages"]) for request in site.model.requests)


async def test_files_are_sent_along(site: Site) -> None:
    site.model.script = [Reply(text="Seen.")]
    page = await site.open()
    await expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    pixel = bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
        "1f15c4890000000d49444154789c6364f8cf500f0003860180"
        "5a347d6b0000000049454e44ae426082"
    )
    await page.locator("input[type=file]").set_input_files(
        [
            {"name": "dot.png", "mimeType": "image/png", "buffer": pixel},
            {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"remember the milk"},
        ]
    )
    await expect(page.locator(".uploads li")).to_have_count(2)
    await page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["by drop"], "dropped.txt", {type: "text/plain"}));
            document.querySelector(".chat").dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
        }"""
    )
    await expect(page.locator(".uploads li")).to_have_count(3)
    await page.get_by_role("button", name="Remove dropped.txt").click()
    await page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["by paste"], "pasted.txt", {type: "text/plain"}));
            document.querySelector(".composer textarea").dispatchEvent(
                new ClipboardEvent("paste", {clipboardData: data, bubbles: true}));
        }"""
    )
    await expect(page.locator(".uploads li")).to_have_count(3)
    await say(page, "Look at these.")
    await expect(page.get_by_text("Seen.")).to_be_visible()
    await page.reload()
    await expect(page.locator(".user img")).to_have_count(1)
    await expect(page.locator(".file-chip")).to_have_text([" notes.txt", " pasted.txt"])
    await expect(page.locator(".bubble")).to_have_text("Look at these.")
    sent = str(site.model.requests[0].body)
    assert "remember the milk" in sent
    assert "by paste" in sent
    assert "by drop" not in sent
    # Trying again sends the same, once, however often it is pressed.
    site.model.script = [Reply(text="Seen again.")]
    await page.get_by_role("button", name="Try again").dblclick()
    await expect(page.get_by_text("Seen again.")).to_be_visible()
    await expect(page.locator(".user img")).to_have_count(1)
    await expect(page.locator(".file-chip")).to_have_text([" notes.txt", " pasted.txt"])
    await expect(page.locator(".branches")).to_have_text("2 / 2")
    assert len(site.model.requests) == 2
    assert "remember the milk" in str(site.model.requests[1].body)


async def test_two_quick_messages_begin_one_conversation(site: Site) -> None:
    site.model.script = [Reply(text="One."), Reply(text="Two.")]
    page = await site.open()
    await expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    requested = asyncio.Event()

    async def later(route: Route) -> None:
        if route.request.method == "POST":
            await requested.wait()
        await route.continue_()

    await page.route("**/api/sessions", later)
    await say(page, "First")
    await say(page, "Second")
    requested.set()
    await expect(page.locator(".bubble")).to_have_text(["First", "Second"])
    await expect(page.locator(".answer")).to_have_text(["One.", "Two."])
    assert (await site.gateway.get("/api/sessions"))["total"] == 1


async def test_toolsets_folder_and_effort_are_chosen(empty_site: Site) -> None:
    site, projects = empty_site, empty_site.folder / "projects"
    (projects / "garden").mkdir(parents=True)
    await site.serve(terminal={"workspaces": [str(projects)]})
    site.model.script = [Reply(text="One."), Reply(text="Two.")]
    page = await site.open()
    await page.get_by_role("button", name="Details").click()
    await page.get_by_role("checkbox", name="Terminal").uncheck()
    await page.get_by_role("combobox", name="Reasoning effort").select_option("high")
    await say(page, "First.")
    await expect(page.get_by_text("One.")).to_be_visible()
    await expect(page.get_by_role("checkbox", name="Terminal")).not_to_be_checked()
    names = [tool["function"]["name"] for tool in site.model.requests[0].body["tools"]]
    assert "terminal" not in names
    assert "read_file" in names
    await page.get_by_role("checkbox", name="Terminal").check()
    folder = page.get_by_role("combobox", name="Working folder")
    await folder.fill(str(projects / "garden"))
    # News of the conversation come while it is written, and the focus stays.
    box = page.get_by_role("checkbox", name="Memory")
    async with page.expect_response(re.compile(r"/api/sessions\?")):  # read when the conversation has changed
        await box.evaluate("box => box.click()")
    await expect(box).not_to_be_checked()
    await expect(folder).to_have_value(str(projects / "garden"))
    async with page.expect_response(re.compile("/api/sessions/")) as changed:
        await folder.press("Tab")
    assert (await changed.value).ok, await (await changed.value).text()
    await say(page, "Second.")
    await expect(page.get_by_text("Two.")).to_be_visible()
    names = [tool["function"]["name"] for tool in site.model.requests[1].body["tools"]]
    assert "terminal" in names


async def test_quick_choices_are_all_kept_and_count_for_the_next_message(site: Site) -> None:
    site.model.script = [Reply(text="One."), Reply(text="Two.")]
    page = await site.open()
    await say(page, "First.")
    await expect(page.get_by_text("One.")).to_be_visible()
    asked, go = asyncio.Event(), asyncio.Event()

    async def hold(route: Route) -> None:
        if route.request.method == "PATCH":
            asked.set()
            await go.wait()
        await route.continue_()

    await page.route("**/api/sessions/*", hold)
    await page.get_by_role("button", name="Details").click()
    await page.get_by_role("checkbox", name="Terminal").uncheck()
    await asked.wait()
    await page.get_by_role("checkbox", name="Memory").uncheck()
    await say(page, "Second.")
    go.set()
    await expect(page.get_by_text("Two.")).to_be_visible()
    names = {tool["function"]["name"] for tool in site.model.requests[1].body["tools"]}
    assert "read_file" in names and not names & {"terminal", "memory"}


async def test_live_output_has_colours(site: Site) -> None:
    command = r"printf '\033[31mred\033[0m plain\n'; until [ -e go ]; do sleep 0.05; done"
    site.model.script = [Reply(tool_calls=[Call("terminal", {"command": command}, id="call_1")]), Reply(text="Done.")]
    page = await site.open()
    await say(page, "Paint")
    await expect(page.locator(".output .ansi-31")).to_have_text("red")
    (site.folder / "home" / "workspace" / "go").touch()
    await expect(page.get_by_text("Done.")).to_be_visible()


async def test_code_in_a_list_is_coloured_and_stays_in_its_place(site: Site) -> None:
    site.model.script = [
        Reply(text="1. Run:\n\n   ```python\n   print('" + "x" * 300 + "')\n   ```\n2. <b>Then</b> rest.")
    ]
    page = await site.open()
    await say(page, "How?")
    await expect(page.locator(".prose li .hljs-built_in")).to_have_text("print")
    await expect(page.locator(".prose li").first.get_by_role("button", name="Copy code")).to_be_visible()
    await expect(page.locator(".prose li pre")).to_have_text("print('" + "x" * 300 + "')")
    assert await page.locator(".messages").evaluate("list => list.scrollWidth <= list.clientWidth")


async def test_a_changed_file_is_shown_as_a_diff(site: Site) -> None:
    site.model.script = [
        Reply(tool_calls=[Call("write_file", {"path": "a.txt", "content": "one\ntwo\n"}, id="call_1")]),
        Reply(tool_calls=[Call("patch", {"path": "a.txt", "old_string": "two", "new_string": "three"}, id="call_2")]),
        Reply(text="Changed."),
    ]
    page = await site.open()
    await say(page, "Change it")
    await expect(page.get_by_text("Changed.")).to_be_visible()
    written = page.get_by_role("article", name="write_file")
    await written.get_by_role("button", name="write_file").click()
    await expect(written.locator(".diff-add")).to_have_text(["+one", "+two"])
    await page.get_by_role("article", name="patch").get_by_role("button", name="patch").click()
    await expect(page.locator(".diff-remove")).to_have_text("-two")
    await expect(page.locator(".diff-add").last).to_have_text("+three")
