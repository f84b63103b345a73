"""Noise floor of each layer: its difference from itself in a second run, with other threads or a split batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from unsilent.basics.errors import UsageError, kind_and_line
from unsilent.compare.layer_records import Difference, LayerFloor
from unsilent.compare.lock_step import LayerCall, LayerCalls, Layers, WaitingPass
from unsilent.workloads.batch_samples import count_samples, take_samples

RERUN, THREADS, SPLIT = "run again", "other threads", "two halves"


def floors_of(
    model: nn.Module, layers: Layers, batch: Any, run: Callable[[nn.Module, Any], Any]
) -> tuple[dict[str, LayerFloor], dict[str, str]]:
    """The noise floor of each call of a layer for one batch, and reasons why variations failed."""
    floors: dict[str, dict[str, float]] = defaultdict(dict)
    problems: dict[str, str] = {}
    before = torch.get_num_threads()

    def compare(differences: dict[str, Difference], passes: list[WaitingPass], call: LayerCall) -> None:
        again = [
            call_again.outputs for waiting_pass in passes if (call_again := waiting_pass.reach(call.name)) is not None
        ]
        if len(again) < len(passes) or any(len(outputs) != len(call.outputs) for outputs in again):
            return
        for output, *parts in zip(call.outputs, *again, strict=True):
            # The first dimension need not be that of samples.
            if len({part.shape[1:] for part in (output, *parts)}) == 1 and sum(map(len, parts)) == len(output):
                differences[call.name].add(output, torch.cat(parts))

    for variation, (parts, threads) in _variations(batch, before).items():
        differences: dict[str, Difference] = defaultdict(Difference)
        try:
            with ExitStack() as stack:
                waiting = [WaitingPass(layers, partial(run, model, part), threads) for part in parts]
                passes = [stack.enter_context(waiting_pass) for waiting_pass in waiting]
                stack.enter_context(torch.no_grad())
                stack.enter_context(LayerCalls(layers, partial(compare, differences, passes)))
                run(model, batch)
                for waiting_pass in passes:
                    waiting_pass.finish()
        except Exception as error:  # for example the error of a model that takes only batches of one size
            problems[variation] = kind_and_line(error)
            continue
        finally:
            torch.set_num_threads(before)
        for name, difference in differences.items():
            floors[name][variation] = difference.relative
    return {name: LayerFloor(values) for name, values in floors.items()}, problems


def _variations(batch: Any, threads: int) -> dict[str, tuple[list[Any], int | None]]:
    """Parts of the batch to run, and the number of threads, for each variation."""
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
