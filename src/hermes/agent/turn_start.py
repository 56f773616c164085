"""The start of a turn: its route, history, tools and system prompt, and the commit that records it."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial

from hermes.agent import prompt
from hermes.agent.auxiliary import first_words, names_session, plain_title
from hermes.agent.content import IncomingMessages, receive
from hermes.agent.prompt import PromptInputs
from hermes.agent.prompt_context import gather
from hermes.agent.turn import Services, Turn
from hermes.core.errors import ConfigError
from hermes.core.failures import Failure
from hermes.core.json_types import JsonMapping, JsonObject, Message
from hermes.core.limits import LEAN_WINDOW_TOKENS
from hermes.core.spec import RunSpec
from hermes.core.text import text_of, whole_text, whole_tree
from hermes.providers import routes
from hermes.providers.base import Route, ToolSchema
from hermes.runs.control import Stopped
from hermes.runs.engine import LiveRun
from hermes.settings.config import Settings
from hermes.settings.schema_types import EFFORTS
from hermes.store.base import Row
from hermes.store.rows import row_of_message
from hermes.tools.framework.registry import redaction
from hermes.tools.framework.toolsets import LEAN, enabled_toolsets
from hermes.tools.mcp import PREFIX as SERVER_PREFIX

_SESSION_KINDS = {"subagent": "delegate", "job": "job"}
_ASKING, _COMMANDS = frozenset({"clarify"}), frozenset({"terminal", "code_execution"})
_UNREADABLE = "[A message that could not be read.]"


async def start_turn(live: LiveRun, services: Services) -> tuple[Turn, Failure | None]:
    """The turn, its start on record; and the failure of an unusable route or request."""
    spec = live.spec
    settings, settings_notice = services.settings()
    if live.opened is not None and spec.persist:
        session = live.opened.session
    else:
        session = await live.store.sessions.get_session(live.transcript_id)
    if session is not None:
        live.spec = spec = _with_session_defaults(spec, session, settings)
    available_routes, failure = _routes(live, services, settings, session)
    stored: list[Message] = []
    # The client's own history counts if the session has none.
    if session is not None and not spec.verbatim and (spec.history is None or spec.base_id is not None):
        loaded = live.opened.history if live.opened is not None else None
        stored = await live.store.sessions.get_messages_as_conversation(spec.session_id) if loaded is None else loaded
    is_empty = not stored and not (spec.verbatim and session is not None and session["message_count"])
    incoming = IncomingMessages()
    prompt = spec.user_message
    content = whole_text(prompt) if isinstance(prompt, str) else whole_tree(prompt)
    user_message: Message = {"role": "user", "content": content}
    if spec.user_name:
        user_message["name"] = spec.user_name
    client_tools: dict[str, ToolSchema] = {}
    try:
        redact = redaction(live.secrets, settings)
        history = [*(stored or spec.history or ()), *(_tool_messages(spec) if spec.results else ())]
        if history:
            incoming = await receive(history, services, spec.folder_id, redact)
        if not isinstance(user_message["content"], str):
            latest = await receive([user_message], services, spec.folder_id, redact)
            [user_message] = latest.messages
            incoming.originals |= latest.originals
            incoming.uploads += latest.uploads
        if spec.client_tools:
            client_tools = _client_tools(spec)
        if history:
            await services.files.call_for(len(history), partial(_check_answered, incoming.messages, user_message))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        user_message, client_tools = {"role": "user", "content": text_of(spec.user_message) or _UNREADABLE}, {}
        message = f"The request is malformed: {error!r}"
        failure = Failure("bad_request", None, "", message, False, "provider_rejected_request")
    new = [user_message] if user_message["content"] else []
    history, prefix = _split_prefix(incoming.messages) if spec.continues else (incoming.messages, "")
    turn = Turn(live, services, settings, available_routes, [*history, *new], len(history), prefix=prefix)
    turn.stored = spec.persist and (spec.history is None or spec.base_id is not None)
    turn.user_message = new[0] if new else None
    if spec.verbatim and spec.persist:
        turn.incoming = IncomingMessages(turn.messages[:], incoming.originals)
    await _equip(turn, client_tools)
    record = await set_system_prompt(turn, session)
    await _record_start(turn, record, incoming, begins=is_empty and spec.base_id is not None)
    for file in incoming.uploads if spec.persist else ():
        await live.store.sessions.add_file(
            spec.session_id, file.name, bytes=file.bytes, mime=file.mime, direction="in", path=file.path
        )
    for code, text in [*live.notices, *([("settings_kept", settings_notice)] if settings_notice else [])]:
        await live.log.emit("notice", level="warn", code=code, message=live.secrets.redact(text))
    return turn, failure


async def resume_turn(live: LiveRun, services: Services) -> tuple[Turn, Failure | None]:
    spec, resumed = live.spec, live.resumption
    assert resumed is not None
    settings, _ = services.settings()
    session = await live.store.sessions.get_session(live.transcript_id)
    if session is not None:
        live.spec = spec = _with_session_defaults(spec, session, settings)
    available_routes, failure = _routes(live, services, settings, session)
    rows = await live.store.runs.rows(spec.run_id)
    own_messages = [row.as_message() for row in rows]
    stored = spec.history is None or spec.base_id is not None
    if stored and not spec.verbatim:
        messages = await live.store.sessions.get_messages_as_conversation(spec.session_id)
    else:
        redact = redaction(live.secrets, settings)
        history = [*(spec.history or ()), *_tool_messages(spec)]
        messages = [*(await receive(history, services, spec.folder_id, redact)).messages, *own_messages]
    prefix = ""
    if spec.continues:
        if not any(message["role"] == "assistant" for message in own_messages):
            messages, prefix = _split_prefix(messages)
        elif not (stored and not spec.verbatim):
            history, text = _split_prefix(messages[: len(messages) - len(own_messages)])
            own_messages = [
                {**own_messages[0], "content": f"{text}{own_messages[0]['content'] or ''}"},
                *own_messages[1:],
            ]
            messages = [*history, *own_messages]
    turn = Turn(
        live, services, settings, available_routes, messages, len(messages) - len(own_messages), stored, prefix=prefix
    )
    turn.user_row = next((row for row in rows if row.role == "user"), None)
    turn.user_message = next((m for m in messages[turn.history_length :] if m["role"] == "user"), None)
    turn.message_id = resumed.message_id
    turn.last_answer = next((row for row in reversed(rows) if row.role == "assistant"), None)
    client_tools: dict[str, ToolSchema] = {}
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        client_tools = _client_tools(spec)
    await _equip(turn, client_tools)
    await set_system_prompt(turn, session)
    for usage in resumed.usage:
        turn.totals.add(usage)
    live.log.step = resumed.step
    return turn, failure


def _with_session_defaults(spec: RunSpec, session: JsonMapping, settings: Settings) -> RunSpec:
    changes: JsonObject = {}
    if spec.workdir is None and session["workdir"] is not None:
        changes["workdir"] = session["workdir"]
    if spec.max_iterations is None and session["max_iterations"] is not None:
        changes["max_iterations"] = min(session["max_iterations"], settings.agent.max_turns)
    if spec.reasoning is None and (effort := session.get("reasoning_effort")) in EFFORTS:
        changes["reasoning"] = {"enabled": effort != "none", "effort": effort}
    if session["toolsets"] is not None and (spec.toolsets is None or spec.toolsets_by_default):
        usual = _configured_toolsets(settings, spec.source) if spec.toolsets is None else spec.toolsets
        changes["toolsets"] = usual & frozenset(session["toolsets"])
    return spec.replace(**changes) if changes else spec


def _routes(
    live: LiveRun, services: Services, settings: Settings, session: JsonMapping | None
) -> tuple[list[Route], Failure | None]:
    """The routes, with the context window that the provider reports if none is configured."""
    spec = live.spec
    try:
        choice = spec.route if spec.route is not None else routes.of_session(settings, session)
        if spec.allowed_models is not None and not routes.is_allowed(settings, spec.allowed_models, choice):
            names = ", ".join(sorted(spec.allowed_models))
            message = f"The model may not be used with this key; these may: {names}."
            return [routes.LOCAL], Failure("unknown", None, "", message, False, "model_not_allowed")
        chosen = routes.routes(settings, choice)
    except ConfigError as error:
        return [routes.LOCAL], Failure("unknown", None, "", str(error), False, "agent_incomplete")
    for index, route in enumerate(chosen):
        if not route.window_tokens and (window := services.model_lists.window(route)) is not None:
            chosen[index] = replace(route, window_tokens=window)
    return chosen, None


async def _equip(turn: Turn, client_tools: dict[str, ToolSchema]) -> None:
    spec, settings, services = turn.live.spec, turn.settings, turn.services
    turn.instructions = spec.instructions or ""
    turn.reasoning = spec.reasoning
    if spec.reasoning is None:
        agent = settings.agent
        if effort := agent.reasoning_overrides.get(turn.route.model) or agent.reasoning_effort:
            turn.reasoning = {"enabled": effort != "none", "effort": effort}
    turn.client_tools = client_tools
    toolsets = spec.toolsets if spec.toolsets is not None else _configured_toolsets(settings, spec.source)
    if spec.toolsets is None and (brought := services.mcp.of_sessions.get(spec.session_id)):
        toolsets |= frozenset(brought)
    toolsets -= spec.disabled_toolsets
    if spec.tool_policy is not None:
        toolsets &= spec.tool_policy
    if turn.capabilities.toolsets is not None:
        if spec.toolsets is None:
            toolsets &= turn.capabilities.toolsets
    elif turn.window < LEAN_WINDOW_TOKENS:
        toolsets &= LEAN
    if not spec.answerable:
        toolsets -= _ASKING
    if not toolsets.isdisjoint(_COMMANDS):
        await services.outside.sandboxes.ready(settings)
    tools = services.registry().offered(toolsets, settings)
    if not turn.history_length and spec.kind == "cli" and (wanted := toolsets & _COMMANDS):
        reasons = (tool.available(settings) for tool in services.registry().all() if tool.toolset in wanted)
        if (reason := next(filter(None, reasons), None)) is not None:
            turn.live.notices.append(("commands_unavailable", f"Commands cannot be run: {reason}."))
    if _names_mcp_server(toolsets):
        parent = spec.parent_session_id if spec.parent else None
        announced = services.session_states.of(spec.owner, spec.session_id, parent).mcp_known
        with suppress(Stopped):  # the turn continues with the available tools, and stops at its next step
            async with turn.live.controls.stop.scope():
                root = services.outside.engine().root_spec(spec).session_id
                tools, notices = await services.mcp.offered(tools, toolsets, settings, turn.window, announced, root)
                turn.live.notices += notices
    turn.offer_tools(tools)


@lru_cache(maxsize=256)
def _names_mcp_server(toolsets: frozenset[str]) -> bool:
    return any(name.startswith(SERVER_PREFIX) for name in toolsets)


def may_use(spec: RunSpec, settings: Settings, toolset: str) -> bool:
    """Whether a run itself may use a toolset, whatever its model is offered."""
    toolsets = (spec.toolsets or frozenset()) | _configured_toolsets(settings, spec.source)
    return toolset in toolsets - spec.disabled_toolsets and (spec.tool_policy is None or toolset in spec.tool_policy)


@lru_cache(maxsize=16)
def _configured_toolsets(settings: Settings, source: str) -> frozenset[str]:
    return frozenset(enabled_toolsets(settings, source))


async def set_system_prompt(turn: Turn, session: JsonMapping | None, *, rebuild: bool = False) -> JsonObject:
    """Set the system prompt, byte for byte the same while its inputs are. Returns the session's record."""
    live, spec, services = turn.live, turn.live.spec, turn.services
    instructions = (session["instructions"] if session else None) or ""
    inputs = PromptInputs(
        turn.route.model,
        turn.window,
        spec.source,
        turn.schemas.names,
        instructions=instructions,
        embedded=turn.route.api_mode == routes.LOCAL.api_mode,
    )
    sources = (spec.workdir, spec.context_files, spec.memory, spec.owner, spec.session_key)
    key = (gather, turn.settings, live.secrets.values, *sources, inputs)
    reading: asyncio.Future[PromptInputs] | None = services.burst_cache.get(key)
    if reading is None or (reading.done() and (reading.cancelled() or reading.exception() is not None)):
        read_inputs = partial(
            gather, services.home, turn.settings, spec, redaction(live.secrets, turn.settings), inputs
        )
        reading = services.burst_cache.keep(key, services.files.submit(read_inputs).future)
    if reading.done():
        inputs = reading.result()
    else:
        with suppress(Stopped):  # raised at the next step
            async with live.controls.stop.scope():
                inputs = await asyncio.shield(reading)  # other turns of the burst wait for it too
    digest = inputs.digest()
    if (
        session is not None
        and not rebuild
        and session["system_prompt"] is not None
        and session["prompt_digest"] == digest
    ):
        turn.set_system(session["system_prompt"])
    else:
        turn.set_system(prompt.build(inputs))
        if session is not None:
            await live.store.sessions.update_session(session["id"], system_prompt=turn.system, prompt_digest=digest)
    return {
        "id": live.transcript_id,
        "source": spec.source,
        "owner": spec.owner,
        "kind": _SESSION_KINDS.get(spec.kind, "root"),
        "session_key": spec.session_key,
        "parent_session_id": spec.parent_session_id,
        "base_id": spec.base_id,
        "stateless": spec.stateless,
        "cwd": spec.workdir or (os.getcwd() if spec.source == "cli" else None),
        "system_prompt": turn.system,
        "prompt_digest": digest,
    }


