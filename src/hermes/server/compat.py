"""The names of the contract's tests: `APIServerAdapter` with the methods they replace or call, and turns that run
through such a replacement.

The server itself works with `ServerContext` and never comes here. A replaced `_run_agent` or agent reports by
callbacks, which are turned into events here, so that renderers and streams see the same as of a real run.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import queue
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from aiohttp import web

from hermes import facade
from hermes.bus.memory import Sink
from hermes.core.events import Event
from hermes.core.json_types import JsonMapping, JsonObject, Message
from hermes.core.limits import QUEUE_POLL_S
from hermes.core.spec import RunSpec
from hermes.server import runner
from hermes.server.chat import _derive_chat_session_id
from hermes.server.context import ServerContext, resolve_model_name
from hermes.server.errors import ApiError
from hermes.server.gate import check_gate
from hermes.server.handlers import ROUTES
from hermes.server.headers import CORS_HEADERS, common_headers
from hermes.server.idempotency import _IdempotencyCache
from hermes.server.middleware import Handler
from hermes.server.prepared_response import PreparedResponse
from hermes.server.render_chat import ChatRenderer
from hermes.server.request_bodies import Body
from hermes.server.request_options import RequestOptions
from hermes.server.response_record import ResponseRecord, blank, turn_messages
from hermes.server.routes import Endpoint
from hermes.server.settings import Platform, PlatformConfig, api_server_options
from hermes.server.sse import Item
from hermes.server.turns import Recorder, Turn, TurnRenderer
from hermes.store.responses import ResponseStore
from hermes.tools.framework import toolsets

__all__ = [
    "AIOHTTP_AVAILABLE",
    "APIServerAdapter",
    "ResponseStore",
    "_IdempotencyCache",
    "_derive_chat_session_id",
    "check_api_server_requirements",
    "cors_middleware",
    "security_headers_middleware",
]
AIOHTTP_AVAILABLE = find_spec("aiohttp") is not None
CHAT_COMPLETIONS_SSE_KEEPALIVE_SECONDS = 15.0
_CORS_HEADERS = CORS_HEADERS
_AGENT = facade.AIAgent
_REPLACEABLE = frozenset({"_run_agent", "_create_agent"})


def check_api_server_requirements() -> bool:
    return bool(AIOHTTP_AVAILABLE)


@web.middleware
async def cors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    adapter = request.match_info.apps[-1].get("api_server_adapter")
    if adapter is None:
        return await handler(request)
    refusal = check_gate(adapter.context, request, common_headers(request))
    if refusal is None:
        return await security_headers_middleware(request, handler)
    response = refusal.response() if isinstance(refusal, ApiError) else refusal
    response.headers.update(common_headers(request))
    return response


@web.middleware
async def security_headers_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(common_headers(request))
        raise
    if not response.prepared:
        for name, value in common_headers(request).items():
            response.headers.setdefault(name, value)
    return response


@dataclass(frozen=True, slots=True)
class SendResult:
    success: bool
    error: str | None = None


class TurnQueue:
    """Events reported through callbacks from any thread; `None` ends the queue."""

    def __init__(self) -> None:
        self._items: list[Item | None] = []
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item | None) -> None:
        self._items.append(item)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def empty(self) -> bool:
        return not self._items

    def get_nowait(self) -> Item | None:
        try:
            return self._items.pop(0)
        except IndexError:
            raise queue.Empty from None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        if not self._items:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class CallbackRun:
    """A turn that a replaced agent carries out: its events come from a queue, its end from its task."""

    recorded = False

    def __init__(
        self,
        stream_q: Any,
        task: asyncio.Future[Any],
        agent_ref: list[Any] | None,
        spec: RunSpec,
        history: list[Message],
        adapter: APIServerAdapter | None = None,
    ) -> None:
        self.queue, self.task, self.agent_ref, self._adapter = stream_q, task, agent_ref, adapter
        self._spec, self._history, self._closed = spec, history, False

    async def start(self) -> None: ...

    @property
    def done(self) -> bool:
        return self.task.done()

    async def result(self) -> tuple[Message, JsonMapping]:
        result: tuple[Message, JsonMapping] = await self.task
        return result

    async def events(self, rows: frozenset[str], sink: Sink | None) -> AsyncGenerator[list[Item], None]:
        """The reported events; for a response without any, those of its messages."""
        reported = False
        while True:
            over = self.task.done()
            if items := self.unread():
                reported = True
                yield items
            if self._closed or (over and not items):
                break
            if isinstance(self.queue, TurnQueue):
                await self.queue.wait()
            else:
                # Another kind of queue cannot be awaited.
                await asyncio.wait([self.task], timeout=QUEUE_POLL_S)
        if self._spec.kind == "response" and not reported:
            with contextlib.suppress(Exception):  # `result` raises it
                result, _ = await self.task
                yield _events_of(turn_messages(self._history, result.get("messages") or []))

    async def stream(
        self,
        turn: Turn,
        renderer: TurnRenderer,
        headers: Mapping[str, str],
        rows: frozenset[str],
        recorder: Recorder | None,
    ) -> web.StreamResponse:
        """Stream the turn through the adapter's method for its kind, which may be replaced too."""
        assert self._adapter is not None
        if isinstance(renderer, ChatRenderer):
            head: JsonObject = renderer.head
            names = (head["id"], head["model"], head["created"])
            return await self._adapter._write_sse_chat_completion(
                turn.request, *names, self.queue, self.task, self.agent_ref, turn, renderer, headers
            )
        if isinstance(recorder, PreparedResponse):
            record = recorder.record
            return await self._adapter._write_sse_responses(
                request=turn.request,
                response_id=record.response_id,
                model=record.template["model"],
                created_at=record.template["created_at"],
                stream_q=self.queue,
                agent_task=self.task,
                agent_ref=self.agent_ref,
                conversation_history=turn.history,
                user_message=record.user_message,
                instructions=record.instructions,
                conversation=record.conversation,
                store=record.store,
                session_id=turn.session_id,
                prepared=recorder,
            )
        return await turn.stream(renderer, headers, rows, recorder)

    def unread(self) -> list[Item]:
        items: list[Item] = []
        while not self.queue.empty():
            item = self.queue.get_nowait()
            self._closed = self._closed or item is None
            items += [item] if item is not None else []
        return items

    async def stop(self) -> None:
        if self._spec.on_detach == "continue":
            await asyncio.wait([self.task])
        if self.task.done():
            return
        if self.agent_ref and self.agent_ref[0] is not None:
            self.agent_ref[0].interrupt("SSE client disconnected")
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self.task


