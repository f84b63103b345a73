"""Number of loads in this process of a checkpoint that was verified, or of a state into a monitored model.

So that a monitor knows whether a step came soon after a load, and a guard what it cannot go back to.
"""

from __future__ import annotations

_count = _taken = 0


def note_load() -> None:
    """A checkpoint or a state was loaded."""
    global _count
    _count += 1


def loads_so_far() -> int:
    """Number of these loads so far."""
    return _count


def take_loads() -> bool:
    """Whether anything was loaded since this was asked last: before a training, but after the one before it in this process."""
    global _taken
    is_new, _taken = _count > _taken, _count
    return is_new
