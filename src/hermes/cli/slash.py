"""The commands of a chat that begin with a slash, each declared by `@slash`; the names of skills are commands too."""

from __future__ import annotations

import json
import shlex
from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Any

from hermes.cli.command import folder
from hermes.cli.conversation import near
from hermes.cli.output import UsageError
from hermes.cli.session_format import session_lines
from hermes.cli.slash_table import COMMANDS, GLOBAL, printed, require, run_command, slash, split_args, write_setting
from hermes.core.formatting import columns, counted, one_line, width
from hermes.core.json_types import JsonObject
from hermes.core.processes import is_alive
from hermes.core.spec import Content, RouteChoice
from hermes.sandbox.choose import choose_backend
from hermes.services import models
from hermes.services.session_markdown import text_of
from hermes.services.skills import find_skills, skill_text
from hermes.settings.schema import EFFORTS
from hermes.store.sessions import new_session_id

if TYPE_CHECKING:
    from hermes.cli.chat_loop import Chat
    from hermes.services.models import Route


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


# --- sessions --------------------------------------------------------------------------------------------------------


@slash("help", "", "this list")
async def _help(chat: Chat, rest: str) -> None:
    rows = [[f"/{name} {command.arguments}".rstrip(), command.about] for name, command in COMMANDS.items()]
    rows += [[f"/{name}", about] for name, about in _skills(chat).items()]
    chat.screen.plain("\n".join(columns(rows, 1, width())))


@slash("new", "[title]", "begin another session", "idle")
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


@slash("resume", "[id or title]", "go on with another session", "stored")
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


@slash("sessions", "[query]", "the sessions there are")
async def _sessions(chat: Chat, rest: str) -> None:
    if chat.talk.remote:
        listed = session_lines(await chat.talk.sessions.list_sessions(rest), width())
        chat.screen.plain("\n".join(listed) or "There are no sessions.")
    else:
        await run_command(chat, "sessions", "list", *(["--search", rest] if rest else []))


@slash("title", "[text]", "look at the title, or change it", "stored")
async def _title(chat: Chat, rest: str) -> None:
    if rest:
        await chat.talk.sessions.create_session(chat.talk.session_id, "cli", cwd=chat.talk.folder)
        await _titled(chat.talk.sessions.set_session_title(chat.talk.session_id, rest))
    title = (await chat.talk.session()).get("title")
    chat.screen.note(f"Title: {title}" if title else "It has no title yet.")


@slash("branch", "[title]", "go on in a copy from here", "stored", "idle")
async def _branch(chat: Chat, rest: str) -> None:
    if not await chat.talk.session():
        raise UsageError("Nothing has been said yet.")
    work = chat.talk.sessions.fork_session(chat.talk.session_id, title=rest or None)
    chat.talk.session_id = await _titled(work)
    session = await chat.talk.session()
    chat.screen.note(f"This goes on in a branch: {session['title'] or chat.talk.session_id}.")


@slash("history", "[turns]", "what was said")
async def history(chat: Chat, rest: str) -> None:
    """Show the whole conversation, or its last exchanges."""
    messages = await _messages(chat)
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    count = int(rest) if rest.isdecimal() else len(users)
    for message in messages[users[-min(count, len(users))] :] if users and count else []:
        text = text_of(message["content"])
        if message["role"] == "user":
            chat.screen.said(text)
        elif message["role"] == "assistant" and text.strip():
            chat.screen.markdown(text)
        elif message["role"] == "tool":
            chat.screen.note(f"· {message.get('tool_name') or 'tool'}")


async def _messages(chat: Chat) -> list[JsonObject]:
    talk = chat.talk
    if not talk.saved:
        return talk.history
    messages: list[JsonObject] = await talk.sessions.get_messages(talk.session_id) if await talk.session() else []
    return messages


@slash("save", "PATH", "write the conversation to a file", "stored")
async def _save(chat: Chat, rest: str) -> None:
    if not rest:
        raise UsageError("/save needs a path.", hint="/save conversation.md")
    await run_command(chat, "sessions", "export", chat.talk.session_id, "--format", "md", "-o", folder(rest))


