"""Slash commands for what turns are made with: model, reasoning, tools, skills, memory and MCP servers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from hermes.agent.model_lists import list_models
from hermes.cli.output import UsageError, near
from hermes.cli.picker import Picking, matching
from hermes.cli.screen import Screen
from hermes.cli.slash_table import GLOBAL, run_command, slash, split_args, write_setting
from hermes.core.errors import HermesError, ServiceError
from hermes.core.spec import RouteChoice
from hermes.services import model_setup, models
from hermes.settings.schema_types import EFFORTS

if TYPE_CHECKING:
    from hermes.cli.chat_loop import Chat


_FORCE = "--force"


@slash("model", f"[name] [--provider id] [{GLOBAL}]", "choose another model; search in the list, or name it")
async def _model(chat: Chat, rest: str) -> None:
    """Look at the model, or change it. At a terminal those that the provider lists can be searched, and a name that it
    does not list is asked about."""
    args, for_good = split_args(rest)
    provider = args.pop(args.index("--provider") + 1) if "--provider" in args[:-1] else None
    name = next((arg for arg in args if arg not in ("--provider", _FORCE)), None)
    forced = _FORCE in args

    async def use(chosen: str | None) -> None:
        await _set_model(chat, chosen, provider, for_good=for_good)

    names = {} if forced or (provider and not name) else await _model_names(chat, name, provider)
    if not name or not names or name in names:
        await use(name)
    elif isinstance(chat.screen, Screen):
        way = f"/model {name} {_FORCE}" if matching(names, name) else "Enter"
        chat.screen.note(f"The provider lists no model '{name}'.{near(name, names)} {way} uses it anyway.", "yellow")
        chat.pick(Picking("model:", names, use, unlisted=name), name)
        return
    else:
        raise UsageError(f"The provider lists no model '{name}'.{near(name, names)}", hint=f"/model {name} {_FORCE}")
    if names and not name and isinstance(chat.screen, Screen):
        chat.pick(Picking("model:", names, use))


async def _model_names(chat: Chat, name: str | None, provider: str | None) -> dict[str, str]:
    talk = chat.talk
    with suppress(ServiceError, HermesError):
        if talk.remote and talk.server is not None:
            return {one["id"]: "" for one in (await talk.server.call("GET", "/v1/models"))["data"]}
        route = (
            models.primary(talk.settings, RouteChoice(model=name, provider=provider))
            if provider
            else await talk.route()
        )
        listed = await list_models(talk.app.services.http, route)
        windows = {name: f"{window:,} tokens" for name, window in listed["windows"].items()}
        return {name: windows.get(name, "") for name in listed["models"]}
    return {}


async def _set_model(chat: Chat, name: str | None, provider: str | None, *, for_good: bool) -> None:
    talk = chat.talk
    if name or provider:
        choice = RouteChoice(model=name or talk.model, provider=provider or talk.provider)
        if not talk.remote:
            models.primary(talk.settings, choice)
        talk.model, talk.provider = choice.model, choice.provider
        if talk.saved and name and await talk.session():
            await talk.sessions.update_session(talk.session_id, model=name)
        if for_good:
            configured = replace(choice, provider=choice.provider or talk.settings.model.provider)
            model_setup.write(talk.home, model_setup.changes_of(talk.settings, configured))
            chat.screen.note(f"model.default is written to {talk.home.config_file}.")
    chat.route = await talk.model_name()
    if isinstance(chat.screen, Screen):
        chat.screen.model = ""
    window = "" if talk.remote else f", window {await talk.window():,} tokens"
    chat.screen.note(f"Model: {chat.route or 'that of the server'}{window}.")


@slash("reasoning", f"[effort|show|hide] [{GLOBAL}]", "reasoning effort, and whether reasoning is shown")
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


@slash("tools", f"[enable|disable names] [{GLOBAL}]", "list, enable or disable tools")
async def _tools(chat: Chat, rest: str) -> None:
    args, for_good = split_args(rest)
    if args and args[0] in ("enable", "disable") and not for_good:
        chat.talk.change_toolsets(args[1:], on=args[0] == "enable")
    elif args or chat.talk.toolsets is None:
        await run_command(chat, "tools", *(args or ["list"]))
    if chat.talk.toolsets is not None:
        chat.screen.note(f"In this conversation: {', '.join(sorted(chat.talk.toolsets)) or 'none'}.")


@slash("skills", "[names|off]", "list skills, or use some")
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


@slash("memory", f"[on|off] [{GLOBAL}]", "show the memory, or switch it on or off", "shared")
async def _memory(chat: Chat, rest: str) -> None:
    args, for_good = split_args(rest)
    if args and args[0] in ("on", "off"):
        chat.talk.memory = args[0] == "on"
        write_setting(chat, for_good, "memory.memory_enabled", chat.talk.memory)
        chat.screen.note(f"Memory is {args[0]} in this conversation.")
    else:
        await run_command(chat, "memory", *(args or ["show"]))


@slash("mcp", f"[enable|disable name] [{GLOBAL}]", "list, enable or disable MCP servers", "shared")
async def _mcp(chat: Chat, rest: str) -> None:
    args, for_good = split_args(rest)
    if len(args) == 2 and args[0] in ("enable", "disable"):
        on = args[0] == "enable"
        chat.talk.change_toolsets([f"mcp:{args[1]}"], on=on)
        write_setting(chat, for_good, f"mcp_servers.{args[1]}.enabled", on)
        chat.screen.note(f"The server {args[1]} is {'used' if on else 'not used'} in this conversation.")
    else:
        await run_command(chat, "mcp", *(args or ["list"]))
