"""Trainings of published studies, rebuilt from facts: networks, the workers of a step, and where their injections corrupt."""
