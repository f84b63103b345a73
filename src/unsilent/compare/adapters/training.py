"""Training adapted copies further: fine-tuning of pruned ones, quantisation-aware training, distillation.

Invariants: the model that is given does not change; weights that pruning set to 0 stay 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from unsilent.compare.adapters.fake_quant import dequantised, quantised_layers
from unsilent.compare.adapters.pruning import zeros_stay
from unsilent.workloads.model_fitting import Schedule, fit, isolated_training

TEMPERATURE, LABEL_SHARE = 10.0, 0.1
"""Settings of distillation, as of DIVA's authors: the divisor of scores, and the weight of the labels in the loss."""


def fine_tuned(model: nn.Module, inputs: Tensor, labels: Tensor, schedule: Schedule, seed: int = 0) -> nn.Module:
    """A copy that was trained further; of a fake-quantised model, quantisation-aware training."""
    result = copy.deepcopy(model)
    with zeros_stay(result):
        train(result, lambda rows: (inputs[rows], labels[rows]), len(inputs), cross_entropy, schedule, seed)
    return result


def surrogate(adapted: nn.Module, inputs: Tensor, labels: Tensor, schedule: Schedule, seed: int = 0) -> nn.Module:
    """The model that somebody with only the adapted model can make as the original: distilled from the adapted one.

    It begins with the adapted model's weights, without rounding of activations, and may change those that are 0.
    """
    with torch.no_grad():
        scores = torch.cat([adapted(part) for part in inputs.split(100)])
    result = dequantised(adapted)

    def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        teacher, truth = target
        student, aim = (output / TEMPERATURE).log_softmax(1), (teacher / TEMPERATURE).softmax(1)
        divergence = kl_div(student, aim, reduction="batchmean") * TEMPERATURE**2
        return (1 - LABEL_SHARE) * divergence + LABEL_SHARE * cross_entropy(output, truth)

    train(result, lambda rows: (inputs[rows], (scores[rows], labels[rows])), len(inputs), loss, schedule, seed)
    return result


def train(
    model: nn.Module,
    sample: Callable[[Tensor], tuple[Any, Any]],
    count: int,
    loss: Callable[[Any, Any], Tensor],
    schedule: Schedule,
    seed: int,
) -> None:
    """Train a model in place, see `fit`; scales of quantised weights fit the last weights afterwards."""
    model.requires_grad_(True)  # what a model that only answers may have switched off
    with isolated_training(seed):
        fit(model, sample, count, loss, schedule, seed=seed, description="training")
    for layer in quantised_layers(model):
        layer.fit_weights()
