"""Runs: their events, their append-only log, and the engine that admits, starts, follows and stops them."""
