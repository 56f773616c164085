"""How a turn begins: its route, history, tools and system prompt, and the commit that puts it on record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from hermes.agent import prompt
from hermes.agent.auxiliary import first_words, names_session, plain_title
from hermes.agent.content import Arrived, arrived
from hermes.agent.prompt import PromptInputs
from hermes.agent.prompt_context import gather
from hermes.agent.turn import Services, Turn
from hermes.core.errors import ConfigError
from hermes.core.failures import Failure
from hermes.core.limits import LEAN_WINDOW_TOKENS
from hermes.core.spec import RunSpec
from hermes.core.text import text_of, whole_tree
from hermes.providers import routes
from hermes.providers.base import Message, Route, ToolSchema
from hermes.runs.control import Stopped
from hermes.runs.engine import LiveRun
from hermes.settings.config import Settings
from hermes.store.base import Row
from hermes.tools.mcp import PREFIX as SERVER_PREFIX
from hermes.tools.registry import ToolDef, redaction
from hermes.tools.toolsets import LEAN, enabled_toolsets

_KINDS = {"subagent": "delegate", "job": "job"}
_UNREADABLE = "[A message that could not be read.]"


async def start_turn(live: LiveRun, services: Services) -> tuple[Turn, Failure | None]:
    """The turn, its beginning on record. A route that cannot be had is a failure to be told."""
    spec = live.spec
    settings, notice = services.settings()
    if live.begun is not None and spec.persist:
        session = live.begun.session
        if session is None:  # whatever is known of a session of this id was of one that is gone
            services.forget([spec.session_id])
    else:
        session = await live.store.sessions.get_session(live.transcript_id)
    live.spec = spec = _kept_by(session, spec, settings)
    found, fault = _routes(live, services, settings, session)
    stored = await _stored(live, session)
    empty = not stored and not (spec.verbatim and session is not None and session["message_count"])
    begins = empty and spec.base_id is not None
    before = Arrived()
    said: Message = {"role": "user", "content": whole_tree(spec.user_message)}
    if spec.user_name:
        said["name"] = spec.user_name
    try:
        redact = redaction(live.secrets, settings)
        before = await arrived([*(stored or spec.history or ()), *_results(spec)], services, spec.folder_id, redact)
        now = await arrived([said], services, spec.folder_id, redact)
        [said], before.given, before.saved = now.messages, before.given | now.given, before.saved + now.saved
        client_tools = {tool.name: tool for tool in map(_client_tool, spec.client_tools)} if spec.client_tools else {}
        await services.files.call_for(len(before.messages), partial(_check_answered, before.messages, said["content"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said, client_tools = {"role": "user", "content": text_of(spec.user_message) or _UNREADABLE}, {}
        fault = Failure(
            "bad_request", None, "", f"The request is malformed: {error!r}", False, "provider_rejected_request"
        )
    new = [said] if said["content"] else []
    history, begun = _begun(spec, before.messages)
    turn = Turn(live, services, settings, found, [*history, *new], len(history))
    turn.begun = begun
    turn.stored = spec.persist and (spec.history is None or spec.base_id is not None)
    turn.user_message = new[0] if new else None
    if spec.verbatim and spec.persist:
        turn.given = Arrived(turn.messages[:], before.given)
    await _equip(turn, client_tools)
    await _record(turn, await set_system_prompt(turn, session), before, begins=begins)
    for file in before.saved if spec.persist else ():
        await live.store.sessions.add_file(
            spec.session_id, file.name, bytes=file.bytes, mime=file.mime, direction="in", path=file.path
        )
    notices = [*live.notices, *([("settings_kept", notice)] if notice else [])]
    for code, words in notices:
        await live.log.emit("notice", level="warn", code=code, message=live.secrets.redact(words))
    return turn, fault


async def resume_turn(live: LiveRun, services: Services) -> tuple[Turn, Failure | None]:
    """The turn of a run that was cut off, with all that it has said and done so far."""
    spec, resumed = live.spec, live.resumption
    assert resumed is not None
    settings, _ = services.settings()
    session = await live.store.sessions.get_session(live.transcript_id)
    live.spec = spec = _kept_by(session, spec, settings)
    found, fault = _routes(live, services, settings, session)
    rows = await live.store.runs.rows(spec.run_id)
    own = [row.as_message() for row in rows]
    stored = spec.history is None or spec.base_id is not None
    if stored and not spec.verbatim:
        messages = await live.store.sessions.get_messages_as_conversation(spec.session_id)
    else:
        before = await arrived(
            [*(spec.history or ()), *_results(spec)], services, spec.folder_id, redaction(live.secrets, settings)
        )
        messages = [*before.messages, *own]
    begun = ""
    if spec.continues:
        before_own = len(messages) - len(own)
        answers = any(message["role"] == "assistant" for message in own)
        if not answers:
            messages, begun = _begun(spec, messages)
        elif not (stored and not spec.verbatim):
            history, text = _begun(spec, messages[:before_own])
            own = [{**own[0], "content": f"{text}{own[0]['content'] or ''}"}, *own[1:]]
            messages = [*history, *own]
    turn = Turn(live, services, settings, found, messages, len(messages) - len(own))
    turn.stored, turn.begun = stored, begun
    turn.user_row = next((row for row in rows if row.role == "user"), None)
    turn.user_message = next((m for m in messages[turn.history_length :] if m["role"] == "user"), None)
    turn.message_id, turn.said = (
        resumed.message_id,
        next((row for row in reversed(rows) if row.role == "assistant"), None),
    )
    try:
        client_tools = {tool.name: tool for tool in map(_client_tool, spec.client_tools)}
    except (KeyError, TypeError, ValueError, AttributeError):
        client_tools = {}
    await _equip(turn, client_tools)
    await set_system_prompt(turn, session)
    for usage in resumed.usage:
        turn.totals.add(usage)
    live.log.step = resumed.step
    return turn, fault


def _kept_by(session: Mapping[str, Any] | None, spec: RunSpec, settings: Settings) -> RunSpec:
    """The spec with what its session keeps for its turns, where whoever asked for the turn has said nothing of it."""
    if session is None:
        return spec
    changes: dict[str, Any] = {}
    if spec.workdir is None and session["workdir"] is not None:
        changes["workdir"] = session["workdir"]
    if spec.max_iterations is None and session["max_iterations"] is not None:
        changes["max_iterations"] = min(session["max_iterations"], settings.agent.max_turns)
    if session["toolsets"] is not None and (spec.toolsets is None or spec.toolsets_by_default):
        usual = _configured(settings, spec.source) if spec.toolsets is None else spec.toolsets
        changes["toolsets"] = usual & frozenset(session["toolsets"])
    return spec.replace(**changes) if changes else spec


def _routes(
    live: LiveRun, services: Services, settings: Settings, session: Mapping[str, Any] | None
) -> tuple[list[Route], Failure | None]:
    chosen = live.spec.route
    try:
        if chosen is None:
            chosen = routes.of_session(settings, session)
        if not routes.is_allowed(settings, live.spec.allowed_models, chosen):
            message = f"The model may not be used with this key; these may: {', '.join(sorted(live.spec.allowed_models or ()))}."
            return [routes.LOCAL], Failure("unknown", None, "", message, False, "model_not_allowed")
        found = routes.routes(settings, chosen)
        for index, route in enumerate(found):
            # Where no window is configured it is the one that the provider tells; it stays the same for the turn.
            window = None if route.window_tokens else services.lists.window(route)
            if window is not None:
                found[index] = replace(route, window_tokens=window)
        return found, None
    except ConfigError as error:
        return [routes.LOCAL], Failure("unknown", None, "", str(error), False, "agent_incomplete")


async def _equip(turn: Turn, client_tools: dict[str, ToolSchema]) -> None:
    """What the turn has at hand."""
    is_cooling_down = turn.services.learnt.is_cooling_down
    turn.at = 1 if len(turn.routes) > 1 and is_cooling_down(turn.routes[0].key) else 0
    turn.instructions = turn.live.spec.instructions or ""
    turn.reasoning = _reasoning(turn)
    turn.client_tools = client_tools
    turn.equip(await _offered(turn))


async def _stored(live: LiveRun, session: Mapping[str, Any] | None) -> list[Message]:
    """What is known to have been said before. A caller's own history counts instead where there is none."""
    spec = live.spec
    if session is None or spec.verbatim or (spec.history is not None and spec.base_id is None):
        return []
    if live.begun is not None and live.begun.said is not None:
        return live.begun.said
    return await live.store.sessions.get_messages_as_conversation(spec.session_id)


