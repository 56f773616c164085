"""Checks of commands, paths, URLs and secrets. Mostly pure functions."""
