"""The bench counts what the model sends, however the packets are cut."""

from __future__ import annotations

import asyncio

import pytest
from bench.load import Client, chat, connect
from bench.provider import TOKEN, frames, serve


@pytest.mark.parametrize(
    ("say", "stream", "tokens"),
    [("burst-500", True, 500), ("burst-20", False, 20), ("paced-200-20", True, 20), ("tools-0", True, 1)],
)
async def test_bench_client_counts_tokens_of_model(say: str, stream: bool, tokens: int) -> None:
    server, url = await serve()
    client = await connect(url)
    try:
        for _ in range(2):
            answer = await client.ask(chat(say, stream=stream))
            assert (answer.status, answer.tokens) == (200, tokens)
    finally:
        client.close()
        server.close()


class Nowhere(asyncio.Transport):
    def write(self, data: object) -> None:
        pass


@pytest.mark.parametrize("head", [b"Transfer-Encoding: chunked", b"Content-Length: %d"])
async def test_bench_counts_token_once_for_any_packet_cut(head: bytes) -> None:
    body = frames([b'{"content":"%s"}' % TOKEN.encode()] * 2)
    if b"%d" in head:
        head %= len(body)
    else:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    answer = b"HTTP/1.1 200 OK\r\n%s\r\n\r\n%s" % (head, body)
    client = Client()
    client.connection_made(Nowhere())
    for cut in range(1, len(answer)):
        response = client.ask(chat("burst-2"))
        client.data_received(answer[:cut])
        assert not response.done()
        client.data_received(answer[cut:])
        assert response.result().tokens == 2, cut
