"""Which backend the settings mean, where commands work, and what is in their environment."""

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import pytest

from hermes.core.errors import ConfigError
from hermes.core.home import Home
from hermes.core.ids import folder_name
from hermes.sandbox import bubblewrap, choose, docker
from hermes.sandbox.base import SandboxError
from hermes.sandbox.choose import Choice, Sandboxes, child_env, choose_backend, workspace_of
from hermes.settings import config
from hermes.settings.config import Settings

from .conftest import needs_bubblewrap, sh


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "hermes")


def settings(home: Home, environ: dict[str, str] | None = None, **terminal: Any) -> Settings:
    flags = {f"terminal.{name}": value for name, value in terminal.items()}
    return config.load(home, flags=flags, environ=environ or {})


@pytest.mark.parametrize(
    ("wanted", "bubblewrap_fails", "docker_fails", "expected"),
    [
        ("auto", "", "no", Choice("bubblewrap", isolated=True)),
        ("auto", "no namespaces", "", Choice("none", isolated=False, failure="no namespaces")),
        ("local", "", "", Choice("local", isolated=False)),
        ("bubblewrap", "", "no", Choice("bubblewrap", isolated=True)),
        ("bubblewrap", "no namespaces", "", "terminal.backend: The sandbox 'bubblewrap' does not work here: no names"),
        ("docker", "no", "", Choice("docker", isolated=True)),
        ("docker", "", "no daemon", "terminal.backend: The sandbox 'docker' does not work here: no daemon"),
    ],
)
def test_backend_choice(
    home: Home, monkeypatch: pytest.MonkeyPatch, wanted: str, bubblewrap_fails: str, docker_fails: str, expected: Any
) -> None:
    monkeypatch.setattr(bubblewrap, "probe", lambda: bubblewrap_fails)
    monkeypatch.setattr(docker, "probe", lambda image: docker_fails)
    if isinstance(expected, Choice):
        assert choose_backend(settings(home, backend=wanted)) == expected
        return
    with pytest.raises(ConfigError) as caught:
        choose_backend(settings(home, backend=wanted))
    assert str(caught.value).startswith(expected)
    assert caught.value.exit_code == 78


def test_server_workspace(home: Home) -> None:
    plain = settings(home)
    own = workspace_of(home, plain, "default", None)
    assert own == home.workspace
    assert (own / "scopes").is_dir()
    scopes = {workspace_of(home, plain, *who) for who in [("a", None), ("b", None), ("default", "k"), ("a", "k")]}
    assert len(scopes) == 4
    assert all(path.parent == own / "scopes" and path.is_dir() and len(path.name) == 32 for path in scopes)
    assert workspace_of(home, plain, "a", "k") in scopes
    assert all(path.stat().st_mode & 0o077 == 0 for path in (own, *scopes))


