"""A tiny training in a file of its own: what replicas of it do is switched by its options."""

from __future__ import annotations

LOOP = """
import os
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unsilent


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return x, (x[:, 0] + 0.5 * torch.randn(count, generator=generator) > 0).long()


class Net(nn.Module):
    def __init__(self, racing, loose, dropout=False):
        super().__init__()
        self.racing, self.loose, self.calls, self.trained = racing, loose, 0, 0
        self.table = nn.Parameter(torch.randn(50, 6))
        self.first = nn.Linear(6, 12)
        self.last = nn.Linear(12, 2)
        self.drop = nn.Dropout(0.2 if dropout else 0.0)
        if racing:
            generator = torch.Generator().manual_seed(3)
            self.index = torch.randint(50, (100_000,), generator=generator)
            self.share = torch.randn(100_000, 1, generator=generator) / 300

    def forward(self, x):
        if self.racing:
            # Backward adds 2,000 gradients into each row; without deterministic algorithms threads do so as they come.
            x = x + (self.table[self.index] * self.share).sum(0)
        if self.loose == "process" and self.training:
            x = x * (1 + 1e-4 * (os.getpid() % 1000))
        if self.loose == "clock" and self.training:
            self.calls += 1
            if self.calls == 3:
                x = x * (1 + 1e-3 * (time.time_ns() % 1000 + 1))
        return self.last(self.drop(self.first(x).tanh()) if self.drop.p else self.first(x).tanh())


def make(steps: int = 8, racing: bool = False, loose: str = "no", sleep: float = 0.0, dies: str = "no", dropout: bool = False,
         mirror: bool = False):
    x, y = data(64, 1)
    kept = torch.Generator().manual_seed(0)
    scale = float(os.environ.get("SUBJECT_SCALE", "1"))

    def mirrored(batch, generator):
        turn = torch.rand(len(batch[0]), generator=generator) < 0.5
        return torch.where(turn[:, None], batch[0].flip(-1), batch[0]), batch[1]

    def loss(model, batch):
        time.sleep(sleep)
        model.trained += model.training
        if model.trained > 4 and dies == "yes":
            os.kill(os.getpid(), 9)
        if model.trained > 4 and dies == "never":
            time.sleep(1000)
        found = cross_entropy(model(batch[0]), batch[1]) * scale
        if loose == "evaluate" and not model.training:
            return found + time.time_ns() % 1000
        if loose == "left" and model.training:
            return found * (1 + torch.rand(1, generator=kept).item())
        return found * float("nan") if loose == "nan" and model.trained > 3 else found

    return unsilent.Training(
        model=lambda: Net(racing, loose, dropout),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batches=[(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)],
        loss=loss,
        augment=mirrored if mirror else None,
        evaluate=[data(50, 2)],
        steps=steps,
        name="tiny",
        streams=("init", "order", "within", *(["dropout"] if dropout else []), *(["augment"] if mirror else [])),
    )
"""
