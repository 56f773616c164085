"""`hermes acp`: the agent of an editor, over standard input and output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes.cli.command import Args, command

if TYPE_CHECKING:
    from hermes.core.home import Home


@command("acp")
def acp(args: Args, home: Home) -> int:
    import asyncio

    from hermes.app import new_loop
    from hermes.core.errors import ConfigError

    try:
        from hermes.cli.acp.agent import serve
    except ModuleNotFoundError as error:
        message = f"Editors are served with the extra `acp`: {error.name} is not installed."
        raise ConfigError(message, hint="hermes install acp") from None
    with asyncio.Runner(loop_factory=new_loop) as loop:
        return loop.run(serve(args, home))
