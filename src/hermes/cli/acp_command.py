"""`hermes acp`: the agent of an editor, over standard input and output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes.cli.command import Args, command, flag

if TYPE_CHECKING:
    from hermes.core.home import Home


# Editors put the arguments of an authentication method behind the whole command that starts the agent.
SETUP = "--setup"


@command("acp", flag(SETUP, help="do what `hermes setup` does, at a terminal, and leave"))
def acp(args: Args, home: Home) -> int:
    import asyncio

    from hermes.app import new_loop
    from hermes.core.errors import ConfigError

    if args.setup:
        from hermes.cli.main import parser_with

        setup_args = parser_with(("setup",)).parse_args(["setup"])
        return setup_args.work(setup_args, home)  # type: ignore[no-any-return]
    try:
        from hermes.cli.acp.agent import serve
    except ModuleNotFoundError as error:
        message = f"Editors are served with the extra `acp`: {error.name} is not installed."
        raise ConfigError(message, hint="hermes install acp") from None
    with asyncio.Runner(loop_factory=new_loop) as loop:
        return loop.run(serve(args, home))
