"""Slash commands for sessions: begin, resume, list, name, branch, save and rewind them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from hermes.cli.command import folder
from hermes.cli.output import UsageError
from hermes.cli.session_format import session_lines
from hermes.cli.slash_table import printed, require, run_command, slash, split_words
from hermes.core.formatting import counted, one_line, width
from hermes.core.json_types import JsonObject
from hermes.services.session_markdown import text_of
from hermes.store.sessions import new_session_id

if TYPE_CHECKING:
    from hermes.cli.chat_loop import Chat


@slash("new", "[title]", "start a new session", "idle")
async def _new(chat: Chat, rest: str) -> None:
    talk = chat.talk
    await talk.end()
    talk.session_id, talk.history = new_session_id(), []
    if rest and talk.saved:
        await _titled(talk.sessions.create_session(talk.session_id, "cli", title=rest, cwd=talk.folder))
    chat.screen.note(f"A new session: {rest or talk.session_id}.")


async def _titled(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except ValueError as error:
        raise UsageError(str(error), hint="another title") from None


@slash("resume", "[id or title]", "continue another session", "stored")
async def _resume(chat: Chat, rest: str) -> None:
    if not rest and chat.talk.remote:
        await _sessions(chat, "")
    elif not rest:
        await run_command(chat, "sessions", "list", "--workspace", chat.talk.folder, "--limit", "10")
    else:
        require(chat, "idle")
        before = chat.talk.session_id
        async with printed(chat):
            await chat.talk.resume(rest)
        if chat.talk.session_id != before:
            await chat.talk.end(before)
        await history(chat, "1")


@slash("sessions", "[query]", "list sessions")
async def _sessions(chat: Chat, rest: str) -> None:
    if chat.talk.remote:
        listed = session_lines(await chat.talk.sessions.list_sessions(rest), width())
        chat.screen.plain("\n".join(listed) or "There are no sessions.")
    else:
        await run_command(chat, "sessions", "list", *(["--search", rest] if rest else []))


@slash("title", "[text]", "show or change the title", "stored")
async def _title(chat: Chat, rest: str) -> None:
    if rest:
        await chat.talk.sessions.create_session(chat.talk.session_id, "cli", cwd=chat.talk.folder)
        await _titled(chat.talk.sessions.set_session_title(chat.talk.session_id, rest))
    title = (await chat.talk.session()).get("title")
    chat.screen.note(f"Title: {title}" if title else "It has no title yet.")


@slash("branch", "[title]", "continue in a copy of this session", "stored", "idle")
async def _branch(chat: Chat, rest: str) -> None:
    if not await chat.talk.session():
        raise UsageError("Nothing has been said yet.")
    work = chat.talk.sessions.fork_session(chat.talk.session_id, title=rest or None)
    chat.talk.session_id = await _titled(work)
    session = await chat.talk.session()
    chat.screen.note(f"This continues in a branch: {session['title'] or chat.talk.session_id}.")


@slash("history", "[turns]", "show the last messages")
async def history(chat: Chat, rest: str) -> None:
    """Show the whole conversation, or its last exchanges."""
    messages = await messages_of(chat)
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    count = int(rest) if rest.isdecimal() else len(users)
    for message in messages[users[-min(count, len(users))] :] if users and count else []:
        text = text_of(message["content"])
        if message["role"] == "user":
            chat.screen.user_text(text)
        elif message["role"] == "assistant" and text.strip():
            chat.screen.markdown(text)
        elif message["role"] == "tool":
            chat.screen.note(f"· {message.get('tool_name') or 'tool'}")


async def messages_of(chat: Chat) -> list[JsonObject]:
    talk = chat.talk
    if not talk.saved:
        return talk.history
    messages: list[JsonObject] = await talk.sessions.get_messages(talk.session_id) if await talk.session() else []
    return messages


@slash("save", "PATH [--force]", "write the conversation to a file; --force replaces one", "stored")
async def _save(chat: Chat, rest: str) -> None:
    path = rest.removeprefix("--force ").removesuffix("--force").strip()
    force = ["--force"] if path != rest else []
    if path[:1] in ('"', "'"):  # without quotes spaces belong to the name
        path = " ".join(split_words(path))
    if not path:
        raise UsageError("/save needs a path.", hint="/save conversation.md")
    await run_command(chat, "sessions", "export", chat.talk.session_id, "--format", "md", "-o", folder(path), *force)


@slash("undo", "[turns]", "undo turns", "idle")
async def _undo(chat: Chat, rest: str) -> None:
    if rest and not rest.isdecimal():
        raise UsageError(f"'{rest}' is no number of turns.", hint="/undo 2")
    question = await _rewind(chat, int(rest or 1))
    chat.screen.note(f"Taken back, from: {one_line(text_of(question))}")


async def _rewind(chat: Chat, turns: int) -> Any:
    """Go back by so many turns; the question that is now open again. A server cannot take turns of a session back: there
    the conversation goes on in a branch from before them."""
    talk, messages = chat.talk, await messages_of(chat)
    users = [index for index, one in enumerate(messages) if one["role"] == "user" and not one.get("synthetic")]
    if not 0 < turns <= len(users):
        raise UsageError(f"There are {counted(len(users), 'turn')} to take back.")
    index = users[-turns]
    if not talk.saved:
        talk.history = messages[:index]
    elif not talk.remote:
        await talk.sessions.rewind_to_message(talk.session_id, messages[index]["id"])
    elif index:
        talk.session_id = await talk.sessions.fork_session(talk.session_id, at=messages[index - 1]["id"])
    else:
        talk.session_id = new_session_id()
    return messages[index]["content"]


@slash("retry", "", "ask the last question again", "idle")
async def _retry(chat: Chat, rest: str) -> None:
    content = await _rewind(chat, 1)
    chat.queue(content, text_of(content))