async def _offered(turn: Turn) -> dict[str, ToolDef]:
    spec, settings, services = turn.live.spec, turn.settings, turn.services
    sets = set(spec.toolsets if spec.toolsets is not None else _configured(settings, spec.source))
    sets -= spec.disabled_toolsets
    if spec.tool_policy is not None:
        sets &= spec.tool_policy
    if turn.capabilities.toolsets is not None:
        sets = sets if spec.toolsets is not None else sets & turn.capabilities.toolsets
    elif turn.window < LEAN_WINDOW_TOKENS:
        sets &= LEAN
    if not spec.answerable:
        sets -= {"clarify"}
    if not sets.isdisjoint(("terminal", "code_execution")):
        await services.outside.sandboxes.ready(settings)
    known = services.lately((_offered, settings, frozenset(sets)), lambda: services.registry().offered(sets, settings))
    tools = {**known}
    if any(name.startswith(SERVER_PREFIX) for name in sets):
        told = services.session_states.of(
            spec.owner, spec.session_id, spec.parent_session_id if spec.parent else None
        ).mcp_known
        with suppress(Stopped):  # then it ends with what there is, and says so by the usual way
            async with turn.live.controls.stop.scope():
                tools, notices = await services.mcp.offered(tools, sets, settings, turn.window, told)
                turn.live.notices += notices
    return tools


