"""Responses: made plain, streamed or in the background; asked for again, followed, stopped, forgotten, compacted."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct

from hermes.core.limits import CLOSE_S_MAX
from hermes.core.spec import Control, RunSpec
from hermes.providers.routes import of_session
from hermes.runs.engine import Refused
from hermes.server import outcome
from hermes.server.errors import ApiError, answer, invalid
from hermes.server.idempotency import resumed_admission
from hermes.server.models import CompactRequest, ResponseRequest
from hermes.server.outcome import Outcome
from hermes.server.prepared_response import PreparedResponse, prepare, reader
from hermes.server.query_params import ID_MAX, ItemQuery
from hermes.server.render_responses import ROWS, ResponseRenderer
from hermes.server.request_bodies import read
from hermes.server.request_options import parse_options
from hermes.server.response_items import Json
from hermes.server.response_record import ResponseRecord, blank, follow, follow_until_kept, reported, turn_messages
from hermes.server.routes import SESSION_ID_HEADER, TURN_FAULTS, TURN_HEADERS, route
from hermes.server.sealing import seal_of
from hermes.server.session_routes import unknown_session
from hermes.server.shapes import Compaction, InputTokens, ItemList, Response, ResponseDeleted
from hermes.server.sse import ClientGone, EventStream, Item, inline_sink, items, run_events_to_end
from hermes.server.turns import Turn, check_model, ended_of, leave, route_of, run_uncancellable
from hermes.store.base import StoreError
from hermes.store.sessions import new_session_id

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter

_RESPONSE = "/v1/responses/{response_id}"
EXAMPLE_ITEM = {"type": "message", "role": "user", "content": "Which files are here?"}
SUMMARIZE = (
    "Write a summary of this conversation that can stand in its place: what was asked for, what was done and found, "
    "decisions, names, figures and open points. Only the summary, no preamble."
)


@route(
    "POST",
    "/v1/responses",
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
    features=("responses_api", "responses_streaming", "responses_background", "responses_client_tools"),
    idempotent=True,
    begins_turns=True,
)
async def responses(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    body = await read(adapter, request, ResponseRequest)
    work = await prepare(adapter, request, body)
    if body.model.background:
        return await _in_background(adapter, request, work)
    turn, kept = work.turn, work.kept
    try:
        await work.admit()
        if not body.model.stream:
            return await _plain(adapter, work)
        task = asyncio.ensure_future(adapter._run_agent(**turn.arguments(streamed=True)))
        task.add_done_callback(lambda _: turn.queue.put(None))
        return await adapter._write_sse_responses(
            request=request,
            response_id=kept.response_id,
            model=kept.template["model"],
            created_at=kept.template["created_at"],
            stream_q=turn.queue,
            agent_task=task,
            agent_ref=turn.agent_ref,
            conversation_history=turn.history,
            user_message=kept.user_message,
            instructions=kept.instructions,
            conversation=kept.conversation,
            store=kept.store,
            session_id=turn.session_id,
            work=work,
        )
    finally:
        await turn.release()


async def _plain(adapter: APIServerAdapter, work: PreparedResponse) -> web.Response:
    """Run the turn, and answer with the response as it ends."""
    turn, kept = work.turn, work.kept
    renderer, ended = await run(adapter, work)
    named = {"response_id": kept.response_id, "run_id": turn.spec.run_id} if kept.store else {}
    return answer(renderer.response, 200, turn.response_headers(ended, work.body, **named))


async def run(adapter: APIServerAdapter, work: PreparedResponse, write: Any = None) -> tuple[ResponseRenderer, Outcome]:
    """Carry out an admitted turn and keep its response. `write` is given the events as they come."""
    turn, kept = work.turn, work.kept
    renderer = await kept.renderer(adapter, **({"frame": write.frame} if write else {}))
    task = asyncio.ensure_future(adapter._run_agent(**turn.arguments(streamed=write is not None)))
    task.add_done_callback(lambda _: turn.queue.put(None))
    try:
        await kept.try_insert(adapter, renderer)
        for data in renderer.begin():
            await write(data) if write else None
        async with contextlib.aclosing(items(turn.queue, task, turn.admission, ROWS)) as source:
            ended = await _carry(adapter, source, renderer, kept, task, turn, write)
    except (asyncio.CancelledError, ClientGone, StoreError):
        await run_uncancellable(_lost(adapter, work, task, renderer))
        raise
    return renderer, ended


async def _carry(
    adapter: APIServerAdapter,
    source: Any,
    renderer: ResponseRenderer,
    kept: ResponseRecord,
    task: asyncio.Future[Any],
    turn: Turn | None,
    write: Any,
) -> Outcome:
    """Everything of a turn through the renderer; its end is kept before it is told."""
    ended: Outcome | None = None
    async for batch in source:
        data = renderer.feed(batch)
        if renderer.ended and ended is None:
            ended = await ended_of(adapter, task, turn)
            await kept.try_save(adapter, renderer.response, ended)
        if data and write:
            await write(data)
    if ended is None:
        ended = await ended_of(adapter, task, turn)
        if renderer.handed_on:
            return ended
        if not renderer.ended and turn is not None and not (turn.admission and turn.admission.begun):
            kept.run_id = None
        told: list[Item] = []
        if not renderer.snapshot()["output"] and ended.messages:
            told = reported(turn_messages(kept.history, ended.messages))
        data = renderer.feed(told) + renderer.finish(ended)
        await kept.try_save(adapter, renderer.response, ended)
        if data and write:
            await write(data)
    return ended


async def _lost(
    adapter: APIServerAdapter, work: PreparedResponse, task: asyncio.Future[Any], renderer: ResponseRenderer
) -> None:
    """The client has gone: the turn ends, or goes on without it; either way its response tells the truth."""
    turn, kept = work.turn, work.kept
    await turn.leave(task)
    begun = turn.admission is not None and turn.admission.begun
    if begun and kept.store:
        if turn.spec.on_detach == "cancel" and task.done():
            await follow(adapter, kept)
        else:
            (await adapter.app()).services.background(follow_until_kept(adapter, kept))
    elif not begun:
        kept.run_id = None
        renderer.feed(_rest(turn.queue))
        renderer.cut("client_disconnected")
        await kept.try_save(adapter, renderer.response)


def _rest(stream_q: Any) -> list[Item]:
    """What a queue still holds."""
    rest: list[Item] = []
    while not stream_q.empty():
        item = stream_q.get_nowait()
        if item is not None:
            rest.append(item)
    return rest


async def write_stream(
    adapter: APIServerAdapter,
    *,
    request: web.Request,
    response_id: str,
    model: str,
    created_at: int,
    stream_q: Any,
    agent_task: asyncio.Future[Any],
    agent_ref: list[Any] | None,
    conversation_history: list[Json],
    user_message: Any,
    instructions: str | None,
    conversation: str | None,
    store: bool,
    session_id: str | None,
    work: PreparedResponse | None = None,
) -> web.StreamResponse:
    """The stream of a response, to its end or to that of the client."""
    turn = work.turn if work else None
    if work is not None:
        kept = work.kept
    else:
        kept = ResponseRecord(response_id, blank(response_id, model, created_at), history=conversation_history)
        kept.user_message, kept.instructions, kept.session_id = user_message, instructions, session_id
        kept.conversation, kept.store = conversation, store
    renderer = await kept.renderer(adapter)
    headers = {**turn.headers(), **work.body.headers()} if work and turn else {}
    stream = adapter.stream(request, headers)
    if turn is not None:
        turn.hold(stream)
    try:
        await kept.try_insert(adapter, renderer)
        async with stream:
            for data in renderer.begin():
                await stream.write(data)
            admission = turn.admission if turn else None
            sink = inline_sink(renderer, stream)
            async with contextlib.aclosing(items(stream_q, agent_task, admission, ROWS, sink, stream)) as source:
                await _carry(adapter, source, renderer, kept, agent_task, turn, stream.write)
            await stream.write(renderer.done(), last=True)
    except ClientGone:
        await run_uncancellable(_left(adapter, work, kept, agent_task, agent_ref, stream_q, renderer))
    except asyncio.CancelledError:
        await run_uncancellable(_left(adapter, work, kept, agent_task, agent_ref, stream_q, renderer))
        raise
    return stream.response


async def _left(
    adapter: APIServerAdapter,
    work: PreparedResponse | None,
    kept: ResponseRecord,
    task: asyncio.Future[Any],
    agent_ref: list[Any] | None,
    stream_q: Any,
    renderer: ResponseRenderer,
) -> None:
    if work is not None:
        await _lost(adapter, work, task, renderer)
        return
    await leave(task, agent_ref)
    renderer.feed(_rest(stream_q))
    renderer.cut("client_disconnected")
    await kept.try_save(adapter, renderer.response)


async def _in_background(adapter: APIServerAdapter, request: web.Request, work: PreparedResponse) -> web.StreamResponse:
    """Submit the turn; it is followed to its end whether or not anybody watches."""
    turn, kept = work.turn, work.kept
    if resumed_admission() is not None:
        await work.admit()
    elif turn.spec.results and not turn.bind:
        # Outputs are checked against the calls in the session before they are taken.
        await work.admit()
        await turn.release()
    else:
        await work.branch()
        work.settle()
    renderer = await kept.renderer(adapter)
    await run_uncancellable(_submit(adapter, work, renderer))
    headers = {**turn.headers(), **work.body.headers()}
    if work.body.model.stream:
        return await _replayed(adapter, request, kept, -1, headers)
    return answer(renderer.snapshot(), 200, headers)


async def _submit(adapter: APIServerAdapter, work: PreparedResponse, renderer: ResponseRenderer) -> None:
    """Keep the response and submit its turn: both, or neither."""
    app, kept = await adapter.app(), work.kept
    if resumed_admission() is None:
        await check_model(adapter, work.turn.spec)
    await kept.begin(adapter, renderer.snapshot())
    try:
        await app.engine.submit(work.turn.spec, charged=True) if resumed_admission() is None else None
    except Refused as error:
        await adapter.stored_responses.delete(kept.response_id)
        raise outcome.refusal(error) from None
    app.services.background(follow_until_kept(adapter, kept))


# --- stored responses ------------------------------------------------------------------------------------------------


async def _stored(adapter: APIServerAdapter, request: web.Request) -> tuple[str, Json]:
    response_id = request.match_info["response_id"]
    record: Json | None = await adapter.stored_responses.get(response_id, adapter.visible_owner(request))
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
    "GET",
    _RESPONSE,
    "response",
    "Get a stored response",
    scope="chat",
    query=ResponseQuery,
    answers=Response,
    stream="the same events again from any place, then live, at the end `[DONE]`",
    faults=(410,),
    features=("responses_resume",),
)
async def get_response(adapter: APIServerAdapter, request: web.Request, query: ResponseQuery) -> web.StreamResponse:
    response_id, record = await _stored(adapter, request)
    if not query.stream:
        return answer(record["response"])
    after = -1 if query.starting_after is None else query.starting_after
    return await _replayed(adapter, request, ResponseRecord.of(response_id, record), after, {})


async def _replayed(
    adapter: APIServerAdapter, request: web.Request, kept: ResponseRecord, after: int, headers: dict[str, str]
) -> web.StreamResponse:
    """The stream of a response from wherever its reader wants, then live."""
    app = await adapter.app()
    run = await app.engine.get(kept.run_id) if kept.run_id else None
    if run is None or run.log_expired:
        raise ApiError(410, "The events of this response are not kept any more.", "events_expired")
    renderer = await kept.renderer(adapter, after=after)
    stream: EventStream = adapter.stream(request, headers)
    with contextlib.suppress(ClientGone):
        async with stream:
            for data in renderer.begin():
                if data:
                    await stream.write(data)
            sink = inline_sink(renderer, stream)
            async with contextlib.aclosing(run_events_to_end(app.engine, run.spec.run_id, ROWS, sink=sink)) as source:
                async for batch in source:
                    data = renderer.feed(batch)
                    if renderer.ended:
                        await _ensure_kept(adapter, kept, renderer)
                    if data:
                        await stream.write(data)
            if renderer.ended:
                await stream.write(renderer.done(), last=True)
    return stream.response


async def _ensure_kept(adapter: APIServerAdapter, kept: ResponseRecord, renderer: ResponseRenderer) -> None:
    """Whoever is told the end of a response finds it stored, also where its own follower is a moment behind."""
    found = await adapter.stored_responses.get(kept.response_id, kept.owner)
    if found is not None and found["response"].get("status") in ("queued", "in_progress"):
        await kept.try_save(adapter, renderer.response)


@route("DELETE", _RESPONSE, "response_delete", "Delete a response", scope="chat", answers=ResponseDeleted)
async def delete_response(adapter: APIServerAdapter, request: web.Request) -> ResponseDeleted:
    response_id, record = await _stored(adapter, request)
    if record["response"].get("status") in ("queued", "in_progress") and record.get("run_id"):
        await _stop(adapter, record["run_id"])
    await adapter.stored_responses.delete(response_id)
    return ResponseDeleted(id=response_id)


@route(
    "POST",
    f"{_RESPONSE}/cancel",
    "response_cancel",
    "Cancel a response",
    scope="chat",
    answers=Response,
    faults=(409,),
    features=("responses_cancel",),
)
async def cancel_response(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    response_id, record = await _stored(adapter, request)
    if record["response"].get("status") in ("queued", "in_progress") and record.get("run_id"):
        await _stop(adapter, record["run_id"])
        renderer = await follow(adapter, ResponseRecord.of(response_id, record))
        record["response"] = renderer.response
    if record["response"].get("status") != "cancelled":
        message = f"The response {response_id!r} is {record['response'].get('status')} and cannot be stopped."
        raise ApiError(409, message, "response_not_cancellable")
    return answer(record["response"])


async def _stop(adapter: APIServerAdapter, run_id: str) -> None:
    engine = (await adapter.app()).engine
    await engine.control(run_id, Control("cancel", {"reason": "stop"}, surface="api", credential=adapter.credential()))
    await engine.wait(run_id, CLOSE_S_MAX)


@route(
    "GET",
    f"{_RESPONSE}/input_items",
    "response_input_items",
    "List the input items of a response",
    scope="chat",
    query=ItemQuery,
    answers=ItemList,
    features=("responses_input_items",),
)
async def response_input_items(adapter: APIServerAdapter, request: web.Request, query: ItemQuery) -> ItemList:
    _, record = await _stored(adapter, request)
    return page(list(record.get("input_items") or ()), query)


def page(items: list[Json], query: ItemQuery) -> ItemList:
    """A page of items as the query wants it."""
    ordered = items if query.order == "asc" else items[::-1]
    if query.after:
        index = next((i for i, item in enumerate(ordered) if item.get("id") == query.after), None)
        if index is None:
            raise invalid("after", f"There is no item {query.after!r} here.", "invalid_cursor")
        ordered = ordered[index + 1 :]
    return item_list(ordered[: query.limit], has_more=len(ordered) > query.limit)


def item_list(items: list[Json], *, has_more: bool) -> ItemList:
    """Items as a list."""
    first_id, last_id = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return ItemList(data=items, first_id=first_id, last_id=last_id, has_more=has_more)


# --- counting --------------------------------------------------------------------------------------------------------


@route(
    "POST",
    "/v1/responses/input_tokens",
    "responses_input_tokens",
    "Count the tokens of a response's input",
    scope="chat",
    headers=(SESSION_ID_HEADER, *TURN_HEADERS),
    body=ResponseRequest,
    example={"model": "hermes-agent", "input": [EXAMPLE_ITEM]},
    answers=InputTokens,
    faults=TURN_FAULTS,
    features=("responses_input_tokens",),
)
async def input_tokens(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """What the model would be given for this request, as the agent counts it."""
    body = await read(adapter, request, ResponseRequest)
    body.model.store = body.model.stream = body.model.background = False
    turn = (await prepare(adapter, request, body)).turn
    turn = Turn(adapter, request, await _counted(adapter, request, turn.spec), turn.parse_options)
    try:
        await turn.admit()
        assert turn.admission is not None
        # An agent that somebody has put in the place of ours is never asked.
        result = await turn.admission.engine.work(turn.spec, turn.admission)
    except Refused as error:
        raise outcome.refusal(error) from None
    finally:
        await turn.release()
    if "prompt_tokens" not in result:
        raise outcome.outcome_of(result, {}, adapter.redact).failure()
    told = {"object": "response.input_tokens", "input_tokens": result["prompt_tokens"]}
    return answer(told, 200, body.headers())


async def _counted(adapter: APIServerAdapter, request: web.Request, spec: RunSpec) -> RunSpec:
    """The turn as one that is only counted: with all that its session gives it, and without that session."""
    await check_model(adapter, spec)
    if spec.persist:
        session = await adapter.session(spec.session_id)
        if session is not None:
            if not adapter.may_see(request, session["owner"]):
                raise unknown_session(spec.session_id)
            texts = [text for text in (session["instructions"], spec.instructions) if text]
            route = spec.route or of_session(adapter.settings, session)
            spec = spec.replace(instructions="\n".join(texts) or None, route=route)
        if spec.history is None:
            spec = spec.replace(history=await adapter.stored_history(spec.session_id))
    return spec.replace(session_id=new_session_id(), base_id=None, persist=False, count_only=True)


# --- compacting ------------------------------------------------------------------------------------------------------


@route(
    "POST",
    "/v1/responses/compact",
    "responses_compact",
    "Compact a conversation",
    scope="chat",
    headers=TURN_HEADERS,
    body=CompactRequest,
    example={"model": "hermes-agent", "input": [EXAMPLE_ITEM]},
    answers=Compaction,
    faults=TURN_FAULTS,
    features=("responses_compact",),
    idempotent=True,
    begins_turns=True,
)
async def compact(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    body = await read(adapter, request, CompactRequest)
    asked, owner = body.model, adapter.owner_of(request)
    before: list[Json] = []
    if asked.previous_response_id:
        found = await adapter.stored_responses.get(asked.previous_response_id, owner)
        if found is None:
            message = f"There is no response {asked.previous_response_id!r}."
            raise ApiError(404, message, "previous_response_not_found", "previous_response_id")
        before = list(found.get("conversation_history") or ())
    elif asked.input is None:
        raise invalid("input", "Missing required parameter: 'input'.", "missing_required_parameter")
    given = await reader(adapter, owner).read(asked.input) if asked.input is not None else None
    said = [*before, *(given.messages if given else ())]
    system = "\n".join(text for text in (*(given.system if given else ()), asked.instructions) if text) or None
    spec = RunSpec(
        user_message=SUMMARIZE,
        session_id=new_session_id(),
        kind="response",
        owner=owner,
        history=said,
        instructions=system,
        toolsets=frozenset(),
        on_detach="cancel",
        persist=False,
        memory=False,
        context_files=False,
        route=route_of(adapter, asked.model, asked.provider),
    )
    turn = Turn(adapter, request, spec, parse_options(adapter, request))
    try:
        await turn.admit()
        ended = await turn.run()
    finally:
        await turn.release()
    if not ended.is_success or not ended.text:
        raise ended.failure()
    sealed = (await seal_of(adapter)).close("compaction", owner, ended.text)
    item = {"type": "compaction", "id": f"cmp_{secrets.token_hex(12)}", "encrypted_content": sealed}
    told = {"id": f"cmp_{secrets.token_hex(12)}", "object": "response.compaction", "created_at": int(time.time())}
    headers = {**turn.headers(ended), **body.headers()}
    return answer({**told, "output": [item], "usage": ended.response_usage()}, 200, headers)
