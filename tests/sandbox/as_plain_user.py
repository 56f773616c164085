"""Run by a user without rights: says whether a sandbox works, hides the home, bounds processes, and ends whole."""

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path

from hermes.core.home import Home
from hermes.sandbox import bubblewrap
from hermes.sandbox.mounts import Place


async def output(
    sandbox: bubblewrap.Bubblewrap, script: str, seconds: float | None = None, end: str = "nothing ends it"
) -> str:
    text = ""
    async with await sandbox.spawn(["/bin/sh", "-c", script], seconds=seconds) as process:
        async for chunk in process.chunks():
            text += chunk.decode()
            if end in text:
                process.kill()
    return text


async def main(folder: Path) -> None:
    home = Home(folder / "home")
    home.workspace.mkdir(parents=True)
    (home.path / ".env").write_text("KEY=planted")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home.sandbox / "s/home")}
    place = Place(home, home.workspace, home.sandbox / "s/home", env=env)
    sandbox = bubblewrap.Bubblewrap(place)
    wrote = (await output(sandbox, "echo 1 > made; cat made")).strip()
    secret_bytes = (await output(sandbox, f"cat {home.path}/.env 2>/dev/null | wc -l")).strip()
    storm = await output(sandbox, "storm() { storm | storm & }; storm; while :; do sleep 0.1; done", end="fork")
    refused = (await output(sandbox, "touch /usr/x 2>/dev/null || echo refused")).strip()
    print(wrote, secret_bytes, "fork" in storm, refused)
    mark = str(10_000_000 + os.getpid())
    await output(sandbox, f"setsid sleep {mark} & setsid sleep {mark} & sleep {mark}", seconds=0.3)
    leftover = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            leftover += path.read_bytes() == f"sleep\0{mark}\0".encode()
    print(leftover or "gone")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(main(Path(name)))
