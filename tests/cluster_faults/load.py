"""Mixed load on all surfaces: turns that are asked for at one replica, controlled at another and viewed at all of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from crash.plans import WAYS, Plan, Way, answer
from crash.witness import Run
from support.gateway import CUT
from support.model_server import Reply, Request

from .cluster import ENDED_S, REPLICAS, TRY_S, Answer, Cluster, Json, spread

# Long enough to be hit in the middle.
_GAP_S = 0.03
OK = (200, 201, 202)
_ENDED = ("completed", "failed", "cancelled")
_PLAIN = ("chat", "chat stream", "response", "response detached", "session", "session stream")


def model(request: Request) -> Reply:
    return replace(answer(request), gap_s=_GAP_S)


@dataclass(eq=False)
class Turn:
    """One turn, what its clients were answered, and what viewers at each replica have seen of it."""

    plan: Plan
    kind: str
    session: str = ""
    key: str = ""
    run_id: str = ""
    response_id: str = ""
    # Answers of 2xx that came to their end.
    answers: list[Answer] = field(default_factory=list)
    refusals: list[Answer] = field(default_factory=list)
    # Runs under its key of which no more than the number was ever given out.
    former_runs: list[str] = field(default_factory=list)
    stopped: bool = False
    left: bool = False
    views: list[Run] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether it goes on without its client."""
        return bool(self.key) or self.kind == "job" or WAYS[self.kind].goes_on

    @property
    def acknowledged(self) -> bool:
        """Whether it was promised to be carried out."""
        submitted = self.kind == "job" or WAYS[self.kind].submitted
        return submitted and any(answer.status in OK for answer in self.answers)


