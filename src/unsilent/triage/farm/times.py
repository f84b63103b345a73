"""Seconds of the parts of each step of a simulated job: drawn, not measured."""

from __future__ import annotations

import numpy as np

from unsilent.detectors.series import Floats
from unsilent.timeline.stragglers import PARTS
from unsilent.triage.farm.planned import PlannedIncident

MEANS = {"loader": 0.002, "forward": 0.03, "early backward": 0.025, "late backward": 0.03, "optimizer": 0.005}
SPREAD, NOISY = 0.05, 4.0
"""Spread of the logarithms, and how much larger it is in all ranks of a job with noisy times."""
LOADER = PARTS.index("loader")


def drawn_seconds(planned: PlannedIncident, steps: int, is_twin: bool) -> Floats:
    """Log-normal around means that are the same in all ranks, float64[ranks, steps, parts]; a cause changes them."""
    rng = np.random.default_rng([planned.seed, 2])
    noise = SPREAD * rng.standard_normal((steps, planned.world_size, len(PARTS))).transpose(1, 0, 2)
    factors = np.ones_like(noise)
    if not is_twin:
        if planned.kind == "noisy time":
            noise[:, planned.step :] *= NOISY
        elif planned.kind == "slow loader":
            factors[planned.rank, planned.step :, LOADER] = 3 + 17 * planned.draws[2]
        elif planned.kind == "slow rank":
            factors[planned.rank, planned.step :, LOADER + 1 :] = 1.3 + 1.2 * planned.draws[2]
    result: Floats = np.array([MEANS[part] for part in PARTS]) * factors * np.exp(noise)
    return result
