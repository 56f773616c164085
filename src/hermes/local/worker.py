"""The process that holds the model. A program of its own, started by path: `worker.py '{"path": …}'`

It serves the model on a socket in its working folder until its input ends, which it does with whoever started it.
"""

import fcntl
import json
import os
import sys
from typing import Any

TAKEN, FAILED = 10, 11


def main(options: dict[str, Any]) -> int:
    """Load the model, print `ready`, and serve until the input ends. `TAKEN`: another process serves it already."""
    os.umask(0o077)
    lock = os.open(options["name"] + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return TAKEN
    socket = options["name"] + ".sock"
    if os.path.exists(socket):
        os.unlink(socket)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["path"]
    params.hostnames = [socket]
    params.n_ctx = options["context"] * options["parallel"]
    params.n_parallel = options["parallel"]
    params.cpuparams.n_threads, params.cpuparams_batch.n_threads = options["threads"]
    if options["gpu_layers"] is not None:
        params.n_gpu_layers = options["gpu_layers"]
    # Fitting a model to the memory of a graphics card means to load it twice.
    params.fit_params = len(xllamacpp.get_device_info()) > 1
    params.sleep_idle_seconds = options["idle_seconds"]
    params.slot_save_path = options["states"] + os.sep
    params.verbosity = 1
    try:
        server = xllamacpp.Server(params)
    except (RuntimeError, MemoryError, ValueError) as error:
        print(error, file=sys.stderr)
        return FAILED
    print("ready", flush=True)
    sys.stdin.buffer.read()
    os.unlink(socket)
    del server
    return 0


if __name__ == "__main__":
    os._exit(main(json.loads(sys.argv[1])))
