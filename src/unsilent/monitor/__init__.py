"""Monitoring of a training job while it runs.

Modules that need torch are imported on first use, so that events can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.lazy_module import lazy_names

if TYPE_CHECKING:
    from unsilent.events.event_kinds import Alarm as Alarm
    from unsilent.monitor.actions import MonitorStop as MonitorStop
    from unsilent.monitor.monitor import Monitor as Monitor
    from unsilent.monitor.settings import MonitorSettings as MonitorSettings
    from unsilent.monitor.signals.collector import watch_gradient as watch_gradient

_LAZY = {
    "unsilent.events.event_kinds": ("Alarm",),
    "unsilent.monitor.actions": ("MonitorStop",),
    "unsilent.monitor.monitor": ("Monitor",),
    "unsilent.monitor.settings": ("MonitorSettings",),
    "unsilent.monitor.signals.collector": ("watch_gradient",),
}
__getattr__, __all__ = lazy_names(__name__, _LAZY)
