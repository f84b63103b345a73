"""Plans an anomaly of any kind of fault in a small training, to test verdicts and the ranking of queries.

    incident = plant("device", probability=0.1, world_size=4, seed=7, workload="convolution")
    verdict = run_planted(incident)                # in each rank: unsilent.incidents.planted_job

These five values determine an incident: its variety, rank, step, and the numbers from which its fault is drawn.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import get_args

import numpy as np

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.options import check_count
from unsilent.recovery.fault_codes import FaultKind

VARIETIES: dict[FaultKind, tuple[str, ...]] = {
    "transient": ("one element", "every 8th element"),
    "device": ("one element", "every 8th element"),
    "checkpoint": ("flipped bit",),
    "data": ("NaN", "exchanged labels", "inputs times 1e6"),
    "numerics": ("overflow", "loss scale"),
    "benign": ("large weights", "learning rate"),
}
"""Varieties of an incident of each kind:

- *transient* fault, or fault of a *device*: the device computes one product wrongly, in one element or in every 8th;
- *checkpoint*: one bit of a parameter is flipped in the state that is loaded before the step;
- *data*: one element of the batch is NaN, every sample has the label of another class, or inputs are a million times too large;
- *numerics*: a float16 operation overflows in a correct computation, or the loss scale is too large for float16;
- *benign*: samples of a rare class, with 100 times the weight, or 1,000 times the learning rate from this step on.
"""
WORKLOADS = ("convolution", "transformer")
FIRST_STEPS = (44, 60)
"""The anomaly begins in one of these steps: the rules have seen enough by then."""


@dataclass(frozen=True)
class PlantedIncident:
    """The plan of an anomaly in one training, which determines it fully.

    Attributes:
        kind: Kind that a verdict should name.
        variety: One of `VARIETIES`.
        probability: Probability of a fault in one step on a faulty device; 1 for other kinds.
        world_size: Number of ranks.
        seed: Seed of the training and of the anomaly.
        workload: One of `WORKLOADS`.
        rank: Rank of the device or batch; a checkpoint or a learning rate is that of all ranks.
        step: Step in which the anomaly begins.
        draws: Numbers from 0 to 1 that choose the operation or tensor, the element and the bit.
        seen_in_float64: Whether a faulty device also computes wrongly in float64.
    """

    kind: FaultKind
    variety: str
    probability: float
    world_size: int
    seed: int
    workload: str
    rank: int
    step: int
    draws: tuple[float, float, float]
    seen_in_float64: bool


def plant(
    kind: FaultKind, *, probability: float = 1.0, world_size: int = 1, seed: int = 0, workload: str = "convolution"
) -> PlantedIncident:
    """Plan an incident with a fault of the given kind; equal arguments give equal plans.

    Args:
        kind: Kind of fault; an incident is planted for each but ``undetermined``.
        probability: Probability of a fault in one step on a faulty device; below 1 only for ``device``.
        world_size: Number of ranks.
        seed: Seed of the training and of the anomaly.
        workload: ``convolution`` or ``transformer``, with steps of milliseconds.

    Raises:
        UsageError: A name does not exist, or a number is out of range.
    """
    if kind not in VARIETIES:
        raise unknown_name_error(
            "kind of incident", kind, [known_kind for known_kind in get_args(FaultKind) if known_kind in VARIETIES]
        )
    if workload not in WORKLOADS:
        raise unknown_name_error("workload of planted incidents", workload, WORKLOADS)
    if not 0 < probability <= 1 or (probability < 1 and kind != "device"):
        raise UsageError(
            f"probability is {probability:g} for kind {kind!r}; expected a number above 0 and at most 1, and 1 for kinds "
            "other than device"
        )
    check_count("world_size", world_size, 1, 64)
    rng = np.random.default_rng([check_count("seed", seed, 0, 2**32), zlib.crc32(f"{kind} {workload}".encode())])
    varieties = VARIETIES[kind]
    return PlantedIncident(
        kind, varieties[seed % len(varieties)], probability, world_size, seed, workload,
        rank=int(rng.integers(world_size)), step=int(rng.integers(*FIRST_STEPS)),
        draws=(float(rng.random()), float(rng.random()), float(rng.random())), seen_in_float64=bool(rng.integers(2)),
    )  # fmt: skip
