"""Folders of incidents with quiet series, batches and states, in which a test spoils one thing."""

from __future__ import annotations

import numpy as np
import torch

from events import made_events, made_incidents
from unsilent.detectors.series import GRADIENT, LOSS, Recording, Series
from unsilent.events.incident_folder import BATCH_FILE, SERIES_FILE, STATE_FILE, write_record
from unsilent.recovery.tensor_files import write_tensors

STEPS = range(60, 100)
STEP = 90
SERIES = (Series(GRADIENT, "fc.weight", "l2"), Series(GRADIENT, "fc.bias", "l2"), Series(LOSS, "", "number"))


def values(rank):
    """Numbers about 1, which differ between ranks and steps by some percent: float64[steps, series]."""
    return 1 + 0.05 * np.sin(np.arange(len(STEPS) * len(SERIES)) * 1.7 + rank).reshape(len(STEPS), len(SERIES))


def batch(rank):
    generator = torch.Generator().manual_seed(rank)
    return [[torch.randn(4, 3, generator=generator), torch.arange(4)]]


def state(rate=0.1):
    generator = torch.Generator().manual_seed(7)
    names = {"fc.weight": torch.randn(8, 3, generator=generator), "fc.bias": torch.randn(8, generator=generator)}
    moments = {name: {"exp_avg": value * 0.01} for name, value in names.items()}
    optimizer = {"kind": "Adam", "state": moments, "groups": [{"lr": rate}]}
    return {"model": names, "optimizers": [optimizer], "generators": {"torch": torch.zeros(4)}}


def folder(job, ranks=2, series=None, batches=None, states=None, alarms=None, **more):
    """An incident of step 90 in the folder of a job; what tests give replaces that of a rank."""
    path = job / "incidents" / "90-0a1b2c3d"
    more = {"world_size": ranks, "alarms": (), "verdicts": (), "checkpoints": (), "suspect": -1, **more}
    write_record(path, made_incidents.incident(**more))
    for rank in range(ranks):
        own = path / f"rank{rank}"
        recorded = (series or {}).get(rank, values(rank))
        named = (alarms or {}).get(rank, ())
        write_record(
            own, made_incidents.part(rank, alarms=named, series_steps=tuple(STEPS), state_step=STEP),
        )  # fmt: skip
        seen = np.ones(recorded.shape, np.bool_)
        Recording(SERIES, recorded, seen, np.arange(len(STEPS), dtype=np.float64)).save(own / SERIES_FILE)
        write_tensors(own / BATCH_FILE, (batches or {}).get(rank, batch(rank)))
        write_tensors(own / STATE_FILE, (states or {}).get(rank, state()))
    return path


def spoiled(rank, step, column, value):
    """Series of a rank with one other value."""
    result = values(rank)
    result[STEPS.index(step), column] = value
    return result


def alarm(step=STEP, rank=0, **more):
    return made_events.alarm(step, rank, **{"tensor": "fc.weight", "statistic": "l2", **more})
