"""Every command and snippet of README.md and docs/ is executed as it stands, but for the port and the addresses of services.

A block that cannot run here has a comment above it, `<!-- not run: why -->`. Models answer from a script, or with
`HERMES_DOCS_MODEL=embedded` with the model that is installed in the user's own home.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from hermes.core.home import resolve
from hermes.settings.check import entries
from hermes.settings.files import parse_yaml
from local.conftest import tiny_model
from support.model_server import ModelServer, Reply
from support.server_thread import serving
from support.waiting import until_blocking

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
BIN = Path(sys.executable).parent
# Before tests get an environment and a home of their own.
IS_EMBEDDED = os.environ.get("HERMES_DOCS_MODEL") == "embedded"
INSTALLED_MODELS = resolve().models
# Generous: the embedded model answers on a processor that others use too.
PATIENCE_S = 900 if IS_EMBEDDED else 400
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^>]+) -->\n+)?```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)
# `make run` is what the server of these tests is; this is `make test`.
_SERVED = re.compile(r"^make (run|test)\b.*$", re.M)


class Block(NamedTuple):
    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that can be executed or checked."""
    text = page.read_text("utf-8")
    return [
        Block(match["language"], match["text"], text.count("\n", 0, match.start("language")) + 1)
        for match in _BLOCK.finditer(text)
        if match["why"] is None
    ]


class Machine:
    """Where a page's commands run: a folder with a git repository, a home per block, a model, and a server where one is named."""

    def __init__(self, folder: Path, model: ModelServer) -> None:
        self.folder, self.model = folder, model
        self.port = 0
        self._homes = 0
        self._served: Path | None = None
        self.work = folder / "work"
        self.work.mkdir()
        (self.work / ".venv").symlink_to(BIN.parent)
        (folder / "models").mkdir()
        if (file := tiny_model()) is not None:
            (folder / "models/bigger.gguf").symlink_to(file)
        (self.work / "notes.txt").write_text("The garden is watered at six.\n")
        self.git("init", "-q")
        self.git("add", "notes.txt")
        self.git("-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "notes")
        (self.work / "notes.txt").write_text("The garden is watered at seven.\n")

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.work, check=True)

    def home(self) -> Path:
        """A new home with one conversation in it."""
        self._homes += 1
        home = self.folder / f"home-{self._homes}"
        if self._homes > 1:
            shutil.copytree(self.folder / "home-1", home, symlinks=True)
            return home
        home.mkdir(mode=0o700)
        if IS_EMBEDDED:
            assert any(INSTALLED_MODELS.glob("*.gguf")), f"no model in {INSTALLED_MODELS}: hermes model install"
            (home / "models").symlink_to(INSTALLED_MODELS)
        else:
            route = {"provider": "custom", "default": "m", "base_url": f"{self.model.url}/v1", "api_key": "k"}
            (home / "config.yaml").write_text(yaml.safe_dump({"model": route}))
        question = [BIN / "hermes", "-z", "What is on the kitchen list for dinner?"]
        subprocess.run(question, env=self.environment(home), cwd=self.work, check=True, capture_output=True)
        return self.home()

    def environment(self, home: Path) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "HERMES_HOME": str(home),
            "HERMES_API_KEY": "none",
            "NO_COLOR": "1",
        }

    def here(self, text: str) -> str:
        """The text with this machine's addresses."""
        ports = {"8642": self.port, **dict.fromkeys(("11434", "8080"), self.model.port)}
        return re.sub(r"127\.0\.0\.1:(8642|11434|8080)", lambda match: f"127.0.0.1:{ports[match[1]]}", text)

    @contextmanager
    def server(self) -> Iterator[None]:
        home = self.home()
        with (self.folder / "server.log").open("w") as log:
            process = subprocess.Popen(
                [BIN / "hermes", "gateway", "run", "--port", "0"],
                env=self.environment(home),
                cwd=self.work,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        try:
            self.port, self._served = self._listening(home, process), home
            yield
        finally:
            process.terminate()
            assert process.wait(PATIENCE_S) == 0

    def _listening(self, home: Path, process: subprocess.Popen[bytes]) -> int:
        def port() -> int:
            assert process.poll() is None, (self.folder / "server.log").read_text()
            state = home / "gateway_state.json"
            return int(json.loads(state.read_text()).get("port") or 0) if state.exists() else 0

        return until_blocking(port, seconds=PATIENCE_S)

    def run(self, command: list[str | Path], stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run it in the server's home, or in one of its own where it changes settings."""
        changes_settings = re.search(r"hermes (config (un)?set|model use)", str(command[-1]))
        return subprocess.run(
            command,
            input=stdin,
            env=self.environment(self.home() if changes_settings or self._served is None else self._served),
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    # ---- one method for each language

    def sh(self, text: str) -> None:
        script = _SERVED.sub("", self.here(text))
        result = self.run(["bash", "-euo", "pipefail", "-c", script], stdin="a-key-to-read\n")
        assert result.returncode == 0, f"{script}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.stderr

    def python(self, text: str) -> None:
        result = self.run([sys.executable, "-c", self.here(text)])
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"

    def sql(self, text: str) -> None:
        with closing(sqlite3.connect(self.home() / "state.db")) as database:
            database.execute(text).fetchall()

    def yaml(self, text: str) -> None:
        _, problems = entries(parse_yaml(text.encode(), Path("config.yaml")))
        assert problems == []

    def json(self, text: str) -> None:
        json.loads(text)

    def toml(self, text: str) -> None:
        tomllib.loads(text)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with serving(Reply(text="Good evening.")) as model:
        model.repeat, model.models = True, [{"id": "m"}]
        yield Machine(tmp_path, model)


_RUNNABLE = ("sh", "python", "sql", "yaml", "json", "toml")


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.language in _RUNNABLE for block in blocks(page))],
    ids=lambda page: page.name,
)
def test_snippets_of_page(page: Path, machine: Machine) -> None:
    runnable = [block for block in blocks(page) if block.language in _RUNNABLE]
    with ExitStack() as stack:
        if any("127.0.0.1:8642" in block.text for block in runnable):
            stack.enter_context(machine.server())
        for block in runnable:
            print(f"{page.name}:{block.line}")
            getattr(machine, block.language)(block.text)


def test_every_block_names_its_language() -> None:
    plain = {"text", "", "console", "css", "nginx", "lua"}
    unknown = [
        (page.name, block.line)
        for page in PAGES
        for block in blocks(page)
        if block.language not in {*_RUNNABLE, *plain}
    ]
    assert unknown == []


def test_curl_example_of_every_operation(machine: Machine) -> None:
    """An operation answers its example: done, or that there is nothing of that id. It never fails."""
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    try:
        from docs_pages import http
    finally:
        sys.path.pop(0)
    examples = re.findall(r"^```sh\n(curl.*?)^```", http(), re.M | re.S)
    assert len(examples) > 80

    def call(example: str) -> tuple[str, int, str, str] | None:
        """What went wrong, if anything did."""
        command = machine.here(example).replace("curl ", "curl -s -m 60 -o /dev/null -w %{http_code} ", 1)
        result = machine.run(["bash", "-c", command])
        is_live = result.returncode == 28 and result.stdout == "200"  # a stream that stays open
        if is_live or (result.returncode == 0 and 200 <= int(result.stdout or 0) < 500):
            return None
        return example, result.returncode, result.stdout, result.stderr

    with machine.server(), ThreadPoolExecutor(8) as pool:
        assert [failure for failure in pool.map(call, examples) if failure] == []
