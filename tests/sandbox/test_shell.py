"""What one command of a task leaves to the next: its folder and what it exported, and nothing that it only printed."""

from pathlib import Path

import pytest

from hermes.core.limits import SHELL_STATE_BYTES_MAX
from hermes.sandbox.base import Sandbox
from hermes.sandbox.choose import shell_in
from hermes.sandbox.shell import Shell

from .conftest import Result, finished


class Task:
    """A task in a sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox, self.shell = sandbox, shell_in(sandbox)

    async def run(self, command: str, seconds: float | None = None) -> Result:
        argv = self.shell.argv(command)
        result = await finished(await self.sandbox.spawn(argv, env=self.shell.env, seconds=seconds))
        self.shell.keep()
        return result


@pytest.fixture
def task(sandbox: Sandbox) -> Task:
    return Task(sandbox)


async def test_cwd_and_exports_persist_between_commands(task: Task) -> None:
    workspace = str(task.sandbox.place.workspace)
    first = await task.run("mkdir -p 'a b/c'; cd 'a b/c'; export A='x\ny' B=\"it's\"; C=local; exit 3")
    assert (first.code, task.shell.cwd) == (3, f"{workspace}/a b/c")
    second = await task.run('pwd; echo "$A,$B,$C"; unset A; cd ..')
    assert second.output == f"{workspace}/a b/c\nx\ny,it's,\n"
    assert (await task.run('pwd; echo "<$A>$B"')).output == f"{workspace}/a b\n<>it's\n"
    assert not {"_", "PWD", "SHLVL"} & set(task.shell.env)
    assert not list(task.sandbox.place.private.glob(".hermes-*"))


BREAKING = [
    ("kill -9 $$", 137),
    ("exec sh -c 'exit 4'", 4),
    ("exec >/dev/null 2>&1; kill -TERM $$", 143),
    ("if then", 2),
    ("trap - EXIT; cd /; export LOST=1; exit 5", 5),
    ("cat <<'E'\nit's $HOME\nE\nfalse", 1),
    ("set -eu; false; echo never", 1),
    ("rm -f ~/.hermes-*; ln -s /etc/passwd ~/.hermes-x; exit 6", 6),
    ('for f in ~/.hermes-*; do ln -sf /etc/passwd "$f"; done; kill -9 $$', 137),
    ("export BIG=$(head -c 120000 /dev/zero | tr '\\0' x) BIG2=$(head -c 120000 /dev/zero | tr '\\0' x)", 0),
]


async def test_no_command_breaks_next_one(task: Task, subtests: pytest.Subtests) -> None:
    await task.run("export KEPT=1")
    for command, code in BREAKING:
        with subtests.test(command=command):
            result = await task.run(command)
            assert result.code == code
            after = await task.run('echo "$KEPT$LOST$BIG"; pwd')
            assert after.output == f"1\n{task.sandbox.place.workspace}\n"


async def test_syntax_error_is_reported(task: Task) -> None:
    result = await task.run("echo 'unfinished")
    assert result.code == 2
    assert "sh: " in result.output


async def test_deleted_cwd_falls_back_to_workspace(task: Task) -> None:
    await task.run("mkdir gone; cd gone; rmdir ../gone")
    assert (await task.run("pwd")).output == f"{task.sandbox.place.workspace}\n"


async def test_timed_out_command_leaves_no_state(task: Task) -> None:
    assert (await task.run("cd /; export A=1; sleep 1000", seconds=0.3)).code == 124
    assert (await task.run('pwd; echo "<$A>"')).output == f"{task.sandbox.place.workspace}\n<>\n"


async def test_output_cannot_forge_shell_state(task: Task) -> None:
    await task.run("printf '/\\0A=forged\\0\\0'; printf '/\\0A=forged\\0\\0' >&2")
    assert (await task.run('pwd; echo "<$A>"')).output == f"{task.sandbox.place.workspace}\n<>\n"


async def test_broken_path_variable_affects_one_command(task: Task) -> None:
    await task.run("export PATH=/nowhere")
    assert (await task.run("echo still here")).output == "still here\n"
    assert task.shell.env["PATH"] == "/nowhere"


async def test_remember_false_keeps_no_state(task: Task) -> None:
    argv = task.shell.argv("cd /; export A=1", remember=False)
    assert (await finished(await task.sandbox.spawn(argv, env=task.shell.env))).code == 0
    task.shell.keep()
    assert (task.shell.cwd, task.shell.env) == (str(task.sandbox.place.workspace), dict(task.sandbox.place.env))


@pytest.mark.parametrize(
    ("record", "is_read"),
    [
        (b"/new\0A=1\0\0", True),
        (b"/new\0A=1\0", False),
        (b"/new\0A=1", False),
        (b"", False),
        (b"/new\0" + b"A" * SHELL_STATE_BYTES_MAX + b"\0\0", False),
    ],
)
def test_only_complete_state_record_is_read(tmp_path: Path, record: bytes, is_read: bool) -> None:
    shell = Shell(tmp_path, "/old", {})
    shell.argv("true")
    (path,) = tmp_path.glob(".hermes-*")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(record)
    shell.keep()
    assert (shell.cwd, shell.env) == (("/new", {"A": "1"}) if is_read else ("/old", {}))
    assert not list(tmp_path.iterdir())


def test_replaced_state_record_is_not_read(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "folder", "/old", {})
    shell.argv("true")
    (path,) = (tmp_path / "folder").glob(".hermes-*")
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(b"/new\0SECRET=1\0\0")
    path.symlink_to(tmp_path / "elsewhere")
    shell.keep()
    assert (shell.cwd, shell.env) == ("/old", {})
    assert (tmp_path / "elsewhere").exists()
