"""First process of a sandbox: builds its file system once, then starts every command inside it.

A program of its own that bubblewrap starts by path in new namespaces, as process 1, with all capabilities there and with
the host's file system as its root: `python -I -S init.py CONTROL_FD`. Requests come over a socket of packets, each a
JSON object in a memory file, with descriptors. Every mount goes from descriptor to descriptor: no path is resolved
through a folder that a command can change.

A command gets a PID namespace and a copy of the mount namespace of its own; it has no capabilities, no descriptor of
this process, and cannot see it.
"""

import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 437, 442
_OPEN_TREE_CLONE, _AT_EMPTY_PATH, _AT_RECURSIVE = 1, 0x1000, 0x8000
_MOVE_EMPTY_PATHS = 0x04 | 0x40
_FSCONFIG_SET_STRING, _FSCONFIG_CREATE = 1, 6
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
_MNT_DETACH = 2
_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL, _SECCOMP_MODE_FILTER, _CAPABILITY_VERSION_3 = 4, 2, 0x20080522

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
# Files of the kernel that obey the root user, which commands are when the server runs as root.
_KERNEL = ("acpi", "bus", "driver", "dynamic_debug", "fs", "irq", "mtrr", "scsi", "sys", "sysrq-trigger", "tty")
_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_AWAITED = {signal.SIGCHLD, *_FORWARDED}
_RESET = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, *_FORWARDED}
_MOUNT_POINT = "/tmp"  # noqa: S108  (covered in this mount namespace only)
_PACKET_BYTES, _FDS_MAX = 4096, 8

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def _syscall(name: str, number: int, *arguments: object) -> int:
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *values), name)


def _call(name: str, *arguments: object) -> int:
    values = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    return _check(getattr(_libc, name)(*values), name)


# ---- mounts by descriptor


def _open_beneath(folder: int, path: str) -> int:
    resolve = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
    how = struct.pack("QQQ", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, 0, resolve)
    return _syscall(path, _OPENAT2, folder, os.fsencode(path.strip("/")) or b".", how, len(how))


