"""A chat at a terminal: the conversation above, the prompt below, and an end when the terminal goes."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

from hermes.cli import attach, slash
from hermes.cli.chat_loop import Chat
from hermes.cli.conversation import Conversation
from hermes.cli.notifier import Notifier, write_to_terminal
from hermes.cli.prompt_line import Callbacks, PromptLine
from hermes.cli.question_line import QuestionLine
from hermes.cli.screen import Screen


async def converse(talk: Conversation, query: str | None) -> Chat:
    """Talk until the user leaves; with a query, until that is answered."""
    loop, args = asyncio.get_running_loop(), talk.args
    screen = Screen(
        lambda: line.columns,
        reasoning=talk.settings.display.show_reasoning,
        quiet=args.quiet,
    )
    chat = Chat(talk, screen)
    question = QuestionLine(chat, lambda: line.buffer.text)

    def tick() -> bool:
        question.update()
        return chat.busy

    def changed() -> None:
        question.update()
        line.refresh()

    callbacks = Callbacks(
        enter=question.enter,
        typed=question.typed,
        pasted=attach.pasted,
        paste_image=chat.paste_image,
        wants_keys=question.wants_keys,
        key=question.key,
        interrupt=lambda: chat.interrupt(line.buffer.text),
        leave=chat.leave,
        mark=question.mark,
        hint=question.hint,
        live=screen.live,
        tick=tick,
        facts=lambda: " · ".join([*chat.facts(), *question.facts()]),
        commands=lambda: slash.names(chat),
        names=lambda: chat.picking.names if chat.picking else {},
    )
    if not args.quiet:
        talk.watch = Notifier(talk.settings, write_to_terminal).hear
    line = PromptLine(None if args.no_save else talk.home, callbacks)
    screen.emit, chat.changed, chat.typed = line.write, changed, line.type
    chat.open_menu, chat.clear_screen = line.open_menu, line.clear

    def hang_up() -> None:
        chat.hung_up = True
        # The kernel and the shell each send one; the second must not end what the first has begun.
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        chat.leave()

    for number in (signal.SIGHUP, signal.SIGTERM):
        loop.add_signal_handler(number, hang_up)
    typing, leaving = loop.create_task(line.run()), loop.create_task(chat.leaving.wait())
    try:
        await chat.greet()
        if query is not None:
            await chat.send(query)
            chat.leave_when_done()
        await asyncio.wait([typing, leaving], return_when=asyncio.FIRST_COMPLETED)
        await chat.close()
    finally:
        leaving.cancel()
        line.exit()
        with suppress(EOFError, OSError):  # nobody is there any more
            await typing
    return chat
