"""`make source-metrics`: how large and how tangled the source is, and how many functions a request and a token pass."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import uvloop
import yaml

from bench import guard
from bench.load import chat, connect
from bench.servers import SERVER_CORE, SETTINGS, provider, started

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
TOKENS, PARAMETERS_MAX, SETTLE_S = 100, 7, 0.5


def trees() -> dict[Path, ast.Module]:
    """Every module of the source."""
    return {path: ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}


def imported(path: Path, tree: ast.Module) -> Iterator[str]:
    """The modules that one imports, for type checking or inside a function too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def package_of(name: str) -> str:
    """The package, or the module at the top, that a module is in."""
    parts = name.split(".")
    return parts[1] if parts[0] == "hermes" and len(parts) > 1 else ""


def cycles(modules: dict[Path, ast.Module]) -> list[list[str]]:
    """Packages that import each other, directly or not."""
    edges: dict[str, set[str]] = {}
    for path, tree in modules.items():
        own = package_of(".".join(path.relative_to(SRC).with_suffix("").parts))
        edges.setdefault(own, set()).update({package_of(name) for name in imported(path, tree)} - {own, ""})
    reached = {name: reachable(name, edges) for name in edges if name}
    knots = {
        tuple(sorted({name, *(other for other in reached[name] if name in reached.get(other, ()))})) for name in reached
    }
    return [list(knot) for knot in sorted(knots) if len(knot) > 1]


def reachable(name: str, edges: dict[str, set[str]]) -> set[str]:
    """Everything that a package imports, directly or not."""
    seen: set[str] = set()
    left = [*edges.get(name, ())]
    while left:
        if (one := left.pop()) not in seen:
            seen.add(one)
            left += edges.get(one, ())
    return seen


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many there are besides `self` and `cls`."""
    args = node.args
    names = [one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")]) + bool(args.vararg) + bool(args.kwarg)


def private_uses(tree: ast.Module) -> int:
    """Names with an underscore that are taken from another module of ours."""
    modules, count = set[str](), 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hermes"):
            count += sum(one.name.startswith("_") and not one.name.startswith("__") for one in node.names)
            modules |= {one.asname or one.name for one in node.names if one.name.islower()}
    uses = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name))
    private = (n for n in uses if n.attr.startswith("_") and not n.attr.startswith("__"))
    return count + sum(n.value.id in modules for n in private)  # type: ignore[attr-defined]


def calls_per_token() -> float:
    """Calls of Python functions that a token takes from the model's bytes to the client's."""

    def calls(chunks: int) -> int:
        count = itertools.count()

        def profile(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and not frame.f_code.co_filename.startswith(str(ROOT / "bench")):
                next(count)

        async def count_calls() -> None:
            sys.setprofile(profile)
            await guard.way("chat", chunks)
            sys.setprofile(None)

        uvloop.run(count_calls())
        return next(count)

    calls(TOKENS)  # the first time modules are imported
    return (calls(6 * TOKENS) - calls(TOKENS)) / (5 * TOKENS)


def functions_per_request() -> tuple[int, int]:
    """Functions of ours that a streamed chat enters before the model is asked, and their modules."""
    with tempfile.TemporaryDirectory() as folder, provider() as model:
        home, out = Path(folder), Path(folder) / "functions.json"
        settings: dict[str, Any] = {**SETTINGS, "model": {**SETTINGS["model"], "base_url": model.url}}
        (home / "config.yaml").write_text(yaml.safe_dump(settings))
        (home / "workspace").mkdir()
        command = [sys.executable, "-m", "bench.source_metrics", "serve", str(out)]

        async def ask(url: str, times: int) -> None:
            client = await connect(url)
            for _ in range(times):
                await client.ask(chat("burst-1"))

        with started(command, SERVER_CORE, folder=home) as server:
            asyncio.run(ask(server.url, 3))
            time.sleep(SETTLE_S)  # what follows an answer is not part of the next request
            os.kill(server.pid, signal.SIGUSR1)
            asyncio.run(ask(server.url, 1))
        names = json.loads(out.read_text())
    return len(names), len({name.partition(":")[0] for name in names})


def serve(out: Path) -> None:
    """A server that notes, once it is told to, which functions it enters until it asks the model."""
    from hermes.agent.call import Caller
    from hermes.cli.main import main as hermes

    entered: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code)

    def begin(*_: object) -> None:
        sys.setprofile(profile)

    ask = Caller.ask

    def keep() -> None:
        sys.setprofile(None)
        if entered and not out.exists():
            ours = {f"{c.co_filename}:{c.co_qualname}" for c in entered if c.co_filename.startswith(str(SRC))}
            out.write_text(json.dumps(sorted(ours)))

    async def count_functions(self: Caller, *args: Any, **options: Any) -> Any:
        keep()
        return await ask(self, *args, **options)

    Caller.ask = count_functions  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, begin)
    sys.exit(hermes(["gateway", "run", "--port", "0"]))


def cpu_of_a_plain_turn() -> str:
    """The figure of the last `make bench`, and beside it how many times the relay's that is."""
    figures = json.loads((ROOT / "bench/results.json").read_text())["serving"]["figures"]
    plain = next(n for n, one in enumerate(figures) if one["name"].endswith("clients, not streamed"))
    cpu = figures[plain + 1]  # "the same, CPU per turn"
    return f"{cpu['found'][-1]:.2f} ms, × {cpu['judged']:.1f}"


def main() -> None:
    """Print the table."""
    sources = trees()
    functions = [
        n for t in sources.values() for n in ast.walk(t) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    names = [n for t in sources.values() for n in ast.walk(t) if isinstance(n, ast.Name)]
    knots = cycles(sources)
    entered, modules = functions_per_request()
    rows = (
        ("lines under src/", sum(len(p.read_text().splitlines()) for p in sources), "≤ 38,000"),
        ("package cycles, with type checking", f"{len(knots)}: {'; '.join(' '.join(one) for one in knots)}", "0"),
        ("functions before the model is asked", f"{entered} in {modules} modules", "≤ 250"),
        ("Python calls per streamed token", f"{calls_per_token():.1f}", "≤ 20"),
        ("`Any` in src/", sum(n.id == "Any" for n in names), "≤ 400"),
        (
            f"functions with more than {PARAMETERS_MAX} parameters",
            sum(parameters(n) > PARAMETERS_MAX for n in functions),
            "≤ 8",
        ),
        (
            "uses of another module's _names, but for compat",
            sum(private_uses(tree) for path, tree in sources.items() if path.name != "compat.py"),
            "0",
        ),
        ("CPU per plain turn", cpu_of_a_plain_turn(), "≤ 0.6 ms"),
    )
    for name, value, target in rows:
        print(f"{name:<44} {value:>12,}  {target}" if isinstance(value, int) else f"{name:<44} {value:>12}  {target}")


if __name__ == "__main__":
    serve(Path(sys.argv[2])) if sys.argv[1:2] == ["serve"] else main()
