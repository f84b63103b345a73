"""Measures what detectors cost: CPU time of a pass alone and with each detector, and the FLOPs that have run after each layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from unsilent.nested import map_tensors
from unsilent.protection.detector import InferenceDetector
from unsilent.protection.layer_watch import LayerRun, LayerWatch
from unsilent.protection.recorded_pass import count_samples, record_pass
from unsilent.studies.coverage.inference.spec import TIMED_BATCHES

Run = Callable[[nn.Module, Any], Any]
LEAST_REPEATS, MOST_REPEATS, SECONDS = 5, 40, 0.3
"""Repetitions of a measurement, and after how many seconds they may end."""


def resized(batch: Any, samples: int) -> Any:
    """A batch of so many samples, those of another batch, some of them several times where it has fewer."""
    count = count_samples(batch)

    def take(path: tuple[str, ...], tensor: Tensor) -> Tensor:
        if not tensor.ndim or len(tensor) != count:
            return tensor
        return tensor[torch.arange(samples, device=tensor.device) % count]

    return map_tensors(batch, take)


def seconds_of_detectors(
    model: nn.Module, run: Run, batch: Any, detectors: Sequence[InferenceDetector]
) -> NDArray[np.float64]:
    """CPU seconds of a pass, float64[1 + detectors, `TIMED_BATCHES`]: alone, then with each detector; NaN where it raises."""
    result = np.full((1 + len(detectors), len(TIMED_BATCHES)), np.nan)
    for column, samples in enumerate(TIMED_BATCHES):
        try:
            some = resized(batch, samples)
            result[:, column] = _medians([lambda some=some: _pass(model, run, some)] + [
                lambda one=one, some=some: _guarded(model, run, some, one) for one in detectors
            ])  # fmt: skip
        except Exception:  # noqa: S112 - a model of the user's may take no other batch
            continue
    return result


def _pass(model: nn.Module, run: Run, batch: Any) -> None:
    with torch.no_grad():
        run(model, batch)


def _guarded(model: nn.Module, run: Run, batch: Any, detector: InferenceDetector) -> None:
    detector.margins(record_pass(model, run, batch, detector.needs_layers))


def _medians(calls: Sequence[Callable[[], None]]) -> list[float]:
    """Median CPU seconds of each call; the calls take turns, so that a slower time of the machine meets all of them."""
    taken: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    begun = time.process_time()
    for repeat in range(MOST_REPEATS):
        for call, seconds in zip(calls, taken, strict=True):
            before = time.process_time()
            call()
            seconds.append(time.process_time() - before)
        if repeat + 1 >= LEAST_REPEATS and time.process_time() - begun > SECONDS * len(calls):
            break
    return [statistics.median(one) for one in taken]


def flops_by_layer(model: nn.Module, run: Run, batch: Any) -> dict[str, float]:
    """Share of the FLOPs of a pass that has run at the end of each run of a layer, by name; of layers where none are counted."""
    done: dict[str, int] = {}
    counter = FlopCounterMode(display=False)

    def note(layer: LayerRun) -> None:
        done[layer.name] = counter.get_total_flops()

    with LayerWatch(model, functions=True) as watch, torch.no_grad(), watch.listening(note), counter:
        run(model, batch)
    total = counter.get_total_flops()
    if not total:
        return {name: (number + 1) / len(done) for number, name in enumerate(done)}
    return {name: count / total for name, count in done.items()}
