"""`make bench`: what Hermes costs beside a bare relay, and on a large database. `--quick` takes a minute, keeps nothing."""

from __future__ import annotations

import argparse
import os
import resource
import time

import uvloop

from bench import cluster, postgres, serving, state, workers, writes
from bench.results import keep, show
from bench.servers import OTHER_CORE

FILES_WANTED = 16_384
PARTS = {
    "serving": serving.measure,
    "state": state.measure,
    "workers": workers.measure,
    "writes": writes.measure,
    "postgres": postgres.measure,
    "cluster": cluster.measure,
}


def busy_s() -> tuple[float, float]:
    """Seconds that all programs and the machine's host have taken of its cores, and those that are ours."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, _, _, stolen, *_ = map(int, file.readline().split()[1:])
    own = os.times()
    ours = own.user + own.system + own.children_user + own.children_system
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK"), ours


def main() -> None:
    """Measure what is asked for, or everything."""
    parser = argparse.ArgumentParser(prog="bench")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="|".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if most == resource.RLIM_INFINITY else min(FILES_WANTED, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    os.sched_setaffinity(0, {OTHER_CORE})
    for part in args.parts or PARTS:
        started_at, before = time.perf_counter(), busy_s()
        figures = uvloop.run(PARTS[part](args.quick))
        passed, (total, ours) = time.perf_counter() - started_at, (n - m for n, m in zip(busy_s(), before, strict=True))
        others = max(0.0, total - ours) / passed
        print(f"{part}: {passed:.0f} s, in which other programs used {others:.2f} of a core")
        show(figures)
        if not args.quick:
            keep(part, figures, others)


main()
