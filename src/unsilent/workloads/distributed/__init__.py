"""Distributed trainings that are resumed from corrupted checkpoints and measured.

Importing this package imports neither torch nor numpy; its classes are looked up on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.lazy_module import lazy_names

if TYPE_CHECKING:
    from unsilent.workloads.distributed.gang import Gang
    from unsilent.workloads.distributed.rank_processes import GangLost
    from unsilent.workloads.distributed.records import ResumeRecord

__all__ = ["Gang", "GangLost", "ResumeRecord"]


_PACKAGE = "unsilent.workloads.distributed"
_LAZY = {"Gang": f"{_PACKAGE}.gang", "GangLost": f"{_PACKAGE}.rank_processes", "ResumeRecord": f"{_PACKAGE}.records"}
__getattr__ = lazy_names(_PACKAGE, _LAZY, __all__)
