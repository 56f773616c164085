"""Fixtures of the tools' tests: those of the agent's."""

from agent.conftest import house, make_house, one_tls_context, quick, server

__all__ = ["house", "make_house", "one_tls_context", "quick", "server"]
