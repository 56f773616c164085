"""Builds the page before a wheel or a source distribution of a checkout is made, where Node is at hand."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PageBuilder(BuildHookInterface):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        page = root / "src" / "hermes" / "server" / "web" / "index.html"
        if version != "editable" and not page.exists() and (root / "web" / "package.json").exists():
            subprocess.run(["sh", "scripts/build-web"], cwd=root, check=True)
