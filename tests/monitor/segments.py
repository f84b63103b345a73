"""Where a guard goes back to."""

from __future__ import annotations

from unsilent.guard.guard_plan import SNAPSHOT_INTERVAL


def oldest_kept(step, every=SNAPSHOT_INTERVAL):
    """The step before which the oldest of two states was kept, at the end of this step of a loop that begins with 0."""
    return max(0, step // every - 1) * every


def executed_again(step, every=SNAPSHOT_INTERVAL):
    """Steps that a fault of this step leads to: those since the oldest state, twice."""
    return (step + 1 - oldest_kept(step, every)) * 2
