"""The simulation of many runs: it repeats for a seed, loses no run, starts none twice, and shows what the limits promise."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.simulate import BURST_AT_S, DEATH_AT_S, DESIGNS, Cell, simulate
from bench.sizing import Costs, Design, Load, plan

REPOSITORY = Path(__file__).parents[2]
COSTS, DESIGN, LOAD = Costs(), Design(), Load(600)
SIZES = plan(LOAD, COSTS, DESIGN)


def test_simulation_repeats_for_a_seed() -> None:
    first, second, other = (simulate(LOAD, SIZES, COSTS, DESIGN, seed) for seed in (1, 1, 2))
    assert first == second
    assert first != other


@pytest.mark.parametrize("seconds", [BURST_AT_S + 0.01, DEATH_AT_S + 27])
def test_simulated_runs_are_neither_lost_nor_started_twice(seconds: float) -> None:
    cell = Cell(LOAD, SIZES, COSTS, DESIGN, "seed")
    outcome = cell.simulate(seconds)
    assert outcome.arrived == outcome.ended + outcome.unfinished
    queued = [number for queue in cell.queues.values() for number in queue]
    numbers = [number for numbers in cell.held for number in numbers]
    assert sorted([*cell.submitting, *queued, *cell.taking, *numbers, *cell.orphans]) == sorted(cell.runs)
    assert outcome.ended > 0


def test_scaling_document_has_the_measured_costs_and_the_plans_they_make() -> None:
    """After a new bench: write the figures of `python -m bench.simulate` into docs/scaling.md."""
    text, costs = (REPOSITORY / "docs" / "scaling.md").read_text(), Costs.measured()
    rows = [
        ("a token at the replica that has the run, at 20 tokens a second", costs.token_us, "µs"),
        ("", costs.foreign_token_us, "µs"),
        ("the same token at NATS", costs.nats_token_us, "µs"),
        ("a plain turn at PostgreSQL", costs.postgres_turn_ms, "ms"),
        ("a replica's look for left runs, every 5 s", costs.look_row_us, "µs"),
        ("the counts by owner, for every submitted run", costs.count_row_us, "µs"),
    ]
    missing = [f"| {cost:.2g} {unit}" for name, cost, unit in rows if f"{name} | {cost:.2g} {unit}" not in text]
    for runs in (10_000, 1_000_000):
        for name, design in DESIGNS.items():
            sizes = plan(Load(runs), costs, design)
            counts = [sizes.cells, sizes.cells * sizes.replicas, sizes.cells * sizes.nats_nodes]
            row = " | ".join([f"{runs:,}, {name}", *(f"{count:,}" for count in counts), f"{sizes.postgres_load:.2f}"])
            missing += [row] if f"| {row} |" not in text else []
    assert not missing
