"""The server under test: a process of its own, its model a script behind a real socket."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clients.scenes import answer
from support.model_server import ModelServer
from support.server_thread import serving

HERMES = Path(__file__).resolve().parents[2] / ".venv/bin/hermes"
_KEY = "a7Yk2mQ9xR4tV6wZ1bN8cL3dF5gH0jKp"
_CONFIG = """\
model: {{default: test-model, base_url: '{model}/v1', api_key: sk-test-0123456789abcdef}}
auxiliary: {{title_generation: {{enabled: false}}}}
agent: {{api_max_retries: 0}}
api_server: {{key: {key}, ollama: true}}
"""


@dataclass(frozen=True)
class Hermes:
    """A running server, the model it asks, and its home."""

    url: str
    key: str
    model: ModelServer
    home: Path


def home_of(home: Path, model: ModelServer) -> dict[str, str]:
    """Write the settings of a home, and return the environment of its processes."""
    config = home / "config.yaml"
    config.write_text(_CONFIG.format(model=model.url, key=_KEY))
    config.chmod(0o600)
    return {"PATH": os.environ["PATH"], "HOME": str(home), "HERMES_HOME": str(home)}


@contextmanager
def running(home: Path, **variables: str) -> Iterator[Hermes]:
    """A server whose home is this folder, with these variables in its environment."""
    with serving() as model:
        model.handler = answer
        environment = {**home_of(home, model), **variables}
        with (home / "stderr.txt").open("w") as errors:
            process = subprocess.Popen(
                [HERMES, "gateway", "run", "--port", "0"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            yield Hermes(_address(process, home) + "/v1", _KEY, model, home)
        finally:
            process.terminate()
            process.wait(timeout=60)


def _address(process: subprocess.Popen[str], home: Path) -> str:
    """The address in the line that says that the server is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        if " listening on " in line:
            return line.split(" listening on ")[1].split()[0]
    raise AssertionError("the server did not start: " + (home / "stderr.txt").read_text())
