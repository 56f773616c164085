"""The pages of the documentation that are made from the program itself, and its plots: a hook of MkDocs.

Configuration from the settings, commands from the parsers, HTTP routes from OpenAPI, plots from `bench/results.json`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

REPOSITORY = Path(__file__).parents[1]
_ADDRESS = "http://127.0.0.1:8642"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for name, content in pages().items():
        files.append(File.generated(config, name, content=content))
    return files


def pages() -> dict[str, str]:
    results = json.loads((REPOSITORY / "bench/results.json").read_text("utf-8"))
    return {
        "reference/configuration.md": configuration(),
        "reference/commands.md": commands(),
        "reference/http.md": http(),
        "reference/plots.md": plots(results),
        **{f"images/bench-{section}.svg": plot(rows["figures"]) for section, rows in results.items()},
    }


# ---- settings


def configuration() -> str:
    from hermes.settings.keys import KEYS

    sections: dict[str, list[str]] = {}
    for key in sorted(KEYS, key=lambda key: key.name):
        section, _, _ = key.name.partition(".")
        default = "" if key.default is None else f"`{json.dumps(key.default, default=str)}`"
        variable = f"`{key.env}`" if key.env else ""
        row = (f"`{key.name}`", key.mark.text, key.expected, default, variable)
        sections.setdefault(section, []).append(_row(row))
    lines = [
        "# Configuration",
        "",
        "Every setting of `config.yaml`. `hermes config show` prints each with its value and where that comes from, `hermes",
        "config set NAME VALUE` changes one. `*` stands for a name of your own.",
    ]
    for section, rows in sections.items():
        lines += [
            "",
            f"## {section}",
            "",
            _row(("setting", "meaning", "value", "default", "variable")),
            "|---|---|---|---|---|",
            *rows,
        ]
    return "\n".join(lines) + "\n"


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(re.sub(r"\s*\n\s*", " ", cell).replace("|", "\\|") for cell in cells) + " |"


# ---- commands


def commands() -> str:
    from hermes.cli.main import COMMANDS, parser_with

    parser = parser_with(set(COMMANDS))
    lines = [
        "# Commands",
        "",
        "What `hermes --help` and `hermes COMMAND --help` print.",
        "",
        "## hermes",
        "",
        *_help(parser),
    ]
    for name, command in _subparsers(parser):
        lines += ["", f"## hermes {name}", "", *_help(command)]
        for action, subparser in _subparsers(command):
            lines += ["", f"### hermes {name} {action}", "", *_help(subparser)]
    return "\n".join(lines) + "\n"


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _help(parser: argparse.ArgumentParser) -> list[str]:
    formatter = lambda prog: argparse.HelpFormatter(prog, width=110)  # noqa: E731
    parser.formatter_class = formatter
    return ["```text", parser.format_help().strip(), "```"]


# ---- routes


def http() -> str:
    from hermes.server import handlers, openapi  # noqa: F401  (the handlers declare the routes)

    document = openapi.document()
    lines = [
        "# HTTP routes",
        "",
        "The same as `/openapi.json` of a running server. `HERMES_API_KEY` is what `hermes gateway key` prints; without a key",
        "configured any value will do. Names in capitals stand for ids.",
    ]
    for tag in document["tags"]:
        lines += ["", f"## {tag['name']}"]
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if tag["name"] in operation["tags"]:
                    lines += ["", *_operation(method.upper(), path, operation)]
    return "\n".join(lines) + "\n"


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### {operation['summary']} {{ #{operation['operationId']} }}"
    yield ""
    yield f"`{method} {path}`"
    if about := operation.get("description"):
        yield ""
        yield about
    parameters = [one for one in operation.get("parameters", []) if one["in"] != "header"]
    if parameters:
        yield ""
        yield _row(("parameter", "in", "meaning"))
        yield "|---|---|---|"
        for one in parameters:
            yield _row((f"`{one['name']}`", one["in"], one.get("description", "")))
    yield ""
    yield "```sh"
    yield curl(method, path, operation)
    yield "```"


def curl(method: str, path: str, operation: dict[str, Any]) -> str:
    address = _ADDRESS + re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), path)
    words = ["curl", *([] if method == "GET" else ["-X", method]), address]
    if operation.get("security"):
        words += ["\\\n  -H", '"Authorization: Bearer $HERMES_API_KEY"']
    body = next(iter(operation.get("requestBody", {}).get("content", {}).values()), {})
    if (example := body.get("example")) is not None:
        payload = json.dumps(example, ensure_ascii=False).replace("'", "'\\''")
        words += ["-H", "'Content-Type: application/json'", "\\\n  -d", f"'{payload}'"]
    return " ".join(words)


# ---- plots

_BAR, _LABEL, _WIDTH, _STEP = 420, 330, 900, 34


def plots(results: dict[str, Any]) -> str:
    lines = [
        "# Figures as plots",
        "",
        "The last `make bench`: each figure beside its target (the upright line), green where it is met. `×` is a ratio, mostly to",
        "the relay, `+` a difference. What each figure is, and what is missed and why, is in [performance](../performance.md).",
    ]
    for section, run in results.items():
        lines += [
            "",
            f"## {section}",
            "",
            f"{run['date']}, Python {run['python']}, {run['cpu']}, {run['cores']} cores.",
        ]
        lines += ["", f"![Figures of {section}](../images/bench-{section}.svg)"]
    return "\n".join(lines) + "\n"


def plot(figures: list[dict[str, Any]]) -> str:
    """A bar for each figure that has a target, on a scale of its own, beside the target."""
    rows = [row for row in figures if row["target"] and row["judged"] is not None]
    height = _STEP * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="13" '
        'role="img"><title>Each figure, beside its target</title>'
    ]
    for index, row in enumerate(rows):
        parts += _bar(row, 20 + index * _STEP)
    return "".join([*parts, "</svg>\n"])


def _bar(row: dict[str, Any], top: int) -> Iterator[str]:
    target, judged = row["target"], max(row["judged"], 0)
    scale = _BAR / (max(judged, target) * 1.1)
    value = {"ratio": "× {:.2f}", "more": "+ {:.3g} {}"}.get(row["judged_by"], "{:.3g} {}").format(judged, row["unit"])
    colour = "#2e7d32" if row["ok"] else "#c62828"
    yield f'<text x="{_LABEL - 10}" y="{top + 14}" text-anchor="end" fill="#888">{escape(row["name"])}</text>'
    yield f'<rect x="{_LABEL}" y="{top}" width="{judged * scale:.1f}" height="18" fill="{colour}"/>'
    yield f'<text x="{_LABEL + judged * scale + 6:.1f}" y="{top + 14}" fill="#888">{escape(value)}</text>'
    at, comparison = _LABEL + target * scale, "at least" if row["at_least"] else "at most"
    yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top - 4}" y2="{top + 22}" stroke="#888" stroke-width="2">'
    yield f"<title>target: {comparison} {target:g}</title></line>"
