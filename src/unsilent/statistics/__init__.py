"""Arrays in, numbers out: intervals for what campaigns counted. Runs without torch."""

from unsilent.statistics.bounded import Stratum, bounded_mean, stratified
from unsilent.statistics.intervals import Interval, clopper_pearson, wilson

__all__ = ["Interval", "Stratum", "bounded_mean", "clopper_pearson", "stratified", "wilson"]
