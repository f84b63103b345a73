"""Trainings of several processes under a strategy, which are resumed from altered checkpoints and measured.

Importing this package imports neither torch nor numpy; its classes are looked up on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unsilent.errors import missing_name_error

if TYPE_CHECKING:
    from unsilent.workloads.distributed.gang import Gang
    from unsilent.workloads.distributed.rank_processes import GangLost
    from unsilent.workloads.distributed.records import ResumeRecord

__all__ = ["Gang", "GangLost", "ResumeRecord"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise missing_name_error(__name__, name, __all__)
    from unsilent.workloads.distributed import gang, rank_processes, records

    return {"Gang": gang.Gang, "GangLost": rank_processes.GangLost, "ResumeRecord": records.ResumeRecord}[name]
