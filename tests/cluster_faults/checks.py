"""What must hold after faults: one log for everybody, one end, effects once, and nothing lost that was acknowledged."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import pairwise

from crash.plans import EFFECTS
from crash.witness import CLOSED, Run, check_texts, data_of, number_of
from hermes.core.events import FINAL

from .cluster import REPLICAS, Cluster, Json
from .load import Turn

_KEEPALIVE = b": keepalive\n\n"
# How a turn may end that does not go on without its client, or whose client has left.
_CUT_OFF = ("server_restarted", "client_disconnected", "server_shutdown", "store_unavailable")


class Checks:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # The logs of all runs that have ended, which never change again.
        self._logs: dict[str, bytes] = {}
        self.ends: Counter[str] = Counter()

    async def check(self, turns: list[Turn]) -> None:
        await asyncio.gather(*(self._check_turn(turn) for turn in turns))
        self._check_effects(turns)

    async def _check_turn(self, turn: Turn) -> None:
        for run_id in turn.former_runs:
            former = await self._get(f"/v1/runs/{run_id}", 0)
            assert former is None, f"one key, two runs: {former}, {turn}"
        if not turn.run_id:
            assert not turn.acknowledged
            self.ends["nothing"] += 1
            return
        records = [await self._get(f"/v1/runs/{turn.run_id}", at) for at in range(REPLICAS)]
        if records == [None] * REPLICAS:
            self._check_unrecorded(turn)
            return
        logs = [await self.log(turn.run_id, at) for at in range(REPLICAS)]
        assert logs[0] == logs[1] == logs[2], f"replicas tell different logs of {turn.run_id}"
        assert self._logs.setdefault(turn.run_id, logs[0]) == logs[0], "a log has changed after its end"
        *blocks, closing, nothing = logs[0].split(b"\n\n")
        assert (closing, nothing) == (CLOSED, b""), f"the log of {turn.run_id} has no end: {logs[0][-500:]!r}"
        events = [data_of(block) for block in blocks]
        self._check_log(turn, blocks, events)
        self._check_end(turn, events)
        statuses = {record["status"] for record in records if record is not None}
        assert statuses == {events[-1]["event"].removeprefix("run.")} and None not in records, records
        await self._check_response(turn, events)

    def _check_unrecorded(self, turn: Turn) -> None:
        """A turn that somebody waits for is carried out without the store where that is away, and says so; or the head of
        its answer came before it was on record, and the rest of it never did."""
        assert not turn.acknowledged, f"a run that was acknowledged is lost: {turn}"
        assert not (turn.answers and turn.key), f"a run under a key is lost: {turn}"
        self.ends["not on record"] += 1

    @staticmethod
    def _check_log(turn: Turn, blocks: list[bytes], events: list[Json]) -> None:
        numbers = [number_of(block) for block in blocks]
        assert all(a < b for a, b in pairwise(numbers)), "not in order"
        assert [e["event"] for e in events if e["event"] in FINAL] == [events[-1]["event"]], "not one end"
        check_texts(events, lost=False)
        for kind in ("tool.started", "tool.completed"):
            calls = Counter(e["tool_call_id"] for e in events if e["event"] == kind and e["tool"] == "terminal")
            assert set(calls.values()) <= {1}, f"{kind} twice: {calls}"
        for view in turn.views:
            check_view(view, dict(zip(numbers, blocks, strict=True)))

    def _check_end(self, turn: Turn, events: list[Json]) -> None:
        end = events[-1]
        code = end.get("error_code") or end.get("reason") or ""
        self.ends[f"{end['event']} {code}".strip()] += 1
        if end["event"] == "run.completed":
            texts = [e["content"] for e in events if e["event"] == "message.completed"]
            assert texts == turn.plan.texts, (texts, turn.plan)
            return
        if turn.stopped and end["event"] == "run.cancelled":
            return
        assert code in _CUT_OFF and (turn.left or not turn.goes_on), f"{turn.kind} {turn.plan.name} ended with {end}"

    async def _check_response(self, turn: Turn, events: list[Json]) -> None:
        if not turn.response_id:
            return
        responses = [await self._get(f"/v1/responses/{turn.response_id}", at) for at in range(REPLICAS)]
        assert responses[0] is not None, f"the response {turn.response_id} is lost"
        assert responses[0] == responses[1] == responses[2]

    def _check_effects(self, turns: list[Turn]) -> None:
        file = self._cluster.workspace / EFFECTS
        lines = Counter(file.read_text().split() if file.exists() else ())
        twice = [line for line, times in lines.items() if times > 1]
        assert twice == [], f"an effect was had twice: {twice}"
        for turn in turns:
            events = [data_of(block) for block in self._logs.get(turn.run_id, b"").split(b"\n\n")[:-2]]
            tool_call_ids = {e["tool_call_id"] for e in events if e["event"] == "tool.started"}
            ended = {e["tool_call_id"]: e["status"] for e in events if e["event"] == "tool.completed"}
            for call_id in turn.plan.effects if events else ():
                assert lines[call_id] <= (call_id in tool_call_ids), f"{call_id} took effect without being on record"
                assert lines[call_id] or ended.get(call_id) != "ok", f"{call_id} is on record as done"

    # --- reading ----------------------------------------------------------------------------------------------------

    async def _get(self, path: str, at: int) -> Json | None:
        answer = await self._cluster.ask("GET", path, at=at, only=True)
        assert answer.status in (200, 404), answer
        return json.loads(answer.body) if answer.status == 200 else None

    async def log(self, run_id: str, at: int) -> bytes:
        answer = await self._cluster.ask("GET", f"/v1/runs/{run_id}/events", at=at, only=True)
        assert answer.status == 200, answer
        return answer.body.replace(_KEEPALIVE, b"")

    async def check_all_again(self) -> None:
        """Nobody has written to a log after its end; and nothing is left over in the store."""
        for run_id, log in self._logs.items():
            assert await self.log(run_id, 0) == log, "a log has changed after its end"
        rows = self._cluster.query(
            "SELECT count(*) FROM run_partials; SELECT count(*) FROM runs WHERE ended_at IS NULL"
        )
        assert rows.split() == ["0", "0"], rows


def check_view(view: Run, whole: dict[int, bytes]) -> None:
    """A viewer who has changed replicas has seen the log, each event once; output of tools is kept by nobody."""
    for number, block in view.frames.items():
        if number in whole:
            assert whole[number] == block, f"read again, it is another: {block!r}, {whole[number]!r}"
        else:
            assert data_of(block)["event"] == "tool.output", f"seen, and not in the log: {block!r}"
    if view.frames:
        missed = {number for number in whole if number > min(view.frames)} - set(view.frames)
        assert not missed, f"a viewer of {view.run_id} missed {[whole[number] for number in sorted(missed)]}"
        check_texts([data_of(block) for block in view.frames.values()], lost=False)
