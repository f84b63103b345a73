"""Detectors: rules as pure functions on arrays; `monitor` applies them to a running training."""
