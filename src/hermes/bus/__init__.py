"""How work and live events travel between the parts of one process, or between processes."""
