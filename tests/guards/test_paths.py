"""The path guard: what is refused under which rule, and that no swapped link leads past it."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.core.home import Home
from hermes.guards.path_lists import Mode
from hermes.guards.paths import PathRefused, Paths

IS_ROOT = os.getuid() == 0
PEM = "-----BEGIN {}PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n-----END {}PRIVATE KEY-----\n"
SECRET = b"the secret"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A user's home with a Hermes home in it, a workspace, and an unrelated folder."""
    for folder in ("user/.hermes/workspace", "user/.ssh", "ws/src", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "user/.ssh/id_rsa").write_bytes(SECRET)
    (tmp_path / "user/.hermes/state.db").write_bytes(SECRET)
    (tmp_path / "ws/src/main.py").write_text("print()\n")
    return tmp_path


def paths(place: Path, **more: object) -> Paths:
    options: dict[str, object] = {
        "cwd": place / "ws",
        "home": Home(place / "user/.hermes"),
        "roots_rw": (place / "ws",),
        "user_home": place / "user",
    }
    return Paths(**(options | more))  # type: ignore[arg-type]


def rule_of(call: Callable[[], object]) -> str:
    """The rule that refuses a call, or nothing."""
    try:
        result = call()
    except PathRefused as refused:
        assert refused.code == "path_refused" and refused.rule in str(refused)
        return refused.rule
    if hasattr(result, "close"):
        result.close()
    return ""


# ---- the lists

READ_WRITE = [
    ("~/.ssh/id_rsa", "credentials"),
    ("~/.ssh", "credentials"),
    ("~/.aws/credentials", "credentials"),
    ("~/.gnupg/x", "credentials"),
    ("~/.azure/x", "credentials"),
    ("~/.kube/config", "credentials"),
    ("~/.docker/config.json", "credentials"),
    ("~/.config/gh/hosts.yml", "credentials"),
    ("~/.config/gcloud/x.db", "credentials"),
    ("~/.netrc", "credentials"),
    ("~/.pgpass", "credentials"),
    ("~/.npmrc", "credentials"),
    ("~/.pypirc", "credentials"),
    ("~/.git-credentials", "credentials"),
    ("/root/.ssh/id_ed25519", "credentials"),
    ("/home/somebody/.ssh/id_ed25519", "credentials"),
    ("/Users/somebody/.aws/credentials", "credentials"),
    ("/etc/shadow", "system_secrets"),
    ("/etc/shadow-", "system_secrets"),
    ("/etc/sudoers", "system_secrets"),
    ("/etc/sudoers.d/x", "system_secrets"),
    ("/proc/self/environ", "kernel_files"),
    ("/proc/1/mem", "kernel_files"),
    ("/sys/power/state", "kernel_files"),
    ("/dev/sda", "kernel_files"),
    ("/dev/null", "kernel_files"),
    ("/run/docker.sock", "control_sockets"),
    ("/var/run/docker.sock", "control_sockets"),
    ("/run/containerd/containerd.sock", "control_sockets"),
    ("~/.hermes/.env", "environment_files|hermes_secrets"),
    ("~/.hermes/auth.json", "hermes_secrets"),
    ("~/.hermes/auth/openai.json", "hermes_secrets"),
    ("~/.hermes/state.db", "hermes_secrets"),
    ("~/.hermes/state.db-wal", "hermes_secrets"),
    ("~/.hermes/state.db-shm", "hermes_secrets"),
    ("~/.hermes/response_store.db", "hermes_secrets"),
    ("~/.hermes/api_keys.json", "hermes_secrets"),
    ("~/.hermes/tokens.json", "hermes_secrets"),
    ("~/.hermes/sessions/one.json", "hermes_secrets"),
    ("~/.hermes/profiles/work/SOUL.md", "other_profile"),
    ("~/.hermes/profiles", "other_profile"),
    ("~/.hermes/uploads/other/file.txt", "other_session"),
    ("~/.hermes/cache/tool_results/run/call.txt", "other_session"),
    ("~/.hermes/workspace/scopes/0a/file.txt", "other_session"),
    ("~/.hermes/memories/scopes/0a/MEMORY.md", "other_session"),
    ("~/.hermes/sandbox/s/home/x", "other_session"),
    # In any case, and with marks that some systems do not see.
    ("~/.SSH/id_rsa", "credentials"),
    ("~/.s\u200csh/id_rsa", "credentials"),
    ("~/.Hermes/State.db", "hermes_secrets"),
    # By another way.
    ("../user/.ssh/id_rsa", "credentials"),
    ("src/../../user/./.ssh//id_rsa", "credentials"),
    ("/proc/self/root/etc/shadow", "kernel_files"),
]
ONLY_READ = [
    (".env", "environment_files"),
    ("src/.env", "environment_files"),
    (".env.production", "environment_files"),
    (".env.example.local", "environment_files"),
    ("keys.p12", "key_stores"),
]
ONLY_WRITE = [
    ("/etc/hosts", "system_files"),
    ("/etc/passwd", "system_files"),
    ("/etc/systemd/system/x.service", "system_files"),
    ("/boot/grub/grub.cfg", "system_files"),
    ("/usr/local/bin/x", "system_files"),
    ("/bin/sh", "system_files"),
    ("/sbin/init", "system_files"),
    ("/lib/x", "system_files"),
    ("/lib64/x", "system_files"),
    ("/var/spool/cron/root", "system_files"),
    ("/proc/meminfo", "system_files"),
    ("~/.bashrc", "start_files"),
    ("~/.zshenv", "start_files"),
    ("~/.profile", "start_files"),
    ("~/.config/fish/config.fish", "start_files"),
    ("~/.config/systemd/user/x.service", "start_files"),
    ("~/.hermes/config.yaml", "hermes_files"),
    ("~/.hermes/logs/agent.log", "hermes_files"),
    ("~/.hermes/gateway.pid", "hermes_files"),
    ("~/.hermes/active_profile", "hermes_files"),
    (".git/hooks/pre-commit", "git_control"),
    (".git/config", "git_control"),
    (".GIT/Hooks/pre-commit", "git_control"),
    (".git/modules/part/hooks/x", "git_control"),
    ("deep/down/.git/config", "git_control"),
]
FREE = [
    "/",
    "src/main.py",
    "new/file.txt",
    ".env.example",
    ".environment",
    ".gitignore",
    ".git/HEAD",
    ".github/workflows/config.yml",
    "etc/hosts",
    ".docker/Dockerfile",
    ".npmrc",
    "state.db",
    "~/notes.txt",
    "~/.hermes/workspace/file.txt",
    "~/.hermes/SOUL.md",
    "~/.hermes/workspace/.env.example",
]


