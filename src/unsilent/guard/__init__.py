"""A guard around a training loop, which undoes faults. What needs torch is loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.lazy_module import lazy_names

if TYPE_CHECKING:
    from unsilent.guard.alarms import GuardStop, NotRepeatable, RepeatabilityWarning
    from unsilent.guard.analytic import AnalyticBounds
    from unsilent.guard.guard import Guard
    from unsilent.guard.workload import guard_training

_LAZY = {
    "AnalyticBounds": "unsilent.guard.analytic",
    "Guard": "unsilent.guard.guard",
    "GuardStop": "unsilent.guard.alarms",
    "NotRepeatable": "unsilent.guard.alarms",
    "RepeatabilityWarning": "unsilent.guard.alarms",
    "guard_training": "unsilent.guard.workload",
}

__all__ = [
    "AnalyticBounds",
    "Guard",
    "GuardStop",
    "NotRepeatable",
    "RepeatabilityWarning",
    "guard_training",
]


__getattr__ = lazy_names(__name__, _LAZY, __all__)
