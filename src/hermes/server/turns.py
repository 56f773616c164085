"""A turn as a request asks for it: its spec, its admission, its running, and what becomes of it when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from aiohttp import web

from hermes.core.events import Event
from hermes.core.ids import scope_name
from hermes.core.spec import RouteChoice, RunSpec
from hermes.providers import routes
from hermes.providers.base import SAMPLING
from hermes.runs.engine import Admission, Refused
from hermes.server import outcome
from hermes.server.errors import ApiError, invalid
from hermes.server.idempotency import RECORDING, resumed_admission
from hermes.server.keys import CALLER
from hermes.server.models import ChatTool, Parameters
from hermes.server.outcome import Outcome
from hermes.server.request_bodies import Body
from hermes.server.request_options import RequestOptions
from hermes.server.sse import EventStream, TurnQueue
from hermes.store.base import StoreError
from hermes.store.history_match import match
from hermes.store.rows import row_of_message

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter

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


def parameters(adapter: APIServerAdapter, body: Body[Any]) -> dict[str, Any]:
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
        "route": route_of(adapter, given.model, given.provider if isinstance(given.provider, str) else None),
    }


def route_of(adapter: APIServerAdapter, model: str | None, provider: str | None = None) -> RouteChoice | None:
    """The route that a request names; None where it names none: the session's, else the configured one."""
    aliases = adapter.option("model_routes")
    is_default = not model or (model == adapter.model_name and model not in aliases)
    if provider:
        found = routes.of_provider(adapter.settings, provider, None if is_default else model)
        model = f"{provider}/{(found.model if found else model) or ''}"
        _check_allowed(adapter, model)
        if found is None:
            message = f"There is no model {model!r} here: the provider is not configured, or no model is named for it."
            raise invalid("provider", f"{message} GET /v1/models lists what can be asked for.")
        return found
    if not model or is_default:
        return None
    _check_allowed(adapter, model)
    found = RouteChoice(alias=model) if model in aliases else routes.named(adapter.settings, model)
    # A key that may use certain models only is never given another one in the place of one that is gone.
    if found is None and (adapter.option("strict_models") or CALLER.get().models is not None):
        raise ApiError(404, f"There is no model {model!r} here; GET /v1/models lists them.", "model_not_found", "model")
    return found or RouteChoice()


async def check_model(adapter: APIServerAdapter, spec: RunSpec) -> None:
    """A turn that names no model has its session's, or the default one: its key must be allowed to use that."""
    if spec.route is None and CALLER.get().models is not None:
        session = await adapter.session(spec.session_id) if spec.persist else None
        own = session["model"] if session and session["owner"] == spec.owner else None
        _check_allowed(adapter, own or adapter.model_name)


def _check_allowed(adapter: APIServerAdapter, name: str) -> None:
    """A ceiling holds names as they are asked for: `provider/model` is allowed only where it is listed as such."""
    allowed = CALLER.get().models
    if allowed is not None and name not in allowed:
        message = f"This key may not use the model {name!r}; it may use {', '.join(sorted(allowed))}."
        raise ApiError(403, message, "model_not_allowed", "model")


def client_tools(tools: Sequence[ChatTool] | None, choice: str | Message | None) -> Tools:
    """The functions that a client brings, checked."""
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


