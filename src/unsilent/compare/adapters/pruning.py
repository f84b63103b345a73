"""Pruned copies of a model: the smallest weights of all convolutions and linear layers become 0.

Statistics of batch norms are computed again from calibration batches, as those of the original do not fit the outputs of pruned
layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.compare.adapters.fake_quant import FakeQuantized
from unsilent.compare.adapters.layers import NONE_ERROR, computes_as
from unsilent.workloads.base import call_model


def pruned(
    model: nn.Module, share: float, calibration: Iterable[Any], run: Callable[[nn.Module, Any], Any] = call_model
) -> nn.Module:
    """A copy of a model in which a share of the weights is 0.

    Args:
        calibration: Batches that the statistics of batch norms are computed from.

    Raises:
        UsageError: the share is not above 0 and below 1, or there is no such layer.
    """
    if not 0 < share < 1:
        raise UsageError(f"the share of pruned weights is {share:g}; expected above 0 and below 1, like prune:0.8")
    result = copy.deepcopy(model).eval()
    weights = _weights(result)
    if not weights:
        raise UsageError(NONE_ERROR.format("pruned"))
    magnitudes = torch.cat([weight.detach().abs().flatten() for weight in weights])
    dropped = torch.zeros_like(magnitudes, dtype=torch.bool)
    dropped[magnitudes.argsort(stable=True)[: round(share * len(magnitudes))]] = True
    with torch.no_grad():
        for weight, drop in zip(weights, dropped.split([weight.numel() for weight in weights]), strict=True):
            weight.masked_fill_(drop.view_as(weight), 0)
        _fit_batch_norms(result, calibration, run)
    return result


def _fit_batch_norms(model: nn.Module, batches: Iterable[Any], run: Callable[[nn.Module, Any], Any]) -> None:
    """Compute the running statistics of batch norms anew; all batches have the same weight."""
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    ]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for batch in batches:
        run(model, batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


@contextmanager
def zeros_stay(model: nn.Module) -> Iterator[None]:
    """Context in which weights that are 0 get no gradients, so that training keeps them at 0."""
    nonzero = [(weight, weight.detach() != 0) for weight in _weights(model) if weight.requires_grad]
    handles = [weight.register_hook(partial(torch.mul, keep)) for weight, keep in nonzero]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _weights(model: nn.Module) -> list[Tensor]:
    """Weights of the convolutions and linear layers, quantised ones included, each once."""
    layers = (layer for layer in model.modules() if isinstance(layer, FakeQuantized) or computes_as(layer))
    weights = [layer.get_parameter("weight") for layer in layers]
    return list({id(weight): weight for weight in weights}.values())
