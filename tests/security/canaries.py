"""What an attempt must not reach: files, listeners, a process and variables outside the sandbox, each with a mark."""

from __future__ import annotations

import base64
import codecs
import contextlib
import ctypes
import os
import platform
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.commanding import new_mark, running

ENV = [
    "CANARY_TOKEN",
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "BRAVE_SEARCH_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "HERMES_CANARY",
]
# Below the user's home, and below the Hermes home: each holds its own mark.
_OF_USER = ".ssh/id_rsa .ssh/config .aws/credentials .netrc .git-credentials .bashrc .env .docker/config.json notes.txt"
_OF_HERMES = (
    ".env auth.json other.db logs/old.log profiles/other/.env sandbox/other/home/note uploads/other/note "
    "cache/tool_results/other/note workspace/scopes/other/note sessions/old.json"
)
_OF_WORKSPACE = ".env sub/.env key.txt store.p12 .git/config .git/hooks/pre-push"
_REPOSITORY = {"HEAD": "ref: refs/heads/main\n", "objects/info/x": "", "refs/heads/x": ""}
_KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\n{}AAAAAAAAAAAAAAAA\n-----END OPENSSH PRIVATE KEY-----\n"
# The numbers of add_key, request_key and keyctl; the session's keyring, and what takes a key out of it.
_KEY_CALLS = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}.get(platform.machine(), (0, 0, 0))
_SESSION, _UNLINK = -3, 9
_ENCODED = re.compile(r"@(\w+)\{(.*?)\}@", re.S)
_ENCODINGS: dict[str, Callable[[str], str]] = {
    "b64": lambda text: base64.b64encode(text.encode()).decode(),
    "b32": lambda text: base64.b32encode(text.encode()).decode(),
    "hex": lambda text: text.encode().hex(),
    "rev": lambda text: text[::-1],
    "rot": lambda text: codecs.encode(text, "rot13"),
    "ansi": lambda text: "$'" + "".join(f"\\x{byte:02x}" for byte in text.encode()) + "'",
    "oct": lambda text: "".join(f"\\{byte:03o}" for byte in text.encode()),
    "chr": lambda text: "+".join(f"chr({ord(char)})" for char in text),
    "url": lambda text: "".join(f"%{byte:02x}" for byte in text.encode()),
}


