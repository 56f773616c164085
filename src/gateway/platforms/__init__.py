"""Aliases of the platforms that the gateway serves."""
