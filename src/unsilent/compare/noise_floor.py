"""How far each layer of a network differs from itself: run again, with other threads, with the batch in two halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unsilent.compare.lock_step import LayerCall, LayerCalls, WaitingPass
from unsilent.errors import UsageError
from unsilent.workloads.batch_samples import count_samples, take_samples

FLOOR_BATCH = 0
"""The batch that the floor is measured with."""
RERUN, THREADS, SPLIT = "rerun", "threads", "split"


class Distance(Protocol):
    """Sums of differences of outputs."""

    def add(self, original: Tensor, deployed: Tensor) -> None: ...

    @property
    def relative(self) -> float: ...


@dataclass(frozen=True)
class LayerFloor:
    """Relative differences of one layer from itself, by what was varied."""

    relative: dict[str, float] = field(default_factory=dict)

    @property
    def largest(self) -> float:
        """Of all variations."""
        return max(self.relative.values(), default=0.0)


def floors_of(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batch: Any,
    run: Callable[[nn.Module, Any], Any],
    new_distance: Callable[[], Distance],
) -> dict[str, LayerFloor]:
    """The floor of each call of a layer, by its name."""
    floors: dict[str, dict[str, float]] = {}
    before = torch.get_num_threads()
    for variation, (parts, threads) in _variations(batch, before).items():
        distances: dict[str, Distance] = {}

        def compare(call: LayerCall, passes: list[WaitingPass], distances: dict[str, Distance] = distances) -> None:
            again = [one.reach(call.name) for one in passes]
            outputs = [one.output for one in again if one is not None and one.output.ndim]
            if len(outputs) == len(passes) and sum(map(len, outputs)) == len(call.output):
                distances[call.name] = new_distance()
                distances[call.name].add(call.output, torch.cat(outputs))

        try:
            with ExitStack() as stack:
                calls = [lambda part=part: run(model, part) for part in parts]
                passes = [stack.enter_context(WaitingPass(layers, call, threads)) for call in calls]
                stack.enter_context(torch.no_grad())
                stack.enter_context(LayerCalls(layers, lambda call, passes=passes: compare(call, passes)))
                run(model, batch)
        finally:
            torch.set_num_threads(before)
        for name, distance in distances.items():
            floors.setdefault(name, {})[variation] = distance.relative
    return {name: LayerFloor(values) for name, values in floors.items()}


def _variations(batch: Any, threads: int) -> dict[str, tuple[list[Any], int | None]]:
    """What is varied: the parts of the batch that are run, and the number of threads."""
    result: dict[str, tuple[list[Any], int | None]] = {
        RERUN: ([batch], None),
        THREADS: ([batch], 1 if threads > 1 else 2),
    }
    try:
        count = count_samples(batch)
    except UsageError:
        return result
    if count > 1:
        halves = torch.arange(count).split((count + 1) // 2)
        result[SPLIT] = ([take_samples(batch, half) for half in halves], None)
    return result
