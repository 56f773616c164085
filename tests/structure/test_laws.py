"""The laws that hold for the whole core, checked on its text and on its behaviour under load."""

from __future__ import annotations

import ast
import asyncio
import gc
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest

import hermes
from agent.harness import KEY, Harness, nothing_left, product_tasks, tool
from hermes.providers.base import Credential
from hermes.tools import memory
from support.loop_steps import loop_steps
from support.model_server import Call, ModelServer, Reply
from support.waiting import until

ROOT = Path(hermes.__file__).parent
# Calls that one callback of the loop makes at most: about a millisecond.
LOOP_STEPS_MAX = 3_000
PURE = [
    *(f"agent/{name}.py" for name in ("assembler", "inline", "leaked_calls", "prompt", "compress")),
    *(f"core/{name}.py" for name in ("failures", "json_types", "stream_parts", "message_marks", "tokens")),
]
TRANSLATORS = [
    f"providers/{n}.py" for n in ("base", "table", "chat_completions", "codex_responses", "anthropic_messages")
]
FOLD = [
    "core/events.py",
    "store/replay.py",
    "guards/injection.py",
    "guards/secrets.py",
    "core/limits.py",
    "core/text.py",
]
IMPURE = {
    "aiohttp",
    "asyncio",
    "concurrent",
    "datetime",
    "http",
    "httpx",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "platform",
    "queue",
    "random",
    "requests",
    "secrets",
    "shutil",
    "signal",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "urllib.request",
    "uuid",
    "uvloop",
    "zoneinfo",
}

# Names of vendors and model families; a name that is also a common word is left out.
VENDORS = re.compile(
    r"openai|anthropic|claude|\bgpt|chatgpt|gemini|mistral|llama|groq|deepseek|qwen|openrouter|\bgrok|cohere|ollama|"
    r"lmstudio|vllm|bedrock|moonshot|kimi|cerebras|huggingface|nvidia|perplexity|sonnet|haiku",
    re.I,
)
# Names that the contract itself fixes: the wire forms with their headers, the setting `api_server.ollama`, and what embedding
# programs replace on the façade.
FIXED = re.compile(
    r"anthropic_messages|codex_responses|_anthropic_client|_(create|close)_request_openai_client|_run_codex_\w+|"
    r"anthropic-(version|beta|dangerous-direct-browser-access)|[Oo]llama"
)


# ---- L6


