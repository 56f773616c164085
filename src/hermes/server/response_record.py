"""What is stored of a response, and building one from its run's log without a client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from hermes.agent.media_tags import strip_rendered_media
from hermes.core.json_types import JsonMapping, JsonObject, Message
from hermes.core.limits import LEASE_TTL_S
from hermes.runs.engine import STORE_UNAVAILABLE_NOTICE
from hermes.server.errors import ApiError
from hermes.server.outcome import Outcome, usage_object
from hermes.server.render_responses import ROWS, ResponseRenderer, VisibleItems
from hermes.server.sealing import seal_of
from hermes.server.sse import run_events
from hermes.store.base import StoreError

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

log = logging.getLogger(__name__)
WAIT_FOR_RUN_S = 1.0
WAIT_FOR_STORE_S = 5.0
_STORED = ("instructions", "conversation", "session_id", "owner", "run_id", "input_items", "system", "added_tools")
_SHOWN = tuple(item.name for item in fields(VisibleItems))


@dataclass(slots=True)
class ResponseRecord:
    """What is stored of a response besides its object.

    `system` and `added_tools`: system texts and tools from the inputs of its chain, its own included.
    """

    response_id: str
    template: JsonObject
    shows: VisibleItems = field(default_factory=VisibleItems)
    history: list[Message] = field(default_factory=list)
    user_message: Any = ""
    instructions: str | None = None
    conversation: str | None = None
    store: bool = True
    session_id: str | None = None
    owner: str = "default"
    run_id: str | None = None
    input_items: list[JsonObject] = field(default_factory=list)
    system: list[str] = field(default_factory=list)
    added_tools: list[JsonObject] = field(default_factory=list)
    known: bool = False

    def as_json(self, response: JsonObject, history: list[Message]) -> JsonObject:
        fields = {name: getattr(self, name) for name in _STORED}
        fields |= {"template": dict(self.template), "shows": {name: getattr(self.shows, name) for name in _SHOWN}}
        return {**fields, "response": response, "conversation_history": history}

    @classmethod
    def of(cls, response_id: str, record: JsonMapping) -> ResponseRecord:
        shows = record.get("shows") or {}
        known = {
            name: record[name] for name in ("instructions", "conversation", "session_id", "run_id") if name in record
        }
        return cls(
            response_id,
            dict(record.get("template") or record["response"]),
            VisibleItems(**{**shows, "client_tools": tuple(shows.get("client_tools", ()))}),
            owner=record.get("owner") or "default",
            input_items=list(record.get("input_items") or ()),
            system=list(record.get("system") or ()),
            added_tools=list(record.get("added_tools") or ()),
            known=True,
            **known,
        )

    async def renderer(self, context: ServerContext, **how: Any) -> ResponseRenderer:
        seal = await seal_of(context) if self.shows.encrypted else None
        closed = (lambda opaque: seal.close("reasoning", self.owner, opaque)) if seal is not None else None
        limit = context.options.max_event_bytes
        return ResponseRenderer(self.template, self.shows, seal=closed, event_bytes_max=limit, **how)

    async def begin(self, context: ServerContext, response: JsonObject) -> None:
        """Insert the response; one that is stored already is further on than this. Raises where it cannot be stored."""
        if not self.known:
            await self.save(context, response)

    async def try_insert(self, context: ServerContext, renderer: ResponseRenderer) -> None:
        """The same for requests that are answered with a warning where nothing can be stored."""
        if not self.known and not await self.try_save(context, renderer.snapshot()):
            renderer.warn(*STORE_UNAVAILABLE_NOTICE)

    async def save(self, context: ServerContext, response: JsonObject, ended: Outcome | None = None) -> None:
        """Update the response; at its end also the conversation names that point to it."""
        if not self.store:
            return
        over = response["status"] not in ("queued", "in_progress")
        history = await self._transcript(context, response, ended) if over else list(self.history)
        store = context.stored_responses
        # A deleted response stays deleted, and another replica may be further on with the same one.
        only = "known" if self.known else None if over else "new"
        await store.put(self.response_id, self.as_json(response, history), only)
        self.known = True
        if over and self.conversation:
            await store.set_conversation(self.conversation, self.response_id, self.owner)
            if self.conversation.startswith("conv_"):
                items = [*self.input_items, *response["output"]]
                await store.add_conversation_items(self.conversation, self.owner, items, self.response_id)

    async def try_save(self, context: ServerContext, response: JsonObject, ended: Outcome | None = None) -> bool:
        """Update it if possible; a record that is behind then follows its run."""
        try:
            await self.save(context, response, ended)
        except StoreError as error:
            log.warning("the response %s could not be stored: %s", self.response_id, error)
            if self.known and self.run_id and response["status"] not in ("queued", "in_progress"):
                context.app.services.background(follow_until_saved(context, self))
            return False
        return True

    async def _transcript(self, context: ServerContext, response: JsonObject, ended: Outcome | None) -> list[Message]:
        session_id = self.session_id if ended is None and self.run_id else None
        # The session may have gone on since.
        if session_id and (history := await context.stored_history(session_id, until_run=self.run_id)):
            return history
        text = ended.text if ended else text_of_output(response["output"])
        return transcript(self.history, self.user_message, ended.messages if ended else None, text)


def transcript(
    history: list[Message], user_message: object, messages: list[Message] | None, text: str
) -> list[Message]:
    """The whole conversation without repetition, whatever part of it the agent returns."""
    user_messages: list[Message] = [{"role": "user", "content": user_message}] if user_message else []
    if messages and messages[: len(history) + len(user_messages)] == [*history, *user_messages]:
        return messages
    turn = turn_messages(history, messages or [])
    if text and not (
        turn and turn[-1].get("role") == "assistant" and turn[-1].get("content") in (text, strip_rendered_media(text))
    ):
        turn = [*turn, {"role": "assistant", "content": text}]
    return [*history, *user_messages, *turn]


def turn_messages(history: list[Message], messages: list[Message]) -> list[Message]:
    """This turn's assistant and tool messages, of all that an agent returns."""
    rest = messages[len(history) :] if history and messages[: len(history)] == history else messages
    users = [at for at, message in enumerate(rest) if message.get("role") == "user"]
    return rest[users[-1] + 1 :] if users else rest


