"""The command `hermes`: commands and chat in a terminal, as renderings of the run log."""

import sys


def entry() -> None:
    """The console script. What only wants to be told the version does not wait for the rest."""
    if sys.argv[1:] in (["-V"], ["--version"]):
        from hermes.core import version_cache

        lines = version_cache.known(*version_cache.version()[1:])
        if lines is not None:
            sys.stdout.write(lines)
            sys.exit(0)
    from hermes.cli.main import main

    sys.exit(main(sys.argv[1:]))
