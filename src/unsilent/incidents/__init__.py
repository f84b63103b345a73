"""Reports on incidents of trainings, repeated execution of their steps, and planted incidents to test verdicts."""