class _Callbacks:
    """The callbacks of a replaced agent, which put events into a queue. Our own tools are not shown."""

    def __init__(self, stream_q: TurnQueue) -> None:
        self._queue = stream_q
        self._started: set[str] = set()

    def arguments(self, kind: str) -> dict[str, Callable[..., None]]:
        callbacks: dict[str, Callable[..., None]] = {
            "stream_delta_callback": lambda text: self._queue.put(text) if text is not None else None,
            "tool_start_callback": self._tool_started,
            "tool_complete_callback": self._tool_finished,
        }
        return callbacks | ({"tool_progress_callback": self._progressed} if kind == "session" else {})

    def _tool_started(self, call_id: str, name: str, args: Any) -> None:
        if not name.startswith("_"):
            self._started.add(call_id)
            data = {"call_id": call_id, "name": name, "args": args, "preview": _preview(args)}
            self._queue.put(Event("", "tool.started", 0, data))

    def _tool_finished(self, call_id: str, name: str, args: Any, result: Any) -> None:
        if call_id in self._started:
            self._started.remove(call_id)
            data = {"call_id": call_id, "name": name, "status": "ok", "duration_ms": 0, "content": str(result)}
            self._queue.put(Event("", "tool.finished", 0, data))

    def _progressed(self, event: str, tool_name: str = "", preview: str | None = None, *_: Any, **__: Any) -> None:
        if event == "reasoning.available":
            self._queue.put(Event("", "reasoning.completed", 0, {"message_id": "", "reasoning": preview or ""}))


def _preview(args: Any) -> str:
    """The first argument that is text, for a one-line description of a call."""
    values = args.values() if isinstance(args, Mapping) else ()
    return next((value.splitlines()[0][:200] for value in values if isinstance(value, str) and value.strip()), "")


