"""A guard around a training loop that undoes faults; parts that need torch are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.lazy_module import lazy_names

if TYPE_CHECKING:
    from unsilent.guard.alarms import GuardStop as GuardStop
    from unsilent.guard.alarms import NotRepeatable as NotRepeatable
    from unsilent.guard.alarms import RepeatabilityWarning as RepeatabilityWarning
    from unsilent.guard.analytic import AnalyticBounds as AnalyticBounds
    from unsilent.guard.guard import Guard as Guard
    from unsilent.guard.workload import guard_training as guard_training

_LAZY = {
    "unsilent.guard.alarms": ("GuardStop", "NotRepeatable", "RepeatabilityWarning"),
    "unsilent.guard.analytic": ("AnalyticBounds",),
    "unsilent.guard.guard": ("Guard",),
    "unsilent.guard.workload": ("guard_training",),
}
__getattr__, __all__ = lazy_names(__name__, _LAZY)
