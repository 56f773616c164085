"""A request for a response: its options, and where its history comes from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from hermes.core.json_types import JsonMapping, JsonObject, Message
from hermes.core.limits import TRUNCATED_MESSAGES
from hermes.core.spec import RunSpec
from hermes.core.text import spaced_json
from hermes.runs.engine import Refused
from hermes.server import outcome
from hermes.server.chat import message_of, structure
from hermes.server.errors import ApiError, invalid
from hermes.server.idempotency import idempotent_run_id, request_created_at
from hermes.server.keys import caller_of
from hermes.server.models import ConversationRef, JsonSchema, ResponseRequest, ResponseTool
from hermes.server.render_responses import ROWS, ResponseRenderer, VisibleItems
from hermes.server.request_bodies import Body
from hermes.server.request_options import parse_options
from hermes.server.response_items import Reader, cut_to
from hermes.server.response_record import ResponseRecord, blank, follow, follow_until_saved, no_previous_response
from hermes.server.response_tools import additional, response_tools, stand_in
from hermes.server.sealing import seal_of
from hermes.server.sse import Writer
from hermes.server.turn_spec import answered_again, build_spec, open_calls, with_unseen
from hermes.server.turns import Turn, run_uncancellable
from hermes.store.sessions import new_session_id

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

_INCLUDES = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_ENCRYPTED = "reasoning.encrypted_content"


@dataclass(slots=True)
class PreparedResponse:
    body: Body[ResponseRequest]
    record: ResponseRecord
    turn: Turn
    chain: JsonObject | None = None

    async def admit(self) -> None:
        """Admit the turn; one that continues a response that is not its session's last branches off there."""
        turn = self.turn
        await self.branch()
        try:
            await turn.acquire_session(after_run=self._follows)
        except ApiError as error:
            if error.code != "session_busy" or self._follows is None:
                raise
            await self._fork(error)
            await turn.acquire_session()
        if await self._is_behind():  # another turn was faster
            await turn.release()
            await self._fork()
            await turn.acquire_session()
        await turn.load_history()
        if turn.options.resumed is not None:
            stored = await turn.context.stored_responses.get(self.record.response_id, self.record.owner)
            self.record.known = stored is not None
        self.settle()

    @property
    def _follows(self) -> str | None:
        """The run that the turn continues, in the run's own session."""
        if self.turn.options.resumed is not None or self.chain is None or self.turn.spec.history is not None:
            return None
        return self.chain.get("run_id") or None

    async def _is_behind(self) -> bool:
        """Whether the session has gone on since, or is about to."""
        run_id, session_id = self._follows, self.turn.session_id
        if run_id is None:
            return False
        app = self.turn.context.app
        if self.turn.admission is None and app.engine.others(session_id, run_id):
            return True
        return await app.store.runs.newest(session_id) not in (None, run_id)

    async def branch(self) -> None:
        """Continue in a new session where the chain's has gone on with something else, without waiting for that."""
        if await self._is_behind():
            await self._fork()

    async def _fork(self, busy: ApiError | None = None) -> None:
        """Make the turn's own session, a fork of the chain's; `busy` is why it is made only now."""
        turn, chain = self.turn, self.chain
        assert chain is not None
        if (chain.get("response") or {}).get("status") in ("queued", "in_progress"):
            chain = await self._ended(chain, busy)
        try:
            fork = await turn.context.database().fork_session(
                turn.session_id, after_run=chain["run_id"], stateless=turn.spec.stateless
            )
            turn.spec = turn.spec.replace(session_id=fork)
        except KeyError:  # its messages were compacted since; the response still has them
            fork, history = new_session_id(), list(chain.get("conversation_history") or ())
            turn.spec, turn.bind = turn.spec.replace(session_id=fork, base_id=fork, history=history), True

    async def _ended(self, chain: JsonObject, busy: ApiError | None) -> JsonObject:
        """The chain's record once its run has ended: before that there is nothing to branch off from."""
        context, run_id, session_id = self.turn.context, chain["run_id"], self.turn.session_id
        app = context.app
        if busy is not None and not app.engine.others(session_id, run_id):  # that run was already waited for
            raise busy
        await app.engine.wait(run_id, context.options.session_wait_seconds)
        if any(record.spec.run_id == run_id for record in await app.store.runs.unfinished(session_id)):
            message = "The response that this one continues has not ended yet."
            raise busy or outcome.refusal(Refused("session_busy", message, run_id))
        stored: JsonObject | None = await context.stored_responses.get(chain["response"]["id"], self.record.owner)
        return stored or chain

    async def stream(self) -> web.StreamResponse:
        renderer = await self.record.renderer(self.turn.context)
        return await self.turn.stream(renderer, {**self.turn.headers(), **self.body.headers()}, ROWS, self)

    async def run(self, stream: Writer | None = None, **how: Any) -> ResponseRenderer:
        """Run the turn and store its response; events are written as they come."""
        renderer = await self.record.renderer(self.turn.context, **how)
        await self.turn.render(renderer, stream, ROWS, self)
        return renderer

    # --- storing it --------------------------------------------------------------------------------------------------

    async def begin(self, renderer: ResponseRenderer) -> None:
        await self.record.try_insert(self.turn.context, renderer)

    async def end(self, renderer: ResponseRenderer) -> None:
        """Store the final response before it is sent."""
        ended = await self.turn.streamed_outcome()
        if renderer.handed_on:
            return
        if not self._begun:
            self.record.run_id = None
        await self.record.try_save(self.turn.context, renderer.response, ended)

    async def lose(self, renderer: ResponseRenderer) -> None:
        """After a disconnect: the turn is cancelled or goes on, and the stored response says which."""
        await run_uncancellable(self._lose(renderer))

    async def _lose(self, renderer: ResponseRenderer) -> None:
        turn, record = self.turn, self.record
        await turn.leave()
        assert turn.run is not None
        if self._begun and record.store:
            if turn.spec.on_detach == "cancel" and turn.run.done:
                await follow(turn.context, record)
            else:
                turn.context.app.services.background(follow_until_saved(turn.context, record))
        elif not self._begun:
            record.run_id = None
            renderer.feed(turn.run.unread())
            renderer.cut("client_disconnected")
            await record.try_save(turn.context, renderer.response)

    @property
    def _begun(self) -> bool:
        return self.turn.admission is not None and self.turn.admission.started

    def settle(self) -> None:
        """Set what is known only after admission: the session and its history."""
        turn, record = self.turn, self.record
        record.session_id, record.history = turn.session_id, turn.history
        if self.chain is not None:
            turn.history_source = "chain"


