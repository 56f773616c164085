"""Declaring the slash commands of a chat: what each needs, and what they share."""

from __future__ import annotations

import io
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from hermes.cli.output import UsageError
from hermes.settings import config

if TYPE_CHECKING:
    from hermes.cli.chat_loop import Chat

GLOBAL = "--global"
Work = Callable[["Chat", str], Awaitable[None]]
Need = Literal["idle", "stored", "shared"]


class Slash(NamedTuple):
    work: Work
    arguments: str
    about: str
    needs: tuple[Need, ...]


COMMANDS: dict[str, Slash] = {}


def slash(name: str, arguments: str, about: str, *needs: Need) -> Callable[[Work], Work]:
    """Declare a command. It may need that no turn is under way (`idle`), that the conversation is `stored`, or that
    its home is that of this process (`shared`)."""

    def declare(work: Work) -> Work:
        COMMANDS[name] = Slash(work, arguments, about, needs)
        return work

    return declare


async def run_command(chat: Chat, *args: str) -> None:
    """What a command of `hermes` prints."""
    from hermes.cli.main import main

    require(chat, "shared")
    async with printed(chat):
        with suppress(SystemExit):
            await chat.talk.blocking(partial(main, ["-p", chat.talk.home.profile, *args]))


@asynccontextmanager
async def printed(chat: Chat) -> AsyncIterator[None]:
    """What is printed meanwhile stands on the screen afterwards."""
    printed = io.StringIO()
    async with chat.printing:  # there is one standard output for all
        try:
            with redirect_stdout(printed), redirect_stderr(printed):
                yield
        finally:
            if printed.getvalue():
                chat.screen.plain(printed.getvalue())


def require(chat: Chat, need: Need) -> None:
    if need == "stored" and not chat.talk.saved:
        raise UsageError("This conversation is not kept.", hint="hermes without --no-save")
    if need == "shared" and chat.talk.remote:
        raise UsageError(f"This is not available {chat.talk.place}.", hint="hermes without --server")
    if need == "idle" and chat.busy:
        raise UsageError("A turn is under way.", hint="/stop")


def split_words(rest: str) -> list[str]:
    try:
        return shlex.split(rest)
    except ValueError:
        raise UsageError("A quote is not closed.", hint="the same with both quotes") from None


def split_args(rest: str) -> tuple[list[str], bool]:
    """The arguments of a command, and whether they are meant for every conversation."""
    args = split_words(rest)
    return [arg for arg in args if arg != GLOBAL], GLOBAL in args


def write_setting(chat: Chat, for_good: bool, name: str, value: object) -> None:
    """Write a setting to the configuration, if it is meant for every conversation."""
    if not for_good:
        return
    written = config.set_value(chat.talk.home, name, value)
    chat.screen.note(f"{name} is written to {written.file}.")
