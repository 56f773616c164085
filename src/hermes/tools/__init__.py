"""What the agent can do: the registry, toolsets, the tool round, and one module per toolset."""