def _events_of(messages: list[Message]) -> list[Item]:
    """Messages of a turn as its events. The last text is part of the end."""
    events: list[Item] = []
    last = len(messages) - 1
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            calls = message.get("tool_calls") or ()
            if message.get("content") and (calls or index != last):
                events.append(str(message["content"]))
            for call in calls:
                function = call["function"]
                data = {"call_id": call["id"], "name": function["name"], "raw": function.get("arguments") or "{}"}
                events.append(Event("", "tool.started", 0, {**data, "args": {}}))
        elif message.get("role") == "tool":
            data = {"call_id": message.get("tool_call_id"), "name": "", "status": "ok"}
            events.append(Event("", "tool.finished", 0, {**data, "content": message.get("content")}))
    return events


class _Context(ServerContext):
    """A server context whose parts an adapter may have replaced; they are looked up when used."""

    def __init__(self, adapter: APIServerAdapter, extra: JsonMapping, model_name: str) -> None:
        super().__init__(extra, model_name)
        self.replaced_run, self.is_agent_replaced = adapter.replaced_run, adapter.is_agent_replaced
        self._sets_keepalive = extra.get("keepalive_seconds") or os.environ.get("API_SERVER_KEEPALIVE_SECONDS")

    @property
    def keepalive_s(self) -> float:
        return self.options.keepalive_seconds if self._sets_keepalive else CHAT_COMPLETIONS_SSE_KEEPALIVE_SECONDS


