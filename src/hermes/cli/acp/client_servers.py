"""MCP servers that an editor names for a session, as settings of a server."""

from __future__ import annotations

from collections.abc import Sequence

from acp.schema import AcpMcpServer, HttpMcpServer, McpServerStdio, SseMcpServer

from hermes.cli.acp.content import invalid
from hermes.core.limits import ACP_SERVERS_MAX
from hermes.settings.config import Settings
from hermes.settings.schema import McpServer

Named = HttpMcpServer | SseMcpServer | AcpMcpServer | McpServerStdio


def servers_of(named: Sequence[Named] | None, settings: Settings) -> dict[str, McpServer]:
    """Their settings by name. Programs are sandboxed unless commands are not."""
    named = named or ()
    if len(named) > ACP_SERVERS_MAX:
        raise invalid("mcpServers", f"are more than {ACP_SERVERS_MAX}")
    servers: dict[str, McpServer] = {}
    for at, one in enumerate(named):
        field = f"mcpServers[{at}]"
        if not one.name or one.name in servers:
            raise invalid(f"{field}.name", "is used twice" if one.name else "is empty")
        if isinstance(one, McpServerStdio):
            env = {variable.name: variable.value for variable in one.env}
            sandbox = settings.terminal.backend != "local"
            servers[one.name] = McpServer(command=one.command, args=one.args, env=env, sandbox=sandbox)
        elif isinstance(one, HttpMcpServer):
            servers[one.name] = McpServer(url=one.url, headers={header.name: header.value for header in one.headers})
        else:
            raise invalid(f"{field}.type", f"is {one.type!r}, which is not supported")
    return servers
