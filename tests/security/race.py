"""A command in the background swaps what a sandbox protects for links that lead out, while other commands are started.

`race.py LAYOUT SECONDS FOLDER` prints how many commands were started, and what of the outside any of them has read or
changed. It needs nothing but the standard library and the sandbox, so that any user can run it.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from hermes.core.home import Home
from hermes.sandbox.base import Process, Sandbox, SandboxError
from hermes.sandbox.bubblewrap import Bubblewrap
from hermes.sandbox.mounts import Place

# Exchanges each name with a link to the folder above, every millisecond.
SWAPPER = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
names = sys.argv[1:]
while True:
    for name in names:
        link = os.path.join(os.path.dirname(name), "link-" + os.path.basename(name))
        try:
            os.symlink("../" * (name.count("/") + 1), link)
        except OSError:
            pass
        if not os.path.lexists(name):
            os.makedirs(name, exist_ok=True)
        libc.renameat2(-100, name.encode(), -100, link.encode(), 2)
    time.sleep(0.001)
"""
TARGETS = {
    "existing": [".git", ".git/hooks", ".git/config"],
    "new": [".git", "sub/.git", "sub/.git/hooks"],
    "submodules": [".git", ".git/modules", ".git/modules/part", ".git/modules/part/hooks", "part"],
}
ATTEMPT = """
for home in {home} {home}/workspace/.git {home}/workspace/.git/hooks; do
  cat $home/.env $home/config.yaml $home/canary; echo changed >> $home/config.yaml; echo made > $home/made
done 2>/dev/null
cat .env .git/.env .git/hooks/.env ../.env .git/modules/part/.env 2>/dev/null
echo started
"""


def lay_out(layout: str, workspace: Path) -> None:
    def git(*args: str) -> None:
        subprocess.run(
            ["git", "-c", "protocol.file.allow=always", "-c", "user.name=a", "-c", "user.email=a@b.test", *args],
            check=True, capture_output=True, cwd=workspace, env={"PATH": os.environ["PATH"], "HOME": str(workspace.parent)},
        )  # fmt: skip

    if layout == "new":
        return
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "x")
    if layout == "submodules":
        subprocess.run(["git", "clone", "-q", str(workspace), str(workspace.parent / "origin")], check=True)
        git("submodule", "add", "-q", str(workspace.parent / "origin"), "part")


async def read(process: Process) -> str:
    async with process:
        return b"".join([chunk async for chunk in process.chunks()]).decode(errors="replace")


async def main(layout: str, seconds: float, folder: Path) -> None:
    home = Home(folder / "hermes")
    home.workspace.mkdir(parents=True)
    (home.path / ".env").write_text("KEY=outside-secret")
    (home.path / "config.yaml").write_text("outside: config\n")
    (folder / "canary").write_text("outside-canary")
    (home.path / "canary").write_text("outside-canary")
    lay_out(layout, home.workspace)

    def sandbox(session: str) -> Sandbox:
        private = home.sandbox / session / "home"
        return Bubblewrap(Place(home, home.workspace, private, env={"PATH": os.environ["PATH"], "HOME": str(private)}))

    attacker, foreground = sandbox("attacker"), sandbox("foreground")
    swap = [attacker.python, "-c", SWAPPER, *TARGETS[layout]]
    swapping = await attacker.spawn(swap)
    ended = asyncio.ensure_future(swapping.wait())
    started, refused, leaked, attacks = 0, 0, "", 1
    until = time.monotonic() + seconds
    # For so long, and longer where little was started; to start what it counts is what it is for.
    while time.monotonic() < until or (started < 3 and time.monotonic() < until + 60):
        if ended.done():  # it was ended for trying again and again
            swapping.close()
            with contextlib.suppress(SandboxError):
                swapping, attacks = await attacker.spawn(swap), attacks + 1
                ended = asyncio.ensure_future(swapping.wait())
        fresh = sandbox(f"s{started % 7}")
        for each in (fresh, foreground, attacker):
            try:
                output = await read(await each.spawn(["/bin/sh", "-c", ATTEMPT.format(home=home.path)]))
            except SandboxError:
                refused += 1
                continue
            started += "started" in output
            leaked += output if "outside" in output else ""
        await fresh.stop()
    for each in (attacker, foreground):
        await each.stop()
    swapping.close()
    files = {path.name: path.read_text() for path in home.path.iterdir() if path.is_file()}
    changed = files != {".env": "KEY=outside-secret", "config.yaml": "outside: config\n", "canary": "outside-canary"}
    print(
        json.dumps({"started": started, "refused": refused, "attacks": attacks, "leaked": leaked, "changed": changed})
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])))