def _clone_tree(fd: int, *, read_only: bool, devices: bool = False) -> int:
    """A detached copy of the mounts at this descriptor, without setuid programs and devices."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH | _AT_RECURSIVE
    tree = _syscall("open_tree", _OPEN_TREE, fd, b"", flags)
    attributes = (_ATTR_RDONLY if read_only else 0) | _ATTR_NOSUID | (0 if devices else _ATTR_NODEV)
    _set_attributes(tree, attributes, recursive=True)
    return tree


def _set_attributes(fd: int, attributes: int, *, recursive: bool = False) -> None:
    struct_attr = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    _syscall("mount_setattr", _MOUNT_SETATTR, fd, b"", flags, struct_attr, len(struct_attr))


def _new_mount(kind: str, options: dict[str, str], attributes: int) -> int:
    context = _syscall(kind, _FSOPEN, kind.encode(), 1)
    try:
        for name, value in options.items():
            _syscall(kind, _FSCONFIG, context, _FSCONFIG_SET_STRING, name.encode(), value.encode(), 0)
        _syscall(kind, _FSCONFIG, context, _FSCONFIG_CREATE, None, None, 0)
        return _syscall(kind, _FSMOUNT, context, 1, attributes)
    finally:
        os.close(context)


def _attach(tree: int, target: int) -> None:
    try:
        _syscall("move_mount", _MOVE_MOUNT, tree, b"", target, b"", _MOVE_EMPTY_PATHS)
    finally:
        os.close(tree)
        os.close(target)


class _FileSystem:
    """The root of the sandbox while it is built; `enter` makes it the only root of this process."""

    def __init__(self, memory_bytes: int, sources: "list[str]") -> None:
        self._memory_bytes = memory_bytes
        _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        host = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        # Opened before the new root covers a folder of the host that they may lie in.
        self._sources = {path: _open_beneath(host, path) for path in sources}
        os.close(host)
        self._own_devices: set[int] = set()
        self._sealed: list[str] = []
        tree = self._empty_folder("1m", "0755")
        self._root = os.dup(tree)
        target = os.open(_MOUNT_POINT, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        _attach(tree, target)

    def bind(self, path: str, *, read_only: bool, devices: bool = False) -> None:
        source = self._sources.pop(path)
        target = self._mount_point(path, stat.S_ISDIR(os.fstat(source).st_mode))
        _attach(_clone_tree(source, read_only=read_only, devices=devices), target)
        os.close(source)

    def cover(self, path: str, mode: str) -> None:
        """Make a path read-only or hide it; `rw` leaves it writable, but it cannot be renamed."""
        target = _open_beneath(self._root, path)
        kind = stat.S_IFMT(os.fstat(target).st_mode)
        if kind == stat.S_IFLNK:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if mode != "hide":
            tree = _clone_tree(target, read_only=mode == "ro")
        elif kind == stat.S_IFDIR:
            tree = self._empty_folder("1m", "0755")
            self._sealed.append(path)
        else:
            nothing = _open_beneath(self._root, "/dev/null")
            tree = _clone_tree(nothing, read_only=True, devices=True)
            os.close(nothing)
        _attach(tree, target)

    def in_memory(self, path: str, mode: str = "1777") -> None:
        _attach(self._empty_folder(str(self._memory_bytes), mode), self._mount_point(path, True))

    def of_kernel(self, kind: str, path: str, options: "dict[str, str]") -> None:
        _attach(_new_mount(kind, options, _ATTR_NOSUID), self._mount_point(path, True))

    def link(self, path: str, destination: str) -> None:
        parent = self._mount_point(os.path.dirname(path), True)
        os.symlink(destination, os.path.basename(path), dir_fd=parent)
        os.close(parent)

    def enter(self) -> None:
        for path in ("/dev", *self._sealed, "/"):
            fd = _open_beneath(self._root, path)
            _set_attributes(fd, _ATTR_RDONLY)
            os.close(fd)
        for fd in self._sources.values():
            os.close(fd)
        os.fchdir(self._root)
        os.close(self._root)
        _call("pivot_root", b".", b".")
        _call("umount2", b".", _MNT_DETACH)
        os.chdir("/")

    def _empty_folder(self, size: str, mode: str) -> int:
        tree = _new_mount("tmpfs", {"mode": mode, "size": size}, _ATTR_NOSUID | _ATTR_NODEV)
        self._own_devices.add(os.fstat(tree).st_dev)
        return tree

    def _mount_point(self, path: str, is_folder: bool) -> int:
        """A descriptor of what is mounted on: created where only we can write, elsewhere it must exist."""
        folder, names = os.dup(self._root), [name for name in path.split("/") if name]
        for index, name in enumerate(names):
            if os.fstat(folder).st_dev in self._own_devices:
                try:
                    if is_folder or index < len(names) - 1:
                        os.mkdir(name, 0o755, dir_fd=folder)
                    else:
                        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444, dir_fd=folder))
                except FileExistsError:
                    pass
            inner = _open_beneath(folder, name)
            os.close(folder)
            folder = inner
        return folder


def _build(plan: "Json") -> None:
    devices = [f"/dev/{name}" for name in _DEVICES if os.path.exists(f"/dev/{name}")]
    roots = [path for path, _, is_root in plan["mounts"] if is_root]
    files = _FileSystem(plan["memory_bytes"], [*plan["system"], *devices, *roots])
    for path, destination in plan["links"].items():
        files.link(path, destination)
    for path in plan["system"]:
        files.bind(path, read_only=True)
    files.of_kernel("proc", "/proc", {})
    files.in_memory("/dev", "0755")
    for path in devices:
        files.bind(path, read_only=False, devices=True)
    for name, destination in _LINKS.items():
        files.link(f"/dev/{name}", destination)
    files.of_kernel("devpts", "/dev/pts", {"ptmxmode": "0666", "mode": "0620"})
    files.in_memory("/dev/shm")  # noqa: S108
    files.in_memory("/tmp")  # noqa: S108
    files.link("/var/tmp", "../tmp")  # noqa: S108
    for path, mode, is_root in plan["mounts"]:
        if is_root:
            files.bind(path, read_only=mode == "ro")
        else:
            files.cover(path, mode)
    files.enter()


# ---- commands


def _restrict(limits: "dict[str, int]", seccomp: bytes) -> None:
    """Give up every right that a command must not have, irrevocably."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))
    _call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    _call("capset", struct.pack("II", _CAPABILITY_VERSION_3, 0), bytes(24))
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    if seccomp:
        code = ctypes.create_string_buffer(seccomp, len(seccomp))
        program = struct.pack("HxxxxxxP", len(seccomp) // 8, ctypes.addressof(code))
        _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0)


