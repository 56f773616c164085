"""`python -m hermes.cli.install_model` installs the embedded model where no other is configured."""

from __future__ import annotations

import sys

from hermes import local
from hermes.local.install import BYTES, TITLE, NotInstalled, install

_BAR_CHARS = 30


def bar(done: int, of: int) -> None:
    filled = _BAR_CHARS * done // of
    line = f"[{'#' * filled}{'.' * (_BAR_CHARS - filled)}] {done} of {of} parts, {done * BYTES / of / 1e9:.2f} GB"
    on_terminal = sys.stderr.isatty()
    print(line, end="\r" if on_terminal and done < of else "\n", file=sys.stderr, flush=True)


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
    print(
        f"No model is configured. Installing {TITLE}, {BYTES / 1e9:.1f} GB, into {home.models}.\n"
        f"HERMES_LOCAL_MODEL={local.OFF} leaves it out; `hermes setup` connects another.",
        file=sys.stderr,
    )
    try:
        install(home, bar)
    except NotInstalled as error:
        print(f"hermes: {error}\nThe server starts without a model.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
