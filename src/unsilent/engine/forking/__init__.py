"""Faulty training runs that are forked from one fault-free run instead of being run from the beginning."""

from unsilent.engine.forking.forks import Forked, ForkEngine
from unsilent.engine.forking.golden import GoldenTraining

__all__ = ["ForkEngine", "Forked", "GoldenTraining"]
