"""A tiny workload of inference with clean batches in a file of its own, whose faults take microseconds."""

from __future__ import annotations

CLEAN = """
import torch
from torch import nn
import unsilent


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 3)

    def forward(self, x):
        return self.last(self.second(self.first(x).relu()).relu())


def inputs(seed, samples, scale=1.0):
    return scale * torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed))


class Clean(unsilent.Workload):
    def clean_batches(self, part, samples):
        seeds = {"calibration": 1000, "test": 2000, "shifted": 3000}
        scale = 1.5 if part == "shifted" else 1.0
        return [inputs(seeds[part] + i, 20, scale) for i in range(min(samples, 3000) // 20)]


class Pairs(Clean):
    def clean_originals(self, part, samples):
        return [[10 * i + j // 2 for j in range(20)] for i in range(min(samples, 3000) // 20)]


def make():
    return Pairs(Net(), [inputs(i, 20) for i in range(3)], name="clean")


def independent():
    return Clean(Net(), [inputs(i, 20) for i in range(3)], name="independent")


def other_evaluation():
    return Clean(Net(), [inputs(i, 20, 10.0) for i in range(3)], name="other evaluation")


def without():
    return unsilent.Workload(Net(), [inputs(i, 20) for i in range(3)], name="without")
"""


def write_clean(folder):
    """Put the file ``clean.py`` into a folder."""
    (folder / "clean.py").write_text(CLEAN)
