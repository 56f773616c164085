"""The adapter's methods that tests replace, and turns that are carried out by such a replacement.

A real turn is a run of the engine and never comes here. A replaced `_run_agent` or agent reports by callbacks; they are
turned into events at this border, so that renderers and streams see the same as of a real run.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from hermes import facade
from hermes.bus.memory import Sink
from hermes.core.events import Event
from hermes.core.limits import QUEUE_POLL_S
from hermes.core.spec import RunSpec
from hermes.server import runner
from hermes.server.prepared_response import PreparedResponse
from hermes.server.render_chat import ChatRenderer
from hermes.server.request_bodies import Body
from hermes.server.request_options import RequestOptions
from hermes.server.response_record import ResponseRecord, blank, turn_messages
from hermes.server.sse import Item
from hermes.server.turns import Message, Turn, TurnRenderer
from hermes.tools.framework import toolsets

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter

_AGENT = facade.AIAgent
_REPLACEABLE = frozenset({"_run_agent", "_create_agent"})


@dataclass(frozen=True, slots=True)
class SendResult:
    """Whether a message was sent, and why not."""

    success: bool
    error: str | None = None


class TurnQueue:
    """What a turn reports through callbacks, from whatever thread, until it is taken; `None` ends it."""

    def __init__(self) -> None:
        self._items: list[Item | None] = []
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item | None) -> None:
        """Report one thing."""
        self._items.append(item)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._items

    def get_nowait(self) -> Item | None:
        """The oldest thing reported."""
        try:
            return self._items.pop(0)
        except IndexError:
            raise queue.Empty from None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until something happens."""
        if not self._items:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class CallbackRun:
    """A turn that a replaced agent carries out: followed by what it puts into a queue, ended by its task."""

    recorded = False

    def __init__(
        self,
        stream_q: Any,
        task: asyncio.Future[Any],
        agent_ref: list[Any] | None,
        spec: RunSpec,
        history: list[Message],
    ) -> None:
        self.queue, self.task, self.agent_ref = stream_q, task, agent_ref
        self._spec, self._history = spec, history
        self._closed = False

    async def start(self) -> None:
        """It has begun."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.task.done()

    async def result(self) -> tuple[Message, Mapping[str, Any]]:
        """Its result, waited for, and its tokens."""
        result: tuple[Message, Mapping[str, Any]] = await self.task
        return result

    async def events(self, rows: frozenset[str], sink: Sink | None) -> AsyncGenerator[list[Item], None]:
        """What was reported; of a response that nothing was reported of, its messages."""
        reported = False
        while True:
            over = self.task.done()
            if items := self.untold():
                reported = True
                yield items
            if self._closed or (over and not items):
                break
            if isinstance(self.queue, TurnQueue):
                await self.queue.wait()
            else:
                # A queue of somebody else's making cannot tell when there is something in it.
                await asyncio.wait([self.task], timeout=QUEUE_POLL_S)
        if self._spec.kind == "response" and not reported:
            with contextlib.suppress(Exception):  # whoever asks for the result is told
                result, _ = await self.task
                yield _events_of(turn_messages(self._history, result.get("messages") or []))

    def untold(self) -> list[Item]:
        """All that is in the queue."""
        items: list[Item] = []
        while not self.queue.empty():
            item = self.queue.get_nowait()
            self._closed = self._closed or item is None
            items += [item] if item is not None else []
        return items

    async def stop(self) -> None:
        """Its client has gone: stop it and wait for its end, unless it is to end by itself."""
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
    """What a replaced agent calls, as events in a queue. Tools of our own are not shown."""

    def __init__(self, stream_q: TurnQueue) -> None:
        self._queue = stream_q
        self._started: set[str] = set()

    def arguments(self, kind: str) -> dict[str, Callable[..., None]]:
        """The callbacks under the names of `_run_agent`."""
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
    """A line that says what a call is about: its first argument that is text."""
    values = args.values() if isinstance(args, Mapping) else ()
    return next((value.splitlines()[0][:200] for value in values if isinstance(value, str) and value.strip()), "")


def _events_of(messages: list[Message]) -> list[Item]:
    """Messages of a turn in the form of its events. The last text is told by the end."""
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


class ReplaceableMethods:
    """The methods of the adapter that tests replace or call."""

    if TYPE_CHECKING:
        _options: dict[str, Any]

        def _ensure_session_db(self) -> Any: ...

    def replaced_run(self, turn: Turn, *, streamed: bool) -> CallbackRun | None:
        """The turn, begun by what somebody has put in the place of the agent; None where nobody has."""
        if self.__dict__.keys().isdisjoint(_REPLACEABLE) and facade.AIAgent is _AGENT:
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
        return CallbackRun(stream_q, task, agent_ref, turn.spec, turn.history)

    def _create_agent(
        self,
        *,
        ephemeral_system_prompt: str | None = None,
        session_id: str | None = None,
        gateway_session_key: str | None = None,
        **callbacks: Any,
    ) -> Any:
        """The agent for a turn, as the configuration describes it. No network is touched."""
        config = runner._load_gateway_config()
        enabled = self._options["toolsets"]
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
        """Run a turn with an agent of its own: its result, and its tokens."""
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
        """The stream of a chat completion."""
        if turn is None:
            turn = _bare_turn(cast("APIServerAdapter", self), request, "chat")
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
        """The stream of a response."""
        if prepared is None:
            record = ResponseRecord(response_id, blank(response_id, model, created_at), history=conversation_history)
            record.user_message, record.instructions, record.session_id = user_message, instructions, session_id
            record.conversation, record.store = conversation, store
            turn = _bare_turn(cast("APIServerAdapter", self), request, "response")
            turn.run = CallbackRun(stream_q, agent_task, agent_ref, turn.spec, conversation_history)
            prepared = PreparedResponse(Body(None, {}), record, turn)  # type: ignore[arg-type]
        return await prepared.stream()

    async def send(self, chat_id: str, text: str) -> SendResult:
        """Messages cannot be pushed: every answer goes back on the connection of its request."""
        return SendResult(False, "The API server works by HTTP request/response; it cannot send by itself.")


def _bare_turn(adapter: APIServerAdapter, request: web.Request, kind: Any) -> Turn:
    """A turn of which nothing is known but its task."""
    spec = RunSpec(user_message="", session_id="", kind=kind, on_detach="cancel")
    return Turn(adapter, request, spec, RequestOptions())
