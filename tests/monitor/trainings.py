"""Small trainings of every kind, for tests of a monitor: each is a model, its optimizers and a function that makes a step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unsilent.monitor import watch_gradient


class RMSNorm(nn.Module):
    """Uses its input twice."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Net(nn.Module):
    """A residual network; ``kind`` is LayerNorm, RMSNorm …"""

    def __init__(self, kind=nn.LayerNorm, depth=2, reentrant=None):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.norms = nn.ModuleList(kind(8) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.reentrant = reentrant

    def block(self, norm, layer, x):
        return x + layer(norm(watch_gradient(x, "stream"))).tanh()

    def forward(self, x):
        x = self.first(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            if self.reentrant is None:
                x = self.block(norm, layer, x)
            else:
                x = checkpoint(self.block, norm, layer, x, use_reentrant=self.reentrant)
        return self.last(x)


class Training(NamedTuple):
    model: nn.Module
    optimizers: list
    step: object
    """Makes step n and returns its loss."""


def batch(number, size=6):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(1000 + number))


def loss_of(model, x):
    out = model(x)
    return (out - x[..., :2].to(out.dtype)).square().mean()


def plain(kind=nn.LayerNorm, make=lambda p: torch.optim.AdamW(p, lr=1e-2), micro=1, **options):
    torch.manual_seed(0)
    model = Net(kind, **options)
    optimizer = make(model.parameters())

    def step(number):
        optimizer.zero_grad()
        for part in range(micro):
            loss = loss_of(model, batch(micro * number + part)) / micro
            loss.backward()
        optimizer.step()
        return loss.item()

    return Training(model, [optimizer], step)


def scaled(dtype=torch.float16):
    training = plain(RMSNorm)
    (optimizer,) = training.optimizers
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=5)

    def step(number):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = loss_of(training.model, batch(number))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return training._replace(step=step)


def narrow():
    training = plain(RMSNorm)
    training.model.to(torch.bfloat16)

    def step(number):
        training.optimizers[0].zero_grad()
        loss = loss_of(training.model, batch(number).bfloat16())
        loss.backward()
        training.optimizers[0].step()
        return loss.item()

    return training._replace(step=step)


def adversarial():
    torch.manual_seed(0)
    model = nn.ModuleDict({"make": Net(), "judge": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))})
    make, judge = (torch.optim.Adam(model[name].parameters(), lr=1e-3) for name in ("make", "judge"))

    def step(number):
        x = batch(number)
        judge.zero_grad()
        fake = model["make"](x)
        loss = nn.functional.softplus(model["judge"](fake.detach())).mean()
        loss = loss + nn.functional.softplus(-model["judge"](x[:, :2])).mean()
        loss.backward()
        judge.step()
        make.zero_grad()
        nn.functional.softplus(-model["judge"](fake)).mean().backward()
        make.step()
        return loss.item()

    return Training(model, [make, judge], step)


def two_optimizers():
    torch.manual_seed(0)
    model = Net()
    halves = [model.first, model.norms], [model.layers, model.last]
    optimizers = [torch.optim.Adam([p for part in half for p in part.parameters()], lr=1e-2) for half in halves]

    def step(number):
        for one in optimizers:
            one.zero_grad(set_to_none=False)
        loss = loss_of(model, batch(number))
        loss.backward()
        for one in optimizers:
            one.step()
        return loss.item()

    return Training(model, optimizers, step)


def closure():
    training = plain(make=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3))
    (optimizer,) = training.optimizers

    def step(number):
        def again():
            optimizer.zero_grad()
            loss = loss_of(training.model, batch(number))
            loss.backward()
            return loss

        return optimizer.step(again).item()

    return training._replace(step=step)


def sparse_and_tied():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"rare": nn.Embedding(9, 6, sparse=True), "table": nn.Embedding(9, 6), "out": nn.Linear(6, 9, bias=False)}
    )
    model["out"].weight = model["table"].weight
    model["frozen"] = nn.Linear(6, 6).requires_grad_(False)
    model["unused"] = nn.Linear(2, 2)
    dense = [p for name, p in model.named_parameters() if name != "rare.weight"]
    optimizers = [torch.optim.AdamW(dense, lr=1e-2), torch.optim.SparseAdam(model["rare"].parameters(), lr=1e-2)]

    def step(number):
        words = torch.randint(9, (5,), generator=torch.Generator().manual_seed(number))
        for one in optimizers:
            one.zero_grad()
        hidden = model["frozen"](model["rare"](words) + model["table"](words))
        loss = nn.functional.cross_entropy(model["out"](hidden), words.roll(1))
        loss.backward()
        for one in optimizers:
            one.step()
        return loss.item()

    return Training(model, optimizers, step)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


TRAININGS = {
    "plain": plain,
    "rms-norm": lambda: plain(RMSNorm),
    "momentum": lambda: plain(make=sgd),
    "micro-batches": lambda: plain(micro=3),
    "checkpointing": lambda: plain(RMSNorm, reentrant=False),
    "reentrant-checkpointing": lambda: plain(RMSNorm, reentrant=True),
    "scaler-float16": scaled,
    "scaler-bfloat16": lambda: scaled(torch.bfloat16),
    "bfloat16": narrow,
    "adversarial": adversarial,
    "two-optimizers": two_optimizers,
    "closure": closure,
    "sparse-and-tied": sparse_and_tied,
}


def state_of(training):
    """All bits: parameters, buffers and optimizer state."""
    tensors = [*training.model.parameters(), *training.model.buffers()]
    for optimizer in training.optimizers:
        for table in optimizer.state.values():
            tensors += [value for value in table.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def same_bits(one, other):
    return len(one) == len(other) and all(
        torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )
