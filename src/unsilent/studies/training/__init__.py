"""What faults do to a training: outcome classes, what foretells the bad ones, training PVF, and what the guard saves."""

from __future__ import annotations
