"""What reaches a model behind the back of the dispatcher: followed exactly, or noticed and run plainly."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from exactness.faults import Trial
from exactness.here import Base, Table, at
from unsilent.engine.plain import PlainEngine
from unsilent.faults import Fault, fault_model

pytestmark = pytest.mark.slow

TABLE = Table()
CONTEXT: dict[str, Any] = {}
"""The model that is running: what a custom operation knows by a closure."""


def on(address: str, *texts: str, trials: int = 6) -> Any:
    """Directed trials on one parameter by each of some fault models."""

    def directed(engine: PlainEngine) -> Sequence[Trial]:
        rng = np.random.default_rng(3)
        regions = engine.select_regions([address])
        return [Trial(t, fault_model(t).draw(regions, rng)) for t in texts for _ in range(trials)]

    return directed


STRONG = ("bitflip:bits=exponent", "set:value=3", "scale:factor=-1.5")


@TABLE.trap((8, 16), directed=on("param:temperature", *STRONG))
class Scalar(Base):
    """Python reads a scalar parameter through numpy memory taken in ``__init__``."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.seen = self.temperature.detach().numpy()

    def prepare(self) -> None:
        self.temperature.fill_(1.5)

    def between(self, y: Tensor) -> Tensor:
        return y / float(self.seen)


@torch.library.custom_op("exactness_traps::add_bias", mutates_args=())
def add_bias(y: Tensor) -> Tensor:
    """A bias that is no argument."""
    return y + CONTEXT["model"].bias.detach()


@TABLE.trap((8, 16), directed=on("param:bias", "bitflip:bits=exponent_msb", "set:value=3", "bitflip:count=8"))
class ZeroBias(Base):
    """A custom operation adds a bias of zeros, which no factor changes."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))

    def prepare(self) -> None:
        self.bias.zero_()

    def between(self, y: Tensor) -> Tensor:
        CONTEXT["model"] = self
        return torch.ops.exactness_traps.add_bias(y)


@torch.library.custom_op("exactness_traps::project", mutates_args=())
def project(y: Tensor) -> Tensor:
    """A weight that is no argument."""
    return y @ CONTEXT["model"].last.weight.detach().t()


@TABLE.trap((8, 16), directed=on("param:last.weight", "bitflip:bits=exponent", "set:value=3,count=4"))
class ReadTwice(Base):
    """A custom operation uses a weight that another operation reads in the open."""

    def forward(self, x: Tensor) -> Tensor:
        CONTEXT["model"] = self
        return torch.ops.exactness_traps.project(self.first(x)) + self.last.weight.norm() + self.last.bias


@TABLE.trap((8, 16), directed=on("param:first.weight", "set:value=900", "set:value=inf", "bitflip:bits=exponent_msb"))
class Largest(Base):
    """Python reads a number of a weight through numpy memory; operations read that weight as well."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.first.weight.detach().numpy()

    def between(self, y: Tensor) -> Tensor:
        return y * float(np.abs(self.seen).max())


TABLE_SHAPE = (2048, 64)


def seldom_read(engine: PlainEngine) -> Sequence[Trial]:
    """Elements of the few rows that are read; elements drawn from all of them hardly ever are."""
    return [
        at(Fault("param:places", "float32", TABLE_SHAPE, np.array([i]), "set", np.array([0x41200000], np.uint32)))
        for i in (0, 70, 64 * 7 + 63)
    ]


@TABLE.trap((8, 16), directed=seldom_read)
class SeldomRead(Base):
    """A tensor on numpy memory of a large table, of which only the beginning is used."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(TABLE_SHAPE))
        self.seen = self.places.detach().numpy()

    def between(self, y: Tensor) -> Tensor:
        return y + torch.from_numpy(self.seen[:8]).clone()[: len(y)]


@TABLE.trap((8, 16))
class HandedOut(Base):
    """Memory is handed to numpy before it is written; Python then reads a number there."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(len(x), 64)
        seen = y.numpy()
        torch.mm(x, self.first.weight.t(), out=y)
        return self.last(y / float(abs(seen).max()))


@TABLE.trap((8, 16))
class Guarded(Base):
    """Memory is handed to numpy, which then clips it in place: golden values pass unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(len(x), 64)
        seen = y.numpy()
        torch.mm(x, self.first.weight.t(), out=y)
        np.clip(seen, -60, 60, out=seen)
        return self.last(y)


@TABLE.trap((8, 16))
class Pooled(Base):
    """Other threads read integers."""

    def between(self, y: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            best = list(pool.map(lambda row: int(row.argmax()), y))
        return y * torch.tensor([1.0 + b for b in best])[:, None]


@TABLE.trap((8, 16))
class PooledFloat(Base):
    """Another thread reads a float."""

    def between(self, y: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return y / pool.submit(lambda: float(y.abs().max())).result()


@pytest.mark.parametrize("name", TABLE)
def test_what_is_hidden_gives_the_bits_of_the_plain_run(name: str) -> None:
    found, _ = TABLE[name].spring()
    found.check()
    assert found.changed >= found.trials / 3
    assert found.corrupted == found.sites