def _own_proc() -> None:
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
    for path in (f"/proc/{name}".encode() for name in _KERNEL):
        if os.path.exists(path):
            _call("mount", path, path, None, _MS_BIND | _MS_REC, None)
            _call("mount", None, path, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV, None)


def _first_process(request: "Json", stdin: int, output: int, errors: int) -> int:
    """Process 1 of a command: runs it, passes signals on to its group, and ends with it, which kills all it has
    left."""
    for fd, number in ((stdin, 0), (output, 1), (errors, 2)):
        os.dup2(fd, number)
    os.closerange(3, 1024)
    os.setsid()
    _own_proc()
    _restrict(request["limits"], bytes.fromhex(request["seccomp"]))
    command = os.fork()
    if command == 0:
        _become(request)
    _make_group(command)  # here too: the first signal may come before the command has done it itself
    os.closerange(0, 3)
    while True:
        number = signal.sigwait(_AWAITED)
        if number != signal.SIGCHLD:
            _kill(-command, number)
            continue
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 255
            if pid == 0:
                break
            if pid == command:
                code = os.waitstatus_to_exitcode(status)
                return 128 - code if code < 0 else code


def _become(request: "Json") -> None:
    _make_group(0)
    for number in _RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    argv = request["argv"]
    try:
        os.chdir(request["cwd"])
        os.execvpe(argv[0], argv, request["env"])  # noqa: S606
    except (OSError, ValueError) as error:
        os.write(2, f"{argv[0]}: {error}\n".encode(errors="replace"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _make_group(pid: int) -> None:
    try:
        os.setpgid(pid, pid)
    except OSError:
        return


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return


class _Init:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._commands: dict[int, int] = {}
        self._pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def serve(self) -> None:
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(woken, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == woken:
                    os.read(woken, 4096)
                elif not self._handle():
                    return
            self._reap()

    def _handle(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, _FDS_MAX)
        if not data:
            return False
        request = json.loads(data)
        try:
            if "signal" in request:
                pid = next((pid for pid, number in self._commands.items() if number == request["id"]), None)
                if pid is not None:
                    _kill(pid, request["signal"])
            else:
                self._start(request["id"], _content(fds[0]), fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, number: int, request: "Json", fds: "list[int]") -> None:
        try:
            # `unshare` gives the next child a new PID namespace; a second one needs the way back first.
            _call("setns", self._pid_namespace, _CLONE_NEWPID)
            _call("unshare", _CLONE_NEWPID)
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
            try:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    self._child(request, fds)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._commands[pid] = number
            pidfd = os.pidfd_open(pid)
            try:
                self._answer({"id": number}, [pidfd])
            finally:
                os.close(pidfd)
        except OSError as error:
            self._answer({"id": number, "error": str(error)})

    @staticmethod
    def _child(request: "Json", fds: "list[int]") -> None:
        code = 255
        try:
            code = _first_process(request, *fds[1:4])
        except BaseException as error:  # noqa: BLE001  (there is nobody above to tell)
            os.write(2, f"The command could not be started: {error}\n".encode(errors="replace"))
        finally:
            os._exit(code)

    def _reap(self) -> None:
        while self._commands:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._commands.pop(pid, None)
            if number is not None:
                code = os.waitstatus_to_exitcode(status)
                self._answer({"id": number, "code": 128 - code if code < 0 else code})

    def _answer(self, message: "Json", fds: "tuple[int, ...] | list[int]" = ()) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], list(fds))


def _content(fd: int) -> "Json":
    with open(os.dup(fd), "rb") as file:
        file.seek(0)
        content: Json = json.loads(file.read())
    return content


def _listener(port: int) -> "socket.socket":
    """Where commands reach the proxy. A socket stays in the network namespace in which it was made."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    return listener


def main(control_fd: int) -> int:
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    data, fds, _, _ = socket.recv_fds(control, _PACKET_BYTES, _FDS_MAX)
    if not data:
        return 1
    try:
        plan = _content(fds[0])
        # No user namespace, and so no new capability, for anything that runs in here.
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
        _build(plan)
        listener = _listener(plan["proxy_port"])
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return 1
    finally:
        for fd in fds:
            os.close(fd)
    socket.send_fds(control, [b"{}"], [listener.fileno()])
    listener.close()
    _Init(control).serve()
    return 0


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))
