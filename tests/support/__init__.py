"""What the tests stand on: servers and helpers that are no part of the product."""
