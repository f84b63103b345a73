"""Clean batches for the calibration of a detector: their checks, and their division into two parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.basics.nested import leaves_in, tensors_in
from unsilent.protection.recorded_pass import check_output
from unsilent.sites.memory import dtype_name
from unsilent.workloads.batch_samples import count_samples

LEARNING_SHARE = 0.6
"""Share of the samples that the detector learns from; the others give the threshold."""


def check_batches(model: nn.Module, batches: Sequence[Any], run: Callable[[nn.Module, Any], Any]) -> None:
    """Raise ``UsageError`` for a batch with NaN or without a tensor, or one that the model cannot take.

    The model is called with the first batch before samples are counted, as they cannot be counted in a batch that it rejects.
    """
    for number, batch in enumerate(batches, 1):
        if number == 1:
            with torch.no_grad():
                check_output(run(model, batch), batch)
        count_samples(batch)
        if any(tensor.is_floating_point() and tensor.isnan().any() for tensor in tensors_in(batch)):
            raise UsageError(f"clean batch {number} has NaN; expected clean inputs: leave the samples with NaN out")


def divide(batches: Sequence[Any], needed: int, rate: float) -> tuple[Sequence[Any], Sequence[Any]]:
    """Batches to learn from, and batches to find the threshold.

    Args:
        needed: Number of samples that the threshold needs.
        rate: False-alarm rate.

    Raises:
        UsageError: there are too few samples, or there is only one batch.
    """
    ends = np.cumsum([count_samples(batch) for batch in batches])
    every = int(ends[-1]) if len(ends) else 0
    expected = round(needed / (1 - LEARNING_SHARE)) + 1
    if len(batches) == 1 and every >= expected:
        raise UsageError(
            f"there is 1 batch of {every:,} clean samples; expected 2 or more, as the detector learns from the first ones and "
            "the last ones give the threshold: give the samples in several batches, such as batch.split(50)"
        )
    first = int(np.abs(ends[:-1] - LEARNING_SHARE * every).argmin()) + 1 if len(ends) > 1 else 0
    while first > 1 and every - ends[first - 1] < needed:
        first -= 1
    if not first or every - ends[first - 1] < needed:
        batch = "batch" if len(batches) == 1 else "batches"
        raise UsageError(
            f"there are {every:,} clean samples in {len(batches)} {batch}; a rate of false alarms of {rate:g} needs {needed:,} "
            f"for the threshold, and more for the detector to learn from, about {expected:,} in all, in several batches: give "
            "more, or choose a higher rate"
        )
    return batches[:first], batches[first:]


class ExplainedRun:
    """Calls a model with clean batches; an error of the model names the batch.

    Args:
        run: Function that calls the model once.

    Attributes:
        explains: Whether errors become ``UsageError``; to be set to False after calibration.
    """

    def __init__(self, run: Callable[[nn.Module, Any], Any]) -> None:
        self._run, self.explains = run, True

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Call the model with a batch, and return the output."""
        try:
            return self._run(model, batch)
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
            if not self.explains or isinstance(error, UnsilentError):
                raise
            reason = next(iter(str(error).strip().splitlines()), "")
            raise UsageError(
                f"the model raised {type(error).__name__} for a clean batch of {_describe(batch)} ({reason}); expected batches "
                "that the model can be called with, without labels: one tensor, a tuple of inputs or a dict of named ones (a "
                "list of samples is one input: ([sample, …],)); or give run="
            ) from error


def _describe(batch: Any) -> str:
    """Short description of the tensors in a batch."""
    words = []
    for path, leaf in leaves_in(batch):
        kind = f"{dtype_name(leaf.dtype)}{list(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
        words.append(f"{'.'.join(path)}: {kind}" if path and not path[0].isdigit() else kind)
    return ", ".join(words[:5]) + (", …" if len(words) > 5 else "")