async def prepare(
    context: ServerContext,
    request: web.Request,
    body: Body[ResponseRequest],
    memory: Mapping[str, JsonObject] | None = None,
    *,
    generate: bool = True,
) -> PreparedResponse:
    """Validate everything that can be refused without a turn, and build the turn.

    Without `generate` the turn is not to be run, so the input needs no prompt.
    """
    params, caller = body.model, caller_of(request)
    owner = caller.owner
    _check_supported(params, body)
    name, chain, added = await _chain(context, params, owner, memory or {})
    given = await reader(context, owner).read(params.input)
    body.ignored += dict.fromkeys(given.ignored)
    added_tools = _distinct([*((chain or {}).get("added_tools") or ()), *given.tools])
    further = [tool for one in added_tools for tool in additional([one], "input")]
    tools = response_tools(params.tools or (), further, params.tool_choice, body.ignored)
    options = parse_options(context, request, client_tools=bool(tools.schemas), user=params.user)
    used = await stand_in(context, caller, tools, options.toolsets, body.ignored)
    options = replace(options, disabled_toolsets=options.disabled_toolsets - used)
    history, prompt, results = given.split_messages() if generate else (given.messages, "", ())
    if chain is None and params.conversation_history:
        chars = context.options.max_text_chars
        earlier = [
            message_of(m, f"conversation_history[{at}]", chars) for at, m in enumerate(params.conversation_history)
        ]
        history = [*(m for m in earlier if m["role"] not in ("system", "developer")), *history]
    instructions = params.instructions
    if instructions is None and chain is not None:
        instructions = chain.get("instructions")
    system_texts = [*((chain or {}).get("system") or ()), *given.system]
    system = "\n".join(text for text in (*system_texts, instructions) if text) or None
    form = params.text.format if params.text else None
    run_id = idempotent_run_id(request)
    response_id = f"resp_{run_id.removeprefix('run_')}"
    session_id = options.session_id or (chain or {}).get("session_id")
    if options.session_id and chain and chain.get("session_id") not in (None, options.session_id):
        raise ApiError(400, "The response belongs to another session than the header names.", "session_conflict")
    spec = RunSpec(
        user_message=prompt,
        session_id=session_id or new_session_id(),
        run_id=run_id,
        kind="response",
        owner=owner,
        instructions=system,
        response_format=structure(form.type, _schema(form), "text.format") if form else None,
        client_tools=tools.schemas,
        tool_choice=tools.choice,
        allowed_tools=tools.allowed,
        results=results,
        max_tool_calls=params.max_tool_calls,
        persist=params.store or bool(options.session_id),
        stateless=not options.session_id,
        compress=params.truncation != "disabled",
        response_id=response_id,
        on_detach="continue" if params.background else "cancel",
        sampling={"verbosity": params.text.verbosity} if params.text and params.text.verbosity else {},
    )
    spec = build_spec(context, caller, options, body, spec, announces=params.stream and not options.strict)
    turn = Turn(context, request, spec, options)
    await _assign_session(
        turn, chain, [*added, *history], truncates=params.truncation == "auto", new=session_id is None
    )
    shown = options.reasoning or (params.reasoning is not None and bool(params.reasoning.summary))
    record = ResponseRecord(
        response_id,
        _template(context, params, body.raw, response_id, instructions, name, request_created_at(request)),
        VisibleItems(
            options.tool_items,
            shown,
            _ENCRYPTED in (params.include or ()),
            not options.strict,
            tuple(tool["function"]["name"] for tool in tools.schemas),
            tools.reported,
        ),
        user_message=prompt,
        instructions=instructions,
        conversation=name,
        store=params.store,
        session_id=turn.session_id,
        owner=owner,
        run_id=spec.run_id,
        input_items=given.items,
        system=system_texts,
        added_tools=added_tools,
    )
    return PreparedResponse(body, record, turn, chain)


