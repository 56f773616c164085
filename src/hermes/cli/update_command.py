"""`hermes update`: the newest version, by the way that Hermes was installed."""

from __future__ import annotations

import sys

import hermes
from hermes.cli.command import Args, Argument, command
from hermes.cli.install_command import run
from hermes.cli.output import UsageError, note, tell
from hermes.core.home import Home, is_served
from hermes.core.installation import extras, installation, is_installed


@command(
    "update",
    Argument("source", metavar="SOURCE", nargs="?", default="", help="a wheel, or git+URL, instead of where it came from"),
)  # fmt: skip
def update(args: Args, home: Home) -> None:
    here = installation()
    if here.tool == "checkout" and args.source:
        raise UsageError(f"This is a checkout: {here.source}.", hint="hermes update, which pulls the current branch")
    parts = [name for name, packages in extras().items() if is_installed(packages)]
    for argv in here.update(args.source):
        note(" ".join(argv))
        run(argv)
    own = [sys.executable, "-P", "-m", "hermes"]
    if parts and here.tool != "checkout":  # an installer may have removed what it has not installed
        run([*own, "install", *parts])
    version = _version()
    tell(args, {"before": hermes.__version__, "now": version}, f"Hermes {version} (before: {hermes.__version__}).")
    if is_served(home):
        note("The running server is still the old version. Try: hermes gateway restart")


def _version() -> str:
    """The version on disk, which this process has not loaded."""
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("hermes")
    assert spec is not None and spec.origin is not None
    _, _, rest = Path(spec.origin).read_text("utf-8").partition('__version__ = "')
    return rest.partition('"')[0]
