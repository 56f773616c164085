"""The command `claude` of the package `@anthropic-ai/claude-code`, in its print mode."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The program itself is in a package for each platform; `npm ci --ignore-scripts` leaves it there.
_PACKAGES = Path(__file__).resolve().parents[1] / "node/node_modules/@anthropic-ai"


def command() -> Path | None:
    """The program for this machine; None where there is none."""
    paths = sorted(_PACKAGES.glob("claude-code-*/claude"))
    return paths[0] if paths else None


@dataclass(frozen=True)
class Answer:
    """What a turn of Claude Code printed, event by event."""

    events: list[dict[str, Any]]
    errors: str

    @property
    def result(self) -> dict[str, Any]:
        """The last event, which has the text of the answer."""
        assert self.events and self.events[-1]["type"] == "result", (self.events[-1:], self.errors)
        return self.events[-1]

    def blocks(self, role: str, kind: str) -> list[dict[str, Any]]:
        """The blocks of a type in the messages of a role."""
        contents = [event["message"]["content"] for event in self.events if event["type"] == role]
        return [block for blocks in contents for block in blocks if block["type"] == kind]


class ClaudeCode:
    """Claude Code with a home and a project of its own."""

    def __init__(self, folder: Path, url: str, key: str) -> None:
        self.project = folder / "project"
        self.project.mkdir()
        home = folder / "home"
        home.mkdir()
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_RETRIES": "0",
            # It refuses to run commands without asking as root, unless it is told that this is a sandbox.
            "IS_SANDBOX": "1",
            # Nothing but the server is to be asked.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
            "NO_PROXY": "127.0.0.1",
        }

    def ask(self, prompt: str, *options: str) -> Answer:
        """A turn; with `--continue` it goes on from the last."""
        program = command()
        assert program is not None
        printed = ["--output-format", "stream-json", "--verbose", "--permission-mode", "bypassPermissions"]
        result = subprocess.run(
            [program, "-p", prompt, *printed, *options],
            env=self._environment,
            cwd=self.project,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Answer([json.loads(line) for line in result.stdout.splitlines()], result.stderr)
