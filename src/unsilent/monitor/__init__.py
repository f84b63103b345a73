"""The live watch of a training job."""

from unsilent.monitor.guard import Alarm, Guard, GuardStop

__all__ = ["Alarm", "Guard", "GuardStop"]
