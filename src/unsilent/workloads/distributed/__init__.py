"""Trainings of several processes under a strategy, which are resumed from altered checkpoints and measured."""

from __future__ import annotations

from unsilent.workloads.distributed.gang import Gang
from unsilent.workloads.distributed.rank_processes import GangLost
from unsilent.workloads.distributed.records import ResumeRecord

__all__ = ["Gang", "GangLost", "ResumeRecord"]
