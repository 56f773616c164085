"""Clients of a server that may be killed: they record what they receive, and compare it with the next server."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from hermes.core.events import FINAL
from hermes.core.limits import RESUME_SEQ_STEP
from hermes.core.processes import is_gone
from support.gateway import CUT, Gateway
from support.waiting import DEADLINE_S, until

from .check import is_sound
from .plans import EFFECTS, WAYS, Plan, Way

Json = dict[str, Any]
# How soon after a start all that was cut off has come to its end.
TAKEN_UP_S = DEADLINE_S
VOLATILE = ("message.delta", "reasoning.delta", "tool.output")
CLOSED = b": stream closed"


@dataclass
class Run:
    """A run as one reader follows it: its frames by their numbers, as they came."""

    run_id: str
    plan: Plan
    goes_on: bool
    submitted: bool = False
    frames: dict[int, bytes] = field(default_factory=dict)
    closed: bool = False
    whole: list[bytes] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The number of the last frame."""
        return max(self.frames, default=0)

    def take(self, block: bytes) -> None:
        """One block of lines."""
        if block.startswith(b":"):
            self.closed = self.closed or block == CLOSED
            return
        number = number_of(block)
        assert number > self.last, f"{number} came after {self.last}"
        self.frames[number] = block


@dataclass
class Asked:
    """A request for a turn, and its answer."""

    way: Way
    plan: Plan
    session: str
    key: str = ""
    answer: tuple[int, bytes] | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the turn does without its client."""
        return self.way.goes_on or bool(self.key)

    def post(self, client: aiohttp.ClientSession) -> Any:
        """The request itself."""
        headers = {**dict(self.way.headers), **({"Idempotency-Key": self.key} if self.key else {})}
        headers |= {} if "{session}" in self.way.path else {"X-Hermes-Session-Id": self.session}
        path, body = self.way.path.format(session=self.session), self.way.body(self.plan.message)
        return client.post(path, json=body, headers=headers)


def number_of(block: bytes) -> int:
    """The id of a frame."""
    return int(block.split(b"\n", 1)[0].removeprefix(b"id: "))


def data_of(block: bytes) -> Json:
    """The payload of a frame."""
    payload: Json = json.loads(block.split(b"\ndata: ", 1)[1])
    return payload


class Witness:
    """Everybody who asks something of the servers of one home, one after the other."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.runs: dict[str, Run] = {}
        self.requests: dict[str, Asked] = {}
        self.sessions: dict[str, list[Json]] = {}
        self.responses: dict[str, Json] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        # How a turn ends that does not go on without its client.
        self.cut = ("run.failed", "server_restarted")

    @property
    def frames_read(self) -> int:
        """How many frames have been read in all."""
        return sum(len(run.frames) for run in self.runs.values())

    async def has_seen(self, frames: int) -> None:
        """Wait for so many, or for the last of them."""
        await until(lambda: self.frames_read >= frames or all(task.done() for task in self.tasks))

    # --- asking -----------------------------------------------------------------------------------------------------

    async def open(self, *sessions: str) -> None:
        """Make sessions to speak in."""
        workspace = self.gateway.folder / "workspace"
        workspace.mkdir(exist_ok=True)
        (workspace / "notes.txt").write_text("milk\n")
        for name in sessions:
            await self.gateway.post("/api/sessions", {"id": name}, 201)
            self.sessions[name] = []

    def ask(self, kind: str, plan: Plan, session: str, key: str = "") -> None:
        """Ask for a turn; what becomes of it is read meanwhile."""
        self.requests[plan.name] = Asked(WAYS[kind], plan, session, key)
        self._spawn(self._answered(self.requests[plan.name]))

    def _spawn(self, work: Any) -> None:
        self.tasks.add(asyncio.create_task(work))

    async def _answered(self, asked: Asked) -> None:
        try:
            async with asked.post(self.gateway.client) as response:
                if run_id := response.headers.get("X-Hermes-Run-Id"):
                    run = Run(run_id, asked.plan, asked.goes_on, asked.way.submitted)
                    self._spawn(self.follow(self.runs.setdefault(run_id, run)))
                asked.answer = response.status, await response.read()
                assert response.status in (200, 202), asked.answer
        except CUT:
            return

    async def follow(self, run: Run, *, again: bool = False) -> None:
        """Read a run from where its reader stands to its end, or to that of the server."""
        headers, buffer = {"Last-Event-ID": str(run.last)} if run.last else {}, b""
        try:
            async with self.gateway.client.get(f"/v1/runs/{run.run_id}/events", headers=headers) as response:
                if again and not run.frames and not run.submitted and response.status == 404:
                    run.closed = True  # the head of its stream was told a moment before it was on record
                    return
                assert response.status == 200, await response.text()
                async for chunk in response.content.iter_any():
                    *blocks, buffer = (buffer + chunk).split(b"\n\n")
                    for block in blocks:
                        run.take(block)
        except CUT:
            return

    async def cut_off(self) -> None:
        """Wait until everybody has noticed that the server is gone."""
        tasks, self.tasks = self.tasks, set()
        await asyncio.gather(*tasks)

    # --- looking at what is left -------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until all runs have ended, and check everything that was received."""
        try:
            async with asyncio.timeout(TAKEN_UP_S):
                await asyncio.gather(*(self.follow(run, again=True) for run in self.runs.values() if not run.closed))
                await until(self._listed, lambda runs: all(run["finished_at"] for run in runs))
        except TimeoutError:
            unfinished = [run for run in await self._listed() if not run["finished_at"]]
            unread = [(run.run_id, *run.frames.values()) for run in self.runs.values() if not run.closed]
            raise AssertionError(f"these do not go on: {unfinished}; read so far: {unread}") from None
        assert all(run.closed for run in self.runs.values()), "a log has no end"
        await until(self._nothing_is_held)
        runs = await self._listed()
        for run in runs:
            await self._check_run(run)
        assert {run.run_id for run in self.runs.values() if run.frames} <= {run["run_id"] for run in runs}
        for session in {run["session_id"] for run in runs} | set(self.sessions):
            await self._check_session(session, runs)
        for run in runs:
            if run["response_id"]:
                await self._check_response(run["response_id"], run)
        self._check_effects()
        for asked in self.requests.values():
            if asked.key:
                await self._check_keyed(asked)

    async def _listed(self) -> list[Json]:
        data, cursor = [], ""
        while True:
            page = await self.gateway.get(f"/v1/runs?limit=200{cursor}")
            data += page["data"]
            if page["next_cursor"] is None:
                return data
            cursor = f"&cursor={page['next_cursor']}"

    def _nothing_is_held(self) -> bool:
        with closing(sqlite3.connect(self.gateway.folder / "state.db", timeout=30)) as db:
            holders = [
                holder for (holder,) in db.execute("SELECT holder FROM leases WHERE name <> ''") if not is_gone(holder)
            ]
            if not holders:
                assert db.execute("SELECT count(*) FROM run_partials").fetchone() == (0,), "open text without a run"
                is_sound(db)
            return not holders

    async def _check_run(self, record: Json) -> None:
        run_id = record["run_id"]
        async with self.gateway.client.get(f"/v1/runs/{run_id}/events") as response:
            text = await response.read()
        *blocks, closing_, nothing = text.split(b"\n\n")
        assert (closing_, nothing) == (CLOSED, b"")
        run = self.runs.get(run_id)
        if run is None:  # its client never learnt its number
            plan, goes_on = await self._plan_of(record)
            run = self.runs[run_id] = Run(run_id, plan, goes_on, closed=True)
        assert not run.whole or run.whole == blocks, "a log has changed after its end"
        run.whole = blocks
        check_log(run, record, self.cut)
        await self._check_rows(run, record)

    async def _plan_of(self, record: Json) -> tuple[Plan, bool]:
        """What a run was to do; one that was never begun was to do nothing."""
        rows = await self._rows(record["session_id"]) if record["started_at"] else []
        contents = [row["content"] for row in rows if (row["run_id"], row["role"]) == (record["run_id"], "user")]
        pairs = [(asked.plan, asked.goes_on) for asked in self.requests.values() if [asked.plan.message] == contents]
        assert len(pairs) == bool(record["started_at"])
        return pairs[0] if pairs else (Plan("none", ()), False)

    async def _rows(self, session: str) -> list[Json]:
        data: list[Json] = (await self.gateway.get(f"/api/sessions/{session}/messages?limit=2000"))["data"]
        return data

    async def _check_rows(self, run: Run, record: Json) -> None:
        rows = [row for row in await self._rows(record["session_id"]) if row["run_id"] == run.run_id]
        contents = [row["content"] for row in rows if row["role"] == "assistant" and not row["synthetic"]]
        events = [data_of(block) for block in run.whole]
        assert contents == [event["content"] for event in events if event["event"] == "message.completed"]
        results = {row["tool_call_id"]: row["content"] for row in rows if row["role"] == "tool"}
        ended = {e["tool_call_id"]: e["result"] for e in events if e["event"] == "tool.completed"}
        assert ended.items() <= results.items()

    async def _check_session(self, session: str, runs: list[Json]) -> None:
        rows, known = await self._rows(session), self.sessions.get(session, [])
        assert rows[: len(known)] == known, "messages that were read are not there, or are others"
        self.sessions[session] = rows
        check_order(rows)

    async def _check_response(self, response_id: str, run: Json) -> None:
        """A response follows its run, and is a moment behind it."""
        payload: Json = {"status": "queued"}
        async with asyncio.timeout(TAKEN_UP_S):
            while payload["status"] in ("queued", "in_progress"):
                payload = await self.gateway.get(f"/v1/responses/{response_id}")
        assert payload["status"] == {"cancelled": "incomplete"}.get(run["status"], run["status"])
        assert self.responses.setdefault(response_id, payload) == payload, "a response has changed after its end"

    def _check_effects(self) -> None:
        file = self.gateway.folder / "workspace" / EFFECTS
        lines = Counter(file.read_text().split() if file.exists() else ())
        assert [line for line, times in lines.items() if times > 1] == [], "an effect was had twice"
        for run in self.runs.values():
            events = [data_of(block) for block in run.whole]
            tool_call_ids = {
                e["tool_call_id"] for e in events if e["event"] == "tool.started" and e["tool"] == "terminal"
            }
            ended = {e["tool_call_id"]: e["status"] for e in events if e["event"] == "tool.completed"}
            for call_id in run.plan.effects if run.whole else ():
                assert lines[call_id] <= (call_id in tool_call_ids), f"{call_id} took effect without being on record"
                assert lines[call_id] or ended.get(call_id) != "ok", f"{call_id} is told as done"

    async def _check_keyed(self, asked: Asked) -> None:
        async with asked.post(self.gateway.client) as response:
            now = response.status, await response.read()
            if response.status == 503:
                assert json.loads(now[1])["error"]["code"] == "server_restarted"
                if response.headers.get("x-should-retry") == "true":
                    return  # nothing of it had begun
                assert asked.answer is None or asked.answer[0] == 503, "an answer that was given is gone"
                ended = data_of(self.runs[response.headers["X-Hermes-Run-Id"]].whole[-1])
                assert ended["error_code"] == "server_restarted", "a turn that was taken up is to be joined"
            elif asked.answer is None:  # nobody had begun it, or its answer was made and did not arrive
                run_id = response.headers["X-Hermes-Run-Id"]
                self.runs.setdefault(run_id, Run(run_id, asked.plan, goes_on=True))
            else:
                assert response.headers["Idempotency-Replayed"] == "true"
        assert asked.answer in (None, now), "a key was answered in two ways"
        asked.answer = now


