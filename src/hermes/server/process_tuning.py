"""Tuning of a server process for a quick start and little memory."""

from __future__ import annotations

import gc
import ssl
from importlib import import_module
from typing import Any

_THRESHOLDS = (10_000, 20, 50)
_NEEDED = ("hermes.agent.loop", "hermes.providers.table")


def begin() -> None:
    """Collect garbage less often, and import aiohttp.

    aiohttp loads the machine's certificates twice, for a client that is not used here. It gets contexts without any:
    that client would fail to verify anything.
    """
    gc.set_threshold(*_THRESHOLDS)
    tls: Any = ssl
    create_context, read = ssl.create_default_context, ssl.SSLContext.set_default_verify_paths
    try:
        tls.create_default_context = lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.SSLContext.set_default_verify_paths = lambda _: None
        import aiohttp  # noqa: F401
    finally:
        tls.create_default_context, tls.SSLContext.set_default_verify_paths = create_context, read


def settle() -> None:
    """Import what the first turn needs, and exclude it all from garbage collection."""
    from hermes.tools.framework.toolsets import builtin

    for name in _NEEDED:
        import_module(name)
    builtin()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
