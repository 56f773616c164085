"""The one printer of lists: lines of equal columns, or one JSON document."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hermes.cli.output import note, print_redacted
from hermes.core.formatting import columns

if TYPE_CHECKING:
    from hermes.core.home import Home


def print_table(
    args: argparse.Namespace,
    home: Home,
    document: object,
    rows: Sequence[Sequence[str]],
    *,
    flexible: int,
    empty: str = "",
) -> None:
    """Print rows, or the document with `--json`; secrets are masked. The column `flexible` gives way on a narrow
    terminal; `empty` is noted when there are no rows."""
    print_redacted(args, home, document, columns(rows, flexible))
    if empty and not rows:
        note(empty)
