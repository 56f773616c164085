"""Who may start a process, open a connection for a tool, or open a file: everybody else goes through the sandbox or a guard."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import NamedTuple

import pytest

import hermes

PACKAGE = Path(hermes.__file__).parent


class Rule(NamedTuple):
    """`names` match an import or a call, with its owner where it has one; `may` are folders (ending in /) and modules."""

    names: set[str]
    may: set[str]
    within: str = ""


RULES = {
    "start a process": Rule(
        {"subprocess", "pty", "multiprocessing", "create_subprocess_exec", "create_subprocess_shell"}
        | {"os.system", "os.popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.posix_spawnp"}
        | {f"os.{kind}{form}" for kind in ("exec", "spawn") for form in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")},
        {"sandbox/", "cluster/", "cli/gateway_command.py", "cli/editor.py", "cli/cluster_command.py", "server/workers.py"},
    ),
    "connect for a tool": Rule(
        {"aiohttp", "httpx", "requests", "urllib.request", "http.client", "socket", "ssl", "httptools"}
        | {"hermes.http_client.client", "open_connection", "create_connection"},
        # The server of calls of a script is a socket in a private folder.
        {"tools/code.py"},
        within="tools/",
    ),
    # What a model asks for, or is shown, is opened by the path guard.
    "open a file": Rule(
        {"open", "io.open", "os.open", "os.fdopen", "read_text", "read_bytes"},
        # Files of our own making, tables and pages of the package, what the kernel reports.
        {"tools/code.py", "tools/output_buffer.py", "tools/rg_fallback.py", "agent/media.py", "agent/model_lists.py"}
        | {"runs/journal.py", "providers/local.py", "server/documents.py", "server/web_page.py", "server/status.py"}
        | {"server/request_options.py", "server/metrics.py", "server/peers.py", "server/workers.py"}
        # An upload of the session, an export just written, what the user gives to a command.
        | {"agent/content.py", "server/session_routes.py", "services/skills.py", "services/foreign_exports.py"}
        # `open` of the URL guard, and of the seal of a text.
        | {"services/delivery.py", "server/response_items.py"},
        within="tools/ agent/ services/ server/ runs/ providers/ bus/",
    ),
}  # fmt: skip
# These open through a guard, or open no file.
GUARDED = {"paths", "_guard", "self", "engine", "store", "_log", "log", "Image", "channel"}


def uses(tree: ast.AST) -> set[tuple[str, int]]:
    """The names that a module imports or calls, each with and without its owner."""
    names: set[tuple[str, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.name, node.lineno) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {
                (node.module, node.lineno),
                *((f"{node.module}.{alias.name}", node.lineno) for alias in node.names),
            }
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.add((node.func.id, node.lineno))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = getattr(node.func.value, "id", "") or getattr(node.func.value, "attr", "")
            if owner not in GUARDED:
                names |= {(node.func.attr, node.lineno), (f"{owner}.{node.func.attr}", node.lineno)}
    return names


@functools.cache
def modules() -> dict[str, set[tuple[str, int]]]:
    return {path.relative_to(PACKAGE).as_posix(): uses(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("what", RULES)
def test_only_listed_modules_may(what: str) -> None:
    rule = RULES[what]
    assert all(any(module.startswith(may) for module in modules()) for may in rule.may)
    others = {
        module: found
        for module, names in modules().items()
        if module.startswith(tuple(rule.within.split()) or "") and not module.startswith(tuple(rule.may))
        if (found := {(name, line) for name, line in names if name in rule.names})
    }
    assert not others, f"these may not {what}"


@pytest.mark.parametrize(
    "line", ["open(path)", "io.open(path)", "os.fdopen(3)", "Path(name).read_text()", "(folder / name).open()"]
)
def test_opened_file_is_found(line: str) -> None:
    assert {name for name, _ in uses(ast.parse(line))} & RULES["open a file"].names
