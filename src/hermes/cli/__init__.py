"""The command `hermes`: commands and chat in a terminal, as renderings of the run log."""

import sys


def entry() -> None:
    """The console script."""
    from hermes.cli.main import main

    sys.exit(main(sys.argv[1:]))
