"""The toolsets, and which of them a surface offers."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import msgspec

import hermes.tools
from hermes.core.json_types import JsonMapping
from hermes.settings.schema import Root
from hermes.tools.framework.registry import Registry, ToolDef

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
    """Every ToolDef of the modules here. The modules for MCP are skipped: they define none, and load the SDK."""
    infos = iter_modules(hermes.tools.__path__)
    names = (info.name for info in infos if not info.ispkg and not info.name.startswith("mcp"))
    modules = [import_module(f"hermes.tools.{name}") for name in names]
    values = (value for module in modules for value in vars(module).values())
    return Registry(dict.fromkeys(value for value in values if isinstance(value, ToolDef)))


def enabled_toolsets(settings: Root, platform: str) -> set[str]:
    """The toolsets of a surface, before any policy of a run."""
    chosen = settings.platform_toolsets.get(platform)
    if chosen is None:
        chosen = [name for name, surfaces in DEFAULTS.items() if not surfaces or platform in surfaces]
        chosen += of_servers(settings)
    return set(chosen) - set(settings.agent.disabled_toolsets)


def _get_platform_tools(config: JsonMapping, platform: str) -> set[str]:
    """`enabled_toolsets` for settings given as mappings."""
    sections = {name: config.get(name) or {} for name in ("platform_toolsets", "agent", "mcp_servers")}
    return enabled_toolsets(msgspec.convert(sections, Root), platform)


def of_servers(settings: Root) -> list[str]:
    """The toolsets of the MCP servers that are enabled."""
    return [f"mcp:{name}" for name, server in settings.mcp_servers.items() if server.enabled]
