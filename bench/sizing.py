"""How many cells, replicas and servers a number of runs needs, by the costs that the bench has measured.

A cell is one PostgreSQL, its NATS servers and its replicas. Owners are spread over the cells, and cells share nothing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from bench.results import FILE
from hermes.core.limits import REPLICA_SCAN_S

# Replicas of a cell: each has up to 28 connections to PostgreSQL, and each hears the counts of all others.
REPLICAS_MAX = 64
# The share of a core, or of an engine, that a plan uses on average, and up to which a replica takes runs.
PLANNED, LIMIT = 0.6, 0.8


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU time, measured on one machine; the defaults are those of docs/scaling.md."""

    token_us: float = 112.0  # at the replica that has the run
    foreign_token_us: float = 102.0  # at the replica of a foreign viewer
    nats_token_us: float = 28.0
    turn_ms: float = 3.1  # at the replica
    postgres_turn_ms: float = 1.1
    postgres_stream_ms: float = 0.1  # for a second of a stream: its lease is renewed; its text is in the journal
    look_row_us: float = 7.0  # of a replica's look for left runs, for each run without an end
    count_row_us: float = 0.79  # of the counts of a submitted run, for each run without an end

    @classmethod
    def measured(cls, file: Path = FILE) -> Costs:
        """Those of the last full bench, and the defaults for what is not there."""
        parts = json.loads(file.read_text()) if file.exists() else {}
        rows = {
            (part, row["name"]): row["found"][1]
            for part in ("postgres", "cluster")
            for row in parts.get(part, {}).get("figures", ())
        }
        names = {
            "token_us": ("cluster", "100 streams of 20/s, CPU per token", 1.0),
            "foreign_token_us": ("cluster", "the same, a lone foreign viewer's", 1.0),
            "nats_token_us": ("cluster", "the same, NATS", 1.0),
            "postgres_stream_ms": ("cluster", "the same, PostgreSQL", 1.0),
            "turn_ms": ("postgres", "the same, CPU of the server per turn", 1.0),
            "postgres_turn_ms": ("postgres", "the same, CPU of PostgreSQL per turn", 1.0),
            "look_row_us": ("cluster", "a replica's look for left runs, 10,000 without an end", 0.1),
            "count_row_us": ("cluster", "the counts of a submitted run, 10,000 without an end", 0.1),
        }
        costs = {key: rows[part, name] * by for key, (part, name, by) in names.items() if (part, name) in rows}
        return cls(**costs)


@dataclass(frozen=True, slots=True)
class Load:
    """Runs at once, on average, and what each does."""

    runs: int
    run_s: float = 60.0
    turns: int = 3  # steps of a run that are put on record
    tokens_per_s: float = 20.0
    foreign_share: float = 0.5  # of runs that are watched at another replica

    @property
    def arrivals_per_s(self) -> float:
        return self.runs / self.run_s


@dataclass(frozen=True, slots=True)
class Design:
    """Where the load is carried. `indexed_looks`: looks for left runs read those that were left, and counts of an owner are
    kept; Hermes reads all."""

    postgres_cores: int = 16
    nats_cores: int = 8
    indexed_looks: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What a load needs; everything but `cells` is of one cell."""

    cells: int
    runs: float
    replicas: int
    inflight_max: int
    nats_nodes: int
    # Share of PostgreSQL's cores that is used beside submitting, taking and ending runs.
    postgres_load: float
    nats_load: float


def replica_core_s(load: Load, costs: Costs) -> float:
    """Of a second of a run."""
    tokens_us = load.tokens_per_s * (costs.token_us + load.foreign_share * costs.foreign_token_us)
    return tokens_us / 1e6 + load.turns * costs.turn_ms / 1e3 / load.run_s


def postgres_core_s(load: Load, costs: Costs, design: Design, runs: float, replicas: int) -> float:
    """Of a second of a cell with so many runs."""
    total = runs * (load.turns * costs.postgres_turn_ms / load.run_s + costs.postgres_stream_ms) / 1e3
    if not design.indexed_looks:
        total += replicas / REPLICA_SCAN_S * runs * costs.look_row_us / 1e6
        total += runs / load.run_s * runs * costs.count_row_us / 1e6
    return total


def plan(load: Load, costs: Costs, design: Design) -> Plan:
    """The fewest cells that are small enough, and whose PostgreSQL is used no more than planned."""
    per_run = replica_core_s(load, costs)
    inflight_max = max(1, math.floor(LIMIT / per_run))
    cells = 1
    while True:
        runs = load.runs / cells
        replicas = math.ceil(runs * per_run / PLANNED) + 1  # one more, so that one may be away
        used = postgres_core_s(load, costs, design, runs, replicas) / design.postgres_cores
        if used <= PLANNED and replicas <= REPLICAS_MAX:
            break
        cells += 1
    nats_core_s = runs * load.tokens_per_s * costs.nats_token_us / 1e6
    nats_nodes = max(3, math.ceil(nats_core_s / design.nats_cores / PLANNED))
    return Plan(cells, runs, replicas, inflight_max, nats_nodes, used, nats_core_s / design.nats_cores / nats_nodes)
