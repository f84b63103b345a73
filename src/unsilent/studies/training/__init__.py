"""What faults do to a training: outcome classes, which values precede harm, training PVF, and what the guard saves."""

from __future__ import annotations
