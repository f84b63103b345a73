"""Chooses the debugging queries to run next on an incident, by a runbook or a learned order, and executes them."""
