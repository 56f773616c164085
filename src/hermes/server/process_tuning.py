"""What the process of a server does to start quickly and to stay small."""

from __future__ import annotations

import gc
import ssl
from importlib import import_module
from typing import Any

_THRESHOLDS = (10_000, 20, 50)
_NEEDED = ("hermes.agent.loop", "hermes.providers.table")


def begin() -> None:
    """Have the collector look less often, and load the HTTP library.

    That reads the certificates of this machine twice, for a client that is not used here. It gets contexts without any:
    whoever used it would be told that nothing can be verified.
    """
    gc.set_threshold(*_THRESHOLDS)
    tls: Any = ssl
    made, read = ssl.create_default_context, ssl.SSLContext.set_default_verify_paths
    try:
        tls.create_default_context = lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.SSLContext.set_default_verify_paths = lambda _: None
        import aiohttp  # noqa: F401
    finally:
        tls.create_default_context, tls.SSLContext.set_default_verify_paths = made, read


def settle() -> None:
    """Load what the first turn needs. All that stays, and the collector looks at it no more."""
    from hermes.tools.framework.toolsets import builtin

    for name in _NEEDED:
        import_module(name)
    builtin()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
