"""Workloads that a campaign can run: their interface, the built-in ones, and the loader for user code.

Importing this package imports neither torch nor numpy; `Workload` and `InferenceWorkload` are looked up on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.argument_names import names_arguments
from unsilent.basics.lazy_module import lazy_names
from unsilent.workloads import registry
from unsilent.workloads.registry import load_training
from unsilent.workloads.zoo import HF, TRAININGS, ZOO, WorkloadEntry

if TYPE_CHECKING:
    from unsilent.workloads.base import InferenceWorkload, Workload

__all__ = ["HF", "TRAININGS", "ZOO", "InferenceWorkload", "Workload", "WorkloadEntry", "load", "load_training"]

load = names_arguments(registry.load)
__getattr__, _ = lazy_names(__name__, {"unsilent.workloads.base": ("InferenceWorkload", "Workload")}, __all__)
