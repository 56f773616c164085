"""Events between processes."""
