"""The embedded model: its file, the worker process that runs it, and the way to it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.settings.config import Settings

OFF = "none"
# Headers of ours. On requests whose answer is one object, a call or an answer: whether `all` of it is written, or the
# `rest` of an answer. And how many messages every conversation begins with.
CHOOSES, PREFIX = "X-Hermes-Chooses", "X-Hermes-Prefix"
# From so many bytes of memory on: a context of so many tokens. Not of free memory: processes must agree on it.
_CONTEXTS = ((15 << 30, 16_384), (5 << 30, 8_192), (0, 4_096))


def model_file(home: Home, settings: Settings) -> Path | None:
    configured = settings.model.path or settings.variable("HERMES_LOCAL_MODEL") or ""
    if configured == OFF:
        return None
    if configured:
        return Path(configured).expanduser()
    return next((file for folder in _folders(home) for file in sorted(folder.glob("*.gguf"))), None)


def _folders(home: Home) -> list[Path]:
    """Where models are installed: those of the default profile are there for every other one."""
    return list(dict.fromkeys((home.models, home.root / home.models.name)))


def state_folder(home: Home, model: Path) -> Path:
    """Where what the model has read is kept: beside it, if it is one of ours."""
    return model.parent if model.parent in _folders(home) else home.models


def context(settings: Settings) -> int:
    configured = settings.local.context
    if configured != "auto":
        return int(configured)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(tokens for least, tokens in _CONTEXTS if memory >= least)


def status(home: Home, settings: Settings) -> dict[str, str | None]:
    runtime, file = runtime_version(), model_file(home, settings)
    problem = None
    if runtime is None:
        command = "hermes install local" if file else "hermes model install"
        problem = f"The runtime of the local model is not installed; `{command}` installs it."
    elif file is None:
        problem = "There is no local model; `hermes setup` installs one or connects another."
    elif not file.is_file():
        problem = f"The model file {file} is not there; `hermes model use PATH` names another."
    return {"runtime": runtime, "file": str(file) if file else None, "problem": problem}


def runtime_version() -> str | None:
    """The version of the runtime, without loading it; None where it is not installed."""
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        return None
    # What is installed says its version by the name of a folder, which is quicker to read than what is in it.
    names = [name for name in os.listdir(Path(spec.origin).parents[1]) if name.startswith("xllamacpp-")]
    return names[0].removeprefix("xllamacpp-").removesuffix(".dist-info") if names else "of an unknown version"
