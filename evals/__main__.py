"""`make eval-local`: every request carried out for real in a folder of its own, with the model that is installed."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from evals.requests import FILES, KINDS, TARGETS, Check, Done
from hermes.app import App, new_loop
from hermes.core.home import Home, resolve
from hermes.core.spec import RouteChoice, RunSpec
from hermes.local import model_file, status
from hermes.settings import config

COLD_S_MAX, WARM_S_MAX = 8.0, 1.5
_VERDICT = {True: "  ok ", False: "WRONG"}


class Figures:
    """Times of the model's answers."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.tokens: list[float] = []


async def asked(app: App, question: str, figures: Figures) -> Done:
    """One request in a folder of its own."""
    session = f"eval_{time.monotonic_ns()}"
    folder = app.home.workspace
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    spec = RunSpec(
        question, session_id=session, route=RouteChoice(provider="local"), answerable=False, max_iterations=6
    )
    done, began, first = Done([], "", folder), 0.0, 0.0
    await app.engine.start(spec)
    async for event in app.engine.subscribe(spec.run_id):
        if event.type == "model.started":
            began, first = time.monotonic(), 0.0
        elif event.type in ("text.delta", "tool.drafted") and not first:
            first = time.monotonic() - began
            figures.first.append(first)
        elif event.type == "tool.started":
            done.calls.append((event.data["name"], event.data["args"]))
        elif event.type == "usage" and event.data["output_tokens"] > 5 and first:
            seconds = time.monotonic() - began - first
            figures.tokens.append(event.data["output_tokens"] / max(seconds, 0.01))
        if event.type == "text.delta":
            done.answer += event.data["text"]
    return done


def emptied(folder: Path) -> None:
    """Nothing of the last request is left."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


async def measure(model: Path, kinds: list[str], verbose: bool) -> bool:
    """All requests of some kinds; whether the targets are met."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["HERMES_LOCAL_MODEL"] = str(model)
        app = App(Home(Path(home)), config.load(Home(Path(home))))
        app.home.workspace.mkdir(parents=True)
        figures, right, met = Figures(), {}, True
        for kind in kinds:
            results = []
            for question, check in KINDS[kind]:
                emptied(app.home.workspace)
                results.append(await one(app, question, check, figures, verbose))
            share = sum(results) / len(results)
            right[kind] = f"{sum(results)} of {len(results)} ({share:.0%}, wanted {TARGETS[kind]:.0%})"
            met &= share >= TARGETS[kind]
        await app.close()
    for kind, text in right.items():
        print(f"{kind:12}{text}")
    cold, warm = figures.first[0], statistics.median(figures.first[1:])
    print(
        f"first token {cold:5.1f} s cold (wanted {COLD_S_MAX:g}, loading included), {warm:.1f} s warm (wanted {WARM_S_MAX:g})"
    )
    print(f"speed       {statistics.median(figures.tokens):5.1f} tokens/s")
    return met


async def one(app: App, question: str, check: Check, figures: Figures, verbose: bool) -> bool:
    """One request; whether it ended right."""
    done = await asked(app, question, figures)
    good = check(done)
    if verbose or not good:
        calls = " ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in done.calls)
        print(f"{_VERDICT[good]} {question}\n        {calls[:300]}\n        {done.answer[:300]!r}", flush=True)
    return good


def main() -> int:
    """Run it; exit 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="evals")
    parser.add_argument("kinds", nargs="*", help=", ".join(KINDS))
    parser.add_argument("-v", "--verbose", action="store_true", help="show every request")
    args = parser.parse_args()
    home = resolve()
    settings = config.load(home)
    if problem := status(home, settings)["problem"]:
        print(problem, file=sys.stderr)
        return 3
    model = model_file(home, settings)
    assert model is not None
    loop = new_loop()
    try:
        met = loop.run_until_complete(measure(model.resolve(), args.kinds or list(KINDS), args.verbose))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
    return 0 if met else 1


sys.exit(main())