def check_log(run: Run, record: Json, cut: tuple[str, str]) -> None:
    """One order, one end, texts that only ever grow; and what a reader has seen is what there is."""
    whole = {number_of(block): block for block in run.whole}
    numbers = [number_of(block) for block in run.whole]
    assert all(a < b for a, b in pairwise(numbers)), "not in order"
    events = [data_of(block) for block in run.whole]
    assert [e["event"] for e in events if e["event"] in FINAL] == [events[-1]["event"]], "not one end"
    check_texts(events, lost=False)
    for number, block in run.frames.items():
        if number not in whole:
            kind, later = data_of(block)["event"], min((n for n in numbers if n > number), default=None)
            lost = later is not None and later // RESUME_SEQ_STEP > number // RESUME_SEQ_STEP
            assert kind == "tool.output" or (kind in VOLATILE and lost), f"lost: {block!r}"
        else:
            assert whole[number] == block, "read again, it is another"
    if run.frames:
        assert {n for n in numbers if n > min(run.frames)} <= set(run.frames), "a reader missed something"
        check_texts([data_of(block) for block in run.frames.values()], lost=True)
    for kind in ("tool.started", "tool.completed"):
        calls = Counter(e["tool_call_id"] for e in events if e["event"] == kind and e["tool"] == "terminal")
        assert set(calls.values()) <= {1}, f"{kind} twice"
    check_end(run, record, events, cut)


