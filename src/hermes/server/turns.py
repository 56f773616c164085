"""A turn as a request asks for it: its spec, its admission, its running, and what becomes of it when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from hermes.bus.memory import Sink
from hermes.core.ids import scope_name
from hermes.core.spec import RouteChoice, RunSpec
from hermes.providers import routes
from hermes.providers.base import SAMPLING
from hermes.runs.engine import Admission, Refused, Result
from hermes.server import outcome
from hermes.server.errors import ApiError, invalid
from hermes.server.keys import Key
from hermes.server.middleware import caller_of
from hermes.server.models import ChatTool, Parameters
from hermes.server.outcome import Outcome
from hermes.server.request_bodies import Body
from hermes.server.request_options import RequestOptions
from hermes.server.sse import ClientGone, Item, Renderer, Writer, forward, inline_sink, run_events
from hermes.server.stored_result import result_at_end
from hermes.store.base import StoreError
from hermes.store.history_match import match
from hermes.store.rows import row_of_message

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

log = logging.getLogger(__name__)
Message = dict[str, Any]
GRACE_POLL_S = 0.05
UNANSWERED = '{"status": "unanswered", "note": "The client gave no result for this call."}'
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


# --- what is asked for -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tools:
    """A client's functions, and how they may be chosen.

    `reported` tells what the client knows a tool as, where that is no plain function; `hosted` are the types of tools
    that the server is to have.
    """

    schemas: tuple[Message, ...] = ()
    choice: str | Message | None = None
    allowed: frozenset[str] | None = None
    reported: dict[str, Message] = field(default_factory=dict)
    hosted: tuple[str, ...] = ()


def parameters(context: ServerContext, caller: Key, body: Body[Any]) -> dict[str, Any]:
    """The fields of a spec that a request's common parameters give."""
    given: Parameters = body.model
    if isinstance(given.provider, dict):
        body.ignored.append("provider")
    sampling = {name: value for name in SAMPLING if (value := getattr(given, name, None)) is not None}
    limits = {name: value for name in _LIMITS if (value := getattr(given, name)) is not None}
    if len(set(limits.values())) > 1:
        raise invalid(list(limits)[-1], f"{' and '.join(limits)} are the same limit and have different values.")
    effort = given.reasoning_effort or (given.reasoning.effort if given.reasoning else None)
    return {
        "sampling": sampling,
        "max_output_tokens": next(iter(limits.values()), None),
        "reasoning": {"enabled": effort != "none", "effort": effort} if effort else None,
        "metadata": dict(given.metadata or {}),
        "route": route_of(context, caller, given.model, given.provider if isinstance(given.provider, str) else None),
    }


def route_of(context: ServerContext, caller: Key, model: str | None, provider: str | None = None) -> RouteChoice | None:
    """The route that a request names; None where it names none: the session's, else the configured one."""
    aliases = context.options.model_routes
    is_default = not model or (model == context.model_name and model not in aliases)
    if provider:
        found = routes.of_provider(context.settings, provider, None if is_default else model)
        model = f"{provider}/{(found.model if found else model) or ''}"
        _check_allowed(caller, model)
        if found is None:
            message = f"There is no model {model!r} here: the provider is not configured, or no model is named for it."
            raise invalid("provider", f"{message} GET /v1/models lists what can be asked for.")
        return found
    if not model or is_default:
        return None
    _check_allowed(caller, model)
    found = RouteChoice(alias=model) if model in aliases else routes.named(context.settings, model)
    # A key that may use certain models only is never given another one in the place of one that is gone.
    if found is None and (context.options.strict_models or caller.models is not None):
        raise ApiError(404, f"There is no model {model!r} here; GET /v1/models lists them.", "model_not_found", "model")
    return found or RouteChoice()


async def check_model(context: ServerContext, caller: Key, spec: RunSpec) -> None:
    """A turn that names no model has its session's, or the default one: its key must be allowed to use that."""
    if spec.route is None and caller.models is not None:
        session = await context.session(spec.session_id) if spec.persist else None
        own = session["model"] if session and session["owner"] == spec.owner else None
        _check_allowed(caller, own or context.model_name)


