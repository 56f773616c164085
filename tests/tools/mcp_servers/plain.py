"""An MCP server of the official SDK: `plain.py stdio`, or `plain.py http PORT [json]`."""

import os
import sys

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp_types import ToolAnnotations
from pydantic import BaseModel

server = MCPServer("plain", log_level="ERROR")
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63606060600000"
    "00050001a5f645400000000049454e44ae426082"
)


class Sum(BaseModel):
    total: int


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> Sum:
    """Add two numbers."""
    return Sum(total=a + b)


@server.tool(annotations=ToolAnnotations(destructive_hint=False, idempotent_hint=True))
def echo(text: str) -> str:
    """Say it again."""
    return text


@server.tool(structured_output=False)
def erase(what: str) -> str:
    """Delete something for good."""
    return f"{what} is gone"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def picture() -> Image:
    """One pixel."""
    return Image(data=PIXEL, format="png")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def album(count: int) -> list[Image]:
    """Many of them, and one that is none."""
    return [*[Image(data=PIXEL, format="png")] * count, Image(data=b"no image", format="png")]


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def fail() -> str:
    """Never works."""
    raise ValueError("the well is dry")


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
def environment() -> str:
    """The names of all variables."""
    return " ".join(sorted(os.environ))


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
async def grow(ctx: Context) -> str:
    """Have one tool more."""
    server.add_tool(echo, name="grown", description="A new one.")
    await ctx.notify_tools_changed()
    return "grown"


@server.resource("note://today")
def today() -> str:
    return "Buy milk."


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]), json_response="json" in sys.argv)
