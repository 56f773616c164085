"""A stand-in for the docker client: it records its arguments, and runs commands in namespaces as a container would.

Its containers are files in the folder that DOCKER_CONFIG names. Nothing of an image is there but this machine.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["DOCKER_CONFIG"])
FLAGS = {"--detach", "--rm", "--init", "--read-only", "--force", "--all"}
SETSID = shutil.which("setsid") or ""
APART = ["--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc"]


def options_of(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    options: dict[str, list[str]] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("--"):
        name = rest.pop(0)
        options.setdefault(name, []).append("" if name in FLAGS else rest.pop(0))
    return options, rest


def run(options: dict[str, list[str]], rest: list[str]) -> int:
    command = ["unshare", *APART, sys.executable, "-I", "-S", __file__, "init", options["--entrypoint"][0], *rest[1:]]
    if (FOLDER / "broken").exists():
        sys.stderr.write("docker: Error response from daemon: no such image\n")
        return 125
    if "--detach" not in options:
        return subprocess.run(command, check=False).returncode
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    outer = subprocess.Popen(command, start_new_session=True, **quiet)
    keeper = Path(rest[-1])
    while not keeper.exists() or not keeper.read_text().strip():
        time.sleep(0.001)
    inner = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0])
    labels = dict(label.split("=", 1) for label in options.get("--label", []))
    name = options["--name"][0]
    (FOLDER / f"{name}.json").write_text(json.dumps({"inner": inner, "outer": outer.pid, "labels": labels}))
    print(name)
    return 0


def init(_: dict[str, list[str]], rest: list[str]) -> int:
    """The first process of a container, which buries the others."""
    first = os.fork()
    if first == 0:
        os.execvp(rest[0], rest)
    while True:
        pid, status = os.wait()
        if pid == first:
            return os.waitstatus_to_exitcode(status)


def container(name: str) -> dict | None:
    try:
        return json.loads((FOLDER / f"{name}.json").read_text())
    except FileNotFoundError:
        return None


def execute(options: dict[str, list[str]], rest: list[str]) -> int:
    state = container(rest[0])
    if state is None:
        sys.stderr.write(f"Error response from daemon: No such container: {rest[0]}\n")
        return 1
    if os.readlink(f"/proc/{state['inner']}/ns/pid") == os.readlink("/proc/self/ns/pid"):
        return 1  # nothing is ever run outside of a container
    lines = [line for file in options.get("--env-file", []) for line in Path(file).read_text().splitlines()]
    into = ["nsenter", "--preserve-credentials", "-t", str(state["inner"]), "-U", "-p", "-m", "--"]
    env = ["env", "-i", f"PATH={os.environ['PATH']}", *lines, *options.get("--env", [])]
    os.closerange(3, 100)
    folder = options.get("--workdir", ["/"])[0]
    # As a real one: a session of its own, which does not end with the client nor ignores what that ignores.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execvp(into[0], [*into, *env, SETSID, "/bin/sh", "-c", 'cd "$0" && exec "$@"', folder, *rest[1:]])
    raise AssertionError


def remove(options: dict[str, list[str]], rest: list[str]) -> int:
    state = container(rest[0])
    if state is not None:
        (FOLDER / f"{rest[0]}.json").unlink(missing_ok=True)
        try:
            os.kill(state["inner"], signal.SIGKILL)
        except ProcessLookupError:
            return 0
        while Path(f"/proc/{state['inner']}").exists():
            time.sleep(0.001)
    return 0


def inspect(options: dict[str, list[str]], rest: list[str]) -> int:
    state = container(rest[0])
    print("true" if state and Path(f"/proc/{state['inner']}").exists() else "false")
    return 0


def ps(options: dict[str, list[str]], rest: list[str]) -> int:
    name, value = options["--filter"][0].removeprefix("label=").split("=", 1)
    for file in sorted(FOLDER.glob("*.json")):
        labels = json.loads(file.read_text())["labels"]
        if labels.get(name) == value:
            print(file.stem, labels["hermes.holder"])
    return 0


def main() -> int:
    if sys.argv[1] != "init":
        with open(FOLDER / "calls", "a") as file:
            file.write(json.dumps(sys.argv[1:]) + "\n")
    actions = {"init": init, "run": run, "exec": execute, "rm": remove, "inspect": inspect, "ps": ps}
    return actions[sys.argv[1]](*options_of(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