class Load:
    """Asks for turns, at random, and follows what becomes of them."""

    def __init__(self, cluster: Cluster, chance: random.Random | None = None) -> None:
        self._cluster, self._chance = cluster, chance or random.Random(1)
        self.turns: list[Turn] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self._count = 0
        # Completed responses, to be continued.
        self.responses: list[str] = []

    @property
    def frames_read(self) -> int:
        return sum(len(view.frames) for turn in self.turns for view in turn.views)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.create_task(work))

    def begin(self, turns: int) -> None:
        """Ask for so many turns, of kinds that are drawn."""
        chance = self._chance
        for _ in range(turns):
            self._count += 1
            name = f"n{self._count}"
            draw = chance.random()
            if draw < 0.12:
                self.add(Turn(Plan(name, ("a", "c")), "run", key=name), self._approve)
            elif draw < 0.24:
                self.add(Turn(Plan(name, ("w",)), "run", key=name), self._stop)
            elif draw < 0.34:
                self.add(Turn(Plan(name, ("cs", "c")), "run", key=name), self._steer)
            elif draw < 0.40:
                self.add(Turn(Plan(name, ("q",)), "run", key=name), self._clarify)
            elif draw < 0.48:
                self.add(Turn(Plan(name, ("c",)), "job", key=name))
            elif draw < 0.60:
                kind = chance.choice(["run", "response background"])
                self.add(Turn(Plan.random(name, chance), kind, key=name))
            else:
                key = name if chance.random() < 0.4 else ""
                self.add(Turn(Plan.random(name, chance), chance.choice(_PLAIN), session=f"s-{name}", key=key))

    def leave(self) -> None:
        """Ask for a turn, and leave in the middle of its answer."""
        self._count += 1
        turn = Turn(Plan(f"n{self._count}", ("c", "c")), self._chance.choice(["chat stream", "response"]), left=True)
        self.add(turn)

    def add(self, turn: Turn, then: Any = None) -> None:
        self.turns.append(turn)
        self.spawn(self._carry_out(turn, then, random.Random(self._chance.random())))

    async def _carry_out(self, turn: Turn, then: Any, chance: random.Random) -> None:
        if "session" in turn.kind:
            await self._open_session(turn, chance)
        at = spread(chance)
        if turn.kind == "job":
            await self._run_job(turn, at)
        elif turn.key:
            # Two replicas are asked at once; each again until it has an answer.
            await asyncio.gather(*(self._post_until_answered(turn, at + number) for number in range(2)))
        else:
            with contextlib.suppress(*CUT, TimeoutError):
                await self._post(turn, at)
        if then is not None and turn.run_id:
            await then(turn, at + 1)

    async def _open_session(self, turn: Turn, chance: random.Random) -> None:
        response = await self._cluster.ask("POST", "/api/sessions", {"id": turn.session}, at=spread(chance))
        assert response.status in (201, 409), response

    # --- asking -----------------------------------------------------------------------------------------------------

    async def _post_until_answered(self, turn: Turn, at: int) -> None:
        async with asyncio.timeout(ENDED_S):
            while True:
                with contextlib.suppress(*CUT, TimeoutError):
                    if (response := await self._post(turn, at)) is not None and response.status != 503:
                        return
                at += 1
                await asyncio.sleep(0.05)

    async def _post(self, turn: Turn, at: int) -> Answer | None:
        way: Way = WAYS[turn.kind]
        headers = dict(way.headers) | ({"Idempotency-Key": turn.key} if turn.key else {})
        path, body = way.path.format(session=turn.session), way.body(turn.plan.message)
        if turn.kind.startswith("response") and self.responses and not turn.key:
            body["previous_response_id"] = self.responses[-1]
        url = f"{self._cluster.replicas[at % REPLICAS].url}{path}"
        async with asyncio.timeout(ENDED_S), self._cluster.http.post(url, json=body, headers=headers) as response:
            if (run_id := response.headers.get("X-Hermes-Run-Id")) and response.status in OK:
                self._viewed(turn, run_id)
            if turn.left:
                await response.content.readany()
                return None
            answer = Answer(response.status, dict(response.headers), await response.read())
        (turn.answers if answer.status in OK else turn.refusals).append(answer)
        if turn.kind.startswith("response") and answer.status in OK and turn.kind != "response":
            turn.response_id = json.loads(answer.body)["id"]
        return answer

    async def _run_job(self, turn: Turn, at: int) -> None:
        body = {"schedule": "every 24h", "prompt": turn.plan.message, "name": turn.plan.name}
        response = await self._cluster.ask(
            "POST", "/api/jobs", body, at=at, headers={"Idempotency-Key": f"make-{turn.key}"}
        )
        assert response.status == 201, response
        job = json.loads(response.body)["job"]
        path, headers = f"/api/jobs/{job['id']}/run", {"Idempotency-Key": turn.key}
        answer = await self._cluster.ask("POST", path, {}, at=at + 1, headers=headers)
        assert answer.status == 202, answer
        turn.answers.append(answer)
        self._viewed(turn, json.loads(answer.body)["run_id"])

    # --- viewing ----------------------------------------------------------------------------------------------------

    def _viewed(self, turn: Turn, run_id: str) -> None:
        if turn.run_id != run_id:
            if turn.run_id:
                turn.former_runs.append(turn.run_id)
            turn.run_id = run_id
            turn.views = [Run(run_id, turn.plan, turn.goes_on) for _ in self._cluster.replicas]
            for at, view in enumerate(turn.views):
                self.spawn(self._view(view, at))

    async def _view(self, view: Run, at: int) -> None:
        """Read a run to its end; where the connection is lost, at the next replica from where the viewer stands."""
        missing = 0
        while not view.closed:
            headers, buffer = {"Last-Event-ID": str(view.last)} if view.last else {}, b""
            url = f"{self._cluster.replicas[at % REPLICAS].url}/v1/runs/{view.run_id}/events"
            with contextlib.suppress(*CUT, TimeoutError):
                async with self._cluster.http.get(url, headers=headers) as response:
                    if response.status == 404:
                        missing += 1  # the head of its answer came a moment before it was on record
                        assert not view.frames, "a run that was seen is gone"
                        if missing > 40:
                            view.closed = True
                    elif response.status == 200:
                        async for chunk in response.content.iter_any():
                            *blocks, buffer = (buffer + chunk).split(b"\n\n")
                            for block in blocks:
                                view.take(block)
            at += 1
            await asyncio.sleep(0.05)

    # --- controlling ------------------------------------------------------------------------------------------------

    async def _state(self, turn: Turn, at: int, *wanted: str) -> Json:
        """The run once it has one of these states, or has ended."""
        async with asyncio.timeout(ENDED_S):
            while True:
                answer = await self._cluster.ask("GET", f"/v1/runs/{turn.run_id}", at=at)
                assert answer.status == 200, answer
                record: Json = json.loads(answer.body)
                if record["status"] in (*wanted, *_ENDED):
                    return record
                await asyncio.sleep(0.1)

    async def _approve(self, turn: Turn, at: int) -> None:
        while (await self._state(turn, at, "waiting_for_approval"))["status"] not in _ENDED:
            answer = await self._cluster.ask("POST", f"/v1/runs/{turn.run_id}/approval", {"choice": "once"}, at=at)
            assert answer.status in (200, 409), answer
            await asyncio.sleep(0.2)

    async def _clarify(self, turn: Turn, at: int) -> None:
        while (await self._state(turn, at, "waiting_for_input"))["status"] not in _ENDED:
            answer = await self._cluster.ask(
                "POST", f"/v1/runs/{turn.run_id}/clarify", {"answer": "The red one."}, at=at
            )
            assert answer.status in (200, 409), answer
            await asyncio.sleep(0.2)

    async def _stop(self, turn: Turn, at: int) -> None:
        await self._state(turn, at, "running")
        await asyncio.sleep(0.5)
        turn.stopped = True
        answer = await self._cluster.ask("POST", f"/v1/runs/{turn.run_id}/stop", {}, at=at)
        assert answer.status in (200, 409), answer

    async def _steer(self, turn: Turn, at: int) -> None:
        await self._state(turn, at, "running")
        answer = await self._cluster.ask("POST", f"/v1/runs/{turn.run_id}/steer", {"text": "Be brief."}, at=at)
        assert answer.status in (202, 409), answer

    # --- ending -----------------------------------------------------------------------------------------------------

    async def wait_for_end(self) -> list[Turn]:
        """Wait until everybody has seen the end of what was asked for; those turns."""
        until = asyncio.get_running_loop().time() + ENDED_S + TRY_S
        while self.tasks:
            left_s = until - asyncio.get_running_loop().time()
            result, _ = await asyncio.wait(self.tasks, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
            self.tasks -= result
            for task in result:
                task.result()
            assert result, "these do not come to their end"
        turns, self.turns = self.turns, []
        return turns

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    def open_turns(self) -> str:
        views = [(turn, at, view) for turn in self.turns for at, view in enumerate(turn.views)]
        open_views = [
            f"{turn.run_id} {turn.kind} {turn.plan}, view {at}: {view.last}"
            for turn, at, view in views
            if not view.closed
        ]
        unanswered = [f"{turn.kind} {turn.plan} {turn.run_id}" for turn in self.turns if not turn.answers]
        return "\n".join(["viewed:", *open_views, "without an answer:", *unanswered])
