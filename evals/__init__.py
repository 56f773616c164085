"""How well the local model does what it is asked."""
