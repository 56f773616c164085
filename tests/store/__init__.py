"""The store, seen from outside: what goes in comes out, on disk as in memory."""
