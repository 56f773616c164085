"""A turn of a request: admission, running, streaming, and what happens when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from hermes.bus.memory import Sink
from hermes.core.ids import scope_name
from hermes.core.json_types import JsonMapping, Message
from hermes.core.spec import RunSpec
from hermes.runs.engine import Admission, Refused, Result
from hermes.server import outcome
from hermes.server.errors import ApiError
from hermes.server.keys import caller_of
from hermes.server.outcome import Outcome
from hermes.server.request_bodies import Body
from hermes.server.request_options import RequestOptions
from hermes.server.sse import ClientGone, Item, Renderer, Writer, forward, inline_sink, run_events
from hermes.server.start_gate import START
from hermes.server.stored_result import result_at_end
from hermes.server.turn_spec import answered_again, answered_calls, check_model, missing_output, open_calls
from hermes.store.base import StoreError

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

log = logging.getLogger(__name__)
GRACE_POLL_S = 0.05
SESSION_ID = "X-Hermes-Session-Id"
UNANSWERED = '{"status": "unanswered", "note": "The client gave no result for this call."}'


# --- carrying it out -------------------------------------------------------------------------------------------------


class TurnRenderer(Renderer, Protocol):
    """The format of a whole turn."""

    def finish(self, ended: Outcome) -> bytes:
        """The end, and what the events did not include."""
        ...


class Recorder(Protocol):
    """Stores what a turn produces."""

    async def begin(self, renderer: Any) -> None:
        """Called before anything is sent."""

    async def end(self, renderer: Any) -> None:
        """Called before the end is sent."""

    async def lose(self, renderer: Any) -> None: ...


class Run(Protocol):
    """A running turn. With `recorded` it has a log."""

    recorded: bool

    async def start(self) -> None: ...

    @property
    def done(self) -> bool:
        """Whether there is nothing to stop."""
        ...

    def events(self, rows: frozenset[str], sink: Sink | None) -> AsyncGenerator[list[Item], None]:
        """All events; those of the types in `rows` bring the message that they announce."""
        ...

    async def result(self) -> tuple[JsonMapping, JsonMapping]:
        """Waits for the result; with its token counts."""
        ...

    async def stop(self) -> None:
        """After a disconnect: stop it and wait for its end, unless it is to go on."""

    def unread(self) -> list[Item]:
        """Events that were reported and not read."""
        ...


class ReplacedRun(Run, Protocol):
    """A turn that is not run by the engine, and may have its own way of streaming."""

    async def stream(
        self,
        turn: Turn,
        renderer: TurnRenderer,
        headers: Mapping[str, str],
        rows: frozenset[str],
        recorder: Recorder | None,
    ) -> web.StreamResponse: ...


class EngineRun:
    """A run of the engine: events from its log, its end from its task."""

    recorded = True

    def __init__(self, spec: RunSpec, admission: Admission) -> None:
        self._spec, self._admission, self._engine = spec, admission, admission.engine
        self._task: asyncio.Task[Result] | None = None
        self._owner: object = None
        self._error: Exception | None = None

    async def start(self) -> None:
        """Start the run, unless an earlier server has; a failure to start is its result."""
        if self._admission.started:
            return
        try:
            if self._spec.on_detach == "continue":  # then it starts even if the client disconnects meanwhile
                await run_uncancellable(self._begin())
            else:
                await self._begin()
        except Exception as error:  # noqa: BLE001  (it is raised to whoever asks for the result)
            self._error = error

    async def _begin(self) -> None:
        live = await self._engine.start(self._spec, self._admission)
        self._task, self._owner = live.task, self._engine.attach(self._spec.run_id)

    @property
    def done(self) -> bool:
        """Whether it has ended, or is another server's."""
        return self._task is None or self._task.done()

    def events(self, rows: frozenset[str], sink: Sink | None) -> AsyncGenerator[list[Item], None]:
        return run_events(self._engine, self._spec.run_id, rows, sink=sink) if self._error is None else _no_events()

    async def result(self) -> tuple[Result, Result]:
        if self._error is not None:
            raise self._error
        if self._task is None:
            result = await result_at_end(self._engine, self._spec.run_id)
        else:
            result = await asyncio.shield(self._task)
        return result, result

    async def stop(self) -> None:
        """Detach from the run, which ends it if its spec says so."""
        await self._engine.detach(self._spec.run_id, self._owner)

    def unread(self) -> list[Item]:
        return []


