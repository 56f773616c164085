"""Persistence: one set of repositories over two database engines, SQLite and PostgreSQL."""
