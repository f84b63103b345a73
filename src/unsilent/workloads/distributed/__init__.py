"""Distributed trainings that are resumed from corrupted checkpoints and measured.

Importing this package imports neither torch nor numpy; its classes are looked up on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.lazy_module import lazy_names

if TYPE_CHECKING:
    from unsilent.workloads.distributed.gang import Gang as Gang
    from unsilent.workloads.distributed.rank_processes import GangLost as GangLost
    from unsilent.workloads.distributed.records import ResumeRecord as ResumeRecord

_LAZY = {
    f"{__name__}.gang": ("Gang",),
    f"{__name__}.rank_processes": ("GangLost",),
    f"{__name__}.records": ("ResumeRecord",),
}
__getattr__, __all__ = lazy_names(__name__, _LAZY)
