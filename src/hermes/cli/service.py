"""`hermes gateway install` and `uninstall`: the server as a service of the user, under systemd or launchd."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from hermes.cli.command import command
from hermes.cli.output import Busy, NotFound, note, tell
from hermes.core.errors import HermesError
from hermes.core.home import DEFAULT_PROFILE, Home, is_served, make_private_folder, write_private
from hermes.core.limits import CLOSE_S_MAX
from hermes.settings import config

_MANAGER_S_MAX = 120.0
# Beyond the drain: runs that are told to stop, and their readers.
_STOP_MORE_S = 5 * CLOSE_S_MAX + 20
# Another process may hold the database for 30 s: half of this is more.
_WATCHDOG_S = 120
EXIT_UNAVAILABLE, EXIT_CONFIG = 69, 78


class NoServiceManager(HermesError):
    exit_code = EXIT_UNAVAILABLE


class Service:
    """A file that tells a service manager to run the server of one home, and the commands that load and unload it."""

    manager: str
    file: Path
    start: list[list[str]]
    stop: list[list[str]]
    # Succeeds while the service runs.
    check: list[str]
    again: list[str]

    def __init__(self, home: Home) -> None:
        self.home = home
        self.name = "hermes" if home.profile == DEFAULT_PROFILE else f"hermes-{home.profile}"
        self.argv = [sys.executable, "-P", "-m", "hermes", "-p", home.profile, "gateway", "run"]

    def text(self, stop_s: float) -> str:
        raise NotImplementedError

    def install(self) -> None:
        """Write the file and start the service; where the manager refuses, the file is removed again."""
        make_private_folder(self.file.parent)
        write_private(self.file, self.text(config.load(self.home).api_server.drain_seconds + _STOP_MORE_S))
        if problem := _run_all(self.start):
            _run_all(self.stop)
            self.file.unlink(missing_ok=True)
            raise NoServiceManager(f"{self.manager} did not start the server: {problem}", hint="hermes gateway run")

    def is_running(self) -> bool:
        return self.file.exists() and not _run_all([self.check])

    def restart(self, seconds: float) -> None:
        """Restart the service; `seconds` is how long the server may take to end."""
        if problem := _run_all([self.again], seconds + _MANAGER_S_MAX):
            raise NoServiceManager(
                f"{self.manager} did not restart the server: {problem}", hint="hermes gateway status"
            )

    def uninstall(self) -> None:
        if problem := _run_all(self.stop):
            note(f"{self.manager}: {problem}")
        self.file.unlink(missing_ok=True)


class SystemdUnit(Service):
    manager = "systemd"

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        self.file = Path(base).expanduser() / "systemd" / "user" / f"{self.name}.service"
        self.start = [[*_USER, "daemon-reload"], [*_USER, "enable", "--now", self.file.name]]
        self.stop = [[*_USER, "disable", "--now", self.file.name]]
        self.check = [*_USER, "is-active", "--quiet", self.file.name]
        self.again = [*_USER, "restart", self.file.name]

    def text(self, stop_s: float) -> str:
        # Variables are expanded in commands alone.
        command = " ".join(_systemd_word(word).replace("$", "$$") for word in self.argv)
        return f"""# Written by `hermes gateway install`; `hermes gateway uninstall` removes it.
[Unit]
Description=Hermes ({self.home.profile})
After=network-online.target

[Service]
Type=notify
Environment={_systemd_word(f"HERMES_HOME={self.home.root}")}
Environment={_systemd_word(f"PATH={os.environ.get('PATH', os.defpath)}")}
ExecStart={command}
WatchdogSec={_WATCHDOG_S}
TimeoutStopSec={stop_s:g}
Restart=on-failure
RestartSec=1
# A configuration that has to be changed first.
RestartPreventExitStatus={EXIT_CONFIG}
# Limits of memory and processes for commands of the agent.
Delegate=yes
DelegateSubgroup=server
UMask=0077

[Install]
WantedBy=default.target
"""


class LaunchAgent(Service):
    manager = "launchd"

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        label = f"local.{self.name}.gateway"
        self.file = Path("~/Library/LaunchAgents").expanduser() / f"{label}.plist"
        domain = f"gui/{os.getuid()}"
        self.start = [["launchctl", "bootstrap", domain, str(self.file)]]
        self.stop = [["launchctl", "bootout", f"{domain}/{label}"]]
        self.check = ["launchctl", "print", f"{domain}/{label}"]
        self.again = ["launchctl", "kickstart", "-k", f"{domain}/{label}"]

    def text(self, stop_s: float) -> str:
        import plistlib

        log = str(self.home.logs / "service.log")
        entries = {
            "Label": self.file.stem,
            "ProgramArguments": self.argv,
            "EnvironmentVariables": {"HERMES_HOME": str(self.home.root), "PATH": os.environ.get("PATH", os.defpath)},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ExitTimeOut": int(stop_s),
            "Umask": 0o077,
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
        return plistlib.dumps(entries).decode()


_USER = ("systemctl", "--user")


def of(home: Home) -> Service:
    return LaunchAgent(home) if sys.platform == "darwin" else SystemdUnit(home)


def _run_all(commands: list[list[str]], seconds: float = _MANAGER_S_MAX) -> str:
    """Empty if all succeed; else what the first that fails says."""
    from hermes.sandbox.base import failure_message

    return next((problem for argv in commands if (problem := failure_message(argv, os.environ, seconds))), "")


def _systemd_word(text: str) -> str:
    """A word in quotes as systemd reads it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


@command("gateway install", help="start the server now and whenever you log in (systemd user unit, launchd agent)")
def _install(args: argparse.Namespace, home: Home) -> int:
    service = of(home)
    if shutil.which(service.start[0][0]) is None:
        raise NoServiceManager(f"There is no {service.manager} here.", hint="hermes gateway run")
    if is_served(home) and not service.file.exists():
        raise Busy("A server of this home is running already.", hint="hermes gateway stop, then the same again")
    service.install()
    tell(args, {"file": str(service.file), "manager": service.manager}, f"{service.file} is installed and started.")
    if service.manager == "systemd":
        note(
            "It ends when you log out, unless `loginctl enable-linger` was run once. Log: journalctl --user -u "
            + service.name
        )
    return 0


@command("gateway uninstall", help="stop the service and remove it; nothing else is removed")
def _uninstall(args: argparse.Namespace, home: Home) -> int:
    service = of(home)
    if not service.file.exists():
        raise NotFound("No service is installed.", where=str(service.file), hint="hermes gateway status")
    service.uninstall()
    tell(args, {"file": str(service.file), "manager": service.manager}, f"{service.file} is removed.")
    return 0