@pytest.mark.parametrize(
    ("path", "mode", "rule"),
    [
        *((path, mode, rule) for path, rule in READ_WRITE for mode in ("read", "write")),
        *((path, "read", rule) for path, rule in ONLY_READ),
        *((path, "write", rule) for path, rule in ONLY_WRITE),
    ],
)
def test_listed_path_is_rejected_under_its_rule(place: Path, path: str, mode: Mode, rule: str) -> None:
    guard = paths(place)
    assert rule_of(lambda: guard.check(path, mode)) in (
        *rule.split("|"),
        "system_secrets" if "root/etc" in path else rule,
    )


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        *((path, mode) for path in FREE for mode in ("read", "write")),
        *((path, "write") for path, _ in ONLY_READ),
        *((path, "read") for path, _ in ONLY_WRITE),
        *((f"/proc/{name}", "read") for name in ("cpuinfo", "meminfo", "version")),
    ],
)
def test_unlisted_path_is_allowed(place: Path, path: str, mode: Mode) -> None:
    assert rule_of(lambda: paths(place).check(path, mode)) == ""


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000, "lone \ud83d half"])
def test_invalid_path_is_rejected(place: Path, path: str) -> None:
    assert rule_of(lambda: paths(place).check(path, "read")) == "bad_path"


def test_check_returns_real_path(place: Path) -> None:
    (place / "ws/link").symlink_to(place / "ws/src")
    guard = paths(place)
    assert guard.check("link/main.py", "read") == (place / "ws/src/main.py").resolve()
    assert guard.check("~/a/../b", "write") == (place / "user/b").resolve()
    assert guard.check("~", "read") == (place / "user").resolve()


