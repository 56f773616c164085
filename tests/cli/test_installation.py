"""Installing parts, updating, removing Hermes, and running its server as a service of the user."""

from __future__ import annotations

import json
import plistlib
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hermes.cli.service import LaunchAgent, SystemdUnit
from hermes.core.home import Home
from hermes.core.installation import DISTRIBUTION, Installation, extras, installation, is_installed

from .conftest import Cli

ROOT = Path(__file__).parents[2]


# ---- parts


def test_extras_list_packages_by_their_own_names() -> None:
    parts = extras()
    assert {"postgres", "nats", "cluster", "mcp", "local"} <= parts.keys()
    assert set(parts["cluster"]) >= set(parts["postgres"]) | set(parts["nats"])
    assert not any(package.startswith(DISTRIBUTION) for packages in parts.values() for package in packages)


def test_install_lists_parts(cli: Cli) -> None:
    parts = json.loads(cli.run("install", "--json").stdout)["parts"]
    assert {row["part"]: row["installed"] for row in parts} == {name: is_installed(p) for name, p in extras().items()}


def test_install_of_unknown_part_changes_nothing(cli: Cli) -> None:
    result = cli.run("install", "postgres", "nonsense")
    assert result.returncode != 0 and "nonsense" in result.stderr and "hermes install" in result.stderr


def test_install_of_present_part_does_nothing(cli: Cli) -> None:
    assert json.loads(cli.run("install", "postgres", "nats", "--json").stdout) == {"installed": []}


# ---- how it was installed


def test_checkout_is_recognized() -> None:
    assert installation() == Installation("checkout", str(ROOT))


@pytest.mark.parametrize(
    ("tool", "update", "remove"),
    [
        ("pipx", ["pipx", "upgrade", DISTRIBUTION], ["pipx", "uninstall", DISTRIBUTION]),
        ("uv", ["uv", "tool", "upgrade", DISTRIBUTION], ["uv", "tool", "uninstall", DISTRIBUTION]),
    ],
)
def test_tools_update_and_remove_what_they_installed(tool: str, update: list[str], remove: list[str]) -> None:
    assert Installation(tool).update() == [update] and Installation(tool).remove() == remove


def test_update_of_checkout_takes_no_source(cli: Cli) -> None:
    result = cli.run("update", "hermes.whl")
    assert result.returncode == 2 and str(ROOT) in result.stderr


def test_version_is_defined_once() -> None:
    import hermes

    assert hermes.__version__ not in (ROOT / "pyproject.toml").read_text()


# ---- removing it


def test_uninstall_keeps_data_and_checkout(cli: Cli) -> None:
    result = cli.run("uninstall", "--yes")
    assert result.returncode == 0 and str(ROOT) in result.stdout and "--data" in result.stdout
    assert (cli.home / "config.yaml").exists()


def test_uninstall_of_data_needs_an_answer(cli: Cli) -> None:
    result = cli.run("uninstall", "--data")
    assert result.returncode != 0 and (cli.home / "config.yaml").exists()


def test_uninstall_of_data_removes_what_is_hermes_own(cli: Cli) -> None:
    cli.run("sessions", "list")
    (cli.home / "notes.txt").write_text("mine")
    assert cli.run("uninstall", "--data", "--yes").returncode == 0
    assert [path.name for path in cli.home.iterdir()] == ["notes.txt"]


# ---- the service


def entry(unit: str, name: str) -> list[str]:
    return [line.partition("=")[2] for line in unit.splitlines() if line.startswith(f"{name}=")]


def test_systemd_unit_runs_this_program_in_this_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    root = tmp_path / 'a "b" 100% $HOME'
    service = SystemdUnit(Home(root))
    unit = service.text(90)
    assert service.file == tmp_path / "config/systemd/user/hermes.service"
    [command] = entry(unit, "ExecStart")
    argv = [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(command)]
    assert argv == [sys.executable, "-P", "-m", "hermes", "-p", "default", "gateway", "run"]
    home = next(shlex.split(line)[0] for line in entry(unit, "Environment") if "HERMES_HOME" in line)
    assert home.replace("%%", "%") == f"HERMES_HOME={root}"
    assert entry(unit, "TimeoutStopSec") == ["90"] and entry(unit, "RestartPreventExitStatus") == ["78"]


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    file = tmp_path / "hermes.service"
    file.write_text(SystemdUnit(Home(tmp_path)).text(90).replace("DelegateSubgroup=server\n", ""))
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, check=False
    )
    assert "hermes.service" not in result.stderr, result.stderr


def test_launch_agent_runs_this_program_in_this_home(tmp_path: Path) -> None:
    entries = plistlib.loads(LaunchAgent(Home(tmp_path)).text(90).encode())
    assert entries["ProgramArguments"][-2:] == ["gateway", "run"] and entries["ExitTimeOut"] == 90
    assert entries["EnvironmentVariables"]["HERMES_HOME"] == str(tmp_path)


def test_gateway_install_without_service_manager(cli: Cli) -> None:
    cli.env["PATH"] = str(cli.folder)
    result = cli.run("gateway", "install")
    assert result.returncode == 69 and "hermes gateway run" in result.stderr
    assert not list(cli.folder.rglob("*.service"))


def test_gateway_restart_of_a_service_is_left_to_its_manager(cli: Cli) -> None:
    log, unit = cli.folder / "asked", cli.folder / ".config/systemd/user/hermes.service"
    manager = cli.folder / "systemctl"
    manager.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    manager.chmod(0o755)
    unit.parent.mkdir(parents=True)
    unit.touch()
    cli.env["PATH"] = f"{cli.folder}:{cli.env['PATH']}"
    result = cli.run("gateway", "restart")
    assert (result.returncode, result.stdout) == (0, "systemd has restarted the server.\n")
    assert log.read_text().splitlines() == ["--user is-active --quiet hermes.service", "--user restart hermes.service"]
    manager.write_text("#!/bin/sh\n[ $2 = is-active ] || { echo no bus >&2; exit 1; }\n")
    result = cli.run("gateway", "restart")
    assert result.returncode == 69 and "did not restart the server: no bus" in result.stderr


def test_gateway_uninstall_without_service(cli: Cli) -> None:
    result = cli.run("gateway", "uninstall")
    assert result.returncode != 0 and "No service is installed" in result.stderr


# ---- the wheel


def test_wheel_holds_page_runtime_pins_and_command(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True)
    [wheel] = tmp_path.glob("hermes_gateway-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"hermes/local/runtime.txt", "hermes/server/web/index.html"} <= set(names)
    assert any(name.endswith("entry_points.txt") for name in names)
