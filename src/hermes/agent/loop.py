"""The turn: model, tools, model, until there is an answer. The one place that joins provider, tools, log and store."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from functools import cached_property, partial

from hermes.agent import prompt
from hermes.agent.auxiliary import Auxiliary, first_words, names_session, plain_title
from hermes.agent.content import own_words
from hermes.agent.context_fit import ASKED, compact, fit
from hermes.agent.job_script import run_script
from hermes.agent.media import MediaExporter
from hermes.agent.media_tags import strip_rendered_media
from hermes.agent.step import ModelStep, StepResult
from hermes.agent.turn import Services, Turn
from hermes.agent.turn_end import close_cancelled, close_failed, close_without_store, finish_completed, open_answer
from hermes.agent.turn_start import resume_turn, start_turn
from hermes.core import message_marks
from hermes.core.failures import Failure, Kind, explain
from hermes.core.ids import random_hex
from hermes.core.limits import INVALID_STEPS_MAX, ITEMS_AT_ONCE_MAX
from hermes.core.message_marks import SUMMARY_MARK
from hermes.core.result import Result
from hermes.core.stream_parts import Assembled, ToolCall
from hermes.guards.hosts import hosts_in
from hermes.guards.secrets import redact_tree
from hermes.runs.control import Stopped
from hermes.runs.engine import LiveRun
from hermes.runs.resume import Resumption
from hermes.runs.writer import LogEnded
from hermes.store.base import LeaseLost, Row, StoreError
from hermes.tools import arguments
from hermes.tools.questions import Asking
from hermes.tools.registry import Answer, ToolContext, ToolDef, redaction
from hermes.tools.resources import RunResources
from hermes.tools.result_limits import ResultLimiter
from hermes.tools.round import Outcome, ToolRound, last_answer

log = logging.getLogger(__name__)
_APPROVAL_S = {"api_server": "api_server.approval_timeout_seconds"}


async def run_turn(live: LiveRun, services: Services) -> Result:
    """Run a turn from its spec to its result; whatever happens, it ends on record."""
    resumed = live.resumption
    turn, fault = await (start_turn if resumed is None else resume_turn)(live, services)
    try:
        if resumed is not None and resumed.verdict != "go_on":
            with TurnLoop(turn) as work:
                done = await work.record_interrupted(resumed)
        else:
            begins = resumed is None and live.spec.compact is None and not live.spec.count_only
            failure = fault or (await fit(turn, "start") if begins else None)
            if failure is not None:
                done = await close_failed(turn, failure)
            elif live.spec.count_only:
                done = await finish_completed(turn, StepResult(Assembled(), ""), [])
                done["prompt_tokens"] = turn.prompt_tokens()
            elif live.spec.compact is not None:
                await compact(turn, ASKED, live.spec.compact)
                done = await finish_completed(turn, StepResult(Assembled(), ""), [])
            else:
                with TurnLoop(turn) as work:
                    done = await work.run()
    except Stopped:
        done = await close_cancelled(turn)
    except asyncio.CancelledError:
        if live.session_lost:
            raise
        # Nobody asked for a stop: the loop this runs on is being ended.
        live.controls.stop.request("server_shutdown", "server")
        await close_cancelled(turn, open_answer(turn))
        raise
    except (LeaseLost, LogEnded):
        raise
    except StoreError as error:
        if live.unrecorded:
            raise  # it can be carried out without a record
        log.error("run %s lost its store: %s", live.spec.run_id, error)
        done = await close_without_store(turn, open_answer(turn))
    except Exception:
        message = live.secrets.redact(traceback.format_exc())
        log.error("run %s ended by a defect: %s", live.spec.run_id, message)
        failure = Failure("unknown", None, "", "The server had an internal error.", False, "agent_error")
        await close_failed(turn, failure, open_answer(turn))
        raise
    kept = live.spec.persist and live.log.state.ended
    if kept and turn.user_row is not None and not _is_named(turn) and not done["interrupted"]:
        services.background(_name_session(turn, done["final_response"]))
    return done


class TurnLoop:
    def __init__(self, turn: Turn) -> None:
        self._turn, self._live = turn, turn.live
        self._spec, self._log = turn.live.spec, turn.live.log
        self._invalid_steps = 0
        self._steers: list[str] = []
        self._steer_mark = random_hex(8)
        if self._spec.source == "api_server" and any(tool.toolset == "file" for tool in turn.tools.values()):
            turn.media = MediaExporter(turn.live, turn.services, lambda: self._world)
        self._calls = sum(m["role"] == "tool" for m in turn.messages[turn.history_length :])

    def __enter__(self) -> TurnLoop:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of what refers to this: a turn that refers to itself would wait for the collector."""
        if self._turn.media is not None:
            self._turn.media.end()
        for name in ("_round", "_asking", "_world"):
            self.__dict__.pop(name, None)

    async def run(self) -> Result:
        turn = self._turn
        repairs = 0
        notices = turn.services.session_states.notices(self._spec.owner, self._spec.session_id)
        while notices:
            await self._log.emit("notice", level="info", code="process_ended", message=notices.pop(0))
        picked_up = await self._pick_up()
        if self._spec.script is not None and picked_up is None:
            await run_script(turn, self._round_of)
        while picked_up is not None or self._log.step < turn.steps_max + repairs:
            if picked_up is None:
                self._log.step += 1
            begun = turn.prefix
            answered = picked_up or await self._ask(turn, tools=self._may_call())
            picked_up = None
            if answered.failure is not None:
                return await self._fail(answered)
            calls = answered.message.tool_calls
            if not calls:
                fault = self._structure_fault(begun + answered.text)
                if not fault:
                    return await finish_completed(turn, answered, [])
                if repairs:
                    return await self._fail_kind("bad_structure", answered, fault)
                repairs += 1
                turn.nudges = [prompt.repair(fault)]
                continue
            if pending := await self._act(calls):
                return await finish_completed(turn, answered, pending)
            if self._invalid_steps >= INVALID_STEPS_MAX:
                return await self._fail_kind("invalid_calls", answered)
            if failure := await fit(turn, "step"):
                return await close_failed(turn, failure)
        return await self._sum_up()

    def _may_call(self) -> bool:
        return self._spec.max_tool_calls is None or self._calls < self._spec.max_tool_calls

    # --- going on where a log ends --------------------------------------------------------------------------------

    async def _pick_up(self) -> StepResult | None:
        """What the model had said when the run was cut off, or says now in the place of what was lost."""
        turn, resumed = self._turn, self._live.resumption
        if resumed is None:
            return None
        said = self._said()
        before = await self._round.judge(said.message.tool_calls, resumed) if said else {}
        known = {state: [c for c, b in before.items() if b.known == state] for state in ("not_done", "unclear")}
        data = {"reason": resumed.reason, "cut": resumed.cut, **({"lost": True} if resumed.lost else {})}
        event = self._log.event("run.resumed", **data, repeated=known["not_done"], unknown=known["unclear"])
        await self._log.append(event, closes=[p.stream_id for p in resumed.partials if p.kind == "tool"])
        open_calls = self._open_calls(said.message.tool_calls) if said and not resumed.message_id else []
        settled = {call_id for call_id, found in before.items() if found.known != "not_done"}
        await self._asking.close_stale({call.id for call in open_calls} - settled)
        if resumed.message_id:
            if said is not None and not said.message.tool_calls and (fault := self._structure_fault(said.text)):
                turn.nudges = [prompt.repair(fault)]
            return await self._ask(turn, tools=self._may_call(), again=resumed)
        if said is None or (said.message.tool_calls and not open_calls):
            return None
        return said

    def _said(self) -> StepResult | None:
        """The last message of the model in this turn."""
        row, resumed = self._turn.last_answer, self._live.resumption
        if row is None or resumed is None:
            return None
        calls = [ToolCall.from_dict(call) for call in row.tool_calls or ()]
        message = Assembled(tool_calls=calls, finish_reason=row.finish_reason)  # type: ignore[arg-type]
        return StepResult(message, row.content if isinstance(row.content, str) else "", None, resumed.said_id, row)

    def _open_calls(self, calls: list[ToolCall]) -> list[ToolCall]:
        resumed = self._live.resumption
        return [call for call in calls if resumed is None or call.id not in resumed.finished]

    async def record_interrupted(self, resumed: Resumption) -> Result:
        """End a run that is not to go on; what it had said and begun is put on record."""
        turn, said = self._turn, self._said()
        calls = self._open_calls(said.message.tool_calls) if said is not None and not resumed.message_id else []
        if calls:
            await self._round.judge(calls, resumed)
            outcomes: list[Outcome] = []
            await self._round.record_interrupted(calls, outcomes)
            self._take_in(outcomes)
        answered = open_answer(turn)
        whole = None if said is None or said.message.tool_calls or resumed.message_id else said
        if resumed.verdict == "cancelled":
            self._live.controls.stop.request(resumed.stop_reason or "stop", resumed.stopped_by)
            return await close_cancelled(turn, answered, whole)
        kind: Kind = resumed.verdict if resumed.verdict != "go_on" else "server_restarted"
        failure = explain(kind, turn.route.provider, has_text=answered is not None or whole is not None)
        return await close_failed(turn, failure, answered, whole)

    # --- asking ---------------------------------------------------------------------------------------------------

    async def _ask(self, turn: Turn, *, tools: bool = True, again: Resumption | None = None) -> StepResult:
        """One model call, its message on record unless it failed. One that was cut off is made again."""
        if self._live.controls.stop.reason is not None:
            raise Stopped
        turn.message_id = again.message_id if again else f"msg_{random_hex(12)}"
        tried = again.attempts if again else 0
        step = ModelStep(turn, turn.message_id, partial(compact, turn), tools=tools, attempts=tried)
        answered = await step.run()
        answered.message_id = turn.message_id
        turn.nudges = []
        if answered.failure is None:
            if turn.client_tools:
                # What is kept is what the client is shown and sends again.
                answered.message.tool_calls = [self._settled(call) for call in answered.message.tool_calls]
            await self._record(turn, answered)
        return answered

    async def _record(self, turn: Turn, answered: StepResult) -> None:
        message = answered.message
        mask = self._live.secrets.mask
        calls = []
        for at, call in enumerate(message.tool_calls, 1):
            calls.append(redact_tree(call.as_dict(), mask))
            if not at % ITEMS_AT_ONCE_MAX:
                await asyncio.sleep(0)  # others have their turn in between
        opaque = {turn.route.api_mode: message.opaque} if message.opaque else None
        row = Row(
            self._live.transcript_id,
            "assistant",
            answered.text,
            self._spec.run_id,
            tool_calls=calls or None,
            opaque=opaque,
        )
        row.continues, row.active = bool(turn.prefix), not turn.prefix
        row.finish_reason = message.finish_reason
        row.api_content = strip_rendered_media(answered.text) if turn.media else None
        usage = turn.usage_event(message.usage, answered.text)
        turn.totals.add(usage)
        await self._log.complete(
            answered.message_id,
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
        answered.row = row
        turn.add_answer(row)
        if message.usage is not None and message.usage.input_tokens:
            turn.counted_tokens = message.usage.input_tokens + (message.usage.output_tokens or 0)
            turn.counted_messages = len(turn.messages)

    async def _act(self, calls: list[ToolCall]) -> list[ToolCall]:
        """Run the server's calls; the client's own come back, to be answered by it."""
        client, server, refused = self._whose(calls)
        server = self._open_calls(server)
        applied: list[str] = []

        def steer() -> str:
            taken, self._live.controls.steers = self._live.controls.steers, []
            applied.extend(steer_id for steer_id, _ in taken)
            self._steers += (text for _, text in taken)
            return message_marks.steer_frame((text for _, text in taken), self._steer_mark) if taken else ""

        outcomes: list[Outcome] = []
        if server:
            try:
                await self._round.run(server, steer, outcomes, refused)
            finally:
                self._take_in(outcomes)
            self._calls += len(server)
            only_invalid = not client and all(outcome.invalid for outcome in outcomes)
            self._invalid_steps = self._invalid_steps + 1 if only_invalid else 0
        if applied:
            where = next((outcome.call.id for outcome in outcomes if outcome.steered), "next_message")
            await self._log.emit("steer.applied", steer_ids=applied, where=where)
        return client

    def _take_in(self, outcomes: list[Outcome]) -> None:
        """The results, behind the message that asked for them and in its order."""
        messages = self._turn.messages
        for outcome in outcomes:
            told = {"content": outcome.content, "tool_call_id": outcome.call.id, "tool_name": outcome.name}
            messages.append({"role": "tool", **told})
        first = len(messages)
        while first and messages[first - 1]["role"] == "tool":
            first -= 1
        asked = messages[first - 1].get("tool_calls") or () if first else ()
        place = {call["id"]: at for at, call in enumerate(asked)}
        messages[first:] = sorted(messages[first:], key=lambda m: place.get(m.get("tool_call_id"), len(place)))

    def _whose(self, calls: list[ToolCall]) -> tuple[list[ToolCall], list[ToolCall], dict[str, Answer]]:
        """The client's calls, with arguments that parse; the server's; and the client's that cannot be passed on."""
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
            elif (shown := self._shown(call, name)) is None:
                fault = arguments.parse(call.arguments).fault or "not valid JSON: a number is out of range"
                refused[call.id] = {"error": f"The arguments are {fault}.", "code": "invalid_arguments"}
                server.append(call)
            else:
                client.append(shown)
        return client, server, refused

    def _shown(self, call: ToolCall, name: str) -> ToolCall | None:
        """A call as its client is shown it: the server's own credentials are no part of it. None: it cannot be shown."""
        value = redact_tree(arguments.parse(call.arguments).value, self._live.secrets.mask)
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return None
        return None if value is None else ToolCall(call.id, name, text, call.extra)

    def _settled(self, call: ToolCall) -> ToolCall:
        """A call with the name and the arguments that its client is shown, where the model wrote something else."""
        name = arguments.settle_name(call.name, [*self._turn.client_tools, *self._turn.tools])
        shown = self._shown(call, name) if name is not None and name in self._turn.client_tools else None
        if shown is None:
            return call
        try:
            same = json.loads(self._live.secrets.mask(call.arguments)) == json.loads(shown.arguments)
        except (ValueError, RecursionError):
            same = False
        return call if same and call.name == name else shown

    def _structure_fault(self, text: str) -> str:
        """What is wrong with the final text where a format was asked for."""
        wanted = self._spec.response_format or {}
        if not self._turn.wants_json:
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

    async def _fail_kind(self, kind: Kind, said: StepResult, words: str = "") -> Result:
        """A failure of the turn itself; the message with its text is on record already."""
        failure = explain(kind, self._turn.route.provider, words=words, has_text=bool(said.text))
        return await close_failed(self._turn, failure, said=said)

    async def _fail(self, answered: StepResult) -> Result:
        failure = answered.failure
        assert failure is not None
        if failure.kind == "interrupted":
            return await close_cancelled(self._turn, answered)
        return await close_failed(self._turn, failure, answered)

    # --- acting, all of it made when it is first asked for: most turns call no tool -------------------------------

    @property
    def _resumes(self) -> bool:
        return self._spec.persist and self._spec.on_detach == "continue"

    @cached_property
    def _world(self) -> RunResources:
        turn, services = self._turn, self._turn.services
        return RunResources(
            spec=self._spec,
            home=services.home,
            settings=turn.settings,
            secrets=self._live.secrets,
            store=self._live.store,
            desk=services.session_states.of(
                self._spec.owner, self._spec.session_id, self._spec.parent_session_id if self._spec.parent else None
            ),
            outside=services.outside,
            blocking=services.files.call,
            window_tokens=turn.window,
            ask_model=Auxiliary(turn).ask,
            toolsets=frozenset(tool.toolset for tool in turn.tools.values()),
            spend=turn.totals.add,
            # Not methods of this loop, which holds the world: a cycle would wait for the collector.
            has_foreign=partial(_has_foreign, turn, self._live),
            named_hosts=partial(_named_hosts, turn, self._live, self._steers),
        )

    @cached_property
    def _asking(self) -> Asking:
        get, denies = self._turn.settings.get, self._spec.approvals == "deny"
        surface = self._turn.services.outside.engine().root_spec(self._spec).source
        return Asking(
            self._log,
            self._live.controls,
            mode=get("approvals.mode") if denies or not self._spec.approvals else self._spec.approvals,
            answerable=self._spec.answerable,
            unattended="deny" if denies else get("approvals.unattended"),
            approval_s=get(_APPROVAL_S.get(surface, "approvals.timeout")),
            clarify_s=get("agent.clarify_timeout"),
            before=self._live.resumption,
            resumes=self._resumes,
        )

    @cached_property
    def _round(self) -> ToolRound:
        return self._round_of(self._turn.tools)

    def _round_of(self, tools: dict[str, ToolDef]) -> ToolRound:
        turn, services, get = self._turn, self._turn.services, self._turn.settings.get
        known, world, asking = self._live.secrets, self._world, self._asking
        loop = asyncio.get_running_loop()

        def output(call_id: str, text: str, stream: str) -> None:
            """A tool may speak from a thread of its own; the log is the loop's."""
            try:
                here = asyncio.get_running_loop() is loop
            except RuntimeError:
                here = False
            if here:
                self._log.output(call_id, text, stream)
            else:
                loop.call_soon_threadsafe(self._log.output, call_id, text, stream)

        def context(call_id: str, tool: ToolDef) -> ToolContext:
            return ToolContext(
                run_id=self._spec.run_id,
                call_id=call_id,
                session_id=self._spec.session_id,
                owner=self._spec.owner,
                session_key=self._spec.session_key,
                home=turn.services.home,
                settings=turn.settings,
                secrets=known,
                asking=asking,
                emit=lambda stream, text: output(call_id, known.redact(text), stream),
                blocking=turn.services.threads.call,
                last_answer=lambda name, field: last_answer(turn.messages, name, field),
                world=world,
                sees_images=turn.capabilities.images,
            )

        return ToolRound(
            tools,
            context,
            self._log,
            self._live.controls.stop,
            turn.services.threads,
            transcript_id=self._live.transcript_id,
            parallel_max=get("agent.max_parallel_tools"),
            redact=redaction(known, turn.settings),
            shape=ResultLimiter(world.spill, get("tool_output.max_chars"), turn.window, services.files.call),
            read_foreign=partial(setattr, self._live, "read_foreign", True),
            resumes=self._resumes,
        )


def _is_named(turn: Turn) -> bool:
    """Whether the session had a title, or got it when it was made."""
    if turn.live.begun is None:
        return False
    session = turn.live.begun.session
    return bool(session["title"]) if session else not names_session(turn)


async def _name_session(turn: Turn, answer: str) -> None:
    """A title for a session that has none, as work that delays nobody."""
    question = first_words(turn.messages)
    sessions, session_id = turn.live.store.sessions, turn.live.spec.session_id
    if not question.strip():
        return
    got = await Auxiliary(turn).title(question, answer) if answer and names_session(turn) else None
    if got is not None:
        used = got[1]
        await sessions.add_usage(session_id, used, used["model"], used["provider"], used["task"])
    await sessions.set_auto_title_if_empty(session_id, plain_title(got[0] if got else question))


def _has_foreign(turn: Turn, live: LiveRun) -> bool:
    """Whether text from outside is in view of the model, or was in this turn; of a child also in its parent's."""
    parent = _parent(turn, live)
    if not live.read_foreign:
        live.read_foreign = any(map(message_marks.is_foreign, turn.messages)) or bool(parent and parent.read_foreign)
    return live.read_foreign


def _named_hosts(turn: Turn, live: LiveRun, steers: list[str]) -> frozenset[str]:
    """The hosts in the user's own words. What a child is told are its parent's words, not the user's."""
    if live.spec.parent is not None:
        parent = _parent(turn, live)
        return parent.named_hosts if parent is not None else frozenset()
    said = [own_words(m.get("content")) for m in turn.messages if m.get("role") == "user"]
    texts = [text for text in (*said, *steers) if not text.startswith(SUMMARY_MARK)]
    live.named_hosts = frozenset().union(*map(hosts_in, texts))
    return live.named_hosts


def _parent(turn: Turn, live: LiveRun) -> LiveRun | None:
    parent = live.spec.parent
    return turn.services.outside.engine().live(parent[0]) if parent is not None else None
