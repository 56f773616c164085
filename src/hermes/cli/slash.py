"""The commands of a chat that begin with a slash, in one table; the names of skills are commands too."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from hermes.cli.actions import folder
from hermes.cli.door import Door
from hermes.cli.output import UsageError
from hermes.cli.session import here, near
from hermes.core.formatting import columns, counted, one_line, width
from hermes.core.processes import is_alive
from hermes.core.spec import Content, RouteChoice
from hermes.providers import routes
from hermes.providers.registry import capabilities_of
from hermes.sandbox.choose import choose_backend
from hermes.services.session_markdown import text_of
from hermes.services.skills import find_skills, skill_text
from hermes.settings import config
from hermes.settings.schema import EFFORTS
from hermes.store.sessions import new_session_id

if TYPE_CHECKING:
    from hermes.cli.chat_loop import Chat

GLOBAL = "--global"


async def run(chat: Chat, text: str) -> None:
    """One of them; an unknown one is never sent to the model."""
    name, _, rest = text[1:].partition(" ")
    skills = _skills(chat)
    if name not in skills:
        chat.screen.said(text)
    if (known := COMMANDS.get(name)) is not None:
        await known[0](chat, rest.strip())
    elif name in skills:
        file = {
            "name": f"{name}.md",
            "media_type": "text/plain",
            "data": skill_text(chat.talk.skill(name).path).encode(),
        }
        words = rest.strip() or skills[name]
        content: Content = [
            {"type": "text", "text": f"Follow the skill {name}: {words}"},
            {"type": "file", "file": file},
        ]
        chat.queue(content, text)
    else:
        hint = "/help, or a space before it, to send it as it is"
        raise UsageError(f"There is no command /{one_line(name)}.{near(name, [*COMMANDS, *skills])}", hint=hint)


def names(chat: Chat) -> dict[str, str]:
    """Every command with what it does, for completion."""
    return {name: about for name, (_, _, about) in COMMANDS.items()} | _skills(chat)


def _skills(chat: Chat) -> dict[str, str]:
    found = [] if chat.talk.args.safe_mode else find_skills(chat.talk.settings)
    return {skill.name: skill.description for skill in found if skill.name not in COMMANDS}


async def _command(chat: Chat, *words: str) -> None:
    """What a command of `hermes` prints."""
    from hermes.cli.main import main

    async with _printed(chat):
        with suppress(SystemExit):
            await chat.talk.blocking(partial(main, ["-p", chat.talk.home.profile, *words]))


@asynccontextmanager
async def _printed(chat: Chat) -> AsyncIterator[None]:
    """What is printed meanwhile stands on the screen afterwards."""
    printed = io.StringIO()
    async with chat.printing:  # there is one standard output for all
        try:
            with redirect_stdout(printed), redirect_stderr(printed):
                yield
        finally:
            if printed.getvalue():
                chat.screen.plain(printed.getvalue())


def _idle(chat: Chat) -> None:
    if chat.busy:
        raise UsageError("A turn is under way.", hint="/stop")


def _kept(chat: Chat) -> None:
    if not chat.talk.saved:
        raise UsageError("This conversation is not kept.", hint="hermes without --no-save")


def _worded(rest: str) -> tuple[list[str], bool]:
    """The words of a command, and whether they are meant for every conversation."""
    words = shlex.split(rest)
    return [word for word in words if word != GLOBAL], GLOBAL in words


def _for_good(chat: Chat, name: str, value: Any) -> None:
    written = config.set_value(chat.talk.home, name, value)
    chat.screen.note(f"{name} is written to {written.file}.")


# --- sessions --------------------------------------------------------------------------------------------------------


async def _help(chat: Chat, rest: str) -> None:
    rows = [[f"/{name} {arguments}".rstrip(), about] for name, (_, arguments, about) in COMMANDS.items()]
    rows += [[f"/{name}", about] for name, about in _skills(chat).items()]
    chat.screen.plain("\n".join(columns(rows, 1, width())))


async def _quit(chat: Chat, rest: str) -> None:
    if rest not in ("", "--delete"):
        raise UsageError(f"/quit does not know '{rest}'.", hint="/quit, or /quit --delete")
    chat.deletes = bool(rest)
    chat.leave()


async def _new(chat: Chat, rest: str) -> None:
    _idle(chat)
    await chat.talk.end()
    chat.talk.session_id, chat.talk.history = new_session_id(), []
    if rest and chat.talk.saved:
        await _titled(chat, chat.talk.db.create_session(chat.talk.session_id, "cli", title=rest, cwd=here()))
    chat.screen.note(f"A new session: {rest or chat.talk.session_id}.")


async def _titled(chat: Chat, work: Awaitable[Any]) -> Any:
    try:
        return await work
    except ValueError as error:
        raise UsageError(str(error), hint="another title") from None


async def _resume(chat: Chat, rest: str) -> None:
    _kept(chat)
    if not rest:
        await _command(chat, "sessions", "list", "--workspace", here(), "--limit", "10")
        return
    _idle(chat)
    before = chat.talk.session_id
    async with _printed(chat):
        await chat.talk.resume(rest)
    if chat.talk.session_id != before:
        await chat.talk.end(before)
    await history(chat, "1")


async def _sessions(chat: Chat, rest: str) -> None:
    await _command(chat, "sessions", "list", *(["--search", rest] if rest else []))


async def _title(chat: Chat, rest: str) -> None:
    _kept(chat)
    if rest:
        await chat.talk.db.create_session(chat.talk.session_id, "cli", cwd=here())
        await _titled(chat, chat.talk.db.set_session_title(chat.talk.session_id, rest))
    title = (await chat.talk.session()).get("title")
    chat.screen.note(f"Title: {title}" if title else "It has no title yet.")


async def _branch(chat: Chat, rest: str) -> None:
    _kept(chat)
    _idle(chat)
    if not await chat.talk.session():
        raise UsageError("Nothing has been said yet.")
    work = chat.talk.db.fork_session(chat.talk.session_id, title=rest or None)
    chat.talk.session_id = await _titled(chat, work)
    session = await chat.talk.session()
    chat.screen.note(f"This goes on in a branch: {session['title'] or chat.talk.session_id}.")


async def history(chat: Chat, rest: str) -> None:
    """What was said: all of it, or the last exchanges."""
    said = await _messages(chat)
    users = [at for at, message in enumerate(said) if message["role"] == "user"]
    count = int(rest) if rest.isdecimal() else len(users)
    for message in said[users[-min(count, len(users))] :] if users and count else []:
        text = text_of(message["content"])
        if message["role"] == "user":
            chat.screen.said(text)
        elif message["role"] == "assistant" and text.strip():
            chat.screen.markdown(text)
        elif message["role"] == "tool":
            chat.screen.note(f"· {message.get('tool_name') or 'tool'}")


async def _messages(chat: Chat) -> list[dict[str, Any]]:
    if not chat.talk.saved:
        return chat.talk.history
    found: list[dict[str, Any]] = await chat.talk.db.get_messages(chat.talk.session_id)
    return found


async def _save(chat: Chat, rest: str) -> None:
    _kept(chat)
    if not rest:
        raise UsageError("/save needs a path.", hint="/save conversation.md")
    await _command(chat, "sessions", "export", chat.talk.session_id, "--format", "md", "-o", folder(rest))


async def _undo(chat: Chat, rest: str) -> None:
    _idle(chat)
    if rest and not rest.isdecimal():
        raise UsageError(f"'{rest}' is no number of turns.", hint="/undo 2")
    taken = await _rewind(chat, int(rest or 1))
    chat.screen.note(f"Taken back, from: {one_line(text_of(taken))}")


async def _rewind(chat: Chat, turns: int) -> Any:
    """Go back by so many turns; the question that is now open again."""
    talk, said = chat.talk, await _messages(chat)
    users = [at for at, one in enumerate(said) if one["role"] == "user" and not one.get("synthetic")]
    if not 0 < turns <= len(users):
        raise UsageError(f"There are {counted(len(users), 'turn')} to take back.")
    first = said[users[-turns]]
    if talk.saved:
        await talk.db.rewind_to_message(talk.session_id, first["id"])
    else:
        talk.history = said[: users[-turns]]
    return first["content"]


async def _retry(chat: Chat, rest: str) -> None:
    _idle(chat)
    content = await _rewind(chat, 1)
    chat.queue(content, text_of(content))


# --- what turns are made with ----------------------------------------------------------------------------------------


async def _model(chat: Chat, rest: str) -> None:
    talk = chat.talk
    words, for_good = _worded(rest)
    provider = words.pop(words.index("--provider") + 1) if "--provider" in words[:-1] else None
    words = [word for word in words if word != "--provider"]
    if words or provider:
        wanted = RouteChoice(model=words[0] if words else talk.model, provider=provider or talk.provider)
        routes.primary(talk.settings, wanted)
        talk.model, talk.provider = wanted.model, wanted.provider
        if talk.saved and words and await talk.session():
            await talk.db.update_session(talk.session_id, model=words[0])
        if for_good and words:
            _for_good(chat, "model.default", words[0])
        if for_good and provider:
            _for_good(chat, "model.provider", provider)
    route = await talk.route()
    chat.route = f"{route.provider}/{route.model}"
    chat.screen.note(f"Model: {chat.route}, window {_window(route):,} tokens.")


def _window(route: Any) -> int:
    return int(route.window_tokens or capabilities_of(route).window)


async def _reasoning(chat: Chat, rest: str) -> None:
    words, for_good = _worded(rest)
    if words and words[0] in ("show", "hide"):
        chat.screen.reasoning = words[0] == "show"
        if for_good:
            _for_good(chat, "display.show_reasoning", chat.screen.reasoning)
    elif words and words[0] in EFFORTS:
        chat.talk.effort = words[0]
        if for_good:
            _for_good(chat, "agent.reasoning_effort", words[0])
    elif words:
        raise UsageError(f"'{words[0]}' is no effort.", hint=f"/reasoning {' | '.join((*EFFORTS, 'show', 'hide'))}")
    effort = chat.talk.effort or chat.talk.settings.agent.reasoning_effort or "as the model does by itself"
    chat.screen.note(f"Reasoning: {effort}; it is {'shown' if chat.screen.reasoning else 'hidden'}.")


async def _tools(chat: Chat, rest: str) -> None:
    words, for_good = _worded(rest)
    if words and words[0] in ("enable", "disable") and not for_good:
        chat.talk.change_toolsets(words[1:], on=words[0] == "enable")
    elif words or chat.talk.toolsets is None:
        await _command(chat, "tools", *(words or ["list"]))
    if chat.talk.toolsets is not None:
        chat.screen.note(f"In this conversation: {', '.join(sorted(chat.talk.toolsets)) or 'none'}.")


async def _use_skills(chat: Chat, rest: str) -> None:
    words, _ = _worded(rest)
    if not words:
        await _command(chat, "skills", "list")
    elif words[0] == "off":
        chat.talk.skills = []
    else:
        chat.talk.skills += [chat.talk.skill(name) for name in words]
    if words or chat.talk.skills:
        chat.screen.note(f"Followed here: {', '.join(skill.name for skill in chat.talk.skills) or 'none'}.")


async def _memory(chat: Chat, rest: str) -> None:
    words, for_good = _worded(rest)
    if words and words[0] in ("on", "off"):
        chat.talk.memory = words[0] == "on"
        if for_good:
            _for_good(chat, "memory.memory_enabled", chat.talk.memory)
        chat.screen.note(f"Memory is {words[0]} in this conversation.")
    else:
        await _command(chat, "memory", *(words or ["show"]))


async def _mcp(chat: Chat, rest: str) -> None:
    words, for_good = _worded(rest)
    if len(words) == 2 and words[0] in ("enable", "disable"):
        on = words[0] == "enable"
        chat.talk.change_toolsets([f"mcp:{words[1]}"], on=on)
        if for_good:
            _for_good(chat, f"mcp_servers.{words[1]}.enabled", on)
        chat.screen.note(f"The server {words[1]} is {'used' if on else 'not used'} in this conversation.")
    else:
        await _command(chat, "mcp", *(words or ["list"]))


# --- looking at turns ------------------------------------------------------------------------------------------------


async def _compress(chat: Chat, rest: str) -> None:
    _idle(chat)
    told: list[str] = []

    def show(event: dict[str, Any]) -> None:
        told.append(event["event"])
        chat.show(event)

    spec = chat.talk.spec("", compact=rest)
    chat.begin(chat.turn(chat.talk.follow(Door(chat.talk.app), spec, show)))
    await chat.idle()
    if "run.completed" in told and "context.compressed" not in told:
        chat.screen.note("There is nothing to make shorter yet.")


async def _usage(chat: Chat, rest: str) -> None:
    used = await chat.talk.db.get_usage(chat.talk.session_id) if chat.talk.saved else []
    if not used:
        chat.screen.note(f"{chat.screen.tokens:,} tokens in this conversation.")
        return
    rows = [["model", "for", "calls", "in", "out", "cached", "cost"]]
    for one in used:
        cost = "-" if one["actual_cost_usd"] is None else f"${one['actual_cost_usd']:.4f}"
        counts = [f"{one[name]:,}" for name in ("calls", "input_tokens", "output_tokens", "cache_read_tokens")]
        rows.append([f"{one['provider']}/{one['model']}", one["task"] or "turns", *counts, cost])
    chat.screen.plain("\n".join(columns(rows, 0, width())))


async def _status(chat: Chat, rest: str) -> None:
    talk = chat.talk
    route, session = await talk.route(), await talk.session()
    used = talk.result["input_tokens"] if talk.result else 0
    chosen = await talk.blocking(partial(choose_backend, talk.settings))
    facts = {
        "model": f"{route.provider}/{route.model}",
        "window": f"{used:,} of {_window(route):,} tokens used by the last turn",
        "sandbox": f"{chosen.name}{'' if chosen.isolated or chosen.reason else ', not isolated'}",
        "folder": here(),
        "session": f"{talk.session_id} {session.get('title') or ''}".strip() if talk.saved else "not kept",
        "agent": "in the server of this home" if talk.door.kind == "server" else "in this process",
        "approvals": "off" if talk.yolo else talk.settings.approvals.mode,
        "typing while it works": chat.mode,
    }
    chat.screen.plain("\n".join(columns([[name, str(value)] for name, value in facts.items()], 1, None)))


async def _prompt(chat: Chat, rest: str) -> None:
    prompt = (await chat.talk.session()).get("system_prompt")
    if not prompt:
        raise UsageError("Nothing has been sent in this session yet.")
    chat.screen.plain("\n\n".join([prompt, *([chat.talk.spec("").instructions or ""] if chat.talk.skills else [])]))


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


# --- control ---------------------------------------------------------------------------------------------------------


async def _approve(chat: Chat, rest: str) -> None:
    if not await chat.approve(rest or "once"):
        raise UsageError("Nothing waits for leave.")


async def _deny(chat: Chat, rest: str) -> None:
    await _approve(chat, "deny")


async def _yolo(chat: Chat, rest: str) -> None:
    chat.talk.yolo = not chat.talk.yolo
    how = "Nothing is asked about" if chat.talk.yolo else "What could do harm is asked about"
    chat.screen.note(f"{how}, from the next turn on.", "yellow")


async def _stop(chat: Chat, rest: str) -> None:
    if not chat.busy:
        raise UsageError("Nothing is under way.")
    await chat.stop()


async def _steer(chat: Chat, rest: str) -> None:
    await chat.steer(_some(rest, "/steer use the other file"))


async def _queue(chat: Chat, rest: str) -> None:
    chat.queue(_some(rest, "/queue then run the tests"), rest)


def _some(rest: str, example: str) -> str:
    if not rest:
        raise UsageError("There are no words.", hint=example)
    return rest


async def _processes(chat: Chat, rest: str) -> None:
    """Commands in the background, as the conversation tells of them: they live where the agent does."""
    calls: dict[str, str] = {}
    rows: list[list[str]] = []
    for message in await _messages(chat):
        for call in message.get("tool_calls") or ():
            calls[call["id"]] = call["function"]["arguments"]
        told = _object(text_of(message["content"])) if message["role"] == "tool" else {}
        if told.get("status") == "started" and told.get("pid"):
            asked = _object(calls.get(message["tool_call_id"], ""))
            state = "running" if is_alive(int(told["pid"]), None) else "ended"
            rows.append([str(told.get("session_id")), state, str(asked.get("command", ""))])
    chat.screen.plain("\n".join(columns(rows, 2, width())) if rows else "No commands in the background.")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def _cron(chat: Chat, rest: str) -> None:
    await _command(chat, "cron", *(shlex.split(rest) or ["list"]))


async def _expand(chat: Chat, rest: str) -> None:
    if not chat.screen.last_output:
        raise UsageError("No tool has said anything yet.")
    chat.screen.plain(chat.screen.last_output)


Work = Callable[["Chat", str], Awaitable[None]]
# name: (what is done, its arguments, what it does)
COMMANDS: dict[str, tuple[Work, str, str]] = {
    "help": (_help, "", "this list"),
    "new": (_new, "[title]", "begin another session"),
    "resume": (_resume, "[id or title]", "go on with another session"),
    "sessions": (_sessions, "[query]", "the sessions there are"),
    "title": (_title, "[text]", "look at the title, or change it"),
    "branch": (_branch, "[title]", "go on in a copy from here"),
    "history": (history, "[turns]", "what was said"),
    "save": (_save, "PATH", "write the conversation to a file"),
    "undo": (_undo, "[turns]", "take turns back"),
    "retry": (_retry, "", "the same question again"),
    "model": (_model, f"[name] [--provider id] [{GLOBAL}]", "look at the model, or change it"),
    "reasoning": (_reasoning, f"[effort|show|hide] [{GLOBAL}]", "how hard to think, and whether that is shown"),
    "tools": (_tools, f"[enable|disable names] [{GLOBAL}]", "which tools are offered"),
    "skills": (_use_skills, "[names|off]", "the skills there are, or follow some"),
    "memory": (_memory, f"[on|off] [{GLOBAL}]", "what is remembered in every session"),
    "mcp": (_mcp, f"[enable|disable name] [{GLOBAL}]", "servers whose tools are used"),
    "compress": (_compress, "[topic]", "make the conversation shorter now"),
    "usage": (_usage, "", "tokens and cost of this session"),
    "status": (_status, "", "model, window, sandbox, session"),
    "prompt": (_prompt, "", "the system prompt as it is sent"),
    "approve": (_approve, "[choice]", "allow what is asked about"),
    "deny": (_deny, "", "do not allow it"),
    "yolo": (_yolo, "", "ask about nothing in this session, or ask again"),
    "stop": (_stop, "", "stop the turn"),
    "steer": (_steer, "TEXT", "tell the turn something without stopping it"),
    "queue": (_queue, "TEXT", "ask this after the turn"),
    "processes": (_processes, "", "commands in the background"),
    "cron": (_cron, "", "scheduled jobs"),
    "expand": (_expand, "", "all that the last tool said"),
    "debug": (_debug, "", "the last request, without secrets"),
    "quit": (_quit, "[--delete]", "leave, and delete the session"),
}
