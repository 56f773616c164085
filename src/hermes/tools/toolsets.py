"""Which tools there are, in which sets, and which of them a surface is offered."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from hermes.tools.registry import Registry, ToolDef

# Offered where `platform_toolsets` names it.
_BY_NAME = frozenset({""})
# toolset: surfaces for which it is on unless the configuration says otherwise; empty means all
DEFAULTS: dict[str, frozenset[str]] = {
    "todo": frozenset(),
    "memory": frozenset({"cli", "api_server"}),
    "clarify": frozenset({"cli", "api_server"}),
    "file": _BY_NAME,
    "terminal": _BY_NAME,
    "code_execution": _BY_NAME,
    "web": _BY_NAME,
    "vision": _BY_NAME,
    "session_search": _BY_NAME,
    "skills": _BY_NAME,
    "delegation": _BY_NAME,
    "cronjob": _BY_NAME,
}
_MODULES = (
    *("clarify", "code", "cronjob", "delegation", "files", "memory", "patching", "process", "searching"),
    *("session_search", "skills", "terminal", "todo", "vision", "web"),
)
# What a model with a small window is left with.
LEAN = frozenset({"file", "terminal", "todo"})


@cache
def builtin() -> Registry:
    """The tools that come with Hermes, loaded when first asked for."""
    found: list[ToolDef] = []
    for name in _MODULES:
        module = import_module(f"hermes.tools.{name}")
        found += getattr(module, "TOOLS", None) or [module.TOOL]
    return Registry(found)


def _get_platform_tools(config: Mapping[str, Any], platform: str) -> set[str]:
    """The toolsets of a surface, before any policy of a run."""
    chosen = (config.get("platform_toolsets") or {}).get(platform)
    if chosen is None:
        chosen = [name for name, surfaces in DEFAULTS.items() if not surfaces or platform in surfaces]
        chosen += of_servers(config.get("mcp_servers") or {})
    disabled = (config.get("agent") or {}).get("disabled_toolsets") or []
    return set(chosen) - set(disabled)


def of_servers(servers: Mapping[str, Any]) -> list[str]:
    """The toolsets of the MCP servers that are configured and not turned off."""
    return [f"mcp:{name}" for name, server in servers.items() if (server or {}).get("enabled", True)]
