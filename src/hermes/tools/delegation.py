"""The tool `delegate_task`: tasks as runs of their own, followed to their end."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from contextlib import aclosing, suppress
from typing import Annotated, Any

from msgspec import Meta

from hermes.core.events import Event
from hermes.core.json_types import JsonObject
from hermes.core.limits import CLOSE_S_MAX, DELEGATED_CHARS_MAX, DELEGATED_TASKS_MAX, GOAL_SHOWN_CHARS_MAX, STORE_POLL_S
from hermes.core.spec import Control, RunSpec
from hermes.providers.routes import of_session
from hermes.runs.engine import LiveRun, Refused
from hermes.runs.writer import LogEnded
from hermes.store.base import StoreError
from hermes.tools.framework.registry import Answer, Data, Reconciled, ToolArguments, ToolContext, ToolDef, ToolError

log = logging.getLogger(__name__)

# What a child is not offered: it works alone and leaves nothing behind for later.
WITHOUT = frozenset({"delegation", "clarify", "memory", "cronjob"})
# The origin of an answer: fields of a `Control` with their defaults.
_ORIGIN = {"by": "user", "surface": "", "credential": ""}
_STATUS = {"run.completed": "completed", "run.failed": "failed", "run.cancelled": "cancelled"}


_Goal = Annotated[
    str,
    Meta(min_length=1, description="What is to be done, complete enough for somebody who knows nothing of this talk."),
]
_Context = Annotated[str, Meta(min_length=1, description="Facts, paths and limits that the work needs.")]


class Task(ToolArguments):
    goal: _Goal
    context: _Context | None = None


class DelegateTask(ToolArguments):
    goal: _Goal | None = None
    context: _Context | None = None
    tasks: Annotated[list[Task], Meta(min_length=1, max_length=DELEGATED_TASKS_MAX)] | None = None


class Child:
    """A task and the run that does it. Its id is derived from the call's, so that an interrupted call finds it
    again."""

    def __init__(self, ctx: ToolContext, parent: LiveRun, number: int, goal: str, context: str | None) -> None:
        self._ctx, self._parent, self._number, self._goal, self._context = ctx, parent, number, goal, context
        self._engine = ctx.resources.engine
        identity = f"{ctx.run_id}\0{parent.log.step}\0{ctx.call_id}\0{number}"
        self._id = hashlib.sha256(identity.encode()).hexdigest()[:32]
        self.run_id = f"run_{self._id}"
        self._begun = False
        self._last_seq = 0
        self._questions: dict[str, JsonObject] = {}
        self._forwarded: dict[str, asyncio.Task[None]] = {}

    async def work(self, slots: asyncio.Semaphore, recorded: set[tuple[str, str]]) -> Answer:
        """The outcome of the task; failures are outcomes too."""
        try:
            async with slots:
                await self._begin(recorded)
                return await self._follow(recorded)
        except asyncio.CancelledError:
            await self._cancel_with_parent(recorded)
            raise
        except (StoreError, LogEnded):
            raise
        except Refused as refusal:
            error = str(refusal)
        except Exception:  # one task's failure is not the others'
            log.exception("the subagent %s could not be followed", self.run_id)
            error = "The subagent could not be followed to its end."
        finally:
            for question in self._forwarded.values():
                question.cancel()
        return {"status": "failed", "child_run_id": self.run_id, "summary": "", "error": error}

    async def cancel(self, reason: str, by: str) -> bool:
        control = Control("cancel", {"reason": reason}, by=by or "parent")
        return await self._engine.control(self.run_id, control) != "unknown"

    async def _begin(self, recorded: set[tuple[str, str]]) -> None:
        self._begun = True
        if ("subagent.started", self.run_id) not in recorded:
            goal = self._ctx.secrets.redact(self._goal)[:GOAL_SHOWN_CHARS_MAX]
            await self._record("subagent.started", goal=goal)
        if await self._engine.get(self.run_id) is None:
            await self._engine.start(await self._spec())

    async def _spec(self) -> RunSpec:
        ctx, spec = self._ctx, self._parent.spec
        goal, context = self._goal, self._context
        route, until = spec.route, self._parent.deadline_at
        if route is None:
            session = await self._parent.store.sessions.get_session(self._parent.transcript_id)
            route = of_session(ctx.settings, session)
        return RunSpec(
            user_message=f"{goal}\n\nWhat you should know:\n{context}" if context else goal,
            session_id=f"delegate_{self._id}",
            run_id=self.run_id,
            kind="subagent",
            source="subagent",
            owner=spec.owner,
            session_key=spec.session_key,
            route=route,
            sampling=spec.sampling,
            reasoning=spec.reasoning,
            toolsets=ctx.resources.toolsets - WITHOUT,
            disabled_toolsets=spec.disabled_toolsets | WITHOUT,
            tool_policy=spec.tool_policy,
            allowed_models=spec.allowed_models,
            approvals=spec.approvals,
            answerable=spec.answerable,
            max_iterations=ctx.settings.delegation.max_iterations,
            on_detach=spec.on_detach,
            persist=spec.persist,
            compress=spec.compress,
            context_files=spec.context_files,
            memory=spec.memory,
            deadline_seconds=None if until is None else max(0.0, until - time.monotonic()),
            parent=(ctx.run_id, ctx.call_id),
            parent_session_id=spec.session_id if spec.persist else None,
            workdir=spec.workdir,
        )

    async def _follow(self, recorded: set[tuple[str, str]]) -> Answer:
        while True:
            async with aclosing(self._engine.batches(self.run_id, self._last_seq)) as batches:
                async for batch in batches:
                    for event in batch:
                        self._last_seq = event.seq
                        if event.final:
                            return await self._outcome(event, recorded)
                        await self._handle_event(event)
                    for approval_id in self._questions.keys() - self._forwarded.keys():
                        await self._forward_question(approval_id)
            # Its process is dead, and it has not ended.
            await self._engine.resume(self.run_id)
            await asyncio.sleep(STORE_POLL_S)

    async def _handle_event(self, event: Event) -> None:
        data = event.data
        if event.type == "tool.started":
            self._ctx.emit("info", f"[{self._number + 1}] {data['name']}: {data['preview']}\n")
        elif event.type == "tool.finished":
            self._ctx.foreign = self._ctx.foreign or bool(data.get("foreign"))
        elif event.type == "approval.requested":
            self._questions[data["approval_id"]] = data
        elif event.type == "approval.resolved":
            self._questions.pop(data["approval_id"], None)
            question = self._forwarded.pop(data["approval_id"], None)
            if question is not None:
                question.cancel()
                await self._parent.log.emit("approval.resolved", **data)

    async def _forward_question(self, approval_id: str) -> None:
        """Put the child's question into the parent's log; whoever answers there answers the child."""
        data = self._questions[approval_id]
        path = [self.run_id, *(data.get("path") or ())]
        event = self._parent.log.event("approval.requested", **{**data, "call_id": self._ctx.call_id, "path": path})
        answered = self._parent.controls.approvals.ask(approval_id)
        self._forwarded[approval_id] = asyncio.create_task(self._forward_answer(approval_id, answered))
        await self._parent.log.append(event)

    async def _forward_answer(self, approval_id: str, answered: asyncio.Future[Data]) -> None:
        answer = dict(await answered)
        origin = [str(answer.pop(name, default)) for name, default in _ORIGIN.items()]
        await self._engine.control(self.run_id, Control("approve", {**answer, "id": approval_id}, *origin))

    async def _outcome(self, end: Event, recorded: set[tuple[str, str]]) -> Answer:
        data, status = end.data, _STATUS[end.type]
        row_id = data.get("row") or data.get("partial_row")
        row = await self._engine.row(self.run_id, row_id) if row_id is not None else None
        text = row.content if row is not None and isinstance(row.content, str) else ""
        usage = dict(data.get("usage") or {})
        if ("subagent.finished", self.run_id) not in recorded:
            steps = data.get("steps") or 0
            await self._record("subagent.finished", status=status, chars=len(text), usage=usage, steps=steps)
            self._ctx.resources.spend({**usage, "calls": steps})
        chars_max = self._ctx.settings.delegation.max_summary_chars
        if len(text) > chars_max:
            note = f"\n[… cut: {len(text)} characters in all]"
            text = text[: chars_max - len(note)] + note
        answer: Answer = {"status": status, "summary": text, "child_run_id": self.run_id, "usage": usage}
        if status == "failed":
            answer["error"] = data.get("error") or "The subagent failed."
        return answer

    async def _record(self, kind: str, **data: Any) -> None:
        await self._parent.log.emit(kind, call_id=self._ctx.call_id, child_run_id=self.run_id, **data)

    async def _cancel_with_parent(self, recorded: set[tuple[str, str]]) -> None:
        """Stop the child for the same reason as the parent, unless the run will be resumed."""
        stop, spec = self._parent.controls.stop, self._parent.spec
        resumes = stop.reason == "server_shutdown" and spec.persist and spec.on_detach == "continue"
        if not self._begun or stop.reason is None or resumes:
            return
        with suppress(TimeoutError, StoreError, LogEnded):
            async with asyncio.timeout(CLOSE_S_MAX):
                if await self.cancel(stop.reason, stop.by):
                    await self._follow(recorded)


def _children(ctx: ToolContext, args: DelegateTask) -> list[Child]:
    if bool(args.tasks) == bool(args.goal):
        raise ToolError("Give either `goal` or `tasks`.", "invalid_arguments")
    parent = ctx.resources.engine.live(ctx.run_id)
    if parent is None or parent.spec.parent is not None:
        raise ToolError("A subagent cannot delegate.", "tool_unavailable", "Do the work yourself.")
    tasks = args.tasks or [Task(goal=args.goal or "")]
    texts = [args.context, *(text for task in tasks for text in (task.goal, task.context))]
    if any(len(text or "") > DELEGATED_CHARS_MAX for text in texts):
        hint = "Put what is long into a file, and name the file."
        raise ToolError(f"More than {DELEGATED_CHARS_MAX} characters were given.", "too_large", hint)
    return [Child(ctx, parent, number, task.goal, task.context or args.context) for number, task in enumerate(tasks)]


async def _run(ctx: ToolContext, args: DelegateTask) -> Answer:
    children = _children(ctx, args)
    # Children ask for hosts that the user has not named, and inherit what the conversation has seen.
    ctx.resources.named_hosts()
    ctx.resources.has_foreign()
    ids = {child.run_id for child in children}
    events = await ctx.resources.engine.durable(ctx.run_id)
    recorded = {(event.type, event.data["child_run_id"]) for event in events if event.data.get("child_run_id") in ids}
    slots = asyncio.Semaphore(ctx.settings.delegation.max_concurrent_children)
    works = [asyncio.create_task(child.work(slots, recorded)) for child in children]
    try:
        await asyncio.wait(works)
    except asyncio.CancelledError:
        for work in works:
            work.cancel()
        await asyncio.wait(works)
        raise
    return {"results": [work.result() for work in works]}


async def _reconcile(ctx: ToolContext, args: DelegateTask, _: Data) -> Reconciled:
    """An interrupted call resumes with its children; where its run is not resumed, they are cancelled."""
    parent = ctx.resources.engine.live(ctx.run_id)
    if parent is None or parent.resumption is None or parent.resumption.verdict == "go_on":
        return "not_done"
    for child in _children(ctx, args):
        await child.cancel(parent.resumption.stop_reason or "stop", parent.resumption.stopped_by)
    return "unclear"


TOOL = ToolDef(
    name="delegate_task",
    toolset="delegation",
    description=(
        "Give work to subagents, one for each task, and wait for their summaries. Each begins with a fresh view, has "
        "your tools and your workspace, and sees nothing of this conversation but what you write. Good for work that "
        "reads much and reports little, and for parts that do not depend on each other."
    ),
    arguments=DelegateTask,
    run=_run,
    effect="effect",
    timeout_s=None,
    alone=True,
    resumable=True,
    reconcile=_reconcile,
    preview=lambda args: "; ".join(task.goal for task in args.tasks or [args] if task.goal),
)
