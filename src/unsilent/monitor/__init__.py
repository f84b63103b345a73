"""The live watch of a training job."""

from unsilent.monitor.alarms import GuardStop, NotRepeatable, RepeatabilityWarning
from unsilent.monitor.analytic import AnalyticBounds
from unsilent.monitor.events import Alarm
from unsilent.monitor.guard import Guard
from unsilent.monitor.workload import guard_training

__all__ = ["Alarm", "AnalyticBounds", "Guard", "GuardStop", "NotRepeatable", "RepeatabilityWarning", "guard_training"]