# --- the turn --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Turn:
    """One turn of a request, from its admission to its end."""

    adapter: APIServerAdapter
    request: web.Request
    spec: RunSpec
    parse_options: RequestOptions
    bind: bool = False
    history: list[Message] = field(default_factory=list)
    history_source: str = "request"
    wait_s: float | None = -1.0
    ignored_messages: int = 0
    admission: Admission | None = None
    queue: TurnQueue = field(default_factory=TurnQueue)
    agent_ref: list[Any] = field(default_factory=lambda: [None])
    _begun: dict[str, str] = field(default_factory=dict)

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
        app = await self.adapter.app()
        if self.adapter.visible_owner(self.request) is None and not self.bind:
            # Who sees all sessions works in another owner's for that owner.
            session = await self.adapter.session(self.spec.session_id)
            if session is not None and session["owner"] != self.spec.owner:
                self.spec = self.spec.replace(owner=session["owner"])
        try:
            self.admission = resumed_admission() or await app.engine.admit(
                self.spec, wait_s=self.wait_s, bind=self.bind, charged=True, after_run=after_run
            )
        except Refused as error:
            raise outcome.refusal(error) from None
        self.spec = self.admission.spec
        self.admission.on_started = self.queue.wake
        if resumed_admission() is None:
            try:
                await check_model(self.adapter, self.spec)
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
            await self.adapter.database().hide_last_notes(spec.session_id, lease_token=held.token)
        if spec.history is not None and not self._seeds():
            self.history = [*spec.history]
        else:
            begun = self.admission.lease.begun if self.admission and spec.persist and self.adapter.stores_runs else None
            if begun is not None:
                session = begun.session
            else:
                session = await self.adapter.session(spec.session_id) if spec.persist else None
            if session is not None and not self.adapter.may_see(self.request, session.get("owner", spec.owner)):
                raise ApiError(404, f"There is no session {spec.session_id!r}.", "session_not_found")
            stored = await self.adapter.stored_history(spec.session_id, resumed_admission())
            if begun is not None and stored:
                begun.said = [*stored]
            seeded = not stored and bool(spec.history)
            self.history = list(spec.history or ()) if seeded else stored
            self.history_source = "request" if seeded else "stored"
            self.ignored_messages = 0 if seeded else self.ignored_messages
        if resumed_admission() is None:
            await self._answer_calls()
            self._check_continued()
        self.history += ({"role": "tool", **result} for result in self.spec.results)

    def _seeds(self) -> bool:
        return self.spec.base_id is not None and not self.bind

    async def _answer_calls(self) -> None:
        """Every call that the history leaves open must be answered, and nothing else."""
        asked = open_calls(self.history)
        if self.spec.results and self.spec.user_message and not self.spec.verbatim:
            # Who sends all messages along may repeat what a session holds already.
            files = (await self.adapter.app()).services.files
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
        if missing and (given or self.spec.verbatim or await self.adapter.waits(missing, self.spec.owner)):
            message = f"The tool call {missing[0]!r} has no output; it must be answered before anything else is said."
            raise ApiError(400, message, "tool_output_missing", "tool_call_id")
        if missing:
            # Nobody waits for them any more; the model is told so.
            late = tuple({"tool_call_id": call_id, "content": UNANSWERED} for call_id in missing)
            self.spec = self.spec.replace(results=(*self.spec.results, *late))

    def _check_continued(self) -> None:
        last = self.history[-1] if self.history else {}
        if self.spec.continues and (last.get("role") != "assistant" or not isinstance(last.get("content"), str)):
            message = "The session does not end with an answer that can be gone on with; send a user message."
            raise ApiError(400, message, "missing_user_message", "messages")

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
        await self.adapter.database().rewind_to_calls(spec.session_id, call_ids, lease_token=begun.token)
        begun.said = [*self.history]
        return True

    # --- running ----------------------------------------------------------------------------------------------------

    def arguments(self, *, streamed: bool, thoughts: bool = False) -> dict[str, Any]:
        """What `_run_agent` is called with."""
        queue, callbacks = self.queue, {}
        if self.admission is not None:
            self.admission.start_may_wait = self.bind and not streamed and RECORDING.get() is None
        if streamed:
            callbacks = {
                "stream_delta_callback": lambda text: queue.put(text) if text is not None else None,
                "tool_start_callback": self._tool_started,
                "tool_complete_callback": self._tool_finished,
            }
            if thoughts:
                callbacks["tool_progress_callback"] = self._progressed
        return {
            "user_message": self.spec.user_message,
            "conversation_history": self.history,
            "ephemeral_system_prompt": self.spec.instructions,
            "session_id": self.spec.session_id,
            "gateway_session_key": self.spec.session_key,
            "agent_ref": self.agent_ref,
            "admission": self.admission,
            "spec": self.spec,
            **callbacks,
        }

    def _tool_started(self, call_id: str, name: str, args: Any) -> None:
        """A call as a stand-in reports it, in the form in which the log does. Tools of our own are not shown."""
        if not name.startswith("_"):
            self._begun[call_id] = name
            data = {"call_id": call_id, "name": name, "args": args, "preview": preview(args)}
            self.queue.put(Event("", "tool.started", 0, data))

    def _tool_finished(self, call_id: str, name: str, args: Any, result: Any) -> None:
        if self._begun.pop(call_id, None) is not None:
            data = {"call_id": call_id, "name": name, "status": "ok", "duration_ms": 0, "content": str(result)}
            self.queue.put(Event("", "tool.finished", 0, data))

    def _progressed(self, event: str, tool_name: str = "", preview: str | None = None, *_: Any, **__: Any) -> None:
        if event == "reasoning.available":
            data = {"message_id": "", "reasoning": preview or ""}
            self.queue.put(Event("", "reasoning.completed", 0, data))

    async def run(self) -> Outcome:
        """Run the turn and wait for its end; whoever leaves meanwhile has it stopped, or lets it go on."""
        task = asyncio.ensure_future(self.adapter._run_agent(**self.arguments(streamed=False)))
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            await self.leave(task)
            raise
        return await self.ended(task)

    def hold(self, stream: EventStream) -> None:
        """Let the head of a stream, which names the run, wait until the run can be found after a crash."""
        if self.admission is not None and self.adapter.uses_run_engine:
            stream.hold()

    async def ended(self, task: asyncio.Future[Any]) -> Outcome:
        """How the turn ended, whatever way it did."""
        try:
            result, usage = await task
        except Refused as error:
            raise outcome.refusal(error) from None
        except Exception as error:  # noqa: BLE001  (whatever the agent raised is the turn's outcome)
            if not isinstance(error, StoreError):
                log.warning("%s: the agent failed: %s", self.spec.run_id, self.adapter.redact(repr(error)))
            return outcome.raised(error, self.adapter.redact)
        limited = self.spec.max_output_tokens is not None
        found = outcome.outcome_of(result, usage, self.adapter.redact, own_limit=limited)
        if found.calls and not self.spec.persist:  # no session holds what the client's results belong to
            await self._suspend([call["id"] for call in found.calls], found.messages or [])
        return found

    async def _suspend(self, call_ids: list[str], messages: list[Message]) -> None:
        """Keep what the client cannot send back: the server's own calls, if there are any."""
        if any(message.get("role") == "tool" and message.get("tool_name") for message in messages):
            spec = self.spec
            scope = scope_name(spec.owner, spec.session_key)
            try:
                await self.adapter.stored_responses.suspend(call_ids, scope, spec.run_id, messages)
            except StoreError as error:  # a client that sends all messages again needs none of it
                log.warning("%s: what its calls belong to is not kept: %s", spec.run_id, error)

    async def leave(self, task: asyncio.Future[Any]) -> None:
        """The client has gone: stop the turn and wait for its end, unless it goes on without its client."""
        await run_uncancellable(self._leave(task))

    async def _leave(self, task: asyncio.Future[Any]) -> None:
        if self.spec.on_detach == "continue":
            # It is to end by itself, which it can once it is the engine's own.
            while not task.done() and not (self.admission is not None and self.admission.begun):
                await asyncio.wait([task], timeout=GRACE_POLL_S)
        followed = self.spec.on_detach != "continue" and await self._is_joined()
        if not task.done():
            goes_on = followed or self.spec.on_detach == "continue"
            self.adapter.metrics.counts["disconnects"]["detach" if goes_on else "interrupt",] += 1
        await leave(task, self.agent_ref, followed)

    async def _is_joined(self) -> bool:
        """Whether somebody else follows the run by now, given the time to."""
        grace_s = self.adapter.option("disconnect_grace_seconds")
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