def _check_allowed(caller: Key, name: str) -> None:
    """A ceiling holds names as they are asked for: `provider/model` is allowed only where it is listed as such."""
    if caller.models is not None and name not in caller.models:
        message = f"This key may not use the model {name!r}; it may use {', '.join(sorted(caller.models))}."
        raise ApiError(403, message, "model_not_allowed", "model")


def client_tools(tools: Sequence[ChatTool] | None, choice: str | Message | None) -> Tools:
    """The functions that a client brings, checked."""
    if not tools and choice is None:
        return Tools()
    schemas: list[Message] = []
    names: set[str] = set()
    for at, tool in enumerate(tools or ()):
        where = f"tools[{at}]"
        if tool.type != "function":
            message = f"Tools of the type {tool.type!r} are not taken; only functions of the client are."
            raise invalid(f"{where}.type", message, "unsupported_tool_type")
        function = tool.function
        where += ".function"
        if function is None:
            raise invalid(where, f"Missing required parameter: {where!r}.", "missing_required_parameter")
        if function.name in names:
            raise invalid(f"{where}.name", f"There are two tools named {function.name!r}.")
        names.add(function.name)
        schema: Message = {"name": function.name, "description": function.description or ""}
        schema["parameters"] = function.parameters or {"type": "object", "properties": {}}
        schemas.append({"type": "function", "function": schema})
    return Tools(tuple(schemas), *choice_of(choice, names))


def choice_of(given: str | Message | None, names: set[str]) -> tuple[str | Message | None, frozenset[str] | None]:
    """How a tool is to be chosen, in the form of chat completions, and which calls are allowed."""
    if given is None or isinstance(given, str):
        if given not in (None, "auto", "none", "required"):
            raise invalid("tool_choice", "tool_choice is auto, none, required, or names a function.")
        if given == "required" and not names:
            raise invalid("tool_choice", "tool_choice is required, and there are no tools.")
        return given, None
    if given.get("type") == "allowed_tools":
        inner = given.get("allowed_tools")
        told: Mapping[str, Any] = inner if isinstance(inner, Mapping) else given
        listed = told.get("tools")
        if not isinstance(listed, list) or told.get("mode", "auto") not in ("auto", "required"):
            raise invalid("tool_choice", "allowed_tools has a mode (auto or required) and a list of tools.")
        allowed = {_named(tool) for tool in listed}
        if not allowed <= names:
            raise invalid("tool_choice", "allowed_tools names a function that is not among the tools.")
        return told.get("mode", "auto"), frozenset(n for n in allowed if n)
    if given.get("type") == "function" and (name := _named(given)) in names:
        return {"type": "function", "function": {"name": name}}, None
    raise invalid("tool_choice", "tool_choice names something that is not among the tools.")


def _named(tool: Any) -> str | None:
    if not isinstance(tool, Mapping):
        return None
    inner = tool.get("function")
    name = (inner if isinstance(inner, Mapping) else tool).get("name")
    return name if isinstance(name, str) else None


# --- carrying it out -------------------------------------------------------------------------------------------------


class TurnRenderer(Renderer, Protocol):
    """The format of a whole turn."""

    def finish(self, ended: Outcome) -> bytes:
        """The end, and what the events have not told."""
        ...


class Recorder(Protocol):
    """Who keeps what a turn comes to."""

    async def begin(self, renderer: Any) -> None:
        """The turn has begun, and nothing was told yet."""

    async def end(self, renderer: Any) -> None:
        """The turn has ended, which is told next."""

    async def lose(self, renderer: Any) -> None:
        """The client has gone."""


