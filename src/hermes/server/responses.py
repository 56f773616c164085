"""Responses: create (plain, streamed, in the background), get, follow, cancel, delete, compact."""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import TYPE_CHECKING, Annotated

from aiohttp import web
from msgspec import Meta, Struct

from hermes.core.json_types import JsonObject
from hermes.core.limits import CLOSE_S_MAX
from hermes.core.spec import Control, RunSpec
from hermes.runs.engine import Refused
from hermes.server import outcome
from hermes.server.errors import ApiError, answer, invalid, missing
from hermes.server.keys import caller_of
from hermes.server.models import CompactRequest, ResponseRequest
from hermes.server.prepared_response import PreparedResponse, prepare, reader
from hermes.server.query_params import ID_MAX, ItemQuery
from hermes.server.render_responses import ROWS, ResponseRenderer
from hermes.server.request_bodies import read
from hermes.server.request_options import parse_options
from hermes.server.response_record import ResponseRecord, follow, follow_until_saved, previous_response
from hermes.server.routes import SESSION_ID_HEADER, TURN_FAULTS, TURN_HEADERS, route
from hermes.server.sealing import seal_of
from hermes.server.shapes import Compaction, InputTokens, ItemList, Response, ResponseDeleted
from hermes.server.sse import inline_sink, replay, run_events_to_end
from hermes.server.turn_spec import build_spec, check_model, route_of
from hermes.server.turns import Turn, run_uncancellable
from hermes.services.models import of_session
from hermes.services.sessions import unknown_session
from hermes.store.base import StoreError
from hermes.store.sessions import new_session_id

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

_RESPONSE = "/v1/responses/{response_id}"
EXAMPLE_ITEM = {"type": "message", "role": "user", "content": "Which files are here?"}
SUMMARIZE = (
    "Write a summary of this conversation that can stand in its place: what was asked for, what was done and found, "
    "decisions, names, figures and open points. Only the summary, no preamble."
)


@route(
    "POST /v1/responses",
    "responses",
    "Create a response",
    scope="chat",
    headers=(SESSION_ID_HEADER, *TURN_HEADERS),
    body=ResponseRequest,
    example={"model": "hermes-agent", "input": "Which files are here?", "store": True},
    answers=Response,
    stream="`response.*` events with a `sequence_number`, at the end `[DONE]`",
    faults=TURN_FAULTS,
    link=("response_id", "/id"),
    features="responses_api responses_streaming responses_background responses_client_tools",
    idempotent=True,
    begins_turns=True,
)
async def responses(context: ServerContext, request: web.Request) -> web.StreamResponse:
    body = await read(context, request, ResponseRequest)
    work = await prepare(context, request, body)
    turn, record = work.turn, work.record
    try:
        if body.model.background:
            return await _in_background(context, request, work)
        await work.admit()
        if not body.model.stream:
            renderer = await work.run()
            named = {"response_id": record.response_id, "run_id": turn.spec.run_id} if record.store else {}
            headers = turn.response_headers(await turn.streamed_outcome(), body, named=named)
            return answer(renderer.response, 200, headers)
        return await work.stream()
    finally:
        await turn.release()


async def _in_background(context: ServerContext, request: web.Request, work: PreparedResponse) -> web.StreamResponse:
    """Submit the turn; it is followed to its end whether or not anybody watches."""
    turn, record = work.turn, work.record
    if turn.options.resumed is not None:
        await work.admit()
    elif turn.spec.results and not turn.bind:
        # Outputs are checked against the calls in the session before they are accepted.
        await work.admit()
        await turn.release()
    else:
        await work.branch()
        work.settle()
    renderer = await record.renderer(context)
    await run_uncancellable(_submit(context, work, renderer))
    headers = {**turn.headers(), **work.body.headers()}
    if work.body.model.stream:
        return await _replayed(context, request, record, -1, headers)
    return answer(renderer.snapshot(), 200, headers)


async def _submit(context: ServerContext, work: PreparedResponse, renderer: ResponseRenderer) -> None:
    """Store the response and submit its turn: both, or neither. Another replica may have done both, under the same key."""
    app, record, resumed = context.app, work.record, work.turn.options.resumed is not None
    if not resumed:
        await check_model(context, caller_of(work.turn.request), work.turn.spec)
    await record.begin(context, renderer.snapshot())
    try:
        await app.engine.submit(work.turn.spec, charged=True) if not resumed else None
    except Refused as error:
        with contextlib.suppress(StoreError):
            if await app.engine.get(work.turn.spec.run_id) is None:
                await context.stored_responses.delete(record.response_id)
        raise outcome.refusal(error) from None
    app.services.background(follow_until_saved(context, record))


