"""What a prompt is made of, read from the disk: identity, project file, memory, and the machine itself. It blocks."""

from __future__ import annotations

import os
import platform
import shutil
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.agent.prompt import Environment, PromptInputs
from hermes.agent.skills import find_skills
from hermes.errors import ConfigError
from hermes.runs.spec import RunSpec
from hermes.sandbox.choose import choice
from hermes.sandbox.proxy_env import network_of
from hermes.tools.memory import FILES, SEPARATOR, Target, memory_file

if TYPE_CHECKING:
    from hermes.config import Settings
    from hermes.home import Home

_COMMANDS = ("git", "python3", "node", "rg", "docker", "make", "gcc", "cargo", "go")
_FILE_BYTES_MAX = 200_000


def gather(
    home: Home, settings: Settings, spec: RunSpec, *, model: str, window: int, tools: tuple[str, ...], instructions: str
) -> PromptInputs:
    """Everything the system prompt needs."""
    cwd = Path(spec.workdir or (_current_folder() if spec.source == "cli" else home.workspace))
    project = None
    if spec.context_files and spec.source == "cli":
        project = _project_file(cwd, settings.get("agent.context_files"))
    return PromptInputs(
        model=model,
        window=window,
        surface=spec.source,
        tools=tools,
        soul=_read(home.soul_file).strip() if spec.context_files else "",
        instructions=instructions,
        skills=_skills(settings, spec) if "skill_view" in tools else (),
        environment=_environment(cwd, settings) if tools else Environment(),
        project=project,
        memory=_memory(home, settings, spec, "memory"),
        user=_memory(home, settings, spec, "user"),
        date=_today(settings.get("timezone")),
    )


def _skills(settings: Settings, spec: RunSpec) -> tuple[tuple[str, str], ...]:
    """The index of skills; a file is read again only when it has changed."""
    return tuple((skill.name, skill.description) for skill in find_skills(settings, spec.owner, spec.session_key))


def _memory(home: Home, settings: Settings, spec: RunSpec, target: Target) -> str:
    if not spec.memory or not settings.get(FILES[target][2]):
        return ""
    return SEPARATOR.join(memory_file(home, settings, target, spec.owner, spec.session_key).entries())


def _project_file(cwd: Path, names: list[str]) -> tuple[str, str] | None:
    """The first of the project files, from the working folder up to the root of its repository, if it is in one."""
    above = [cwd, *cwd.parents]
    root = next((folder for folder in above if (folder / ".git").exists()), cwd)
    for folder in above[: above.index(root) + 1]:
        for name in names:
            if text := _read(folder / name).strip():
                return name, text
    return None


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return "/"


def _environment(cwd: Path, settings: Settings) -> Environment:
    found = _commands_on(os.environ.get("PATH", ""))
    return Environment(f"{platform.system()} {platform.release()}", str(cwd), _sandbox(settings), found)


def _sandbox(settings: Settings) -> str:
    """Where commands run, and what that means for them."""
    try:
        chosen = choice(settings)
    except ConfigError:
        return "no sandbox that works, so none can be run"
    if not chosen.isolated:
        return "no sandbox: they can reach whatever the user can"
    return f"{chosen.name}, {network_of(settings, chosen.name)}; only the working folder can be changed"


@lru_cache(maxsize=4)
def _commands_on(path: str) -> tuple[str, ...]:
    """The well-known commands on a search path; looked for once, as they do not come and go."""
    return tuple(name for name in _COMMANDS if shutil.which(name, path=path))


def _today(zone: str) -> str:
    now = datetime.now().astimezone()
    if zone:
        from zoneinfo import ZoneInfo

        with suppress(KeyError, ValueError):  # a zone that is not known is none
            now = now.astimezone(ZoneInfo(zone))
    return now.strftime("%A, %Y-%m-%d")


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError:
        return ""
