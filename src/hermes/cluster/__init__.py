"""Several servers on one machine with their own PostgreSQL and NATS, for trying them out and for tests."""
