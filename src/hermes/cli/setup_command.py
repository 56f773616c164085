"""`hermes setup`: model, tools, sandbox and the server's key, in a few questions; nothing is written before it works."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import secrets
import sys
import tempfile
from argparse import SUPPRESS
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes.cli import model_command as models
from hermes.cli.command import YES, Args, Argument, command, flag
from hermes.cli.model_command import NoModel
from hermes.cli.output import UsageError, asked, note, print_redacted, silence_logs
from hermes.core.formatting import one_line, words
from hermes.core.home import Home, write_private
from hermes.core.json_types import JsonObject
from hermes.settings import config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hermes.settings.config import Settings

QUESTIONS_MAX = 4
_PARTS = ("model", "tools", "sandbox", "server")
_KEY_BYTES = 32
_SANDBOXES = ("auto", "local", "bubblewrap", "docker")


# Options with the default SUPPRESS stand before the command too.
@command(
    "setup",
    Argument("part", metavar="PART", nargs="?", choices=_PARTS, help=f"{', '.join(_PARTS)}; all, if left out"),
    flag("--non-interactive", help="ask nothing: what is not given is left as it is"),
    Argument("--model", metavar="NAME", default=SUPPRESS, help="the model to use"),
    Argument("--provider", metavar="ID", default=SUPPRESS, help="the provider that has it"),
    Argument("--base-url", metavar="URL", help="the address of a compatible server"),
    Argument("--api-key-env", metavar="NAME", help="the variable that holds its key"),
    Argument("--model-file", metavar="PATH", help="a GGUF file to run here"),
    Argument("--sandbox", choices=_SANDBOXES, default=SUPPRESS, help="where commands run"),
    flag("--reset", help="begin with defaults; the old file is kept as .bak"),
    YES.but(help="write it although the model does not answer"),
)
def setup(args: Args, home: Home) -> None:
    silence_logs(args)
    if not args.non_interactive and not sys.stdin.isatty():
        raise UsageError("There is no terminal to ask at.", hint="hermes setup --non-interactive --help")
    chosen = _Setup(args, home)
    for part, ask in zip(_PARTS, (_model, _tools, _sandbox, _server), strict=True):
        if args.part in (None, part):
            ask(chosen)
    chosen.write()
    written = sorted(key for key, value in chosen.changes.items() if value is not None)
    document = {"written": written, "test": chosen.test, "file": str(home.config_file)}
    print_redacted(args, home, document, [f"Written: {', '.join(written) or 'nothing'}."])
    note("Try: hermes chat")


class _Setup:
    def __init__(self, args: Args, home: Home) -> None:
        self.args, self.home, self._questions_left = args, home, QUESTIONS_MAX
        self.changes: JsonObject = {}
        self.test: JsonObject | None = None
        with self.drafted() as settings:
            self.settings = settings

    @contextlib.contextmanager
    def drafted(self, more: JsonObject | None = None) -> Iterator[Settings]:
        """The settings as they would be, in a folder of their own."""
        with tempfile.TemporaryDirectory() as folder:
            draft = Home(Path(folder))
            for file in (self.home.env_file, *([] if self.args.reset else [self.home.config_file])):
                if file.exists():
                    write_private(draft.path / file.name, file.read_bytes())
            models.write(draft, {**self.changes, **(more or {})})
            yield config.load(draft, models.ONCE)

    def flag(self, name: str) -> Any:
        return getattr(self.args, name, None)

    def ask(self, question: str, default: str, read: Callable[[str], str] = asked) -> str:
        """An answer, or the default where nobody is asked any more."""
        if self.args.non_interactive or self._questions_left == 0:
            return default
        self._questions_left -= 1
        return read(f"{question} [{default or 'none'}]: ").strip() or default

    def try_model(self) -> None:
        """Ask the model that was chosen one question; what does not answer is written only if that is wanted."""
        from hermes.core.spec import RouteChoice

        with self.drafted() as settings:
            self.test = test = models.tried(self.home, settings, RouteChoice())
        note(models.trial_summary(test))
        if test["error"] and not self.args.yes and self.ask("Write it all the same? y/n", "n").lower() != "y":
            raise NoModel(f"{test['error']} Nothing was written.", hint="hermes setup model, or the same with -y")

    def write(self) -> None:
        file = self.home.config_file
        if self.args.reset and file.exists():
            names = (file.with_name(f"{file.name}.bak{number or ''}") for number in range(10_000))
            file.rename(next(name for name in names if not name.exists()))
        models.write(self.home, self.changes)


# ---- the model


def _model(setup: _Setup) -> None:
    answer = _flags(setup) or _chosen(setup)
    if answer[0] != "keep":
        setup.changes |= _route(setup, *answer)
    elif len(answer) > 1:
        setup.changes["model.default"] = answer[1]
    setup.try_model()


def _flags(setup: _Setup) -> list[str]:
    """What the flags say of the model, in the words of an answer."""
    routes = [route for name in ("model_file", "base_url", "provider") if (route := setup.flag(name))]
    model = [setup.flag("model")] if setup.flag("model") else []
    if not routes and not model and not setup.args.non_interactive:
        return []
    return [routes[0] if routes else "keep", *model]


def _chosen(setup: _Setup) -> list[str]:
    from hermes import local
    from hermes.services.model_setup import has_key
    from hermes.settings.known_providers import DEFAULT_API_MODE, KNOWN_PROVIDERS

    status = local.status(setup.home, setup.settings)
    keys = {name: has_key(setup.settings, name) for name, provider in KNOWN_PROVIDERS.items() if provider.key_env}
    vendors = [name for name in keys if keys[name] or KNOWN_PROVIDERS[name].api_mode != DEFAULT_API_MODE]
    note(
        "Models that can be asked:",
        f"  local  {status['problem'] or status['file']}",
        "  PATH  a GGUF file of your own",
        "  URL [MODEL]  a compatible server, such as http://127.0.0.1:8080/v1",
    )
    note(*(f"  {name} [MODEL]  {'a key is there' if keys[name] else 'needs a key'}" for name in vendors))
    current = setup.settings.model.default or setup.settings.model.provider
    keyed = next((name for name in vendors if keys[name]), "local")
    default = "keep" if current else keyed if status["problem"] else "local"
    return setup.ask(f"Which, or keep {current}" if current else "Which", default).split()


def _route(setup: _Setup, route: str, model: str = "") -> JsonObject:
    from hermes.services.model_setup import has_key
    from hermes.settings.known_providers import KNOWN_PROVIDERS

    changes: JsonObject = {**models.local_model(Path()), "model.path": None}
    if route == "local":
        return changes
    if route.endswith(".gguf") or os.path.exists(os.path.expanduser(route)):
        return models.local_model(models.model_file(route))
    is_url, variable = "://" in route, setup.flag("api_key_env")
    if not is_url and route not in KNOWN_PROVIDERS and route not in setup.settings.providers:
        raise UsageError(f"'{route}' is no provider, no address and no file.", hint="hermes setup model")
    changes["model.provider"] = setup.flag("provider") if is_url else route
    changes["model.base_url"] = route if is_url else None
    if variable:
        changes["model.api_key"] = f"${{{variable}}}"
    elif not is_url and not has_key(setup.settings, route):
        changes["model.api_key"] = setup.ask(f"Key for {route}, kept in .env", "", getpass.getpass) or None
    return {**changes, "model.default": model or _likely_model(setup, changes)}


def _likely_model(setup: _Setup, changes: JsonObject) -> str:
    from hermes.core.spec import RouteChoice
    from hermes.services.model_setup import likely_model
    from hermes.services.models import primary, problem_of

    with setup.drafted({**changes, "model.default": "any"}) as settings:
        route = primary(settings, RouteChoice())
        if problem := problem_of(settings, route, setup.home):
            raise NoModel(problem, hint="hermes setup model")
        names = asyncio.run(models.fetched(setup.home, settings, route))["models"]
    if not names:
        raise NoModel(f"{route.provider} lists no models.", hint="the same with a model's name")
    return likely_model(names)


# ---- the rest


def _tools(setup: _Setup) -> None:
    from hermes.tools.framework.toolsets import DEFAULTS, builtin

    missing = [f"  {tool.name}: {why}" for tool in builtin().all() if (why := tool.available(setup.settings))]
    note(f"Toolsets: {', '.join(DEFAULTS)}", *missing)
    current = setup.settings.agent.disabled_toolsets
    disabled = words(setup.ask("Which are not to be offered", ",".join(current)))
    if unknown := [name for name in disabled if name not in DEFAULTS]:
        raise UsageError(f"There is no toolset '{unknown[0]}'.", hint="hermes tools list")
    if sorted(disabled) != sorted(current):
        setup.changes["agent.disabled_toolsets"] = disabled


def _sandbox(setup: _Setup) -> None:
    from hermes.sandbox.choose import choose_backend

    backend, current = setup.flag("sandbox"), setup.settings.terminal.backend
    if backend is None:
        with setup.drafted({"terminal.backend": "auto"}) as settings:
            usable = choose_backend(settings)
        note(f"Commands can run in: {usable.name} {one_line(usable.failure)}".rstrip())
        backend = setup.ask(f"Sandbox: {', '.join(_SANDBOXES)}", current)
    with setup.drafted({"terminal.backend": backend}) as settings:
        choose_backend(settings)  # raises for one that does not work
    if backend != current:
        setup.changes["terminal.backend"] = backend


def _server(setup: _Setup) -> None:
    default = "y" if setup.args.part or not setup.args.non_interactive else "n"
    if setup.settings.api_server.key:
        note("The server has a key.")
    elif setup.ask("Make a key for the server? y/n", default).lower() == "y":
        setup.changes["api_server.key"] = secrets.token_urlsafe(_KEY_BYTES)
        note("The key is shown by: hermes gateway key")