async def _record_start(turn: Turn, record: JsonObject, incoming: IncomingMessages, *, begins: bool) -> None:
    live, spec = turn.live, turn.live.spec
    started = live.log.event(
        "run.started",
        kind=spec.kind,
        session_id=spec.session_id,
        model=turn.route.model,
        provider=turn.route.provider,
        api_mode=turn.route.api_mode,
        tools=list(turn.schemas.names),
        user_row=None,
        max_iterations=turn.steps_max,
        on_detach=spec.on_detach,
    )
    rows: list[Row] = []
    # What is not stored yet: a history that the session begins with, and a client's answers to calls.
    new = incoming.messages[0 if begins else len(incoming.messages) - len(spec.results) :]
    if new and spec.persist and turn.stored:
        rows += await turn.scan(lambda: [incoming.row(live.transcript_id, message) for message in new])
    if turn.user_message is not None:
        row_of = incoming.row if incoming.originals else row_of_message
        turn.user_row = row = row_of(live.transcript_id, turn.user_message)
        row.run_id, row.announced_in = spec.run_id, ((started, "user_row"),)
        rows.append(row)
        if not names_session(turn):
            record["auto_title"] = plain_title(first_words(turn.messages))
    await live.log.append(started, rows=rows, session=record, hold=not incoming.uploads)