# --- stored responses ------------------------------------------------------------------------------------------------


async def _stored(context: ServerContext, request: web.Request) -> tuple[str, JsonObject]:
    response_id = request.match_info["response_id"]
    record: JsonObject | None = await context.stored_responses.get(response_id, caller_of(request).visible_owner)
    if record is None:
        raise ApiError(404, f"There is no response {response_id!r}.", "response_not_found")
    return response_id, record


class ResponseQuery(Struct, kw_only=True):
    include: Annotated[list[str], Meta(description="what else to show")] | None = None
    stream: Annotated[bool, Meta(description="send the events of the response instead of the object")] = False
    starting_after: (
        Annotated[int, Meta(ge=0, le=ID_MAX, description="the `sequence_number` of the last event that is known")]
        | None
    ) = None


@route(
    f"GET {_RESPONSE}",
    "response",
    "Get a stored response",
    scope="chat",
    answers=Response,
    stream="the same events again from any place, then live, at the end `[DONE]`",
    faults=(410,),
    features="responses_resume",
)
async def get_response(context: ServerContext, request: web.Request, query: ResponseQuery) -> web.StreamResponse:
    response_id, record = await _stored(context, request)
    if not query.stream:
        return answer(record["response"])
    after = -1 if query.starting_after is None else query.starting_after
    return await _replayed(context, request, ResponseRecord.of(response_id, record), after, {})


async def _replayed(
    context: ServerContext, request: web.Request, record: ResponseRecord, after: int, headers: dict[str, str]
) -> web.StreamResponse:
    """The stream of a response from any position, then live."""
    app = context.app
    run = await app.engine.get(record.run_id) if record.run_id else None
    if run is None or run.log_expired:
        raise ApiError(410, "The events of this response are no longer stored.", "events_expired")
    renderer = await record.renderer(context, after=after)

    async def ensure_stored() -> None:
        """A client that reads the end finds the response stored, even where its follower is a moment behind."""
        stored = await context.stored_responses.get(record.response_id, record.owner)
        if stored is not None and stored["response"].get("status") in ("queued", "in_progress"):
            await record.try_save(context, renderer.response)

    stream = context.stream(request, headers)
    source = run_events_to_end(app.engine, run.spec.run_id, ROWS, sink=inline_sink(renderer, stream))
    return await replay(stream, source, renderer, on_end=ensure_stored)


@route(f"DELETE {_RESPONSE}", "response_delete", "Delete a response", scope="chat")
async def delete_response(context: ServerContext, request: web.Request) -> ResponseDeleted:
    response_id, record = await _stored(context, request)
    if record["response"].get("status") in ("queued", "in_progress") and record.get("run_id"):
        await _stop(context, request, record["run_id"])
    await context.stored_responses.delete(response_id)
    return ResponseDeleted(id=response_id)


@route(
    f"POST {_RESPONSE}/cancel",
    "response_cancel",
    "Cancel a response",
    scope="chat",
    answers=Response,
    faults=(409,),
    features="responses_cancel",
)
async def cancel_response(context: ServerContext, request: web.Request) -> web.StreamResponse:
    response_id, record = await _stored(context, request)
    if record["response"].get("status") in ("queued", "in_progress") and record.get("run_id"):
        await _stop(context, request, record["run_id"])
        renderer = await follow(context, ResponseRecord.of(response_id, record))
        record["response"] = renderer.response
    if record["response"].get("status") != "cancelled":
        message = f"The response {response_id!r} is {record['response'].get('status')} and cannot be stopped."
        raise ApiError(409, message, "response_not_cancellable")
    return answer(record["response"])


async def _stop(context: ServerContext, request: web.Request, run_id: str) -> None:
    control = Control("cancel", {"reason": "stop"}, surface="api", credential=caller_of(request).credential)
    await context.app.engine.control(run_id, control)
    await context.app.engine.wait(run_id, CLOSE_S_MAX)


@route(
    f"GET {_RESPONSE}/input_items",
    "response_input_items",
    "List the input items of a response",
    scope="chat",
    features="responses_input_items",
)
async def response_input_items(context: ServerContext, request: web.Request, query: ItemQuery) -> ItemList:
    _, record = await _stored(context, request)
    return page(list(record.get("input_items") or ()), query)


def page(items: list[JsonObject], query: ItemQuery) -> ItemList:
    ordered = items if query.order == "asc" else items[::-1]
    if query.after:
        index = next((i for i, item in enumerate(ordered) if item.get("id") == query.after), None)
        if index is None:
            raise invalid("after", f"There is no item {query.after!r} here.", "invalid_cursor")
        ordered = ordered[index + 1 :]
    return item_list(ordered[: query.limit], has_more=len(ordered) > query.limit)


