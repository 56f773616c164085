"""What of the developer's home a sandbox shows: toolchains and caches of packages read-only, and the identity for git.
No credentials.

Folders are named one by one: nothing of the home is shown because it lies beside something else.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hermes.guards.path_lists import below
from hermes.sandbox.mounts import Place, resolve_root

# Below the home. Programs, libraries and unpacked packages; settings of these tools may hold tokens and are not here.
TOOLCHAINS = (
    *(".pyenv/bin", ".pyenv/libexec", ".pyenv/shims", ".pyenv/version", ".pyenv/versions"),
    *(".cargo/bin", ".rustup/settings.toml", ".rustup/toolchains", ".nvm/versions", "go/bin"),
    *(".local/bin/uv", ".local/bin/uvx", ".local/share/uv/python"),
)
# Packages as they were published. Not those of pip and npm: they do not work with a cache that cannot be written to, and
# keep the answers of private indexes there. Not `.cargo/git`: its repositories may name addresses with passwords.
CACHES = (".cargo/registry/cache", ".cargo/registry/index", ".cargo/registry/src", ".cache/uv/archive-v0", "go/pkg/mod")
_GO_PACKAGES = "go/pkg/mod/cache/download"
# Repositories that Go and Cargo have cloned, where the address may hold a password.
_NOT_IN_CACHES = (
    "go/pkg/mod/cache/vcs",
    *(f".cargo/registry/index/*/.git/{name}" for name in ("FETCH_HEAD", "logs")),
)
# Within these: settings of package managers for a whole installation, which may name an index with its password.
_WITHIN = ("pip.conf", "etc/pip.conf", "etc/npmrc", "lib/node_modules/npm/npmrc", ".netrc", ".npmrc", ".pypirc")
_INSTALLATIONS = (".pyenv/versions/*", ".nvm/versions/*/*", ".local/share/uv/python/*", ".rustup/toolchains/*")
# The variable that says where a tool's installations are, which would otherwise be looked for in the sandbox's own HOME.
_VARIABLES = {"RUSTUP_HOME": ".rustup", "PYENV_ROOT": ".pyenv"}
_GIT_CONFIGS = (".gitconfig", ".config/git/config")
_IDENTITY = ("name", "email")
_CONFIG_BYTES_MAX = 65_536
_VALUE_CHARS_MAX = 200


def toolchains(user_home: Path, writable: Sequence[str]) -> list[Path]:
    """The toolchains and caches that exist, by their real paths. None inside folders that commands write to: there they are as
    they are, and what looks like one may be made by a command."""
    home = os.path.realpath(user_home)
    paths: list[Path] = []
    for name in (*TOOLCHAINS, *CACHES):
        path = os.path.join(home, name)
        real = resolve_root(path, writable) if os.path.exists(path) else None
        # A link may lead to another disk, and never to a folder that holds the home or more.
        if real is None or below(home, real) or any(below(real, root) for root in writable):
            continue
        if _belongs_to_user(real):
            paths.append(Path(real))
    return paths


def _belongs_to_user(path: str) -> bool:
    """Whether only the user or root can put programs there."""
    with suppress(OSError):
        status = os.stat(path)
        return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o002
    return False


def hidden_settings(user_home: Path) -> Iterator[str]:
    """Files within toolchains that commands do not see, by their real paths."""
    home = os.path.realpath(user_home)
    patterns = (*_NOT_IN_CACHES, *(f"{folder}/{name}" for folder in _INSTALLATIONS for name in _WITHIN))
    for pattern in patterns:
        for path in glob.iglob(os.path.join(glob.escape(home), pattern)):
            yield path
            yield os.path.realpath(path)


def variables(user_home: Path, shown: Sequence[Path]) -> dict[str, str]:
    home = os.path.realpath(user_home)
    variables_found = {
        name: f"{home}/{folder}"
        for name, folder in _VARIABLES.items()
        if any(below(str(path), f"{home}/{folder}") for path in shown)
    }
    if any(below(f"{home}/{_GO_PACKAGES}", str(path)) for path in shown):
        # Go takes packages from there as from a server, and keeps its own cache in the sandbox's HOME.
        variables_found["GOPROXY"] = f"file://{home}/{_GO_PACKAGES},https://proxy.golang.org,direct"
    return variables_found


# --- identity --------------------------------------------------------------------------------------------------------


def provide_identity(place: Place) -> None:
    """Write name and address of the user, and nothing else, where git looks for them in the sandbox. A file that is
    there, or a link, stays: commands may have made it."""
    identity = read_identity(place.user_home)
    if not identity:
        return
    lines = ["[user]", *(f'\t{name} = "{_quoted(value)}"' for name, value in identity.items())]
    with suppress(OSError):
        folder = os.open(place.private, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(".gitconfig", flags, 0o600, dir_fd=folder)
            try:
                os.write(file, ("\n".join(lines) + "\n").encode())
            finally:
                os.close(file)
        finally:
            os.close(folder)


def read_identity(user_home: Path) -> Mapping[str, str]:
    import configparser

    identity: dict[str, str] = {}
    for name in reversed(_GIT_CONFIGS):
        with suppress(OSError, UnicodeDecodeError, configparser.Error):
            with open(os.path.join(user_home, name), "rb") as file:
                text = file.read(_CONFIG_BYTES_MAX).decode()
            # Of other sections nothing is read, so whatever they hold cannot be mistaken for a name.
            parser = configparser.RawConfigParser(
                strict=False, allow_no_value=True, comment_prefixes=("#", ";"), inline_comment_prefixes=None
            )
            parser.read_string("\n".join(_user_section(text)))
            for key in _IDENTITY:
                if value := (parser.get("user", key, fallback="") or "").strip().strip('"').strip():
                    identity[key] = value
    return {name: value for name, value in identity.items() if value.isprintable() and len(value) <= _VALUE_CHARS_MAX}


def _user_section(text: str) -> Iterator[str]:
    inside = False
    yield "[user]"
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("["):
            inside = stripped.lower().startswith("[user]")
        elif inside and stripped.partition("=")[0].strip().lower() in _IDENTITY:
            yield stripped


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')