@slash("undo", "[turns]", "take turns back", "idle")
async def _undo(chat: Chat, rest: str) -> None:
    if rest and not rest.isdecimal():
        raise UsageError(f"'{rest}' is no number of turns.", hint="/undo 2")
    question = await _rewind(chat, int(rest or 1))
    chat.screen.note(f"Taken back, from: {one_line(text_of(question))}")


async def _rewind(chat: Chat, turns: int) -> Any:
    """Go back by so many turns; the question that is now open again. A server cannot take turns of a session back: there
    the conversation goes on in a branch from before them."""
    talk, messages = chat.talk, await _messages(chat)
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


@slash("retry", "", "the same question again", "idle")
async def _retry(chat: Chat, rest: str) -> None:
    content = await _rewind(chat, 1)
    chat.queue(content, text_of(content))


# --- what turns are made with ----------------------------------------------------------------------------------------


@slash("model", f"[name] [--provider id] [{GLOBAL}]", "look at the model, or change it")
async def _model(chat: Chat, rest: str) -> None:
    talk = chat.talk
    args, for_good = split_args(rest)
    provider = args.pop(args.index("--provider") + 1) if "--provider" in args[:-1] else None
    args = [arg for arg in args if arg != "--provider"]
    if args or provider:
        choice = RouteChoice(model=args[0] if args else talk.model, provider=provider or talk.provider)
        if not talk.remote:
            models.primary(talk.settings, choice)
        talk.model, talk.provider = choice.model, choice.provider
        if talk.saved and args and await talk.session():
            await talk.sessions.update_session(talk.session_id, model=args[0])
        write_setting(chat, for_good and bool(args), "model.default", choice.model)
        write_setting(chat, for_good and bool(provider), "model.provider", provider)
    chat.route = await talk.model_name()
    window = "" if talk.remote else f", window {window_of(await talk.route()):,} tokens"
    chat.screen.note(f"Model: {chat.route or 'that of the server'}{window}.")


def window_of(route: Route) -> int:
    return int(route.window_tokens or models.capabilities_of(route).window)


@slash("reasoning", f"[effort|show|hide] [{GLOBAL}]", "how hard to think, and whether that is shown")
async def _reasoning(chat: Chat, rest: str) -> None:
    args, for_good = split_args(rest)
    if args and args[0] in ("show", "hide"):
        chat.screen.reasoning = args[0] == "show"
        write_setting(chat, for_good, "display.show_reasoning", chat.screen.reasoning)
    elif args and args[0] in EFFORTS:
        chat.talk.effort = args[0]
        write_setting(chat, for_good, "agent.reasoning_effort", args[0])
    elif args:
        raise UsageError(f"'{args[0]}' is no effort.", hint=f"/reasoning {' | '.join((*EFFORTS, 'show', 'hide'))}")
    effort = chat.talk.effort or chat.talk.settings.agent.reasoning_effort or "as the model does by itself"
    chat.screen.note(f"Reasoning: {effort}; it is {'shown' if chat.screen.reasoning else 'hidden'}.")


@slash("tools", f"[enable|disable names] [{GLOBAL}]", "which tools are offered")
async def _tools(chat: Chat, rest: str) -> None:
    args, for_good = split_args(rest)
    if args and args[0] in ("enable", "disable") and not for_good:
        chat.talk.change_toolsets(args[1:], on=args[0] == "enable")
    elif args or chat.talk.toolsets is None:
        await run_command(chat, "tools", *(args or ["list"]))
    if chat.talk.toolsets is not None:
        chat.screen.note(f"In this conversation: {', '.join(sorted(chat.talk.toolsets)) or 'none'}.")


@slash("skills", "[names|off]", "the skills there are, or follow some")
async def _use_skills(chat: Chat, rest: str) -> None:
    args, _ = split_args(rest)
    if not args:
        await run_command(chat, "skills", "list")
    elif args[0] == "off":
        chat.talk.skills = []
    else:
        chat.talk.skills += [chat.talk.skill(name) for name in args]
    if args or chat.talk.skills:
        chat.screen.note(f"Followed here: {', '.join(skill.name for skill in chat.talk.skills) or 'none'}.")


