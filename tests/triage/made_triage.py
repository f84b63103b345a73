"""Folders of incidents with quiet series, batches and states, in which a test spoils one thing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from events import made_events, made_incidents
from unsilent.detectors.series import GRADIENT, LOSS, Recording, Series
from unsilent.events.incident_folder import BATCH_FILE, SERIES_FILE, STATE_FILE, write_record
from unsilent.recovery.tensor_files import write_tensors
from unsilent.timeline.stragglers import PARTS
from unsilent.triage import parts

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


# -- optional parts -----------------------------------------------------------------------------------------------------

DUMPS = Path(__file__).parents[1] / "timeline" / "data" / "hang"
"""Of gloo processes with a planted desync; a folder for each case."""


def log(path, rank, *lines, steps=range(80, 92)):
    """What a rank prints: its loss in each step; ``lines`` come after that of step 90."""
    text = [f"step {step} loss {1 / step:.4f} rank {rank}" for step in steps if step <= STEP]
    text += [*lines, *(f"step {step} loss {1 / step:.4f} rank {rank}" for step in steps if step > STEP)]
    (path / f"rank{rank}").mkdir(exist_ok=True)
    (path / f"rank{rank}" / parts.LOG_FILE).write_text("\n".join(text) + "\n")


def flight(path, case):
    """Dumps of two ranks."""
    (path / parts.FLIGHT_FOLDER).mkdir()
    for rank in range(2):
        content = (DUMPS / case / "json" / f"flight-rank{rank}.json").read_bytes()
        (path / parts.FLIGHT_FOLDER / f"rank{rank}.json").write_bytes(content)


def times(ranks=2, late=(), steps=range(80, 100)):
    """Seconds of parts as `parts.TIMELINE_FILE` has them; ``late``: rank, part, first step and by how many seconds."""
    lengths = np.array([0.01, 0.04, 0.03, 0.03, 0.01])
    noise = np.random.default_rng(3).normal(1, 0.02, (ranks, len(steps), len(PARTS)))
    seconds = lengths * noise
    for rank, part, step, more in late:
        seconds[rank, steps.index(step) :, PARTS.index(part)] += more
    return {"schema": 1, "parts": PARTS, "ranks": [*range(ranks)], "steps": [*steps], "seconds": seconds.tolist()}


def timeline(path, **values):
    (path / parts.TIMELINE_FILE).write_text(json.dumps(values or times()))


def configurations(path, now, earlier):
    for name, values in ((parts.CONFIGURATION_FILE, now), (parts.EARLIER_CONFIGURATION_FILE, earlier)):
        (path / name).write_text(json.dumps(values))
