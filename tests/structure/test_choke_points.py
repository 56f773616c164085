"""What may start a process, open a connection for a tool, or open a file for the model: one room each."""

from __future__ import annotations

import ast
import functools
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
# Processes of the server itself.
MAY_START["server/workers.py"] = {"create_subprocess_exec"}
# The servers of a cluster on one machine.
MAY_START["cluster/engines.py"] = {"subprocess", "posix_spawn"}
MAY_START["cluster/supervisor.py"] = {"create_subprocess_exec"}
MAY_START["cli/cluster_command.py"] = {"subprocess"}

CONNECTING = {
    "aiohttp",
    "httpx",
    "requests",
    "urllib.request",
    "http.client",
    "socket",
    "ssl",
    "httptools",
    "hermes.http_client.client",
}
# The tools' own server of calls is a socket in a private folder; the protocol's own client goes through the URL guard.
MAY_CONNECT = {"tools/code.py": {"socket"}}

OPENERS = {"open", "read_text", "read_bytes", "fdopen"}
# What opens through a guard, or opens no file: the path guard, the URL guard, the seal, our stores and logs, decoders.
GUARDED = {"paths", "_guard", "self", "engine", "store", "_log", "log", "Image", "channel"}
# Who else opens files, how many times, and why that content is neither chosen by a model nor sent to one.
_OWN, _SYSTEM, _USER = "a file of our own making", "what the kernel says", "what the user gives to a command"
MAY_OPEN = {
    "cli/update_command.py": (1, "the version of the program on disk"),
    "core/installation.py": (1, "how the program was installed"),
    "guards/paths.py": (10, "the path guard itself"),
    "settings/files.py": (1, "settings and .env"),
    "core/home.py": (
        8,
        "the home folder: private files, locks; and files that the operator has results of jobs added to",
    ),
    "settings/profiles.py": (4, "copies of a profile"),
    "sandbox/probe_cache.py": (2, _OWN),
    "logs.py": (1, _OWN),
    "core/processes.py": (2, _SYSTEM),
    "server/peers.py": (1, _SYSTEM),
    "agent/content.py": (1, "an upload of the session, held against the same one that comes again"),
    "store/sqlite/connections.py": (1, _SYSTEM),
    "store/sqlite/maintenance.py": (3, "a copy of the database, and the size of its pages"),
    "server/documents.py": (1, "a page of the package"),
    "server/web_page.py": (2, "files of the package"),
    "server/request_options.py": (1, "a table of the package"),
    "server/metrics.py": (1, _SYSTEM),
    "server/status.py": (2, _OWN),
    "cluster/engines.py": (3, _OWN),
    "cluster/state.py": (1, _OWN),
    "cluster/supervisor.py": (1, _OWN),
    "cli/cluster_command.py": (1, _OWN),
    "cli/acp/wire.py": (2, "/dev/null, and standard input and output"),
    "cli/acp/client_terminals.py": (2, "the ends of a pipe of ours"),
    "server/session_routes.py": (1, "an export that was just written"),
    "server/response_items.py": (2, "the seal opens text, no file"),
    "providers/local.py": (1, "a table of the package"),
    "local/install.py": (3, "the model file and its list"),
    "local/worker.py": (1, _OWN),
    "local/prefix_state.py": (2, "what the model has read, checked and not parsed"),
    "agent/model_lists.py": (1, _OWN),
    "runs/journal.py": (4, _OWN),
    "agent/media.py": (1, "writes the copy of a file that the guard has opened"),
    "core/unix_sockets.py": (1, "a private folder that holds a socket"),
    "server/workers.py": (1, "a pipe to a process of the server"),
    "cli/main.py": (1, "/dev/null"),
    "cli/chat_command.py": (1, "/dev/null"),
    "cli/model_command.py": (2, "our own list of models, and the log of the worker"),
    "cli/skills_command.py": (2, _USER),
    "services/delivery.py": (1, "a URL, through the URL guard"),
    "services/foreign_exports.py": (1, "a member of an archive that the user gives to a command"),
    "services/skills.py": (2, "a folder that the user adds as a skill"),
    "cli/config_command.py": (1, _USER),
    "cli/editor.py": (2, _USER),
    "cli/logs_command.py": (1, _OWN),
    "cli/setup_command.py": (1, _OWN),
    "cli/sessions_transfer.py": (2, _USER),
    "tools/rg_fallback.py": (2, "a program that is run inside the sandbox"),
    "tools/output_buffer.py": (1, "writes long output"),
    "tools/code.py": (4, "writes the script into a folder of ours"),
}


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
                value = node.func.value
                owner = getattr(value, "id", "") or getattr(value, "attr", "")
                yield node.func.attr, owner, node.lineno
            elif isinstance(node.func, ast.Name):
                yield node.func.id, "", node.lineno