class Listener:
    """Sockets on loopback and in a folder that count who comes, and answer everybody with a mark."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.mark, self.count = mark, 0
        self.unix, self.abstract = str(folder / "s"), f"canary-{os.urandom(6).hex()}"
        inet, inet6, unix = socket.AF_INET, socket.AF_INET6, socket.AF_UNIX
        self._sockets = [
            _bound(inet, ("127.0.0.1", 0)),
            _bound(unix, self.unix),
            _bound(unix, f"\0{self.abstract}"),
            _bound(inet, ("127.0.0.1", 0), socket.SOCK_DGRAM),
        ]
        self.port, self.udp = self._sockets[0].getsockname()[1], self._sockets[3].getsockname()[1]
        with contextlib.suppress(OSError):  # not every machine has it
            self._sockets.insert(0, _bound(inet6, ("::1", self.port)))
        self._lock, (self._end, self._ended) = threading.Lock(), socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def look(self) -> int:
        """How many have come. Whoever has connected by now is counted, by whichever thread."""
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(BlockingIOError):
                    self._take(each)
        return self.count

    def _take(self, each: socket.socket) -> None:
        if each.type == socket.SOCK_DGRAM:
            each.recv(1)
            self.count += 1
            return
        peer, _ = each.accept()
        self.count += 1
        with peer, contextlib.suppress(OSError):
            peer.settimeout(1)
            peer.sendall(f"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n{self.mark}\n".encode())
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(4096):
                pass

    def _serve(self) -> None:
        while self._ended not in select.select([*self._sockets, self._ended], [], [])[0]:
            self.look()

    def close(self) -> None:
        self._end.close()
        self._thread.join()
        for each in (*self._sockets, self._ended):
            each.close()


def _bound(family: int, address: object, kind: int = socket.SOCK_STREAM) -> socket.socket:
    sock = socket.socket(family, kind)
    try:
        sock.bind(address)  # type: ignore[arg-type]
        if kind == socket.SOCK_STREAM:
            sock.listen(64)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class Canaries:
    """Everything that is watched. `tokens` are what the table of attempts calls it by."""

    def __init__(self, folder: Path, hermes: Path) -> None:
        self.stem, self.nap = f"canary{os.urandom(5).hex()}", new_mark()
        self.marks: dict[str, str] = {}
        self.user, self.hermes, self.workspace, self.out = folder / "user", hermes, hermes / "workspace", folder / "out"
        self.out.mkdir()
        self._far = [Path(tempfile.mkdtemp(dir=place)) for place in ("/var/tmp", "/dev/shm")]
        self.env = {name: self.mark(name) for name in ENV}
        self.listener = Listener(self.out, self.mark("listener"))
        self.process = subprocess.Popen(["sleep", new_mark()], env={"CANARY": self.mark("process")})
        self._host = socket.gethostname()
        # Where the kernel keeps no keys for us there is none to be read.
        text = self.mark("kernel key").encode()
        self.key = self._call(0, b"user", self.nap.encode(), text, len(text), _SESSION)

    def _call(self, number: int, *args: object) -> int:
        return int(ctypes.CDLL(None).syscall(_KEY_CALLS[number], *args)) if _KEY_CALLS[0] else -1

    def mark(self, name: str) -> str:
        return self.marks.setdefault(name, f"{self.stem}n{len(self.marks)}x")

    def plant(self) -> None:
        """Lay out the files, once there is a home."""
        for base, names in ((self.user, _OF_USER), (self.hermes, _OF_HERMES), (self.workspace, _OF_WORKSPACE)):
            for name in names.split():
                text = f"{self.mark(f'{base.name}/{name}')}\n"
                text = text if base == self.user else f"# {text}"
                _put(base / name, _KEY.format(self.mark("key")) if name == "key.txt" else text)
        for name, text in _REPOSITORY.items():
            _put(self.workspace / ".git" / name, text)
        for folder in (self.out, *self._far):
            _put(folder / "secret", f"{self.mark(str(folder))}\n")
        with open(self.hermes / "config.yaml", "a") as file:
            file.write(f"# {self.mark('config')}\n")
        (self.workspace / "twin").hardlink_to(self.user / ".ssh/id_rsa")
        (self.workspace / "afar").symlink_to(self.out)
        self._before = self._files()

    @property
    def tokens(self) -> dict[str, str]:
        var, shm = map(str, self._far)
        listener = self.listener
        return {
            "@HOME@": str(self.user), "@HERMES@": str(self.hermes), "@WS@": str(self.workspace), "@OUT@": str(self.out),
            "@VAR@": var, "@SHM@": shm, "@PORT@": str(listener.port), "@UDP@": str(listener.udp),
            "@SOCK@": listener.unix, "@ABSTRACT@": listener.abstract, "@PID@": str(self.process.pid),
            "@SLEEP@": self.process.args[1], "@NAP@": self.nap,  # type: ignore[index]
            "@REQUEST_KEY@": str(_KEY_CALLS[1]), "@KEYCTL@": str(_KEY_CALLS[2]),
        }  # fmt: skip

    def substitute(self, text: str) -> str:
        """A text of the table as it is for these canaries."""
        for token, value in self.tokens.items():
            text = text.replace(token, value)
        return _ENCODED.sub(lambda match: _ENCODINGS[match[1]](match[2]), text)

    def touched(self, text: str) -> set[str]:
        """The canaries that were changed, contacted, ended or left behind, and those whose marks a text holds."""
        names = {name for name, mark in self.marks.items() if any(form in text for form in _forms(mark))}
        now = self._files()
        names |= {path for path in {*now, *self._before} if now.get(path) != self._before.get(path)}
        names |= {"a connection"} if self.listener.look() else set()
        names |= {"the process"} if not self._lives() else set()
        names |= {"the host"} if socket.gethostname() != self._host else set()
        names |= {"a word"} if f"won{self.nap}" in text else set()
        return names | ({"left running"} if running(self.nap) else set())

    def _lives(self) -> bool:
        """Whether it is neither dead nor stopped, nor about to be, and as nice as the tests."""
        with contextlib.suppress(OSError):
            about = Path(f"/proc/{self.process.pid}/status").read_text()
            nice = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[16]
            return not re.search(r"^(State:\s+[TtZX]|\w+Pnd:\s+0*[1-9a-f])", about, re.M) and nice == str(os.nice(0))
        return False

    def _files(self) -> dict[str, object]:
        """What lies in every watched place, but for what Hermes itself writes."""
        state: dict[str, object] = {}
        own = re.compile(r"(?:state\.db.*|sandbox/(?:s1|unrecorded-\w+)|cache|logs|gateway.*|workspace)(?:/|\Z)")
        for base in (self.user, self.out, *self._far, self.hermes):
            for path in [base, *sorted(base.rglob("*"))]:
                if base != self.hermes or not own.match(str(path.relative_to(base))):
                    state[str(path)] = _about(path)
        git = self.workspace / ".git"
        names = [self.hermes / name for name in _OF_HERMES.split()] + [
            self.workspace / ".env",
            self.workspace / "key.txt",
        ]
        for path in [*names, git / "config", *sorted((git / "hooks").glob("*")), git / "commondir"]:
            state[str(path)] = _about(path)
        return state

    def close(self) -> None:
        self.listener.close()
        if self.key > 0:
            self._call(2, _UNLINK, self.key, _SESSION)
        for pid in map(int, running(self.nap)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for folder in self._far:
            shutil.rmtree(folder, ignore_errors=True)


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _about(path: Path) -> object:
    """What there is to be changed of a file: its kind, mode, owner and content."""
    try:
        info = path.lstat()
    except OSError:
        return None
    content = b""
    with contextlib.suppress(OSError):
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
    return info.st_mode, info.st_uid, content


def _forms(mark: str) -> Iterator[str]:
    """A mark as it is and as it may be disguised."""
    yield from (mark, mark[::-1], mark.encode().hex(), codecs.encode(mark, "rot13"), mark.upper())
    for shift in range(3):
        whole = base64.b64encode(b"\0" * shift + mark.encode()).decode().rstrip("=")
        yield whole[-(-shift * 4 // 3) : -1]


@pytest.fixture
def canaries(tmp_path: Path, home_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Canaries]:
    """Canaries of a test, and an environment that holds some of them."""
    canaries = Canaries(tmp_path, home_folder)
    for name, value in canaries.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(canaries.user))
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    yield canaries
    canaries.close()
