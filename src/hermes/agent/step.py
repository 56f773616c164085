"""The model call of one step, from the first request to an answer or a failure: attempts, and recovery by `decide`."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from hermes.agent import prompt
from hermes.agent.assembler import Assembler, Delta, ReasoningDelta, TextDelta, ToolDrafted
from hermes.agent.call import Attempt, Caller, carry
from hermes.agent.decisions import ENDS, Action, CallState, Decision, decide
from hermes.agent.media import MediaTagFilter
from hermes.agent.media_tags import strip_rendered_media
from hermes.agent.turn import Turn
from hermes.core.events import Event
from hermes.core.failures import KINDS, Failure, FailureFacts, Kind, classify, explain, rejected_option
from hermes.core.json_types import JsonObject, Message
from hermes.core.limits import MESSAGES_AT_ONCE_MAX, PRIMARY_REST_S, REASONING_EXCERPT_CHARS_MAX
from hermes.core.stream_parts import Assembled
from hermes.providers.base import Credential, Prompt
from hermes.providers.registry import address_of, available, is_private, prefill_of, window_of
from hermes.runs.commits import Commit
from hermes.runs.control import Stopped
from hermes.store.base import Row
from hermes.tools import images
from hermes.tools.framework import arguments

KEY_REST_S = {"rate_limit": 300.0, "auth": 300.0, "billing": 3600.0}
_NUDGES = {"truncated_tool": prompt.SMALLER_PIECES, "missing_call": prompt.CALL_MISSING}
Compact = Callable[[str], Awaitable[bool]]


class StepResult(msgspec.Struct):
    """The outcome of a step's model call. `text` is what was delivered; with a `failure` it may be partial or empty."""

    message: Assembled
    text: str
    failure: Failure | None = None
    message_id: str = ""
    row: Row | None = None


def stalled_warning(names: tuple[str, ...]) -> str:
    return f"Stream stalled mid tool-call ({', '.join(names)}); the call was not executed."