@functools.cache
def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text("utf-8"))


def outside_sandbox() -> list[Path]:
    return [path for path in MODULES if not name_of(path).startswith("sandbox/")]


def started(path: Path) -> list[tuple[str, int]]:
    """The ways to start a process that a module uses and may not."""
    tree, allowed = parsed(path), MAY_START.get(name_of(path), set())
    modules = [(name, line) for name, line in imported(tree) if name.split(".")[0] in PROCESS_MODULES]
    calls = [
        (name, line)
        for name, owner, line in called(tree)
        if (owner == "os" and name in STARTERS) or name.startswith("create_subprocess_")
    ]
    return [item for item in (*modules, *calls) if item[0] not in allowed]


def test_only_sandbox_starts_processes() -> None:
    assert {name_of(path): items for path in outside_sandbox() if (items := started(path))} == {}


def connected(path: Path) -> list[tuple[str, int]]:
    """The ways to open a connection that a module uses and may not."""
    allowed = MAY_CONNECT.get(name_of(path), set())
    modules = [(name, line) for name, line in imported(parsed(path)) if name in CONNECTING - allowed]
    calls = [(name, line) for name, _, line in called(parsed(path)) if name in ("open_connection", "create_connection")]
    return modules + calls


def test_tools_connect_through_url_guard_only() -> None:
    tools = [path for path in MODULES if name_of(path).startswith("tools/")]
    assert {name_of(path): items for path in tools if (items := connected(path))} == {}


def opened(tree: ast.AST) -> list[tuple[str, str, int]]:
    """Where files are opened without a guard. Without an owner only `open` is one of these, not a function of ours."""
    items = [item for item in called(tree) if item[0] in OPENERS and item[1] not in GUARDED]
    bare = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    ours = {(func.id, func.lineno) for func in bare if isinstance(func, ast.Name) and func.id != "open"}
    return [item for item in items if (item[0], item[2]) not in ours]


# The sandbox opens what it mounts and what the kernel says of its processes; nothing of that is sent to a model.
def test_files_are_opened_through_path_guard_only() -> None:
    unexpected = {}
    for path in outside_sandbox():
        calls = opened(parsed(path))
        count, reason = MAY_OPEN.get(name_of(path), (0, "read what is to reach a prompt with hermes.guards.paths"))
        if len(calls) != count:
            unexpected[name_of(path)] = (reason, calls)
    assert unexpected == {}


def test_every_listed_exception_exists() -> None:
    assert set(MAY_OPEN) <= set(map(name_of, MODULES))


@pytest.mark.parametrize(
    ("line", "opens"),
    [
        ("open(path)", True),
        ("io.open(path)", True),
        ("os.open(path, 0)", True),
        ("os.fdopen(3)", True),
        ("Path(name).read_text()", True),
        ("(folder / name).open()", True),
        ("skill.path.read_bytes()", True),
        ("paths.open(name)", False),
    ],
)
def test_file_open_detector(line: str, opens: bool) -> None:
    assert bool(opened(ast.parse(line))) is opens
