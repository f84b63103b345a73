"""The published networks by their names in injection files, untrained."""

from __future__ import annotations

import torch
from torch import nn

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.papers.isca23.densenet import PublishedDenseNet
from unsilent.papers.isca23.efficientnet import PublishedEfficientNet
from unsilent.papers.isca23.layer_lists import NETWORKS
from unsilent.papers.isca23.layers import draw_weights
from unsilent.papers.isca23.resnet18 import DROPOUT, PublishedResNet18


def untrained_network(name: str = "resnet18", *, width: int = 64, seed: int = 123) -> nn.Module:
    """A fresh network in training mode, its weights drawn by Glorot's truncated normal law.

    Args:
        name: ``resnet18``, ``resnet18_nobn`` (no batch norm), ``resnet18_sgd`` (no dropout), ``densenet`` or ``effnet``.
        width: 64 as published; with less, all channels are fewer in proportion, for tests.
    """
    if name not in NETWORKS:
        raise unknown_name_error("published network", name, NETWORKS)
    if width < 2:
        raise UsageError(f"width is {width}; expected 2 or more (64 in the published networks)")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _network(name, width)
        draw_weights(model)
    return model.train()


def _network(name: str, width: int) -> nn.Module:
    if name == "densenet":
        return PublishedDenseNet(width)
    if name == "effnet":
        return PublishedEfficientNet(width)
    return PublishedResNet18(width, norm=name != "resnet18_nobn", dropout=0.0 if name == "resnet18_sgd" else DROPOUT)
