"""The agent's tools: the framework, and one module per toolset."""
