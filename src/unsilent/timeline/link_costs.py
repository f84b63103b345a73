"""Costs of reductions over all ranks, from a description or measurement of the machine.

Descriptions and measurements have the formats of `unsilent placement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.placement.cost import AlphaBeta, CostModel, StepCost, Traffic
from unsilent.placement.loading import load_system
from unsilent.placement.measure import MeasuredTable, fitted_system, load_sweep
from unsilent.placement.ranking import Reduction, rank_placements
from unsilent.timeline.ddp.model import MIB, LinkCost, fit_link_cost
from unsilent.timeline.step_split import Floats

FLAT = "all-reduce over all devices"
"""Name of the program that DDP runs by default."""
_EVERY = 10**9


@dataclass(frozen=True)
class MeasuredCost(LinkCost):
    """The cost of a collective, interpolated between measured sizes.

    ``latency`` and ``per_byte`` are the coefficients of a fitted line. Beyond the largest size the last slope continues.

    Attributes:
        sizes, seconds: Measured sizes and times, the smallest size first.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, size: Floats) -> Floats:
        """Seconds of collectives of the given sizes."""
        return interpolated(self.sizes, self.seconds, size)


@dataclass(frozen=True)
class InterpolatedTable:
    """A cost model that interpolates between measured sizes.

    ``table`` predicts the cost of collectives that were not measured.
    """

    table: MeasuredTable
    name: str = "interpolated sweep"

    def cost(self, collective: str, traffic: Traffic, payload: float) -> StepCost:
        """Cost of a collective, see `unsilent.placement.cost.CostModel`."""
        predicted = self.table.cost(collective, traffic, payload)
        rows = sorted(self.table.measured(collective, traffic), key=lambda row: row.payload)
        if not rows:
            return predicted
        sizes, seconds = [row.payload for row in rows], [row.seconds for row in rows]
        return replace(predicted, seconds=float(interpolated(sizes, seconds, np.array(float(payload)))))


def interpolated(sizes: Sequence[float], seconds: Sequence[float], size: Floats) -> Floats:
    """Seconds of payloads of the given sizes, interpolated linearly between measured ones.

    Below the smallest measured size, the time of that size is used; above the largest one, the last slope continues.
    """
    slope = seconds[-1] / sizes[-1] if len(sizes) == 1 else (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return np.asarray(np.interp(size, sizes, seconds) + max(slope, 0.0) * np.maximum(size - sizes[-1], 0))


def reduction_costs(path: str, ranks: int) -> dict[str, LinkCost]:
    """The cost of each reduction program by its name in `unsilent placement`, the fastest for 1 MiB first.

    Args:
        path: A system of `unsilent placement`: a sweep (.json), a TOML file or a preset.
        ranks: Number of ranks that reduce; the system must have as many devices.

    Raises:
        UsageError: The system cannot be read, or has another number of devices.
    """
    model: CostModel
    measured: list[int] = []
    if path.endswith(".json"):
        sweep = load_sweep(path)
        system = fitted_system(sweep)
        model, measured = InterpolatedTable(MeasuredTable(system, sweep)), sorted({row.payload for row in sweep.rows})
    else:
        system = load_system(path)
        model = AlphaBeta(system)
    if system.devices != ranks or ranks < 2:
        raise UsageError(
            f"--system {path} has {system.devices:,} devices, but the job has {ranks:,} ranks; expected a system of as many, and "
            "of 2 or more"
        )

    def seconds(payload: float) -> dict[str, float]:
        ranking = rank_placements(system, {"data": ranks}, [Reduction(("data",), payload)], model, top=_EVERY)
        return {step.text(system): step.seconds for step in ranking.placements[0].programs[0]}

    if not measured:
        small, large = seconds(MIB), seconds(2 * MIB)  # a latency and a cost for each byte
        return {
            name: LinkCost(2 * small[name] - large[name], (large[name] - small[name]) / MIB, 0.0, np.inf)
            for name in small
        }
    # parts of a payload, which are sent inside groups, have a kink at multiples of a measured size
    sizes = sorted({size * part for size in measured for part in range(1, ranks + 1) if ranks % part == 0})
    of_size = [seconds(size) for size in sizes]
    result = dict[str, LinkCost]()
    for name in of_size[0]:
        taken = tuple(of[name] for of in of_size)
        line = fit_link_cost(np.array(sizes, float), np.array(taken))
        result[name] = MeasuredCost(line.latency, line.per_byte, measured[0], measured[-1], tuple(sizes), taken)
    return result