def item_list(items: list[JsonObject], *, has_more: bool) -> ItemList:
    first_id, last_id = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return ItemList(data=items, first_id=first_id, last_id=last_id, has_more=has_more)


# --- counting --------------------------------------------------------------------------------------------------------


@route(
    "POST /v1/responses/input_tokens",
    "responses_input_tokens",
    "Count the tokens of a response's input",
    scope="chat",
    headers=(SESSION_ID_HEADER, *TURN_HEADERS),
    body=ResponseRequest,
    example={"model": "hermes-agent", "input": [EXAMPLE_ITEM]},
    answers=InputTokens,
    faults=TURN_FAULTS,
    features="responses_input_tokens",
)
async def input_tokens(context: ServerContext, request: web.Request) -> web.StreamResponse:
    """What the model would be given for this request, as the agent counts it."""
    body = await read(context, request, ResponseRequest)
    body.model.store = body.model.stream = body.model.background = False
    turn = (await prepare(context, request, body)).turn
    payload = {"object": "response.input_tokens", "input_tokens": await count_tokens(context, request, turn)}
    return answer(payload, 200, body.headers())


async def count_tokens(context: ServerContext, request: web.Request, turn: Turn) -> int:
    """The tokens of the first request that a turn would make; no model is asked, and nothing stored."""
    turn = Turn(context, request, await _counted(context, request, turn.spec), turn.options)
    try:
        await turn.admit()
        assert turn.admission is not None
        # A replaced agent is never asked.
        result = await turn.admission.engine.work(turn.spec, turn.admission)
    except Refused as error:
        raise outcome.refusal(error) from None
    finally:
        await turn.release()
    if "prompt_tokens" not in result:
        raise outcome.outcome_of(result, {}, context.redact).failure()
    return int(result["prompt_tokens"])


async def _counted(context: ServerContext, request: web.Request, spec: RunSpec) -> RunSpec:
    """The turn as count-only: with everything its session gives it, but without that session."""
    await check_model(context, caller_of(request), spec)
    if spec.persist:
        session = await context.session(spec.session_id)
        if session is not None:
            if not caller_of(request).may_see(session["owner"]):
                raise unknown_session(spec.session_id)
            texts = [text for text in (session["instructions"], spec.instructions) if text]
            route = spec.route or of_session(context.settings, session)
            spec = spec.replace(instructions="\n".join(texts) or None, route=route)
        if spec.history is None:
            spec = spec.replace(history=await context.stored_history(spec.session_id))
    return spec.replace(session_id=new_session_id(), base_id=None, persist=False, count_only=True)


# --- compacting ------------------------------------------------------------------------------------------------------


@route(
    "POST /v1/responses/compact",
    "responses_compact",
    "Compact a conversation",
    scope="chat",
    headers=TURN_HEADERS,
    body=CompactRequest,
    example={"model": "hermes-agent", "input": [EXAMPLE_ITEM]},
    answers=Compaction,
    faults=TURN_FAULTS,
    features="responses_compact",
    idempotent=True,
    begins_turns=True,
)
async def compact(context: ServerContext, request: web.Request) -> web.StreamResponse:
    body = await read(context, request, CompactRequest)
    params, caller = body.model, caller_of(request)
    owner = caller.owner
    before: list[JsonObject] = []
    if params.previous_response_id:
        record = await previous_response(context, params.previous_response_id, owner)
        before = list(record.get("conversation_history") or ())
    elif params.input is None:
        raise missing("input")
    given = await reader(context, owner).read(params.input) if params.input is not None else None
    system = "\n".join(text for text in (*(given.system if given else ()), params.instructions) if text) or None
    options = parse_options(context, request)
    spec = RunSpec(
        user_message=SUMMARIZE,
        session_id=new_session_id(),
        kind="response",
        owner=owner,
        history=[*before, *(given.messages if given else ())],
        instructions=system,
        on_detach="cancel",
        persist=False,
        memory=False,
        context_files=False,
        route=route_of(context, caller, params.model, params.provider),
    )
    spec = build_spec(context, caller, options, body, spec).replace(toolsets=frozenset(), toolsets_by_default=False)
    turn = Turn(context, request, spec, options)
    ended = await turn.complete()
    if not ended.is_success or not ended.text:
        raise ended.failure()
    sealed = (await seal_of(context)).close("compaction", owner, ended.text)
    item = {"type": "compaction", "id": f"cmp_{secrets.token_hex(12)}", "encrypted_content": sealed}
    compaction = {
        "id": f"cmp_{secrets.token_hex(12)}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [item],
        "usage": ended.response_usage(),
    }
    return answer(compaction, 200, {**turn.headers(ended), **body.headers()})
