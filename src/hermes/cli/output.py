"""What the commands share: printing results and notes, settings, asking, and finding what is meant."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from hermes.cli.streams import as_json
from hermes.core.errors import ConfigError, HermesError, ServiceError
from hermes.core.formatting import one_line
from hermes.core.json_types import JsonMapping

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.guards.secrets import Secrets
    from hermes.settings.config import Settings

# Global options that stand for a setting during one call.
_FLAGS = {"model": "model.default", "provider": "model.provider", "sandbox": "terminal.backend"}
# code of a service: the exit code, where that is not the one of a usage error
_SERVICE_EXITS = {
    **dict.fromkeys(("run_finished", "approval_not_active", "approval_not_pending", "clarify_not_pending"), 1),
    **dict.fromkeys(("not_found", "session_not_found", "message_not_found", "run_not_found"), 5),
    **dict.fromkeys(("contains_secret", "injection_suspected", "path_refused"), 6),
}
_NEAR_MAX = 20
# Set by the option of that name.
quiet = False


EXIT_FAILED, EXIT_USAGE, EXIT_NO_MODEL, EXIT_REFUSED, EXIT_DEADLINE, EXIT_INTERRUPTED = 1, 2, 3, 6, 124, 130


class UsageError(HermesError):
    exit_code = EXIT_USAGE


class NoModel(HermesError):
    """`field`: what of the route is at fault, `base_url` or `api_key`, where that is known."""

    exit_code = EXIT_NO_MODEL
    field: str | None = None


class NotFound(HermesError):
    exit_code = 5


class Refused(HermesError):
    exit_code = EXIT_REFUSED


class Busy(HermesError):
    exit_code = 4


# ---- printing


def tell(args: argparse.Namespace, document: object, *lines: str) -> None:
    for line in [as_json(document, default=str)] if getattr(args, "json", False) else lines:
        print(line)


def print_redacted(args: argparse.Namespace, home: Home, document: object, lines: Iterable[str]) -> None:
    """The same for what was said by anybody: secrets are not shown."""
    from hermes.guards.secrets import redact_tree

    hidden = mask(home)
    tell(args, redact_tree(document, hidden), *map(hidden, lines))


def note(*lines: str) -> None:
    for line in () if quiet else lines:
        print(line, file=sys.stderr)


def secrets(home: Home) -> Secrets:
    from hermes.logs import known_secrets
    from hermes.settings import config

    return known_secrets(config.load(home))


def mask(home: Home) -> Callable[[str], str]:
    from hermes.guards.secrets import Secrets

    try:
        return secrets(home).mask
    except ConfigError as error:
        # Without settings no secret is known: then whatever looks like one is not shown.
        note(str(error))
        return Secrets().redact


def settings_of(args: argparse.Namespace, home: Home, more: JsonMapping | None = None) -> Settings:
    """The settings as they are for this call; `more` comes before all others."""
    from hermes.settings import config

    flags = {name: getattr(args, flag, None) for flag, name in _FLAGS.items()}
    if getattr(args, "yolo", False):
        flags["approvals.mode"] = "off"
    return config.load(home, {**flags, **(more or {})}, safe_mode=bool(getattr(args, "safe_mode", False)))


def silence_logs(args: argparse.Namespace) -> None:
    """What the parts log on their way is not for whoever waits for a result, unless they want to see it."""
    import logging

    if getattr(args, "debug", False):
        logging.basicConfig(level=logging.DEBUG)
    else:
        logging.getLogger().addHandler(logging.NullHandler())


# ---- asking


def asked(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def confirmed(args: argparse.Namespace, action: str, *about: str) -> bool:
    """Whether the user wants it, who is asked on a terminal and must have said so elsewhere."""
    if args.yes:
        return True
    if not sys.stdin.isatty():
        note(*about)
        raise UsageError(f"{action} must be confirmed.", hint="the same with -y")
    if asked("\n".join([*about, "Continue? [y/N] "])).lower() in ("y", "yes"):
        return True
    note("Nothing was done.")
    return False


def resolve_name(text: str, names: Iterable[str], thing: str, hint: str) -> str:
    """The one name that is given or begun."""
    known = list(dict.fromkeys(names))
    matches = [name for name in known if name == text] or [name for name in known if text and name.startswith(text)]
    if not matches:
        raise NotFound(f"There is no {thing} '{text}'.{near(text, known)}", hint=hint)
    if len(matches) > 1:
        note(*(f"  {one_line(name)}" for name in matches[:_NEAR_MAX]))
        raise UsageError(f"'{text}' may mean any of {len(matches)} {thing}s.", hint="more of its letters")
    return matches[0]


@contextlib.contextmanager
def service_errors(hint: str = "") -> Iterator[None]:
    """The refusal of a service as that of a command, with the command's own hint."""
    try:
        yield
    except ServiceError as error:
        refused = HermesError(error.message, hint=hint)
        refused.exit_code = _SERVICE_EXITS.get(error.code, UsageError.exit_code)
        raise refused from None


def near(name: str, names: Iterable[str]) -> str:
    """A question whether one of these names was meant; empty where none is like it."""
    import difflib

    close = difflib.get_close_matches(name, [*names], n=3, cutoff=0.5)
    return f" Did you mean {', '.join(close)}?" if close else ""


def check_toolsets(names: Iterable[str], known: Iterable[str], where: str = "") -> None:
    known = [*known]
    for name in names:
        if name not in known:
            message = f"There is no toolset '{name}'.{near(name, known)}"
            raise UsageError(message, where=where, hint="hermes tools list")
