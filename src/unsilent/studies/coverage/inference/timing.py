"""Measures the CPU time of a protected pass, and the FLOPs that have run after each layer."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unsilent.protection.detector import InferenceDetector
from unsilent.protection.layer_watch import LayerRun, LayerWatch
from unsilent.protection.profile import Profile, dtypes_of, model_fingerprint
from unsilent.protection.protect import ProtectedModel
from unsilent.studies.coverage.inference.detector_rows import name_of_run
from unsilent.studies.coverage.inference.spec import TIMED_BATCHES
from unsilent.workloads.batch_samples import count_samples, take_samples

Run = Callable[[Any, Any], Any]
ROUNDS, LEAST_REPEATS, MOST_REPEATS, SECONDS = 3, 2, 12, 0.05
"""Number of rounds over all detectors, limits for the repetitions in a round, and seconds after which a round may end."""


def resized(batch: Any, samples: int) -> Any:
    """A batch with a given number of samples, taken from another batch and repeated if needed."""
    return take_samples(batch, torch.arange(samples) % count_samples(batch))


def seconds_of_detectors(
    model: nn.Module, run: Run, batch: Any, detectors: Sequence[InferenceDetector]
) -> NDArray[np.float64]:
    """CPU seconds of a pass alone and with each detector, float64[1 + detectors, `TIMED_BATCHES`].

    A time is NaN if a protected model cannot be run like the model, or does not accept another batch.
    """
    fingerprint, dtypes = model_fingerprint(model), dtypes_of(model)
    profiles = [Profile(detector, (), 0.5, 0, 0, fingerprint, dtypes, math.inf) for detector in detectors]
    columns = [_medians(model, run, batch, samples, profiles) for samples in TIMED_BATCHES]
    return np.array(columns).T


def _medians(model: nn.Module, run: Run, batch: Any, samples: int, profiles: Sequence[Profile]) -> NDArray[np.float64]:
    """Median CPU seconds of a forward pass without a detector and with each detector profile, float64[1 + profiles].

    The profiles take turns, so that a slow phase of the machine affects all of them.
    """
    taken: list[list[float]] = [[] for _ in range(1 + len(profiles))]
    try:
        some = resized(batch, samples)
        for _ in range(ROUNDS):
            taken[0] += _seconds(partial(run, model, some))
            for seconds, profile in zip(taken[1:], profiles, strict=True):
                with ProtectedModel(model, profile) as guarded:
                    seconds += _seconds(partial(run, guarded, some))
    except Exception:  # a user's model may not accept another batch
        return np.full(1 + len(profiles), np.nan)
    return np.array([statistics.median(passes) for passes in taken])


def _seconds(call: Callable[[], Any]) -> list[float]:
    """CPU seconds of repeated calls, after one warm-up call."""
    call()
    result: list[float] = []
    while len(result) < LEAST_REPEATS or (len(result) < MOST_REPEATS and sum(result) < SECONDS):
        before = time.process_time()
        call()
        result.append(time.process_time() - before)
    return result


def flops_by_layer(model: nn.Module, run: Run, batch: Any) -> dict[str, float]:
    """The share of the FLOPs of a pass that have run after each layer run, by `name_of_run`.

    If no FLOPs are counted, the share of layer runs is used instead.
    """
    done: dict[str, int] = {}
    counter = FlopCounterMode(display=False)

    def note(layer: LayerRun) -> None:
        done[name_of_run(layer)] = counter.get_total_flops()

    with LayerWatch(model, functions=True) as watch, torch.no_grad(), watch.listening(note), counter:
        run(model, batch)
    total = counter.get_total_flops()
    if not total:
        return {name: (number + 1) / len(done) for number, name in enumerate(done)}
    return {name: count / total for name, count in done.items()}
