"""`hermes mcp`: servers whose tools are used: add them, try them, see what they offer; and being such a server."""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Mapping

from hermes.cli.command import YES, Args, Argument, command, flag
from hermes.cli.output import UsageError, confirmed, print_redacted, resolve_name, secrets, silence_logs, tell
from hermes.cli.table import print_table
from hermes.core.errors import ConfigError, HermesError
from hermes.core.formatting import counted
from hermes.core.home import Home
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.settings import config
from hermes.settings.schema import McpServer

_VALID_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = Argument("name", metavar="NAME")


def _pairs(name: str, help: str) -> Argument:
    return Argument(name, metavar="NAME=VALUE", action="append", default=[], help=help)


def _servers(home: Home) -> Mapping[str, McpServer]:
    return config.load(home).mcp_servers


def _name(args: Args, home: Home) -> str:
    return resolve_name(args.name, _servers(home), "MCP server", "hermes mcp list")


@command("mcp list", help="list the configured servers")
def _list(args: Args, home: Home) -> None:
    redact, rows = secrets(home).redact, list[JsonObject]()
    for name, server in _servers(home).items():
        target = redact(server.url or " ".join([server.command or "?", *server.args]))
        row = {"name": name, "enabled": server.enabled, "approval": server.approval, "target": target}
        rows.append({**row, "headers": sorted(server.headers), "env": sorted(server.env)})
    cells = [
        (row["name"], "on" if row["enabled"] else "off", f"asks: {row['approval']}", row["target"]) for row in rows
    ]
    empty = "There are no MCP servers. Try: hermes mcp add NAME --url URL"
    print_table(args, home, {"servers": rows}, cells, flexible=3, empty=empty)


# ---- asking them


def _probe(args: Args, home: Home, name: str, flags: JsonMapping) -> JsonObject:
    """Connect a server as the settings and the flags describe it, and see what it has."""
    silence_logs(args)
    settings = config.load(home, {**flags, f"mcp_servers.{name}.enabled": True})
    settings.require_valid(*(problem.key for problem in settings.errors if problem.key in flags))
    return asyncio.run(_connected(home, settings, name))


async def _connected(home: Home, settings: config.Settings, name: str) -> JsonObject:
    from hermes.app import App

    app, started_at = App(home, settings), time.monotonic()
    try:
        state = await app.services.mcp.test(name, settings) or {}
        tools = app.services.mcp.tools_of(name)
        seconds = round(time.monotonic() - started_at, 3)
        shown = [{"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools]
        return {**state, "seconds": seconds, "tools": shown}
    finally:
        await app.close()


def _summary(state: JsonObject) -> str:
    if state["state"] != "up":
        return f"{state['name']} cannot be used: {state['error'].rstrip('.')}."
    return f"{state['name']} is up after {state['seconds']:g} s, with {counted(len(state['tools']), 'tool')}."


@command("mcp test", _NAME, help="connect to a server, and list its tools")
def _test(args: Args, home: Home) -> int:
    state = _probe(args, home, _name(args, home), {})
    unfit = [f"  left out: {name}: {why}" for name, why in state["unfit"].items()]
    print_redacted(args, home, state, [_summary(state), *(f"  {tool['name']}" for tool in state["tools"]), *unfit])
    return 0 if state["state"] == "up" else 1


@command("mcp tools", _NAME, help="list the tools of a server with their descriptions")
def _tools(args: Args, home: Home) -> None:
    state = _probe(args, home, _name(args, home), {})
    if state["state"] != "up":
        raise HermesError(_summary(state), hint=f"hermes mcp test {state['name']}")
    rows = [(tool["name"], tool["description"]) for tool in state["tools"]]
    print_table(args, home, {"name": state["name"], "tools": state["tools"]}, rows, flexible=1)


# ---- being one


@command(
    "mcp serve",
    Argument(
        "--server",
        metavar="URL",
        default=argparse.SUPPRESS,
        help="use the agent of this server, with the key in HERMES_API_KEY",
    ),
    help="run as an MCP server over stdin and stdout",
)
def _serve(args: Args, home: Home) -> None:
    try:
        from hermes.cli.mcp_serve import serve
    except ImportError:
        raise HermesError("The MCP SDK is not installed.", hint="hermes install mcp") from None
    serve(home, args.server, verbose=args.debug)


# ---- changing


@command(
    "mcp add",
    _NAME,
    Argument("--url", metavar="U", help="the address of a server that is reached over HTTP"),
    Argument("--command", metavar="C", dest="command_line", help="the program of a server that is started here"),
    _pairs("--header", help="a header of each request; stored in .env"),
    _pairs("--env", help="a variable of its environment; stored in .env"),
    flag("--force", help="write it although the test fails"),
    Argument("--args", metavar="ARG", nargs=argparse.REMAINDER, help="its arguments; all that follows is one"),
    help="test a server and add it to the settings",
)
def _add(args: Args, home: Home) -> None:
    if not _VALID_NAME.fullmatch(args.name):
        raise UsageError(f"'{args.name}' is no name: 1 to 64 letters, digits, '_' and '-'.", where="NAME")
    if args.name in _servers(home):
        raise UsageError(f"There is an MCP server '{args.name}' already.", hint=f"hermes mcp remove {args.name}")
    if bool(args.url) == bool(args.command_line):
        raise UsageError("A server has either an address or a command.", hint="--url URL, or --command COMMAND")
    given: JsonObject = {"url": args.url, "command": args.command_line, "args": args.args or None}
    for where, pairs in (("headers", args.header), ("env", args.env)):
        for text in pairs:
            name, sign, value = (part.strip() for part in re.match(r"([^=:]*)([=:]?)(.*)", text, re.S).groups())  # type: ignore[union-attr]
            if not name or not sign or not value:
                raise UsageError("It is a name and a value: NAME=VALUE.", where=f"--{where.removesuffix('s')}")
            given[f"{where}.{name}"] = value
    flags = {f"mcp_servers.{args.name}.{key}": value for key, value in given.items() if value}
    state = _probe(args, home, args.name, flags)
    if state["state"] != "up" and not args.force:
        raise HermesError(f"{_summary(state)} Nothing was written.", hint="the same with --force")
    try:
        for key, value in flags.items():
            config.set_value(home, key, value)
    except ConfigError:
        _forget(home, args.name)
        raise
    print_redacted(
        args, home, {"name": args.name, "test": state}, [_summary(state), f"{args.name} is in {home.config_file}."]
    )


@command("mcp remove", _NAME, YES, help="remove a server from the settings")
def _remove(args: Args, home: Home) -> int:
    name = _name(args, home)
    if not confirmed(args, f"Removing '{name}'", f"{name} will be gone from the settings."):
        return 1
    _forget(home, name)
    tell(args, {"name": name, "removed": True}, f"{name} is gone from {home.config_file}.")
    return 0


def _forget(home: Home, name: str) -> None:
    for key in [key for key, _, _ in config.load(home).items() if key.startswith(f"mcp_servers.{name}.")]:
        config.unset_value(home, key)
