"""`hermes model`: the route to the model, the models its provider has, and another model to be used from now on."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.cli.command import YES, Args, Argument, command, flag
from hermes.cli.output import (
    EXIT_NO_MODEL,
    NoModel,
    NotFound,
    UsageError,
    confirmed,
    note,
    print_redacted,
    settings_of,
    silence_logs,
)
from hermes.cli.table import print_table
from hermes.core.errors import ServiceError
from hermes.core.formatting import one_line
from hermes.core.home import Home, write_private
from hermes.core.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from hermes.core.spec import RouteChoice
    from hermes.services.models import Route
    from hermes.settings.config import Settings

TRIAL_S_MAX = 120.0
_MAGIC = b"GGUF"
# With this nothing is tried twice.
ONCE = {"agent.api_max_retries": 0}


@command(
    "model",
    Argument("name", metavar="NAME", nargs="?", help="a model to use from now on; or `list`, `install`, or `use PATH`"),
    Argument("path", metavar="PATH", nargs="?", help="with `use`: a GGUF file of your own"),
    Argument("--provider", metavar="ID", default=argparse.SUPPRESS, help="the provider that has the model"),
    Argument("--base-url", metavar="URL", help="the address of its server"),
    Argument("--session", metavar="ID", help="for this session only"),
    flag("--refresh", help="with `list`: ask the provider again"),
    YES,
)
def model(args: Args, home: Home) -> int:
    silence_logs(args)
    if (args.path is None) is (args.name == "use"):
        raise UsageError("A file belongs to `use`, and to nothing else.", hint="hermes model use PATH")
    return {None: _show, "list": _list, "install": _install, "use": _use}.get(args.name, _set)(args, home)


# ---- looking


def _settings(args: Args, home: Home, more: JsonMapping | None = None) -> Settings:
    """The settings without `--model` and `--provider`: these are a choice, which leaves the configured address behind."""
    return settings_of(Args(**{**vars(args), "model": None, "provider": None}), home, more)


def _choice(args: Args, model: str | None = None) -> RouteChoice:
    from hermes.core.spec import RouteChoice

    provider = getattr(args, "provider", None)
    return RouteChoice(model=model or getattr(args, "model", None), provider=provider, base_url=args.base_url)


def _described(home: Home, settings: Settings, route: Route) -> JsonObject:
    from hermes.services.model_setup import described

    return described(home, settings, route, cached_lists(home).get(route.base_url, {}).get("windows", {}))


def _show(args: Args, home: Home) -> int:
    from hermes import local
    from hermes.services import models

    settings = _settings(args, home)
    first, *others = [_described(home, settings, route) for route in models.routes(settings, _choice(args))]
    facts = {**first, "abilities": ", ".join(first["abilities"])}
    facts["fallbacks"] = ", ".join(f"{one['provider']}/{one['model']}" for one in others)
    facts |= local.status(home, settings) if first["api_mode"] == "local" else {}
    lines = [f"{name.replace('_', ' ')}: {'set' if value is True else value}" for name, value in facts.items() if value]
    print_redacted(args, home, {"route": first, "fallbacks": others}, lines)
    return EXIT_NO_MODEL if first["problem"] else 0


def cached_lists(home: Home) -> dict[str, JsonObject]:
    """The lists of models that were fetched, by address."""
    try:
        lists = json.loads(home.model_lists.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {url: models for url, models in lists.items() if isinstance(models, dict)} if isinstance(lists, dict) else {}


def _embedded_rows(home: Home, settings: Settings) -> list[JsonObject]:
    from hermes import local
    from hermes.services.model_setup import EMBEDDED

    files = {*home.models.glob("*.gguf"), local.model_file(home, settings)}
    return [
        {"id": str(file), "window": local.context(settings), "provider": EMBEDDED}
        for file in sorted(file for file in files if file is not None and file.is_file())
    ]


def _list(args: Args, home: Home) -> int:
    from hermes.core.limits import MODEL_LIST_KEPT_S
    from hermes.services import models

    settings = _settings(args, home)
    choice, main = _choice(args), settings.model
    # A provider is asked for its models by any name; without one there is the embedded model only.
    has_provider = choice.provider or choice.base_url or main.provider or main.base_url
    route = models.primary(settings, _choice(args, "any") if has_provider else choice)
    if route.api_mode == "local":
        listed: JsonObject = {"models": [], "windows": {}}
    else:
        lists = cached_lists(home)
        listed = lists.get(route.base_url, {})
        fresh = "models" in listed and 0 <= time.time() - listed.get("fetched_at", 0) < MODEL_LIST_KEPT_S
        if args.refresh or not fresh:
            listed = asyncio.run(fetched(home, settings, route))
            write_private(home.model_lists, json.dumps({**lists, route.base_url: listed}))
    windows, provider = listed["windows"], route.provider
    rows = [{"id": name, "window": windows.get(name), "provider": provider} for name in listed["models"]]
    rows += _embedded_rows(home, settings)
    cells = [(row["id"], str(row["window"] or ""), row["provider"]) for row in rows]
    empty = f"{route.provider} lists no models."
    print_table(args, home, {"provider": route.provider, "models": rows}, cells, flexible=0, empty=empty)
    return 0


async def fetched(home: Home, settings: Settings, route: Route) -> JsonObject:
    """What a provider tells of its models, as it is kept."""
    from hermes.agent.model_lists import list_models
    from hermes.app import App

    app = App(home, settings)
    try:
        return await list_models(app.services.http, route)
    except ServiceError as error:
        failure = NoModel(app.secrets.redact(error.message))
        failure.field = error.field
        raise failure from None
    finally:
        await app.close()


# ---- trying


def tried(home: Home, settings: Settings, choice: RouteChoice, seconds: float = TRIAL_S_MAX) -> JsonObject:
    """Ask a model one small question, by no other way than it is always asked."""
    return asyncio.run(_tried(home, settings, choice, seconds))


async def _tried(home: Home, settings: Settings, choice: RouteChoice, seconds: float) -> JsonObject:
    from hermes.app import App
    from hermes.services.model_setup import try_model

    app, started_at = App(home, settings), time.monotonic()
    try:
        trial = await try_model(app.engine, app.settings, app.home, choice, seconds)
        return {**trial, "seconds": round(time.monotonic() - started_at, 2)}
    finally:
        await app.close()


def trial_summary(trial: JsonObject) -> str:
    name = f"{trial['provider']}/{trial['model']}"
    if trial["error"]:
        return f"{name} does not answer: {trial['error']}"
    return f"{name} answers after {trial['seconds']:g} s: {one_line(trial['answer'])}"


# ---- changing


def _set(args: Args, home: Home) -> int:
    from dataclasses import replace

    from hermes.cli.session_maintenance import find, opened
    from hermes.services.model_setup import changes_of

    settings, choice = _settings(args, home, ONCE), _choice(args, args.name)
    trial = tried(home, settings, choice)
    if not _is_confirmed(args, trial):
        return EXIT_NO_MODEL
    if args.session:
        with opened(home, "change") as db:
            [session] = find(db, home, args.session)
            db.update_session(session["id"], model=args.name)
        return _print_change(args, home, trial, f"{args.name} is used in {session['id']} from now on.")
    if choice.base_url is None and choice.provider is None:
        choice = replace(choice, provider=settings.model.provider)
    write(home, changes_of(settings, choice))
    return _print_change(args, home, trial, f"{args.name} is used from now on.")


def _use(args: Args, home: Home) -> int:
    file = model_file(args.path)
    settings = _settings(args, home, {**ONCE, "model.path": str(file), "model.provider": "local"})
    trial = tried(home, settings, _choice(args))
    if not _is_confirmed(args, trial):
        return EXIT_NO_MODEL
    write(home, local_model(file))
    return _print_change(args, home, trial, f"{file} is used from now on.")


def _install(args: Args, home: Home) -> int:
    """The embedded model and its runtime; the settings stay as they are."""
    from hermes.cli.install_model import install_embedded

    file, settings = install_embedded(home), _settings(args, home)
    lines = [f"{file} is installed."]
    if (current := settings.model.default or settings.model.provider) not in ("", None, "local"):
        lines.append(f"{current} is still the model that is used. Try: hermes model use {file}")
    else:
        note("The model reads how to use its tools, which takes up to a minute and is kept.")
        asyncio.run(_warmed_up(home, settings))
    print_redacted(args, home, {"file": str(file)}, lines)
    return 0


async def _warmed_up(home: Home, settings: Settings) -> None:
    from hermes.app import App

    app = App(home, settings)
    try:
        await app.warm_up()
    finally:
        await app.close()


def _is_confirmed(args: Args, trial: JsonObject) -> bool:
    return not trial["error"] or confirmed(args, "Using a model that does not answer", trial_summary(trial))


def _print_change(args: Args, home: Home, trial: JsonObject, done: str) -> int:
    print_redacted(args, home, {"model": args.path or args.name, "test": trial}, [trial_summary(trial), done])
    return 0


def model_file(text: str) -> Path:
    file = Path(text).expanduser().absolute()
    try:
        with file.open("rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC:
                raise UsageError("This is no GGUF file.", where=str(file))
    except OSError as error:
        raise NotFound(f"The file cannot be read: {error.strerror}.", where=str(file)) from None
    return file


def local_model(file: Path) -> JsonObject:
    from hermes.services.model_setup import EMBEDDED, OF_ADDRESS

    return {**OF_ADDRESS, "model.default": None, "model.provider": EMBEDDED, "model.path": str(file)}


def write(home: Home, changes: JsonMapping) -> None:
    from hermes.services import model_setup

    model_setup.write(home, changes)
