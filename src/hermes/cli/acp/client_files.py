"""Files through the editor: what it has open is read with its unsaved changes, and written where the user sees it."""

from __future__ import annotations

import asyncio
import errno
from collections import OrderedDict
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any

from acp import RequestError
from acp.connection import Connection

from hermes.core.json_types import JsonObject
from hermes.core.limits import ACP_FILE_S_MAX, ACP_FILES_REMEMBERED_MAX
from hermes.core.text import whole_text
from hermes.sandbox.choose import Sandboxes

READ, WRITE = "fs/read_text_file", "fs/write_text_file"


class ClientFiles:
    """What the path guard of a session asks, from threads. While a sandboxed command runs the editor is not asked: the
    command could swap a checked path for a link, which the editor would follow."""

    def __init__(self, connection: Connection, session_id: str, sandboxes: Sandboxes, methods: frozenset[str]) -> None:
        self._connection, self._session_id, self._sandboxes = connection, session_id, sandboxes
        self._methods = methods
        self._loop = asyncio.get_running_loop()
        # The newest texts that were read, by path: what a change began with.
        self.texts: OrderedDict[str, str] = OrderedDict()

    def read(self, path: str) -> str | None:
        answer = self._ask(READ, path=path)
        text = answer.get("content") if answer is not None else None
        if not isinstance(text, str):
            return None
        self.texts[path] = text = whole_text(text)
        self.texts.move_to_end(path)
        while len(self.texts) > ACP_FILES_REMEMBERED_MAX:
            self.texts.popitem(last=False)
        return text

    def write(self, path: str, text: str) -> bool:
        return self._ask(WRITE, path=path, content=text) is not None

    def _ask(self, method: str, **params: str) -> JsonObject | None:
        """The answer of the editor; None where it is not asked, or refuses. Raises OSError where it does not answer."""
        if method not in self._methods:
            return None
        work: Future[Any] = asyncio.run_coroutine_threadsafe(
            self._request(method, {"sessionId": self._session_id, **params}), self._loop
        )
        try:
            return work.result(ACP_FILE_S_MAX)  # type: ignore[no-any-return]
        except NoAnswer:
            work.cancel()
            raise OSError(errno.ETIMEDOUT, "the editor does not answer") from None

    async def _request(self, method: str, params: JsonObject) -> JsonObject | None:
        async with self._sandboxes.quiet() as quiet:
            if not quiet:
                return None
            try:
                answer = await self._connection.send_request(method, params)
            except RequestError:
                return None
        if isinstance(answer, str):  # the reason of a failure, of editors that answer without errors
            return None
        return answer if isinstance(answer, dict) else {}
