"""Whatever runs in a workspace, no sandbox that is built or entered meanwhile shows anything of the outside."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import hermes
from hermes.sandbox import bubblewrap

RACE = Path(__file__).with_name("race.py")
SOURCE = Path(hermes.__file__).parents[1]


def python_of(user: str) -> list[str]:
    """How to run Python as this user."""
    if user == "root":
        return [sys.executable]
    if os.geteuid() != 0:
        return [sys.executable]
    become = ["runuser", "-u", "nobody", "--"]
    for python in ("/usr/bin/python3", sys.executable):
        test = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import hermes.sandbox.bubblewrap; from asyncio import timeout"
        argv = [*become, python, "-B", "-c", test]
        if shutil.which("runuser") and subprocess.run(argv, capture_output=True, cwd="/", check=False).returncode == 0:
            return [*become, python]
    pytest.skip("no other user can run a Python that is new enough here")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user may write to."""
    with tempfile.TemporaryDirectory(prefix="hermes-race-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


def race(user: str, layout: str, seconds: float, folder: Path) -> None:
    if failure := bubblewrap.probe():
        pytest.skip(f"bubblewrap does not work here: {failure}")
    if user == "root" and os.geteuid() != 0:
        pytest.skip("the suite does not run as root")
    env = {"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"], "HOME": str(folder)}
    argv = [*python_of(user), "-B", "-c", RACE.read_text(), layout, str(seconds), str(folder)]
    process = subprocess.run(argv, env=env, capture_output=True, text=True, cwd="/", check=False)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert (result["leaked"], result["changed"]) == ("", False), result
    assert result["started"] >= 3, result


@pytest.mark.parametrize("layout", ["existing", "new", "submodules"])
@pytest.mark.parametrize("user", ["root", "plain"])
def test_swapped_mount_points_do_not_escape(user: str, layout: str, folder: Path) -> None:
    race(user, layout, 2, folder)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["existing", "new", "submodules"])
@pytest.mark.parametrize("user", ["root", "plain"])
def test_swapped_mount_points_do_not_escape_for_a_minute(user: str, layout: str, folder: Path) -> None:
    race(user, layout, 60, folder)
