"""Starts a command in a sandbox and does not look after it: `forgetful.py BACKEND forget|wait SECONDS FOLDER`"""

import asyncio
import sys
from pathlib import Path

from hermes.home import Home
from hermes.sandbox.base import Sandbox
from hermes.sandbox.bubblewrap import Bubblewrap
from hermes.sandbox.local import Local
from hermes.sandbox.mounts import Place


async def main(backend: str, way: str, seconds: str, folder: Path) -> None:
    workspace = folder / "work"
    workspace.mkdir(exist_ok=True)
    env = {"PATH": "/usr/bin:/bin"}
    place = Place(Home(folder / "home"), workspace, folder / "home/sandbox/s/home", env=env)
    sandbox: Sandbox = Local(place) if backend == "local" else Bubblewrap(place)
    process = await sandbox.spawn(["/bin/sh", "-c", f"setsid sleep {seconds} & echo ready; sleep {seconds}"])
    async for _ in process.chunks():
        break
    print("started", flush=True)
    if way == "wait":
        await process.wait()
    print("forgotten", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