class APIServerAdapter:
    """The API server as the contract's tests use it. Constructing one touches neither network nor disk."""

    platform = Platform.API_SERVER

    def __init__(self, config: PlatformConfig) -> None:
        name = api_server_options(config.extra).model_name
        self.context = context = _Context(self, config.extra, self._resolve_model_name(name))
        options = context.options
        self._host, self._port, self._api_key = options.host, options.port, options.key
        self._cors_origins, self._model_name = tuple(options.cors_origins), context.model_name

    _resolve_model_name = staticmethod(resolve_model_name)

    @property
    def _session_db(self) -> Any:
        return self.context.session_db

    @_session_db.setter
    def _session_db(self, db: Any) -> None:
        self.context.session_db = db

    @property
    def _response_store(self) -> ResponseStore:
        return self.context.response_store

    @_response_store.setter
    def _response_store(self, store: ResponseStore) -> None:
        self.context.response_store = store

    def _ensure_session_db(self) -> Any:
        return self.context.open_session_db()

    def _check_auth(self, request: web.Request) -> web.Response | None:
        refusal = self.context.check_auth(request)
        return refusal.response() if refusal else None

    def _parse_session_key_header(self, request: web.Request) -> tuple[str | None, web.Response | None]:
        try:
            return self.context.session_key(request), None
        except ApiError as error:
            return None, error.response()

    def _origin_allowed(self, origin: str) -> bool:
        return self.context.origin_allowed(origin)

    def _cors_headers_for_origin(self, origin: str) -> dict[str, str] | None:
        return self.context.cors_headers(origin)

    def is_agent_replaced(self) -> bool:
        return not self.__dict__.keys().isdisjoint(_REPLACEABLE) or facade.AIAgent is not _AGENT

    def replaced_run(self, turn: Turn, *, streamed: bool) -> CallbackRun | None:
        """The turn, started through a replaced agent; None where nothing is replaced."""
        if not self.is_agent_replaced():
            return None
        stream_q, agent_ref = TurnQueue(), [None]
        coroutine = self._run_agent(
            user_message=turn.spec.user_message,
            conversation_history=turn.history,
            ephemeral_system_prompt=turn.spec.instructions,
            session_id=turn.spec.session_id,
            gateway_session_key=turn.spec.session_key,
            agent_ref=agent_ref,
            **(_Callbacks(stream_q).arguments(turn.spec.kind) if streamed else {}),
        )
        task = asyncio.ensure_future(coroutine)
        task.add_done_callback(lambda _: stream_q.put(None))
        return CallbackRun(stream_q, task, agent_ref, turn.spec, turn.history, self)

    def _create_agent(
        self,
        *,
        ephemeral_system_prompt: str | None = None,
        session_id: str | None = None,
        gateway_session_key: str | None = None,
        **callbacks: Any,
    ) -> Any:
        """The agent for a turn, built from the configuration without network access."""
        config = runner._load_gateway_config()
        enabled = self.context.options.toolsets
        return facade.AIAgent(
            **runner._resolve_runtime_agent_kwargs(),
            model=runner._resolve_gateway_model(),
            reasoning_config=runner.GatewayRunner._load_reasoning_config(),
            fallback_model=runner.GatewayRunner._load_fallback_model(),
            enabled_toolsets=sorted(toolsets._get_platform_tools(config, "api_server") if enabled is None else enabled),
            session_id=session_id,
            session_db=self._ensure_session_db(),
            platform="api_server",
            gateway_session_key=gateway_session_key,
            ephemeral_system_prompt=ephemeral_system_prompt,
            quiet_mode=True,
            **callbacks,
        )

    async def _run_agent(
        self,
        *,
        user_message: Any,
        conversation_history: list[Message],
        session_id: str | None = None,
        ephemeral_system_prompt: str | None = None,
        gateway_session_key: str | None = None,
        agent_ref: list[Any] | None = None,
        **callbacks: Any,
    ) -> tuple[Message, dict[str, int]]:
        """Run a turn with its own agent; its result and token counts."""
        agent = self._create_agent(
            ephemeral_system_prompt=ephemeral_system_prompt,
            session_id=session_id,
            gateway_session_key=gateway_session_key,
            **callbacks,
        )
        turn = {"user_message": user_message, "conversation_history": conversation_history, "task_id": session_id}
        if inspect.iscoroutinefunction(getattr(type(agent), "arun_conversation", None)):
            result = await agent.arun_conversation(**turn)
        else:
            if agent_ref is not None:
                agent_ref[0] = agent
            result = await asyncio.to_thread(agent.run_conversation, **turn)
        usage = {
            "input_tokens": agent.session_prompt_tokens,
            "output_tokens": agent.session_completion_tokens,
            "total_tokens": agent.session_total_tokens,
        }
        return result, usage

    async def _write_sse_chat_completion(
        self,
        request: web.Request,
        completion_id: str,
        model: str,
        created: int,
        stream_q: Any,
        agent_task: asyncio.Future[Any],
        agent_ref: list[Any] | None = None,
        turn: Turn | None = None,
        renderer: TurnRenderer | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> web.StreamResponse:
        if turn is None:
            turn = _bare_turn(self.context, request, "chat")
            turn.run = CallbackRun(stream_q, agent_task, agent_ref, turn.spec, [])
        return await turn.stream(renderer or ChatRenderer(completion_id, model, created), headers or {})

    async def _write_sse_responses(
        self,
        *,
        request: web.Request,
        response_id: str,
        model: str,
        created_at: int,
        stream_q: Any,
        agent_task: asyncio.Future[Any],
        agent_ref: list[Any] | None,
        conversation_history: list[Message],
        user_message: Any,
        instructions: str | None,
        conversation: str | None,
        store: bool,
        session_id: str | None,
        prepared: PreparedResponse | None = None,
    ) -> web.StreamResponse:
        if prepared is None:
            record = ResponseRecord(response_id, blank(response_id, model, created_at), history=conversation_history)
            record.user_message, record.instructions, record.session_id = user_message, instructions, session_id
            record.conversation, record.store = conversation, store
            turn = _bare_turn(self.context, request, "response")
            turn.run = CallbackRun(stream_q, agent_task, agent_ref, turn.spec, conversation_history)
            prepared = PreparedResponse(Body(None, {}), record, turn)  # type: ignore[arg-type]
        return await prepared.stream()

    async def send(self, chat_id: str, text: str) -> SendResult:
        """Always refused: answers go back on the connection of their request."""
        return SendResult(False, "The API server works by HTTP request/response; it cannot send by itself.")


def _bare_turn(context: ServerContext, request: web.Request, kind: Any) -> Turn:
    spec = RunSpec(user_message="", session_id="", kind=kind, on_detach="cancel")
    return Turn(context, request, spec, RequestOptions())


def _handle(endpoint: Endpoint) -> Callable[[APIServerAdapter, web.Request], Awaitable[web.StreamResponse]]:
    async def handle(self: APIServerAdapter, request: web.Request) -> web.StreamResponse:
        return await endpoint(self.context, request)

    return handle


for _route in ROUTES:
    setattr(APIServerAdapter, f"_handle_{_route.handler.__name__}", _handle(_route.endpoint()))
