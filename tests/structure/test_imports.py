"""What costs time is loaded when it is used: `hermes --version` loads next to nothing (ARCHITECTURE.md, rule 7)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hermes

HEAVY = ("aiohttp", "openai", "anthropic", "mcp", "msgspec", "yaml", "ruamel", "jsonschema_rs", "PIL")
# Runs the command as `python -m hermes` does, then says which modules there are.
PROBE = """
import json, runpy, sys
sys.argv = ["hermes", *{arguments!r}]
try:
    runpy.run_module("hermes", run_name="__main__")
except SystemExit as end:
    print("\\nexit", end.code or 0)
print(json.dumps(sorted(sys.modules)))
"""


def run_and_list_modules(arguments: list[str], home: Path) -> tuple[str, set[str]]:
    """What a command printed, and the modules it loaded."""
    code = PROBE.format(arguments=arguments)
    environ = {**os.environ, "HERMES_HOME": str(home)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ)
    assert result.returncode == 0, result.stderr
    *printed, modules = result.stdout.strip().splitlines()
    return "\n".join(printed), set(json.loads(modules))


def test_version_imports_little(tmp_path: Path) -> None:
    printed, modules = run_and_list_modules(["--version"], tmp_path / "home")
    assert hermes.__version__ in printed and "exit 0" in printed
    assert not {name for name in modules if name.partition(".")[0] in {*HEAVY} - {"msgspec"}}
    assert not {name for name in modules if name.startswith(("hermes.tools.", "hermes.providers."))}
    assert not (tmp_path / "home").exists(), "telling the version touches no home"


def test_version_names_the_sandbox_without_probing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("terminal: {backend: docker}\n")
    printed, modules = run_and_list_modules(["--version"], tmp_path)
    assert "sandbox docker" in printed and not modules & {"hermes.sandbox.choose", "asyncio"}


def test_server_loads_no_certificates_before_use() -> None:
    code = """
import ssl
from hermes.server.process_tuning import begin
made = ssl.create_default_context
begin()
from aiohttp.connector import _SSL_CONTEXT_VERIFIED as context
assert ssl.create_default_context is made and not context.get_ca_certs()
assert context.verify_mode == ssl.CERT_REQUIRED and context.check_hostname
made().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="a")
assert made().cert_store_stats()["x509_ca"]
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", ["hermes", "hermes.core.failures", "hermes.agent.assembler", "hermes.core.tokens"])
def test_pure_modules_import_no_heavy_libraries(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert not loaded & ({*HEAVY, "asyncio", "ssl"} - {"msgspec"})


def test_facade_imports_no_optional_library() -> None:
    code = "import json, sys, run_agent; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(json.loads(result.stdout)) & {"openai", "anthropic", "PIL", "yaml", "ruamel"}


def test_server_imports_no_mcp_sdk_before_use() -> None:
    code = "import json, sys, hermes.server.application, hermes.server.runner; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {name.partition(".")[0] for name in json.loads(result.stdout)} & {
        "mcp",
        "mcp_types",
        "pydantic",
        "anyio",
    }
