"""The Go library `go-openai` as seen from the server: its headers, its request bodies, and its rules for reading a stream.

The library is in no package of the system, so these rules stand in for it: a line that begins with neither `data:` nor
`data: {"error":` is kept as a part of an error's text, and only a frame that begins with `{"error":` ends a stream badly.
"""

from __future__ import annotations

import gzip
import http.client
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from clients.drivers import MODEL, OWN_TOOL, PLAIN, Answer, Conversation, How, Refused

_DATA = re.compile(rb"^data:\s*")
_ERROR = re.compile(rb'^data:\s*{"error":')
# Blank and foreign lines between two chunks.
_LINES_BETWEEN_CHUNKS_MAX = 300
PERSON_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "born": {"type": "integer"}},
            "required": ["name", "born"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class GoOpenAITalk(Conversation):
    """`CreateChatCompletion` and `CreateChatCompletionStream` with the transport of Go."""

    chains = False

    def __init__(self, url: str, key: str, api: str) -> None:
        super().__init__(url, key, api)
        self.history: list[dict[str, Any]] = []

    def ask(self, prompt: str, how: How = PLAIN) -> Answer:
        return self._send({"role": "user", "content": prompt}, how)

    def show(self, prompt: str, image: str, how: How = PLAIN) -> str:
        """Put a question beside a picture; the text of its answer."""
        parts = [{"type": "text", "text": prompt}, {"type": "image_url", "image_url": {"url": image, "detail": "auto"}}]
        return self._send({"role": "user", "content": parts}, how).text

    def _send(self, message: dict[str, Any], how: How = PLAIN) -> Answer:
        self.history.append(message)
        result = Answer()
        while True:
            answer, usage = self._step(result, how)
            result.tokens += usage["total_tokens"]
            # A field that holds nothing is left out.
            self.history.append({name: value for name, value in answer.items() if value})
            for call in answer["tool_calls"]:
                output = result.run(call["function"]["name"], call["function"]["arguments"])
                self.history.append({"role": "tool", "content": output, "tool_call_id": call["id"]})
            if not answer["tool_calls"]:
                result.value = json.loads(result.text) if how.schema else None
                return result

    def _step(self, result: Answer, how: How) -> tuple[dict[str, Any], dict[str, int]]:
        begin = [{"role": "system", "content": how.system}] if how.system else []
        body: dict[str, Any] = {"model": MODEL, "messages": [*begin, *self.history], **how.options}
        if how.schema:
            body["response_format"] = PERSON_FORMAT
        if how.tools:
            body["tools"] = [{"type": "function", "function": OWN_TOOL}]
        if how.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        response = self._post(body, how.stream)
        if not how.stream:
            payload = json.loads(_content(response))
            message = payload["choices"][0]["message"]
            result.add([message["content"]] if message["content"] else [], message["content"])
            return {"role": "assistant", "tool_calls": [], **message}, payload["usage"]
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        usage: dict[str, int] = {}
        for chunk in _chunks(response):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                delta = choice["delta"]
                if delta.get("content"):
                    result.add([delta["content"]], delta["content"])
                    answer["content"] += delta["content"]
                for piece in delta.get("tool_calls", []):
                    if piece["index"] == len(answer["tool_calls"]):
                        answer["tool_calls"].append({**piece, "function": {**piece["function"], "arguments": ""}})
                    answer["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        return answer, usage

    def _post(self, body: dict[str, Any], stream: bool) -> http.client.HTTPResponse:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.netloc, timeout=120)
        headers = {
            "User-Agent": "Go-http-client/1.1",
            "Accept-Encoding": "gzip",
            "Authorization": f"Bearer {self.key}",
            "Content-Type": "application/json",
            "Accept": "text/event-stream" if stream else "application/json",
            **({"Cache-Control": "no-cache", "Connection": "keep-alive"} if stream else {}),
        }
        connection.request("POST", place.path + "/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if not 200 <= response.status < 400:
            raise Refused(response.status, json.loads(_content(response))["error"]["message"])
        return response


def _content(response: http.client.HTTPResponse) -> bytes:
    content = response.read()
    return gzip.decompress(content) if response.headers["Content-Encoding"] == "gzip" else content


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The chunks of a stream up to its end; what ends it badly is raised, as far as it can be understood."""
    buffered, between, failed = b"", 0, False
    for line in response:
        if failed:
            break
        stripped = line.strip()
        failed = bool(_ERROR.match(stripped))
        if failed or not _DATA.match(stripped):
            buffered += _DATA.sub(b"", stripped) if failed else stripped
            between += 1
            if between > _LINES_BETWEEN_CHUNKS_MAX:
                raise Refused(None, "stream has sent too many empty messages")
            continue
        data, between = _DATA.sub(b"", stripped), 0
        if data == b"[DONE]":
            return
        yield json.loads(data)
    try:
        raise Refused(None, json.loads(buffered)["error"]["message"])
    except ValueError:
        raise Refused(None, "unexpected end of JSON input") from None