def test_cli_workspace(home: Home, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert workspace_of(home, settings(home), "default", None, here=tmp_path / "link") == tmp_path
    assert workspace_of(home, settings(home, cwd="/usr"), "default", None, here=tmp_path) == Path("/usr")
    assert not home.path.exists()


def test_requested_workspace_must_be_allowed(home: Home, tmp_path: Path) -> None:
    allowed = tmp_path / "projects"
    (allowed / "one").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (allowed / "out").symlink_to(tmp_path / "outside")
    named = settings(home, workspaces=[str(allowed)])
    for good in (allowed, allowed / "one"):
        assert workspace_of(home, named, "default", None, str(good)) == good
    refused = (tmp_path, allowed / "out", allowed / "../outside", allowed / "none", "one", f"{allowed}x")
    for bad in refused:
        with pytest.raises(SandboxError):
            workspace_of(home, named, "default", None, str(bad))
    with pytest.raises(SandboxError):
        workspace_of(home, settings(home), "default", None, str(allowed))


def test_folder_names_are_valid_and_unique() -> None:
    ids = ["20260101_120000_abc", "api-1", "a:b", "a_b", "a b", ".", "..", ".x", "x" * 250, "ä", "a@b.c", "~a", "a\nb"]
    names = [folder_name(session_id) for session_id in ids]
    assert len(set(names)) == len(ids)
    assert all(Path("/x", name).parent == Path("/x") and name not in (".", "..") and len(name) < 250 for name in names)
    assert names[:2] == ids[:2]
    assert folder_name("a@b.c") == "a@b.c"


def test_sandbox_environment(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {
        "PATH": "/p", "HOME": "/h", "USER": "u", "SHELL": "/bin/fish", "LANG": "de", "LC_ALL": "C", "TERM": "x", "TZ": "UTC",
        "TMPDIR": "/t", "OPENAI_API_KEY": "planted", "MY_KEY": "planted", "HERMES_HOME": "/x", "LD_PRELOAD": "/x", "FOO": "1",
        "API_SERVER_KEY": "planted", "SSH_AUTH_SOCK": "/x", "GITHUB_TOKEN": "wanted",
    }  # fmt: skip
    through = ["FOO", "GITHUB_TOKEN", "OPENAI_API_KEY", "MY_KEY", "HERMES_HOME", "API_SERVER_KEY", "MISSING"]
    home.path.mkdir()
    home.config_file.write_text("providers: {mine: {base_url: 'http://x', key_env: MY_KEY}}\n")
    config = settings(home, environ, env_passthrough=through)
    private = Path("/private")
    local = child_env(config, "local", private, environ)
    shell = local.pop("SHELL")
    assert shell.endswith("sh") and os.access(shell, os.X_OK)
    names = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TERM", "TZ", "TMPDIR", "FOO", "GITHUB_TOKEN")
    assert local == {name: environ[name] for name in names}
    inside = child_env(config, "bubblewrap", private, environ)
    assert inside == {**local, "SHELL": shell, "HOME": "/private", "TMPDIR": "/tmp"}
    image = child_env(config, "docker", private, environ)
    assert image.keys() == inside.keys() - {"PATH"}
    assert set(child_env(settings(home), "local", private, {})) == {"PATH", "HOME", "LANG", "TERM", "SHELL"}


async def test_sandbox_of_session(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_bubblewrap()
    sandboxes = Sandboxes(home)
    config = settings(home, container_memory=1000, network=False)
    assert (await sandboxes.start(config)).name == "bubblewrap"
    workspace = workspace_of(home, config, "default", None)
    sandbox = await sandboxes.of(config, "s1", workspace)
    assert await sandboxes.of(config, "s1", workspace) is sandbox
    assert await sandboxes.of(config, "s1", workspace, granted=[workspace / ".git"]) is not sandbox
    other = await sandboxes.of(config, "s2", workspace)
    assert (await sh(sandbox, "echo one > ~/x; ulimit -v; echo $HOME")).output == f"1024000\n{home.sandbox}/s1/home\n"
    assert (await sh(other, "cat ~/x")).code == 1
    assert (await sh(await sandboxes.of(config, "s1", workspace), "cat ~/x")).output == "one\n"
    process = await other.spawn(["sleep", "1000"])
    del other
    gc.collect()
    await sandboxes.close()  # knows whatever still runs
    assert await process.wait() == 137
    process.close()


async def test_session_keeps_its_container(home: Home, fake_docker: Path) -> None:
    sandboxes = Sandboxes(home)
    config = settings(home, backend="docker")
    assert await sandboxes.start(config) == Choice("docker", isolated=True)
    workspace = workspace_of(home, config, "default", None)
    for _ in range(2):
        assert (await sh(await sandboxes.of(config, "s1", workspace), "echo x")).output == "x\n"
        gc.collect()
    assert len(list(fake_docker.glob("hermes-*.json"))) == 1
    await sandboxes.close()
    assert not list(fake_docker.glob("hermes-*.json"))


async def test_probe_runs_once_and_off_loop(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[bool] = []

    def looked(settings: Settings) -> Choice:
        try:
            asyncio.get_running_loop()
            observed.append(True)
        except RuntimeError:
            observed.append(False)
        return Choice("local", isolated=False)

    monkeypatch.setattr(choose, "choose_backend", looked)
    await Sandboxes(home).start(settings(home))
    await Sandboxes(home).of(settings(home), "s1", home.path)
    assert observed[:2] == [False, False]  # then the answer is known
    assert bubblewrap.probe() is bubblewrap.probe()
