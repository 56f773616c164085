"""What bubblewrap keeps commands from: the network, the home, everything outside, and more than their share."""

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes.sandbox import bubblewrap, mounts, namespace
from hermes.sandbox.base import Sandbox, SandboxError
from hermes.sandbox.mounts import Place
from support.waiting import DEADLINE_S, until_blocking

from .conftest import finished, needs_bubblewrap, running, sh

Wrapped = Callable[..., Sandbox]


@pytest.fixture
def git(place: Place) -> Path:
    """A repository in the workspace, with a hook."""
    folder = place.workspace / ".git"
    (folder / "hooks").mkdir(parents=True)
    (folder / "hooks/pre-commit").write_text("#!/bin/sh\n")
    (folder / "config").write_text("[core]\n")
    return folder


@pytest.mark.parametrize(
    ("script", "output"),
    [
        ("cat {home}/.env; ls -A {home}", "sandbox\nworkspace\n"),
        ("ls -A {home}/sandbox {home}/sandbox/s1", "{home}/sandbox:\ns1\n\n{home}/sandbox/s1:\nhome\n"),
        ("ls {home}/workspace/scopes", ""),
        ("ls -A {user}; ls /home /srv /mnt /sys /run /opt; true", ""),
        ("touch {home}/x {user}/x /usr/x /etc/x /x /dev/x /proc/x {home}/workspace/scopes/x; true", ""),
        ("cat /etc/shadow; ls /etc/ssh /etc/ssl/private; true", ""),
        ("for f in $(find /proc/sys /proc/sysrq-trigger -type f); do test -w $f && : >> $f && echo $f; done; true", ""),
        ("grep -h ^Cap /proc/self/status | tr -d '[:alpha:]:0\\t\\n'; id -u", "{uid}\n"),
        ("unshare --user true || echo refused", "refused\n"),
        ("mount -t tmpfs x /tmp || umount /usr || mount -o remount,rw /usr || echo refused", "refused\n"),
        ("echo $$; set -- /proc/[0-9]*; echo $#", "2\n2\n"),
        ("ps -A -o pid= >/tmp/seen; wc -l </tmp/seen; kill -9 1; echo alive", "3\nalive\n"),
        ("ls /dev/sd* /dev/vd* /dev/mem /dev/kmsg; echo x >/dev/shm/a && cat /dev/shm/a", "x\n"),
        ("stat -c %a /tmp; cd /var/tmp && pwd -P", "1777\n/tmp\n"),
        ("awk '/^Max processes/ {print $4}' /proc/self/limits; ulimit -n; ulimit -v", "512\n4096\n5242880\n"),
        ("cat /etc/resolv.conf || echo no names", "no names\n"),
        ("python3 -c 'import ssl, pwd, os; print(pwd.getpwuid(os.getuid()).pw_uid)'", "{uid}\n"),
        ("{python} -c 'import json; print(json.dumps(1))'", "1\n"),
    ],
)
async def test_bubblewrap_view_of_system(wrapped: Wrapped, place: Place, script: str, output: str) -> None:
    if script.startswith("python3") and shutil.which("python3", path="/usr/bin") is None:
        pytest.skip("the system has no Python")
    place.user_home.mkdir()
    sandbox = wrapped()
    names = {"home": place.home.path, "user": place.user_home, "uid": os.getuid(), "python": sandbox.python}
    for name, value in names.items():
        script, output = script.replace(f"{{{name}}}", str(value)), output.replace(f"{{{name}}}", str(value))
    # What is refused is told on stderr.
    result = await sh(sandbox, f"{{ {script}; }} 2>/dev/null")
    assert result.output == output


