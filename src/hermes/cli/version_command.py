"""`hermes version`: what is installed here, and what it works with."""

from __future__ import annotations

import argparse
import sys

import hermes
from hermes import config
from hermes.cli.output import tell
from hermes.errors import HermesError
from hermes.home import Home


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options of its own."""


def run(args: argparse.Namespace, home: Home) -> int:
    from hermes.local import runtime_version
    from hermes.sandbox.choose import choice

    facts = {"hermes": hermes.__version__, "home": str(home.path), "profile": home.profile}
    facts |= {"python": sys.version.split()[0]}
    try:
        settings = config.load(home)
        facts["store"] = str(settings.shown("storage.url"))
        sandbox = choice(settings)
        facts["sandbox"] = f"{sandbox.name} ({sandbox.failure})" if sandbox.failure else sandbox.name
    except HermesError as error:
        facts = {"store": "unknown", **facts, "sandbox": f"unknown: {error.message}"}
    runtime = runtime_version()
    runs = f"for local models: llama.cpp {runtime or 'is not installed'}"
    tell(args, {**facts, "local_runtime": runtime}, *(f"{name} {value}" for name, value in facts.items()), runs)
    return 0
