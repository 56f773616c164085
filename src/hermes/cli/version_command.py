"""`hermes version`: what is installed here, and what it works with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import hermes
from hermes.core import version_cache
from hermes.core.errors import HermesError
from hermes.sandbox.remembered import told
from hermes.settings import config

if TYPE_CHECKING:
    import argparse

    from hermes.core.home import Home
    from hermes.settings.config import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options of its own."""


def run(args: argparse.Namespace, home: Home) -> int:
    from hermes.cli.output import tell

    subject, path, key = version_cache.version()
    facts, runtime, lasting = _facts(home)
    lines = _lines(facts, runtime)
    if lasting and subject == str(home.path):
        version_cache.remember(path, key, "\n".join([*lines, ""]))
    tell(args, {**facts, "local_runtime": runtime}, *lines)
    return 0


def _facts(home: Home) -> tuple[dict[str, str], str | None, bool]:
    """What there is, the runtime of local models, and whether that stays so while nothing changes that can be seen."""
    from hermes.local import runtime_version

    facts = {"hermes": hermes.__version__, "home": str(home.path), "profile": home.profile}
    facts |= {"python": sys.version.split()[0]}
    lasting = False
    try:
        settings = config.load(home)
        facts["store"] = str(settings.shown("storage.url"))
        known = "local" if settings.terminal.backend == "local" else told(settings)
        facts["sandbox"], lasting = known or _tried(settings), known is not None
    except HermesError as error:
        facts = {"store": "unknown", **facts, "sandbox": f"unknown: {error.message}"}
    return facts, runtime_version(), lasting


def _lines(facts: dict[str, str], runtime: str | None) -> list[str]:
    runs = f"for local models: llama.cpp {runtime or 'is not installed'}"
    return [*(f"{name} {value}" for name, value in facts.items()), runs]


def _tried(settings: Settings) -> str:
    from hermes.sandbox.choose import choice

    return choice(settings).told
