"""MCP servers to test against: two of the official SDK, and one that misbehaves on demand."""
