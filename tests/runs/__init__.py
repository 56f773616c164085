"""Runs: the engine, the log, control, jobs."""