@slash("memory", f"[on|off] [{GLOBAL}]", "what is remembered in every session", "shared")
async def _memory(chat: Chat, rest: str) -> None:
    args, for_good = split_args(rest)
    if args and args[0] in ("on", "off"):
        chat.talk.memory = args[0] == "on"
        write_setting(chat, for_good, "memory.memory_enabled", chat.talk.memory)
        chat.screen.note(f"Memory is {args[0]} in this conversation.")
    else:
        await run_command(chat, "memory", *(args or ["show"]))


@slash("mcp", f"[enable|disable name] [{GLOBAL}]", "servers whose tools are used", "shared")
async def _mcp(chat: Chat, rest: str) -> None:
    args, for_good = split_args(rest)
    if len(args) == 2 and args[0] in ("enable", "disable"):
        on = args[0] == "enable"
        chat.talk.change_toolsets([f"mcp:{args[1]}"], on=on)
        write_setting(chat, for_good, f"mcp_servers.{args[1]}.enabled", on)
        chat.screen.note(f"The server {args[1]} is {'used' if on else 'not used'} in this conversation.")
    else:
        await run_command(chat, "mcp", *(args or ["list"]))


# --- looking at turns ------------------------------------------------------------------------------------------------


@slash("compress", "[topic]", "make the conversation shorter now", "idle", "shared")
async def _compress(chat: Chat, rest: str) -> None:
    events: list[str] = []

    def show(event: JsonObject) -> None:
        events.append(event["event"])
        chat.show(event)

    chat.begin(chat.turn(chat.talk.ask("", show, compact=rest)))
    await chat.idle()
    if "run.completed" in events and "context.compressed" not in events:
        chat.screen.note("There is nothing to make shorter yet.")


@slash("usage", "", "tokens and cost of this session")
async def _usage(chat: Chat, rest: str) -> None:
    usage = await chat.talk.sessions.get_usage(chat.talk.session_id) if chat.talk.saved else []
    if not usage:
        chat.screen.note(f"{chat.screen.tokens:,} tokens in this conversation.")
        return
    rows = [["model", "for", "calls", "in", "out", "cached", "cost"]]
    for one in usage:
        cost = "-" if one["actual_cost_usd"] is None else f"${one['actual_cost_usd']:.4f}"
        counts = [f"{one[name]:,}" for name in ("calls", "input_tokens", "output_tokens", "cache_read_tokens")]
        model = "/".join(filter(None, (one["provider"], one["model"])))
        rows.append([model, one["task"] or "turns", *counts, cost])
    chat.screen.plain("\n".join(columns(rows, 0, width())))


@slash("status", "", "model, window, sandbox, session")
async def _status(chat: Chat, rest: str) -> None:
    talk = chat.talk
    session, used = await talk.session(), talk.result["input_tokens"] if talk.result else 0
    facts = {"model": await talk.model_name() or "that of the server"}
    if not talk.remote:
        facts["window"] = f"{used:,} of {window_of(await talk.route()):,} tokens used by the last turn"
        backend = await talk.blocking(partial(choose_backend, talk.settings))
        facts["sandbox"] = f"{backend.name}{'' if backend.isolated or backend.reason else ', not isolated'}"
        facts["folder"] = talk.folder
    facts |= {
        "session": f"{talk.session_id} {session.get('title') or ''}".strip() if talk.saved else "not kept",
        "agent": talk.place,
        "approvals": "off" if talk.yolo else talk.settings.approvals.mode,
        "typing while it works": chat.mode,
    }
    chat.screen.plain("\n".join(columns([[name, str(value)] for name, value in facts.items()], 1, None)))


@slash("prompt", "", "the system prompt as it is sent", "shared")
async def _prompt(chat: Chat, rest: str) -> None:
    prompt = (await chat.talk.session()).get("system_prompt")
    if not prompt:
        raise UsageError("Nothing has been sent in this session yet.")
    chat.screen.plain("\n\n".join([prompt, *([chat.talk.spec("").instructions or ""] if chat.talk.skills else [])]))