def test_link_at_protected_name_protects_its_target(place: Path) -> None:
    (place / "elsewhere/keys").mkdir()
    (place / "user/.aws").symlink_to(place / "elsewhere/keys")
    guard = paths(place)
    assert rule_of(lambda: guard.check("../elsewhere/keys/credentials", "read")) == "credentials"
    assert rule_of(lambda: guard.check("../elsewhere/other", "read")) == ""


def test_links_are_checked_by_name_and_target(place: Path) -> None:
    (place / "ws/harmless.txt").symlink_to(place / "user/.ssh/id_rsa")
    (place / "ws/.env").symlink_to("src/main.py")
    guard = paths(place)
    assert rule_of(lambda: guard.open("harmless.txt")) == "credentials"
    assert rule_of(lambda: guard.replace("harmless.txt", b"x")) == "credentials"
    assert rule_of(lambda: guard.open(".env")) == "environment_files"


def test_profile_sees_only_itself(place: Path) -> None:
    root = place / "user/.hermes"
    guard = paths(place, home=Home(root / "profiles/work", "work"))
    assert rule_of(lambda: guard.check("~/.hermes/profiles/work/SOUL.md", "read")) == ""
    for other in ("profiles/home/SOUL.md", "SOUL.md", "workspace/file"):
        assert rule_of(lambda other=other: guard.check(f"~/.hermes/{other}", "read")) == "other_profile"


# ---- what a file is