async def _no_events() -> AsyncGenerator[list[Item], None]:
    return
    yield


# --- the turn --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Turn:
    """One turn of a request, from admission to end."""

    context: ServerContext
    request: web.Request
    spec: RunSpec
    options: RequestOptions
    bind: bool = False
    # The session is created when the turn is on record, and named to nobody before.
    defer_session: bool = False
    history: list[Message] = field(default_factory=list)
    history_source: str = "request"
    wait_s: float | None = -1.0
    ignored_messages: int = 0
    admission: Admission | None = None
    run: Run | None = None
    ended: Outcome | None = None

    @property
    def session_id(self) -> str:
        return (self.admission or self).spec.session_id

    async def admit(self) -> None:
        """Acquire a permit and the session, then load its history. The caller must call `release`."""
        await self.acquire_session()
        await self.load_history()

    async def acquire_session(self, after_run: str | None = None) -> None:
        """Acquire a permit and the session; with `after_run` wait for that run only. A run that an earlier server
        started has both, and is only followed."""
        caller = caller_of(self.request)
        if caller.sees_all and not self.bind:
            # An admin works in another owner's session on that owner's behalf.
            session = await self.context.session(self.spec.session_id)
            if session is not None and session["owner"] != self.spec.owner:
                self.spec = self.spec.replace(owner=session["owner"])
        resumed = self.options.resumed
        try:
            self.admission = admission = resumed or await self.context.app.engine.admit(
                self.spec,
                wait_s=self.wait_s,
                bind=self.bind,
                defer=self.defer_session,
                charged=True,
                after_run=after_run,
            )
        except Refused as error:
            raise outcome.refusal(error) from None
        self.spec = admission.spec
        admission.read_by_client = True
        if (start := self.request.get(START)) is not None:
            admission.on_model_asked = start.leave
        if resumed is None and caller.models is not None:
            await check_model(self.context, caller, self.spec)

    async def load_history(self) -> None:
        """Load the history once the session is held, and answer the client's open calls in it."""
        spec = self.spec
        held = self.admission.lease.opened if self.admission is not None and spec.persist else None
        if spec.continues and held is not None:
            await self.context.database().hide_last_notes(spec.session_id, lease_token=held.token)
        if spec.history is not None and (spec.base_id is None or self.bind):
            self.history = [*spec.history]
        else:
            opened = held if self.context.stores_runs else None
            if opened is not None:
                session = opened.session
            else:
                session = await self.context.session(spec.session_id) if spec.persist else None
            if session is not None and not caller_of(self.request).may_see(session.get("owner", spec.owner)):
                raise ApiError(404, f"There is no session {spec.session_id!r}.", "session_not_found")
            stored = await self.context.stored_history(spec.session_id, self.options.resumed)
            if opened is not None and stored:
                opened.history = [*stored]
            seeded = not stored and bool(spec.history)
            self.history = list(spec.history or ()) if seeded else stored
            self.history_source = "request" if seeded else "stored"
            self.ignored_messages = 0 if seeded else self.ignored_messages
        if self.options.resumed is None:
            if self.history or spec.results:
                await self._answer_calls()
            last = self.history[-1] if self.history else {}
            if spec.continues and (last.get("role") != "assistant" or not isinstance(last.get("content"), str)):
                message = "The session does not end with an answer that can be continued; send a user message."
                raise ApiError(400, message, "missing_user_message", "messages")
        for result in self.spec.results:
            self.history.append({"role": "tool", **result})

    async def _answer_calls(self) -> None:
        """Every call that the history leaves open must be answered, and nothing else."""
        calls = open_calls(self.history)
        if self.spec.results and self.spec.user_message and not self.spec.verbatim:
            # A client that sends all messages may repeat stored ones.
            files = self.context.app.services.files
            known = await files.call_for(len(self.history), lambda: answered_calls(self.history))
            known -= {*calls}  # an id may name several calls, one after the other
            fresh = tuple(result for result in self.spec.results if result["tool_call_id"] not in known)
            self.spec = self.spec.replace(results=fresh)
        given = {str(result["tool_call_id"]) for result in self.spec.results}
        if given - set(calls) and await self._answer_again():
            return
        if unknown := sorted(given - set(calls)):
            message = (
                f"No tool call found for the output of {unknown[0]!r}. Continue from the response that made the call, "
                "or send the call along."
            )
            raise ApiError(400, message, "tool_call_not_found", "tool_call_id")
        missing = [call_id for call_id in calls if call_id not in given]
        if missing and (given or self.spec.verbatim or await self.context.waits(missing, self.spec.owner)):
            raise missing_output(missing[0])
        if missing:
            # Nobody waits for them any more; the model learns that from a result.
            late = tuple({"tool_call_id": call_id, "content": UNANSWERED} for call_id in missing)
            self.spec = self.spec.replace(results=(*self.spec.results, *late))

    async def _answer_again(self) -> bool:
        """Go back to calls that were answered before, if the outputs are for those."""
        spec, opened = self.spec, self.admission.lease.opened if self.admission else None
        if spec.user_message or opened is None or self.history_source != "stored":
            return False
        if (match := answered_again(self.history, spec.results)) is None:
            return False
        self.history, results = match
        self.spec = spec.replace(results=results)
        call_ids = [result["tool_call_id"] for result in results]
        await self.context.database().rewind_to_calls(spec.session_id, call_ids, lease_token=opened.token)
        opened.history = [*self.history]
        return True

    # --- running ----------------------------------------------------------------------------------------------------

    async def start(self, *, streamed: bool) -> Run:
        """A failure to start is the turn's result."""
        if self.run is None and self.context.replaced_run is not None:
            self.run = self.context.replaced_run(self, streamed=streamed)
        if self.run is None:
            assert self.admission is not None
            self.admission.start_may_lag = self.bind and self.options.recording is None
            self.admission.start_may_wait = self.admission.start_may_lag and not streamed
            self.run = EngineRun(self.spec, self.admission)
        await self.run.start()
        return self.run

    async def finish(self) -> Outcome:
        """Run the turn to its end; on cancellation it is stopped, or goes on detached."""
        try:
            await self.start(streamed=False)
            return await self.outcome()
        except asyncio.CancelledError:
            await self.leave()
            raise

    async def complete(self) -> Outcome:
        """Admit the turn, run it to its end, and release it."""
        try:
            await self.admit()
            return await self.finish()
        finally:
            await self.release()

    async def stream(
        self,
        renderer: TurnRenderer,
        headers: Mapping[str, str],
        rows: frozenset[str] = frozenset(),
        recorder: Recorder | None = None,
    ) -> web.StreamResponse:
        """Stream the turn to its end or a disconnect."""
        if self.run is None and self.context.replaced_run is not None:
            self.run = replaced = self.context.replaced_run(self, streamed=True)
            if replaced is not None:
                return await replaced.stream(self, renderer, headers, rows, recorder)
        stream = self.context.stream(self.request, headers)
        if self.defer_session and self.admission is not None:
            # The head is sent when the turn is on record.
            self.admission.on_session_made = partial(stream.response.headers.__setitem__, SESSION_ID)
        with contextlib.suppress(ClientGone):
            await self.render(renderer, stream, rows, recorder)
        return stream.response

    async def render(
        self,
        renderer: TurnRenderer,
        stream: Writer | None,
        rows: frozenset[str] = frozenset(),
        recorder: Recorder | None = None,
    ) -> None:
        """Start the turn and send its events through a renderer, to its end or a disconnect.

        The recorder stores the end before it is sent.
        """
        try:
            run = await self.start(streamed=stream is not None)
            if stream is not None and run.recorded:  # the head names the run, so it waits until that is on record
                stream.hold()
            if recorder is not None:
                await recorder.begin(renderer)
            on_end = None if recorder is None else partial(recorder.end, renderer)
            async with contextlib.nullcontext() if stream is None else stream:
                source = run.events(rows, None if stream is None else inline_sink(renderer, stream))
                last = b""
                if not await forward(source, renderer, stream, on_end):
                    last = renderer.finish(await self.streamed_outcome())
                    if on_end is not None:
                        await on_end()
                if stream is not None:
                    await stream.write(last + renderer.closing, last=True)
        except (ClientGone, asyncio.CancelledError):
            await (recorder.lose(renderer) if recorder is not None else self.leave())
            raise
        except StoreError:
            if recorder is not None:
                await recorder.lose(renderer)
            raise

    async def streamed_outcome(self) -> Outcome:
        """The outcome for a stream, where even a refusal is an end."""
        if self.ended is None:
            try:
                self.ended = await self.outcome()
            except ApiError as error:
                self.ended = Outcome(code=error.code, error=error.message, failed=True)
        return self.ended

    async def outcome(self) -> Outcome:
        assert self.run is not None
        try:
            result, usage = await self.run.result()
        except Refused as error:
            raise outcome.refusal(error) from None
        except Exception as error:  # noqa: BLE001  (whatever the agent raised is the turn's outcome)
            if not isinstance(error, StoreError):
                log.warning("%s: the agent failed: %s", self.spec.run_id, self.context.redact(repr(error)))
            return outcome.raised(error, self.context.redact)
        limited = self.spec.max_output_tokens is not None
        ended = outcome.outcome_of(result, usage, self.context.redact, own_limit=limited)
        if ended.calls and not self.spec.persist:  # no session stores the calls
            await self._suspend([call["id"] for call in ended.calls], ended.messages or [])
        return ended

    async def _suspend(self, call_ids: list[str], messages: list[Message]) -> None:
        """Store what the client cannot send back: the server's own calls, if there are any."""
        if any(message.get("role") == "tool" and message.get("tool_name") for message in messages):
            spec = self.spec
            scope = scope_name(spec.owner, spec.session_key)
            try:
                await self.context.stored_responses.suspend(call_ids, scope, spec.run_id, messages)
            except StoreError as error:  # a client that sends all messages does not need it
                log.warning("%s: the suspended turn could not be stored: %s", spec.run_id, error)

    async def leave(self) -> None:
        """After a disconnect: stop the turn and wait for its end, unless it goes on without its client."""
        await run_uncancellable(self._leave())

    async def _leave(self) -> None:
        run = self.run
        if run is None or run.done:
            return
        goes_on = self.spec.on_detach == "continue"
        followed = not goes_on and await self._is_joined()
        if not run.done:
            self.context.metrics.count("disconnects", "detach" if goes_on or followed else "interrupt")
        if not followed:
            await run.stop()

    async def _is_joined(self) -> bool:
        """Whether somebody else follows the run by now; waits a moment for that."""
        grace_s = self.context.options.disconnect_grace_seconds
        if not grace_s or self.admission is None or not self.admission.started:
            return False
        until = asyncio.get_running_loop().time() + grace_s
        while asyncio.get_running_loop().time() < until:
            if self.admission.engine.has_subscribers(self.spec.run_id):
                return True
            await asyncio.sleep(GRACE_POLL_S)
        return False

    async def release(self) -> None:
        """Give back what no run has taken over."""
        if self.admission is not None:
            with contextlib.suppress(StoreError):
                await self.admission.finish_request()

    def response_headers(
        self, ended: Outcome, body: Body[Any], *, shows_failures: bool = True, named: JsonMapping | None = None
    ) -> dict[str, str]:
        """The headers of a plain answer. Raises the error of an end with nothing to show, and a failure after some text
        in a format without a place for it (`shows_failures`)."""
        body.ignored += (body.names.get(name, name) for name in ended.ignored)
        headers = {**self.headers(ended), **body.headers()}
        if not ended.is_success or (ended.is_failure and not shows_failures):
            failure = ended.failure()
            failure.headers |= headers
            failure.hermes |= named or {}
            raise failure
        if ended.code is not None:
            headers["x-should-retry"] = "false"
        return headers

    def headers(self, ended: Outcome | None = None) -> dict[str, str]:
        history = f"{self.history_source}; messages={len(self.history)}; ignored={self.ignored_messages}"
        headers = {SESSION_ID: self.session_id, "X-Hermes-History": history}
        if (self.admission is not None and self.admission.started) or ended is None:
            headers["X-Hermes-Run-Id"] = self.spec.run_id
        if key := self.request.headers.get("X-Hermes-Session-Key"):
            headers["X-Hermes-Session-Key"] = key
        if ended is not None:
            headers |= ended.headers()
            if ended.served_by:
                headers["X-Hermes-Model"] = ended.served_by
        return headers


async def run_uncancellable(work: Coroutine[Any, Any, None]) -> None:
    """Finish the work despite cancellation; then raise it."""
    done, cancelled = asyncio.ensure_future(work), None
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError as error:
            cancelled = error
    done.result()
    if cancelled is not None:
        raise cancelled
