"""The turn loop: model, tools, model, until there is an answer. Joins provider, tools, log and store."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from functools import partial
from operator import attrgetter

from hermes.agent import prompt
from hermes.agent.auxiliary import Auxiliary, first_words, names_session, plain_title
from hermes.agent.context_fit import ASKED, compact, fit
from hermes.agent.job_script import run_script
from hermes.agent.media import MediaExporter
from hermes.agent.media_tags import strip_rendered_media
from hermes.agent.step import ModelStep, StepResult
from hermes.agent.turn import Services, Turn
from hermes.agent.turn_end import close_cancelled, close_failed, close_without_store, finish_completed, open_answer
from hermes.agent.turn_start import resume_turn, start_turn
from hermes.agent.turn_tools import TurnTools
from hermes.core import message_marks
from hermes.core.failures import Failure, Kind, explain
from hermes.core.ids import random_hex
from hermes.core.limits import INVALID_STEPS_MAX, ITEMS_AT_ONCE_MAX
from hermes.core.result import Result
from hermes.core.spec import RunSpec
from hermes.core.stream_parts import Assembled, ToolCall
from hermes.guards.secrets import redact_tree
from hermes.runs.control import Stopped
from hermes.runs.engine import LiveRun
from hermes.runs.resume import Resumption
from hermes.runs.writer import LogEnded
from hermes.store.base import LeaseLost, Row, StoreError
from hermes.tools.framework import arguments
from hermes.tools.framework.calls import Outcome
from hermes.tools.framework.registry import Answer

log = logging.getLogger(__name__)


async def run_turn(live: LiveRun, services: Services) -> Result:
    """Run a turn from its spec to its result; it always ends on record."""
    resumed = live.resumption
    turn, fault = await (start_turn if resumed is None else resume_turn)(live, services)
    try:
        if resumed is not None and resumed.verdict != "go_on":
            loop = TurnLoop(turn)
            try:
                done = await loop.record_interrupted(resumed)
            finally:
                loop.close()
        else:
            if fault is None and resumed is None and live.spec.compact is None and not live.spec.count_only:
                fault = await fit(turn, "start")
            if fault is not None:
                done = await close_failed(turn, fault)
            elif live.spec.count_only:
                done = await finish_completed(turn, StepResult(Assembled(), ""), [])
                done["prompt_tokens"] = turn.prompt_tokens()
            elif live.spec.compact is not None:
                await compact(turn, ASKED, live.spec.compact)
                done = await finish_completed(turn, StepResult(Assembled(), ""), [])
            else:
                loop = TurnLoop(turn)
                try:
                    done = await loop.run()
                finally:
                    loop.close()
    except Stopped:
        done = await close_cancelled(turn)
    except asyncio.CancelledError:
        if live.session_lost:
            raise
        # Nobody requested a stop: the event loop is being shut down.
        live.controls.stop.request("server_shutdown", "server")
        await close_cancelled(turn, open_answer(turn))
        raise
    except (LeaseLost, LogEnded):
        raise
    except StoreError as error:
        if live.unrecorded:
            raise  # it can run without a record
        log.error("run %s lost its store: %s", live.spec.run_id, error)
        done = await close_without_store(turn, open_answer(turn))
    except Exception:
        message = live.secrets.redact(traceback.format_exc())
        log.error("run %s ended by a defect: %s", live.spec.run_id, message)
        failure = Failure("unknown", None, "", "The server had an internal error.", False, "agent_error")
        await close_failed(turn, failure, open_answer(turn))
        raise
    if live.spec.persist and live.log.state.ended and turn.user_row is not None and not done["interrupted"]:
        session = live.opened.session if live.opened is not None else None
        has_title = live.opened is not None and (bool(session["title"]) if session else not names_session(turn))
        if not has_title:
            services.background(_name_session(turn, done["final_response"]))
    return done


class TurnLoop:
    def __init__(self, turn: Turn) -> None:
        self._turn, self._live = turn, turn.live
        self._log = turn.live.log
        self._invalid_steps = 0
        self._tools = TurnTools(turn)
        self._steer_mark = random_hex(8)
        if self._spec.source == "api_server" and "file" in map(attrgetter("toolset"), turn.tools.values()):
            turn.media = MediaExporter(turn.live, turn.services, lambda: self._tools.resources)
        self._calls = 0

    @property
    def _spec(self) -> RunSpec:
        return self._live.spec

    def close(self) -> None:
        """Break reference cycles, so that the turn is freed at once."""
        if self._turn.media is not None:
            self._turn.media.end()
        self._tools.close()

    async def run(self) -> Result:
        turn = self._turn
        repairs = 0
        # A session that does not exist yet has no notices; its id may become another's.
        has_session = self._log.claims is None
        notices = turn.services.session_states.notices(self._spec.owner, self._spec.session_id) if has_session else []
        while notices:
            await self._log.emit("notice", level="info", code="process_ended", message=notices.pop(0))
        resumed = await self._resume(self._live.resumption) if self._live.resumption is not None else None
        if self._spec.script is not None and resumed is None:
            await run_script(turn, self._tools.round_of)
        steps_max = turn.steps_max
        while resumed is not None or self._log.step < steps_max + repairs:
            if resumed is None:
                self._log.step += 1
            prefix = turn.prefix
            answer = resumed or await self._ask()
            resumed = None
            if answer.failure is not None:
                return await self._fail(answer)
            calls = answer.message.tool_calls
            if not calls:
                fault = self._structure_fault(prefix + answer.text)
                if not fault:
                    return await finish_completed(turn, answer, [])
                if repairs:
                    return await self._fail_as("bad_structure", answer, fault)
                repairs += 1
                turn.nudges = [prompt.repair(fault)]
                continue
            if pending := await self._run_tools(calls):
                return await finish_completed(turn, answer, pending)
            if self._invalid_steps >= INVALID_STEPS_MAX:
                return await self._fail_as("invalid_calls", answer)
            if failure := await fit(turn, "step"):
                return await close_failed(turn, failure)
        return await self._summarize()

    # --- going on where a log ends --------------------------------------------------------------------------------

    async def _resume(self, resumed: Resumption) -> StepResult | None:
        """The answer that the run was interrupted in or after; a lost one is asked for again."""
        turn = self._turn
        self._calls = sum(m["role"] == "tool" for m in turn.messages[turn.history_length :])
        last = self._last_answer(resumed)
        before = await self._tools.round.classify_interrupted(last.message.tool_calls, resumed) if last else {}
        repeated, unknown = ([c for c, b in before.items() if b.known == state] for state in ("not_done", "unclear"))
        data = {"reason": resumed.reason, "cut": resumed.cut, **({"lost": True} if resumed.lost else {})}
        event = self._log.event("run.resumed", **data, repeated=repeated, unknown=unknown)
        await self._log.append(event, closes=[p.stream_id for p in resumed.partials if p.kind == "tool"])
        open_calls = self._open_calls(last.message.tool_calls) if last and not resumed.message_id else []
        settled = {call_id for call_id, judged in before.items() if judged.known != "not_done"}
        await self._tools.asking.close_stale({call.id for call in open_calls} - settled)
        if resumed.message_id:
            if last is not None and not last.message.tool_calls and (fault := self._structure_fault(last.text)):
                turn.nudges = [prompt.repair(fault)]
            return await self._ask(resumption=resumed)
        return None if last is None or (last.message.tool_calls and not open_calls) else last

    def _last_answer(self, resumed: Resumption) -> StepResult | None:
        row = self._turn.last_answer
        if row is None:
            return None
        calls = [ToolCall.from_dict(call) for call in row.tool_calls or ()]
        message = Assembled(tool_calls=calls, finish_reason=row.finish_reason)  # type: ignore[arg-type]
        return StepResult(message, row.content if isinstance(row.content, str) else "", None, resumed.answer_id, row)

    def _open_calls(self, calls: list[ToolCall]) -> list[ToolCall]:
        resumed = self._live.resumption
        return [call for call in calls if resumed is None or call.id not in resumed.finished]

    async def record_interrupted(self, resumed: Resumption) -> Result:
        turn, last = self._turn, self._last_answer(resumed)
        calls = self._open_calls(last.message.tool_calls) if last is not None and not resumed.message_id else []
        if calls:
            await self._tools.round.classify_interrupted(calls, resumed)
            outcomes: list[Outcome] = []
            await self._tools.round.record_interrupted(calls, outcomes)
            self._add_results(outcomes)
        answer = open_answer(turn)
        complete = None if last is None or last.message.tool_calls or resumed.message_id else last
        if resumed.verdict == "cancelled":
            self._live.controls.stop.request(resumed.stop_reason or "stop", resumed.stopped_by)
            return await close_cancelled(turn, answer, complete)
        kind: Kind = resumed.verdict if resumed.verdict != "go_on" else "server_restarted"
        failure = explain(kind, turn.route.provider, has_text=answer is not None or complete is not None)
        return await close_failed(turn, failure, answer, complete)

    # --- asking ---------------------------------------------------------------------------------------------------

    async def _ask(self, *, tools: bool = True, resumption: Resumption | None = None) -> StepResult:
        """One model call; its message is recorded unless it failed. An interrupted one is repeated."""
        turn = self._turn
        if self._spec.max_tool_calls is not None and self._calls >= self._spec.max_tool_calls:
            tools = False
        if self._live.controls.stop.reason is not None:
            raise Stopped
        turn.message_id = resumption.message_id if resumption else f"msg_{random_hex(12)}"
        tried = resumption.attempts if resumption else 0
        step = ModelStep(turn, turn.message_id, partial(compact, turn), tools=tools, attempts=tried)
        result = await step.run()
        result.message_id = turn.message_id
        turn.nudges = []
        if result.failure is None:
            if turn.client_tools:
                # What is stored is what the client is shown and sends again.
                result.message.tool_calls = [self._client_view(call) for call in result.message.tool_calls]
            await self._record(turn, result)
        return result

    async def _record(self, turn: Turn, answer: StepResult) -> None:
        message = answer.message
        mask = self._live.secrets.mask
        calls = []
        for count, call in enumerate(message.tool_calls, 1):
            calls.append(redact_tree(call.as_dict(), mask))
            if not count % ITEMS_AT_ONCE_MAX:
                await asyncio.sleep(0)  # let other tasks run
        opaque = {turn.route.api_mode: message.opaque} if message.opaque else None
        row = Row(self._live.transcript_id, "assistant", answer.text, self._spec.run_id, calls or None, opaque=opaque)
        row.continues, row.active = bool(turn.prefix), not turn.prefix
        row.finish_reason = message.finish_reason
        row.api_content = strip_rendered_media(answer.text) if turn.media else None
        usage = turn.usage_event(message.usage, answer.text)
        turn.totals.add(usage)
        await self._log.complete(
            answer.message_id,
            row,
            after=[self._log.event("usage", **usage)],
            finish_reason=message.finish_reason,
            tool_calls=[
                {"id": call.id, "name": mask(call.name), "arguments": mask(call.arguments)}
                for call in message.tool_calls
            ],
            partial=False,
            hold=True,
        )
        answer.row = row
        turn.add_answer(row)
        if message.usage is not None and message.usage.input_tokens:
            turn.counted_tokens = message.usage.input_tokens + (message.usage.output_tokens or 0)
            turn.counted_messages = len(turn.messages)

    async def _run_tools(self, calls: list[ToolCall]) -> list[ToolCall]:
        """Run the server's calls; returns the client's own, which it has to answer."""
        client, server, refused = self._partition(calls)
        server = self._open_calls(server)
        applied: list[str] = []

        def steer() -> str:
            steers, self._live.controls.steers = self._live.controls.steers, []
            applied.extend(steer_id for steer_id, _ in steers)
            self._tools.steers += (text for _, text in steers)
            return message_marks.steer_frame((text for _, text in steers), self._steer_mark) if steers else ""

        outcomes: list[Outcome] = []
        if server:
            await self._log.put_on_record()
            try:
                await self._tools.round.run(server, steer, outcomes, refused)
            finally:
                self._add_results(outcomes)
            self._calls += len(server)
            only_invalid = not client and all(outcome.invalid for outcome in outcomes)
            self._invalid_steps = self._invalid_steps + 1 if only_invalid else 0
        if applied:
            where = next((outcome.call.id for outcome in outcomes if outcome.steered), "next_message")
            await self._log.emit("steer.applied", steer_ids=applied, where=where)
        return client

    def _add_results(self, outcomes: list[Outcome]) -> None:
        """Append the results to the message that asked for them, in the order of its calls."""
        messages = self._turn.messages
        for outcome in outcomes:
            result = {"content": outcome.content, "tool_call_id": outcome.call.id, "tool_name": outcome.name}
            messages.append({"role": "tool", **result})
        first = len(messages)
        while first and messages[first - 1]["role"] == "tool":
            first -= 1
        calls = messages[first - 1].get("tool_calls") or () if first else ()
        position = {call["id"]: index for index, call in enumerate(calls)}
        messages[first:] = sorted(messages[first:], key=lambda m: position.get(m.get("tool_call_id"), len(position)))

    def _partition(self, calls: list[ToolCall]) -> tuple[list[ToolCall], list[ToolCall], dict[str, Answer]]:
        """The client's valid calls; the server's; and answers to the client's calls with invalid arguments."""
        client: list[ToolCall] = []
        server: list[ToolCall] = []
        refused: dict[str, Answer] = {}
        offered = [*self._turn.client_tools, *self._turn.tools]
        for call in calls:
            name = arguments.settle_name(call.name, offered)
            if name not in self._turn.client_tools:
                server.append(call)
                continue
            if self._spec.allowed_tools is not None and name not in self._spec.allowed_tools:
                refused[call.id] = {"error": f"{name} may not be called now.", "code": "not_allowed"}
                server.append(call)
            elif (redacted := self._redact_call(call, name)) is None:
                fault = arguments.parse(call.arguments).fault or "not valid JSON: a number is out of range"
                refused[call.id] = {"error": f"The arguments are {fault}.", "code": "invalid_arguments"}
                server.append(call)
            else:
                client.append(redacted)
        return client, server, refused

    def _redact_call(self, call: ToolCall, name: str) -> ToolCall | None:
        """A client's call without the server's credentials; None if its arguments cannot be passed on."""
        value = redact_tree(arguments.parse(call.arguments).value, self._live.secrets.mask)
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return None
        return None if value is None else ToolCall(call.id, name, text, call.extra)

    def _client_view(self, call: ToolCall) -> ToolCall:
        """A call with the name and arguments that its client is shown, if the model wrote something else."""
        name = arguments.settle_name(call.name, [*self._turn.client_tools, *self._turn.tools])
        redacted = self._redact_call(call, name) if name is not None and name in self._turn.client_tools else None
        if redacted is None:
            return call
        try:
            unchanged = json.loads(self._live.secrets.mask(call.arguments)) == json.loads(redacted.arguments)
        except (ValueError, RecursionError):
            unchanged = False
        return call if unchanged and call.name == name else redacted

    def _structure_fault(self, text: str) -> str:
        response_format = self._spec.response_format
        if response_format is None or not self._turn.wants_json:
            return ""
        try:
            value = json.loads(text)
        except ValueError as error:
            return f"it is not valid JSON ({error})"
        schema = response_format.get("json_schema") or {}
        if response_format["type"] == "json_object":
            return "" if isinstance(value, dict) else "it is not a JSON object"
        if not schema.get("strict"):
            return ""
        return "; ".join(arguments.schema_faults(value, schema.get("schema") or {})[:3])

    async def _summarize(self) -> Result:
        self._turn.nudges = [prompt.SUM_UP]
        summary = await self._ask(tools=False)
        if summary.failure is not None:
            return await self._fail(summary)
        return await self._fail_as("max_iterations", summary)

    async def _fail_as(self, kind: Kind, answer: StepResult, detail: str = "") -> Result:
        """A failure of the turn itself; the message with its text is recorded already."""
        failure = explain(kind, self._turn.route.provider, message=detail, has_text=bool(answer.text))
        return await close_failed(self._turn, failure, recorded=answer)

    async def _fail(self, answer: StepResult) -> Result:
        failure = answer.failure
        assert failure is not None
        if failure.kind == "interrupted":
            return await close_cancelled(self._turn, answer)
        return await close_failed(self._turn, failure, answer)


async def _name_session(turn: Turn, answer: str) -> None:
    question = first_words(turn.messages)
    sessions, session_id = turn.live.store.sessions, turn.live.spec.session_id
    if not question.strip():
        return
    title = question
    if answer and names_session(turn) and (generated := await Auxiliary(turn).title(question, answer)) is not None:
        title, usage = generated
        await sessions.add_late_usage(session_id, usage)
    await sessions.set_auto_title_if_empty(session_id, plain_title(title))
