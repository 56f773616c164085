"""Checks before the server starts: keys, exposure, sandbox and address."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import re
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

from hermes.core import home as homes
from hermes.core.errors import ConfigError, HermesError
from hermes.core.home import Home
from hermes.core.json_types import JsonMapping
from hermes.server.keys import CEILINGS, COUNTS, ENTRY_FIELDS, SCOPES
from hermes.server.status import read_runtime_status, server_url
from hermes.settings import config

log = logging.getLogger(__name__)
BACKLOG = 1024
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_KEY_CHARS_MIN = 16
_PLACEHOLDERS = ("changeme", "placeholder", "yourapikey", "yoursecretkey", "replaceme", "insertkeyhere", "apikeyhere")
# Common keys, whose hashes can be looked up.
_PHRASES = """
    change me, changeme, change me now, change this, placeholder, your api key, your api key here, your key,
    your key here, your secret key, your secret key here, your token, your token here, replace me,
    replace with your key, insert key here, insert your key here, api key here, api key, my api key, my key,
    my secret, my secret key, secret, secret key, super secret, password, passwd, admin, root, test, test key,
    testing, test123, example, example key, sample, demo, dummy, default, none, null, todo, key, token, local,
    localhost, dev, development, hermes, hermes agent, letmein, welcome, fake key, no key, not needed, foo, bar,
    foobar, hello, empty