def _distinct(tools: list[JsonObject]) -> list[JsonObject]:
    """Without repeated tools: clients send the same ones with every turn of a chain."""
    last = {spaced_json(tool): at for at, tool in enumerate(tools)}
    return [tools[at] for at in sorted(last.values())]


def _check_supported(params: ResponseRequest, body: Body[ResponseRequest]) -> None:
    if params.previous_response_id and params.conversation:
        raise invalid("previous_response_id", "Cannot use both previous_response_id and conversation.")
    if params.background and not params.store:
        raise invalid("background", "A response in the background must be stored: background needs store.")
    for name in params.UNSUPPORTED:
        if getattr(params, name) is not None:
            raise invalid(name, f"{name} is not supported.", "unsupported_parameter")
    if params.top_logprobs:
        raise invalid("top_logprobs", "logprobs is not supported.", "unsupported_parameter")
    for at, wanted in enumerate(params.include or ()):
        if wanted == "message.output_text.logprobs":
            raise invalid(f"include[{at}]", "logprobs is not supported.", "unsupported_value")
        if wanted in _INCLUDES:
            body.ignored.append(f"include.{wanted}")
        elif wanted != _ENCRYPTED:
            raise invalid(f"include[{at}]", f"{wanted!r} cannot be included.")


async def _chain(
    context: ServerContext, params: ResponseRequest, owner: str, memory: Mapping[str, JsonObject]
) -> tuple[str | None, JsonObject | None, list[Message]]:
    """The conversation's name, the record that it continues, and items added since."""
    store = context.stored_responses
    if params.previous_response_id:
        previous = memory.get(params.previous_response_id) or await store.get(params.previous_response_id, owner)
        if previous is None and params.conversation_history is None:
            raise no_previous_response(params.previous_response_id)
        return None, previous, []
    name = params.conversation.id if isinstance(params.conversation, ConversationRef) else params.conversation
    if not name:
        return None, None, []
    added: list[Message] = []
    latest = await store.get_conversation(name, owner)
    if name.startswith("conv_"):
        if await store.get_conversation_object(name, owner) is None:
            raise ApiError(404, f"There is no conversation {name!r}.", "conversation_not_found", "conversation")
        items = await store.conversation_items_since(name, owner, latest)
        added = (await reader(context, owner).read(items, "items")).messages
    record = await store.get(latest, owner) if latest else None
    return name, record, added


