"""The live watch of a training job. What needs torch is loaded on first use, so that events are read without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsilent.monitor.alarms import Alarm, GuardStop, NotRepeatable, RepeatabilityWarning
    from unsilent.monitor.analytic import AnalyticBounds
    from unsilent.monitor.guard import Guard
    from unsilent.monitor.workload import guard_training

_LAZY = {
    "Alarm": "unsilent.monitor.alarms",
    "AnalyticBounds": "unsilent.monitor.analytic",
    "Guard": "unsilent.monitor.guard",
    "GuardStop": "unsilent.monitor.alarms",
    "NotRepeatable": "unsilent.monitor.alarms",
    "RepeatabilityWarning": "unsilent.monitor.alarms",
    "guard_training": "unsilent.monitor.workload",
}

__all__ = ["Alarm", "AnalyticBounds", "Guard", "GuardStop", "NotRepeatable", "RepeatabilityWarning", "guard_training"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'unsilent.monitor' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
