"""What the model has read before any conversation begins, kept in a file beside it: read once, restored from then on."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from hermes.core.home import FILE_MODE, make_private_folder, private_opener
from hermes.core.json_types import JsonObject
from hermes.core.limits import LOCAL_STATES_MAX
from hermes.http_client.client import HttpClient
from hermes.http_client.exchange import Timeouts, TransportError
from hermes.local import runtime_version

log = logging.getLogger(__name__)
_S_MAX = 600.0
_SUFFIX = ".state"


class PrefixState:
    """The state of one worker. A file is known by model, prefix and runtime, and its name holds the digest of its data,
    so that one that is damaged, of somebody else, or open to others is not used."""

    def __init__(self, options: JsonObject) -> None:
        self._folder, self._slots = Path(options["states"]), range(options["parallel"])
        self._idle_s = options["idle_seconds"]
        model = Path(options["path"])
        facts = model.stat()
        self._about = [runtime_version(), model.name, facts.st_size, facts.st_mtime_ns, options["context"]]
        self._ready = ""
        self._used_at = 0.0

    async def prepare(self, http: HttpClient, messages: list[JsonObject], reads: Callable[[], None]) -> None:
        """Let the model have read these messages; `reads` is called when it has to."""
        key = hashlib.sha256(json.dumps([*self._about, messages]).encode()).hexdigest()[:16]
        # What was idle for long has forgotten everything.
        was_idle = 0 < self._idle_s <= time.monotonic() - self._used_at
        self._used_at = time.monotonic()
        if key == self._ready and not was_idle:
            return
        self._ready = key
        try:
            file = await asyncio.to_thread(self._valid_file, key)
            if file is None or not await self._restore(http, file):
                reads()
                await self._read(http, key, messages)
        except (TransportError, OSError) as error:  # the request itself will tell
            log.warning("the state of the local model was not kept: %s", error)

    def _valid_file(self, key: str) -> Path | None:
        for file in self._folder.glob(f"{key}-*{_SUFFIX}"):
            if self._name(key, file) == file.name:
                os.utime(file)
                return file
            file.unlink(missing_ok=True)
        return None

    @staticmethod
    def _name(key: str, file: Path) -> str | None:
        """The name that its data gives the file; None if it is not a file of ours alone."""
        try:
            with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW)) as data:
                facts = os.fstat(data.fileno())
                if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
                    return None
                return f"{key}-{hashlib.file_digest(data, 'sha256').hexdigest()[:32]}{_SUFFIX}"
        except OSError:
            return None

    async def _restore(self, http: HttpClient, file: Path) -> bool:
        done = [await _post(http, f"/slots/{slot}?action=restore", {"filename": file.name}) for slot in self._slots]
        return all(done)

    async def _read(self, http: HttpClient, key: str, messages: list[JsonObject]) -> None:
        # The empty message at the end is where the conversation begins.
        body = {"messages": [*messages, {"role": "user", "content": ""}], "max_tokens": 1, "cache_prompt": True}
        new = f"{key}.new"
        make_private_folder(self._folder)
        os.close(private_opener(self._folder / new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        was_read = await _post(http, "/v1/chat/completions", {**body, "id_slot": 0})
        if was_read and await _post(http, "/slots/0?action=save", {"filename": new}):
            await asyncio.to_thread(self._keep, key)
        (self._folder / new).unlink(missing_ok=True)

    def _keep(self, key: str) -> None:
        new = self._folder / f"{key}.new"
        os.chmod(new, FILE_MODE)
        if name := self._name(key, new):
            new.rename(self._folder / name)
        files = sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[LOCAL_STATES_MAX:]:
            file.unlink(missing_ok=True)


async def _post(http: HttpClient, path: str, body: JsonObject) -> bool:
    headers = {"Content-Type": "application/json"}
    limits = Timeouts(_S_MAX, _S_MAX)
    async with http.send("POST", f"http://local{path}", headers, json.dumps(body).encode(), limits) as answer:
        await answer.body()
        return answer.status == 200