async def _assign_session(
    turn: Turn, chain: JsonObject | None, history: list[Message], *, truncates: bool, new: bool
) -> None:
    """The turn's session: the one that is named, the chain's, the one that waits for results, or a new one."""
    context, spec, options = turn.context, turn.spec, turn.options
    before: list[Message] = list((chain or {}).get("conversation_history") or ())
    if waiting := set(open_calls(before)):
        # A client may repeat the calls that it answers; the chain has them already.
        history = [message for message in history if not _only_calls(message, waiting)]
    if options.session_id and chain is None:
        seeds = options.seed and bool(history)
        turn.spec = spec.replace(history=history if seeds else None, base_id=spec.session_id if seeds else None)
        turn.ignored_messages = 0 if seeds else len(history)
        return
    if chain is None and spec.results and options.tool_items == "none":
        history = await with_unseen(context, spec, history)
    whole = [*before, *history]
    if chain is not None and not spec.user_message and (again := answered_again(whole, spec.results)) is not None:
        whole, results = again
        spec = spec.replace(results=results)
    if truncates and len(whole) > TRUNCATED_MESSAGES:
        turn.spec = spec.replace(history=cut_to(whole, TRUNCATED_MESSAGES))
        return
    if chain is not None and spec.persist and not history and await _is_stored(context, chain):
        turn.spec = spec
        return
    if chain is not None and chain.get("run_id") and spec.persist:
        spec, new = spec.replace(session_id=new_session_id()), True
    turn.spec, turn.bind = spec.replace(history=whole, base_id=spec.session_id if spec.persist else None), new


def _only_calls(message: Message, call_ids: set[str]) -> bool:
    calls = message.get("tool_calls") or ()
    return bool(calls) and not message.get("content") and all(str(call["id"]) in call_ids for call in calls)


async def _is_stored(context: ServerContext, chain: JsonObject) -> bool:
    """Whether the chain's session is in the database."""
    if not chain.get("run_id") or not chain.get("session_id"):
        return False
    return await context.database().get_session(chain["session_id"]) is not None


def reader(context: ServerContext, owner: str) -> Reader:
    async def find(item_ids: Collection[str]) -> dict[str, JsonObject]:
        items: dict[str, JsonObject] = await context.stored_responses.find_items(item_ids, owner)
        return items

    return Reader(context.options.max_text_chars, owner, find, partial(seal_of, context))


def _schema(form: Any) -> JsonSchema | None:
    if form.type != "json_schema":
        return None
    return JsonSchema(name=form.name, schema=form.schema, description=form.description, strict=form.strict)


def _template(
    context: ServerContext,
    params: ResponseRequest,
    raw: JsonMapping,
    response_id: str,
    instructions: str | None,
    conversation: str | None,
    created_at: float,
) -> JsonObject:
    """The response object before the turn."""
    template = blank(response_id, params.model or context.model_name, int(created_at))
    effort = params.reasoning_effort or (params.reasoning.effort if params.reasoning else None)
    template |= {
        "status": "queued" if params.background else "in_progress",
        "previous_response_id": params.previous_response_id,
        "instructions": instructions,
        "tools": [_tool(tool, given) for tool, given in zip(params.tools or (), raw.get("tools") or (), strict=True)],
        "tool_choice": _tool_choice(params.tool_choice),
        "parallel_tool_calls": params.parallel_tool_calls is not False,
        "max_tool_calls": params.max_tool_calls,
        "max_output_tokens": params.max_output_tokens or params.max_completion_tokens or params.max_tokens,
        "temperature": 1.0 if params.temperature is None else params.temperature,
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "presence_penalty": params.presence_penalty or 0,
        "frequency_penalty": params.frequency_penalty or 0,
        "truncation": params.truncation or "disabled",
        "text": _text(params, raw),
        "reasoning": {"effort": effort, "summary": params.reasoning.summary if params.reasoning else None},
        "store": params.store,
        "background": params.background,
        "service_tier": params.service_tier if params.service_tier not in (None, "auto") else "default",
        "metadata": dict(params.metadata or {}),
        "safety_identifier": params.safety_identifier,
        "prompt_cache_key": params.prompt_cache_key,
    }
    if params.user is not None:
        template["user"] = params.user
    if conversation is not None:
        template["conversation"] = {"id": conversation}
    return template


def _tool_choice(given: object) -> Any:
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        return {"mode": "auto", **given}
    return "auto" if given is None else given


def _tool(tool: ResponseTool, given: JsonObject) -> JsonObject:
    if tool.type != "function":
        return dict(given)
    fields = {"type": "function", "name": tool.name, "description": tool.description}
    return {**fields, "parameters": tool.parameters, "strict": tool.strict}


def _text(params: ResponseRequest, raw: JsonMapping) -> JsonObject:
    if params.text is None:
        return {"format": {"type": "text"}}
    given = (raw.get("text") or {}).get("format") or {"type": "text"}
    fields: JsonObject = {"format": dict(given)}
    if params.text.format is not None and params.text.format.type == "json_schema":
        form = params.text.format
        fields["format"] |= {"name": form.name, "description": form.description, "strict": bool(form.strict)}
    if params.text.verbosity is not None:
        fields["verbosity"] = params.text.verbosity
    return fields
