"""Which mounts come of a place: pure tables over real folders."""

from dataclasses import replace
from pathlib import Path

import pytest

from hermes.sandbox.base import SandboxError
from hermes.sandbox.mounts import Place, plan_mounts, resolve_root


def mount_modes(place: Place, **changes: object) -> dict[str, str]:
    base = place.home.path.parent
    mounts = plan_mounts(replace(place, **changes))  # type: ignore[arg-type]
    assert [mount.path for mount in mounts] == sorted(mount.path for mount in mounts)
    return {mount.path.removeprefix(f"{base}/"): mount.mode for mount in mounts}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of a user, with something for every rule."""
    folder = tmp_path / "project"
    for name in (".git/hooks", ".git/modules/sub/hooks", "inner/.git/hooks"):
        (folder / name).mkdir(parents=True)
    for name in (".git/config", ".git/modules/sub/config", ".env", ".env.local", ".env.example", "key.p12", "code.py"):
        (folder / name).touch()
    return folder


def test_mounts_of_server_workspace(place: Place) -> None:
    own = {"hermes/sandbox/s1/home": "rw", "hermes/workspace": "rw", "hermes/workspace/scopes": "hide"}
    assert mount_modes(place) == own
    scope = place.workspace / "scopes/other"
    assert mount_modes(place, workspace=scope) == {
        "hermes/sandbox/s1/home": "rw",
        "hermes/workspace/scopes/other": "rw",
    }


def test_mounts_of_project(place: Place, project: Path) -> None:
    guarded = {
        "hermes/sandbox/s1/home": "rw",
        "project": "rw",
        "project/.env": "hide",
        "project/.env.local": "hide",
        "project/key.p12": "hide",
    }
    assert mount_modes(place, workspace=project) == guarded


def test_home_inside_workspace_is_hidden(place: Place, tmp_path: Path) -> None:
    modes = mount_modes(place, workspace=tmp_path)
    assert modes.pop(str(tmp_path)) == "rw"
    assert modes == {"hermes": "hide", "hermes/sandbox/s1/home": "rw"}
    below = mount_modes(replace(place), workspace=tmp_path.parent)
    assert below[str(tmp_path)] == "rw"  # held in its place


def test_protection_lists_win_over_requested_mounts(place: Place, tmp_path: Path) -> None:
    (place.user_home / ".ssh").mkdir(parents=True)
    (tmp_path / "link").symlink_to(place.user_home / ".ssh")
    paths = (
        place.user_home / ".ssh",
        tmp_path / "link",
        place.home.path,
        Path("/proc/self"),
        Path("/"),
        Path("/usr/share"),
    )
    modes = mount_modes(place, rw=paths)
    assert {path for path in modes if not path.startswith("hermes/")} == {"/usr/share"}
    assert modes["/usr/share"] == "ro"


def test_links_do_not_widen_mounts(place: Place, project: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (project / ".env").unlink()
    (project / ".env").symlink_to(tmp_path / "secret")
    assert "secret" not in str(mount_modes(place, workspace=project))


def test_invalid_workspace_is_rejected(place: Place) -> None:
    for folder in ("/", "/no/such/folder", str(place.home.path)):
        with pytest.raises(SandboxError):
            plan_mounts(replace(place, workspace=Path(folder)))


@pytest.mark.parametrize(
    ("path", "real"),
    [
        ("outside/data", "outside/data"),
        ("link/data", "outside/data"),
        ("ws/data", "ws/data"),
        ("ws/link", None),
        ("ws/link/data", None),
        ("ws/missing", "ws/missing"),
    ],
)
def test_links_made_by_commands_do_not_move_mount_roots(tmp_path: Path, path: str, real: str | None) -> None:
    base = tmp_path.resolve()
    for folder in ("outside/data", "ws/data"):
        (base / folder).mkdir(parents=True)
    (base / "link").symlink_to("outside")
    (base / "ws/link").symlink_to("../outside")
    assert resolve_root(base / path, [str(base / "ws")]) == (None if real is None else str(base / real))


def test_workspace_that_became_a_link_is_rejected(place: Place, tmp_path: Path) -> None:
    work = tmp_path.resolve() / "work"
    (tmp_path / "outside").mkdir()
    work.symlink_to("outside")
    with pytest.raises(SandboxError, match="cannot be the workspace"):
        plan_mounts(replace(place, workspace=work))