"""
_OWNER = re.compile(r"[a-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class Unavailable(HermesError):
    """Something that the server needs is unavailable: its address, its store, its home."""

    exit_code = 69


# --- what a server does not start with --------------------------------------------------------------------------------


def check_settings(settings: config.Settings) -> None:
    """Refuse settings with nothing to serve, or with unusable keys."""
    enabled = settings.origin("api_server.enabled")
    if enabled.source != "default" and enabled.value is False:
        in_environment = enabled.source == "environment"
        remedy = f"unset {enabled.where}" if in_environment else "hermes config unset api_server.enabled"
        raise ConfigError("api_server.enabled is false: there is nothing to run.", where=enabled.where, hint=remedy)
    settings.require_valid(*config.REFUSED_WHEN_BAD)
    names: set[str] = set()
    own = settings.api_server.key
    holders = {_digest(own): "api_server.key"} if own else {}
    for number, entry in enumerate(settings.api_server.keys, start=1):
        fault = _fault_of(entry, names, settings)
        if not fault:
            digest = entry.get("key_sha256") or _digest(entry.get("key") or settings.variable(entry["key_env"]) or "")
            holder = holders.setdefault(digest.lower(), _place(entry))
            fault = f"{entry['name']!r} has the same key as {holder}" if holder != _place(entry) else ""
        if fault:
            raise ConfigError(f"{fault}.", where=f"api_server.keys, entry {number}", hint="hermes config edit")
        names.add(entry["name"])


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _fault_of(entry: JsonMapping, names: set[str], settings: config.Settings) -> str:
    name, scopes = entry.get("name"), entry.get("scopes", [])
    if not isinstance(name, str) or not _OWNER.fullmatch(name) or name == "default":
        return "the name must be 1 to 64 small letters, digits, '_' and '-', and not 'default'"
    if name in names:
        return f"the name {name!r} is used twice"
    if not isinstance(scopes, list) or not scopes:
        return f"{name!r} has no scopes; there are {', '.join(sorted(SCOPES))}"
    if unknown := [str(scope) for scope in scopes if scope not in SCOPES]:
        return f"{name!r} has the unknown scope {unknown[0]!r}; there are {', '.join(sorted(SCOPES))}"
    given = [field for field in ("key", "key_env", "key_sha256") if field in entry]
    if len(given) != 1 or not isinstance(entry[given[0]], str) or not entry[given[0]]:
        return f"{name!r} must have one of key, key_env and key_sha256"
    if given[0] == "key_env" and not settings.variable(entry["key_env"]):
        return f"{name!r} takes its key from the variable {entry['key_env']}, which is not set"
    if given[0] == "key_sha256" and not _SHA256.fullmatch(entry["key_sha256"]):
        return f"the key_sha256 of {name!r} must be 64 hexadecimal digits"
    return _fault_of_bounds(name, entry)


def _fault_of_bounds(name: str, entry: JsonMapping) -> str:
    """A limit that is not understood would be none at all."""
    if unknown := [str(field) for field in entry if field not in ENTRY_FIELDS]:
        return f"{name!r} has the unknown field {unknown[0]!r}; there are {', '.join(ENTRY_FIELDS)}"
    for field in COUNTS:
        value = entry.get(field, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            return f"{field} of {name!r} must be a whole number, 0 for no limit"
    for field in CEILINGS:
        value = entry.get(field, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            return f"{field} of {name!r} must be a list of names; leave it out to allow all"
    return ""


def keys_of(settings: config.Settings) -> dict[str, str]:
    """Every key by the setting that holds it; empty where only its hash is known."""
    own = settings.api_server.key
    keys = {"api_server.key": str(own)} if own else {}
    for entry in settings.api_server.keys:
        key = entry.get("key") or settings.variable(str(entry.get("key_env") or "")) or ""
        keys[_place(entry)] = key
    return keys


def check_exposure(settings: config.Settings, host: str, *, loopback: bool, allow_local_exec: bool) -> None:
    """Without keys a server must be reachable from this machine only."""
    keys = keys_of(settings)
    if not loopback and not keys:
        message = f"api_server.key is not set, and {host} can be reached from other machines."
        raise ConfigError(message, where="api_server.key", hint="hermes gateway key, or api_server.host 127.0.0.1")
    if not keys and "*" in settings.api_server.cors_origins:
        message = "api_server.cors_origins allows every origin ('*'), and there is no key."
        hint = "hermes gateway key, or a list of the origins that may call"
        raise ConfigError(message, where="api_server.cors_origins", hint=hint)
    faults = {where: key_weakness(key) for where, key in keys.items() if key}
    faults |= {where: _weakness_of_hash(digest) for where, digest in _hashes_of(settings).items()}
    for where, fault in faults.items():
        if not fault:
            continue
        remedy = "hermes gateway key --new" if where == "api_server.key" else "hermes config edit"
        if not loopback:
            raise ConfigError(f"{where} {fault}, and {host} can be reached from other machines.", hint=remedy)
        log.warning("%s %s. Try: %s", where, fault, remedy)
    allowed = loopback or allow_local_exec or settings.terminal.allow_exposed_local
    if sandbox_backend(settings, trying=not allowed) == "local" and not allowed:
        raise ConfigError(
            f"Commands would run without a sandbox, and {host} can be reached from other machines.",
            where="terminal.backend",
            hint="--allow-local-exec, or hermes config set terminal.allow_exposed_local true",
        )


def check_profiles(served: Mapping[str, config.Settings]) -> None:
    """Either all profiles of a server have keys, or none: one without would be a way into the others."""
    with_key = [name for name, settings in served.items() if keys_of(settings)]
    without = [name for name in served if name not in with_key]
    if with_key and without:
        message = f"The profile {without[0]!r} has no key, and the profile {with_key[0]!r} has one."
        raise ConfigError(message, where="api_server.key", hint=f"hermes -p {without[0]} gateway key")


def _hashes_of(settings: config.Settings) -> dict[str, str]:
    """The keys of which only the hash is known, by setting."""
    entries = [entry for entry in settings.api_server.keys if entry.get("key_sha256")]
    return {_place(entry): str(entry["key_sha256"]).lower() for entry in entries}


def _place(entry: JsonMapping) -> str:
    return f"the key {entry['name']!r} of api_server.keys"


def _weakness_of_hash(digest: str) -> str:
    """All that can be checked of a hash: that it is no common key's, and not made up."""
    if (digest + digest).find(digest, 1) < len(digest):
        return "is no hash of a key"
    return "is the hash of a placeholder" if digest in _placeholder_hashes() else ""


