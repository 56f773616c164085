"""The processes that are measured, each on one core, and what they use of it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SRC = Path(__file__).resolve().parents[1] / "src"
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, OTHER_CORE = CORES[0], CORES[-1]
_TICKS = os.sysconf("SC_CLK_TCK")
SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"default": "bench", "api_key": "key-of-the-bench"},
    # A title is one more question to the model, once in a session; here every turn would be the first of its session.
    "auxiliary": {"title_generation": {"enabled": False}},
    # By default no more than 256 turns go on at once.
    "api_server": {"max_concurrent_runs": 0},
}


@dataclass(frozen=True, slots=True)
class Server:
    """A process that listens."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def resident_mb(self) -> float:
        """Its resident memory."""
        match = re.search(r"VmRSS:\s*(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        return int(match[1]) / 1024 if match else 0.0


def cpu_s(pid: int) -> float:
    """Seconds of CPU that all threads of a process have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def pinned(*cores: int) -> list[str]:
    """What a command is begun with to stay on these cores."""
    return ["taskset", "-c", ",".join(map(str, cores))] if shutil.which("taskset") else []


def environment(folder: Path | None) -> dict[str, str]:
    """What a process is to know: nothing of how this one was started, but for the source that lies beside the bench."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HERMES_", "PYTHON"))}
    env["PYTHONPATH"] = str(SRC)
    return env | ({"HERMES_HOME": str(folder)} if folder else {})


@contextlib.contextmanager
def started(
    command: list[str], *cores: int, folder: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server, once it listens, and to its end."""
    with (
        open(os.devnull if folder is None else folder / "stderr.txt", "wb") as stderr,
        subprocess.Popen(
            [*pinned(*cores), *command],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**environment(folder), **(env or {})},
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        match = re.search(r"listening on (http://\S+)", line)
        try:
            assert match, f"{command} did not start"
            yield Server(match[1], process.pid)
        finally:
            process.terminate()
            process.wait(30)


def provider() -> contextlib.AbstractContextManager[Server]:
    """The model."""
    return started([sys.executable, "-m", "bench.provider"], OTHER_CORE)


def relay(model: Server) -> contextlib.AbstractContextManager[Server]:
    """The limit."""
    return started([sys.executable, "-m", "bench.relay", model.url], SERVER_CORE)


@contextlib.contextmanager
def hermes(
    model: Server, folder: Path | None = None, workers: int | None = None, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Hermes, in a home of its own. With a number of workers it may use every core."""
    with contextlib.ExitStack() as held:
        home = folder or Path(held.enter_context(tempfile.TemporaryDirectory()))
        settings = {**SETTINGS, "model": {**SETTINGS["model"], "base_url": model.url}}
        (home / "config.yaml").write_text(yaml.safe_dump(settings))
        (home / "workspace").mkdir(exist_ok=True)
        (home / "workspace/notes.txt").write_text("".join(f"line {n} of the notes\n" for n in range(60)))
        command = [sys.executable, "-m", "hermes", "gateway", "run", "--port", "0"]
        command += ["--workers", str(workers)] if workers else []
        cores = CORES if workers else [SERVER_CORE]
        yield held.enter_context(started(command, *cores, folder=home, env=env))
