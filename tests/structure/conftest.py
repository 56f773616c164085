"""Fixtures of the agent's tests, for these as well."""

from agent.conftest import harness, make_harness, one_tls_context, quick, server

__all__ = ["harness", "make_harness", "one_tls_context", "quick", "server"]
