"""Arrays in, numbers out: intervals for what campaigns counted. Runs without torch."""

from unsilent.statistics.intervals import Interval, Method, clopper_pearson, clustered, combine, wilson

__all__ = ["Interval", "Method", "clopper_pearson", "clustered", "combine", "wilson"]
