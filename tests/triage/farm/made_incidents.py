"""Small incidents of the farm."""

from __future__ import annotations

from unsilent.triage.bundle import Bundle
from unsilent.triage.farm.planned import ALL_RANKS_ALIKE, PlannedIncident
from unsilent.triage.farm.record import simulate

STEP, RANK = 44, 1


def planned(family, kind, *, size=0.0, **more):
    """Of rank 1 of 2; ``size``: 0 takes the highest bit of the exponent."""
    rank = -1 if kind in ALL_RANKS_ALIKE else RANK
    fields = {
        "number": 0, "workload": "mlp", "world_size": 2, "rank": rank, "step": STEP, "seed": 5, "draws": (0.1, 0.3, size, 0.5),
    }  # fmt: skip
    return PlannedIncident(family=family, kind=kind, **{**fields, **more})


def incident(folder, *words, is_twin=False, step=None, **more):
    """The bundle of a simulated incident."""
    own = folder / ("twin" if is_twin else "incident")
    assert simulate(planned(*words, **more), own, is_twin, step) >= STEP
    return Bundle(own)


def missing(bundle):
    """Sentences about what cannot be read."""
    return [one for part in (bundle.parts, bundle.series, bundle.batches, bundle.states) for one in part()[1]]
