"""`hermes version`: what is installed here, and what it works with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import hermes
from hermes.core.errors import HermesError
from hermes.local import runtime_version
from hermes.sandbox import probe_cache
from hermes.settings import config

if TYPE_CHECKING:
    import argparse

    from hermes.core.home import Home


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options of its own."""


def run(args: argparse.Namespace, home: Home) -> int:
    from hermes.cli.output import tell

    facts = {"hermes": hermes.__version__, "home": str(home.path), "profile": home.profile}
    facts |= {"python": sys.version.split()[0], **_configured(home)}
    runtime = runtime_version()
    local = f"for local models: llama.cpp {runtime or 'is not installed'}"
    tell(args, {**facts, "local_runtime": runtime}, *(f"{name} {value}" for name, value in facts.items()), local)
    return 0


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
