"""Adapted copies of a model, as used in deployment: quantised, pruned, in 16 bits, compiled."""

from unsilent.compare.adapters.names import ADAPTERS, adapt

__all__ = ["ADAPTERS", "adapt"]
