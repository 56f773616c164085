"""`make eval-local`: every request carried out for real in a folder of its own, with the model that is installed, by the
bare model (the same tools and the same bound form, no examples and no rules) and by Hermes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import NamedTuple

from evals import development, held_out
from evals.checks import Check, Done, invented
from hermes.app import App, new_loop
from hermes.core.home import Home, resolve
from hermes.core.json_types import JsonObject
from hermes.core.spec import Control, RouteChoice, RunSpec
from hermes.local import model_file, status
from hermes.providers import base, local
from hermes.settings import config
from hermes.tools.framework.toolsets import builtin

KINDS = {**held_out.KINDS, **development.KINDS}
# Only the first call counts in these; a search service is set up.
FIRST_CALL = {"tools", "dev_tools"}
RESULTS = Path(__file__).with_name("results.json")
WAYS = ("bare", "hermes")
# The discard port of this machine: a search is offered, and fails.
_SEARCH_URL = "http://127.0.0.1:9"
_REQUEST_S_MAX = 900.0
_VERDICT = {True: "  ok ", False: "WRONG"}


class Figures:
    """Times of the model's answers, and how much of each prompt it had read before."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.tokens: list[float] = []
        self.reused: list[float] = []


def bare_forms() -> JsonObject:
    """The same tools and the same form, each tool in the words of its own description."""
    forms = deepcopy(local.forms())
    for name, form in forms["tools"].items():
        tool = builtin().get(name)
        names = dict.fromkeys(argument for call in form.get("calls", ()) for argument in call)
        form.pop("when", None)
        form["about"] = f"{name}({', '.join(names)}): {tool.description if tool else ''}"
    bound = 'Reply with one JSON object: {"tool": name, "arguments": {…}} to use a tool, or {"answer": text} to answer.'
    none: JsonObject = {
        "begin": "",
        "shots": [],
        "rules": [],
        "languages": [],
        "left": "",
        "asked": "",
        "done": "",
        "nothing": "",
        "useless": "",
    }
    return {**forms, "identity": "You are a helpful assistant.", "form": bound, **none}


async def asked(app: App, kind: str, question: str, figures: Figures) -> Done:
    spec = RunSpec(
        question,
        session_id=f"eval_{time.monotonic_ns()}",
        route=RouteChoice(provider="local"),
        answerable=False,
        max_iterations=6,
        persist=False,
        deadline_seconds=_REQUEST_S_MAX,
    )
    done, began, first, is_text = Done(question, "", app.home.workspace), 0.0, 0.0, False
    await app.engine.start(spec)
    async for event in app.engine.subscribe(spec.run_id):
        if event.type == "model.started":
            began, first = time.monotonic(), 0.0
        elif event.type in ("text.delta", "tool.drafted") and not first:
            first, is_text = time.monotonic() - began, event.type == "text.delta"
            figures.first.append(first)
        elif event.type == "message.completed":
            for call in event.data["tool_calls"]:
                function = call.get("function") or call
                done.calls.append((function["name"], json.loads(function["arguments"])))
        elif event.type == "tool.started":
            if kind in FIRST_CALL:
                await app.engine.control(spec.run_id, Control("interrupt"))
        elif event.type == "tool.finished":
            row = await app.engine.row(spec.run_id, event.data["row"])
            done.results.append(base.text_of(row.content) if row is not None else "")
            if event.data["status"] == "ok":
                done.worked.add(event.data["name"])
        elif event.type == "usage":
            figures.reused.append(event.data["cache_read_tokens"] / max(1, event.data["input_tokens"]))
            if event.data["output_tokens"] > 5 and first and is_text:
                seconds = time.monotonic() - began - first
                figures.tokens.append(event.data["output_tokens"] / max(seconds, 0.01))
        if event.type == "text.delta":
            done.answer += event.data["text"]
    return done


def prepare(home: Home, files: dict[str, str]) -> None:
    """The folder and the memory as every request finds them."""
    for folder in (home.workspace, home.memories):
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    for name, text in files.items():
        path = home.workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Choice(NamedTuple):
    """Which requests are made: those of some sets that match, of which this part."""

    kinds: list[str]
    only: str
    part: tuple[int, int]

    def requests(self, kind: str) -> list[tuple[str, Check]]:
        matching = [request for request in KINDS[kind] if re.search(self.only, request[0])]
        return matching[self.part[0] - 1 :: self.part[1]]


