"""Sandboxes for commands, one backend per module."""
