"""Where commands run on this machine, as a server found out by trying, for those who only want to tell it."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

from hermes.home import write_private

if TYPE_CHECKING:
    from hermes.config import Settings


def told(settings: Settings) -> str | None:
    """What was found out while machine and settings were as they are now; None: it must be tried."""
    try:
        found = json.loads((settings.home.cache / "sandbox.json").read_text()).get(_circumstances(settings))
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def remember(settings: Settings, name: str) -> None:
    """Keep what was found out."""
    write_private(settings.home.cache / "sandbox.json", json.dumps({_circumstances(settings): name}))


def _circumstances(settings: Settings) -> str:
    machine = os.uname()
    what = [settings.get("terminal.backend"), settings.get("terminal.docker_image"), machine.release, machine.version]
    for name in ("bwrap", "docker"):
        path = shutil.which(name)
        what += [path, os.stat(path).st_mtime_ns if path else None]
    return repr([*what, os.getuid()])
