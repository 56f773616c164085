"""What others can list of a machine's processes holds neither the commands of the agent nor any value."""

import os
import shlex
from pathlib import Path

import pytest

from hermes.sandbox.docker import Docker
from hermes.sandbox.local import Local
from hermes.sandbox.mounts import Place
from hermes.sandbox.shell import Shell

from .conftest import finished, sh

SECRET, TEXT = "planted-value-4711", "planted-command-4712"
VARIABLES = {"PLAIN": SECRET, "LINES": f"x\n{SECRET}", "LONG": "a" * 70_000 + SECRET, "_UNDER": f"{SECRET}\n'\"$HOME`"}


def process_arguments() -> str:
    """The arguments of every process of this machine, as another user sees them."""
    command_lines = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command_lines.append(
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:
            continue
    return "\n".join(command_lines)


@pytest.mark.parametrize("kind", ["local", "docker"])
async def test_process_arguments_contain_no_command_or_secret(
    request: pytest.FixtureRequest, place: Place, kind: str
) -> None:
    folder: Path | None = request.getfixturevalue("fake_docker") if kind == "docker" else None
    sandbox = Docker(place, "image", "s1") if folder else Local(place)
    shell = Shell(place.private, str(place.workspace), {**place.env, **VARIABLES})
    waiting = place.workspace / "waiting"
    os.mkfifo(waiting)
    text = f'x={TEXT}; echo begun; read -r line <{shlex.quote(str(waiting))}; echo "$LINES|$_UNDER|${{#LONG}}|$0|$#"'
    process = await sandbox.spawn(shell.argv(text), env=shell.env)
    with open(waiting, "w") as file:  # opened once the command reads
        # The stand-in for docker has to give its variables to `env`; a real one sends them through its socket.
        content = (folder / "calls").read_text() if folder else process_arguments()
        file.write("\n")
    result = await finished(process)
    assert TEXT not in content and SECRET not in content
    assert result.output == f"begun\nx\n{SECRET}|{SECRET}\n'\"$HOME`|70018|/bin/sh|0\n"
    await sandbox.stop()


async def test_shell_control_variables_are_not_visible_to_command(place: Place) -> None:
    result = await sh(Local(place), 'env; echo "$HERMES_COMMAND_TEXT|"; exit 3')
    assert result.code == 3 and result.output.endswith("\n|\n") and "echo" not in result.output
