"""The live watch of a training job. What needs torch is loaded on first use, so that events are read without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.lazy_module import lazy_names

if TYPE_CHECKING:
    from unsilent.events.event_kinds import Alarm
    from unsilent.monitor.actions import MonitorStop
    from unsilent.monitor.monitor import Monitor
    from unsilent.monitor.settings import MonitorSettings
    from unsilent.monitor.signals.collector import watch_gradient

_LAZY = {
    "Alarm": "unsilent.events.event_kinds",
    "Monitor": "unsilent.monitor.monitor",
    "MonitorSettings": "unsilent.monitor.settings",
    "MonitorStop": "unsilent.monitor.actions",
    "watch_gradient": "unsilent.monitor.signals.collector",
}

__all__ = [
    "Alarm",
    "Monitor",
    "MonitorSettings",
    "MonitorStop",
    "watch_gradient",
]


__getattr__ = lazy_names(__name__, _LAZY, __all__)
