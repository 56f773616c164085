"""What the commands that talk to a model share: settings that are sound, a route that can be asked, an agent."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hermes import config
from hermes.agent import routes
from hermes.agent.facade import AIAgent
from hermes.errors import ConfigError, HermesError
from hermes.home import Home, tighten
from hermes.housekeeping import sweep_if_due
from hermes.providers.base import Route
from hermes.providers.registry import EXAMPLE_PROVIDER, available
from hermes.runs.spec import RouteChoice
from hermes.store.base import StoreError
from hermes.store.bundle import Store, address, path_of
from hermes.store.sessions import SessionDB

EXIT_FAILED, EXIT_NO_MODEL, EXIT_DEADLINE, EXIT_INTERRUPTED = 1, 3, 124, 130


class NoModel(HermesError):
    """There is nothing to ask."""

    exit_code = EXIT_NO_MODEL


def checked_route(args: argparse.Namespace, home: Home) -> Route:
    """The route that will be asked first. Bad settings, an unknown provider or a missing key end the command here."""
    for change in tighten(home):
        done = "is now" if change.now != change.was else "could not be made"
        print(f"hermes: {change.path} was open to others ({change.was:o}) and {done} private.", file=sys.stderr)
    settings = config.load(home)
    settings.require_valid()
    route = routes.routes(settings, RouteChoice(model=args.model, provider=args.provider))[0]
    if not available(route.api_mode):
        remedy = f"hermes config set model.provider {EXAMPLE_PROVIDER}, then hermes config set model.default NAME"
        raise NoModel("No model is configured.", hint=remedy)
    if variable := routes.missing_key(settings, route):
        raise ConfigError(
            f"the provider {route.provider} needs a key in {variable}, and that is not set.",
            where=str(home.env_file),
            hint=f"put {variable}=… into {home.env_file}",
        )
    return route


@contextmanager
def database(args: argparse.Namespace, home: Home) -> Iterator[SessionDB | None]:
    """Where the conversation is kept; None when it is not to be, or cannot be: then it goes on all the same."""
    db: SessionDB | None = None
    if not args.no_save:
        try:
            db = SessionDB(path_of(address(home, config.load(home))) or ":memory:")
        except StoreError as error:
            print(f"hermes: this conversation is not kept: {error}", file=sys.stderr)
    try:
        yield db
    finally:
        if db is not None:
            _leave(db, home)


def close_session(db: SessionDB | None, session_id: str) -> None:
    """The conversation is over, if there was one."""
    if db is not None and db.get_session(session_id) is not None:
        db.end_session(session_id, "cli_close")


def _leave(db: SessionDB, home: Home) -> None:
    store = Store(db.engine)
    try:
        sweep_if_due(store, config.load(home), every_s=86_400.0)
    except StoreError as error:
        print(f"hermes: {error}", file=sys.stderr)
    finally:
        store.close()
        db.close()


def agent(args: argparse.Namespace, home: Home, **more: Any) -> AIAgent:
    """An agent as the command line asks for it."""
    toolsets = [name.strip() for name in args.toolsets.split(",") if name.strip()] if args.toolsets else None
    return AIAgent(
        model=args.model, provider=args.provider, enabled_toolsets=toolsets, platform="cli", home=home, **more
    )


@contextmanager
def stopping(talk: AIAgent) -> Iterator[None]:
    """While a turn runs, Ctrl-C stops the turn, not the program; what there is of the answer is kept."""
    before = signal.signal(signal.SIGINT, lambda *_: talk.interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def exit_code(result: dict[str, Any]) -> int:
    """What a finished turn means to a shell."""
    if result["interrupted"]:
        return EXIT_INTERRUPTED
    by_code = {"turn_timeout": EXIT_DEADLINE, "provider_auth_failed": EXIT_NO_MODEL}
    if result["failed"] or result["error"]:
        return by_code.get(result["error_code"], EXIT_FAILED)
    return 0
