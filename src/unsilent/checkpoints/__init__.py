"""Checkpoint files: locating elements, editing them in place with undo, and comparing two checkpoints."""

from __future__ import annotations

from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.corrupting import CheckpointEdit, corrupt, corrupt_by_settings, replay
from unsilent.checkpoints.drawing import DrawOptions
from unsilent.checkpoints.editing import undo_edit

__all__ = ["Checkpoint", "CheckpointEdit", "DrawOptions", "corrupt", "corrupt_by_settings", "replay", "undo_edit"]
