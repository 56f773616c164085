"""How commands in a sandbox find the proxy that is their only way out, and what they reach through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hermes.settings.config import Settings

# Each sandbox has a network namespace of its own, so the port is free in every one.
PROXY_PORT = 3128
# The backends whose commands reach the network through the proxy only.
PROXIED = frozenset({"bubblewrap"})


def proxy_env(port: int = PROXY_PORT) -> dict[str, str]:
    """The environment that leads the usual clients to a proxy on this port of the sandbox's own loopback."""
    url, direct = f"http://127.0.0.1:{port}", "localhost,127.0.0.1,::1"
    names = ("http_proxy", "https_proxy", "all_proxy")
    env = {name: url for lower in names for name in (lower, lower.upper())}
    return {**env, "no_proxy": direct, "NO_PROXY": direct, "NODE_USE_ENV_PROXY": "1"}


def network_of(settings: Settings, backend: str) -> str:
    """What commands in this backend reach, in a few words."""
    every_host = settings.terminal.network
    if backend in PROXIED:
        return "HTTP and HTTPS to " + ("every public host" if every_host else "hosts that the user grants")
    return "with network" if every_host else "without network"