def check_texts(events: list[Json], *, lost: bool) -> None:
    """Texts put together from their pieces; what a reader saw and a crash has lost is written anew over it."""
    texts: dict[str, str] = defaultdict(str)
    for event in events:
        if event["event"] == "message.delta":
            text, at = texts[event["message_id"]], event["offset"]
            assert at == len(text) or (lost and at < len(text)), "a piece is missing"
            texts[event["message_id"]] = text[:at] + event["delta"]
        if event["event"] == "message.completed":
            text, whole = texts[event["message_id"]], event["content"]
            assert text == whole or (lost and text.startswith(whole)), "a text is not the sum of its pieces"


def check_end(run: Run, record: Json, events: list[Json], cut: tuple[str, str]) -> None:
    """A turn that goes on without its client has done all it was asked for; another may say that it was cut off."""
    end, contents = events[-1], [e["content"] for e in events if e["event"] == "message.completed"]
    assert (record["status"], record["last_event"]) == (end["event"].removeprefix("run."), end["event"])
    # What was not submitted may have been cut off before any of it was on record.
    submitted = run.submitted or len(events) > 1
    if (run.goes_on and submitted) or end["event"] == "run.completed":
        assert (end["event"], contents, end.get("output")) == ("run.completed", run.plan.texts, run.plan.texts[-1]), end
        calls = [c.id for step in range(len(run.plan.steps)) for c in run.plan.calls(step)]
        assert sorted(e["tool_call_id"] for e in events if e["event"] == "tool.completed") == sorted(calls)
    else:
        assert (end["event"], end.get("error_code") or end.get("reason")) == cut, end


def check_order(rows: list[Json]) -> None:
    """A user's message, messages with calls and their results, and an answer; then the next one."""
    waiting: set[str] = set()
    before = "assistant"
    for row in rows:
        role = row["role"]
        if role == "tool":
            assert row["tool_call_id"] in waiting, "a result without its call"
            waiting.remove(row["tool_call_id"])
        else:
            assert not waiting, f"calls without results: {waiting}"
            assert role != "user" or before == "assistant", f"{role} after {before}"
            assert role != "assistant" or before in ("user", "tool"), rows
            waiting = {call["id"] for call in row["tool_calls"] or ()}
        before = role
    assert not waiting and before == "assistant"
