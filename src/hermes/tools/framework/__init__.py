"""Shared by all tools: definitions, rounds of calls, approvals, limits, and resources."""
