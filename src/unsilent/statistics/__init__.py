"""Arrays in, numbers out: intervals for what campaigns counted. Runs without torch."""

from unsilent.statistics.intervals import Interval, clopper_pearson, clustered, combine, wilson

__all__ = ["Interval", "clopper_pearson", "clustered", "combine", "wilson"]
