"""What tests of commands share: a home, the command as a function, and an editor that does what a test wants."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from commands.shell import Done, Editor, Hermes, Terminal
from hermes.cli.main import main
from hermes.core.home import Home


@pytest.fixture
def home(home_folder: Path) -> Home:
    home_folder.mkdir(mode=0o700)
    return Home(home_folder)


@pytest.fixture
def hermes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hermes:
    """Runs a command in this process; `typed` is what somebody at a terminal types, `piped` what is piped in."""

    def run(*words: str, typed: str | None = None, piped: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped) if typed is None else Terminal(typed))
        capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return Done(code, printed.out, printed.err)

    return run


@pytest.fixture
def editor(monkeypatch: pytest.MonkeyPatch) -> Editor:
    """Makes the editor one that runs a line of Python in which `path` is the file."""

    def use(program: str) -> None:
        script = f"from pathlib import Path; import sys; path = Path(sys.argv[1]); {program}"
        monkeypatch.setenv("EDITOR", f'"{sys.executable}" -c "{script}"')

    monkeypatch.delenv("VISUAL", raising=False)
    return use
