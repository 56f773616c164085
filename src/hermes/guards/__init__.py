"""Verdicts on what goes in and out (secrets; later commands, paths, URLs): pure functions of their arguments."""