def _split_prefix(messages: list[Message]) -> tuple[list[Message], str]:
    """The messages without the last one, and its text, if the model can continue that."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls") or not isinstance(last.get("content"), str):
        return messages, ""
    return messages[:-1], last["content"]


def _tool_messages(spec: RunSpec) -> list[Message]:
    return [{"role": "tool", **result} for result in spec.results]


def _check_answered(history: list[Message], user_message: Message) -> None:
    """A call that waits for the client must be answered before a new message."""
    asking: Message = next((message for message in reversed(history) if message.get("role") != "tool"), {})
    if (calls := asking.get("tool_calls")) and user_message["content"]:
        answered_ids = {message.get("tool_call_id") for message in history if message.get("role") == "tool"}
        if missing_ids := [call["id"] for call in calls if call["id"] not in answered_ids]:
            raise ValueError(f"the tool calls {', '.join(missing_ids)} have no results")


def _client_tools(spec: RunSpec) -> dict[str, ToolSchema]:
    """The client's functions, bare or in the envelope of chat completions."""
    schemas: dict[str, ToolSchema] = {}
    for tool in spec.client_tools:
        tool = tool.get("function", tool)
        name, form = str(tool["name"]), tool.get("format")
        parameters = dict(tool.get("parameters") or {"type": "object"})
        schemas[name] = ToolSchema(name, str(tool.get("description") or ""), parameters, dict(form) if form else None)
    return schemas
