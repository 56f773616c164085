"""Starts a command in a sandbox and does not look after it: `forgetful.py BACKEND forget|wait|die SECONDS FOLDER`

With `die` it is killed while bubblewrap is starting, whose arguments then hold the folder's `init.py`.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from hermes.core.home import Home
from hermes.sandbox import namespace
from hermes.sandbox.base import Sandbox
from hermes.sandbox.bubblewrap import Bubblewrap
from hermes.sandbox.local import Local
from hermes.sandbox.mounts import Place


def die(_: int) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(backend: str, way: str, seconds: str, folder: Path) -> None:
    workspace = folder / "work"
    workspace.mkdir(exist_ok=True)
    env = {"PATH": "/usr/bin:/bin"}
    place = Place(Home(folder / "home"), workspace, folder / "home/sandbox/s/home", env=env)
    sandbox: Sandbox = Local(place) if backend == "local" else Bubblewrap(place)
    if way == "die":
        init = folder / "init.py"
        init.symlink_to(namespace._INIT)
        namespace._INIT, namespace._child_pid = init, die
    process = await sandbox.spawn(["/bin/sh", "-c", f"setsid sleep {seconds} & echo ready; sleep {seconds}"])
    async for _ in process.chunks():
        break
    print("started", flush=True)
    if way == "wait":
        await process.wait()
    print("forgotten", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
