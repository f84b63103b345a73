"""What reductions over all ranks cost, from a description or a measurement of the machine (`unsilent placement measure`)."""

from __future__ import annotations

import numpy as np

from unsilent.errors import UsageError
from unsilent.placement.cost import AlphaBeta, CostModel
from unsilent.placement.measure import MeasuredTable, fitted_system, load_sweep
from unsilent.placement.ranking import Reduction, rank_placements
from unsilent.placement.system import load_system
from unsilent.timeline.ddp_model import MIB, LinkCost

FLAT = "all-reduce over all devices"
"""Name of the program that DDP runs by default."""
_EVERY = 10**9


def reduction_costs(path: str, ranks: int) -> dict[str, LinkCost]:
    """The cost of each reduction program, by its name in `unsilent placement`; the fastest for a MiB first.

    Args:
        path: A system of `unsilent placement`: a sweep (.json), a TOML file or a preset.
        ranks: That reduce; the system has as many devices.

    Raises:
        UsageError: it cannot be read, or has another number of devices.
    """
    model: CostModel
    if path.endswith(".json"):
        sweep = load_sweep(path)
        system = fitted_system(sweep)
        model, sizes = MeasuredTable(system, sweep), [row.payload for row in sweep.rows]
    else:
        system = load_system(path)
        model, sizes = AlphaBeta(system), []
    if system.devices != ranks or ranks < 2:
        raise UsageError(
            f"--system {path} has {system.devices:,} devices, but the job has {ranks:,} ranks; expected a system of as many, and "
            "of 2 or more"
        )

    def seconds(payload: float) -> dict[str, float]:
        ranking = rank_placements(system, {"data": ranks}, [Reduction(("data",), payload)], model, top=_EVERY)
        return {one.text(system): one.seconds for one in ranking.placements[0].programs[0]}

    small, large = seconds(MIB), seconds(2 * MIB)  # both models are a latency and so much for each byte
    smallest, largest = min(sizes, default=0.0), max(sizes, default=np.inf)
    return {
        name: LinkCost(2 * small[name] - large[name], (large[name] - small[name]) / MIB, smallest, largest)
        for name in small
    }
