"""Evaluations captured as CUDA graphs, and how faults enter them."""
