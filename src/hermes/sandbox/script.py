"""Runs one script, and is the module `hermes_tools` to it. A program of its own: `script.py CWD NAMES`

It is copied into a folder beside the script and the socket. Whatever the script writes to its standard error goes
through one connection, its calls of tools through another; a call is a line of JSON, and so is its answer.
"""

import json
import os
import socket
import sys
import threading
import traceback
import types
from typing import Any

_one_at_a_time = threading.Lock()


def _connect(purpose: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("socket")
    connection.sendall(purpose + b"\n")
    return connection


def _function(name: str, parameters: list[str], wire: Any) -> Any:
    def call(*args: Any, **keywords: Any) -> Any:
        if len(args) > len(parameters):
            raise TypeError(f"{name} takes {len(parameters)} arguments")
        request = json.dumps({"name": name, "arguments": {**dict(zip(parameters, args)), **keywords}})  # noqa: B905
        with _one_at_a_time:
            wire.write(request.encode() + b"\n")
            wire.flush()
            answer = wire.readline()
        if not answer:
            raise ConnectionError("Hermes does not listen any more")
        return json.loads(answer)

    call.__name__ = name
    return call


def main(cwd: str, names: str) -> int:
    folder = os.path.dirname(os.path.abspath(__file__))
    os.chdir(folder)
    errors, wire = _connect(b"errors"), _connect(b"calls").makefile("rwb")
    os.dup2(errors.fileno(), 2)
    errors.close()
    path = os.path.join(folder, "script.py")
    with open(path, encoding="utf-8") as file:
        source = file.read()
    tools, script = types.ModuleType("hermes_tools"), types.ModuleType("__main__")
    for name, parameters in json.loads(names).items():
        setattr(tools, name, _function(name, parameters, wire))
    script.__file__ = path
    sys.modules["hermes_tools"], sys.modules["__main__"] = tools, script
    sys.argv = [path]
    sys.path[0] = ""
    os.chdir(cwd)
    try:
        exec(compile(source, path, "exec"), script.__dict__)  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  (told as Python does, without this file)
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace.tb_next if trace else None)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