@functools.cache
def _placeholder_hashes() -> frozenset[str]:
    phrases = [
        separator.join(phrase.split()) for phrase in _PHRASES.split(",") for separator in ("", "-", "_", " ", ".")
    ]
    repeated = [sign * count for sign in "x0123456789a*" for count in range(1, 65)]
    counted = ["123456789012345678901234567890"[:count] for count in range(1, 31)]
    plain = {"", *phrases, *repeated, *counted, "0123456789", "0123456789abcdef", "abcdef", "qwerty"}
    keys = {form for text in plain for form in (text, text.upper(), text.title(), text.capitalize(), f"<{text}>")}
    return frozenset(
        hashlib.sha256((prefix + key).encode()).hexdigest() for key in keys for prefix in ("", "sk-", "sk_")
    )


def key_weakness(key: str) -> str:
    if len(key) < _KEY_CHARS_MIN:
        return f"has fewer than {_KEY_CHARS_MIN} characters"
    letters = re.sub(r"[^a-z0-9]", "", key.lower().removeprefix("sk-"))
    if len(set(letters)) <= 1 or any(word in letters for word in _PLACEHOLDERS):
        return "is a placeholder"
    return ""


def sandbox_backend(settings: config.Settings, *, trying: bool = False) -> str:
    """The sandbox for commands. A configured one that does not work is an error, never a silent fallback.

    A cached result of the last check is used unless the outcome matters.
    """
    from hermes.sandbox import probe_cache
    from hermes.sandbox.choose import choose_backend

    return (None if trying else probe_cache.known(settings)) or choose_backend(settings).name


# --- the address ------------------------------------------------------------------------------------------------------

Address = tuple[socket.AddressFamily, tuple[Any, ...]]


def resolved(host: str, port: int) -> list[Address]:
    """The addresses of a host name; an empty one means all of this machine's."""
    try:
        entries = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise Unavailable(
            f"The address {host!r} is not known here ({error}).", where="api_server.host", hint="127.0.0.1"
        ) from None
    return list(dict.fromkeys((family, where) for family, _, _, _, where in entries))


def is_loopback(addresses: list[Address]) -> bool:
    """Whether all are reachable from this machine only."""
    return all(ip_address(str(where[0]).partition("%")[0]).is_loopback for _, where in addresses)


def bind(
    home: Home, host: str, addresses: list[Address], *, shared: bool = False, listen: bool = True
) -> list[socket.socket]:
    """Listening sockets on these addresses, all on one port. Nothing stays bound when one is in use.

    With `shared` other sockets of this user may share the port; without `listen` it is only reserved.
    """
    port, bound, lacking = addresses[0][1][1], [], None
    with contextlib.ExitStack() as stack:
        for family, where in addresses:
            try:
                sock = stack.enter_context(_bound(family, (where[0], port, *where[2:]), shared=shared, listen=listen))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise _not_bound(home, host, port, error) from None
                lacking = error  # localhost may resolve to addresses that this machine lacks
                continue
            port = sock.getsockname()[1]
            bound.append(sock)
        if lacking is not None and not bound:
            raise _not_bound(home, host, port, lacking)
        stack.pop_all()
    return bound


def _bound(family: socket.AddressFamily, where: tuple[Any, ...], *, shared: bool, listen: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(where)
        if listen:
            sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _not_bound(home: Home, host: str, port: int, error: OSError) -> Unavailable:
    message = f"{server_url({'host': host or '*', 'port': port})} cannot be bound: {error.strerror}."
    for profile in homes.list_profiles(home):
        other = homes.Home(home.root) if profile == homes.DEFAULT_PROFILE else homes.open_profile(home.root, profile)
        state = read_runtime_status(other)
        if state is not None and state.get("port") == port and other.path != home.path:
            message += f" The server of the profile {profile!r} (pid {state['pid']}) is there."
            return Unavailable(message, hint=f"hermes -p {profile} gateway stop, or --port 0")
    return Unavailable(message, hint="another --port; 0 takes a free one")