class Run(Protocol):
    """A turn that is carried out. With `recorded` it has a log."""

    recorded: bool

    async def start(self) -> None:
        """Begin it."""

    @property
    def done(self) -> bool:
        """Whether there is nothing to stop."""
        ...

    def events(self, rows: frozenset[str], sink: Sink | None) -> AsyncGenerator[list[Item], None]:
        """All that it tells; events of the types in `rows` bring along the message that they announce."""
        ...

    async def result(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Its result, waited for, and its tokens."""
        ...

    async def stop(self) -> None:
        """Its client has gone: stop it and wait for its end, unless it is to end by itself."""

    def untold(self) -> list[Item]:
        """What it has reported, and nobody has taken."""
        ...


class ReplacedRun(Run, Protocol):
    """A turn that something else than the engine carries out, and may stream in its own way."""

    async def stream(
        self,
        turn: Turn,
        renderer: TurnRenderer,
        headers: Mapping[str, str],
        rows: frozenset[str],
        recorder: Recorder | None,
    ) -> web.StreamResponse: ...


class EngineRun:
    """A run of the engine: followed in its log, ended by its task."""

    recorded = True

    def __init__(self, spec: RunSpec, admission: Admission) -> None:
        self._spec, self._admission, self._engine = spec, admission, admission.engine
        self._task: asyncio.Task[Result] | None = None
        self._owner: object = None
        self._error: Exception | None = None

    async def start(self) -> None:
        """Begin the run, unless an earlier server has; what keeps it from beginning is its result."""
        if self._admission.begun:
            return
        try:
            if self._spec.on_detach == "continue":  # then it begins even if the client goes meanwhile
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
        """The run's log."""
        return run_events(self._engine, self._spec.run_id, rows, sink=sink) if self._error is None else _no_events()

    async def result(self) -> tuple[Result, Result]:
        """The result, which tells the tokens as well."""
        if self._error is not None:
            raise self._error
        if self._task is None:
            result = await result_at_end(self._engine, self._spec.run_id)
        else:
            result = await asyncio.shield(self._task)
        return result, result

    async def stop(self) -> None:
        """Leave the run, which ends it if its spec says so."""
        await self._engine.detach(self._spec.run_id, self._owner)

    def untold(self) -> list[Item]:
        """The log has it all."""
        return []


async def _no_events() -> AsyncGenerator[list[Item], None]:
    return
    yield


# --- the turn --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Turn:
    """One turn of a request, from its admission to its end."""

    context: ServerContext
    request: web.Request
    spec: RunSpec
    options: RequestOptions
    bind: bool = False
    history: list[Message] = field(default_factory=list)
    history_source: str = "request"
    wait_s: float | None = -1.0
    ignored_messages: int = 0
    admission: Admission | None = None
    run: Run | None = None
    ended: Outcome | None = None

    @property
    def session_id(self) -> str:
        """The session it belongs to."""
        return self.spec.session_id

    async def admit(self) -> None:
        """Gain a permit and the session, then read what was said in it before. Refusals leave no trace."""
        await self.acquire_session()
        await self.load_history()

    async def acquire_session(self, after_run: str | None = None) -> None:
        """Gain a permit and the session, with `after_run` waiting for no other run's end than that one's. One whose run
        an earlier server has begun has both, and only follows."""
        app = self.context.app
        if caller_of(self.request).visible_owner is None and not self.bind:
            # Who sees all sessions works in another owner's for that owner.
            session = await self.context.session(self.spec.session_id)
            if session is not None and session["owner"] != self.spec.owner:
                self.spec = self.spec.replace(owner=session["owner"])
        try:
            self.admission = self.options.resumed or await app.engine.admit(
                self.spec, wait_s=self.wait_s, bind=self.bind, charged=True, after_run=after_run
            )
        except Refused as error:
            raise outcome.refusal(error) from None
        self.spec = self.admission.spec
        self.admission.read_by_client = True
        if self.options.resumed is None:
            try:
                await check_model(self.context, caller_of(self.request), self.spec)
            except BaseException:
                await self.release()
                raise

    async def load_history(self) -> None:
        """The history that the turn goes on from, once the session is held; a client's calls in it are answered."""
        try:
            await self._load_history()
        except BaseException:
            await self.release()
            raise

    async def _load_history(self) -> None:
        spec = self.spec
        held = self.admission.lease.begun if self.admission is not None and spec.persist else None
        if spec.continues and held is not None:
            await self.context.database().hide_last_notes(spec.session_id, lease_token=held.token)
        if spec.history is not None and (spec.base_id is None or self.bind):
            self.history = [*spec.history]
        else:
            begun = self.admission.lease.begun if self.admission and spec.persist and self.context.stores_runs else None
            if begun is not None:
                session = begun.session
            else:
                session = await self.context.session(spec.session_id) if spec.persist else None
            if session is not None and not caller_of(self.request).may_see(session.get("owner", spec.owner)):
                raise ApiError(404, f"There is no session {spec.session_id!r}.", "session_not_found")
            stored = await self.context.stored_history(spec.session_id, self.options.resumed)
            if begun is not None and stored:
                begun.said = [*stored]
            seeded = not stored and bool(spec.history)
            self.history = list(spec.history or ()) if seeded else stored
            self.history_source = "request" if seeded else "stored"
            self.ignored_messages = 0 if seeded else self.ignored_messages
        if self.options.resumed is None:
            if self.history or spec.results:
                await self._answer_calls()
            last = self.history[-1] if self.history else {}
            if spec.continues and (last.get("role") != "assistant" or not isinstance(last.get("content"), str)):
                message = "The session does not end with an answer that can be gone on with; send a user message."
                raise ApiError(400, message, "missing_user_message", "messages")
        for result in self.spec.results:
            self.history.append({"role": "tool", **result})

    async def _answer_calls(self) -> None:
        """Every call that the history leaves open must be answered, and nothing else."""
        asked = open_calls(self.history)
        if self.spec.results and self.spec.user_message and not self.spec.verbatim:
            # Who sends all messages along may repeat what a session holds already.
            files = self.context.app.services.files
            known = await files.call_for(len(self.history), lambda: _answered_calls(self.history))
            known -= {*asked}  # an id may name several calls, one after the other
            fresh = tuple(result for result in self.spec.results if result["tool_call_id"] not in known)
            self.spec = self.spec.replace(results=fresh)
        given = {str(result["tool_call_id"]) for result in self.spec.results}
        if given - set(asked) and await self._answer_again():
            return
        if unknown := sorted(given - set(asked)):
            message = (
                f"No tool call found for the output of {unknown[0]!r}. Continue from the response that made the call, "
                "or send the call along."
            )
            raise ApiError(400, message, "tool_call_not_found", "tool_call_id")
        missing = [call_id for call_id in asked if call_id not in given]
        if missing and (given or self.spec.verbatim or await self.context.waits(missing, self.spec.owner)):
            message = f"The tool call {missing[0]!r} has no output; it must be answered before anything else is said."
            raise ApiError(400, message, "tool_output_missing", "tool_call_id")
        if missing:
            # Nobody waits for them any more; the model is told so.
            late = tuple({"tool_call_id": call_id, "content": UNANSWERED} for call_id in missing)
            self.spec = self.spec.replace(results=(*self.spec.results, *late))

    async def _answer_again(self) -> bool:
        """Go back to calls that were answered before, if those are what the outputs are for."""
        spec, begun = self.spec, self.admission.lease.begun if self.admission else None
        if spec.user_message or begun is None or self.history_source != "stored":
            return False
        if (found := answered_again(self.history, spec.results)) is None:
            return False
        self.history, results = found
        self.spec = spec.replace(results=results)
        call_ids = [result["tool_call_id"] for result in results]
        await self.context.database().rewind_to_calls(spec.session_id, call_ids, lease_token=begun.token)
        begun.said = [*self.history]
        return True

    # --- running ----------------------------------------------------------------------------------------------------

    async def start(self, *, streamed: bool) -> Run:
        """Begin the turn. Whatever keeps it from beginning is its result."""
        if self.run is None and self.context.replaced_run is not None:
            self.run = self.context.replaced_run(self, streamed=streamed)
        if self.run is None:
            assert self.admission is not None
            self.admission.start_may_wait = self.bind and not streamed and self.options.recording is None
            self.run = EngineRun(self.spec, self.admission)
        await self.run.start()
        return self.run

    async def finish(self) -> Outcome:
        """Run the turn and wait for its end; whoever leaves meanwhile has it stopped, or lets it go on."""
        try:
            await self.start(streamed=False)
            return await self.outcome()
        except asyncio.CancelledError:
            await self.leave()
            raise

    async def stream(
        self,
        renderer: TurnRenderer,
        headers: Mapping[str, str],
        rows: frozenset[str] = frozenset(),
        recorder: Recorder | None = None,
    ) -> web.StreamResponse:
        """Stream the turn through a renderer, to its end or to that of the client."""
        if self.run is None and self.context.replaced_run is not None:
            self.run = replaced = self.context.replaced_run(self, streamed=True)
            if replaced is not None:
                return await replaced.stream(self, renderer, headers, rows, recorder)
        stream = self.context.stream(self.request, headers)
        try:
            run = await self.start(streamed=True)
            if run.recorded:  # the head names the run, so it waits until that can be found after a crash
                stream.hold()
            if recorder is not None:
                await recorder.begin(renderer)
            async with stream:
                last = await self.render(renderer, stream, rows, recorder)
                await stream.write(last + renderer.closing, last=True)
        except (ClientGone, asyncio.CancelledError) as error:
            await (recorder.lose(renderer) if recorder is not None else self.leave())
            if isinstance(error, asyncio.CancelledError):
                raise
        return stream.response

    async def render(
        self,
        renderer: TurnRenderer,
        stream: Writer | None,
        rows: frozenset[str] = frozenset(),
        recorder: Recorder | None = None,
    ) -> bytes:
        """Carry all of a turn that has begun through a renderer; what is left to be told at the end.

        The recorder keeps the end before it is told.
        """
        assert self.run is not None
        for data in renderer.begin():
            if stream is not None:
                await stream.write(data)
        on_end = None if recorder is None else partial(recorder.end, renderer)
        sink = None if stream is None else inline_sink(renderer, stream)
        if await forward(self.run.events(rows, sink), renderer, stream, on_end):
            return b""
        data = renderer.finish(await self.streamed_outcome())
        if on_end is not None:
            await on_end()
        return data

    async def streamed_outcome(self) -> Outcome:
        """How the turn ended, for a stream: there even a refusal is told as an end."""
        if self.ended is None:
            try:
                self.ended = await self.outcome()
            except ApiError as error:
                self.ended = Outcome(code=error.code, error=error.message, failed=True)
        return self.ended

    async def outcome(self) -> Outcome:
        """How the turn ended, whatever way it did."""
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
        if ended.calls and not self.spec.persist:  # no session holds what the client's results belong to
            await self._suspend([call["id"] for call in ended.calls], ended.messages or [])
        return ended

    async def _suspend(self, call_ids: list[str], messages: list[Message]) -> None:
        """Keep what the client cannot send back: the server's own calls, if there are any."""
        if any(message.get("role") == "tool" and message.get("tool_name") for message in messages):
            spec = self.spec
            scope = scope_name(spec.owner, spec.session_key)
            try:
                await self.context.stored_responses.suspend(call_ids, scope, spec.run_id, messages)
            except StoreError as error:  # a client that sends all messages again needs none of it
                log.warning("%s: what its calls belong to is not kept: %s", spec.run_id, error)

    async def leave(self) -> None:
        """The client has gone: stop the turn and wait for its end, unless it goes on without its client."""
        await run_uncancellable(self._leave())

    async def _leave(self) -> None:
        run = self.run
        if run is None or run.done:
            return
        goes_on = self.spec.on_detach == "continue"
        followed = not goes_on and await self._is_joined()
        if not run.done:
            self.context.metrics.counts["disconnects"]["detach" if goes_on or followed else "interrupt",] += 1
        if not followed:
            await run.stop()

    async def _is_joined(self) -> bool:
        """Whether somebody else follows the run by now, given the time to."""
        grace_s = self.context.options.disconnect_grace_seconds
        if not grace_s or self.admission is None or not self.admission.begun:
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

    def response_headers(self, ended: Outcome, body: Body[Any], **named: str) -> dict[str, str]:
        """The headers of a plain answer; an end that leaves nothing to show is raised as the error it is."""
        body.ignored += ended.ignored
        headers = {**self.headers(ended), **body.headers()}
        if not ended.is_success:
            failure = ended.failure()
            failure.headers |= headers
            failure.hermes |= named
            raise failure
        if ended.code is not None:
            headers["x-should-retry"] = "false"
        return headers

    def headers(self, ended: Outcome | None = None) -> dict[str, str]:
        """What the answer says about the turn."""
        told = f"{self.history_source}; messages={len(self.history)}; ignored={self.ignored_messages}"
        headers = {"X-Hermes-Session-Id": self.spec.session_id, "X-Hermes-History": told}
        if (self.admission is not None and self.admission.begun) or ended is None:
            headers["X-Hermes-Run-Id"] = self.spec.run_id
        if key := self.request.headers.get("X-Hermes-Session-Key"):
            headers["X-Hermes-Session-Key"] = key
        if ended is not None:
            headers |= ended.headers()
            if ended.served_by:
                headers["X-Hermes-Model"] = ended.served_by
        return headers


async def run_uncancellable(work: Coroutine[Any, Any, None]) -> None:
    """Do this to its end, however often whoever waits for it is cancelled; then the cancellation goes on."""
    done, cancelled = asyncio.ensure_future(work), None
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError as error:
            cancelled = error
    done.result()
    if cancelled is not None:
        raise cancelled


async def with_unseen(context: ServerContext, spec: RunSpec, history: list[Message]) -> list[Message]:
    """The history with the server's own calls, where exactly one turn that waits for these results can be meant."""
    if not spec.results:
        return history
    call_id, scope = str(spec.results[0]["tool_call_id"]), scope_name(spec.owner, spec.session_key)
    kept = await context.stored_responses.suspended(call_id, scope)
    matches = [match(history, [row_of_message("", message) for message in one]) for one in kept]
    same = [found for found in matches if found is not None and not found.left]
    return same[0].with_unseen() if len(same) == 1 else history


def open_calls(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of the calls of the last message that have no results."""
    answered: set[Any] = set()
    for message in reversed(messages):
        if message.get("role") != "tool":
            calls = message.get("tool_calls") or () if message.get("role") == "assistant" else ()
            return [str(call["id"]) for call in calls if call.get("id") not in answered]
        answered.add(message.get("tool_call_id"))
    return []


def _answered_calls(messages: Sequence[Mapping[str, Any]]) -> set[Any]:
    return {message.get("tool_call_id") for message in messages if message.get("role") == "tool"}


def answered_again(
    messages: Sequence[Message], results: Sequence[Mapping[str, Any]]
) -> tuple[list[Message], tuple[Mapping[str, Any], ...]] | None:
    """The conversation as it was before the client's outputs of the last calls came, and all of these: as they are given
    now, else as they were then. None: the results are of other calls, or the user has spoken since."""
    given = {str(result["tool_call_id"]): result for result in results}
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].get("role") == "user":
            return None
        calls = messages[at].get("tool_calls") or ()
        if not given.keys() & {str(call["id"]) for call in calls}:
            continue
        outputs = list(takewhile(lambda message: message.get("role") == "tool", messages[at + 1 :]))
        own = [message for message in outputs if message.get("tool_name")]
        clients = {str(message["tool_call_id"]): message for message in outputs if not message.get("tool_name")}
        if not given.keys() <= clients.keys():
            return None
        again = [given.get(i) or {k: v for k, v in output.items() if k != "role"} for i, output in clients.items()]
        return [*messages[: at + 1], *own], tuple(again)
    return None