def may_use(spec: RunSpec, settings: Settings, toolset: str) -> bool:
    """Whether a run itself may use a toolset, whatever its model is offered."""
    sets = (spec.toolsets or frozenset()) | _configured(settings, spec.source)
    return toolset in sets - spec.disabled_toolsets and (spec.tool_policy is None or toolset in spec.tool_policy)


@lru_cache(maxsize=16)
def _configured(settings: Settings, source: str) -> frozenset[str]:
    return frozenset(enabled_toolsets(settings, source))


def _reasoning(turn: Turn) -> Mapping[str, Any] | None:
    if turn.live.spec.reasoning is not None:
        return turn.live.spec.reasoning
    agent = turn.settings.agent
    effort = agent.reasoning_overrides.get(turn.route.model) or agent.reasoning_effort
    return {"enabled": effort != "none", "effort": effort} if effort else None


async def set_system_prompt(turn: Turn, session: Mapping[str, Any] | None, *, anew: bool = False) -> dict[str, Any]:
    """The system prompt, byte for byte as last time while nothing it is made of has changed; what the session is."""
    live, spec = turn.live, turn.live.spec
    tools = tuple(schema.name for schema in turn.schemas)
    instructions = (session["instructions"] if session else None) or ""
    facts: dict[str, Any] = {
        "model": turn.route.model,
        "window": turn.window,
        "tools": tools,
        "instructions": instructions,
    }
    try:
        inputs = await _gathered(turn, facts)
    except Stopped:
        inputs = PromptInputs(surface=spec.source, **facts)
    digest = inputs.digest()
    known = session is not None and session["system_prompt"] is not None and session["prompt_digest"] == digest
    if session is not None and known and not anew:
        turn.system = session["system_prompt"]
    else:
        turn.system = prompt.build(inputs)
        if session is not None:
            await live.store.sessions.update_session(session["id"], system_prompt=turn.system, prompt_digest=digest)
    return {
        "id": live.transcript_id,
        "source": spec.source,
        "owner": spec.owner,
        "kind": _KINDS.get(spec.kind, "root"),
        "session_key": spec.session_key,
        "parent_session_id": spec.parent_session_id,
        "base_id": spec.base_id,
        "stateless": spec.stateless,
        "cwd": spec.workdir or (os.getcwd() if spec.source == "cli" else None),
        "system_prompt": turn.system,
        "prompt_digest": digest,
    }