# --- control ---------------------------------------------------------------------------------------------------------


@slash("approve", "[choice]", "allow what is asked about")
async def _approve(chat: Chat, rest: str) -> None:
    if not await chat.approve(rest or "once"):
        raise UsageError("Nothing waits for leave.")


@slash("deny", "", "do not allow it")
async def _deny(chat: Chat, rest: str) -> None:
    await _approve(chat, "deny")


@slash("yolo", "", "ask about nothing in this session, or ask again", "shared")
async def _yolo(chat: Chat, rest: str) -> None:
    chat.talk.yolo = not chat.talk.yolo
    how = "Nothing is asked about" if chat.talk.yolo else "What could do harm is asked about"
    chat.screen.note(f"{how}, from the next turn on.", "yellow")


@slash("stop", "", "stop the turn")
async def _stop(chat: Chat, rest: str) -> None:
    if not chat.busy:
        raise UsageError("Nothing is under way.")
    await chat.stop()


@slash("steer", "TEXT", "tell the turn something without stopping it")
async def _steer(chat: Chat, rest: str) -> None:
    await chat.steer(_text(rest, "/steer use the other file"))


@slash("queue", "TEXT", "ask this after the turn")
async def _queue(chat: Chat, rest: str) -> None:
    chat.queue(_text(rest, "/queue then run the tests"), rest)


def _text(rest: str, example: str) -> str:
    if not rest:
        raise UsageError("There are no words.", hint=example)
    return rest


@slash("processes", "", "commands in the background", "shared")
async def _processes(chat: Chat, rest: str) -> None:
    """Commands in the background, as the conversation tells of them: they live where the agent does."""
    calls: dict[str, str] = {}
    rows: list[list[str]] = []
    for message in await _messages(chat):
        for call in message.get("tool_calls") or ():
            calls[call["id"]] = call["function"]["arguments"]
        answer = _object(text_of(message["content"])) if message["role"] == "tool" else {}
        if answer.get("status") == "started" and answer.get("pid"):
            arguments = _object(calls.get(message["tool_call_id"], ""))
            state = "running" if is_alive(int(answer["pid"]), None) else "ended"
            rows.append([str(answer.get("session_id")), state, str(arguments.get("command", ""))])
    chat.screen.plain("\n".join(columns(rows, 2, width())) if rows else "No commands in the background.")


def _object(text: str) -> JsonObject:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


@slash("cron", "", "scheduled jobs")
async def _cron(chat: Chat, rest: str) -> None:
    await run_command(chat, "cron", *(shlex.split(rest) or ["list"]))


@slash("expand", "", "all that the last tool said")
async def _expand(chat: Chat, rest: str) -> None:
    if not chat.screen.last_output:
        raise UsageError("No tool has said anything yet.")
    chat.screen.plain(chat.screen.last_output)


@slash("debug", "", "the last request, without secrets", "shared")
async def _debug(chat: Chat, rest: str) -> None:
    talk, result = chat.talk, chat.talk.result
    if result is None:
        raise UsageError("Nothing has been asked yet.")
    started = next((e.data for e in await talk.app.engine.durable(result["run_id"]) if e.type == "run.started"), {})
    request = {
        "run_id": result["run_id"],
        "model": result["model"],
        "provider": result["provider"],
        "tools": started.get("tools"),
        "system": (await talk.session()).get("system_prompt"),
        "messages": result["messages"][:-1] if result["completed"] else result["messages"],
    }
    chat.screen.plain(talk.app.secrets.redact(json.dumps(request, indent=1, ensure_ascii=False, default=str)))


@slash("quit", "[--delete]", "leave, and delete the session")
async def _quit(chat: Chat, rest: str) -> None:
    if rest not in ("", "--delete"):
        raise UsageError(f"/quit does not know '{rest}'.", hint="/quit, or /quit --delete")
    chat.deletes = bool(rest)
    chat.leave()
