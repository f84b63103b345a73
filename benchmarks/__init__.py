"""Benchmarks: against peers and against the floor. Never part of the tests."""
