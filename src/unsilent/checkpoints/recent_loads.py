"""Number of loads in this process of a checkpoint that was verified, or of a state into a monitored model.

So that a monitor knows whether a step came soon after a load, and a guard what it cannot go back to.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from unsilent.checkpoints.manifest import Manifest

MOST_SAVES = 5
_saves: deque[RecentSave] = deque(maxlen=MOST_SAVES)


@dataclass(frozen=True)
class RecentSave:
    """One recent save of a checkpoint.

    Attributes:
        path: File or folder of the checkpoint.
        manifest_path: Where its manifest is.
        manifest: The manifest as it was written.
        time: Time of the save, in seconds since 1970.
    """

    path: Path
    manifest_path: Path
    manifest: Manifest
    time: float = field(default_factory=time.time)


def note_save(path: Path, manifest_path: Path, manifest: Manifest) -> None:
    """A checkpoint was saved and verified."""
    _saves.append(RecentSave(path, manifest_path, manifest))


def recent_saves() -> list[RecentSave]:
    """The last ones, the newest last."""
    return list(_saves)


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
