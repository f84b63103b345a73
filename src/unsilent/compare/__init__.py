"""Compares a deployed model with its original: disagreement, layers, attacks, canaries.

A satellite: nothing below the command line imports it.
"""
