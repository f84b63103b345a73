"""The trainings that every contract test runs, and a tiny one of a user's own that has all there is."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unsilent
from unsilent.workloads import load_training

ROWS = {
    "train-resnet": ("train-resnet", {}),
    "train-resnet-nobn": ("train-resnet-nobn", {}),
    "train-resnet-sgd": ("train-resnet-sgd", {}),
    "train-vit": ("train-vit", {}),
    "train-chargpt": ("train-chargpt", {}),
    "train-llama": ("train-llama", {}),
    "train-dlrm": ("train-dlrm", {}),
    "scaled": ("train-resnet", {"amp": "bfloat16", "width": "4"}),
    "own images": ("train-resnet", {"batch": "8"}),
    "own loop": ("", {}),
}
"""A new training joins all contract tests with one row: name -> (reference, options)."""


class Net(nn.Module):
    """Batch norm, dropout, a float64 parameter, a buffer that no state dict has, and tied weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.last = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.calls += self.training
        x = self.drop(self.norm(self.again(self.first(x).relu())))
        return self.last((x * self.scale).to(x.dtype)) * (1 + self.calls / 100)


def data():
    generator = torch.Generator().manual_seed(4)
    return [(x, (x[:, 0] > 0).long()) for x in torch.randn(5, 8, 6, generator=generator)]


def loss(model, batch):
    scores = model(batch[0])
    return cross_entropy(scores, batch[1]), {"accuracy": (scores.argmax(1) == batch[1]).float().mean()}


def optimizers(model):
    """Two of them, one with an integer and a float64 tensor in its state, as some libraries have."""
    first = torch.optim.Adam([*model.first.parameters(), model.again.bias, model.scale], lr=0.01)
    return [first, torch.optim.SGD([*model.norm.parameters(), *model.last.parameters()], lr=0.1, momentum=0.9)]


def make_own(**changed):
    """The tiny training; arguments of `Training` may be replaced."""
    given = {
        "model": Net,
        "optimizer": optimizers,
        "schedule": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], 0.5),
        "batches": data(),
        "augment": lambda batch, generator: (
            batch[0] + 0.1 * torch.randn(batch[0].shape, generator=generator),
            batch[1],
        ),
        "loss": loss,
        "evaluate": data()[:2],
        "steps": 1000,
        "name": "own loop",
    }
    return unsilent.Training(**{**given, **changed})


@pytest.fixture(scope="session")
def own_images(tmp_path_factory):
    file = tmp_path_factory.mktemp("images") / "images.npz"
    rng = np.random.default_rng(0)
    np.savez(file, images=rng.integers(0, 256, (72, 32, 32, 3), np.uint8), labels=rng.integers(0, 10, 72))
    return str(file)


@pytest.fixture(scope="session")
def trainings(own_images):
    """``trainings(row)``: the workload, made once a session."""

    @functools.cache
    def get(row):
        ref, options = ROWS[row]
        if not ref:
            return make_own()
        return load_training(ref, options, data=own_images if row == "own images" else None)

    return get
