"""Detects corrupted answers while a model computes them, and repairs what can be repaired."""
