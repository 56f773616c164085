"""Packets that are dropped on their way to a port and back: nftables, in the network namespace of `scripts/in-own-network`."""

from __future__ import annotations

import os
import subprocess

AVAILABLE = bool(os.environ.get("HERMES_OWN_NETWORK"))
ALL = 100
_TABLE = f"inet faults_{os.getpid()}"
_percents: dict[int, int] = {}


def drop(port: int, percent: int) -> None:
    """From now on this part of the packets of a port is lost; 0 ends it. It blocks: one change follows the other."""
    if percent:
        _percents[port] = percent
    else:
        _percents.pop(port, None)
    rules = [
        f"tcp {side} {port} {'' if percent == ALL else f'numgen random mod 100 < {percent} '}drop"
        for port, percent in _percents.items()
        for side in ("dport", "sport")
    ]
    chain = "\n".join(["chain input { type filter hook input priority 0;", *rules, "}"])
    # In one transaction: the table is made, emptied and filled.
    script = f"table {_TABLE} {{}}\ndelete table {_TABLE}\ntable {_TABLE} {{\n{chain}\n}}\n"
    subprocess.run(["nft", "-f", "-"], input=script.encode(), check=True)