@pytest.mark.parametrize("network", [False, True])
async def test_host_ports_are_unreachable(wrapped: Wrapped, network: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        script = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('reached')"
        sandbox = wrapped(network=network)
        result = await finished(await sandbox.spawn([sandbox.python, "-c", script], network=network))
        assert "refused" in result.output and "reached" not in result.output


async def test_git_hooks_and_config_are_read_only(wrapped: Wrapped, git: Path) -> None:
    attempts = """
    echo evil > .git/hooks/pre-commit; echo evil > .git/hooks/post-commit; echo evil > .git/config
    rm -rf .git; mv .git other; mv .git/hooks .git/h; mv .git/config .git/c; ln -sfn /tmp .git/hooks; rm .git/config
    cp -r .git copy; echo ok > .git/HEAD; cat .git/hooks/pre-commit
    """
    result = await sh(wrapped(), attempts)
    assert result.output.endswith("#!/bin/sh\n")
    assert sorted(path.name for path in git.rglob("*")) == ["HEAD", "config", "hooks", "pre-commit"]
    assert (git / "hooks/pre-commit").read_text() == "#!/bin/sh\n"
    assert (git / "config").read_text() == "[core]\n"
    granted = await sh(wrapped(granted=(git,)), "echo new > .git/hooks/pre-commit && echo new > .git/config")
    assert granted.code == 0
    assert (git / "hooks/pre-commit").read_text() == "new\n"


async def test_missing_git_hooks_cannot_be_created(wrapped: Wrapped, git: Path) -> None:
    shutil.rmtree(git / "hooks")
    assert (await sh(wrapped(), "mkdir -p .git/hooks; echo evil > .git/hooks/pre-commit")).code != 0
    assert list((git / "hooks").iterdir()) == []


@pytest.mark.parametrize("swapped", [".git", ".git/hooks", ".git/config"])
async def test_link_in_place_of_hooks_is_neutralised(
    wrapped: Wrapped, git: Path, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    """A link that exists from the start, and one that is created after the check."""
    secret = tmp_path / "secret"
    (secret / "hooks").mkdir(parents=True)
    (secret / "hooks/key").write_text("planted")
    (secret / "key").write_text("planted")
    (secret / "config").write_text("planted")
    target = {".git": secret, ".git/hooks": secret / "hooks", ".git/config": secret / "config"}[swapped]
    planned = mounts.plan_mounts

    def swap(where: Place, covers: dict[str, mounts.Mode] | None = None) -> list[mounts.Mount]:
        mounts = planned(where, covers)
        if covers and not (place.workspace / swapped).is_symlink():
            (place.workspace / swapped).rename(place.workspace / "away")
            (place.workspace / swapped).symlink_to(target)
        return mounts

    monkeypatch.setattr(bubblewrap, "plan_mounts", swap)
    sandbox = wrapped()
    with pytest.raises(SandboxError, match="could not be built"):
        await sh(sandbox, "true")
    for tried in (sandbox, wrapped()):
        result = await sh(tried, "cat .git/key .git/hooks/key .git/config; echo x > .git/key; ls -R .")
        assert "planted" not in result.output
    assert (secret / "key").read_text() == "planted"
    assert (place.workspace / "away").exists()


async def test_home_is_per_session_and_tmp_is_not_kept(wrapped: Wrapped, place: Place) -> None:
    await sh(wrapped(), "echo mine > ~/kept; echo mine > /tmp/lost; ln -s / ~/root")
    result = await sh(wrapped(), "cat ~/kept; cat /tmp/lost; cat ~/root/etc/shadow")
    assert result.output.startswith("mine\n")
    assert result.output.count("mine") == 1
    other = place.home.sandbox / "s2/home"
    assert (await sh(wrapped(private=other), f"ls -A ~ {place.private}", env={"HOME": str(other)})).code == 2


async def test_idle_sandboxes_are_limited(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_bubblewrap()
    monkeypatch.setattr(bubblewrap, "SANDBOXES_IDLE_MAX", 2)
    idle: dict[bubblewrap.Bubblewrap, None] = {}
    sandboxes = [bubblewrap.Bubblewrap(place, idle=idle) for _ in range(3)]
    for sandbox in sandboxes:
        assert (await sh(sandbox, "echo x > /tmp/kept; echo ok")).output == "ok\n"
    assert list(idle) == sandboxes[1:]
    outputs = [
        (await sh(sandbox, "cat /tmp/kept 2>/dev/null; true")).output for sandbox in (sandboxes[2], sandboxes[0])
    ]
    assert outputs == ["x\n", ""]
    for sandbox in sandboxes:
        await sandbox.stop()


async def test_uploads_and_extra_mounts(wrapped: Wrapped, place: Place, tmp_path: Path) -> None:
    uploads, visible, shared = place.home.uploads / "s1", tmp_path / "shown", tmp_path / "shared"
    for folder in (uploads, place.home.uploads / "s2", visible, shared, place.user_home / ".ssh"):
        folder.mkdir(parents=True)
        (folder / "file").write_text(folder.name)
    secrets = (place.user_home / ".ssh", place.home.path, Path("/proc/self"))
    sandbox = wrapped(uploads=uploads, ro=(visible, *secrets), rw=(shared, Path("/"), tmp_path / "missing"))
    read = await sh(sandbox, f"cat {uploads}/file {visible}/file {shared}/file; ls {place.home.uploads}")
    assert read.output == "s1shownshareds1\n"
    assert (await sh(sandbox, f"echo x > {uploads}/file")).code != 0
    assert (await sh(sandbox, f"echo x > {visible}/file")).code != 0
    assert (await sh(sandbox, f"echo x > {shared}/new")).code == 0
    assert (shared / "new").read_text() == "x\n"
    hidden = await sh(sandbox, f"cat {place.user_home}/.ssh/file {place.home.path}/.env {tmp_path}/*")
    assert "planted" not in hidden.output
    assert ".ssh" not in hidden.output.replace(f"{place.user_home}/.ssh/file", "")


async def test_credentials_in_user_home_are_hidden(wrapped: Wrapped, place: Place) -> None:
    user = place.user_home
    for name in (".ssh/key", ".config/gh/key", ".netrc", ".env", ".bashrc", ".env.example"):
        (user / name).parent.mkdir(parents=True, exist_ok=True)
        (user / name).write_text(f"content of {name}\n")
    sandbox = wrapped(workspace=user)
    for _ in range(2):
        attempts = (
            "mv .config moved; mv .ssh moved; rm -rf .ssh; cp -r . /tmp/copy; echo evil >> .bashrc; cat .netrc .env"
        )
        output = (await sh(sandbox, f"{attempts}; grep -rs 'content of' . /tmp/copy")).output
        assert ".bashrc:content of" in output
        assert ".env.example:content of" in output
        assert not any(f"content of {name}" in output for name in (".ssh", ".config", ".netrc", ".env\n"))
    assert (user / ".bashrc").read_text() == "content of .bashrc\n"
    assert (user / ".config/gh/key").exists()


@pytest.mark.parametrize("folder", ["/", "{home}", "{home}/logs", "{user}/.ssh", "/no/such/folder"])
async def test_forbidden_workspaces_are_rejected(wrapped: Wrapped, place: Place, folder: str) -> None:
    (place.user_home / ".ssh").mkdir(parents=True)
    place.home.logs.mkdir()
    workspace = Path(folder.format(home=place.home.path, user=place.user_home))
    with pytest.raises(SandboxError):
        await wrapped(workspace=workspace).spawn(["true"])


async def test_command_environment_does_not_affect_bubblewrap(wrapped: Wrapped, place: Place) -> None:
    env = {**place.env, "LD_PRELOAD": str(place.workspace / "evil.so"), "SECRET": "planted"}
    process = await wrapped().spawn(["/bin/sh", "-c", "echo $SECRET; sleep 100"], env=env)
    async with process:
        async for chunk in process.chunks():
            if b"planted" in chunk:
                break
        of_bubblewrap = Path(f"/proc/{process.pid}")
        assert b"planted" not in of_bubblewrap.joinpath("environ").read_bytes()
        assert b"planted" not in of_bubblewrap.joinpath("cmdline").read_bytes()
        process.kill()


async def test_memory_and_file_size_limits(wrapped: Wrapped, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = wrapped(memory_mb=600)
    for megabytes, works in ((100, True), (700, False)):
        process = await sandbox.spawn([sandbox.python, "-c", f"bytearray({megabytes} * 1024 ** 2); print('had')"])
        async with process:
            data = b"".join([chunk async for chunk in process.chunks()])
        assert (b"had" in data, b"MemoryError" in data) == (works, not works)
    monkeypatch.setattr(bubblewrap, "SANDBOX_FILE_BYTES_MAX", 1000)
    result = await sh(wrapped(), "head -c 5000 /dev/zero > big; wc -c < big")
    assert result.output.endswith("1000\n")
    monkeypatch.setattr(bubblewrap, "SANDBOX_OPEN_FILES_MAX", 20)
    result = await sh(wrapped(), "exec 3</dev/null 9</dev/null; ulimit -n")
    assert result.output == "20\n"


async def test_fork_bomb_is_contained(wrapped: Wrapped) -> None:
    storm = "storm() { storm | storm & }; storm"
    count = "while :; do echo there are $(ls /proc | grep -c '^[0-9]'); sleep 0.1; done"
    async with asyncio.timeout(DEADLINE_S):
        async with await wrapped().spawn(["/bin/sh", "-c", f"{storm}; {count}"]) as process:
            output = b""
            async for chunk in process.chunks():
                output += chunk
                if b"fork" in output:
                    process.kill()
        # The shell may find no room to count; and what it counts changes meanwhile.
        for number in re.findall(rb"there are (\d+)", output):
            assert int(number) <= 2 * bubblewrap.SANDBOX_PROCESSES_MAX
        assert b"fork" in output
        assert (await sh(wrapped(), f"mkfifo gate; {storm} 2>/dev/null; read line < gate", seconds=0.5)).code == 124
        assert (await sh(wrapped(), "echo calm")).output == "calm\n"


async def test_failed_start_leaves_nothing(
    wrapped: Wrapped, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program exits at once, or creates a namespace and never reports it: its processes are ended too."""
    mark = str(int.from_bytes(os.urandom(4)) + 10_000_000)
    with pytest.raises(SandboxError, match="Argument list too long"):
        await (sandbox := wrapped()).spawn(["echo", "x" * 200_000])
    await sandbox.stop()
    before = sorted(os.listdir("/proc/self/fd"))
    program = tmp_path / "bwrap"
    monkeypatch.setattr(namespace, "SANDBOX_START_S_MAX", 0.3)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for script in ("exit 1", f"/bin/sleep {mark} & /bin/sleep {mark}"):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        with pytest.raises(SandboxError, match="did not start"):
            await wrapped().spawn(["true"])
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not running(f"/bin/sleep\0{mark}")


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        (None, "not installed"),
        ("echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1", "uid map: Permission denied"),
        ("exit 5", "ended with code 5"),
    ],
)
def test_failed_probe_gives_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, failure: str
) -> None:
    if program is not None:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert failure in bubblewrap.probe.__wrapped__()


def test_unprivileged_user_has_same_limits(tmp_path: Path) -> None:
    """Without root the same limits apply, by other means."""
    needs_bubblewrap()
    if os.geteuid() != 0:
        pytest.skip("the suite runs as a plain user already")
    python = next((p for p in ("/usr/bin/python3", sys.executable) if _usable_by_nobody(p)), None)
    if python is None:
        pytest.skip("nobody but root can run a Python that is new enough here")
    with_source = {"PYTHONPATH": str(Path(mounts.__file__).parents[2]), "PATH": os.environ["PATH"]}
    script = Path(__file__).with_name("as_plain_user.py").read_text()
    argv = ["runuser", "-u", "nobody", "--", python, "-B", "-c", script]
    result = subprocess.run(argv, env=with_source, capture_output=True, text=True, cwd="/", check=False)
    assert result.stdout == "1 0 True refused\ngone\n", result.stderr


def _usable_by_nobody(python: str) -> bool:
    source = Path(mounts.__file__).parents[2]
    test = f"import sys; sys.path.insert(0, {str(source)!r}); import hermes.sandbox.bubblewrap; from asyncio import timeout"
    argv = ["runuser", "-u", "nobody", "--", python, "-B", "-c", test]
    return (
        shutil.which("runuser") is not None
        and subprocess.run(argv, capture_output=True, cwd="/", check=False).returncode == 0
    )


def test_starting_sandbox_ends_with_server(tmp_path: Path) -> None:
    needs_bubblewrap()
    script = Path(__file__).with_name("forgetful.py")
    folders = [tmp_path / str(number) for number in range(5)]
    for folder in folders:
        folder.mkdir()
        argv = [sys.executable, str(script), "bubblewrap", "die", "1", str(folder)]
        assert subprocess.run(argv, check=False).returncode == -signal.SIGKILL
    until_blocking(lambda: not [pid for folder in folders for pid in running(f"{folder}/init.py")])
