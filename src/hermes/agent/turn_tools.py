"""What the tools of a turn use: resources, questions to the user, and rounds of calls."""

from __future__ import annotations

import asyncio
from functools import cached_property, partial

from hermes.agent.auxiliary import Auxiliary
from hermes.agent.turn import Turn
from hermes.core import message_marks
from hermes.core.message_marks import SUMMARY_MARK
from hermes.core.spec import RunSpec
from hermes.core.text import own_text_of
from hermes.guards.url_text import hosts_in
from hermes.runs.engine import LiveRun
from hermes.tools.framework.questions import Asking
from hermes.tools.framework.registry import ToolContext, ToolDef, redaction
from hermes.tools.framework.resources import RunResources
from hermes.tools.framework.result_limits import ResultLimiter
from hermes.tools.framework.round import ToolRound, last_answer


class TurnTools:
    """Each part is created when first needed: most turns call no tool. `steers` are the user's messages during the
    turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self._live = turn, turn.live
        self._log = turn.live.log
        self.steers: list[str] = []

    def close(self) -> None:
        """Break reference cycles, so that the turn is freed at once."""
        for name in ("round", "asking", "resources"):
            self.__dict__.pop(name, None)

    @property
    def _spec(self) -> RunSpec:
        return self._live.spec

    @property
    def _resumes(self) -> bool:
        return self._spec.persist and self._spec.on_detach == "continue"

    @cached_property
    def resources(self) -> RunResources:
        turn, services = self._turn, self._turn.services
        return RunResources(
            spec=self._spec,
            home=services.home,
            settings=turn.settings,
            secrets=self._live.secrets,
            store=self._live.store,
            session=services.session_states.of(
                self._spec.owner, self._spec.session_id, self._spec.parent_session_id if self._spec.parent else None
            ),
            outside=services.outside,
            blocking=services.files.call,
            window_tokens=turn.window,
            ask_model=Auxiliary(turn).ask,
            toolsets=frozenset(tool.toolset for tool in turn.tools.values()),
            spend=turn.totals.add,
            # Not methods of this loop, which holds the resources: avoid a reference cycle.
            has_foreign=partial(_has_foreign, turn, self._live),
            named_hosts=partial(_named_hosts, turn, self._live, self.steers),
        )

    @cached_property
    def asking(self) -> Asking:
        settings, denies = self._turn.settings, self._spec.approvals == "deny"
        surface = self._turn.services.outside.engine().root_spec(self._spec).source
        timeout_s = (
            settings.api_server.approval_timeout_seconds if surface == "api_server" else settings.approvals.timeout
        )
        return Asking(
            self._log,
            self._live.controls,
            mode=settings.approvals.mode if denies or not self._spec.approvals else self._spec.approvals,
            answerable=self._spec.answerable,
            unattended="deny" if denies else settings.approvals.unattended,
            approval_s=timeout_s,
            clarify_s=settings.agent.clarify_timeout,
            before=self._live.resumption,
            resumes=self._resumes,
        )

    @cached_property
    def round(self) -> ToolRound:
        return self.round_of(self._turn.tools)

    def round_of(self, tools: dict[str, ToolDef]) -> ToolRound:
        turn, services = self._turn, self._turn.services
        secrets, resources, asking = self._live.secrets, self.resources, self.asking
        loop = asyncio.get_running_loop()

        def output(call_id: str, text: str, stream: str) -> None:
            """A tool may write from its own thread; the log belongs to the loop."""
            try:
                is_here = asyncio.get_running_loop() is loop
            except RuntimeError:
                is_here = False
            if is_here:
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
                secrets=secrets,
                asking=asking,
                emit=lambda stream, text: output(call_id, secrets.redact(text), stream),
                blocking=turn.services.threads.call,
                last_answer=lambda name, field: last_answer(turn.messages, name, field),
                resources=resources,
                sees_images=turn.capabilities.images,
            )

        return ToolRound(
            tools,
            context,
            self._log,
            self._live.controls.stop,
            turn.services.threads,
            transcript_id=self._live.transcript_id,
            parallel_max=turn.settings.agent.max_parallel_tools,
            redact=redaction(secrets, turn.settings),
            results=ResultLimiter(
                resources.spill, turn.settings.tool_output.max_chars, turn.window, services.files.call
            ),
            read_foreign=partial(setattr, self._live, "read_foreign", True),
            resumes=self._resumes,
        )


def _has_foreign(turn: Turn, live: LiveRun) -> bool:
    """Whether text from outside is in the model's context, or was in this turn; for a child also in its parent's."""
    parent = _parent(turn, live)
    if not live.read_foreign:
        live.read_foreign = any(map(message_marks.is_foreign, turn.messages)) or bool(parent and parent.read_foreign)
    return live.read_foreign


def _named_hosts(turn: Turn, live: LiveRun, steers: list[str]) -> frozenset[str]:
    """The hosts in the user's own words. A child's input comes from its parent, not from the user."""
    if live.spec.parent is not None:
        parent = _parent(turn, live)
        return parent.named_hosts if parent is not None else frozenset()
    typed = [own_text_of(m.get("content")) for m in turn.messages if m.get("role") == "user"]
    texts = [text for text in (*typed, *steers) if not text.startswith(SUMMARY_MARK)]
    live.named_hosts = frozenset().union(*map(hosts_in, texts))
    return live.named_hosts


def _parent(turn: Turn, live: LiveRun) -> LiveRun | None:
    parent = live.spec.parent
    return turn.services.outside.engine().live(parent[0]) if parent is not None else None
