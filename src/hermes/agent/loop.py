"""The turn: model, tools, model, until there is an answer. The one place that joins provider, tools, log and store."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from hermes.agent import compress, prompt, routes
from hermes.agent.auxiliary import Auxiliary, plain_title
from hermes.agent.closing import close_cancelled, close_completed, close_failed
from hermes.agent.content import received, text_of
from hermes.agent.failures import Failure, Kind, explain
from hermes.agent.parts import ToolCall
from hermes.agent.step import Answered, ModelStep
from hermes.agent.surroundings import gather
from hermes.agent.turn import Services, Turn
from hermes.errors import ConfigError
from hermes.limits import BYTES_PER_TOKEN, INVALID_STEPS_MAX, LEAN_WINDOW_TOKENS
from hermes.providers.base import Message, ToolSchema
from hermes.runs.control import Stopped
from hermes.runs.engine import LiveRun, Result
from hermes.store.base import Row, SessionRecord
from hermes.tools import arguments
from hermes.tools.asking import Asking
from hermes.tools.registry import Answer, ToolContext, ToolDef
from hermes.tools.round import Outcome, ToolRound, last_answer
from hermes.tools.toolsets import LEAN, _get_platform_tools


class TurnLoop:
    """One turn, from its spec to its result."""

    def __init__(self, live: LiveRun, services: Services) -> None:
        self._live, self._services = live, services
        self._spec, self._log = live.spec, live.log
        self._turn: Turn
        self._round: ToolRound
        self._user_row: Row | None = None
        self._invalid_steps = 0
        self._calls = 0

    async def run(self) -> Result:
        """Run the turn; whatever happens, it ends on record."""
        fault = await self._open()
        try:
            failure = fault or await self._fit("start")
            done = await (self._steps() if failure is None else close_failed(self._turn, failure, self._user_row))
        except Stopped:
            done = await close_cancelled(self._turn, self._user_row)
        self._name_session(done)
        return done

    # --- open ---------------------------------------------------------------------------------------------------

    async def _open(self) -> Failure | None:
        """Gather what the turn needs and record its beginning. A route that cannot be had is told, on record."""
        live, spec, fault = self._live, self._spec, None
        settings, notice = self._services.settings()
        session = await live.store.sessions.get(live.transcript_id)
        try:
            found = routes.routes(settings, spec.route, session.model if session and spec.route is None else None)
        except ConfigError as error:
            found, fault = [routes.LOCAL], Failure("unknown", None, "", str(error), False, "agent_incomplete")
        history = await self._history()
        content = await received(spec.user_message, self._services, spec.session_id)
        new: list[Message] = [{"role": "user", "content": content}] if content else []
        turn = self._turn = Turn(live, self._services, settings, found, [*history, *new], len(history))
        turn.at = 1 if len(found) > 1 and self._services.learnt.rests(found[0].key) else 0
        turn.instructions = spec.instructions or ""
        turn.reasoning = self._reasoning(turn)
        turn.client_tools = {str(t["name"]): _client_tool(t) for t in spec.client_tools}
        turn.tools = self._offered(turn)
        record = await self._system(turn, session)
        self._round = self._tool_round(turn)
        await self._begin(turn, record, content)
        if notice:
            await self._log.emit("notice", level="warn", code="settings_kept", message=live.secrets.redact(notice))
        return fault

    async def _history(self) -> list[Message]:
        if self._spec.history is not None:
            return list(self._spec.history)
        return [row.as_message() for row in await self._live.store.sessions.messages(self._spec.session_id)]

    def _offered(self, turn: Turn) -> dict[str, ToolDef]:
        spec, settings = self._spec, turn.settings
        config = {"platform_toolsets": settings.get("platform_toolsets"), "agent": settings.section("agent")}
        sets = set(spec.toolsets) if spec.toolsets is not None else _get_platform_tools(config, spec.source)
        sets -= spec.disabled_toolsets
        if spec.tool_policy is not None:
            sets &= spec.tool_policy
        if turn.window < LEAN_WINDOW_TOKENS:
            sets &= LEAN
        if not spec.answerable:
            sets -= {"clarify"}
        return self._services.registry().offered(sets, settings)

    def _reasoning(self, turn: Turn) -> Mapping[str, Any] | None:
        if self._spec.reasoning is not None:
            return self._spec.reasoning
        overrides = turn.settings.get("agent.reasoning_overrides") or {}
        effort = overrides.get(turn.route.model) or turn.settings.get("agent.reasoning_effort")
        return {"enabled": effort != "none", "effort": effort} if effort else None

    async def _system(self, turn: Turn, session: SessionRecord | None, *, anew: bool = False) -> SessionRecord:
        """The system prompt, byte for byte as last time while nothing it is made of has changed."""
        spec = self._spec
        record = SessionRecord(self._live.transcript_id, spec.source, spec.owner, session_key=spec.session_key)
        record.parent_session_id = spec.parent_session_id
        inputs = await self._services.files.call(
            lambda: gather(
                self._services.home,
                turn.settings,
                spec,
                model=turn.route.model,
                window=turn.window,
                tools=tuple(schema.name for schema in turn.schemas()),
                instructions=(session.instructions if session else None) or "",
            )
        )
        digest = inputs.digest()
        kept = session is not None and session.prompt_digest == digest and not anew
        if session is not None and session.system_prompt is not None and kept:
            turn.system = session.system_prompt
        else:
            turn.system = prompt.build(inputs)
            if session is not None:
                await self._live.store.sessions.update(session.id, system_prompt=turn.system, prompt_digest=digest)
        record.system_prompt, record.prompt_digest = turn.system, digest
        return record

    async def _begin(self, turn: Turn, record: SessionRecord, content: Any) -> None:
        spec = self._spec
        started = self._log.event(
            "run.started",
            kind=spec.kind,
            session_id=spec.session_id,
            model=turn.route.model,
            provider=turn.route.provider,
            api_mode=turn.route.api_mode,
            tools=[schema.name for schema in turn.schemas()],
            user_row=None,
            max_iterations=self._steps_max(turn),
            on_detach=spec.on_detach,
        )
        rows: list[Row] = []
        if content:
            self._user_row = Row(self._live.transcript_id, "user", content, spec.run_id, told=((started, "user_row"),))
            rows.append(self._user_row)
        await self._log.append(started, rows=rows, session=record)

    def _steps_max(self, turn: Turn) -> int:
        return self._spec.max_iterations or int(turn.settings.get("agent.max_turns"))

    # --- steps --------------------------------------------------------------------------------------------------

    async def _steps(self) -> Result:
        turn = self._turn
        repairs = 0
        while self._log.step < self._steps_max(turn):
            self._log.step += 1
            answered = await self._ask(turn, tools=self._may_call())
            if answered.failure is not None:
                return await self._fail(answered)
            calls = answered.message.tool_calls
            if not calls:
                fault = self._structure_fault(answered.text)
                if not fault:
                    return await close_completed(turn, answered, [])
                if repairs:
                    return await self._fail_kind("bad_structure", answered, fault)
                repairs += 1
                turn.nudges = [prompt.repair(fault)]
                continue
            if pending := await self._act(calls):
                return await close_completed(turn, answered, pending)
            if self._invalid_steps >= INVALID_STEPS_MAX:
                return await self._fail_kind("invalid_calls", answered)
            if failure := await self._fit("step"):
                return await close_failed(turn, failure, self._user_row)
        return await self._sum_up()

    def _may_call(self) -> bool:
        return self._spec.max_tool_calls is None or self._calls < self._spec.max_tool_calls

    async def _ask(self, turn: Turn, *, tools: bool = True) -> Answered:
        """One model call, its message on record unless it failed."""
        if self._live.controls.stop.reason is not None:
            raise Stopped
        message_id = f"msg_{secrets.token_hex(12)}"
        answered = await ModelStep(turn, message_id, self._compact, tools=tools).run()
        answered.message_id = message_id
        turn.nudges = []
        if answered.failure is None:
            await self._record(turn, answered)
        return answered

    async def _record(self, turn: Turn, answered: Answered) -> None:
        message = answered.message
        calls = [call.as_dict() for call in message.tool_calls]
        opaque = {turn.route.api_mode: message.opaque} if message.opaque else None
        row = Row(
            self._live.transcript_id,
            "assistant",
            answered.text,
            self._spec.run_id,
            tool_calls=calls or None,
            opaque=opaque,
        )
        row.finish_reason = message.finish_reason
        usage = turn.usage_event(message.usage, answered.text)
        turn.totals.add(usage)
        await self._log.complete(
            answered.message_id,
            row,
            after=[self._log.event("usage", **usage)],
            finish_reason=message.finish_reason,
            tool_calls=[{"id": c.id, "name": c.name, "arguments": c.arguments} for c in message.tool_calls],
            partial=False,
        )
        answered.row = row
        turn.messages.append(row.as_message())
        if message.usage is not None and message.usage.input_tokens:
            turn.counted_tokens = message.usage.input_tokens + (message.usage.output_tokens or 0)
            turn.counted_messages = len(turn.messages)

    async def _act(self, calls: list[ToolCall]) -> list[ToolCall]:
        """Run the server's calls; the client's own come back, to be answered by it."""
        turn = self._turn
        client, server, refused = self._whose(calls)
        applied: list[str] = []

        def steer() -> str:
            taken, self._live.controls.steers = self._live.controls.steers, []
            applied.extend(steer_id for steer_id, _ in taken)
            return prompt.steer_frame(text for _, text in taken) if taken else ""

        outcomes: list[Outcome] = []
        if server:
            outcomes = await self._round.run(server, steer, refused)
            self._calls += len(server)
            only_invalid = not client and all(outcome.invalid for outcome in outcomes)
            self._invalid_steps = self._invalid_steps + 1 if only_invalid else 0
        for outcome in outcomes:
            name = outcome.call.name
            turn.messages.append(
                {"role": "tool", "content": outcome.content, "tool_call_id": outcome.call.id, "tool_name": name}
            )
        if applied:
            await self._log.emit("steer.applied", steer_ids=applied, where=outcomes[-1].call.id)
        return client

    def _whose(self, calls: list[ToolCall]) -> tuple[list[ToolCall], list[ToolCall], dict[str, Answer]]:
        """The client's calls, with arguments that parse; the server's; and the client's that cannot be passed on."""
        client: list[ToolCall] = []
        server: list[ToolCall] = []
        refused: dict[str, Answer] = {}
        for call in calls:
            name = arguments.settle_name(call.name, [*self._turn.client_tools, *self._turn.tools])
            if name not in self._turn.client_tools:
                server.append(call)
                continue
            parsed = arguments.parse(call.arguments)
            if parsed.value is None:
                refused[call.id] = {"error": f"The arguments are {parsed.fault}.", "code": "invalid_arguments"}
                server.append(call)
            else:
                client.append(ToolCall(call.id, name, json.dumps(parsed.value, ensure_ascii=False), call.extra))
        return client, server, refused

    def _structure_fault(self, text: str) -> str:
        """What is wrong with the final text where a format was asked for."""
        wanted = self._spec.response_format or {}
        if wanted.get("type") not in ("json_object", "json_schema"):
            return ""
        try:
            value = json.loads(text)
        except ValueError as error:
            return f"it is not valid JSON ({error})"
        schema = wanted.get("json_schema") or {}
        if wanted["type"] == "json_object":
            return "" if isinstance(value, dict) else "it is not a JSON object"
        if not schema.get("strict"):
            return ""
        return "; ".join(arguments.schema_faults(value, schema.get("schema") or {})[:3])

    async def _sum_up(self) -> Result:
        """Out of steps: one last call without tools says what was done."""
        turn = self._turn
        turn.nudges = [prompt.SUM_UP]
        answered = await self._ask(turn, tools=False)
        if answered.failure is not None:
            return await self._fail(answered)
        return await self._fail_kind("max_iterations", answered)

    # --- context ------------------------------------------------------------------------------------------------

    def _budget(self) -> compress.Budget:
        turn, get = self._turn, self._turn.settings.get
        limit = turn.route.max_output_tokens or turn.capabilities.max_output
        return compress.Budget(
            turn.window,
            limit,
            get("compression.threshold"),
            get("compression.target_ratio"),
            get("compression.protect_first_n"),
        )

    async def _fit(self, reason: str) -> Failure | None:
        """Compact when the prompt has grown past the threshold; a message that can never fit is refused."""
        turn, budget = self._turn, self._budget()
        if turn.prompt_tokens() <= budget.limit:
            return None
        if not (self._spec.compress and turn.settings.get("compression.enabled")):
            too_long = turn.prompt_tokens() > budget.total
            return self._failure("context_overflow", False, "It may not be compacted.") if too_long else None
        await self._compact(reason)
        last = compress.plan(turn.messages, budget).tail[:1]
        if turn.fixed_tokens() + compress.size_of(last) > budget.total:
            return self._failure("context_overflow", False, "One message is larger than the model's window.")
        return None

    async def _compact(self, reason: str) -> bool:
        """Shorten the middle of the conversation. False: there is nothing left to shorten."""
        turn, budget = self._turn, self._budget()
        before, fixed = turn.prompt_tokens(), turn.fixed_tokens()
        plan = compress.plan(turn.messages, budget)
        if not plan.middle and reason == "context_overflow":
            plan = compress.plan(turn.messages, budget, protect_first=0)
        if not plan.middle:
            return False
        method, usage = "prune", None
        shorter = [*plan.head, *compress.prune(plan.middle), *plan.tail]
        if shorter == turn.messages or not compress.fits(shorter, fixed, budget.goal):
            got = await Auxiliary(turn).summary(plan.middle, budget)
            if got is not None:
                method, (summary, usage) = "summary", got
            else:
                method, summary = (
                    "extract",
                    compress.extract(plan.middle, int(budget.tail * BYTES_PER_TOKEN / 2)),
                )
            todo = last_answer(turn.messages, "todo", "todos")
            shorter = compress.joined(plan, summary, json.dumps(todo["todos"], ensure_ascii=False) if todo else None)
        archived = len(turn.messages) - len(plan.head) - len(plan.tail)
        turn.messages, turn.counted_tokens = shorter, 0
        await self._system(turn, await self._live.store.sessions.get(self._live.transcript_id), anew=True)
        data = {"reason": reason, "method": method, "tokens_before": before, "tokens_after": turn.prompt_tokens()}
        event = self._log.event("context.compacted", **data, messages_archived=archived)
        events = [self._log.event("usage", **usage), event] if usage else [event]
        stored = self._spec.history is None and self._spec.persist
        rows = [_row_of(self._live.transcript_id, message) for message in shorter] if stored else []
        await self._log.append(*events, rows=rows, replaces=stored)
        return turn.prompt_tokens() < before

    # --- endings ------------------------------------------------------------------------------------------------

    def _failure(self, kind: Kind, has_text: bool, words: str = "") -> Failure:
        route = self._turn.route
        return explain(kind, status=None, provider=route.provider, words=words, has_text=has_text, own_limit=False)

    async def _fail_kind(self, kind: Kind, said: Answered, words: str = "") -> Result:
        """A failure of the turn itself; the message with its text is on record already."""
        return await close_failed(self._turn, self._failure(kind, bool(said.text), words), self._user_row, said=said)

    async def _fail(self, answered: Answered) -> Result:
        failure = answered.failure
        assert failure is not None
        if failure.kind == "interrupted":
            return await close_cancelled(self._turn, self._user_row, answered)
        return await close_failed(self._turn, failure, self._user_row, answered)

    def _name_session(self, done: Result) -> None:
        """A title for a session that has none, as work that delays nobody."""
        if self._spec.persist and self._user_row is not None and not done["interrupted"]:
            self._services.background(self._title(text_of(self._user_row.content), done["final_response"]))

    async def _title(self, question: str, answer: str) -> None:
        sessions, session_id = self._live.store.sessions, self._spec.session_id
        session = await sessions.get(session_id)
        if session is None or session.title or not question.strip():
            return
        got = await Auxiliary(self._turn).title(question, answer) if answer else None
        if got is not None:
            await sessions.add_usage(session_id, got[1])
        await sessions.set_auto_title_if_empty(session_id, plain_title(got[0] if got else question))

    # --- parts --------------------------------------------------------------------------------------------------

    def _tool_round(self, turn: Turn) -> ToolRound:
        get, live = turn.settings.get, self._live
        known = live.secrets
        asking = Asking(
            self._log,
            live.controls,
            mode=self._spec.approvals or get("approvals.mode"),
            answerable=self._spec.answerable,
            unattended=get("approvals.unattended"),
            approval_s=get("approvals.timeout"),
            clarify_s=get("agent.clarify_timeout"),
        )

        def context(call_id: str, tool: ToolDef) -> ToolContext:
            return ToolContext(
                run_id=self._spec.run_id,
                call_id=call_id,
                session_id=self._spec.session_id,
                owner=self._spec.owner,
                session_key=self._spec.session_key,
                home=self._services.home,
                settings=turn.settings,
                secrets=known,
                asking=asking,
                emit=lambda stream, text: self._log.output(call_id, known.redact(text), stream),
                blocking=self._services.threads.call,
                last_answer=lambda name, field: last_answer(turn.messages, name, field),
            )

        return ToolRound(
            turn.tools,
            context,
            self._log,
            live.controls.stop,
            self._services.threads,
            transcript_id=live.transcript_id,
            parallel_max=get("agent.max_parallel_tools"),
            redact=known.redact if get("security.redact_secrets") else known.mask,
        )


def _client_tool(tool: Mapping[str, Any]) -> ToolSchema:
    return ToolSchema(
        str(tool["name"]), str(tool.get("description") or ""), dict(tool.get("parameters") or {"type": "object"})
    )


def _row_of(session_id: str, message: Message) -> Row:
    row = Row(session_id, message["role"], message.get("content"))
    for name in ("tool_calls", "tool_call_id", "tool_name", "opaque"):
        setattr(row, name, message.get(name))
    return row
