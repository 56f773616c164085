"""The limit: a bare relay that decodes every chunk of the model and writes a new one, and does nothing else."""

from __future__ import annotations

import os
import sys

import aiohttp
import msgspec
import uvloop
from aiohttp import web

decode, encode = msgspec.json.decode, msgspec.json.encode


def application(url: str) -> web.Application:
    """The application; `url` is the model's."""
    sessions: list[aiohttp.ClientSession] = []

    async def opened(_: web.Application) -> None:
        sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        text = decode(body)
        headers = {"Content-Type": "application/json"}
        async with sessions[0].post(f"{url}/chat/completions", data=body, headers=headers) as upstream:
            if not text.get("stream"):
                return web.Response(body=encode(decode(await upstream.read())), content_type="application/json")
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            rest = b""
            while chunk := await upstream.content.readany():
                *events, rest = (rest + chunk).split(b"\n\n")
                await response.write(b"".join([relayed(event) for event in events]))
            return response

    def relayed(event: bytes) -> bytes:
        if event == b"data: [DONE]":
            return b"data: [DONE]\n\n"
        chunk = decode(event[6:])
        chunk["id"] = "chatcmpl-relay"
        return b"data: " + encode(chunk) + b"\n\n"

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.on_startup.append(opened)
    return app


if __name__ == "__main__":
    uvloop.install()
    listener = __import__("socket").create_server(("127.0.0.1", 0), backlog=4096)
    sys.stdout.write(f"listening on http://127.0.0.1:{listener.getsockname()[1]} {os.getpid()}\n")
    sys.stdout.flush()
    web.run_app(application(sys.argv[1]), sock=listener, print=None, access_log=None)
