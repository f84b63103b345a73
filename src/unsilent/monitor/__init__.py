"""The live watch of a training job. What needs torch is loaded on first use, so that events are read without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.lazy_module import lazy_names

if TYPE_CHECKING:
    from unsilent.events.event_kinds import Alarm
    from unsilent.monitor.actions import MonitorStop
    from unsilent.monitor.alarms import GuardStop, NotRepeatable, RepeatabilityWarning
    from unsilent.monitor.analytic import AnalyticBounds
    from unsilent.monitor.guard import Guard
    from unsilent.monitor.monitor import Monitor
    from unsilent.monitor.settings import MonitorSettings
    from unsilent.monitor.signals.collector import watch_gradient
    from unsilent.monitor.workload import guard_training

_LAZY = {
    "Alarm": "unsilent.events.event_kinds",
    "AnalyticBounds": "unsilent.monitor.analytic",
    "Guard": "unsilent.monitor.guard",
    "GuardStop": "unsilent.monitor.alarms",
    "Monitor": "unsilent.monitor.monitor",
    "MonitorSettings": "unsilent.monitor.settings",
    "MonitorStop": "unsilent.monitor.actions",
    "NotRepeatable": "unsilent.monitor.alarms",
    "RepeatabilityWarning": "unsilent.monitor.alarms",
    "guard_training": "unsilent.monitor.workload",
    "watch_gradient": "unsilent.monitor.signals.collector",
}

__all__ = [
    "Alarm",
    "AnalyticBounds",
    "Guard",
    "GuardStop",
    "Monitor",
    "MonitorSettings",
    "MonitorStop",
    "NotRepeatable",
    "RepeatabilityWarning",
    "guard_training",
    "watch_gradient",
]


__getattr__ = lazy_names(__name__, _LAZY, __all__)