async def _gathered(turn: Turn, facts: dict[str, Any]) -> PromptInputs:
    """What the prompt is made of, as it lies on the disk, or, when there is much to do, as it lay there a moment ago."""
    live, spec, services = turn.live, turn.live.spec, turn.services
    whose = (spec.source, spec.workdir, spec.context_files, spec.memory, spec.owner, spec.session_key)
    key = (gather, turn.settings, live.secrets.values, *whose, *facts.values())
    inputs: PromptInputs | None = services.lately.get(key)
    if inputs is None:
        async with live.controls.stop.scope():
            inputs = await services.files.call(
                partial(gather, services.home, turn.settings, spec, redaction(live.secrets, turn.settings), **facts)
            )
        services.lately.keep(key, inputs)
    return inputs


async def _record(turn: Turn, record: Mapping[str, Any], before: Arrived, *, begins: bool) -> None:
    live, spec, said = turn.live, turn.live.spec, turn.user_message
    started = live.log.event(
        "run.started",
        kind=spec.kind,
        session_id=spec.session_id,
        model=turn.route.model,
        provider=turn.route.provider,
        api_mode=turn.route.api_mode,
        tools=[schema.name for schema in turn.schemas],
        user_row=None,
        max_iterations=turn.steps_max,
        on_detach=spec.on_detach,
    )
    rows: list[Row] = []
    if spec.persist and turn.stored:
        # What the store does not hold yet: a history that the session begins with, and a client's answers to calls.
        told = before.messages if begins else before.messages[len(before.messages) - len(spec.results) :]
        rows += await turn.aside(lambda: [before.row(live.transcript_id, message) for message in told])
    if said is not None:
        turn.user_row = row = before.row(live.transcript_id, said)
        row.run_id, row.announced_in = spec.run_id, ((started, "user_row"),)
        rows.append(row)
        if not names_session(turn):
            record = {**record, "auto_title": plain_title(first_words(turn.messages))}
    await live.log.append(started, rows=rows, session=record, hold=not before.saved)


def _begun(spec: RunSpec, messages: list[Message]) -> tuple[list[Message], str]:
    """The messages without the last one, and its text, where the model is to go on with that."""
    last = messages[-1] if messages and spec.continues else {}
    if last.get("role") != "assistant" or last.get("tool_calls") or not isinstance(last.get("content"), str):
        return messages, ""
    return messages[:-1], last["content"]


def _results(spec: RunSpec) -> list[Message]:
    return [{"role": "tool", **result} for result in spec.results]


def _check_answered(history: list[Message], content: Any) -> None:
    """A call that the client was to answer must be answered before anything new is said."""
    if not history or not content:
        return
    asked = next((m for m in reversed(history) if m.get("role") != "tool"), {}).get("tool_calls") or ()
    answered = {message.get("tool_call_id") for message in history if message.get("role") == "tool"}
    missing = [call["id"] for call in asked if call["id"] not in answered]
    if missing:
        raise ValueError(f"the tool calls {', '.join(missing)} have no results")


def _client_tool(tool: Mapping[str, Any]) -> ToolSchema:
    """A client's function, bare or in the envelope that chat completions use."""
    tool = tool.get("function", tool)
    parameters, form = dict(tool.get("parameters") or {"type": "object"}), tool.get("format")
    return ToolSchema(str(tool["name"]), str(tool.get("description") or ""), parameters, dict(form) if form else None)
