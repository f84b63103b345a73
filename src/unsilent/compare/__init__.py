"""Whether a deployed model still answers as the original did: disagreement, layers, attacks, canaries.

A satellite: nothing below the command line imports it.
"""
