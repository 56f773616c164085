"""Other names of our modules are the modules themselves: what is replaced through one is replaced in both."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import hermes

SRC = Path(hermes.__file__).parent.parent
# alias: (real module, a name that others replace)
ALIASES = {
    "hermes_state": ("hermes.store.sessions", "SessionDB"),
    "gateway.platforms.api_server": ("hermes.server.compat", "APIServerAdapter"),
    "run_agent": ("hermes.facade", "AIAgent"),
    "hermes_cli.profiles": ("hermes.core.home", "get_active_profile_name"),
    "hermes_cli.tools_config": ("hermes.tools.framework.toolsets", "_get_platform_tools"),
    "gateway.run": ("hermes.server.runner", "_resolve_gateway_model"),
    "gateway.config": ("hermes.server.settings", "load_gateway_config"),
    "gateway.status": ("hermes.server.status", "read_runtime_status"),
}


def alias_files() -> list[Path]:
    paths = [*SRC.glob("*.py"), *(SRC / "hermes_cli").rglob("*.py"), *(SRC / "gateway").rglob("*.py")]
    return sorted(path for path in paths if path.name != "__init__.py")


@pytest.mark.parametrize(("alias", "real"), [(alias, real) for alias, (real, _) in ALIASES.items()])
def test_alias_is_same_module(alias: str, real: str) -> None:
    assert import_module(alias) is import_module(real)


@pytest.mark.parametrize(("alias", "real", "name"), [(a, r, n) for a, (r, n) in ALIASES.items()])
def test_patch_through_alias_applies_to_module(
    alias: str, real: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = object()
    monkeypatch.setattr(f"{alias}.{name}", stand_in)
    assert getattr(import_module(real), name) is stand_in


def test_patched_name_is_looked_up_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from hermes.core import home

    monkeypatch.setattr("hermes_cli.profiles.resolve", lambda: home.Home(Path("/x"), "other"))
    assert home.get_active_profile_name() == "other"


def check_imports(*pairs: tuple[str, str]) -> None:
    """Import both of each pair, in this order, in a process of their own."""
    checks = [f"import {a}, {b}; assert sys.modules[{a!r}] is sys.modules[{b!r}]" for a, b in pairs]
    code = "\n".join(["import sys", *checks])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("alias", ALIASES)
def test_alias_can_be_imported_before_its_module(alias: str) -> None:
    check_imports((alias, ALIASES[alias][0]))


def test_alias_can_be_imported_after_its_module() -> None:
    check_imports(*((real, alias) for alias, (real, _) in ALIASES.items()))


@pytest.mark.parametrize("path", alias_files(), ids=lambda path: str(path.relative_to(SRC)))
def test_alias_files_have_no_logic(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 10
    kinds = {type(node) for node in ast.walk(ast.parse(text))}
    assert not kinds & {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.If, ast.Try, ast.For}


def test_every_alias_file_is_listed() -> None:
    modules = {".".join(path.relative_to(SRC).with_suffix("").parts) for path in alias_files()}
    assert set(ALIASES) <= modules
