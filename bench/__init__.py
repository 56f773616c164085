"""Benchmarks: ratios in one run on one machine. They are not tests, and no test measures time."""
