"""Hermes: a self-hosted AI agent that speaks OpenAI's protocols."""

__version__ = "0.2.0"
