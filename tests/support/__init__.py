"""Servers and helpers of the tests."""