def code_of(path: Path) -> list[tuple[int, str]]:
    """The names and the texts of a module, without its comments and docstrings."""
    source = path.read_text()
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.end_lineno:
                docs.update(range(first.lineno, first.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    text_tokens = [t for t in tokens if t.type in (tokenize.NAME, tokenize.STRING) and t.start[0] not in docs]
    # A sentence for a person decides nothing.
    return [(token.start[0], token.string) for token in text_tokens if token.string.count(" ") < 3]


def modules() -> list[Path]:
    vendors = ("providers", "local", "settings/known_providers.py", "services/foreign_exports.py")
    return sorted(path for path in ROOT.rglob("*.py") if not str(path.relative_to(ROOT)).startswith(vendors))


def vendors_named(path: Path) -> list[tuple[int, str]]:
    if not VENDORS.search(path.read_text()):
        return []
    named = [(line, text) for line, text in code_of(path) if VENDORS.search(FIXED.sub("", text))]
    if path.name == "blocking_calls.py":
        # The blocking calls work on the vendors' own clients, which they import when called.
        named = [
            (line, text) for line, text in named if VENDORS.search(re.sub("openai|anthropic", "", text, flags=re.I))
        ]
    return named


def test_vendors_and_models_are_named_in_providers_only() -> None:
    assert {str(path.relative_to(ROOT)): named for path in modules() if (named := vendors_named(path))} == {}


# ---- L3


def imported(path: Path) -> set[str]:
    """What a module imports, at its top or anywhere inside; what only a type checker sees does not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = [ast.Pass()]
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return modules


@pytest.mark.parametrize("name", [*PURE, *TRANSLATORS, *FOLD])
def test_pure_modules_import_no_io(name: str) -> None:
    imports = imported(ROOT / name)
    assert {module for module in imports if module in IMPURE or module.split(".")[0] in IMPURE} == set()


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_only_pure_modules(name: str) -> None:
    allowed = {n.removesuffix(".py").replace("/", ".") for n in [*PURE, *FOLD]}
    ours = {module for module in imported(ROOT / name) if module.startswith("hermes")}
    assert {module for module in ours if module.removeprefix("hermes.") not in allowed} == set()


@pytest.mark.parametrize("name", [*PURE, *TRANSLATORS, *FOLD])
def test_pure_modules_open_nothing_and_keep_no_state(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    calls = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert {"open", "print", "input", "exec", "eval", "__import__"} & set(calls) == set()
    assert [node for node in ast.walk(tree) if isinstance(node, ast.Global)] == []


# ---- L1, L2, L11


async def test_live_run_uses_one_task(harness: Harness, server: ModelServer) -> None:
    server.repeat, server.script = True, [Reply(text=["Once ", "upon"], gap_s=60)]
    before = len(asyncio.all_tasks())
    specs = [harness.spec(server) for _ in range(20)]
    for spec in specs:
        await harness.engine.start(spec)
    await server.until(lambda: server.open_streams == 20)
    # One for each run, and one that renews the leases of all.
    await until(lambda: len(product_tasks()) <= 21)
    # The server's own: a connection and an answer each.
    await until(lambda: len(asyncio.all_tasks()) - before <= 21 + 2 * 20)
    await harness.engine.drain(0)
    await nothing_left(server)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_default_executor_is_never_used(harness: Harness, server: ModelServer, host: str) -> None:
    harness.offer(memory.TOOL, tool("look", lambda _, __: {"ok": True}))
    server.script = [
        Reply(
            tool_calls=[Call("memory", {"target": "memory", "action": "add", "content": "Likes tea."}), Call("look")]
        ),
        Reply(text="Done."),
    ]
    run = await harness.run(f"http://{host}:{server.port}", persist=True)
    assert run.result["final_response"] == "Done."
    assert asyncio.get_running_loop()._default_executor is None  # type: ignore[attr-defined]


async def test_ended_run_leaves_no_transcript_in_memory(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    marker = f"a needle {id(harness)} in the haystack"
    server.script = [Reply(text=marker, tool_calls=[Call("look", {"a": marker})]), Reply(text=f"{marker} again")]

    async def turn() -> None:
        await harness.engine.run(harness.spec(server, marker))

    # In a task of its own, so that no frame of the test holds on to what it has passed.
    await asyncio.create_task(turn())
    server.requests.clear()
    await nothing_left(server)
    gc.collect()
    things = [thing for thing in gc.get_objects() if _holds(thing, marker)]
    # The test's own frame and what it scripted are not the product's.
    assert [type(thing).__name__ for thing in things if _of_the_product(thing)] == []


@pytest.mark.parametrize("source", ["api_server", "cli"])
@pytest.mark.parametrize("with_tools", [False, True])
async def test_turn_creates_no_reference_cycles(
    harness: Harness, server: ModelServer, source: str, with_tools: bool
) -> None:
    harness.offer(tool("look"))
    called = [Reply(text="I look.", tool_calls=[Call("look", {})])] if with_tools else []

    async def turn() -> None:
        server.script = [*called, Reply(text="Done.")]
        await harness.engine.run(harness.spec(server, "What is there?", source=source, persist=True))
        server.requests.clear()
        await nothing_left(server)

    await asyncio.create_task(turn())  # the first one loads what it needs
    gc.collect()
    gc.disable()
    try:
        await asyncio.create_task(turn())
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        names = [type(thing).__name__ for thing in gc.garbage if str(type(thing).__module__).startswith("hermes.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert names == []


def _holds(thing: object, marker: str) -> bool:
    if isinstance(thing, dict):
        return any(isinstance(value, str) and marker in value for value in list(thing.values()))
    if isinstance(thing, list | tuple | set):
        return any(isinstance(value, str) and marker in value for value in list(thing))
    if str(type(thing).__module__).startswith("hermes."):
        names = getattr(type(thing), "__slots__", ())
        return any(marker in value for name in names if isinstance(value := getattr(thing, name, None), str))
    return False


def _of_the_product(thing: object) -> bool:
    if str(type(thing).__module__).startswith("hermes."):
        return True
    return any(str(type(item).__module__).startswith("hermes.") for item in gc.get_referrers(thing))


# ---- what must not hold up the loop


async def test_long_tool_result_does_not_block_loop(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look", lambda _, __: {"data": "Zm94" * 3_000}))
    server.script = [Reply(tool_calls=[Call("look")]), Reply(text="Done.")]
    with loop_steps() as steps:
        run = await harness.run(server)
    assert run.result["final_response"] == "Done."
    assert steps.most < LOOP_STEPS_MAX


# ---- L12


def test_credential_repr_hides_value() -> None:
    credential = Credential(KEY, "someone")
    assert KEY not in f"{credential!r} {credential!s} {[credential]!r} {credential}"


# ---- SDKs


TURN = """
import asyncio, sys
from run_agent import AIAgent
agent = AIAgent(base_url=sys.argv[1], model="m", api_key="sk-test-0123456789", enabled_toolsets=["todo"])
result = asyncio.run(agent.arun_conversation("hi"))
heavy = [name for name in ("openai", "anthropic", "httpx", "requests", "PIL") if name in sys.modules]
print(result["final_response"], heavy)
"""


async def test_turn_imports_no_vendor_library(server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    pipe = asyncio.subprocess.PIPE
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", TURN, f"{server.url}/v1", stdout=pipe, stderr=pipe
    )
    out, err = await run.communicate()
    assert (out.decode().strip(), err.decode()) == ("Done. []", "")


async def test_logs_above_debug_contain_no_conversation_text(
    harness: Harness, server: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    harness.offer(tool("look", lambda _, __: {"saw": "NEEDLE"}))
    server.script = [
        Reply(reset_before_headers=True),
        Reply(text="NEEDLE", tool_calls=[Call("look", {"a": "NEEDLE"})]),
        Reply(text="NEEDLE again"),
    ]
    await harness.run(server, "NEEDLE", persist=True)
    assert "NEEDLE" not in caplog.text
