"""A tool round: the calls of one message, validated, guarded, run concurrently where possible, each result recorded."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from hermes.core import limits
from hermes.core.errors import ServiceError
from hermes.core.json_types import JsonObject
from hermes.core.message_marks import without_steer
from hermes.core.stream_parts import ToolCall
from hermes.core.text import text_of
from hermes.core.threads import Threads
from hermes.guards.secrets import redact_tree
from hermes.runs.control import Stop
from hermes.runs.resume import Resumption
from hermes.runs.writer import LogEnded, RunWriter
from hermes.store.base import Row, StoreError
from hermes.tools.framework import arguments
from hermes.tools.framework.calls import Outcome, PendingCall, PriorOutcome, Status, dependencies
from hermes.tools.framework.registry import (
    Answer,
    Args,
    Data,
    Effect,
    Prepared,
    Reconciled,
    ToolContext,
    ToolDef,
    render,
)
from hermes.tools.framework.result_limits import ResultLimiter, with_images

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class LoopGuard:
    """Detects a model that repeats failing calls or reads within a turn, and hints at it in the result."""

    def __init__(self) -> None:
        self._failed_calls: dict[str, int] = {}
        self._failed_tools: dict[str, int] = {}
        self._read: dict[str, int] = {}

    def hint(self, name: str, args: JsonObject, status: Status, effect: str, content: str) -> str:
        key = f"{name}:{json.dumps(args, sort_keys=True)}"
        if status == "ok":
            self._failed_tools.pop(name, None)
            same = self._read.get(key) == hash(content) if effect == "read" else False
            self._read[key] = hash(content)
            return "This is the same result as before; reading it again will not change it." if same else ""
        self._failed_calls[key] = self._failed_calls.get(key, 0) + 1
        self._failed_tools[name] = self._failed_tools.get(name, 0) + 1
        if self._failed_calls[key] >= 2:
            return "This very call has failed before; change something or try another way."
        if self._failed_tools[name] >= 3:
            return f"{name} has failed {self._failed_tools[name]} times in a row; think again about the approach."
        return ""


@dataclass(slots=True, eq=False)
class ToolRound:
    """Runs the calls of a message; one instance serves all rounds of a turn. `read_foreign` is called when an answer
    comes from outside; with `resumes` a shutdown leaves calls to the server that resumes the run."""

    tools: Mapping[str, ToolDef]
    context: Callable[[str, ToolDef], ToolContext]
    log: RunWriter
    stop: Stop
    threads: Threads
    transcript_id: str
    parallel_max: int
    redact: Callable[[str], str]
    results: ResultLimiter
    read_foreign: Callable[[], None] = lambda: None
    resumes: bool = False
    _slots: asyncio.Semaphore = field(init=False)
    _guard: LoopGuard = field(init=False)
    _before: dict[str, PriorOutcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slots, self._guard = asyncio.Semaphore(self.parallel_max), LoopGuard()

    async def run(
        self, calls: Sequence[ToolCall], steer: Callable[[], str], out: list[Outcome], refused: Mapping[str, Answer]
    ) -> None:
        """Append every call's outcome to `out` in the order of the calls, each once it is committed.

        `steer` returns messages that the user has sent meanwhile; they go into the last result. `refused` are answers to
        calls that are not to be run. A stop ends what runs, records it and is raised again.
        """
        self.results.begin_step()
        works: list[PendingCall] = []
        for at, call in enumerate(calls, 1):
            works.append(PendingCall(call, refusal=refused[call.id]) if call.id in refused else self._settle(call))
            if not at % limits.ITEMS_AT_ONCE_MAX:
                await asyncio.sleep(0)  # let other tasks run
        self._mark_duplicates(works)
        waits, left = dependencies(works), len(works)

        def steer_last() -> str:
            return steer() if left == 1 else ""

        async def take(work: PendingCall, earlier: Sequence[PendingCall]) -> None:
            nonlocal left
            for other in earlier:
                await other.done.wait()
            try:
                async with self._slots:
                    await self._carry_out(work, steer_last)
            finally:
                left -= 1
                work.done.set()

        tasks = [asyncio.create_task(take(work, waits[at])) for at, work in enumerate(works)]
        try:
            async with self.stop.scope():
                await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for work in works:
                if work.outcome is None and not self._is_left_open(work):
                    await self._finish(work, *_INTERRUPTED, time.monotonic())
            raise
        finally:
            out += (work.outcome for work in works if work.outcome is not None)

    def _is_left_open(self, work: PendingCall) -> bool:
        """Whether a call without an outcome is left to the server that resumes the run."""
        if self.stop.reason != "server_shutdown" or not self.resumes or work.tool is None or work.refusal is not None:
            return False
        if work.same_as is not None:
            return self._is_left_open(work.same_as)
        return work.tool.resumable or not work.started

    async def nested(self, within: ToolContext, call: ToolCall) -> str:
        """Run a call that another call makes, recorded but not part of the conversation, and return its answer. Where
        that is foreign, so is the answer of the outer call."""
        work = await self._run_recorded(call, within.call_id)
        within.foreign = within.foreign or work.foreign
        assert work.outcome is not None
        return text_of(work.outcome.content)

    async def own_call(self, call: ToolCall) -> tuple[Outcome, bool]:
        """Run a call that the run makes itself, recorded but not part of the conversation; whether its answer is foreign."""
        async with self.stop.scope():
            work = await self._run_recorded(call, "run")
        assert work.outcome is not None
        return work.outcome, work.foreign

    async def _run_recorded(self, call: ToolCall, parent: str) -> PendingCall:
        work = self._settle(call)
        work.parent = parent
        try:
            await self._carry_out(work, str)
        except asyncio.CancelledError:
            if work.outcome is None:
                await self._finish(work, *_INTERRUPTED, time.monotonic())
            raise
        return work

    async def classify_interrupted(self, calls: Sequence[ToolCall], resumption: Resumption) -> dict[str, PriorOutcome]:
        """Find out which interrupted calls are done, which are to be repeated, and which are unclear."""
        for call in calls:
            started = resumption.started.get(call.id)
            if started is None or call.id in resumption.finished:
                continue
            work = self._settle(call)
            tool = work.tool
            state: Reconciled = "unclear"
            if tool is not None and tool.reconcile is not None:
                try:
                    ctx = self.context(call.id, tool)
                    state = await self._invoke(tool.reconcile, ctx, work.decoded, started.data)
                except Exception as error:  # noqa: BLE001  (a reconcile that fails means "unclear")
                    self._crash(tool, error)
            elif tool is not None and started.data["effect"] in ("read", "idempotent"):
                state = "not_done"
            self._before[call.id] = PriorOutcome(state, resumption.output_of(call.id))
        return self._before

    async def record_interrupted(self, calls: Sequence[ToolCall], out: list[Outcome]) -> None:
        for call in calls:
            work, status, answer = self._settle(call), *_INTERRUPTED
            if (before := self._before.get(call.id)) is not None and before.known != "not_done":
                status, answer = before.answer()
            await self._finish(work, status, answer, time.monotonic())
            out += [work.outcome] if work.outcome is not None else []

    def _settle(self, call: ToolCall) -> PendingCall:
        name = arguments.settle_name(call.name, self.tools)
        if name is None:
            names = arguments.nearest(call.name, self.tools)
            hint = f"The nearest are: {', '.join(names)}." if names else "No tools are offered."
            return PendingCall(
                call, refusal={"error": f"There is no tool {call.name!r}.", "code": "unknown_tool", "hint": hint}
            )
        tool = self.tools[name]
        parsed = arguments.parse(call.arguments)
        if parsed.state != "ok" or parsed.value is None:
            return PendingCall(call, tool, refusal=_invalid(f"The arguments are {parsed.fault}."))
        args, fault = arguments.check(parsed.value, tool.parameters)
        if fault:
            return PendingCall(call, tool, args, refusal=_invalid(f"The arguments do not fit: {fault}."))
        try:
            return PendingCall(call, tool, args, tool.decode(args))
        except msgspec.ValidationError as error:  # a number too large for any type: its schema has no bound
            return PendingCall(call, tool, args, refusal=_invalid(f"The arguments do not fit: {error}."))

    def _mark_duplicates(self, works: list[PendingCall]) -> None:
        first: dict[str, PendingCall] = {}
        for work in works:
            if work.tool is not None and work.refusal is None:
                key = f"{work.tool.name}:{json.dumps(work.args, sort_keys=True)}"
                if key in first:
                    work.same_as = first[key]
                first.setdefault(key, work)

    async def _carry_out(self, work: PendingCall, steer: Callable[[], str]) -> None:
        started_at = time.monotonic()
        if work.same_as is not None and work.same_as.outcome is not None:
            first, work.images = work.same_as.outcome, work.same_as.images
            await self._finish(work, first.status, text_of(first.content), started_at, code=first.code, steer=steer)
            return
        if work.refusal is not None or work.tool is None:
            await self._finish(work, "error", work.refusal or {}, started_at, steer=steer)
            return
        before = self._before.pop(work.call.id, None)
        if before is not None and before.known != "not_done":
            await self._finish(work, *before.answer(), started_at, steer=steer)
            return
        work.repeated = before is not None
        status, answer, effect = await self._guarded(work.tool, work)
        text = "\n".join([render(answer), *work.images])
        if hint := self._guard.hint(work.tool.name, work.args, status, effect, text):
            answer["hint"] = f"{answer['hint']} {hint}" if answer.get("hint") else hint
        await self._finish(work, status, answer, started_at, steer=steer)

    async def _guarded(self, tool: ToolDef, work: PendingCall) -> tuple[Status, Answer, Effect]:
        """Start and run a tool. A defect of the tool fails only this call."""
        try:
            effect, _ = tool.effect_of(work.decoded), tool.scope_of(work.decoded)
            work.reads = effect == "read"
            ctx = self.context(work.call.id, tool)
            ctx.tools, ctx.call = self.tools, self.nested
            ctx.sees_images = ctx.sees_images and work.parent is None
            prepared = Prepared()
            if tool.prepare is not None:
                try:
                    prepared = await self._invoke(tool.prepare, ctx, work.decoded)
                except ServiceError as refusal:
                    return *_refusal(refusal, work), effect
            ctx.prepared = prepared.value
            await self._start(tool, work, prepared.started)
            status, answer = await self._call(tool, ctx, work)
            quotes = status == "ok" or work.quotes or answer.get("code") == "tool_crashed"
            work.foreign = ctx.foreign or (tool.foreign and quotes)
            if work.foreign:
                self.read_foreign()
            return status, answer, effect
        except (StoreError, LogEnded):
            raise
        except Exception as error:  # noqa: BLE001  (a defect of the tool)
            return "error", self._crash(tool, error), "effect"

    async def _invoke(self, function: Callable[..., _T | Awaitable[_T]], *args: object) -> _T:
        if inspect.iscoroutinefunction(function):
            return await function(*args)  # type: ignore[no-any-return]
        return await self.threads.call(partial(function, *args))  # type: ignore[no-any-return]

    def _crash(self, tool: ToolDef, error: Exception) -> Answer:
        log.error("tool %s fell over: %s", tool.name, self.redact(traceback.format_exc()))
        message = self.redact(f"{tool.name} failed: {type(error).__name__}: {error}")
        return {"error": message, "code": "tool_crashed", "hint": _CRASHED}

    async def _start(self, tool: ToolDef, work: PendingCall, details: Data) -> None:
        effect = tool.effect_of(work.decoded)
        event = self.log.event(
            "tool.started", call_id=work.call.id, name=tool.name, effect=effect, parent_call_id=work.parent
        )
        event.data |= details
        event.data["args"] = redact_tree(work.args, self.redact)
        event.data["preview"] = self.redact(tool.preview(work.decoded))[: limits.PREVIEW_CHARS_MAX]
        work.started = True
        await self.log.append(event, sync=effect == "effect")

    async def _call(self, tool: ToolDef, ctx: ToolContext, work: PendingCall) -> tuple[Status, Answer]:
        limit = asyncio.timeout(tool.timeout_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(tool.run):
                    answer = await tool.run(ctx, work.decoded)
                else:
                    answer = await self._in_thread(tool, ctx, work.decoded)
            render(answer)
            work.images = ctx.images
            return "ok", answer
        except ServiceError as refusal:
            return _refusal(refusal, work)
        except Exception as error:  # noqa: BLE001  (reported to the model, and logged)
            if isinstance(error, TimeoutError) and limit.expired():
                message = f"{tool.name} took longer than {tool.timeout_s:g} s."
                return "timeout", {"error": message, "code": "timeout", "hint": _SLOW}
            return "error", self._crash(tool, error)

    async def _in_thread(self, tool: ToolDef, ctx: ToolContext, args: Args) -> Answer:
        job = self.threads.submit(lambda: tool.run(ctx, args))
        try:
            answer: Answer = await asyncio.shield(job.future)
        except asyncio.CancelledError:
            ctx.cancelled.set()
            job.future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody awaits it
            _, late = await asyncio.wait([job.future], timeout=limits.STUBBORN_S_MAX)
            if late:
                job.abandon()
            job.future.cancel()
            raise
        return answer

    async def _finish(
        self,
        work: PendingCall,
        status: Status,
        answer: Answer | str,
        started_at: float,
        *,
        code: str = "",
        steer: Callable[[], str] = str,
    ) -> None:
        name = work.tool.name if work.tool else work.call.name
        content, spilled = answer if isinstance(answer, str) else render(answer), None
        if not isinstance(answer, str):
            code = code or str(answer.get("code", ""))
            hide = partial(redact_tree, answer, self.redact)
            is_long = len(content) > limits.REDACTED_AT_ONCE_CHARS_MAX
            redacted: Answer = await self.threads.call(hide) if is_long else hide()
            content = render(redacted)
            if work.parent is None:
                content, spilled = await self.results.shaped(redacted, content, work.call.id, foreign=work.foreign)
        content = without_steer(content)
        steering = steer()
        if steering:
            content = f"{content}\n\n{steering}"
        event = self.log.event("tool.finished", call_id=work.call.id, name=name, status=status, code=code, row=None)
        event.data |= {"duration_ms": round((time.monotonic() - started_at) * 1000), "chars": len(content)}
        event.data |= {"spilled": spilled, "repeated": work.repeated, "parent_call_id": work.parent}
        event.data |= {"foreign": True} if work.foreign else {}
        message_content = with_images(content, work.images if status == "ok" else ())
        row = Row(
            self.transcript_id, "tool", message_content, self.log.run_id, tool_call_id=work.call.id, tool_name=name
        )
        row.announced_in = ((event, "row"),)
        # From here on the commit completes, even if this task is cancelled while it waits.
        work.outcome = Outcome(work.call, status, message_content, name, code, work.refusal is not None, bool(steering))
        rows = [row] if work.parent is None else []
        event.data |= {} if rows else {"content": content[: limits.RESULT_SHOWN_CHARS_MAX]}
        # Reads can be repeated; effects are recorded at once.
        await self.log.append(event, rows=rows, closes=self.log.end_output(work.call.id), hold=work.reads)


_STATUSES: dict[str, Status] = {"blocked": "blocked", "timeout": "timeout", "interrupted": "interrupted"}


def _refusal(refusal: ServiceError, work: PendingCall) -> tuple[Status, Answer]:
    work.quotes = refusal.foreign
    return _STATUSES.get(refusal.answer.get("code", ""), "error"), refusal.answer


_CRASHED = "This is a defect of the tool. Try other arguments or another way; tell the user if the work needs it."
_SLOW = "Ask for less at a time, or try another way; check first whether it has taken effect."
_UNFIT = "Correct the arguments as the tool's schema says, and call it again."
_INTERRUPTED: tuple[Status, Answer] = ("interrupted", {"status": "interrupted"})


def _invalid(message: str) -> Answer:
    return {"error": message, "code": "invalid_arguments", "hint": _UNFIT}


def last_answer(messages: Sequence[JsonObject], name: str, field: str) -> JsonObject | None:
    """The last answer of a tool in a conversation that has this field, and so was no error."""
    for message in reversed(messages):
        content = message.get("content")
        if message.get("role") != "tool" or message.get("tool_name") != name or not isinstance(content, str):
            continue
        try:
            # The user's messages may follow the answer.
            answer = json.JSONDecoder().raw_decode(content)[0]
        except ValueError:
            continue
        if isinstance(answer, dict) and field in answer:
            return answer
    return None
