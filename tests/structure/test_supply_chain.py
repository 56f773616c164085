"""What Hermes is made of: every package at one version, with hashes, installed as locked, and listed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"
LOCKED_EXTRAS = ("sdk", "images", "web", "mcp", "acp", "otel", "postgres", "nats")


def entries(path: Path) -> list[tuple[Requirement, list[str]]]:
    """Every requirement of a lock with its hashes."""
    lines = re.sub(r"\\\n", " ", path.read_text()).splitlines()
    requirement_lines = [line for line in lines if line and not line.startswith("#")]
    return [
        (Requirement(line.split(" --hash")[0]), re.findall(r"--hash=sha256:(\w+)", line)) for line in requirement_lines
    ]


LOCKED = entries(LOCK)


def test_locked_packages_have_one_version_and_hashes() -> None:
    for requirement, hashes in LOCKED:
        [pin] = requirement.specifier
        assert pin.operator == "==" and requirement.url is None and hashes, requirement
    text = LOCK.read_text()
    assert "://" not in text and "index-url" not in text


def test_lock_satisfies_project_requirements() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(w for e in LOCKED_EXTRAS for w in project["optional-dependencies"][e])]
    pins = {canonicalize_name(requirement.name): next(iter(requirement.specifier)).version for requirement, _ in LOCKED}
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)], prereleases=True), requirement


def test_installed_packages_match_lock() -> None:
    required = [requirement for requirement, _ in LOCKED if requirement.marker is None or requirement.marker.evaluate()]
    pins = {requirement.name: next(iter(requirement.specifier)).version for requirement in required}
    assert {name: metadata.version(name) for name in pins} == pins


@pytest.fixture(scope="module")
def bom(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sbom") / "made" / "hermes.cdx.json"
    subprocess.run([sys.executable, ROOT / "scripts" / "sbom.py", path], check=True, capture_output=True)
    return path.read_text()


def test_sbom_is_valid_cyclonedx(bom: str) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(bom)
    assert fault is None, fault


def test_sbom_lists_every_locked_package_with_hashes(bom: str) -> None:
    document: dict[str, Any] = json.loads(bom)
    listed = {
        (component["name"], component["version"]): sorted(digest["content"] for digest in component["hashes"])
        for component in document["components"]
    }
    both = [*LOCKED, *entries(ROOT / "src" / "hermes" / "local" / "runtime.txt")]
    assert listed == {
        (canonicalize_name(requirement.name), next(iter(requirement.specifier)).version): sorted(hashes)
        for requirement, hashes in both
    }
    needs = {entry["ref"]: entry["dependsOn"] for entry in document["dependencies"]}
    assert any(place.startswith("pkg:pypi/aiohttp@") for place in needs[document["metadata"]["component"]["bom-ref"]])


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("nothing", 0, "skipped, its database cannot be reached"),
        ('{"dependencies": [{"name": "a", "version": "1", "vulns": []}]}', 0, "1 packages checked, 0 known faults"),
        (
            '{"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}]}',
            1,
            "a 1 has CVE-1, put right in 2",
        ),
        ('{"dependencies": [{"name": "a", "skip_reason": "unknown"}]}', 0, "0 packages checked, 0 known faults, 1 not"),
    ],
)
def test_audit_distinguishes_findings_from_unreachable_database(
    tmp_path: Path, text: str, code: int, message: str
) -> None:
    (tmp_path / "pip_audit.py").write_text(f"print({text!r})")
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "audit.py"],
        check=False,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, message in result.stdout) == (code, True), result
