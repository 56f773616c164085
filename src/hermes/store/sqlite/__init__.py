"""The store in a SQLite file: one writer thread with group commit, readers beside it."""
