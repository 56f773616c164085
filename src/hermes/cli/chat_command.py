"""`hermes chat`: a conversation at a terminal, or line by line where there is none."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from hermes.cli.command import Argument, command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from hermes.cli.chat_loop import Chat
    from hermes.cli.conversation import Conversation
    from hermes.core.home import Home


@command("chat", Argument("-q", "--query", metavar="TEXT", help="ask this, stream the answer, and exit"))
def chat(args: argparse.Namespace, home: Home) -> int:
    import asyncio

    from hermes.app import new_loop

    args.query = getattr(args, "query", None)
    if args.json or args.events:
        return _document(args, home)
    at_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    with asyncio.Runner(loop_factory=new_loop) as loop:
        return loop.run(_talk(args, home, at_terminal))


def _document(args: argparse.Namespace, home: Home) -> int:
    """For a program, which is given the result of one question."""
    from hermes.cli import oneshot
    from hermes.cli.output import UsageError

    if args.query is None:
        raise UsageError("A chat is no document; one question is.", hint='hermes -z "What is this?" --json')
    args.oneshot = args.query
    return oneshot.run(args, home)


async def _talk(args: argparse.Namespace, home: Home, at_terminal: bool) -> int:
    from hermes.cli.conversation import conversation, exit_code

    async with conversation(args, home, answerable=at_terminal, aloud=not at_terminal) as talk:
        if at_terminal:
            from hermes.cli.terminal import converse

            chat = await converse(talk, args.query)
        else:
            chat = await _lines(talk, args.query)
        if args.query is None and not (args.quiet or chat.deletes or chat.hung_up) and await talk.session():
            profile = "" if home.profile == "default" else f" -p {home.profile}"
            gap = "\n" if at_terminal else ""
            print(f"{gap}Continue with: hermes{profile} --resume {talk.session_id}", file=sys.stderr)
    if chat.hung_up:
        from hermes.cli.output import EXIT_INTERRUPTED

        for fd in (1, 2):  # there is nobody to be told anything
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        return EXIT_INTERRUPTED
    if args.query is None:
        return 0
    return exit_code(talk.result, refused=talk.refused) if talk.result else chat.failed


async def _lines(talk: Conversation, query: str | None) -> Chat:
    """A line, its answer, the next line, until the input ends."""
    from hermes.cli import attach
    from hermes.cli.chat_loop import Chat
    from hermes.cli.line_output import Lines
    from hermes.cli.oneshot import stopping

    chat = Chat(talk, Lines(quiet=talk.args.quiet))
    if query is not None:
        chat.queue(attach.message(query, chat.images, attach.piped()), query)
        with stopping(talk):
            await chat.idle()
        return chat
    await chat.greet()
    async for line in _typed():
        with stopping(talk):
            await chat.take(line)
            await chat.idle()
        if chat.leaving.is_set():
            break
    return chat


async def _typed() -> AsyncIterator[str]:
    """The lines of standard input, as they come; what waits for one does not hold up anything else."""
    import asyncio

    loop, fd, left, data = asyncio.get_running_loop(), sys.stdin.fileno(), b"", b" "
    while data:
        ready = asyncio.Event()
        try:
            loop.add_reader(fd, ready.set)
        except OSError:  # a file is always ready
            ready.set()
        try:
            await ready.wait()
        finally:
            loop.remove_reader(fd)
        data = os.read(fd, 65_536)
        *lines, left = (left + data).split(b"\n")
        if not data and left:
            lines.append(left)
        for line in lines:
            yield line.decode("utf-8", "replace")
