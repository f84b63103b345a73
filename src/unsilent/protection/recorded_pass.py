"""Record of a call with the inputs and outputs of all layers, so that many detectors can judge the same run.

A record does not change later, as its tensors are copies. Recording changes no bit of the output, and modes that inject faults
into operations do not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.basics.nested import map_tensors
from unsilent.outcomes.tensors import leaves
from unsilent.protection.layer_watch import LayerRun, LayerWatch
from unsilent.workloads.base import call_model
from unsilent.workloads.batch_samples import check_samples, count_samples


@dataclass(frozen=True, eq=False)
class RecordedPass:
    """Record of one call ``run(model, batch)``.

    Attributes:
        model, run, batch: Model, function and batch of the call.
        output: Copy of the returned output.
        layers: Runs of layers in order, over all forward passes in the call.
        samples: Number of samples in the batch, as counted by `count_samples`.
        readings: Readings of layers so far, float64[samples, numbers], which several detectors share.
        judges_recovery: Whether the call was made after an alarm. Detectors that check a part in each call, or check only some
            calls, then check everything, and their turns do not advance.
    """

    model: nn.Module
    run: Callable[[nn.Module, Any], Any]
    batch: Any
    output: Any
    layers: Sequence[LayerRun]
    samples: int
    readings: dict[Hashable, NDArray[np.float64]] = field(default_factory=dict)
    judges_recovery: bool = False


def record_pass(
    model: nn.Module, run: Callable[[nn.Module, Any], Any] = call_model, batch: Any = None, keep_layers: bool = True
) -> RecordedPass:
    """Call a model, and record the inputs and outputs of its layers.

    Args:
        model: Model to call; faults may be injected before or while it runs.
        run: Function that evaluates a batch once.
        batch: Input of ``run``.
        keep_layers: Whether runs of layers are kept.

    Raises:
        UsageError: the batch or the output has no tensor, their numbers of samples differ, or the model is compiled.
    """
    samples = count_samples(batch)
    layers: list[LayerRun] = []

    def keep(layer: LayerRun) -> None:
        layers.append(copy_run(layer))

    with LayerWatch(model, functions=True) as watch, torch.no_grad():
        if keep_layers:
            with watch.listening(keep):
                output = run(model, batch)
        else:
            output = run(model, batch)
        check_output(output, batch)
    return RecordedPass(model, run, batch, map_tensors(output, _copy), tuple(layers), samples)


def copy_run(layer: LayerRun) -> LayerRun:
    """A copy of a run with copies of all its tensors."""
    inputs, named = map_tensors(layer.inputs, _copy), map_tensors(dict(layer.named_inputs), _copy)
    return layer._replace(inputs=inputs, named_inputs=named, output=_copy((), layer.output))


def check_output(output: Any, batch: Any) -> None:
    """Raise ``UsageError`` for an output without a tensor, or with another number of samples than the batch."""
    if next(leaves(output), None) is None:
        raise UsageError(
            f"the model returned {type(output).__name__} without any tensor; expected a tensor, or a nesting of tensors"
        )
    check_samples(batch, output)


def _copy(path: tuple[str, ...], tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