async def ended_of(adapter: APIServerAdapter, task: asyncio.Future[Any], turn: Turn | None) -> Outcome:
    """How a turn ended, for a stream: there even a refusal is told as an end."""
    try:
        if turn is not None:
            return await turn.ended(task)
        result, usage = await task
    except ApiError as error:
        return Outcome(code=error.code, error=error.message, failed=True)
    except Exception as error:  # noqa: BLE001  (whatever the agent raised is the turn's outcome)
        return outcome.raised(error, adapter.redact)
    return outcome.outcome_of(result, usage, adapter.redact)


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


async def leave(task: asyncio.Future[Any], agent_ref: list[Any] | None, is_resumed: bool = False) -> None:
    """Stop a turn whose client has gone. A real run hears of it by its task, a stand-in by its agent."""
    if task.done() or is_resumed:
        return
    if agent_ref and agent_ref[0] is not None:
        agent_ref[0].interrupt("SSE client disconnected")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


async def with_unseen(adapter: APIServerAdapter, spec: RunSpec, history: list[Message]) -> list[Message]:
    """The history with the server's own calls, where exactly one turn that waits for these results can be meant."""
    if not spec.results:
        return history
    call_id, scope = str(spec.results[0]["tool_call_id"]), scope_name(spec.owner, spec.session_key)
    kept = await adapter.stored_responses.suspended(call_id, scope)
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


def preview(args: Any) -> str:
    """A line that says what a call is about: its first argument that is text."""
    values = args.values() if isinstance(args, Mapping) else ()
    return next((value.splitlines()[0][:200] for value in values if isinstance(value, str) and value.strip()), "")
