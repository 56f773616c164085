"""An MCP server that gives away what lies in a file, in an answer and in an error: `telling.py FILE`."""

import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("telling", log_level="ERROR")
TEXT = Path(sys.argv[1]).read_text()


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
def tell() -> str:
    """All of it."""
    print(TEXT, file=sys.stderr, flush=True)
    return TEXT


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def table() -> dict[str, str]:
    """The same by line, as names and as values."""
    return {line: line.upper() for line in TEXT.partition("\n\n")[0].splitlines()}


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def fail() -> str:
    """An error that holds it."""
    raise ToolError(TEXT)


if __name__ == "__main__":
    server.run("stdio")
