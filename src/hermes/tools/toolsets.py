"""Which tools there are, in which sets, and which of them a surface is offered."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import hermes.tools
from hermes.tools.registry import Registry, ToolDef

# The surfaces for which a toolset is on unless the configuration says otherwise; none means all of them.
_NOT_IN_JOBS = frozenset({"cli", "api_server"})
DEFAULTS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("file", "terminal", "code_execution", "web", "vision", "todo"), frozenset()),
    **dict.fromkeys(("session_search", "skills"), frozenset()),
    **dict.fromkeys(("memory", "delegation", "cronjob", "clarify"), _NOT_IN_JOBS),
}
# What a model with a small window is left with.
LEAN = frozenset({"file", "terminal", "todo"})


@cache
def builtin() -> Registry:
    """Every ToolDef of the modules here; those for MCP servers define none, and one of them loads the SDK."""
    names = (module.name for module in iter_modules(hermes.tools.__path__) if not module.name.startswith("mcp"))
    modules = [import_module(f"hermes.tools.{name}") for name in names]
    values = (value for module in modules for value in vars(module).values())
    return Registry(dict.fromkeys(value for value in values if isinstance(value, ToolDef)))


def _get_platform_tools(config: Mapping[str, Any], platform: str) -> set[str]:
    chosen = (config.get("platform_toolsets") or {}).get(platform)
    if chosen is None:
        chosen = [name for name, surfaces in DEFAULTS.items() if not surfaces or platform in surfaces]
        chosen += of_servers(config.get("mcp_servers") or {})
    disabled = (config.get("agent") or {}).get("disabled_toolsets") or []
    return set(chosen) - set(disabled)


def of_servers(servers: Mapping[str, Any]) -> list[str]:
    return [f"mcp:{name}" for name, server in servers.items() if (server or {}).get("enabled", True)]
