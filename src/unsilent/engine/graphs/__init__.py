"""Evaluations captured as CUDA graphs, and the injection of faults into them."""
