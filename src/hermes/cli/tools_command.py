"""`hermes tools`: which tools there are, which are offered where, and what the guard thinks of a command."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes.cli.command import Args, Argument, command
from hermes.cli.output import note, print_redacted, resolve_name, settings_of, tell
from hermes.cli.table import print_table
from hermes.core.home import Home
from hermes.core.json_types import JsonObject

if TYPE_CHECKING:
    from hermes.settings.config import Settings
    from hermes.tools.framework.registry import ToolDef

PLATFORMS = ("cli", "api_server", "cron")
EXIT_FLAGGED = 6
_PLATFORM = Argument("--platform", choices=PLATFORMS, default="cli", help="of this platform (cli)")
_NAMES = Argument("names", metavar="NAME", nargs="+", help="a toolset")


def _chosen(settings: Settings, platform: str) -> set[str]:
    from hermes.tools.framework.toolsets import enabled_toolsets

    own = settings.api_server.toolsets if platform == "api_server" else None
    return enabled_toolsets(settings, platform) if own is None else set(own)


def _toolsets(settings: Settings) -> dict[str, list[ToolDef]]:
    """Every toolset with its tools; those of a server are not known before it is asked."""
    from hermes.tools.framework.toolsets import DEFAULTS, builtin, of_servers

    names = [*DEFAULTS, *of_servers(settings)]
    return {name: [tool for tool in builtin().all() if tool.toolset == name] for name in names}


@command("tools list", _PLATFORM, help="list toolsets, and whether they are enabled")
def _list(args: Args, home: Home) -> None:
    settings = settings_of(args, home)
    on, rows = _chosen(settings, args.platform), list[JsonObject]()
    for name, tools in _toolsets(settings).items():
        reasons = {tool.name: why for tool in tools if (why := tool.available(settings))}
        offered = [tool.name for tool in tools if tool.name not in reasons]
        state = "off" if name not in on else "on" if not tools or offered else "unavailable"
        why = "; ".join(dict.fromkeys(reasons.values()))
        if state == "off":
            disabled = name in settings.agent.disabled_toolsets
            why = "agent.disabled_toolsets names it" if disabled else f"not chosen for {args.platform}"
        rows.append({"name": name, "state": state, "reason": why, "tools": offered, "unavailable": reasons})
    cells = [
        (row["name"], row["state"], ", ".join([*row["tools"], *row["unavailable"]]), row["reason"]) for row in rows
    ]
    print_table(args, home, {"platform": args.platform, "toolsets": rows}, cells, flexible=2)


@command("tools enable", _NAMES, _PLATFORM, help="enable toolsets")
def _enable(args: Args, home: Home) -> int:
    return _switch(args, home, add=True)


@command("tools disable", _NAMES, _PLATFORM, help="disable toolsets")
def _disable(args: Args, home: Home) -> int:
    return _switch(args, home, add=False)


def _switch(args: Args, home: Home, *, add: bool) -> int:
    from hermes.settings import config

    settings = config.load(home)
    known, on = _toolsets(settings), _chosen(settings, args.platform)
    names = {resolve_name(name, known, "toolset", "hermes tools list") for name in args.names}
    key = f"platform_toolsets.{args.platform}"
    config.set_value(home, key, sorted(on | names if add else on - names))
    now = _chosen(config.load(home), args.platform)
    offered = f"Offered to {args.platform}: {', '.join(sorted(now)) or 'nothing'}."
    tell(args, {"platform": args.platform, "toolsets": sorted(now)}, offered)
    if unchanged := sorted(name for name in names if (name in now) is not add):
        first = "agent.disabled_toolsets" if add else "api_server.toolsets"
        note(f"{', '.join(unchanged)} did not change: {first} comes before {key}. Try: hermes config edit")
    return 1 if unchanged else 0


@command(
    "tools show",
    Argument("name", metavar="NAME", help="a tool or a toolset"),
    help="show a tool's parameters, effect and limits",
)
def _show(args: Args, home: Home) -> None:
    settings = settings_of(args, home)
    sets = _toolsets(settings)
    tools = {tool.name: tool for members in sets.values() for tool in members}
    name = resolve_name(args.name, [*tools, *sets], "tool", "hermes tools list")
    shown = [_described(tool, settings) for tool in ([tools[name]] if name in tools else sets[name])]
    lines = [line for tool in shown for line in ("", *_lines(tool))][1:]
    tell(args, shown[0] if name in tools else {"name": name, "tools": shown}, *lines)
    if name in tools and len(sets.get(name, ())) > 1:
        members = ", ".join(tool.name for tool in sets[name])
        note(f"{name} is a toolset too, with the tools {members}.")
    if not shown:
        note(f"Its tools are known when it is asked. Try: hermes mcp tools {name.removeprefix('mcp:')}")


def _described(tool: ToolDef, settings: Settings) -> JsonObject:
    return {
        "name": tool.name,
        "toolset": tool.toolset,
        "description": tool.description,
        "effect": tool.effect if isinstance(tool.effect, str) else "by its arguments",
        "timeout_seconds": tool.timeout_s,
        "answer_chars_max": settings.tool_output.max_chars,
        "platforms": [platform for platform in PLATFORMS if tool.toolset in _chosen(settings, platform)],
        "unavailable": tool.available(settings),
        "parameters": tool.parameters,
    }


def _lines(tool: JsonObject) -> list[str]:
    values = {**tool, "platforms": ", ".join(tool["platforms"]), "parameters": ""}
    facts = [f"  {key.replace('_', ' ')}: {value}" for key, value in values.items() if value]
    required = tool["parameters"].get("required", ())
    for name, schema in tool["parameters"].get("properties", {}).items():
        kind = "|".join(map(str, schema["enum"])) if "enum" in schema else schema.get("type", "any")
        facts.append(f"    {name}{'*' * (name in required)}: {kind}  {schema.get('description', '')}".rstrip())
    return [f"{tool['name']} ({tool['toolset']})", *facts[2:]]


# ---- the guard


@command(
    "tools check",
    Argument("command_line", metavar="COMMAND", nargs=argparse.REMAINDER, help="a command line, best in quotes"),
    help="check a command without running it; exit 6: needs approval or is blocked",
)
def _check(args: Args, home: Home) -> int:
    line = args.command_line[0] if len(args.command_line) == 1 else shlex.join(args.command_line)
    report = verdict(settings_of(args, home), line, Path.cwd())
    hits = [f"  {hit['rule']} ({hit['detail']}){'' if hit['counts'] else ', harmless here'}" for hit in report["rules"]]
    print_redacted(args, home, report, [f"{report['verdict']}: {report['reason']}", *hits])
    return 0 if report["verdict"] == "free" else EXIT_FLAGGED


def verdict(settings: Settings, line: str, cwd: Path) -> JsonObject:
    """What would become of a command at a terminal in this folder: free, asked about, or blocked."""
    from hermes.guards.commands import Facts, check, simple_forms
    from hermes.sandbox.choose import child_env, choose_backend, workspace_of
    from hermes.sandbox.proxy import PROXIED
    from hermes.tools.framework import approvals

    home, sandbox = settings.home, choose_backend(settings)
    workspace = str(workspace_of(home, settings, "default", None, here=cwd))
    env = child_env(settings, "local", home.path, os.environ)
    facts = Facts((workspace, *settings.terminal.sandbox_rw), env["HOME"], str(home.path), env)
    hits, forms = check(line, workspace, facts, os.path.exists), simple_forms(line, workspace, facts)
    online = settings.terminal.network or sandbox.name in PROXIED  # at a terminal somebody can be asked for a host
    approval_rules = approvals.rules_to_approve(line, hits, forms, isolated=sandbox.isolated, network=online)
    hard = approvals.forbidden_rules(settings.approvals.deny, (line, *forms), hits)
    allowed = all(
        approvals.is_allowed(approvals.pieces_of(hit, forms), settings.command_allowlist) for hit in approval_rules
    )
    answers: list[tuple[Any, str, str]] = [
        (hard, "blocked", approvals.explain(hard)),
        (sandbox.reason, "blocked", f"No command can be run: {sandbox.failure}"),
        (not hits and not approval_rules, "free", "No rule is met."),
        (not approval_rules, "free", f"It can do no harm outside its sandbox ({sandbox.name})."),
        (settings.approvals.mode == "off", "free", "Approvals are off."),
        (allowed, "free", "command_allowlist allows it."),
        (True, "asked", approvals.explain(dict.fromkeys(hit.rule for hit in approval_rules))),
    ]
    status, reason = next((word, why) for holds, word, why in answers if holds)
    every = dict.fromkeys([*hits, *approval_rules])
    rules = [
        {"rule": hit.rule, "class": hit.klass, "detail": hit.detail, "counts": hit in approval_rules} for hit in every
    ]
    outcome = {"command": line, "cwd": workspace, "sandbox": sandbox.name, "verdict": status, "reason": reason}
    return {**outcome, "rules": rules}
