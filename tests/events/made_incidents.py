"""Folders of incidents that no job wrote."""

from __future__ import annotations

import json

import numpy as np

from events import made_events as made
from unsilent.detectors.series import GRADIENT, LOSS, Recording, Series
from unsilent.events.incident_folder import (
    SERIES_FILE,
    Incident,
    RankPart,
    SavedCheckpoint,
    write_record,
)

STEPS = range(80, 100)


def incident(**more):
    saved = SavedCheckpoint(
        path="runs/80.pt", step=80, time=made.BEGAN, manifest="runs/80.pt.manifest.json", files={"80.pt": "ab"}
    )
    fields = {
        "run": "0a1b2c3d", "step": 90, "suspect": 1, "reason": "own history", "tensor": "gradient fc.weight l2", "host": "node-7",
        "device": "cuda:1", "world_size": 2, "time": made.BEGAN, "settings": {"preset": "robust-z", "rules": ("robust-z",)},
        "versions": {"torch": "2.13.0"}, "verdicts": (made.verdict(90), made.verdict(91)), "checkpoints": (saved,),
    }  # fmt: skip
    return Incident(**{**fields, **more})


def part(rank, **more):
    alarms = (made.alarm(90, rank, tensor="fc.weight", statistic="l2"),) if rank == 1 else ()
    facts = {"uuid": "GPU-1", "pci": "0000:3B:00.0"} if rank == 1 else {}
    fields = {
        "rank": rank,
        "host": "node-7",
        "device": f"cuda:{rank}",
        "device_facts": facts,
        "generators": {"torch": "12ab"},
    }
    return RankPart(**{**fields, "alarms": alarms, "series_steps": tuple(STEPS), **more})


def recording(rank):
    series = (Series(GRADIENT, "fc.weight", "l2"), Series(GRADIENT, "fc.bias", "l2"), Series(LOSS, "", "number"))
    values = np.arange(len(STEPS) * 3, dtype=np.float64).reshape(-1, 3) + 1000 * rank
    values[STEPS.index(90), 0] = np.nan
    seen = np.ones(values.shape, np.bool_)
    seen[0] = False
    return Recording(series, values, seen, np.arange(len(STEPS), dtype=np.float64))


def folder(job, ranks=(0, 1), **more):
    """An incident in the folder of a job; its path."""
    result = job / "incidents" / "90-0a1b2c3d"
    write_record(result, incident(**more))
    for rank in ranks:
        write_record(result / f"rank{rank}", part(rank))
        recording(rank).save(result / f"rank{rank}" / SERIES_FILE)
    return result


def change(file, **values):
    """Change fields of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
