"""How many checkpoints this process has loaded and verified, so that a monitor knows whether a step came soon after one."""

from __future__ import annotations

_count = 0


def note_load() -> None:
    """A checkpoint was loaded."""
    global _count
    _count += 1


def loads_so_far() -> int:
    """Checkpoints that were loaded."""
    return _count
