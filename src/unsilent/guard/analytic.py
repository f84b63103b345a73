"""Analytic bounds for a model, from the number of terms in each weight's gradient, counted in one step.

Bound of a first moment: 20 sqrt(n) / m (see `unsilent.detectors.moment_bounds`). n is the number of positions that a layer was
applied to (samples times pixels or tokens; for an embedding all indices, as if all were equal), and the loss is the mean of m
terms. Assumptions: layer inputs and output gradients (times m) are independent and have variance 1, gradients are not scaled (no
loss scaler's factor is left in the moments), and weight decay is not part of the gradient.

Moving statistics have no analytic bound: a sound bound would follow from the weights of the previous layer, which would have to
be known, and would be looser than any damage. Their bounds are calibrated, and so are those of weights outside of known layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.optim import SGD, Optimizer

from unsilent.basics.closing import Hooked
from unsilent.basics.errors import UsageError
from unsilent.detectors.moment_bounds import first_moment_bounds
from unsilent.guard.watched_tensors import find_history_tensors
from unsilent.sites.modules import named_parameters

RULE = "analytic"
_AVERAGES = ("exp_avg", "grad_avg", "exp_inf")
_SQUARES = ("exp_avg_sq", "square_avg", "max_exp_avg_sq")


@dataclass(frozen=True)
class AnalyticBounds:
    """Option for a guard: use analytic bounds, measured in its first step.

    Args:
        loss_terms: Number of terms that the loss of one step averages. None: the number of samples. This is right for a loss
            averaged over samples. For a loss averaged over tokens it is too loose by the square root of the length; give batch
            times length then.
    """

    loss_terms: int | None = None

    def __post_init__(self) -> None:
        if self.loss_terms is not None and self.loss_terms < 1:
            raise UsageError(
                f"loss_terms is {self.loss_terms}, the number of terms averaged by the loss; expected 1 or more"
            )


class GradientTermCounter(Hooked):
    """Counts the terms of each weight's gradient, from its creation until `close`.

    Attributes:
        sums: Number of terms of each parameter's gradient, by the parameter's ``id``.
        samples: Size of the first dimension of the model's inputs, summed over its forward passes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sums: dict[int, int] = {}
        self.samples = 0
        self._hooks = [model.register_forward_pre_hook(self._batch, with_kwargs=True)]
        self._hooks += [m.register_forward_hook(self._layer) for m in model.modules()]

    def _batch(self, model: nn.Module, args: Any, keyword_arguments: Any) -> None:
        inputs = [x for x in (*args, *keyword_arguments.values()) if isinstance(x, Tensor) and x.ndim]
        if model.training and inputs:
            self.samples += len(inputs[0])

    def _layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        if not (layer.training and isinstance(output, Tensor) and output.requires_grad and args):
            return
        count = _positions(layer, args[0], output)
        for parameter in layer.parameters(recurse=False) if count else ():
            self.sums[id(parameter)] = self.sums.get(id(parameter), 0) + count


def _positions(layer: nn.Module, layer_input: Any, output: Tensor) -> int:
    """Number of terms in the sum that is a weight's gradient; 0 if unknown."""
    weight = getattr(layer, "weight", None)
    if not (isinstance(weight, Tensor) and weight.numel()):
        return 0
    if isinstance(layer, _ConvTransposeNd):
        return int(max(output.numel() // layer.out_channels, layer_input.numel() // layer.in_channels))
    if isinstance(layer, _ConvNd):
        return output.numel() // layer.out_channels
    if isinstance(layer, nn.Linear):
        return output.numel() // layer.out_features
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return int(layer_input.numel())
    return output.numel() // weight.numel() if "Norm" in type(layer).__name__ else 0


def analytic_moment_bounds(
    model: nn.Module, optimizers: Sequence[Optimizer], positions: GradientTermCounter, bounds_options: AnalyticBounds
) -> Mapping[str, float]:
    """Bounds by name for the optimizers' moments of all parameters with known numbers of terms.

    Raises:
        UsageError: no forward pass of a known layer was seen.
    """
    terms = bounds_options.loss_terms or positions.samples
    if not positions.sums or not terms:
        raise UsageError(
            "analytic bounds need one forward pass in training mode through the layers of the model, but none ran; "
            "give Guard the uncompiled model that is trained, or leave out bounds= to use calibrated bounds"
        )
    names = dict(named_parameters(model))
    settings = {id(p): (o, group) for o in optimizers for group in o.param_groups for p in group["params"]}
    result = {}
    for part in find_history_tensors(model, optimizers):
        parameter = names.get(part.owner)
        sums = positions.sums.get(id(parameter))
        if sums is None:
            continue
        optimizer, group = settings[id(parameter)]
        bound = float(first_moment_bounds(np.array([float(sums)]), terms)[0])
        key = part.name.rpartition("/")[2]
        if key in _AVERAGES:
            result[part.name] = bound
        elif key in _SQUARES:
            result[part.name] = bound**2
        elif key == "momentum_buffer" and isinstance(optimizer, SGD):
            result[part.name] = float(first_moment_bounds(np.array([float(sums)]), terms, group["momentum"])[0])
    return {name: bound for name, bound in result.items() if math.isfinite(bound)}
