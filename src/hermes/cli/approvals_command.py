"""`hermes approvals`: what may be done without asking, because somebody once said `always`."""

from __future__ import annotations

from collections.abc import Sequence

from hermes.cli.command import Args, Argument, command
from hermes.cli.output import NotFound, note, print_redacted
from hermes.core.home import Home
from hermes.core.text import visible
from hermes.settings import config


def _grants(home: Home) -> dict[str, Sequence[str]]:
    """Where `always` is written to: commands, and hosts that sandboxed commands may reach."""
    settings = config.load(home)
    return {
        "command_allowlist": settings.command_allowlist,
        "terminal.allowed_hosts": settings.terminal.allowed_hosts,
    }


@command("approvals list", help="list commands and hosts that are always allowed")
def _list(args: Args, home: Home) -> None:
    grants = [grant for listed in _grants(home).values() for grant in listed]
    # Not a table: whoever decides must see all of a grant, however narrow the terminal is.
    lines = (f"{number}  {visible(grant)}" for number, grant in enumerate(grants, 1))
    print_redacted(args, home, {"grants": grants}, lines)
    if not grants:
        note("Nothing is allowed for good.")


@command(
    "approvals remove",
    Argument("grants", metavar="GRANT", nargs="+", help="a grant as it is listed, or its number"),
    help="remove grants: approval is needed again",
)
def _remove(args: Args, home: Home) -> None:
    by_key = _grants(home)
    grants = [grant for listed in by_key.values() for grant in listed]
    known = {str(number): grant for number, grant in enumerate(grants, 1)} | {grant: grant for grant in grants}
    if unknown := [text for text in args.grants if text not in known]:
        raise NotFound(f"There is no grant '{unknown[0]}'.", hint="hermes approvals list")
    removed = sorted({known[text] for text in args.grants})
    for key, listed in by_key.items():
        if set(removed).intersection(listed):
            config.set_value(home, key, [grant for grant in listed if grant not in removed])
    print_redacted(
        args, home, {"removed": removed}, (f"No longer allowed without asking: {visible(grant)}" for grant in removed)
    )
