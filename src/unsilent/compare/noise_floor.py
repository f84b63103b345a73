"""How far each layer of a network differs from itself: run again, with other threads, with the batch in two halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from unsilent.compare.layer_records import Difference, LayerFloor
from unsilent.compare.lock_step import LayerCall, LayerCalls, WaitingPass
from unsilent.errors import UsageError
from unsilent.workloads.batch_samples import count_samples, take_samples

RERUN, THREADS, SPLIT = "rerun", "threads", "split"


def floors_of(
    model: nn.Module, layers: Mapping[str, nn.Module], batch: Any, run: Callable[[nn.Module, Any], Any]
) -> dict[str, LayerFloor]:
    """The floor of each call of a layer, by its name, for one batch."""
    floors: dict[str, dict[str, float]] = {}
    before = torch.get_num_threads()

    def compare(variation: str, passes: list[WaitingPass], call: LayerCall) -> None:
        again = [one.reach(call.name) for one in passes]
        outputs = [one.output for one in again if one is not None and one.output.ndim]
        if len(outputs) == len(passes) and sum(map(len, outputs)) == len(call.output):
            difference = Difference()
            difference.add(call.output, torch.cat(outputs))
            floors.setdefault(call.name, {})[variation] = difference.relative

    for variation, (parts, threads) in _variations(batch, before).items():
        try:
            with ExitStack() as stack:
                waiting = [WaitingPass(layers, partial(run, model, part), threads) for part in parts]
                passes = [stack.enter_context(one) for one in waiting]
                stack.enter_context(torch.no_grad())
                stack.enter_context(LayerCalls(layers, partial(compare, variation, passes)))
                run(model, batch)
        finally:
            torch.set_num_threads(before)
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
