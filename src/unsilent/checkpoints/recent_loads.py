"""Records recent saves of checkpoints in this process, and counts loads of checkpoints and states.

They tell a monitor whether a step came soon after a load, and a guard which states it cannot go back to.
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
        manifest_path: Path of its manifest.
        manifest: The manifest as it was written.
        time: Time of the save, in seconds since 1970.
    """

    path: Path
    manifest_path: Path
    manifest: Manifest
    time: float = field(default_factory=time.time)


def note_save(path: Path, manifest_path: Path, manifest: Manifest) -> None:
    """Record that a checkpoint was saved and verified."""
    _saves.append(RecentSave(path, manifest_path, manifest))


def recent_saves() -> list[RecentSave]:
    """The most recent saves, newest last."""
    return list(_saves)


_count = _taken = 0


def note_load() -> None:
    """Count one load of a checkpoint or a state."""
    global _count
    _count += 1


def loads_so_far() -> int:
    """Number of loads counted so far."""
    return _count


def take_loads() -> bool:
    """Whether anything was loaded since the last call of this function."""
    global _taken
    is_new, _taken = _count > _taken, _count
    return is_new
