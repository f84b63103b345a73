"""Incidents of trainings: reports on them, repeated execution of their steps, and planted ones to test verdicts."""
