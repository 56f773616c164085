"""The commands of a chat that begin with a slash: running them, their list, and leaving; skills are commands too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes.cli import slash_sessions, slash_settings, slash_turns  # noqa: F401  (they declare commands)
from hermes.cli.conversation import near
from hermes.cli.output import UsageError
from hermes.cli.slash_table import COMMANDS, require, slash
from hermes.core.formatting import columns, one_line, width
from hermes.core.spec import Content
from hermes.services.skills import find_skills, skill_text

if TYPE_CHECKING:
    from hermes.cli.chat_loop import Chat


async def run(chat: Chat, text: str) -> None:
    """Run a line that begins with a slash; an unknown command is never sent to the model."""
    name, _, rest = text[1:].partition(" ")
    skills = _skills(chat)
    if name not in skills:
        chat.screen.said(text)
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
        hint = "/help, or a space before it, to send it as it is"
        raise UsageError(f"There is no command /{one_line(name)}.{near(name, [*COMMANDS, *skills])}", hint=hint)


def names(chat: Chat) -> dict[str, str]:
    """Every command with what it does, for completion."""
    return {name: command.about for name, command in COMMANDS.items()} | _skills(chat)


def _skills(chat: Chat) -> dict[str, str]:
    skills = [] if chat.talk.args.safe_mode else find_skills(chat.talk.settings)
    return {skill.name: skill.description for skill in skills if skill.name not in COMMANDS}


@slash("help", "", "this list")
async def _help(chat: Chat, rest: str) -> None:
    rows = [[f"/{name} {command.arguments}".rstrip(), command.about] for name, command in COMMANDS.items()]
    rows += [[f"/{name}", about] for name, about in _skills(chat).items()]
    chat.screen.plain("\n".join(columns(rows, 1, width())))


@slash("quit", "[--delete]", "leave, and delete the session")
async def _quit(chat: Chat, rest: str) -> None:
    if rest not in ("", "--delete"):
        raise UsageError(f"/quit does not know '{rest}'.", hint="/quit, or /quit --delete")
    chat.deletes = bool(rest)
    chat.leave()
