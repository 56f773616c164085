"""`python -m bench.simulate`: queueing delay and take-over time with 10,000 and 1,000,000 runs at once, by simulation.

Each cell (`sizing.py`) is simulated by itself, event by event, from a steady state on: in its time one owner submits a burst of
runs, and one replica dies. Numbers repeat for a seed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from bench.results import at
from bench.sizing import Costs, Design, Load, Plan, plan
from hermes.core.limits import LEASE_RENEW_S, LEASE_TTL_S, REPLICA_SCAN_S

BURST_AT_S, BURST_SEEN_S, DEATH_AT_S, RESTART_S, SECONDS = 5.0, 45.0, 50.0, 10.0, 95.0
# What one owner of a cell submits at once, by the free capacity of the cell; and how many runs an owner has on average.
BURST, RUNS_PER_OWNER = 1.5, 20
CELLS_MAX = 16
DESIGNS = {
    "as it is": Design(),
    "counts and looks by index": Design(indexed_looks=True),
}


class Server:
    """An engine whose cores share one line, as fast as what else it does leaves it."""

    def __init__(self, service_s: float, cores: int, background: float) -> None:
        self._service_s = service_s / (1 - min(0.95, background))
        self._cores = cores
        self._line_s = 0.0  # when all that has come so far is begun

    def use(self, now: float) -> float:
        """When it has done one thing more."""
        begins = max(now, self._line_s)
        self._line_s = begins + self._service_s / self._cores
        return begins + self._service_s


@dataclass(slots=True)
class Run:
    owner: int
    arrived_at: float
    run_s: float
    replica: int | None = None
    ends_at: float = 0.0
    # An end that was planned before a take-over is none.
    epoch: int = 0


@dataclass(slots=True)
class Outcome:
    """Waits are seconds from the request to the start: of usual runs, and of both sides of a burst of one owner."""

    waits: list[float] = field(default_factory=list)
    waits_beside_burst: list[float] = field(default_factory=list)
    waits_of_burst: list[float] = field(default_factory=list)
    take_overs: list[float] = field(default_factory=list)
    arrived: int = 0
    ended: int = 0
    unfinished: int = 0

    def add(self, other: Outcome) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


class Cell:
    def __init__(self, load: Load, sizes: Plan, costs: Costs, design: Design, seed: str) -> None:
        self._plan, self._rng, self._run_s = sizes, random.Random(seed), load.run_s
        self._resume_s = costs.turn_ms / 1e3
        self._postgres = Server(costs.postgres_turn_ms / 1e3, design.postgres_cores, sizes.postgres_load)
        self._nats = Server(costs.nats_token_us / 1e6, design.nats_cores * sizes.nats_nodes, sizes.nats_load)
        self._events: list[tuple[float, int, Callable[[float, int, int], None], int, int]] = []
        self._event_number = 0
        self._arrivals_per_s = sizes.runs / load.run_s
        self._owners = max(10, round(sizes.runs / RUNS_PER_OWNER))
        # A run is in exactly one of these, but for `runs`.
        self.submitting: set[int] = set()
        self.queues: dict[int, deque[int]] = defaultdict(deque)
        self.taking: set[int] = set()
        self.held: list[set[int]] = [set() for _ in range(sizes.replicas)]
        self.orphans: dict[int, None] = {}
        self.runs: dict[int, Run] = {}
        self._used = [0] * sizes.replicas
        self._at_work: Counter[int] = Counter()
        self._dead: set[int] = set()
        self._to_resume: dict[int, deque[int]] = {}
        self.outcome = Outcome()

    def simulate(self, seconds: float = SECONDS) -> Outcome:
        for number in range(round(self._plan.runs)):
            self._take_up(self._new_run(self._any_owner(), 0.0), number % self._plan.replicas)
        for number, run in self.runs.items():
            self._start(0.0, number, run.replica or 0)
        self._schedule(self._next_arrival(0.0), self._arrive, -1)
        free = self._plan.replicas * self._plan.inflight_max - self._plan.runs
        for _ in range(int(BURST * free)):
            self._schedule(BURST_AT_S, self._arrive, self._owners)  # an owner that has nothing else
        self._schedule(DEATH_AT_S, self._die, self._rng.randrange(self._plan.replicas))
        while self._events[0][0] <= seconds:
            now, _, work, first, second = heapq.heappop(self._events)
            work(now, first, second)
        queued = sum(map(len, self.queues.values()))
        parts = len(self.submitting), queued, len(self.taking), sum(map(len, self.held)), len(self.orphans)
        assert sum(parts) == len(self.runs), f"runs were lost: {parts} of {len(self.runs)}"
        self.outcome.unfinished = len(self.runs)
        return self.outcome

    def _schedule(self, when: float, work: Callable[[float, int, int], None], first: int = 0, second: int = 0) -> None:
        self._event_number += 1
        heapq.heappush(self._events, (when, self._event_number, work, first, second))

    def _next_arrival(self, now: float) -> float:
        return now + self._rng.expovariate(self._arrivals_per_s)

    def _any_owner(self) -> int:
        """A few owners have most of the runs."""
        return int(self._owners * self._rng.random() ** 3)

    def _new_run(self, owner: int, now: float) -> int:
        self.outcome.arrived += 1
        self.runs[self.outcome.arrived] = Run(owner, now, self._rng.expovariate(1 / self._run_s))
        return self.outcome.arrived

    # --- a run: submitted, queued, taken, ended ------------------------------------------------------------------

    def _arrive(self, now: float, owner: int, _: int) -> None:
        if owner < 0:
            self._schedule(self._next_arrival(now), self._arrive, -1)
            owner = self._any_owner()
        number = self._new_run(owner, now)
        self.submitting.add(number)
        self._schedule(self._nats.use(self._postgres.use(now)), self._offer, number)

    def _offer(self, now: float, number: int, _: int) -> None:
        self.submitting.remove(number)
        self.queues[self.runs[number].owner].append(number)
        self._take_all(now)

    def _take_all(self, now: float) -> None:
        """Replicas with room take what waits: of the owner with the fewest runs at work, the oldest."""
        while self.queues and (replica := self._free_replica()) is not None:
            owner = min(self.queues, key=lambda one: (self._at_work[one], self.queues[one][0]))
            number = self.queues[owner].popleft()
            if not self.queues[owner]:
                del self.queues[owner]
            self._take_up(number, replica)
            self._schedule(self._postgres.use(now), self._begin, number, replica)

    def _free_replica(self) -> int | None:
        """Of two the less used one: it asks the queue more often. Any other where both are full."""
        count, limit = self._plan.replicas, self._plan.inflight_max
        drawn = sorted((self._rng.randrange(count), self._rng.randrange(count)), key=self._used.__getitem__)
        for replica in itertools.chain(drawn, range(count)):
            if self._used[replica] < limit and replica not in self._dead:
                return replica
        return None

    def _take_up(self, number: int, replica: int) -> None:
        run = self.runs[number]
        assert run.replica is None, "a run is taken twice"
        run.replica = replica
        self._used[replica] += 1
        self._at_work[run.owner] += 1
        self.taking.add(number)

    def _begin(self, now: float, number: int, replica: int) -> None:
        if self.runs[number].replica != replica or number not in self.taking:  # the replica has died meanwhile
            return
        run = self.runs[number]
        waits = self.outcome.waits
        if run.owner == self._owners:
            waits = self.outcome.waits_of_burst
        elif BURST_AT_S <= run.arrived_at < BURST_AT_S + BURST_SEEN_S:
            waits = self.outcome.waits_beside_burst
        waits.append(now - run.arrived_at)
        self._start(now, number, replica)

    def _start(self, now: float, number: int, replica: int) -> None:
        run = self.runs[number]
        self.taking.remove(number)
        self.held[replica].add(number)
        run.ends_at, run.epoch = now + run.run_s, run.epoch + 1
        self._schedule(run.ends_at, self._end, number, run.epoch)

    def _end(self, now: float, number: int, epoch: int) -> None:
        run = self.runs.get(number)
        if run is None or run.epoch != epoch or run.replica is None:
            return
        self._postgres.use(now)
        self.held[run.replica].remove(number)
        self._used[run.replica] -= 1
        self._at_work[run.owner] -= 1
        del self.runs[number]
        self.outcome.ended += 1
        self._take_all(now)

    # --- a replica dies, and others take its runs over -----------------------------------------------------------

    def _die(self, now: float, replica: int, _: int) -> None:
        self._dead.add(replica)
        left = sorted(self.held[replica]) + sorted(one for one in self.taking if self.runs[one].replica == replica)
        self.held[replica].clear()
        self.taking.difference_update(left)
        for number in left:
            run = self.runs[number]
            run.run_s = max(0.0, run.ends_at - now) or run.run_s
            run.replica, run.epoch = None, run.epoch + 1
            self._at_work[run.owner] -= 1
            self.orphans[number] = None
        self._used[replica] = 0
        # A replica renews its leases together.
        expires_at = now - self._rng.uniform(0, LEASE_RENEW_S) + LEASE_TTL_S
        for other in range(self._plan.replicas):
            if other != replica:
                self._schedule(expires_at + self._rng.uniform(0, REPLICA_SCAN_S), self._look, other)
        self._schedule(now + RESTART_S, self._restart, replica)

    def _restart(self, now: float, replica: int, _: int) -> None:
        self._dead.discard(replica)
        self._take_all(now)

    def _look(self, now: float, replica: int, _: int) -> None:
        self._to_resume[replica] = deque(self.orphans)
        self._resume_next(now, replica)

    def _resume_next(self, now: float, replica: int) -> None:
        """One after the other, as far as nobody else has them; `bus.max_inflight` is no limit to this."""
        if self._to_resume[replica]:
            number = self._to_resume[replica].popleft()
            self._schedule(self._postgres.use(now) + self._resume_s, self._resume, replica, number)
        elif self.orphans:
            self._schedule(now + REPLICA_SCAN_S, self._look, replica)

    def _resume(self, now: float, replica: int, number: int) -> None:
        if number in self.orphans:  # else another was first: the lease of the session decides
            del self.orphans[number]
            self._take_up(number, replica)
            self._start(now, number, replica)
            self.outcome.take_overs.append(now - DEATH_AT_S)
        self._resume_next(now, replica)


def simulate(load: Load, sizes: Plan, costs: Costs, design: Design, seed: int) -> Outcome:
    """Of all cells; of many, which are alike and share nothing, some stand for all."""
    outcome = Outcome()
    for number in range(min(CELLS_MAX, sizes.cells)):
        outcome.add(Cell(load, sizes, costs, design, f"{seed}-{number}").simulate())
    return outcome


def show(name: str, load: Load, sizes: Plan, outcome: Outcome, nodes: int) -> None:
    def spread(seconds: Sequence[float], share: float = 0.99) -> str:
        return f"{at(0.5, seconds):.4f} / {at(share, seconds):.4f}" if seconds else "-"

    print(f"{load.runs:,} runs, {name}")
    print(f"  cells (PostgreSQL servers)         {sizes.cells:,}, of {sizes.runs:,.0f} runs each")
    print(f"  replicas                           {sizes.cells * sizes.replicas:,}, {sizes.replicas} in a cell")
    print(f"  NATS servers                       {nodes:,}, {sizes.nats_nodes} in a cell")
    print(f"  bus.max_inflight                   {sizes.inflight_max}")
    print(f"  load of PostgreSQL, of NATS        {sizes.postgres_load:.2f}, {sizes.nats_load:.2f}")
    print(f"  wait for a start, s, p50 / p99     {spread(outcome.waits)}")
    print(f"  beside a burst of one owner        {spread(outcome.waits_beside_burst)}")
    print(f"  of that owner                      {spread(outcome.waits_of_burst)}")
    print(f"  take-over, s, p50 / last           {spread(outcome.take_overs, 1.0)}, {len(outcome.take_overs):,} runs")


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.simulate")
    parser.add_argument("runs", nargs="*", type=int, default=[10_000, 1_000_000])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--design", choices=list(DESIGNS), action="append")
    args = parser.parse_args()
    costs = Costs.measured()
    print(costs)
    for runs in args.runs:
        for name in args.design or DESIGNS:
            load, design, started_at = Load(runs), DESIGNS[name], time.perf_counter()
            sizes = plan(load, costs, design)
            show(name, load, sizes, simulate(load, sizes, costs, design, args.seed), sizes.cells * sizes.nats_nodes)
            cells = min(CELLS_MAX, sizes.cells)
            print(f"  simulated                          {cells} cells in {time.perf_counter() - started_at:.0f} s")


if __name__ == "__main__":
    main()
