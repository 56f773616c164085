"""Where commands run on this machine, as a server found out by trying, for those who only want to tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes.core import version_cache

if TYPE_CHECKING:
    from hermes.settings.config import Settings


def told(settings: Settings) -> str | None:
    """What was found out while machine and settings were as they are now; None: it must be tried.

    What did not work is tried again: it may have been mended in a way that cannot be seen from here.
    """
    found = version_cache.known(*_place(settings))
    return None if found is None or "(" in found else found


def remember(settings: Settings, name: str) -> None:
    """Keep what was found out."""
    version_cache.remember(*_place(settings), name)


def _place(settings: Settings) -> tuple[str, str]:
    wanted = [settings.terminal.backend, settings.terminal.docker_image, settings.terminal.allow_local]
    return str(settings.home.cache / "sandbox"), version_cache.key_of(wanted, version_cache.machine())
