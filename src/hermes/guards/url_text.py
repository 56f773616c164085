"""Strict URL parsing, secrets in URLs, and hosts in texts. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import parse_qsl, unquote_plus, urlsplit

import idna

from hermes.guards.secrets import Secrets

URL_CHARS_MAX = 8192
ESCAPES_DEEP_MAX = 5
DEFAULT_PORTS = {"http": 80, "https": 443}
# Where something else than HTTP listens, and a request could be taken for its commands.
_OTHER_PORTS = """
    0 1 7 9 11 13 15 17 19 20 21 22 23 25 37 42 43 53 69 77 79 87 88 95 101 102 103 104 109 110 111 113 115 117 119 123
    135 137 138 139 143 161 162 179 389 427 445 465 512 513 514 515 526 530 531 532 540 548 554 556 563 587 601 636 873
    989 990 993 995 1080 1433 1521 1719 1720 1723 1883 2049 3306 3389 3659 4045 4190 4222 5060 5061 5432 5672 5900 6000
    6379 6566 6665 6666 6667 6668 6669 6679 6697 9042 9092 10080 11211 27017
"""
_PORTS_REFUSED = frozenset(map(int, _OTHER_PORTS.split()))
_ODD = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@%]+))(?::([0-9]{0,5}))?")
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_TOKEN = re.compile(r"[A-Za-z0-9+/_-]{10,}")
_CREDENTIAL = re.compile(
    r"(?:^|[_.-])(?:(?:api|access|account|private|secret|auth|client|subscription)[_.-]?key|(?<!page_)(?<!next_)token|"
    r"secret|password|passwd|passphrase|pwd|credentials?|authorization|auth|jwt|bearer|session[_.-]?id)\Z"
)
_KEY_VALUE = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_.-]{16,}")


class FetchFailed(Exception):
    """Nothing is fetched. `rule` names the reason; the message holds nothing of the URL."""

    code = "fetch_failed"

    def __init__(self, rule: str, message: str = "") -> None:
        super().__init__(message or f"The URL is refused by the rule '{rule}'.")
        self.rule = rule


class UrlRefused(FetchFailed):
    def __init__(self, rule: str, message: str = "") -> None:
        super().__init__(rule, message)
        self.code = rule if rule == "url_has_secret" else "url_refused"


@dataclass(frozen=True, slots=True)
class Target:
    scheme: str
    host: str
    port: int
    path: str

    @property
    def is_address(self) -> bool:
        return ":" in self.host or _NUMBER.fullmatch(self.host.rpartition(".")[2]) is not None

    @property
    def origin(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + ("" if self.port == DEFAULT_PORTS[self.scheme] else f":{self.port}")

    @property
    def url(self) -> str:
        return self.origin + self.path


def parse(url: str) -> Target:
    url = url.strip(" \t\r\n")
    try:
        parts = urlsplit("" if len(url) > URL_CHARS_MAX or _ODD.search(url) else url)
    except ValueError:
        raise UrlRefused("malformed") from None
    if parts.scheme not in DEFAULT_PORTS:
        raise UrlRefused("scheme" if parts.scheme else "malformed")
    if "@" in parts.netloc:
        raise UrlRefused("user_info")
    authority = _AUTHORITY.fullmatch(parts.netloc)
    if authority is None:
        raise UrlRefused("host")
    port = int(authority[3]) if authority[3] else DEFAULT_PORTS[parts.scheme]
    if port in _PORTS_REFUSED or port > 65_535:
        raise UrlRefused("port")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, _host(authority[1], authority[2]), port, path)


def _host(bracketed: str | None, name: str) -> str:
    """The host in ASCII; an IP address only in its usual notation."""
    try:
        if bracketed is not None:
            return str(IPv6Address(bracketed))
        name = (name if name.isascii() else idna.encode(name, uts46=True).decode()).lower().removesuffix(".")
        if _NUMBER.fullmatch(name.rpartition(".")[2]):
            return str(IPv4Address(name))
    except idna.IDNAError:
        raise UrlRefused("host") from None
    except ValueError:
        raise UrlRefused("numeric_host") from None
    if not _NAME.fullmatch(name):
        raise UrlRefused("host")
    return name


def has_secret(url: str, secrets: Secrets) -> bool:
    """Whether a URL holds a known secret value in any encoding, or a parameter named like a credential."""
    values = [value.lower().encode("utf-8", "replace") for value in secrets.values]
    if any(value in text.lower() for text in _readings(url) for value in values):
        return True
    for name, value in parse_qsl(urlsplit(url).query.replace(";", "&"), keep_blank_values=True):
        parameter = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
        if _CREDENTIAL.search(parameter) or (parameter == "key" and _KEY_VALUE.fullmatch(value)):
            return True
    return False


def _readings(url: str) -> Iterator[bytes]:
    """A URL and the tokens in it decoded, with one more level of escapes undone each time."""
    for _ in range(ESCAPES_DEEP_MAX):
        yield url.encode("utf-8", "replace")
        for token in _TOKEN.findall(url):
            with suppress(ValueError):
                yield bytes.fromhex(token)
            # Where an encoded text begins is not known; one of four beginnings is right.
            for start in range(4):
                text = token[start : len(token) - ((len(token) - start) % 4 == 1)].replace("-", "+").replace("_", "/")
                yield base64.b64decode(text + "=" * (-len(text) % 4))
        before, url = url, unquote_plus(url)
        if url == before:
            return


# ---- hosts that somebody has named in words, or in the settings

# In an address, or as a word with dots of its own that is no mail address.
_NAMED = re.compile(r"://(?:\[([0-9a-fA-F:.]{2,45})\]|([\w.-]+))|(?<![\w@./-])((?:[\w-]+\.)+[\w-]{2,})(?![\w-])")
# Ends of host names that are more often ends of file names: such a name counts in an address only.
_OF_FILES = frozenset(
    {"app", "cc", "gz", "in", "md", "ml", "mov", "pl", "pm", "ps", "py", "rs", "sh", "so", "tf", "zip"}
)


def hosts_in(text: str) -> frozenset[str]:
    hosts: set[str] = set()
    for match in _NAMED.finditer(text):
        bare = match[3]
        if bare is not None and bare.rpartition(".")[2].lower() in _OF_FILES:
            continue
        host = f"[{match[1]}]" if match[1] else match[2] or bare
        with suppress(UrlRefused):
            hosts.add(parse(f"http://{host.strip('.-_')}").host)
    return frozenset(hosts)


def is_named(host: str, named: Iterable[str]) -> bool:
    """Whether a host is among those; a prefix `www.` is ignored, other subdomains are not."""
    return host.removeprefix("www.") in {other.removeprefix("www.") for other in named}


def domain_suffix(entry: object) -> str:
    """A configured domain as a suffix of its hosts; one that matches nothing if it is no host name."""
    try:
        return "." + parse(f"http://{str(entry).strip().removeprefix('*').strip('.')}").host
    except UrlRefused:
        return "\0"
