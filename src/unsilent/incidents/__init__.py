"""Incidents of trainings: reports, repeated execution of their steps, and planted incidents."""
