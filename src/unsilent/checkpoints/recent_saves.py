"""Checkpoints that this process saved and verified last: what the record of an incident names."""

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
