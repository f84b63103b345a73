"""Detectors: a pure rule on arrays each; what is live around it is in `monitor`."""
