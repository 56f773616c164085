"""How Hermes is installed (pipx, uv, pip or a checkout), and the commands that add to it, update and remove it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

# The package's name: `hermes` and `hermes-agent` are other projects' packages.
DISTRIBUTION = "hermes-gateway"
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_OWN_EXTRAS = re.compile(rf"{DISTRIBUTION}\[([\w,-]+)\]")
# Files by which these tools know the environments that they have made.
_MARKERS = {"pipx": "pipx_metadata.json", "uv": "uv-receipt.toml"}


@dataclass(frozen=True, slots=True)
class Installation:
    """`tool`: `checkout`, `pipx`, `uv` or `pip`. `source`: the checkout's folder, or where it was installed from; empty
    for a package index."""

    tool: str
    source: str = ""

    def add(self, *requirements: str) -> list[str]:
        """The command that installs more packages beside Hermes."""
        if find_spec("pip") is None:
            return ["uv", "pip", "install", "--python", sys.executable, "--quiet", *requirements]
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *requirements]

    def update(self, source: str = "") -> list[list[str]]:
        """The commands that install the newest version, or the one from `source`."""
        wanted = source or self.source or DISTRIBUTION
        if self.tool == "checkout":
            return [["git", "-C", wanted, "pull", "--ff-only", "--quiet"], ["make", "-s", "-C", wanted, "setup"]]
        if self.tool == "pipx":
            return [["pipx", "install", "--quiet", "--force", wanted] if source else ["pipx", "upgrade", DISTRIBUTION]]
        if self.tool == "uv":
            return [["uv", "tool", "install", "--force", wanted] if source else ["uv", "tool", "upgrade", DISTRIBUTION]]
        return [self.add("--upgrade", wanted)]

    def remove(self) -> list[str]:
        """The command that uninstalls; empty for a checkout, which is the user's own folder."""
        commands = {
            "checkout": [],
            "pipx": ["pipx", "uninstall", DISTRIBUTION],
            "uv": ["uv", "tool", "uninstall", DISTRIBUTION],
        }
        return commands.get(self.tool, [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", DISTRIBUTION])


def installation() -> Installation:
    source, editable = _origin()
    if editable:
        return Installation("checkout", source)
    tool = next((tool for tool, marker in _MARKERS.items() if Path(sys.prefix, marker).is_file()), "pip")
    return Installation(tool, source)


def _origin() -> tuple[str, bool]:
    """Where the package was installed from (PEP 610), and whether that is an editable folder."""
    try:
        record = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return "", False
    url, repository = str(record.get("url", "")), record.get("vcs_info")
    if repository:
        revision = repository.get("requested_revision")
        return f"{repository['vcs']}+{url}" + (f"@{revision}" if revision else ""), False
    path = unquote(urlsplit(url).path) if url.startswith("file:") else url
    return path, bool(record.get("dir_info", {}).get("editable"))


def extras() -> dict[str, list[str]]:
    """The optional extras with the packages that each needs."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    parts: dict[str, list[str]] = {}
    for line in requirements:
        for extra in _EXTRA.findall(line):
            parts.setdefault(extra, []).append(line.split(";")[0].strip())
    return {extra: _flat(packages, parts) for extra, packages in sorted(parts.items())}


def _flat(packages: list[str], parts: dict[str, list[str]]) -> list[str]:
    """Package names, with those of referenced extras."""
    flat: list[str] = []
    for package in packages:
        own = _OWN_EXTRAS.match(package)
        flat += [name for extra in own[1].split(",") for name in _flat(parts[extra], parts)] if own else [package]
    return flat


def is_installed(packages: list[str]) -> bool:
    try:
        return all(metadata.version(_NAME.match(package)[0]) for package in packages)  # type: ignore[index]
    except metadata.PackageNotFoundError:
        return False
