"""The developer's tools in a sandbox: toolchains read-only, an identity for git, and no credentials."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hermes.core.home import Home
from hermes.sandbox import bubblewrap, choose
from hermes.sandbox.bubblewrap import Bubblewrap
from hermes.sandbox.developer import hidden_settings, provide_identity, read_identity, toolchains, variables
from hermes.sandbox.mounts import Place, plan_mounts

GITCONFIG = """
[user]
    name = Ada "Countess" Lovelace
    email = ada@example.org
    signingkey = SECRETKEY
[credential]
    helper = store --file ~/secret
[url "https://token:SECRET@example.org/"]
    insteadOf = x
[http]
    extraHeader = "Authorization: SECRET"
[user "other"]
    email = other@example.org
"""
SECRETS = (
    ".cargo/credentials.toml", ".cargo/config.toml", ".npmrc", ".netrc", ".ssh/id_ed25519", ".config/gh/hosts.yml",
    ".config/pip/pip.conf", ".pyenv/versions/3.12.0/pip.conf", ".nvm/versions/node/v22.0.0/etc/npmrc",
    ".gitconfig", ".git-credentials", ".local/bin/deploy", ".local/share/uv/credentials/x", ".cargo/git/db/x/config",
    "go/pkg/mod/cache/vcs/0a/config", ".cargo/registry/index/i/.git/FETCH_HEAD", ".cache/pip/http-v2/x", ".npm/_cacache/index-v5/x", ".cache/uv/simple-v15/x",
)  # fmt: skip


PACKAGES = (".cargo/registry/src/i/serde/lib.rs", "go/pkg/mod/cache/download/x/@v/list", ".cache/uv/archive-v0/x/a.py")


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A developer's home, with a secret in every place that has any."""
    home = tmp_path / "user"
    for name in SECRETS:
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("token = SECRET\n")
    (home / ".gitconfig").write_text(GITCONFIG)
    for name in (".cargo/bin/cargo", ".pyenv/versions/3.12.0/bin/tool", ".nvm/versions/node/v22.0.0/bin/node"):
        program = home / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\necho works\n")
        program.chmod(0o755)
    for name in PACKAGES:
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text("a package\n")
    return home


def place_of(user: Path, tmp_path: Path) -> Place:
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    return Place(
        Home(tmp_path / "hermes"), work, tmp_path / "hermes/sandbox/s/home",
        ro=tuple(toolchains(user, [str(work)])), hidden=tuple(hidden_settings(user)), user_home=user,
    )  # fmt: skip


def test_identity_is_name_and_address_only(user: Path, tmp_path: Path) -> None:
    assert read_identity(user) == {"name": 'Ada "Countess" Lovelace', "email": "ada@example.org"}
    place = place_of(user, tmp_path)
    plan_mounts(place)
    provide_identity(place)
    written = (place.private / ".gitconfig").read_text()
    assert "SECRET" not in written and "other@" not in written
    assert written.splitlines()[0] == "[user]" and len(written.splitlines()) == 3


@pytest.mark.parametrize(
    "text",
    ["", "[user", "[user]\nname = a\\\n[x]\n", "\xff", "[user]\nname = \x1b]0;x\n", "[user]\nname\n", "x" * 200_000],
)
def test_unusual_git_configurations_are_harmless(tmp_path: Path, text: str) -> None:
    (tmp_path / ".gitconfig").write_text(text, "latin-1")
    assert all(value.isprintable() for value in read_identity(tmp_path).values())


def test_identity_follows_no_link_of_a_command(user: Path, tmp_path: Path) -> None:
    place = place_of(user, tmp_path)
    plan_mounts(place)
    victim = tmp_path / "victim"
    (place.private / ".gitconfig").symlink_to(victim)
    provide_identity(place)
    assert not victim.exists()


def test_toolchains_inside_writable_folders_are_left_alone(user: Path) -> None:
    assert toolchains(user, [str(user)]) == []
    assert toolchains(user, []) != []


def test_links_to_the_home_or_above_are_not_shown(user: Path, tmp_path: Path) -> None:
    for target in ("/", str(user), str(tmp_path)):
        (user / "go/bin").unlink(missing_ok=True)
        (user / "go/bin").symlink_to(target)
        assert Path(os.path.realpath(target)) not in toolchains(user, [])


def test_world_writable_folder_is_not_mounted(user: Path) -> None:
    (user / ".cargo/bin").chmod(0o777)
    assert user / ".cargo/bin" not in toolchains(user, [])


async def test_sandbox_shows_tools_and_no_credentials(user: Path, tmp_path: Path) -> None:
    if failure := bubblewrap.probe():
        pytest.skip(f"bubblewrap does not work here: {failure}")
    sandbox = Bubblewrap(place_of(user, tmp_path))
    script = f"""
{user}/.cargo/bin/cargo; {user}/.pyenv/versions/3.12.0/bin/tool; {user}/.nvm/versions/node/v22.0.0/bin/node
cat {" ".join(str(user / name) for name in (*SECRETS, *PACKAGES))}
grep -rs SECRET {user} /root/.pyenv/versions/*/pip.conf
touch {user}/.cargo/bin/new {user}/.pyenv/versions/x; rm -f {user}/.cargo/bin/cargo
git config --get user.email; git config --get-regexp '(http|credential|url)'
"""
    try:
        async with await sandbox.spawn(
            ["sh", "-c", script], env={"HOME": str(sandbox.place.private), "PATH": "/usr/bin:/bin"}
        ) as process:
            output = b"".join([chunk async for chunk in process.chunks()]).decode()
    finally:
        await sandbox.stop()
    assert (output.count("works"), output.count("a package")) == (3, len(PACKAGES))
    assert "SECRET" not in output
    assert "ada@example.org" in output
    assert (user / ".cargo/bin/cargo").exists() and not (user / ".cargo/bin/new").exists()


def test_go_takes_packages_from_the_shown_cache(user: Path) -> None:
    chains = toolchains(user, [])
    cache = f"file://{os.path.realpath(user)}/go/pkg/mod/cache/download,"
    assert variables(user, chains)["GOPROXY"].startswith(cache)
    assert "GOPROXY" not in variables(user, toolchains(user, [str(user / "go")]))


def test_prompt_names_only_commands_that_the_sandbox_shows(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hermes.settings import config

    hidden = tmp_path / "elsewhere/go"
    hidden.parent.mkdir()
    hidden.write_text("#!/bin/sh\n")
    hidden.chmod(0o755)
    monkeypatch.setenv("HOME", str(user))
    monkeypatch.setenv("PATH", f"{user}/.cargo/bin:{hidden.parent}:/usr/bin:/bin")
    home, names = Home(tmp_path / "hermes"), ("sh", "cargo", "go")
    settings = config.load(home, {}, {})
    in_sandbox = choose.Choice("bubblewrap", isolated=True)
    assert choose.commands_in(settings, in_sandbox, home, tmp_path, names) == ["sh", "cargo", "go"]
    work = tmp_path / "work"
    work.mkdir()
    assert choose.commands_in(settings, in_sandbox, home, work, names) == ["sh", "cargo"]
    without = config.load(home, {"terminal.toolchains": False}, {})
    assert choose.commands_in(without, in_sandbox, home, work, names) == ["sh"]
    assert choose.commands_in(settings, choose.Choice("local", isolated=False), home, work, names) == list(names)
    assert choose.commands_in(settings, choose.Choice("docker", isolated=True), home, work, names) == []
