"""Incidents of trainings: shown, executed again offline, and planted to measure what the verdicts on them are worth."""
