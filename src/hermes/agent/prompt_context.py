"""Collects the inputs of a prompt from the disk: identity, project file, memory, environment. Blocks."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hermes import local
from hermes.agent.prompt import Environment, PromptInputs
from hermes.core.errors import ConfigError
from hermes.core.limits import PROMPT_FILE_BYTES_MAX
from hermes.core.spec import RunSpec
from hermes.guards.path_lists import Lists
from hermes.guards.paths import PathRefused, read_inside
from hermes.sandbox.choose import choose_backend, commands_in
from hermes.sandbox.proxy import network_of
from hermes.services.memory import FILES, SEPARATOR, Target, memory_file
from hermes.services.skills import find_skills

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.settings.config import Settings

log = logging.getLogger(__name__)
# A client of Docker is of no use here: its daemon is outside of the sandbox.
_COMMANDS = ("git", "python3", "node", "rg", "make", "gcc", "cargo", "go")


def gather(
    home: Home, settings: Settings, spec: RunSpec, redact: Callable[[str], str], inputs: PromptInputs
) -> PromptInputs:
    cwd = Path(spec.workdir or (_current_folder() if spec.source == "cli" else home.workspace))
    project = None
    if spec.context_files and spec.source == "cli":
        project = _project_file(home, cwd, settings.agent.context_files, redact)
    skills = find_skills(settings, spec.owner, spec.session_key) if "skill_view" in inputs.tools else ()
    model = local.model_file(home, settings) if inputs.embedded else None
    return msgspec.structs.replace(
        inputs,
        model=model.stem if model else inputs.model,
        soul=redact(_read(home.soul_file, home.path, links=False).strip()) if spec.context_files else "",
        skills=tuple((redact(skill.name), redact(skill.description)) for skill in skills),
        environment=_environment(home, cwd, settings) if inputs.tools else Environment(),
        project=project,
        memory=redact(_memory(home, settings, spec, "memory")),
        user=redact(_memory(home, settings, spec, "user")),
        date=_day(settings.timezone),
        tomorrow=_day(settings.timezone, 1) if inputs.embedded else "",
    )


def _memory(home: Home, settings: Settings, spec: RunSpec, target: Target) -> str:
    if not spec.memory or not getattr(settings.memory, FILES[target][2]):
        return ""
    return SEPARATOR.join(memory_file(home, settings, target, spec.owner, spec.session_key).entries())


def _project_file(home: Home, cwd: Path, names: Sequence[str], redact: Callable[[str], str]) -> tuple[str, str] | None:
    """The first project file between the working folder and the root of its repository."""
    above = [cwd, *cwd.parents]
    root = next((folder for folder in above if (folder / ".git").exists()), cwd)
    for folder in above[: above.index(root) + 1]:
        for name in names:
            path = folder / name
            if not os.path.lexists(path):
                continue
            # Only a link can lead to a file that is never read.
            is_plain = os.path.realpath(path) == os.path.join(os.path.realpath(folder), name)
            lists = None if is_plain else Lists(home.path, Path.home())
            if text := _read(path, root, lists).strip():
                return name, redact(text)
    return None


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return "/"


def _environment(home: Home, cwd: Path, settings: Settings) -> Environment:
    commands = _commands(settings, home, cwd, os.environ.get("PATH", ""))
    return Environment(f"{platform.system()} {platform.release()}", str(cwd), _sandbox(settings), commands)


def _sandbox(settings: Settings) -> str:
    try:
        chosen = choose_backend(settings)
    except ConfigError:
        return "no sandbox that works, so none can be run"
    if chosen.reason is not None:
        return "no sandbox, so none can be run; the user can install bubblewrap"
    if not chosen.isolated:
        return "no sandbox: they can reach whatever the user can"
    return f"{chosen.name}, {network_of(settings, chosen.name)}; only the working folder can be changed"


@lru_cache(maxsize=16)
def _commands(settings: Settings, home: Home, cwd: Path, path: str) -> tuple[str, ...]:
    """The well-known commands that can be run, looked up once."""
    try:
        return tuple(commands_in(settings, choose_backend(settings), home, cwd, _COMMANDS))
    except ConfigError:
        return ()


def _day(zone: str, days_ahead: int = 0) -> str:
    now = datetime.now().astimezone()
    if zone:
        from zoneinfo import ZoneInfo

        with suppress(KeyError, ValueError):  # an unknown zone is ignored
            now = now.astimezone(ZoneInfo(zone))
    return (now + timedelta(days=days_ahead)).strftime("%A, %Y-%m-%d")


def _read(path: Path, root: Path, lists: Lists | None = None, *, links: bool = True) -> str:
    try:
        data = read_inside(path, root, PROMPT_FILE_BYTES_MAX, lists, links=links)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (PathRefused, OSError) as error:
        log.warning("%s is not put into the prompt: %s", path, error)
        return ""
    return data.decode("utf-8", "replace")
