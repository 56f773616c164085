"""`hermes version`: what is installed here, and what it works with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import hermes
from hermes import config
from hermes.errors import HermesError
from hermes.home import Home, resolve
from hermes.sandbox.remembered import told

if TYPE_CHECKING:
    import argparse

    from hermes.config import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options of its own."""


def run(args: argparse.Namespace, home: Home) -> int:
    from hermes.cli.output import tell

    facts, runtime = _facts(home)
    tell(args, {**facts, "local_runtime": runtime}, *_lines(facts, runtime))
    return 0


def tell_quickly() -> bool:
    """The same without anything that has to be loaded first. False: something is wrong, and to be told elsewhere."""
    try:
        lines = _lines(*_facts(resolve()))
    except HermesError:
        return False
    sys.stdout.write("\n".join([*lines, ""]))
    return True


def _facts(home: Home) -> tuple[dict[str, str], str | None]:
    from hermes.local import runtime_version

    facts = {"hermes": hermes.__version__, "home": str(home.path), "profile": home.profile}
    facts |= {"python": sys.version.split()[0]}
    try:
        settings = config.load(home)
        facts["store"] = str(settings.shown("storage.url"))
        facts["sandbox"] = _sandbox(settings)
    except HermesError as error:
        facts = {"store": "unknown", **facts, "sandbox": f"unknown: {error.message}"}
    return facts, runtime_version()


def _lines(facts: dict[str, str], runtime: str | None) -> list[str]:
    runs = f"for local models: llama.cpp {runtime or 'is not installed'}"
    return [*(f"{name} {value}" for name, value in facts.items()), runs]


def _sandbox(settings: Settings) -> str:
    if (known := told(settings)) is not None:
        return known
    from hermes.sandbox.choose import choice

    return choice(settings).told
