"""Which tools there are, in which sets, and which of them a surface is offered."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from hermes.tools.registry import Registry

# toolset: surfaces for which it is on unless the configuration says otherwise; empty means all
DEFAULTS: dict[str, frozenset[str]] = {
    "todo": frozenset(),
    "memory": frozenset({"cli", "api_server"}),
    "clarify": frozenset({"cli", "api_server"}),
}
# What a model with a small window is left with.
LEAN = frozenset({"file", "terminal", "todo"})


@cache
def builtin() -> Registry:
    """The tools that come with Hermes, loaded when first asked for."""
    from hermes.tools import clarify, memory, todo

    return Registry([todo.TOOL, memory.TOOL, clarify.TOOL])


def _get_platform_tools(config: Mapping[str, Any], platform: str) -> set[str]:
    """The toolsets of a surface, before any policy of a run."""
    chosen = (config.get("platform_toolsets") or {}).get(platform)
    if chosen is None:
        chosen = [name for name, surfaces in DEFAULTS.items() if not surfaces or platform in surfaces]
    disabled = (config.get("agent") or {}).get("disabled_toolsets") or []
    return set(chosen) - set(disabled)
