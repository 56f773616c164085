"""What may start a process, open a connection for a tool, or open a file for the model: one room each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hermes

PACKAGE = Path(hermes.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

STARTERS = {"system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp"}
STARTERS |= {f"{kind}{form}" for kind in ("exec", "spawn") for form in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")}
PROCESS_MODULES = {"subprocess", "pty", "multiprocessing"}
# The command line becomes the server it restarts: it starts nothing beside itself.
MAY_START = {"cli/gateway_command.py": {"execv"}}
# The user's own editor, at the user's own terminal.
MAY_START["cli/editor.py"] = {"subprocess"}

CONNECTING = {
    "aiohttp",
    "httpx",
    "requests",
    "urllib.request",
    "http.client",
    "socket",
    "ssl",
    "httptools",
    "hermes.http",
}
# The tools' own server of calls is a socket in a private folder; the protocol's own client goes through the URL guard.
MAY_CONNECT = {"tools/code.py": {"socket"}}

FILE_METHODS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "fdopen"}
# Files of our own making, in our own folders: no path of the model's leads there.
MAY_OPEN = {"tools/memory.py", "tools/skills.py", "tools/code.py", "tools/captured.py", "tools/mcp_link.py"}
# A program that is run inside the sandbox.
MAY_OPEN |= {"tools/plain_search.py"}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def called(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """What is called, on what, and where."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                yield node.func.attr, owner, node.lineno
            elif isinstance(node.func, ast.Name):
                yield node.func.id, "", node.lineno


def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text("utf-8"))


@pytest.mark.parametrize("path", [p for p in MODULES if not name_of(p).startswith("sandbox/")], ids=name_of)
def test_only_the_sandbox_starts_processes(path: Path) -> None:
    tree, allowed = parsed(path), MAY_START.get(name_of(path), set())
    modules = [(name, line) for name, line in imported(tree) if name.split(".")[0] in PROCESS_MODULES]
    calls = [
        (name, line)
        for name, owner, line in called(tree)
        if (owner == "os" and name in STARTERS) or name.startswith("create_subprocess_")
    ]
    assert [found for found in (*modules, *calls) if found[0] not in allowed] == []


@pytest.mark.parametrize("path", [p for p in MODULES if name_of(p).startswith("tools/")], ids=name_of)
def test_tools_open_connections_through_the_url_guard_only(path: Path) -> None:
    allowed = MAY_CONNECT.get(name_of(path), set())
    found = [(name, line) for name, line in imported(parsed(path)) if name in CONNECTING - allowed]
    calls = [(name, line) for name, _, line in called(parsed(path)) if name in ("open_connection", "create_connection")]
    assert found + calls == []


@pytest.mark.parametrize("path", [p for p in MODULES if name_of(p).startswith("tools/")], ids=name_of)
def test_tools_open_files_through_the_path_guard_only(path: Path) -> None:
    if name_of(path) in MAY_OPEN:
        pytest.skip("it opens files of our own, whose paths no model can choose")
    guarded = {"paths", "guard", "urls", "seal"}
    found = [(name, owner, line) for name, owner, line in called(parsed(path)) if name in FILE_METHODS]
    assert [item for item in found if item[1] not in guarded] == []
