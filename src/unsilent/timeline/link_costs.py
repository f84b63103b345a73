"""What an all-reduce over all ranks costs, from a description or a measurement of the machine (`unsilent placement measure`)."""

from __future__ import annotations

import numpy as np

from unsilent.placement.cost import AlphaBeta, CostModel, traffic
from unsilent.placement.measure import MeasuredTable, fitted_system, load_sweep
from unsilent.placement.system import load_system
from unsilent.timeline.ddp_model import MIB, LinkCost


def link_cost_of_system(path: str) -> LinkCost:
    """The cost by a system of `unsilent placement`: a sweep (.json), a TOML file or a preset; raises ``UsageError``."""
    model: CostModel
    if path.endswith(".json"):
        sweep = load_sweep(path)
        system = fitted_system(sweep)
        model, sizes = MeasuredTable(system, sweep), [row.payload for row in sweep.rows]
    else:
        system = load_system(path)
        model, sizes = AlphaBeta(system), []
    loads = traffic(system, np.arange(system.devices)[None])
    small, large = (model.cost("all-reduce", loads, payload).seconds for payload in (MIB, 2 * MIB))
    per_byte = (large - small) / MIB
    return LinkCost(small - per_byte * MIB, per_byte, min(sizes, default=0.0), max(sizes, default=np.inf))
