"""Chooses the debugging queries to run next on an incident, and executes them."""
