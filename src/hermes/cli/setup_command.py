"""`hermes setup`: model, tools, sandbox and the server's key, in a few questions; nothing is written before it works."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import getpass
import os
import re
import secrets
import shutil
import sys
import tempfile
from argparse import SUPPRESS
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from hermes.cli import model_command as models
from hermes.cli.command import YES, Args, Argument, command, flag
from hermes.cli.output import NoModel, UsageError, check_toolsets, note, print_redacted, silence_logs
from hermes.core.errors import HermesError
from hermes.core.formatting import columns, one_line, words
from hermes.core.home import Home, write_private
from hermes.core.json_types import JsonObject
from hermes.settings import config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hermes.settings.config import Settings

_PARTS = ("model", "tools", "sandbox", "server")
_KEY_BYTES = 32
_YES, _NO = ("y", "yes"), ("n", "no", "skip")
EMBEDDED = "local"
# An address without its scheme.
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/|$)")
_SANDBOXES = ("auto", "local", "bubblewrap", "docker")


# Options with the default SUPPRESS stand before the command too.
@command(
    "setup",
    Argument("part", metavar="PART", nargs="?", choices=_PARTS, help=f"{', '.join(_PARTS)}; all, if left out"),
    flag("--non-interactive", help="ask nothing; options that are not given stay as they are"),
    Argument("--model", metavar="NAME", default=SUPPRESS, help="the model to use"),
    Argument("--provider", metavar="ID", default=SUPPRESS, help="the provider that has it"),
    Argument("--base-url", metavar="URL", help="the address of a compatible server"),
    Argument("--api-key-env", metavar="NAME", help="the variable that holds its key"),
    Argument("--model-file", metavar="PATH", help="a GGUF file to run here"),
    Argument("--sandbox", choices=_SANDBOXES, default=SUPPRESS, help="where commands run"),
    flag("--reset", help="begin with defaults; the old file is kept as .bak"),
    YES.but(help="write it although the model does not answer"),
)
def setup(args: Args, home: Home) -> int:
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
    if chosen.failure is not None:
        note(f"hermes: {chosen.failure.message}", f"Try: {chosen.failure.hint}")
        return chosen.failure.exit_code
    note(chosen.next_step())
    return 0


def _read_line(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _wrapped(*lines: str) -> Iterator[str]:
    columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else sys.maxsize
    for line in lines:
        yield from wrap(line, columns - 1, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


class EndOfInput(UsageError):
    pass


class _Setup:
    def __init__(self, args: Args, home: Home) -> None:
        self.args, self.home = args, home
        self.changes: JsonObject = {}
        self.test: JsonObject | None = None
        self.failure: HermesError | None = None
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

    def ask(self, question: str, default: str, read: Callable[[str], str] = _read_line) -> str:
        """An answer, or the default where nobody is asked."""
        if self.args.non_interactive:
            return default
        try:
            return read(f"{question} [{default or 'none'}]: ").strip() or default
        except EOFError:
            raise EndOfInput("The input ended before the last question.", hint="hermes setup") from None

    def until_valid(self, ask_once: Callable[[], None]) -> None:
        """Ask again after an answer that cannot be used; where nobody can answer, its error is raised."""
        failure: HermesError | None = None
        while True:
            try:
                return ask_once()
            except EndOfInput as end:
                raise failure or end from None
            except HermesError as error:
                if self.args.non_interactive:
                    raise
                failure = error
                note(f"✗ {error.where + ': ' if error.where else ''}{error.message}")

    def try_model(self) -> bool:
        """Ask the model that was chosen one question. False: it does not answer, and another is to be chosen."""
        from hermes.core.spec import RouteChoice

        note("Asking the model for a short answer …")
        with self.drafted() as settings:
            self.test = test = models.tried(self.home, settings, RouteChoice())
        note(models.trial_summary(test))
        if not test["error"] or self.args.yes:
            return True
        failure = NoModel(
            f"{test['error']} The model is left as it was.", hint="hermes setup model, or the same with -y"
        )
        if self.args.non_interactive:
            raise failure
        answer = self.ask("Use it anyway (y), leave the model as it was (n), or choose again (c)?", "c").lower()
        if answer not in _YES:
            self.changes.clear()
            self.failure = failure if answer in _NO else None
        return answer in _YES or answer in _NO

    def next_step(self) -> str:
        from hermes.services.models import configured_route, problem_of

        with self.drafted() as settings:
            problem = problem_of(settings, configured_route(settings)[0], self.home)
        return "No model is configured yet. Try: hermes setup model" if problem else "Try: hermes chat"

    def write(self) -> None:
        file = self.home.config_file
        if self.args.reset and file.exists():
            names = (file.with_name(f"{file.name}.bak{number or ''}") for number in range(10_000))
            file.rename(next(name for name in names if not name.exists()))
        models.write(self.home, self.changes)


# ---- the model


def _model(setup: _Setup) -> None:
    if answer := _flags(setup):
        _choose(setup, answer)
        setup.try_model()
        return

    question, default = _offer(setup)

    def ask_once() -> None:
        while (answer := setup.ask(question, default).split())[0].lower() not in _NO:
            _choose(setup, answer)
            if setup.try_model():
                return

    setup.until_valid(ask_once)


def _choose(setup: _Setup, answer: list[str]) -> None:
    if len(answer) > 2:
        raise UsageError(f"'{' '.join(answer)}' is more than a route and a model.", hint="hermes setup model")
    if answer[0] != "keep":
        setup.changes |= _route(setup, *answer)
    elif len(answer) > 1:
        setup.changes["model.default"] = answer[1]


def _flags(setup: _Setup) -> list[str]:
    """What the flags say of the model, in the words of an answer."""
    routes = [route for name in ("model_file", "base_url", "provider") if (route := setup.flag(name))]
    model = [setup.flag("model")] if setup.flag("model") else []
    if not routes and not model and not setup.args.non_interactive:
        return []
    return [routes[0] if routes else "keep", *model]


def _offer(setup: _Setup) -> tuple[str, str]:
    """Show what can be chosen; the question, and its default."""
    from hermes import local
    from hermes.local.install import BYTES, TITLE
    from hermes.services.model_setup import has_key
    from hermes.settings.known_providers import DEFAULT_API_MODE, KNOWN_PROVIDERS

    status = local.status(setup.home, setup.settings)
    keys = {name: has_key(setup.settings, name) for name, provider in KNOWN_PROVIDERS.items() if provider.key_env}
    vendors = [name for name in keys if keys[name] or KNOWN_PROVIDERS[name].api_mode != DEFAULT_API_MODE]
    rows: list[list[str]] = [
        [
            "local",
            str(status["file"]) if not status["problem"] else f"{TITLE}, {BYTES / 1e9:.1f} GB to download",
        ],
        ["PATH", "a GGUF file of your own"],
        ["URL [MODEL]", "a compatible server, such as http://127.0.0.1:8080/v1"],
        *([f"{name} [MODEL]", "a key is there" if keys[name] else "needs a key"] for name in vendors),
        ["n", "leave the model as it is"],
    ]
    note("Models that can be asked:", *_wrapped(*(f"  {line}" for line in columns(rows, 1, None))))
    current = setup.settings.model.default or setup.settings.model.provider
    keyed = next((name for name in vendors if keys[name]), "local")
    default = "keep" if current else keyed if status["problem"] else "local"
    return (f"Which, or keep {current}" if current else "Which"), default


def _route(setup: _Setup, route: str, model: str = "") -> JsonObject:
    from hermes.services.model_setup import has_key
    from hermes.settings.known_providers import KNOWN_PROVIDERS

    changes: JsonObject = {**models.local_model(Path()), "model.path": None}
    if route == EMBEDDED:
        _install_embedded(setup, changes)
        return changes
    if route.endswith(".gguf") or os.path.exists(os.path.expanduser(route)):
        return models.local_model(models.model_file(route))
    is_url, variable = "://" in route, setup.flag("api_key_env")
    providers = [*KNOWN_PROVIDERS, *setup.settings.providers]
    if is_url and not route.startswith(("http://", "https://")):
        raise UsageError(f"'{route}' is no address: it begins with http:// or https://.", hint="hermes setup model")
    if not is_url and route not in providers:
        near = [f"http://{route}"] if _HOST_AND_PORT.match(route) else []
        near = near or difflib.get_close_matches(route, [EMBEDDED, *providers], n=1)
        mean = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"'{route}' is no provider, no address and no file.{mean}", hint="hermes setup model")
    changes["model.provider"] = setup.flag("provider") if is_url else route
    changes["model.base_url"] = route if is_url else None
    if variable:
        changes["model.api_key"] = f"${{{variable}}}"
    elif not is_url and not has_key(setup.settings, route):
        changes["model.api_key"] = setup.ask(f"Key for {route}, kept in .env", "", getpass.getpass) or None
    return {**changes, **_model_of(setup, changes, model)}


def _install_embedded(setup: _Setup, changes: JsonObject) -> None:
    from hermes import local
    from hermes.cli.install_model import install_embedded

    with setup.drafted(changes) as settings:
        if local.status(setup.home, settings)["problem"]:
            install_embedded(setup.home)
        if problem := local.status(setup.home, settings)["problem"]:
            raise NoModel(problem, hint="hermes setup model")


def _model_of(setup: _Setup, changes: JsonObject, model: str) -> JsonObject:
    """The model of a route, and its key where that is asked for: what the provider lists is checked before anything else."""
    from hermes.cli.picker import can_pick, not_listed, pick
    from hermes.services.model_setup import likely_model

    more: JsonObject = {}
    try:
        listed = _listed(setup, changes)
    except NoModel as failure:
        if failure.field == "api_key" and not (setup.args.non_interactive or setup.args.yes):
            note(f"✗ {failure.message}")
            more["model.api_key"] = setup.ask("Its key, kept in .env", "", getpass.getpass)
            listed = _listed(setup, {**changes, **more})
        elif model and (setup.args.yes or failure.field is None):
            listed = {"models": [], "windows": {}}  # the test question will tell
        else:
            raise
    names: list[str] = listed["models"]
    if model and names and model not in names:
        note(not_listed(model, names))
    if not model and not names:
        raise NoModel("It lists no models.", hint="the same with a model's name")
    if not model and len(names) > 1 and not setup.args.non_interactive and can_pick():
        windows = {name: f"{window:,} tokens" if (window := listed["windows"].get(name)) else "" for name in names}
        question, likely = f"Which of {len(names)} models", likely_model(names)
        model = setup.ask(question, likely, lambda _: pick(question, windows, likely))
    return {**more, "model.default": model or likely_model(names)}


def _listed(setup: _Setup, changes: JsonObject) -> JsonObject:
    """What the provider tells of its models. Raises NoModel."""
    from hermes.core.spec import RouteChoice
    from hermes.services.models import primary, problem_of

    with setup.drafted({**changes, "model.default": "any"}) as settings:
        route = primary(settings, RouteChoice())
        if problem := problem_of(settings, route, setup.home):
            raise NoModel(problem, hint="hermes setup model")
        return asyncio.run(models.fetched(setup.home, settings, route))


# ---- the rest


def _tools(setup: _Setup) -> None:
    from hermes.tools.framework.toolsets import DEFAULTS, builtin

    missing = [f"  {tool.name}: {why}" for tool in builtin().all() if (why := tool.available(setup.settings))]
    note(*_wrapped(f"Toolsets: {', '.join(DEFAULTS)}", *missing))
    current = setup.settings.agent.disabled_toolsets

    def ask_once() -> None:
        answer = setup.ask("Toolsets to switch off", ",".join(current))
        disabled = current if answer.lower() in _NO else words(answer)
        check_toolsets(disabled, DEFAULTS)
        if sorted(disabled) != sorted(current):
            setup.changes["agent.disabled_toolsets"] = disabled

    setup.until_valid(ask_once)


def _sandbox(setup: _Setup) -> None:
    from hermes.sandbox.choose import choose_backend

    chosen, current = setup.flag("sandbox"), setup.settings.terminal.backend
    if chosen is None:
        with setup.drafted({"terminal.backend": "auto"}) as settings:
            usable = choose_backend(settings)
        note(f"Commands can run in: {usable.name} {one_line(usable.failure)}".rstrip())

    def ask_once() -> None:
        backend = chosen or setup.ask(f"Sandbox: {', '.join(_SANDBOXES)}", current).lower()
        backend = current if backend in _NO else backend
        if backend not in _SANDBOXES:
            raise UsageError(f"There is no sandbox '{backend}'.", hint=f"one of {', '.join(_SANDBOXES)}")
        with setup.drafted({"terminal.backend": backend}) as settings:
            choose_backend(settings)  # raises for one that does not work
        if backend != current:
            setup.changes["terminal.backend"] = backend

    if chosen is None:
        setup.until_valid(ask_once)
    else:
        ask_once()


def _server(setup: _Setup) -> None:
    default = "y" if setup.args.part or not setup.args.non_interactive else "n"
    if setup.settings.api_server.key:
        note("The server has a key.")
        return

    def ask_once() -> None:
        answer = setup.ask("Make a key for the server? y/n", default).lower()
        if answer not in (*_YES, *_NO):
            raise UsageError(f"'{answer}' is neither y nor n.", hint="y or n")
        if answer in _YES:
            setup.changes["api_server.key"] = secrets.token_urlsafe(_KEY_BYTES)
            note("The key is shown by: hermes gateway key")

    setup.until_valid(ask_once)
