"""Hosts of the web that somebody has named in words, or in the settings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hermes.guards.url_text import UrlRefused, parse

# In an address, or as a word with dots of its own that is no mail address.
_NAMED = re.compile(r"://(?:\[([0-9a-fA-F:.]{2,45})\]|([\w.-]+))|(?<![\w@./-])((?:[\w-]+\.)+[\w-]{2,})(?![\w-])")
# Ends of host names that are more often ends of file names: such a name counts in an address only.
_OF_FILES = frozenset(
    {"app", "cc", "gz", "in", "md", "ml", "mov", "pl", "pm", "ps", "py", "rs", "sh", "so", "tf", "zip"}
)


def hosts_in(text: str) -> frozenset[str]:
    """The hosts that a text names, in the form in which the URL guard knows them."""
    found: set[str] = set()
    for match in _NAMED.finditer(text):
        bare = match[3]
        if bare is not None and bare.rpartition(".")[2].lower() in _OF_FILES:
            continue
        if host := _host(f"[{match[1]}]" if match[1] else match[2] or bare):
            found.add(host)
    return frozenset(found)


def _host(text: str) -> str:
    try:
        return parse(f"http://{text.strip('.-_')}").host
    except UrlRefused:
        return ""


def names(host: str, named: Iterable[str]) -> bool:
    """Whether a host is one of those; `www.` before either makes no difference, any other subdomain does."""
    return host.removeprefix("www.") in {other.removeprefix("www.") for other in named}


def domain(entry: object) -> str:
    """A domain of the settings as the end of the hosts below it; one that is no host name stands for none."""
    try:
        return "." + parse(f"http://{str(entry).strip().removeprefix('*').strip('.')}").host
    except UrlRefused:
        return "\0"
