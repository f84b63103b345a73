"""What is done after an alarm."""

from unsilent.recovery.ring import SnapshotRing

__all__ = ["SnapshotRing"]
