"""The guards: what they refuse, and that nothing leads around them."""
