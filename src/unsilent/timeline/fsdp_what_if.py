"""What a training under FSDP2 would take with another setting: ``reshard_after_forward=no`` or ``reduce_dtype=bf16``."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.errors import UsageError, unknown_name_error
from unsilent.timeline.ddp_model import fit_link_cost
from unsilent.timeline.ddp_what_if import SIXTEEN_BITS, beyond_fit
from unsilent.timeline.job import BACKWARD, COLLECTIVE, Job
from unsilent.timeline.step_split import Floats

FORMS = ("reshard_after_forward=no", "reduce_dtype=bf16", "reduce_dtype=fp16")
WORDS = ("reshard_after_forward", "reduce_dtype")
_GATHERS, _SCATTERS = re.compile(r"\w+:_?all_?gather"), re.compile(r"\w+:_?reduce_?scatter")


class ShardedChange(NamedTuple):
    """Seconds of each operation with the setting, float64[n]; what was assumed; and whether a size is beyond those of the fit."""

    durations: Floats
    notes: tuple[str, ...]
    is_extrapolated: bool


def sharded_change(text: str, job: Job, durations: Floats) -> ShardedChange:
    """What a question changes in a replay; raises ``UsageError`` for an unknown setting, or without such collectives."""
    word, _, value = text.partition("=")
    known = ("no",) if word == "reshard_after_forward" else SIXTEEN_BITS
    if value not in known:
        raise unknown_name_error(word, value, known)
    changed, operations = durations.copy(), job.operations
    if word == "reshard_after_forward":
        again = _named(job, _GATHERS) & (operations.phase == BACKWARD)
        _expect(again, "all-gather in a backward pass")
        changed[again] = 0
        note = "an all-gather in the backward pass takes no time once all ranks are there; its copies and memory stay as recorded"
        return ShardedChange(changed, (note,), False)
    scatters = _named(job, _SCATTERS) & (operations.size > 0) & (durations > 0)
    _expect(scatters, "reduce-scatter with a known size")
    sizes = operations.size[scatters].astype(np.float64)
    cost = fit_link_cost(sizes, durations[scatters])
    changed[scatters] *= cost(sizes / 2) / cost(sizes)
    notes = ["gradients are taken to be reduced in 32 bits where they were recorded; casts to 16 bits are not counted"]
    is_within = cost.covers(sizes / 2)
    return ShardedChange(changed, (*notes, *([] if is_within else [beyond_fit(cost, sizes / 2)])), not is_within)


def _named(job: Job, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Collectives with names of a pattern, bool[n]."""
    matches = np.array([bool(pattern.match(name)) for name in job.operations.names], bool)
    return np.asarray(matches[job.operations.name] & (job.operations.kind == COLLECTIVE))


def _expect(which: NDArray[np.bool_], what: str) -> None:
    if not which.any():
        raise UsageError(f"the traces show no {what}; record a training under FSDP2 that has one")
