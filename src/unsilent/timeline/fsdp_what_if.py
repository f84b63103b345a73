"""What a training under FSDP2 would take with another setting: ``reshard_after_forward=no`` or ``reduce_dtype=bf16``."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.errors import UsageError, unknown_name_error
from unsilent.timeline.ddp_model import fit_link_cost
from unsilent.timeline.ddp_what_if import SIXTEEN_BITS, beyond_fit, sixteen_bit_notes, sixteen_bit_share
from unsilent.timeline.job import BACKWARD, COLLECTIVE, Job
from unsilent.timeline.replay import Replay
from unsilent.timeline.step_split import Floats

FORMS = ("reshard_after_forward=no", "reduce_dtype=bf16", "reduce_dtype=fp16")
WORDS = ("reshard_after_forward", "reduce_dtype")
_GATHERS = re.compile(r"\w+::?_?all_?gather|fsdp::split_with_sizes_copy")
"""Collectives, what launches them, and copies to and from what they send."""
_SCATTERS = re.compile(r"\w+:_?reduce_?scatter")


class ShardedChange(NamedTuple):
    """What is different in a replay; fields as in `what_if.Change`."""

    replay: Replay
    durations: Floats
    gaps: Floats
    notes: tuple[str, ...]
    is_extrapolated: bool


def sharded_change(text: str, replay: Replay, gaps: Floats) -> ShardedChange:
    """What a question changes in a replay; raises ``UsageError`` for an unknown setting, or without such collectives."""
    word, _, value = text.partition("=")
    known = ("no",) if word == "reshard_after_forward" else SIXTEEN_BITS
    if value not in known:
        raise unknown_name_error(word, value, known)
    job, operations, changed = replay.job, replay.job.operations, replay.durations.copy()
    if word == "reshard_after_forward":
        return _without_second_gather(replay, gaps)
    scatters = _named(job, _SCATTERS) & (operations.kind == COLLECTIVE) & (operations.size > 0) & (changed > 0)
    _expect(scatters, "reduce-scatter with a known size")
    sizes = operations.size[scatters].astype(np.float64)
    cost = fit_link_cost(sizes, changed[scatters])
    item_bytes = operations.item_bytes[scatters]
    smaller = sizes * sixteen_bit_share(item_bytes, word)
    changed[scatters] *= cost(smaller) / cost(sizes)
    is_within, notes = cost.covers(smaller), list(sixteen_bit_notes(item_bytes))
    if not cost.grows:
        notes.append("what a larger collective costs does not show in the traces")
    elif not is_within:
        notes.append(beyond_fit(cost, smaller))
    return ShardedChange(replay, changed, gaps, tuple(notes), not is_within)


def _without_second_gather(replay: Replay, gaps: Floats) -> ShardedChange:
    """All-gathers of backward passes with their launches and copies take no time, and no rank waits for another one in them."""
    job, operations = replay.job, replay.job.operations
    of_gathers = _named(job, _GATHERS) & (operations.phase == BACKWARD)
    again = of_gathers & (operations.kind == COLLECTIVE)
    if not again.any() and (_named(job, _GATHERS) & (operations.kind == COLLECTIVE)).any():
        raise UsageError(
            "--what-if reshard_after_forward=no: the traces show all-gathers in forward passes alone; the job seems to have the "
            "setting already"
        )
    _expect(again, "all-gather in a backward pass")
    collective = np.where(again, np.int32(-1), operations.collective)
    changed = Replay(replace(job, operations=replace(operations, collective=collective)))
    note = "what FSDP2 does on the host before and after its copies, and kernels that copy, stay as they were recorded"
    return ShardedChange(
        changed, np.where(of_gathers, 0.0, replay.durations), np.where(again, 0.0, gaps), (note,), False
    )


def _named(job: Job, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Operations with names of a pattern, bool[n]."""
    return np.array([bool(pattern.match(name)) for name in job.operations.names], bool)[job.operations.name]


def _expect(which: NDArray[np.bool_], what: str) -> None:
    if not which.any():
        raise UsageError(f"the traces show no {what}; record a training under FSDP2 that has one")