class ModelStep:
    """Calls the model once, in as many attempts as needed and allowed."""

    def __init__(self, turn: Turn, message_id: str, compact: Compact, *, tools: bool = True, attempts: int = 0) -> None:
        self._turn, self._id, self._compact, self._tools = turn, message_id, compact, tools
        self._log = turn.live.log
        self._stop = turn.live.controls.stop
        self._out = MediaTagFilter(partial(self._log.text, message_id), turn.media.exported) if turn.media else None
        self._caller = Caller(
            self._stop,
            self._deliver,
            self._notify_waiting,
            joins=self._log.joins,
            at_once=self._is_text,
            chars_max=turn.settings.agent.max_answer_chars,
        )
        self._tried: Counter[Action] = Counter()
        self._attempts = attempts
        self._offered = self._separate_reasoning = False
        self._credential: Credential | None = None
        self._nudge = ""
        self._dropped_tools: tuple[str, ...] = ()
        self._notices: set[asyncio.Task[Event]] = set()

    async def run(self) -> StepResult:
        try:
            while True:
                attempt = await self._attempt()
                message = self._message(attempt.assembler)
                facts = attempt.facts or self._fault_of(message, attempt.assembler)
                if facts is None:
                    return StepResult(message, await self._final_text())
                facts = replace(facts, delivered=len(self._text))
                kind = classify(facts)
                decision = decide(kind, self._state(facts, kind))
                if decision.action == "excerpt":
                    await self._deliver_excerpt()
                if decision.action == "accept" or (decision.action == "excerpt" and kind == "empty"):
                    return StepResult(message, await self._final_text())
                await self._count_usage(message)
                self._tried[decision.action] += 1
                if decision.action in ENDS:
                    return await self._end(attempt, facts, kind, decision)
                if not await self._recover(facts, kind, decision):
                    return await self._end(attempt, FailureFacts("stream", interrupted=True), "interrupted", decision)
        finally:
            for task in self._notices:
                task.cancel()
            del self._caller  # break the reference cycle, so that the step is freed at once

    @property
    def _text(self) -> str:
        """The message so far, as the model wrote it."""
        text = self._log.text_of(self._id)
        if self._out is None or not text:
            return text if self._out is None else self._out.held
        return (strip_rendered_media(text) or text) + self._out.held

    @property
    def _reasoning(self) -> str:
        return self._log.text_of(f"{self._id}:reasoning")

    async def _final_text(self) -> str:
        """The message as it is in the log, nothing held back."""
        if self._out is not None:
            await self._out.feed("", last=True)
        return self._log.text_of(self._id)

    # --- one attempt --------------------------------------------------------------------------------------------

    async def _attempt(self) -> Attempt:
        turn, before = self._turn, self._turn.prefix + self._text
        self._attempts += 1
        request = self._prompt(before)
        self._offered = bool(request.tools)
        self._separate_reasoning = bool(self._reasoning)
        started = self._log.event(
            "model.started",
            attempt=self._attempts,
            message_id=self._id,
            model=turn.route.model,
            provider=turn.route.provider,
            streaming=turn.stream,
            prompt_tokens=turn.prompt_tokens(),
            tools_count=len(request.tools),
        )
        # The model may be asked while this is stored; nothing of its answer is read before it is.
        stored = self._log.begin(Commit((started,), hold=self._log.holds_start))
        if stored is not None and not self._log.start_lags:
            await stored
        identity = f"{turn.live.spec.run_id}:{self._log.step}"
        repeated = self._repeated_prefix(before) if request.prefill else ""
        # What looks like a call may be part of an answer in JSON.
        accept = None if turn.wants_json else self._accept_leaked
        assembler = Assembler(identity, before, repeated, accept)
        credential = self._credential = turn.credential()
        if not available(turn.route.api_mode):
            return Attempt(assembler, FailureFacts("connect", code="local_unavailable"))
        if credential is None and not is_private(turn.route.base_url):
            message = f"No API key is configured for {turn.route.provider} at {address_of(turn.route.base_url)}."
            return Attempt(assembler, FailureFacts("connect", code="no_api_key", message=message))
        provider = turn.provider
        if len(request.messages) <= MESSAGES_AT_ONCE_MAX:
            wire = provider.request(turn.route, credential, request)
        else:
            wire = await turn.services.files.call(partial(provider.request, turn.route, credential, request))
        del request  # an answer may take long
        if wire.left_out:
            await self._notify_left_out(wire.left_out)
        transport = turn.services.transport_for(turn.route, self._notify)
        if turn.live.on_model_asked is not None:
            turn.live.on_model_asked()
        attempt = await self._caller.ask(
            transport, provider, wire, turn.timeouts(), assembler, streaming=turn.stream, before_reading=stored
        )
        if stored is not None:
            await stored
        return attempt

    def _prompt(self, before: str) -> Prompt:
        """The request; after delivered text it asks for the rest of the same message."""
        if not before and not self._nudge and not self._turn.nudges:
            return self._turn.prompt(tools=self._tools)
        tail: list[Message] = [{"role": "user", "content": text} for text in self._turn.nudges]
        prefill = ""
        if before:
            if prefill_of(self._turn.route) is not None and not self._nudge and not self._dropped_tools:
                prefill = before
            else:
                message = f"{prompt.go_on(self._dropped_tools)} {self._nudge}".strip()
                tail += [{"role": "assistant", "content": before}, {"role": "user", "content": message}]
        elif self._nudge:
            tail.append({"role": "user", "content": self._nudge})
        return self._turn.prompt(tools=self._tools, tail=tail, prefill=prefill)

    def _repeated_prefix(self, before: str) -> str:
        """How much of `before` the answer starts with: all if the provider echoes it, or its trailing white space if
        that is not sent."""
        prefill = prefill_of(self._turn.route)
        if prefill is not None and prefill.echoes:
            return before
        return before[len(before.rstrip()) :] if self._turn.provider.strips_prefill else ""

    def _is_text(self, text: str) -> bool:
        return self._out is None or not self._out.holds(text)

    def _deliver(self, delta: Delta) -> Awaitable[None] | None:
        if type(delta) is TextDelta:
            if self._out is not None and self._out.holds(delta.text):
                return self._out.feed(delta.text)
            self._log.text(self._id, delta.text)
        elif type(delta) is ReasoningDelta:
            if self._separate_reasoning:  # from a lost attempt
                self._separate_reasoning = False
                self._log.reasoning(self._id, "\n\n", delta.form)
            self._log.reasoning(self._id, delta.text, delta.form)
        elif type(delta) is ToolDrafted:
            self._log.drafted(self._id, delta.index, delta.name)
        return None

    async def _notify_left_out(self, options: Sequence[str]) -> None:
        """Name the options that cannot be sent, each once in a turn."""
        for option in options:
            if option not in self._turn.ignored_options:
                self._turn.ignored_options.add(option)
                message = f"The model's provider does not take `{option}`; it is left out."
                await self._log.emit("notice", level="info", code="option_left_out", message=message)

    def _notify_waiting(self, seconds: float) -> None:
        self._notify("model_waiting", f"The model has said nothing for {round(seconds)} s; still waiting.")

    def _notify(self, code: str, message: str) -> None:
        def done(task: asyncio.Task[Event]) -> None:
            self._notices.discard(task)
            if not task.cancelled():
                task.exception()  # a notice that cannot be stored is no failure

        task = asyncio.ensure_future(self._log.emit("notice", level="info", code=code, message=message))
        self._notices.add(task)
        task.add_done_callback(done)

    def _message(self, assembler: Assembler) -> Assembled:
        """The answer so far, its calls under the offered names. Without an offer there are no calls."""
        message = assembler.message()
        if not self._offered and message.tool_calls:
            reason = "stop" if message.finish_reason == "tool_calls" else message.finish_reason
            message.tool_calls, message.finish_reason = [], reason
        for call in message.tool_calls:
            # Done here, so that the log, the client and the next request all have the existing name.
            call.name = self._tool_name(call.name) or call.name
        return message

    def _accept_leaked(self, name: str, args: JsonObject | str) -> tuple[str, str] | None:
        """A call from the text, under the name of an offered tool and with arguments of its types."""
        tool_name = self._tool_name(name) if self._offered else None
        schema = next((schema for schema in self._turn.schemas if schema.name == tool_name), None)
        if schema is None:
            return None
        value = args if isinstance(args, dict) else arguments.parse(args).value
        if value is None:
            return schema.name, str(args)
        return schema.name, json.dumps(arguments.check(value, schema.parameters)[0], ensure_ascii=False)

    def _tool_name(self, name: str) -> str | None:
        return arguments.settle_name(name, (*self._turn.client_tools, *self._turn.tools))

    async def _count_usage(self, message: Assembled) -> None:
        """Failed attempts count too."""
        if message.usage is not None:
            usage = self._turn.usage_event(message.usage, message.text)
            self._turn.totals.add(usage)
            await self._log.emit("usage", **usage)

    def _fault_of(self, message: Assembled, assembler: Assembler) -> FailureFacts | None:
        calls, reason = message.tool_calls, message.finish_reason
        cut = bool(calls) and any(arguments.parse(call.arguments).state == "cut" for call in calls)
        call_missing = self._offered and assembler.call_missing
        text = self._text
        is_answer = text or calls or (self._turn.prefix and reason == "stop")
        if is_answer and not cut and not call_missing and reason not in ("length", "content_filter", "error"):
            return None
        return FailureFacts(
            "finish",
            finish_reason=reason,
            delivered=len(text),
            has_calls=bool(calls),
            calls_cut=cut,
            call_missing=call_missing,
            drafting=assembler.drafting,
        )

    # --- what to do ---------------------------------------------------------------------------------------------

    def _state(self, facts: FailureFacts, kind: Kind) -> CallState:
        turn, settings = self._turn, self._turn.settings
        retries = settings.variable("HERMES_STREAM_RETRIES") or ""
        deadline = turn.live.deadline_at
        return CallState(
            tried=self._tried,
            reconnects_max=int(retries) if retries.isdigit() else 2,
            retries_max=settings.agent.api_max_retries,
            possible=frozenset(self._possible_actions(facts)),
            larger_window=any(window_of(route) > turn.window for route in turn.routes[turn.route_index + 1 :]),
            retry_after_s=facts.retry_after_s,
            time_left_s=None if deadline is None else deadline - time.monotonic(),
            worker_died="WorkerDied" in facts.exception,
            delivered=len(self._text),
            drafting=facts.drafting,
            own_limit=turn.own_limit and kind == "truncated_text",
            interrupted=self._stop.reason not in (None, "deadline"),
            jitter=turn.services.jitter(),
        )

    def _possible_actions(self, facts: FailureFacts) -> set[Action]:
        turn = self._turn
        usable = [c for c in turn.route.credentials if c and not turn.services.route_health.is_cooling_down(c)]
        option = rejected_option(facts)
        pictures = images.has_images(turn.messages)
        ceiling = turn.capabilities.max_output
        limit = turn.max_output or turn.route.max_output_tokens
        checks: dict[Action, bool] = {
            "rotate": any(credential != self._credential for credential in usable),
            "fallback": turn.route_index + 1 < len(turn.routes),
            "unstream": turn.stream,
            "drop_option": option is not None and option not in turn.services.route_health.dropped(turn.route),
            "compact": turn.live.spec.compress and turn.settings.compression.enabled,
            "shrink_images": pictures and images.can_shrink(),
            "describe_images": pictures,
            "drop_opaque": turn.with_opaque and any(m.get("opaque") for m in turn.messages),
            "raise_output": not turn.own_limit and (limit is None or limit < ceiling),
            "excerpt": bool(self._reasoning.strip()) and not turn.wants_json,
        }
        return {action for action, can in checks.items() if can}

    async def _recover(self, facts: FailureFacts, kind: Kind, decision: Decision) -> bool:
        """Announce the action, wait, carry it out. False: a stop came first."""
        message = self._turn.live.secrets.redact(facts.message)[:500] or KINDS[kind].sentence
        await self._log.emit(
            "model.retrying",
            attempt=self._attempts,
            failure=kind,
            action=decision.action,
            wait_seconds=round(decision.wait_seconds, 3),
            message=message,
        )
        try:
            async with self._stop.scope():
                await asyncio.sleep(decision.wait_seconds)
        except Stopped:
            return False
        if kind in ("stream_lost_tool", "stale"):
            self._dropped_tools = facts.drafting
        await self._apply(decision.action, facts, kind)
        return True

    async def _deliver_excerpt(self) -> None:
        thoughts = self._reasoning.strip()
        if len(thoughts) > REASONING_EXCERPT_CHARS_MAX:
            thoughts = f"… {thoughts[-REASONING_EXCERPT_CHARS_MAX:].lstrip()}"
        self._log.text(self._id, f"{prompt.REASONING_EXCERPT}\n\n{thoughts}")
        message = "The model ended without an answer; the end of its reasoning is shown instead."
        await self._log.emit("notice", level="warn", code="reasoning_only", message=message)

    async def _end(self, attempt: Attempt, facts: FailureFacts, kind: Kind, decision: Decision) -> StepResult:
        turn = self._turn
        await carry(attempt.assembler.finish(), self._deliver)
        await self._final_text()
        lost_call = kind in ("stream_lost_tool", "stale") and bool(facts.drafting)
        if lost_call and decision.action == "keep_partial":
            self._log.text(self._id, f"\n\n{stalled_warning(facts.drafting)}")
        message = turn.live.secrets.redact(facts.message)
        if facts.status is not None:
            message = f"{address_of(turn.route.base_url)}: {message or facts.status}"
        failure = explain(
            kind,
            turn.route.provider,
            status=facts.status,
            message=message,
            has_text=bool(self._text),
            own_limit=turn.own_limit and kind == "truncated_text",
        )
        failure = replace(failure, retry_after_s=facts.retry_after_s)
        partial = attempt.assembler.message()
        partial.tool_calls = []
        return StepResult(partial, self._log.text_of(self._id), failure)

    # --- the actions --------------------------------------------------------------------------------------------

    async def _apply(self, action: Action, facts: FailureFacts, kind: Kind) -> None:
        turn = self._turn
        match action:
            case "rotate" if self._credential is not None:
                seconds = facts.retry_after_s or KEY_REST_S.get(kind, 300.0)
                turn.services.route_health.cool_down(self._credential, seconds)
            case "fallback":
                await self._use_fallback(kind)
            case "unstream":
                turn.stream = False
            case "drop_option" if (option := rejected_option(facts)) is not None:
                turn.services.route_health.drop(turn.route, option)
                await self._notify_left_out([option])
            case "compact" if not await self._compact(kind):
                self._tried["compact"] = 3  # there is nothing left to shorten
            case "shrink_images":
                turn.messages = await turn.services.threads.call(lambda: images.shrink_images(turn.messages))
            case "describe_images":
                await self._describe_images()
            case "drop_opaque":
                turn.with_opaque = False
            case "raise_output":
                ceiling, limit = turn.capabilities.max_output, turn.max_output or turn.route.max_output_tokens
                turn.max_output = ceiling if limit is None else min(ceiling, 2 * limit)
            case "nudge":
                self._nudge = _NUDGES.get(kind, prompt.ANSWER_VISIBLY)
            case "halve_context":
                turn.services.free_memory()
                turn.routes[turn.route_index] = replace(turn.route, window_tokens=turn.window // 2)
                turn.use_route(turn.route_index)

    async def _use_fallback(self, kind: Kind) -> None:
        turn, old = self._turn, self._turn.route
        if kind == "rate_limit":
            turn.services.route_health.cool_down(old.key, PRIMARY_REST_S)
        window = turn.window if kind == "context_overflow" else 0
        later = range(turn.route_index + 1, len(turn.routes))
        turn.use_route(next(index for index in later if window_of(turn.routes[index]) > window))
        turn.counted_tokens, turn.max_output, turn.stream = 0, None, True
        ends = [{"model": route.model, "provider": route.provider} for route in (old, turn.route)]
        event = self._log.event("model.switched", to=ends[1], reason=kind)
        event.data["from"] = ends[0]
        await self._log.append(event)

    async def _describe_images(self) -> None:
        from hermes.agent.auxiliary import Auxiliary

        described = bool(self._turn.settings.auxiliary.vision.model)
        replacement = "a description" if described else "a note"
        message = f"The model's provider refused an image; {replacement} is sent in its place."
        await self._log.emit("notice", level="warn", code="image_rejected", message=message)
        if not described:
            self._turn.messages = images.remove_images(self._turn.messages)
            return
        auxiliary = Auxiliary(self._turn)
        self._turn.messages = await images.replace_by_descriptions(self._turn.messages, auxiliary.describe)
        for usage in auxiliary.spent:
            await self._log.emit("usage", **usage)
