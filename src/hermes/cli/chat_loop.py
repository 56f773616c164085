"""The interactive chat: typed lines become turns and commands; input during a turn waits, interrupts or steers it."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text

from hermes.cli import attach, slash
from hermes.cli.agents import ServerLost
from hermes.cli.conversation import Conversation
from hermes.cli.line_output import Lines
from hermes.cli.output import EXIT_FAILED
from hermes.cli.picker import Picking, matching
from hermes.cli.screen import Open, Screen
from hermes.cli.slash_sessions import history
from hermes.core.errors import HermesError
from hermes.core.formatting import counted, one_line, size
from hermes.core.json_types import JsonObject
from hermes.core.limits import CLOSE_S_MAX
from hermes.core.result import Result
from hermes.core.spec import Content, ControlKind
from hermes.sandbox.choose import choose_backend

log = logging.getLogger(__name__)
_LEAVE_AGAIN_S = 3.0
_MODES = {"interrupt": "Enter interrupts", "queue": "Enter queues", "steer": "Enter steers"}
_MEANT = {
    "once": "allow this call",
    "session": "allow this whenever it comes again in this session",
    "always": "allow this from now on; `hermes approvals` lists and removes it",
    "deny": "deny this call; the agent sees the denial",
}


class Chat:
    def __init__(self, talk: Conversation, screen: Screen | Lines) -> None:
        self.talk, self.screen = talk, screen
        self.waiting: deque[tuple[Content, str]] = deque()
        self.leaving, self.greeted = asyncio.Event(), asyncio.Event()
        self.deletes = False
        self.typed: Callable[[str], None] = lambda _: None
        self.changed: Callable[[], None] = lambda: None
        self.open_menu: Callable[[], None] = lambda: None
        self.clear_screen: Callable[[], None] = lambda: None
        self.picking: Picking | None = None
        self.mode: str = talk.settings.display.busy_input_mode
        self._working: asyncio.Task[None] | None = None
        self._asked: set[asyncio.Task[None]] = set()
        self.printing = asyncio.Lock()
        self._leave_at = 0.0
        self._lost = self.hung_up = self._warned = False
        self.failed = 0
        self.images: list[str | bytes] = [*(talk.args.image or ())]
        self.route = ""

    # --- what is typed ----------------------------------------------------------------------------------------------

    def enter(self, text: str) -> None:
        self._soon(self.take(text))

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def take(self, text: str) -> None:
        """A command, or something for the agent."""
        self._leave_at = 0.0
        self._warned &= text.startswith("/")
        await self.greeted.wait()
        picking, self.picking = self.picking, None
        try:
            if picking is not None and text.strip() and not text.startswith("/"):
                await self.take_pick(picking, text.strip())
            elif text.startswith("/"):
                await slash.run(self, text)
            elif text.strip():
                await self.send(text)
        except Exception as error:  # noqa: BLE001  (whatever it is, the chat goes on)
            self.problem(error)
        self.changed()

    def problem(self, error: Exception) -> None:
        if not isinstance(error, HermesError):
            log.error("%s", self.talk.app.secrets.redact(traceback.format_exc()))
            error = HermesError(f"This is a defect of Hermes: {type(error).__name__}.", hint="hermes logs errors")
        self.screen.problem(error.message + (f"\n  Try: {error.hint}" if error.hint else ""))

    def pick(self, picking: Picking, text: str = "") -> None:
        """Let one of many names be chosen; the list shows what holds the text."""
        self.picking = picking
        self.typed(text)
        self.open_menu()

    async def take_pick(self, picking: Picking, text: str) -> None:
        """Take the first name that matches. What matches none is asked about once more."""
        name = text if text in picking.names else next(iter(matching(picking.names, text)), "")
        if name or text == picking.unlisted:
            await picking.take(name or text)
        else:
            note = f"None of {len(picking.names)} names holds: {one_line(text)}. Enter uses it anyway."
            self.screen.note(note, "yellow")
            self.pick(picking._replace(unlisted=text), text)

    async def send(self, text: str) -> None:
        """Words for the agent, now or as the mode for a busy agent says."""
        content = attach.message(text.strip("\n"), self.images)
        self.images = []
        for name in attach.missing(text):
            self.screen.note(f"There is no file {name}; it is sent as it is written.", "yellow")
        if not self.busy:
            self.queue(content, text)
        elif self.mode == "steer" and isinstance(content, str):  # files and images go with the next turn
            await self.steer(text)
        else:
            self.queue(content, text)
            if self.mode == "interrupt":
                await self.stop()

    def paste_image(self) -> None:
        self._soon(self.take("/paste"))

    def add_image(self, image: str | bytes) -> None:
        self.images.append(image)
        names = [
            one if isinstance(one, str) else f"an image of the clipboard ({size(len(one))})" for one in self.images
        ]
        self.screen.note(f"With the next message: {', '.join(names)}")

    async def steer(self, text: str) -> None:
        """Words for the turn under way; where there is none, for the next."""
        if self.busy and await self.talk.control("steer", text=text):
            self.screen.user_text(text)
            self.screen.note("It is sent with the next tool result, or after the answer.")
        else:
            self.queue(text, text)

    def queue(self, content: Content, text: str) -> None:
        self.waiting.append((content, text))
        if self.busy:
            self.screen.note(f"Next: {one_line(text)}")
        else:
            self.begin()

    def begin(self, work: Coroutine[Any, Any, Any] | None = None) -> None:
        """Be busy from now on: with this, and with what waits."""
        self._working = asyncio.ensure_future(self._work(work))

    def answer_question(self, question: Open, text: str) -> None:
        """Answer by the number of a choice, or in other words."""
        offered = question.event["choices"] or []
        number = int(text) if text.isdecimal() else 0
        answer = offered[number - 1] if 0 < number <= len(offered) else text
        if answer:
            self.screen.user_text(answer)
            self._soon(self._control("answer", id=question.id, answer=answer))

    def answer_approval(self, question: Open, choice: str, comment: str = "") -> None:
        """Decide about a tool call; the model is given the comment on a denial."""
        if comment:
            self.screen.user_text(comment)
        self._soon(self._control("approve", **_decision(question, choice, comment)))

    async def _control(self, kind: ControlKind, **data: str) -> None:
        try:
            await self.talk.control(kind, **data)
        except HermesError as error:
            self.problem(error)

    async def approve(self, choice: str, comment: str = "") -> bool:
        """Decide about the oldest call that waits for it. False: there is none."""
        question = next((one for one in self.screen.questions if one.kind == "approve"), None)
        return question is not None and await self.talk.control("approve", **_decision(question, choice, comment))

    def explain(self, event: JsonObject) -> None:
        lines = [event["description"], f"Working folder: {self.talk.folder}"]
        lines += [f"{one}: {_MEANT[one]}" for one in event["choices"]]
        self.screen.note("\n".join([*lines, "no: deny this call and say what to do instead"]))

    # --- turns ------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return self._working is not None and not self._working.done()

    async def _work(self, first: Coroutine[Any, Any, Any] | None) -> None:
        if first is not None:
            await first
        while self.waiting and not self.leaving.is_set():
            content, text = self.waiting.popleft()
            self.screen.user_text(text)
            result = await self.turn(self.talk.ask(content, self.show))
            if result and result["pending_steer"]:
                steer = str(result["pending_steer"])
                self.waiting.appendleft((steer, steer))

    async def turn(self, asking: Coroutine[Any, Any, Result]) -> Result | None:
        self.screen.begin()
        self.changed()
        try:
            result = await asking
        except Exception as error:  # noqa: BLE001  (whatever it is, the chat goes on)
            self.screen.reset()
            self.problem(error)
            self.failed = error.exit_code if isinstance(error, HermesError) else EXIT_FAILED
            return None
        except asyncio.CancelledError:
            self.screen.reset()
            if not self._lost:
                raise
            self.screen.note("No longer waiting; the turn continues when the server is back.", "yellow")
            return None
        finally:
            self._lost = False
            self.changed()
        self.screen.ended(result)
        return result

    def show(self, event: JsonObject) -> None:
        self.screen.show(event)
        self.changed()

    async def idle(self) -> None:
        while self.busy and self._working is not None:
            await asyncio.wait([self._working])

    async def stop(self) -> None:
        """Stop the turn; what there is of the answer is kept. One whose server is out of reach is only left alone."""
        try:
            await self.talk.control("interrupt")
        except ServerLost:
            self._lost = True
            if self._working is not None:
                self._working.cancel()

    # --- leaving ----------------------------------------------------------------------------------------------------

    def interrupt(self, typed: str = "") -> None:
        """Ctrl-C: stops the turn; without one clears the line; on an empty line, the second time, leaves."""
        if self.picking is not None:
            self.picking = None
            self.typed("")
        elif self.busy:
            held, self.waiting = [text for _, text in self.waiting], deque()
            if held:  # nothing is lost: what was to come next stands in the line again
                self.typed("\n".join([*held, *([typed] if typed else [])]))
            self._soon(self.stop())
        elif typed:
            self.typed("")
        elif time.monotonic() - self._leave_at < _LEAVE_AGAIN_S:
            self.leave()
        else:
            self._leave_at = time.monotonic()
            self.screen.note("Ctrl-C once more, or Ctrl-D, leaves.")

    def leave(self, *, deletes: bool = False) -> None:
        """Leave; the first time that messages wait, only say so. Whoever is gone is not asked."""
        if self.waiting and not (self.hung_up or self._warned):
            self._warned = True
            count = counted(len(self.waiting), "message")
            advice = "Leave once more to drop it all, or press Ctrl-C to stop the turn and edit them."
            self.screen.note(f"{count} waiting, not sent yet. {advice}", "yellow")
        else:
            self.deletes = deletes
            self.leaving.set()

    def leave_when_done(self) -> None:
        if self._working is not None:
            self._working.add_done_callback(lambda _: self.leave())

    async def close(self) -> None:
        self.waiting.clear()
        if self.busy and self._working is not None:
            await self.stop()
            await asyncio.wait([self._working], timeout=CLOSE_S_MAX)
        if self.deletes and self.talk.saved:
            await self.talk.sessions.delete_session(self.talk.session_id, True)

    # --- what stands on the screen ------------------------------------------------------------------------------------

    async def greet(self) -> None:
        """The first lines; what is typed before them comes after them."""
        try:
            if not self.talk.args.quiet:
                await self._greet()
        except HermesError as error:
            self.problem(error)
        self.greeted.set()

    async def _greet(self) -> None:
        talk = self.talk
        self.route = await talk.model_name()
        session = await talk.session()
        named = f"session {talk.session_id}"
        if session:
            named = f"{session['title'] or talk.session_id}, {counted(session['message_count'], 'message')}"
        if talk.remote:
            facts = [*filter(None, [self.route]), talk.place, named]
        else:
            sandbox = (await talk.blocking(partial(choose_backend, talk.settings))).name
            facts = [self.route, shown_path(talk.folder), sandbox, named if talk.saved else "not kept"]
            facts += ["through the server"] if talk.server else []
        facts += ["no approvals"] if talk.yolo else []
        if isinstance(self.screen, Screen):
            head = Text.assemble(("Hermes", "bold cyan"), (f" · {' · '.join(facts)}", "dim"))
            self.screen.put("head", head)
            self.screen.put("head", Text("/help lists commands · Ctrl-C stops a turn · Ctrl-D leaves", "dim"))
        else:
            self.screen.note(f"Hermes · {' · '.join(facts)}")
        if session:
            is_cut_off = await talk.end_lost_turn()
            await history(self, "1")
            if is_cut_off:
                self.screen.note("The last turn was cut off. What it had said is kept; /retry asks again.", "yellow")

    def facts(self) -> list[str]:
        assert isinstance(self.screen, Screen)
        facts = [self.screen.model or self.route, *self.screen.facts()]
        if self.busy and not self.screen.questions:
            facts += [_MODES[self.mode], "Ctrl-C stops"]
        if self.waiting:
            facts.append(f"{len(self.waiting)} waiting")
        return facts


def _decision(question: Open, choice: str, comment: str) -> dict[str, str]:
    return {"id": question.id, "choice": choice} | ({"comment": comment} if comment else {})


def shown_path(path: str) -> str:
    home = str(Path.home())
    return f"~{path[len(home) :]}" if path == home or path.startswith(f"{home}/") else path
