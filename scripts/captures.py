"""Write the text captures of docs/captures: `hermes` in tmux, typed at like a person would, with a scripted model."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.model_server import Call, ModelServer, Reply  # noqa: E402
from support.server_thread import serving  # noqa: E402

CAPTURES = ROOT / "docs" / "captures"
COLUMNS, ROWS = 96, 34
SURELY_S = 120.0
# What differs from one time to the next.
_SESSION = re.compile(r"\b20\d{6}_\d{6}_[0-9a-f]{12}\b")
_PRICES = """def price(items):
    total = 0
    for item in items:
        total += item.net
    return total
"""
_PATCH = {"mode": "replace", "path": "prices.py", "old_string": "item.net", "new_string": "item.net * (1 + item.tax)"}
_ANSWER = """`price` adds the tax of each item now:

```python
total += item.net * (1 + item.tax)
```

- [x] `prices.py` changed
- [ ] a test for items without tax
"""


class Tmux:
    """A shell in a tmux of its own."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._socket = f"hermes-captures-{os.getpid()}"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": path, "HERMES_HOME": str(home), "HOME": str(folder), "LANG": "C.UTF-8", "PS1": "$ "}
        shell = ["env", "-i", *(f"{name}={value}" for name, value in env.items()), "TERM=screen-256color"]
        shell += ["bash", "--norc", "--noprofile"]
        size = ("-x", str(COLUMNS), "-y", str(ROWS))
        self._tmux("new-session", "-d", *size, "-c", str(folder), shlex.join(shell))
        self.until("$")

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self._socket, "-f", "/dev/null", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def type(self, text: str, *keys: str) -> None:
        if text:
            self._tmux("send-keys", "-l", text)
        for key in keys:
            self._tmux("send-keys", key)

    def send(self, text: str) -> None:
        self.type(text, "Enter")

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-S", "-").rstrip()

    def until(self, wanted: str | Callable[[str], bool]) -> str:
        end = time.monotonic() + SURELY_S
        while True:
            screen = self.screen()
            if wanted in screen if isinstance(wanted, str) else wanted(screen):
                return screen
            if time.monotonic() > end:
                raise SystemExit(f"not on the screen: {wanted}\n{screen}")
            time.sleep(0.1)

    def close(self) -> None:
        self._tmux("kill-server")


@contextmanager
def shell(model: ModelServer, *, configured: bool = True, more: str = "") -> Iterator[Tmux]:
    folder = Path(tempfile.mkdtemp())
    home, work = folder / "home", folder / "shop"
    home.mkdir(mode=0o700)
    work.mkdir()
    (work / "prices.py").write_text(_PRICES)
    (work / "build").mkdir()
    (work / "run-tests").write_text("#!/bin/sh\necho collecting 14 tests\nexec sleep 60\n")
    (work / "run-tests").chmod(0o755)
    if configured:
        text = (
            f"model: {{default: m, base_url: '{model.url}/v1'}}\nauxiliary: {{title_generation: {{enabled: false}}}}\n"
        )
        (home / "config.yaml").write_text(f"{text}terminal: {{backend: local}}\n{more}")
        (home / "config.yaml").chmod(0o600)
    tmux = Tmux(home, work)
    try:
        yield tmux
    finally:
        tmux.close()
        shutil.rmtree(folder, ignore_errors=True)


def write(name: str, screen: str, model: ModelServer) -> None:
    text = _SESSION.sub("20260101_120000_0123456789ab", screen).replace(f":{model.port}/", ":8080/")
    CAPTURES.mkdir(exist_ok=True)
    (CAPTURES / f"{name}.txt").write_text(text.rstrip() + "\n")
    print(f"docs/captures/{name}.txt")


def chat(tmux: Tmux) -> None:
    tmux.send("hermes")
    tmux.until(lambda screen: " tokens" in screen.rpartition("\n")[2])


def answered(tmux: Tmux) -> str:
    """The screen after a turn, with the prompt below it."""
    tmux.until("tokens in, ")
    return tmux.until(lambda screen: " tokens" in screen.rpartition("\n")[2])


def chat_with_diff(model: ModelServer) -> None:
    with shell(model) as tmux:
        model.script = [
            Reply(tool_calls=[Call("read_file", {"path": "prices.py"})]),
            Reply(tool_calls=[Call("patch", _PATCH)]),
            Reply(text=_ANSWER, continues=False, usage={"input": 1840, "output": 96}),
        ]
        chat(tmux)
        tmux.send("The prices leave out the tax. Mend that.")
        write("chat", answered(tmux), model)


def approval(model: ModelServer) -> None:
    with shell(model) as tmux:
        model.script = [
            Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"})]),
            Reply(text="I keep `build` and leave it out of the archive.", continues=False),
        ]
        chat(tmux)
        tmux.send("Clean up and pack everything.")
        write("approval", tmux.until("allow?"), model)
        tmux.type("n")
        tmux.until("instead:")
        tmux.type("keep it, leave it out of the archive")
        tmux.until("instead: keep it, leave it")
        tmux.type("", "Enter")
        write("approval-denied", answered(tmux), model)


def queue(model: ModelServer) -> None:
    with shell(model, more="approvals: {mode: off}\n") as tmux:
        model.script = [
            Reply(tool_calls=[Call("terminal", {"command": "./run-tests"})]),
            Reply(text="All 14 tests pass.", continues=False),
            Reply(text="Committed.", continues=False),
        ]
        chat(tmux)
        tmux.send("Run the tests.")
        tmux.until("collecting")
        tmux.send("Then commit it.")
        write("queue", tmux.until("1 waiting"), model)


def setup(model: ModelServer) -> None:
    with shell(model, configured=False) as tmux:
        model.models = [
            {"id": f"{vendor}/{size}", "context_length": window}
            for vendor in ("alder", "birch", "cedar")
            for size, window in (("small", 32_768), ("medium", 131_072), ("large", 262_144))
        ]
        model.script = [Reply(text="Hello! How can I help?")]
        tmux.send("hermes setup")
        tmux.until("Which [")
        tmux.send("opnai")
        tmux.until("Did you mean")
        tmux.send(f"{model.url}/v1")
        tmux.until("alder/large")
        tmux.type("lar")
        write("setup-picker", tmux.until(lambda screen: "birch/small" not in screen and "cedar/large" in screen), model)
        tmux.type("", "Enter")
        for question, answer in (("Toolsets to switch off", ""), ("Sandbox:", "local"), ("Make a key", "y")):
            tmux.until(question)
            tmux.send(answer)
        write("setup", tmux.until("Try: hermes chat"), model)


def main() -> None:
    if shutil.which("tmux") is None:
        raise SystemExit("tmux is missing. Try: apt install tmux")
    for capture in (chat_with_diff, approval, queue, setup):
        with serving() as model:
            capture(model)


if __name__ == "__main__":
    main()
