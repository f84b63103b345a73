"""Statistics on arrays, such as confidence intervals for the results of campaigns. Runs without torch."""

from unsilent.statistics.bounded import Stratum, bounded_mean, ratio_of_means, stratified
from unsilent.statistics.intervals import Interval, clopper_pearson

__all__ = [
    "Interval",
    "Stratum",
    "bounded_mean",
    "clopper_pearson",
    "ratio_of_means",
    "stratified",
]
