"""The image that the clipboard holds, as a PNG, by the programs that desktops have for that."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Iterator

from hermes.cli.output import NotFound, UsageError
from hermes.core.formatting import size
from hermes.core.limits import ATTACHED_BYTES_MAX, CLIPBOARD_S_MAX
from hermes.sandbox.piped import piped_process

PNG = b"\x89PNG\r\n\x1a\n"
_OSASCRIPT = ("osascript", "-e", "get the clipboard as «class PNGf»")
# What `osascript` prints: the bytes in hexadecimal digits.
_HEX = re.compile(rb"\xc2\xabdata PNGf([0-9A-F]+)\xc2\xbb")
_INSTALL = "install wl-clipboard (Wayland), xclip (X11) or pngpaste (macOS); @picture.png attaches a file"


async def read_image() -> bytes:
    """Raises NotFound where there is no image, or no way to look; UsageError for one that is too large."""
    commands = [command for command in _commands() if shutil.which(command[0])]
    if not commands:
        raise NotFound("There is no program here that reads images of the clipboard.", hint=_INSTALL)
    for command in commands:
        if image := await _output(command):
            if len(image) > ATTACHED_BYTES_MAX:
                raise UsageError(f"The image is larger than {size(ATTACHED_BYTES_MAX)}.")
            return image
    raise NotFound(
        "The clipboard holds no image.", hint="the paste key of the terminal, for text; @picture.png, for a file"
    )


def _commands() -> Iterator[tuple[str, ...]]:
    if sys.platform == "darwin":
        yield from (("pngpaste", "-"), _OSASCRIPT)
    if os.environ.get("WAYLAND_DISPLAY"):
        yield ("wl-paste", "--no-newline", "--type", "image/png")
    if os.environ.get("DISPLAY"):
        yield ("xclip", "-selection", "clipboard", "-target", "image/png", "-out")


async def _output(command: tuple[str, ...]) -> bytes:
    """The PNG that a program prints; nothing where it prints none."""
    data = b""
    # Hexadecimal digits take twice the room.
    limit = 2 * ATTACHED_BYTES_MAX + 100
    try:
        async with (
            asyncio.timeout(CLIPBOARD_S_MAX),
            piped_process(command, dict(os.environ), lambda _: None, line_bytes_max=65_536, end_s=1.0) as process,
        ):
            assert process.stdout is not None
            while len(data) <= limit and (chunk := await process.stdout.read(65_536)):
                data += chunk
    except (TimeoutError, OSError):
        return b""
    if match := _HEX.match(data):
        data = bytes.fromhex(match[1].decode())
    return data if data.startswith(PNG) else b""
