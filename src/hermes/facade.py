"""`AIAgent`: the agent for embedding programs, blocking outside and asynchronous inside."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hermes.agent.callbacks import Callback, Callbacks, answer_to
from hermes.blocking_calls import SingleCalls
from hermes.core.errors import HermesError
from hermes.core.events import Event
from hermes.core.home import Home
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import QUEUE_EVENTS_MAX
from hermes.core.result import Result
from hermes.core.spec import Content, Control, RouteChoice, RunSpec
from hermes.core.text import text_of
from hermes.providers.base import SAMPLING
from hermes.providers.registry import api_mode_for
from hermes.runs.engine import LiveRun, RunEngine
from hermes.store.engine import Engine
from hermes.store.repository import Repository

_KINDS = {"cli": "cli", "api_server": "chat", "cron": "job", "subagent": "subagent"}
_DONE = object()
log = logging.getLogger(__name__)


class AgentError(HermesError):
    """A turn that failed; its result is in `result`."""

    def __init__(self, result: Result) -> None:
        super().__init__(str(result["error"]))
        self.result = result


@dataclass(eq=False, slots=True)
class _Turn:
    """A turn that the caller waits for. It exists before its run does, so that it can be stopped before that."""

    run: tuple[RunEngine, str, asyncio.AbstractEventLoop] | None = None
    stopped: bool = False


class AIAgent(SingleCalls):
    """One conversation. Constructing it does no I/O; its runs belong to the process's engine."""

    def __init__(
        self,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        model: str | None = None,
        provider: str | None = None,
        api_mode: str | None = None,
        reasoning_config: JsonMapping | None = None,
        max_tokens: int | None = None,
        request_overrides: JsonMapping | None = None,
        fallback_model: JsonMapping | str | Sequence[JsonMapping | str] | None = None,
        max_iterations: int | None = None,
        enabled_toolsets: Sequence[str] | None = None,
        disabled_toolsets: Sequence[str] | None = None,
        client_tools: Sequence[JsonMapping] | None = None,
        session_id: str | None = None,
        session_db: object = None,
        parent_session_id: str | None = None,
        platform: str | None = None,
        gateway_session_key: str | None = None,
        ephemeral_system_prompt: str | None = None,
        skip_context_files: bool = False,
        skip_memory: bool = False,
        quiet_mode: bool = False,
        approvals: str | None = None,
        deadline_seconds: float | None = None,
        home: Home | None = None,
        stream_delta_callback: Callback | None = None,
        reasoning_callback: Callback | None = None,
        tool_start_callback: Callback | None = None,
        tool_complete_callback: Callback | None = None,
        tool_progress_callback: Callback | None = None,
        approval_callback: Callback | None = None,
        clarify_callback: Callback | None = None,
        event_callback: Callback | None = None,
    ) -> None:
        self.model, self.provider, self.base_url = model or "", provider or "", base_url or ""
        self.api_mode = api_mode or api_mode_for(self.provider, self.base_url)
        self._explicit_mode = api_mode
        self._api_key = api_key or ""
        self.session_id = session_id or f"{time.strftime('%Y%m%d_%H%M%S')}_{secrets.token_hex(6)}"
        self.session_db, self.parent_session_id = session_db, parent_session_id
        self.platform, self.quiet_mode = platform or "cli", quiet_mode
        self._overrides = dict(request_overrides or {})
        if fallback_model is not None and not isinstance(fallback_model, list | tuple):
            fallback_model = [fallback_model]  # type: ignore[list-item]
        self._fallbacks = None if fallback_model is None else tuple(fallback_model)
        self._toolsets = (enabled_toolsets, frozenset(disabled_toolsets or ()))
        self._skip = (skip_context_files, skip_memory)
        self._spec_fields: JsonObject = {
            "reasoning": reasoning_config,
            "max_output_tokens": max_tokens,
            "max_iterations": max_iterations,
            "client_tools": tuple(client_tools or ()),
            "session_key": gateway_session_key,
            "approvals": approvals,
            "deadline_seconds": deadline_seconds,
        }
        self._home = home
        self._ephemeral_system_prompt = ephemeral_system_prompt
        self.stream_delta_callback, self.reasoning_callback = stream_delta_callback, reasoning_callback
        self.tool_start_callback, self.tool_complete_callback = tool_start_callback, tool_complete_callback
        self.tool_progress_callback, self.event_callback = tool_progress_callback, event_callback
        self.approval_callback, self.clarify_callback = approval_callback, clarify_callback
        self._stream_callback: Callback | None = None
        self._anthropic_client: Any = None
        self._live_client: Any = None
        self._live_stream: Any = None
        self._interrupt_requested = False
        self._disable_streaming = False
        self._current_streamed_assistant_text = ""
        self._turns: set[_Turn] = set()
        self.session_prompt_tokens = self.session_completion_tokens = self.session_total_tokens = 0

    # --- turns --------------------------------------------------------------------------------------------------

    def run_conversation(
        self,
        user_message: Content,
        system_message: str | None = None,
        conversation_history: list[JsonObject] | None = None,
        task_id: str | None = None,
        stream_callback: Callback | None = None,
    ) -> Result:
        """Run a turn and wait for it. Callbacks are called in this thread."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError("This thread has a running event loop: await arun_conversation(…) instead.")
        from hermes.app import background_loop

        spec = self._spec(user_message, system_message, conversation_history, task_id)
        callbacks = self._callbacks(stream_callback)
        loop = background_loop()
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        abandoned = threading.Event()

        async def hand_over(event: Event, content: str | None) -> None:
            # A slow caller slows down only its own reading of the log. It is another
            # thread and cannot tell when it has room again.
            while events.qsize() >= QUEUE_EVENTS_MAX and not abandoned.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            events.put((event, content))

        turn = self._new_turn()

        async def drive() -> Result:
            try:
                return await self._drive(turn, spec, callbacks.any, hand_over)
            finally:
                events.put(_DONE)

        running: Future[Result] | None = None
        try:
            running = asyncio.run_coroutine_threadsafe(drive(), loop)
            while (item := events.get()) is not _DONE:
                event, content = item
                if control := answer_to(event, callbacks.notify(event, content)):
                    self._send(control, [turn])
        except BaseException:
            abandoned.set()
            self._stop([turn])
            if running is not None:
                running.result()
            raise
        finally:
            self._turns.discard(turn)
        return self._account(running.result())

    async def arun_conversation(
        self,
        user_message: Content,
        system_message: str | None = None,
        conversation_history: list[JsonObject] | None = None,
        task_id: str | None = None,
        stream_callback: Callback | None = None,
    ) -> Result:
        """The same as a coroutine. Callbacks are called on the loop and must return quickly."""
        spec = self._spec(user_message, system_message, conversation_history, task_id)
        callbacks = self._callbacks(stream_callback)

        async def tell(event: Event, content: str | None) -> None:
            answer = callbacks.notify(event, content)
            if inspect.isawaitable(answer):
                try:
                    answer = await answer
                except Exception:
                    log.exception("a callback failed")
                    answer = None
            if control := answer_to(event, answer):
                self._send(control, [turn])

        turn = self._new_turn()
        try:
            return self._account(await self._drive(turn, spec, callbacks.any, tell))
        finally:
            self._turns.discard(turn)

    def _new_turn(self) -> _Turn:
        self._interrupt_requested = self._disable_streaming = False
        turn = _Turn()
        self._turns.add(turn)
        return turn

    def chat(self, message: Content, stream_callback: Callback | None = None) -> str:
        """The answer's text; raises `AgentError` when the turn failed."""
        result = self.run_conversation(message, stream_callback=stream_callback)
        if result["failed"]:
            raise AgentError(result)
        return str(result["final_response"])

    async def _drive(
        self, turn: _Turn, spec: RunSpec, listen: bool, tell: Callable[[Event, str | None], Awaitable[None]]
    ) -> Result:
        """Start the run on this loop, follow its log, and return its result."""
        from hermes.app import current

        engine = (await current(self._home, self._engine())).engine
        if spec.history is None and not spec.persist:
            spec = spec.replace(history=await asyncio.to_thread(self._remembered))
        live = await engine.start(spec)
        assert live.task is not None
        owner = engine.attach(spec.run_id)
        turn.run = (engine, spec.run_id, asyncio.get_running_loop())
        try:
            if turn.stopped:  # stopped before the run existed
                live.controls.stop.request("stop", "user")
                await engine.control(spec.run_id, Control("interrupt"))
            if listen:
                await self._follow(engine, live, tell)
            return await asyncio.shield(live.task)
        except asyncio.CancelledError:
            await engine.detach(spec.run_id, owner)
            raise
        finally:
            turn.run = None

    async def _follow(
        self, engine: RunEngine, live: LiveRun, tell: Callable[[Event, str | None], Awaitable[None]]
    ) -> None:
        run_id = live.spec.run_id
        async for event in engine.subscribe(run_id):
            content = None
            if event.type == "tool.finished" and self.tool_complete_callback is not None:
                row = await engine.row(run_id, event.data["row"])
                content = text_of(row.content) if row is not None else None
            await tell(event, content)

    def _spec(
        self, message: Content, system: str | None, history: list[JsonObject] | None, task_id: str | None
    ) -> RunSpec:
        texts = [text for text in (self._ephemeral_system_prompt, system) if text]
        enabled, disabled = self._toolsets
        sampling = {name: value for name, value in self._overrides.items() if name in SAMPLING}
        extra = {name: value for name, value in self._overrides.items() if name not in SAMPLING}
        route = RouteChoice(
            model=self.model or None,
            provider=self.provider or None,
            base_url=self.base_url or None,
            api_mode=self._explicit_mode,
            api_key=self._api_key or None,
            extra_body=extra,
            fallbacks=self._fallbacks,
        )
        return RunSpec(
            user_message=message,
            session_id=self.session_id,
            kind=_KINDS.get(self.platform, "cli"),  # type: ignore[arg-type]
            source=self.platform if self.platform in _KINDS else "cli",  # type: ignore[arg-type]
            history=history if history is not None or self.session_db is not None else [],
            instructions="\n\n".join(texts) or None,
            route=None if route == RouteChoice() else route,
            sampling=sampling,
            toolsets=frozenset(enabled) - disabled if enabled is not None else None,
            disabled_toolsets=disabled,
            answerable=self.approval_callback is not None or self.clarify_callback is not None,
            on_detach="cancel",
            persist=self._engine() is not None,
            context_files=not self._skip[0],
            memory=not self._skip[1],
            parent_session_id=self.parent_session_id,
            metadata={"task_id": task_id} if task_id else {},
            **self._spec_fields,
        )

    def _engine(self) -> Engine | None:
        """The database's own engine. A mock of a database has none."""
        return getattr(self.session_db, "engine", None) if isinstance(self.session_db, Repository) else None

    def _remembered(self) -> list[JsonObject]:
        """The session's messages in a mock of a database."""
        read = getattr(self.session_db, "get_messages_as_conversation", None)
        messages = read(self.session_id) if callable(read) else None
        return messages if isinstance(messages, list) else []

    def _callbacks(self, stream_callback: Callback | None) -> Callbacks:
        return Callbacks(
            stream_delta=self.stream_delta_callback,
            stream=stream_callback or self._stream_callback,
            reasoning=self.reasoning_callback,
            tool_start=self.tool_start_callback,
            tool_complete=self.tool_complete_callback,
            tool_progress=self.tool_progress_callback,
            approval=self.approval_callback,
            clarify=self.clarify_callback,
            event=self.event_callback,
        )

    def _account(self, result: Result) -> Result:
        self.session_prompt_tokens += result["input_tokens"]
        self.session_completion_tokens += result["output_tokens"]
        self.session_total_tokens += result["total_tokens"]
        return result

    # --- control, from any thread -------------------------------------------------------------------------------

    def interrupt(self, message: str | None = None) -> None:
        """Stop the turn or single call in progress. `message` is for the surface to send next."""
        self._interrupt_requested = True
        self._stop(tuple(self._turns), message)
        self._cut_off()
        client = self._live_client
        if client is not None and callable(close := getattr(client, "close", None)):
            close()

    def clear_interrupt(self) -> None:
        self._interrupt_requested = False

    @property
    def is_interrupted(self) -> bool:
        return self._interrupt_requested

    def steer(self, text: str) -> bool:
        """A message for the turn in progress, without stopping it. False: there is none."""
        return self._send(Control("steer", {"text": text}))

    def _stop(self, turns: Sequence[_Turn], message: str | None = None) -> None:
        for turn in turns:
            turn.stopped = True
        self._send(Control("interrupt", {"message": message} if message else {}), turns)

    def _send(self, control: Control, turns: Sequence[_Turn] | None = None) -> bool:
        runs = [turn.run for turn in (tuple(self._turns) if turns is None else turns) if turn.run is not None]
        for engine, run_id, loop in runs:
            asyncio.run_coroutine_threadsafe(engine.control(run_id, control), loop)
        return bool(runs)

    def close(self) -> None:
        client, self._anthropic_client = self._anthropic_client, None
        if client is not None and callable(close := getattr(client, "close", None)):
            close()
