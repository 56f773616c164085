"""Runs `hermes` commands: in this process, as a process or at a terminal; with a scripted model, and a server if wanted."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from hermes.cli.main import main
from hermes.core.home import Home, write_private
from hermes.server.status import local_url
from hermes.store.sessions import SessionDB
from support.model_server import ModelServer, Reply
from support.ports import refusing_port
from support.preloaded import HermesProcess
from support.server_thread import serving

from .shell import Editor, Hermes, Result, TerminalInput
from .terminal import Terminal

KEY = "q7Zr-4fJ0_pW2xLs9TnB6vYc1HdK8mGa"
HERMES = [sys.executable, "-m", "hermes"]
# The request for a title would consume a reply of the script in tests about something else.
SETTINGS = "auxiliary: {title_generation: {enabled: false}}\nterminal: {backend: local}\nagent: {api_max_retries: 0}\n"


class CompletedCommand(NamedTuple):
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


class Cli:
    """Runs commands in a home and a folder of their own."""

    def __init__(self, home: Path, folder: Path, model: ModelServer, stack: contextlib.ExitStack) -> None:
        self.home, self.folder, self.model, self._stack = home, folder, model, stack
        self.env = {"PATH": os.environ["PATH"], "HERMES_HOME": str(home), "HOME": str(folder)}
        self.server: subprocess.Popen[str] | None = None
        self.more, self.shared, self.options = "", False, ("", "")
        folder.mkdir()
        home.mkdir(mode=0o700)
        self.configure()

    def configure(self, more: str = "") -> None:
        self.more = more
        text = f"model: {{default: m, base_url: '{self.model.url}/v1'}}\n{SETTINGS}{more}"
        if self.shared:
            text = text.replace("backend: local", f"backend: local, workspaces: ['{self.folder}']")
        write_private(self.home / "config.yaml", text)

    def script(self, *replies: Reply) -> None:
        self.model.script = list(replies)

    def run(self, *args: str, stdin: str = "", **env: str) -> CompletedCommand:
        """Run a command in this process, which is faster than starting one."""
        out, err = io.StringIO(), io.StringIO()
        (self.home.parent / "stdin").write_text(stdin)
        with (
            (self.home.parent / "stdin").open() as piped,
            patch.dict(os.environ, self.env | env, clear=True),
            patch.object(sys, "stdin", piped),
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                code = main(args)
            except SystemExit as end:
                code = int(end.code or 0)
        return CompletedCommand(code, out.getvalue(), err.getvalue())

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start a command as a process."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = HermesProcess([*HERMES, *args], env=self.env, cwd=self.folder, text=True, **pipes)
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return process

    def terminal(self, *args: str, **more: Any) -> Terminal:
        """Start a command at a terminal, and wait for its prompt."""
        terminal = Terminal([*HERMES, *args], self.env, self.folder, **more)
        self._stack.callback(terminal.close)
        terminal.until(lambda screen: " tokens" in screen.rpartition("\n")[2])
        return terminal

    def serve(self, *args: str) -> None:
        """Start a server of the home, which may work in the command's folder."""
        self.shared = True
        self.configure(self.more)
        self.server = self.start("gateway", "run", *(args or ("--port", "0")))
        assert self.server.stdout is not None
        assert "listening" in self.server.stdout.readline(), self.server.communicate()

    def sessions(self) -> list[dict[str, Any]]:
        with contextlib.closing(SessionDB(self.home / "state.db")) as db:
            return [db.get_session(session["id"]) or {} for session in db.list_sessions()]

    def messages(self) -> list[tuple[str, Any]]:
        """Role and content of the messages of the only session."""
        [session] = self.sessions()
        with contextlib.closing(SessionDB(self.home / "state.db")) as db:
            return [(row["role"], row["content"]) for row in db.get_messages(session["id"])]

    def model_messages(self, at: int = -1) -> list[tuple[str, str]]:
        """Role and text of the messages of a model request, without the system prompt."""
        return [(turn.role, turn.text) for turn in self.model.requests[at].turns if turn.role != "system"]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nobody listens."""
    with refusing_port() as port:
        yield port


@pytest.fixture
def home(home_folder: Path) -> Home:
    home_folder.mkdir(mode=0o700)
    return Home(home_folder)


@pytest.fixture
def hermes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hermes:
    """Runs a command in this process; `typed` is terminal input, `piped` is piped input."""

    def run(*args: str, typed: str | None = None, piped: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped) if typed is None else TerminalInput(typed))
        capsys.readouterr()
        try:
            code = main(args)
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return Result(code, printed.out, printed.err)

    return run


@pytest.fixture
def editor(monkeypatch: pytest.MonkeyPatch) -> Editor:
    """Sets $EDITOR to a line of Python in which `path` is the edited file."""

    def use(program: str) -> None:
        script = f"from pathlib import Path; import sys; path = Path(sys.argv[1]); {program}"
        monkeypatch.setenv("EDITOR", f'"{sys.executable}" -c "{script}"')

    monkeypatch.delenv("VISUAL", raising=False)
    return use


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    with serving() as model, contextlib.ExitStack() as stack:
        yield Cli(tmp_path / "home", tmp_path / "folder", model, stack)


@pytest.fixture(params=["here", "server"])
def cli_or_server(cli: Cli, request: pytest.FixtureRequest) -> Cli:
    """Runs the test twice: with the agent in the command's process, and in a server."""
    if request.param == "server":
        cli.serve()
    return cli


@pytest.fixture
def elsewhere(cli: Cli) -> Cli:
    """A server, and commands with another home, which has no model and none of the server's sessions."""
    cli.configure(f"api_server: {{key: {KEY}}}\n")
    cli.serve()
    url = local_url(Home(cli.home))
    own = cli.home.parent / "own"
    own.mkdir(mode=0o700)
    write_private(own / "config.yaml", "model: {path: none}\n")
    cli.env |= {"HERMES_HOME": str(own), "HERMES_API_KEY": KEY}
    cli.options = ("--server", url)
    return cli


def lines_of(text: str) -> list[Any]:
    """Parse JSON lines."""
    return [json.loads(line) for line in text.splitlines()]
