"""Faulty training runs, forked from one fault-free run instead of run from the start."""

from unsilent.engine.forking.forks import Forked, ForkEngine
from unsilent.engine.forking.golden import GoldenTraining

__all__ = ["ForkEngine", "Forked", "GoldenTraining"]
