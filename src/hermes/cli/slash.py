"""The commands of a chat that begin with a slash: running them, their list, and leaving; skills are commands too."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import TYPE_CHECKING

from hermes.cli import attach, clipboard, slash_sessions, slash_settings, slash_turns  # noqa: F401  (they declare commands)
from hermes.cli.output import UsageError, near
from hermes.cli.screen import Screen
from hermes.cli.slash_table import COMMANDS, require, slash
from hermes.core.formatting import counted, one_line, width
from hermes.core.spec import Content
from hermes.services.skills import find_skills, skill_text

if TYPE_CHECKING:
    from hermes.cli.chat_loop import Chat


async def run(chat: Chat, text: str) -> None:
    """Run a line that begins with a slash; an unknown command is never sent to the model."""
    name, _, rest = text[1:].partition(" ")
    skills = _skills(chat)
    if name not in skills:
        chat.screen.user_text(text)
    if (command := COMMANDS.get(name)) is not None:
        for need in command.needs:
            require(chat, need)
        await command.work(chat, rest.strip())
    elif name in skills:
        data = skill_text(chat.talk.skill(name).path).encode()
        content: Content = [
            {"type": "text", "text": f"Follow the skill {name}: {rest.strip() or skills[name]}"},
            {"type": "file", "file": {"name": f"{name}.md", "media_type": "text/plain", "data": data}},
        ]
        chat.queue(content, text)
    else:
        mean = near(f"/{name}", [f"/{one}" for one in (*COMMANDS, *skills)])
        hint = "/help, or a space before it, to send it as it is"
        raise UsageError(f"There is no command /{one_line(name)}.{mean}", hint=hint)


def names(chat: Chat) -> dict[str, str]:
    """Every command with what it does, for completion."""
    return {name: command.about for name, command in COMMANDS.items()} | _skills(chat)


def _skills(chat: Chat) -> dict[str, str]:
    skills = [] if chat.talk.args.safe_mode else find_skills(chat.talk.settings)
    return {skill.name: skill.description for skill in skills if skill.name not in COMMANDS}


# Descriptions take at least this share of the width; longer names have a line of their own.
_ABOUT_SHARE_MIN = 0.55
_KEYS = (
    ("Enter", "send; while the agent works, what the line below says"),
    ("Alt-Enter, Ctrl-J, or \\ at the end", "another line"),
    ("@path, @picture.png", "attach a file or an image; Tab completes the path"),
    ("Ctrl-V", "attach the image of the clipboard (text: the paste key of the terminal)"),
    ("Ctrl-R", "search what was typed before; ↑ ↓ go through it"),
    ("Ctrl-C", "stop the turn, or clear the line; twice at an empty line: leave"),
    ("Ctrl-D", "leave"),
    ("Ctrl-L", "clear the screen"),
    ("o s a d n e", "at an approval, without Enter; y is once too"),
)


@slash("image", "PATH", "send an image with the next message")
async def _image(chat: Chat, rest: str) -> None:
    name = rest.strip().removeprefix("@").strip("\"'")
    if not name:
        raise UsageError("/image needs a path.", hint="/image picture.png, or @picture.png in a message")
    chat.add_image(str(attach.check_image(name)))


@slash("paste", "", "send the image of the clipboard with the next message")
async def _paste(chat: Chat, rest: str) -> None:
    chat.add_image(await clipboard.read_image())


@slash("help", "", "this list")
async def _help(chat: Chat, rest: str) -> None:
    rows = [[f"/{name} {command.arguments}".rstrip(), command.about] for name, command in COMMANDS.items()]
    rows += [[f"/{name}", about] for name, about in _skills(chat).items()]
    keys = [list(row) for row in _KEYS] if isinstance(chat.screen, Screen) else []
    chat.screen.plain("\n".join([*_wrapped(rows), *(["", *_wrapped(keys)] if keys else [])]))


def _wrapped(rows: list[list[str]]) -> Iterator[str]:
    """Names, and beside each what it does in as many lines as that takes."""
    columns = max(40, width() or 1_000)
    longest = max(len(name) for name, _ in rows) + 2
    indent = min(longest, int(columns * (1 - _ABOUT_SHARE_MIN)))
    for name, about in rows:
        lines = wrap(about, columns - indent) or [""]
        if len(name) < indent:
            yield f"{name:{indent}}{lines.pop(0)}".rstrip()
        else:
            yield name
        yield from (" " * indent + line for line in lines)


@slash("clear", "", "clear the screen; the conversation stays")
async def _clear(chat: Chat, rest: str) -> None:
    chat.clear_screen()


@slash("exit", "", "leave; the session is kept")
async def _exit(chat: Chat, rest: str) -> None:
    if rest:
        raise UsageError(f"/exit does not know '{rest}'.", hint="/exit, or /delete")
    chat.leave()


@slash("quit", "[--delete]", "leave; --delete deletes the session")
async def _quit(chat: Chat, rest: str) -> None:
    if rest not in ("", "--delete"):
        raise UsageError(f"/quit does not know '{rest}'.", hint="/quit, or /delete")
    chat.leave(deletes=bool(rest))


@slash("delete", "[yes]", "delete this session and leave", "stored")
async def _delete(chat: Chat, rest: str) -> None:
    session = await chat.talk.session()
    if rest != "yes":
        title = session.get("title") or chat.talk.session_id
        count = counted(int(session.get("message_count") or 0), "message")
        raise UsageError(f"This deletes the session {title} with {count}.", hint="/delete yes")
    chat.leave(deletes=True)