@pytest.mark.parametrize(
    "text",
    [
        PEM.format("", ""),
        PEM.format("RSA ", "RSA "),
        PEM.format("OPENSSH ", "OPENSSH "),
        "Notes\n    " + PEM.format("EC ", "EC ").replace("\n", "\n    "),
        '{"private_key": "' + PEM.format("", "").replace("\n", "\\n") + '"}',
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQOYBGNqZXkBCADGqV0o\n",
        "PuTTY-User-Key-File-3: ssh-ed25519\n",
        "AGE-SECRET-KEY-1QQQQQQQQQQQQQQQQQQQQ\n",
        b"0\x82\x04\xa4\x02\x01\x00\x02\x82\x01\x01",
    ],
)
def test_private_key_content_is_rejected_under_any_name(place: Path, text: str | bytes) -> None:
    (place / "ws/notes.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    guard = paths(place)
    assert rule_of(lambda: guard.check("notes.txt", "read")) == "private_key"
    assert rule_of(lambda: guard.open("notes.txt")) == "private_key"


@pytest.mark.parametrize(
    "text",
    [
        'r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?"',
        "A key begins with -----BEGIN PRIVATE KEY----- and is secret.",
        "-----BEGIN PUBLIC KEY-----\nMIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8A\n",
        "-----BEGIN CERTIFICATE-----\nMIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8A\n",
    ],
)
def test_text_about_keys_is_readable(place: Path, text: str) -> None:
    (place / "ws/notes.txt").write_text(text)
    with paths(place).open("notes.txt") as file:
        assert file.read().decode() == text


def test_special_files_are_rejected(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = paths(place)
    os.mkfifo(place / "ws/pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        # The name of a socket must be short, whatever the folder is called.
        monkeypatch.chdir(place / "ws")
        listener.bind("sock")
        for name, rule in (("pipe", "pipe"), ("sock", "socket")):
            for call in (guard.open, lambda p: guard.check(p, "write"), lambda p: guard.replace(p, b"x"), guard.remove):
                assert rule_of(lambda call=call, name=name: call(name)) == rule
    if IS_ROOT:
        os.mknod(place / "ws/disk", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        assert rule_of(lambda: guard.open("disk")) == "device"


def test_hard_link_to_protected_file_is_rejected(place: Path) -> None:
    for n, secret in enumerate(("user/.hermes/state.db", "user/.ssh/id_rsa")):
        os.link(place / secret, place / f"ws/{n}.txt")
        assert rule_of(lambda n=n: paths(place).open(f"{n}.txt")) == "hard_link"
        assert rule_of(lambda n=n: paths(place).check(f"{n}.txt", "read")) == "hard_link"
    os.link(place / "ws/src/main.py", place / "ws/twin.py")
    assert rule_of(lambda: paths(place).open("twin.py")) == ""


def test_os_errors_are_passed_through(place: Path) -> None:
    guard = paths(place)
    with pytest.raises(FileNotFoundError):
        guard.open("missing/file")
    with pytest.raises(NotADirectoryError):
        guard.open("src/main.py/x")
    with pytest.raises(IsADirectoryError):
        guard.open("src")
    with pytest.raises(IsADirectoryError):
        guard.replace("src", b"x")
    with pytest.raises(FileNotFoundError):
        guard.remove("missing")
    (place / "ws/round").symlink_to("round")
    assert rule_of(lambda: guard.open("round")) == "changed"
    assert os.listdir(place / "ws/src") == ["main.py"], "no draft is left behind"


# ---- roots


def test_isolation_hides_paths_outside_mounts(place: Path) -> None:
    home = place / "user/.hermes"
    (place / "ws/out").symlink_to(place / "elsewhere")
    (place / "elsewhere/file").write_text("x")
    (home / "uploads/mine").mkdir(parents=True)
    (home / "cache/tool_results/run").mkdir(parents=True)
    guard = paths(
        place,
        isolated=True,
        roots_ro=(home / "uploads/mine", Path("/usr"), place / "ws/src", home / "cache/tool_results/run"),
    )
    for path in ("../elsewhere/file", "out/file", "~/notes.txt", "/", "/etc/hosts"):
        assert rule_of(lambda path=path: guard.check(path, "read")) == "outside_sandbox"
    free = ("src/main.py", "/usr/bin", "~/.hermes/uploads/mine/x", "~/.hermes/cache/tool_results/run/c.txt")
    assert not any(rule_of(lambda path=path: guard.check(path, "read")) for path in free)
    assert rule_of(lambda: guard.check("~/.hermes/uploads/other/x", "read")) == "other_session"
    for path in ("src/main.py", "~/.hermes/uploads/mine/x"):
        assert rule_of(lambda path=path: guard.replace(path, b"x")) == "read_only"
    assert guard.replace("new.txt", b"x").created and guard.needs_grant(place / "anywhere") is None


def test_mounts_do_not_lift_protection_lists(place: Path) -> None:
    guard = paths(place, isolated=True, roots_rw=(place / "user",))
    assert rule_of(lambda: guard.open("~/.ssh/id_rsa")) == "credentials"


def test_scope_folder_is_visible_to_its_own_run_only(place: Path) -> None:
    scopes = place / "user/.hermes/workspace/scopes"
    assert rule_of(lambda: paths(place, roots_rw=(scopes / "0a",)).check(str(scopes / "0a/file"), "write")) == ""
    for root in (scopes / "0a", scopes, scopes.parent):
        guard = paths(place, roots_rw=(root,))
        assert rule_of(lambda guard=guard: guard.check(str(scopes / "0b/file"), "read")) == "other_session"


def test_write_outside_workspace_needs_grant(place: Path) -> None:
    guard = paths(place)
    real = guard.check("../elsewhere/new/deep/file", "write")
    folder = guard.needs_grant(real)
    assert folder == real.parent
    assert rule_of(lambda: guard.replace(str(real), b"x")) == "not_granted"
    assert rule_of(lambda: guard.remove(str(place / "elsewhere/x"))) == "not_granted"
    assert not (place / "elsewhere/new").exists()
    guard.grant(folder)
    assert guard.replace(str(real), b"x").created and real.read_bytes() == b"x"
    assert guard.needs_grant(place / "elsewhere/other") == (place / "elsewhere").resolve()


def test_git_control_files_need_own_grant(place: Path) -> None:
    (place / "ws/.git").mkdir()
    guard = paths(place)
    guard.grant((place / "ws").resolve())
    assert rule_of(lambda: guard.replace(".git/hooks/pre-commit", b"x")) == "git_control"
    guard.grant((place / "ws/.git/hooks").resolve())
    assert rule_of(lambda: guard.replace(".git/hooks/pre-commit", b"x")) == "git_control"
    guard.grant_reserved((place / "ws/.git/hooks").resolve())
    assert rule_of(lambda: guard.replace(".git/hooks/pre-commit", b"x")) == ""
    assert rule_of(lambda: guard.replace(".git/config", b"x")) == "git_control"


def test_safe_root_limits_writes(place: Path) -> None:
    guard = paths(place, roots_rw=(place,), safe_root=(place / "ws/src", place / "ws/out"))
    assert rule_of(lambda: guard.replace("src/x", b"x")) == ""
    assert rule_of(lambda: guard.replace("x", b"x")) == "outside_safe_root"
    assert rule_of(lambda: guard.check("x", "read")) == ""
    assert guard.replace("out/deep/x", b"x").created


def test_folders_are_created_inside_roots_only(place: Path) -> None:
    guard = paths(place, safe_root=(place / "ws/deep/safe",))
    with pytest.raises(FileNotFoundError):
        guard.replace("deep/safe/x", b"x")
    guard = paths(place, roots_rw=(place / "elsewhere/a/b",))
    with pytest.raises(FileNotFoundError):
        guard.replace(str(place / "elsewhere/a/b/x"), b"x")
    assert os.listdir(place / "ws") == ["src"] and os.listdir(place / "elsewhere") == []


# ---- writing


def test_replace_is_atomic_and_keeps_mode_and_owner(place: Path) -> None:
    file = place / "ws/src/main.py"
    file.chmod(0o751)
    owner = (1234, 4321) if IS_ROOT else (os.getuid(), os.getgid())
    os.chown(file, *owner)
    before = file.stat()
    with file.open("rb") as reader:
        written = paths(place).replace("src/main.py", b"new")
        assert reader.read() == b"print()\n", "who reads it still sees the old content"
    after = file.stat()
    assert (written.path, written.created, file.read_bytes()) == (file.resolve(), False, b"new")
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, *owner)
    assert after.st_ino != before.st_ino and os.listdir(file.parent) == ["main.py"]


def test_new_files_and_folders_follow_umask(place: Path) -> None:
    umask = os.umask(0o027)
    try:
        assert paths(place).replace("a/b/c.txt", b"").created
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE((place / "ws" / path).stat().st_mode) for path in ("a", "a/b", "a/b/c.txt")]
    assert modes == [0o750, 0o750, 0o640]


def test_replace_writes_through_link(place: Path) -> None:
    (place / "ws/link").symlink_to("src/main.py")
    (place / "ws/new").symlink_to("src/new.py")
    guard = paths(place)
    assert not guard.replace("link", b"new").created and guard.replace("new", b"newer").created
    assert (place / "ws/link").is_symlink() and (place / "ws/src/main.py").read_bytes() == b"new"
    assert (place / "ws/new").is_symlink() and (place / "ws/src/new.py").read_bytes() == b"newer"
    assert guard.remove("link").name == "main.py" and not (place / "ws/src/main.py").exists()


def test_replace_clears_setuid_bits(place: Path) -> None:
    (place / "ws/src/main.py").chmod(0o4755)
    paths(place).replace("src/main.py", b"new")
    assert stat.S_IMODE((place / "ws/src/main.py").stat().st_mode) == 0o755


@pytest.mark.skipif(IS_ROOT, reason="root may write everything")
def test_replace_of_read_only_file_is_rejected(place: Path) -> None:
    (place / "ws/src/main.py").chmod(0o444)
    with pytest.raises(PermissionError):
        paths(place).replace("src/main.py", b"new")


def test_failed_replace_keeps_old_file_and_no_draft(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        paths(place).replace("src/main.py", b"new")
    assert os.listdir(place / "ws/src") == ["main.py"]
    assert (place / "ws/src/main.py").read_text() == "print()\n"


# ---- swaps between check and use


class Swapping(Paths):
    """A guard between whose check and use something happens."""

    swap: Callable[[], None]

    def _decide(self, path: str, mode: Mode) -> Path:
        real = super()._decide(path, mode)
        self.swap()
        return real


@pytest.fixture
def swapped(place: Path) -> Swapping:
    """The folder `src` becomes a link to a refused one as soon as it was checked."""
    options = {"cwd": place / "ws", "home": Home(place / "user/.hermes"), "roots_rw": (place / "ws",)}
    guard = Swapping(**options, user_home=place / "user")  # type: ignore[arg-type]

    def swap() -> None:
        (place / "ws/src").rename(place / "ws/gone")
        (place / "ws/src").symlink_to(place / "user/.ssh")

    guard.swap = swap
    return guard


@pytest.mark.parametrize("call", ["open", "replace", "remove", "check"])
def test_folder_swapped_for_link_is_not_followed(place: Path, swapped: Swapping, call: str) -> None:
    (place / "ws/src/id_rsa").write_text("harmless")
    more = {"replace": (b"x",), "check": ("read",)}.get(call, ())
    assert rule_of(lambda: getattr(swapped, call)("src/id_rsa", *more)) == "changed"
    assert (place / "user/.ssh/id_rsa").read_bytes() == SECRET and os.listdir(place / "user/.ssh") == ["id_rsa"]


def test_file_swapped_for_link_is_not_followed(place: Path, swapped: Swapping) -> None:
    def swap() -> None:
        (place / "ws/src/main.py").unlink()
        (place / "ws/src/main.py").symlink_to(place / "user/.ssh/id_rsa")

    swapped.swap = swap
    assert rule_of(lambda: swapped.open("src/main.py")) == "changed"


def test_file_swapped_for_link_during_open_is_not_followed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    examine = Paths._examine

    def swapping(self: Paths, stat: os.stat_result) -> None:
        nonlocal looks
        examine(self, stat)
        looks += 1
        if looks == 1:
            (place / "ws/src/main.py").unlink()
            (place / "ws/src/main.py").symlink_to(place / "user/.ssh/id_rsa")

    monkeypatch.setattr(Paths, "_examine", swapping)
    with pytest.raises(OSError, match="symbolic link"):
        paths(place).open("src/main.py")


def test_no_folder_is_created_behind_link(place: Path, swapped: Swapping) -> None:
    assert rule_of(lambda: swapped.replace("src/new/file", b"x")) == "changed"
    assert os.listdir(place / "user/.ssh") == ["id_rsa"]


@pytest.fixture
def juggler(place: Path) -> Iterator[None]:
    """A thread that, as fast as it can, turns the link `link` to and fro, and makes the folder `folder` a link."""
    free, refused = place / "ws/src", place / "user/.ssh"
    link, folder, spare, aside = (place / "ws" / name for name in ("link", "folder", "spare", "aside"))
    folder.mkdir()
    for harmless in (free, folder):
        (harmless / "id_rsa").write_bytes(b"harmless")
    link.symlink_to(free)
    stop = threading.Event()

    def juggle() -> None:
        while not stop.is_set():
            for target in (refused, free):
                spare.symlink_to(target)
                spare.replace(link)
            folder.rename(aside)
            folder.symlink_to(refused)
            folder.unlink()
            aside.rename(folder)

    thread = threading.Thread(target=juggle)
    thread.start()
    yield
    stop.set()
    thread.join()


def test_constantly_swapped_links_do_not_escape(place: Path, juggler: None) -> None:
    guard = paths(place)
    outcomes: set[str] = set()
    for _ in range(700):
        for path, call in (("link", "replace"), ("link", "open"), ("folder", "open")):
            try:
                if call == "replace":
                    guard.replace(f"{path}/id_rsa", b"harmless")
                else:
                    with guard.open(f"{path}/id_rsa") as file:
                        assert file.read() == b"harmless"
                outcomes.add(f"{path} {call}")
            except PathRefused as refused:
                outcomes.add(f"{path} {refused.rule}")
            except (FileNotFoundError, NotADirectoryError):  # it was another thing a moment before
                pass
    assert (place / "user/.ssh/id_rsa").read_bytes() == SECRET and os.listdir(place / "user/.ssh") == ["id_rsa"]
    assert outcomes >= {"link replace", "link open", "link credentials", "folder open"}, outcomes


# ---- whatever is asked for


@pytest.fixture(scope="module")
def maze(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with links in every direction, and files of one name in and outside it."""
    top = tmp_path_factory.mktemp("maze")
    for folder, content in (("ws/a/b", b"inside"), ("ws", b"inside"), ("out/a", b"outside"), ("out", b"outside")):
        (top / folder).mkdir(parents=True, exist_ok=True)
        (top / folder / "file").write_bytes(content)
    links = {
        "ws/out": "../out",
        "ws/in": "a",
        "ws/a/up": "..",
        "ws/abs": str(top),
        "ws/round": "round",
        "out/ws": "../ws",
    }
    for name, target in links.items():
        (top / name).symlink_to(target)
    return top


@given(
    names=st.lists(
        st.sampled_from(["a", "b", "..", ".", "", "out", "in", "up", "abs", "ws", "round", "file"]), max_size=8
    )
)
def test_isolated_root_cannot_be_escaped_property(maze: Path, names: list[str]) -> None:
    guard = Paths(cwd=maze / "ws", home=Home(maze / "home"), roots_rw=(maze / "ws",), isolated=True, user_home=maze)
    try:
        with guard.open("/".join([*names, "file"])) as file:
            assert file.read() == b"inside"
    except (PathRefused, OSError):
        pass


# ---- an editor


class Buffers:
    """An editor that has these texts, and takes what is written unless it refuses."""

    def __init__(self, **texts: str) -> None:
        self.texts, self.refuses, self.paths = texts, False, list[str]()

    def read(self, path: str) -> str | None:
        self.paths.append(path)
        return self.texts.get(Path(path).name)

    def write(self, path: str, text: str) -> bool:
        if not self.refuses:
            self.texts[Path(path).name] = text
        return not self.refuses


def edited(folder: Path, editor: Buffers, **more: object) -> Paths:
    return Paths(cwd=folder, home=Home(folder / "home"), roots_rw=(folder,), user_home=folder, editor=editor, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("saved", "text", "content"),
    [
        (b"a\n", "b\n", b"b\n"),
        (b"a\r\nb\r\n", "a\nb\n", b"a\r\nb\r\n"),
        (b"\xef\xbb\xbfa\n", "a", b"\xef\xbb\xbfa\n"),
        (b"a\0b", "other", b"a\0b"),
    ],
    ids=["unsaved", "line ends", "mark", "binary"],
)
def test_editor_text_replaces_only_what_differs(tmp_path: Path, saved: bytes, text: str, content: bytes) -> None:
    (tmp_path / "name").write_bytes(saved)
    paths = edited(tmp_path, Buffers(name=text))
    with paths.open("name") as file:
        assert file.read() == content and os.fstat(file.fileno()).st_size == len(saved)
    assert paths.digest("name") == hashlib.sha256(content).hexdigest()


def test_editor_writes_text_and_disk_the_rest(tmp_path: Path) -> None:
    editor = Buffers()
    paths = edited(tmp_path, editor)
    assert paths.replace("sub/name", b"text\n").created and editor.texts["name"] == "text\n"
    assert (tmp_path / "sub").is_dir() and not (tmp_path / "sub/name").exists()
    paths.replace("binary", b"\xff\0")
    assert (tmp_path / "binary").read_bytes() == b"\xff\0" and "binary" not in editor.texts
    editor.refuses = True
    paths.replace("refused", b"text\n")
    assert (tmp_path / "refused").read_text() == "text\n"


def test_editor_is_asked_for_allowed_paths_only(tmp_path: Path) -> None:
    folder = tmp_path / "ws"
    folder.mkdir()
    (tmp_path / "outside").write_text("x\n")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "key").write_text("x\n")
    (folder / ".env").write_text("KEY=x\n")
    editor = Buffers(key="-----BEGIN PRIVATE KEY-----\n" + "A" * 32)
    paths = edited(folder, editor, isolated=True)
    for name in ("link", "../outside"):
        with pytest.raises(PathRefused):
            paths.open(name)
        with pytest.raises(PathRefused):
            paths.replace(name, b"y\n")
    assert editor.paths == [] and "outside" not in editor.texts
    with pytest.raises(PathRefused, match="private_key"):
        paths.open("key")
