"""Installing the embedded model: `hermes model install`, and `python -m hermes.cli.install_model` before `make run`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hermes import local
from hermes.cli.output import note
from hermes.cli.streams import draw
from hermes.local.install import BYTES, TITLE, NotInstalled, install

if TYPE_CHECKING:
    from hermes.core.home import Home

_BAR_CHARS = 30


def progress_bar() -> Callable[[int, int], None]:
    """One line that grows on a terminal; elsewhere its beginning and its end."""
    started_at = time.monotonic()

    def show(done: int, of: int) -> None:
        filled = _BAR_CHARS * done // of
        line = f"Model  [{'#' * filled}{'.' * (_BAR_CHARS - filled)}] {done * BYTES / of / 1e9:.2f} of {BYTES / 1e9:.2f} GB"
        line += f" in {time.monotonic() - started_at:.0f} s" if done == of else ""
        if sys.stderr.isatty():
            draw(f"\r{line}" + "\n" * (done == of))
        elif done in (0, of):
            note(line)

    return show


def install_embedded(home: Home) -> Path:
    """The model's file, installed with its runtime where they are missing. Raises NotInstalled."""
    from hermes.cli.install_command import install_runtime

    if local.runtime_version() is None:
        note("Installing the runtime of the embedded model (llama.cpp).")
        install_runtime()
    return install(home, progress_bar())


def main() -> int:
    """Install the model if nothing else is configured and none is there. Whatever comes of it, the server can start."""
    from hermes.core.errors import ConfigError
    from hermes.core.home import resolve
    from hermes.core.spec import RouteChoice
    from hermes.services.models import primary
    from hermes.settings import config

    home = resolve()
    settings = config.load(home)
    try:
        route = primary(settings, RouteChoice())
    except ConfigError:  # whoever starts the server is told
        return 0
    off = settings.variable("HERMES_LOCAL_MODEL") == local.OFF
    if route.api_mode != "local" or off or local.runtime_version() is None or local.model_file(home, settings):
        return 0
    note(
        f"Model  none is configured: installing {TITLE}, {BYTES / 1e9:.1f} GB, into {home.models}.",
        f"       HERMES_LOCAL_MODEL={local.OFF} leaves it out; `hermes setup` connects another.",
    )
    try:
        install(home, progress_bar())
    except NotInstalled as error:
        note(f"hermes: {error}", "The server starts without a model.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
