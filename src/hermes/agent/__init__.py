"""The agent: the turn loop, its parts, and the façade `AIAgent`."""
