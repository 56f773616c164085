"""The command `hermes`: commands and chat in a terminal, as renderings of the run log."""
