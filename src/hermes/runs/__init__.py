"""Runs: their append-only event logs, and the engine that admits, starts, follows and stops them."""