async def measure(way: str, own: Home, choice: Choice, show: bool) -> JsonObject:
    """How many requests of each kind end right, one way, with the model and the settings of the user's own home."""
    if way == "bare":
        forms = bare_forms()
        local.forms = lambda: forms  # type: ignore[assignment]
    right: dict[str, list[int]] = {}
    untrue: dict[str, int] = {}
    figures = Figures()
    for kind in choice.kinds:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SEARXNG_URL"] = _SEARCH_URL if kind in FIRST_CALL else ""
            home = Home(Path(folder))
            # The folder of models itself, so that what the model has read is kept from one run to the next.
            home.models.symlink_to(own.models)
            if own.config_file.is_file():
                home.config_file.write_bytes(own.config_file.read_bytes())
            app = App(home, config.load(home))
            await app.store.sessions.create_session("past", "cli")
            source = held_out if kind in held_out.KINDS else development
            for role, text in source.PAST:
                await app.store.sessions.append_message("past", role, text)
            right[kind], untrue[kind] = [0, 0], 0
            for question, check in choice.requests(kind):
                prepare(home, source.FILES)
                good, made_up = await one(app, kind, question, check, figures, show)
                right[kind] = [right[kind][0] + good, right[kind][1] + 1]
                untrue[kind] += bool(made_up)
            await app.close()
    return {
        "right": right,
        "invented": untrue,
        "first_token_s": round(statistics.median(figures.first or [0.0]), 2),
        "tokens_per_s": round(statistics.median(figures.tokens or [0.0]), 1),
        "prompt_reused": round(statistics.median(figures.reused or [0.0]), 2),
    }


async def one(app: App, kind: str, question: str, check: Check, figures: Figures, show: bool) -> tuple[bool, str]:
    """One request: whether it ended right, and what was made up."""
    began = time.monotonic()
    done = await asked(app, kind, question, figures)
    made_up = "" if kind in FIRST_CALL else invented(done)
    good = check(done) and not made_up
    if show or not good:
        calls = " ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in done.calls)
        head = f"{_VERDICT[good]} {question} ({time.monotonic() - began:.0f} s)"
        lines = [head, calls[:300], *(result[:150] for result in done.results), repr(done.answer[:300])]
        print("\n        ".join([*lines, *([f"invented: {made_up}"] if made_up else [])]), file=sys.stderr, flush=True)
    return good, made_up


def table(ways: dict[str, JsonObject]) -> str:
    """Both ways side by side."""
    kinds = dict.fromkeys(kind for result in ways.values() for kind in result["right"])
    sizes = {kind: right[1] for result in ways.values() for kind, right in result["right"].items()}
    lines = ["| set | " + " | ".join(ways) + " | wanted |", "|---|" + "---|" * (len(ways) + 1)]
    for kind in kinds:
        cells = [str(result["right"].get(kind, ["–"])[0]) for result in ways.values()]
        lines.append(f"| {kind}, {sizes[kind]} | {' | '.join(cells)} | {held_out.TARGETS.get(kind, '')} |")
    cells = [str(sum(result["invented"].values())) for result in ways.values()]
    return "\n".join([*lines, f"| answers with something made up | {' | '.join(cells)} | 0 |"])


def main() -> int:
    """Run it; exit 1 when Hermes misses a target."""
    parser = argparse.ArgumentParser(prog="evals")
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], help=", ".join(KINDS))
    parser.add_argument("-v", "--verbose", action="store_true", help="show every request")
    parser.add_argument("--way", action="append", choices=WAYS, help="both unless given")
    parser.add_argument("--only", default="", metavar="REGEX", help="the requests that match")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every Nth request, from the Kth on")
    parser.add_argument("--add", action="store_true", help="keep the figures of other sets that are on record")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures are written")
    args = parser.parse_args()
    home = resolve()
    settings = config.load(home)
    if problem := status(home, settings)["problem"]:
        print(problem, file=sys.stderr)
        return 3
    model = model_file(home, settings)
    assert model is not None
    part, parts = map(int, args.part.split("/"))
    choice = Choice(args.kinds or list(held_out.KINDS), args.only, (part, parts))
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    figures: JsonObject = {"model": model.stem, "date": f"{date.today()}", "machine": machine, "ways": {}}
    if args.add:
        figures["ways"] = json.loads(args.json.read_text())["ways"]
    loop = new_loop()
    try:
        # The bare model comes last: what it is told replaces what Hermes tells.
        for way in sorted(args.way or WAYS, reverse=True):
            result = loop.run_until_complete(measure(way, home, choice, args.verbose))
            before = figures["ways"].get(way, {})
            figures["ways"][way] = {
                name: {**before.get(name, {}), **value} if isinstance(value, dict) else value
                for name, value in result.items()
            }
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
    print(table(figures["ways"]))
    right = figures["ways"].get("hermes", {}).get("right", {})
    return 0 if all(right[kind][0] >= held_out.TARGETS.get(kind, 0) for kind in right) else 1


sys.exit(main())