def text_of_output(output: list[JsonObject]) -> str:
    messages = [item for item in output if item.get("type") == "message"]
    return "".join(part.get("text", "") for part in messages[-1].get("content", ())) if messages else ""


def blank(response_id: str, model: str, created_at: int) -> JsonObject:
    """A response object with every key that it always has."""
    return {
        "id": response_id, "object": "response", "created_at": created_at, "completed_at": None,
        "status": "in_progress", "incomplete_details": None, "error": None, "model": model,
        "previous_response_id": None, "instructions": None, "output": [],
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "max_tool_calls": None,
        "max_output_tokens": None, "temperature": 1.0, "top_p": 1.0,
        "presence_penalty": 0, "frequency_penalty": 0, "top_logprobs": 0, "truncation": "disabled",
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None},
        "store": True, "background": False, "service_tier": "default", "metadata": {},
        "safety_identifier": None, "prompt_cache_key": None, "usage": usage_object({}),
    }  # fmt: skip


async def previous_response(context: ServerContext, response_id: str, owner: str) -> JsonObject:
    record: JsonObject | None = await context.stored_responses.get(response_id, owner)
    if record is None:
        raise no_previous_response(response_id)
    return record


def no_previous_response(response_id: str) -> ApiError:
    message = f"There is no response {response_id!r}."
    return ApiError(404, message, "previous_response_not_found", "previous_response_id")


# --- following a run without its client ------------------------------------------------------------------------------


async def follow(context: ServerContext, record: ResponseRecord) -> ResponseRenderer:
    """Build the response from its run's log, to the run's end, and store it."""
    app = context.app
    while True:
        renderer = await record.renderer(context)
        for _ in renderer.begin():
            pass
        async with contextlib.aclosing(run_events(app.engine, record.run_id or "", ROWS)) as source:
            async for batch in source:
                before = renderer.status
                renderer.feed(batch)
                if renderer.status != before and not renderer.ended:
                    await record.save(context, renderer.snapshot())
        if renderer.ended or app.engine.draining:
            break
        if (run := await app.engine.get(record.run_id or "")) is None or run.log_expired:
            renderer.finish(Outcome(code="server_restarted", error="The server was restarted.", failed=True))
            break
        await asyncio.sleep(WAIT_FOR_RUN_S)  # it waits to be resumed
    if renderer.ended:
        await record.save(context, renderer.response)
    return renderer


async def level(context: ServerContext) -> None:
    """Complete the unfinished responses of an earlier server whose runs have ended. All others follow when their runs
    are taken over."""
    app = context.app
    unfinished = await context.stored_responses.unfinished()
    if (without_run := await _level_ended(context, unfinished)) and app.engine.peers.names():
        await asyncio.sleep(LEASE_TTL_S)  # another worker may be about to start their runs
        without_run = await _level_ended(context, without_run)
    for response_id in without_run:
        app.services.background(level_revived(context, response_id))


async def _level_ended(context: ServerContext, response_ids: list[str]) -> list[str]:
    """Responses without a run are left."""
    app, without_run = context.app, list[str]()
    for response_id in response_ids:
        record = await context.stored_responses.get(response_id)
        if record is None or not record.get("run_id"):
            continue
        run = await app.engine.get(record["run_id"])
        if run is None:
            without_run.append(response_id)
        elif run.state.ended:
            app.services.background(level_revived(context, response_id))
    return without_run


async def level_revived(context: ServerContext, response_id: str) -> None:
    """Follow the run of a response that is taken over here, or has ended."""
    record = await context.stored_responses.get(response_id)
    if record is not None and record.get("run_id"):
        await follow_until_saved(context, ResponseRecord.of(response_id, record))


async def follow_until_saved(context: ServerContext, record: ResponseRecord) -> None:
    """The same in the background, retrying while the store cannot be written to."""
    while True:
        try:
            await follow(context, record)
            return
        except StoreError as error:
            if context.app.engine.draining:
                return
            log.warning("the response %s could not be stored: %s", record.response_id, error)
            await asyncio.sleep(WAIT_FOR_STORE_S)
