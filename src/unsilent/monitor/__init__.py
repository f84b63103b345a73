"""The live watch of a training job."""

from unsilent.monitor.alarms import Alarm, GuardStop
from unsilent.monitor.analytic import Analytic
from unsilent.monitor.guard import Guard

__all__ = ["Alarm", "Analytic", "Guard", "GuardStop"]
