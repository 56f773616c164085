"""`hermes version`: what is installed here, and what it works with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import hermes
from hermes.cli.command import Args, command
from hermes.core.errors import HermesError
from hermes.local import runtime_version
from hermes.sandbox import probe_cache
from hermes.settings import config

if TYPE_CHECKING:
    from hermes.core.home import Home


@command("version")
def version(args: Args, home: Home) -> None:
    from hermes.cli.output import tell

    facts = {"hermes": hermes.__version__, "home": str(home.path), "profile": home.profile}
    facts |= {"python": sys.version.split()[0], **_configured(home)}
    runtime = runtime_version()
    local = f"for local models: llama.cpp {runtime or 'is not installed'}"
    tell(args, {**facts, "local_runtime": runtime}, *(f"{name} {value}" for name, value in facts.items()), local)


def _configured(home: Home) -> dict[str, str]:
    """The store, and the sandbox that a server has found to work; nothing is tried here."""
    try:
        settings = config.load(home)
    except HermesError as error:
        return {"store": "unknown", "sandbox": f"unknown: {error.message}"}
    return {
        "store": str(settings.shown("storage.url")),
        "sandbox": probe_cache.known(settings) or settings.terminal.backend,
    }
