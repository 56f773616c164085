"""Slash commands for turns: look at them, approve, stop and steer them, and show what tools said."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from hermes.cli.output import UsageError
from hermes.cli.slash_sessions import messages_of
from hermes.cli.slash_table import run_command, slash, split_words
from hermes.core.formatting import columns, width
from hermes.core.json_types import JsonObject
from hermes.core.processes import is_alive
from hermes.sandbox.choose import choose_backend
from hermes.services.session_markdown import text_of

if TYPE_CHECKING:
    from hermes.cli.chat_loop import Chat


@slash("compress", "[topic]", "compact the conversation now", "idle", "shared")
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
        facts["window"] = f"{used:,} of {await talk.window():,} tokens used by the last turn"
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


@slash("prompt", "", "show the system prompt", "shared")
async def _prompt(chat: Chat, rest: str) -> None:
    prompt = (await chat.talk.session()).get("system_prompt")
    if not prompt:
        raise UsageError("Nothing has been sent in this session yet.")
    chat.screen.plain("\n\n".join([prompt, *([chat.talk.spec("").instructions or ""] if chat.talk.skills else [])]))


@slash("approve", "[choice]", "approve the pending call")
async def _approve(chat: Chat, rest: str) -> None:
    if not await chat.approve(rest or "once"):
        raise UsageError("Nothing waits for approval.")


@slash("deny", "[what to do instead]", "deny the pending call")
async def _deny(chat: Chat, rest: str) -> None:
    if not await chat.approve("deny", rest):
        raise UsageError("Nothing waits for approval.")


@slash("yolo", "", "switch approvals off for this session, or on again", "shared")
async def _yolo(chat: Chat, rest: str) -> None:
    chat.talk.yolo = not chat.talk.yolo
    how = "No approvals are asked for" if chat.talk.yolo else "What could do harm needs approval"
    chat.screen.note(f"{how}, from the next turn on.", "yellow")


@slash("stop", "", "stop the turn")
async def _stop(chat: Chat, rest: str) -> None:
    if not chat.busy:
        raise UsageError("Nothing is under way.")
    await chat.stop()


@slash("steer", "TEXT", "add a message to the running turn")
async def _steer(chat: Chat, rest: str) -> None:
    await chat.steer(_text(rest, "/steer use the other file"))


@slash("queue", "TEXT", "send this after the turn")
async def _queue(chat: Chat, rest: str) -> None:
    chat.queue(_text(rest, "/queue then run the tests"), rest)


def _text(rest: str, example: str) -> str:
    if not rest:
        raise UsageError("There are no words.", hint=example)
    return rest


@slash("processes", "", "list background commands", "shared")
async def _processes(chat: Chat, rest: str) -> None:
    """Commands in the background, as the conversation tells of them: they live where the agent does."""
    calls: dict[str, str] = {}
    rows: list[list[str]] = []
    for message in await messages_of(chat):
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


@slash("cron", "", "list scheduled jobs")
async def _cron(chat: Chat, rest: str) -> None:
    await run_command(chat, "cron", *(split_words(rest) or ["list"]))


@slash("expand", "", "show the whole output of the last tool")
async def _expand(chat: Chat, rest: str) -> None:
    if not chat.screen.last_output:
        raise UsageError("No tool has said anything yet.")
    chat.screen.expand()


@slash("debug", "", "show the last request, secrets redacted", "shared")
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
