"""Copies of adapted models that were trained further: fine-tuning, quantisation-aware training, distillation.

The model that is given does not change; weights that pruning set to 0 stay 0.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from unsilent.compare.adapters.fake_quant import quantised_layers
from unsilent.compare.adapters.pruning import zeros_stay
from unsilent.compare.attacks.defence import train
from unsilent.workloads.model_fitting import Schedule

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


def dequantised(twin: nn.Module) -> nn.Module:
    """A float32 copy that has the rounded weights and does not round activations."""
    result = copy.deepcopy(twin).eval()
    for layer in quantised_layers(result):
        with torch.no_grad():
            layer.weight.copy_(layer.quantised_weight())
        layer.take_down()
    return result
