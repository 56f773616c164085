"""Write a CycloneDX list of every locked package, its version and the hashes of its files: `sbom.py FILE`."""

from __future__ import annotations

import json
import re
import sys
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOCKS = (ROOT / "requirements.lock", ROOT / "src" / "hermes" / "local" / "runtime.txt")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def locked() -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of every locked package, by its name."""
    found = [entry for lock in LOCKS for entry in _ENTRY.findall(lock.read_text())]
    return {plain(name): (version, _HASH.findall(rest)) for name, version, rest in found}


def plain(name: str) -> str:
    """A package's name as all tools write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def document() -> dict[str, Any]:
    packages = locked()
    version = re.search(r'__version__ = "([^"]+)"', (ROOT / "src" / "hermes" / "__init__.py").read_text())
    assert version is not None
    own = f"pkg:pypi/hermes-gateway@{version[1]}"
    components = [_component(name, *found) for name, found in sorted(packages.items())]
    places = {name: f"pkg:pypi/{name}@{found[0]}" for name, found in packages.items()}
    needs = [{"ref": own, "dependsOn": sorted(places[name] for name in _needs("hermes-gateway") & packages.keys())}]
    needs += [
        {"ref": place, "dependsOn": sorted(places[other] for other in _needs(name) & packages.keys() - {name})}
        for name, place in sorted(places.items())
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, own + json.dumps(components))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "hermes-gateway",
                "version": version[1],
                "purl": own,
                "licenses": [{"license": {"id": "MIT"}}],
            }
        },
        "components": components,
        "dependencies": needs,
    }


def _component(name: str, version: str, hashes: list[str]) -> dict[str, Any]:
    place = f"pkg:pypi/{name}@{version}"
    made: dict[str, Any] = {"type": "library", "bom-ref": place, "name": name, "version": version, "purl": place}
    made["hashes"] = [{"alg": "SHA-256", "content": content} for content in hashes]
    return made


def _needs(name: str) -> set[str]:
    """The names of what an installed package needs; of what is not installed here nothing is known."""
    try:
        told = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return set()
    return {plain(found[0]) for line in told if (found := _NAME.match(line))}


if __name__ == "__main__":
    Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    Path(sys.argv[1]).write_text(json.dumps(document(), indent=2) + "\n")
    print(f"{sys.argv[1]}: {len(locked())} packages")
