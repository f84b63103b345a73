"""A weight that stands in several places of an operand, or under another dtype: all blocks that it reaches are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from exactness.here import Table, numbers
from unsilent.engine.partial import BlockwiseOperation, candidates

TABLE = Table()
PARAM = {"param": 24}


@TABLE.trap((128, 64), trials=PARAM)
class SharedBias(nn.Module):
    """One bias for all outputs, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(128, 64)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias.expand(128))


@TABLE.trap((4, 16, 12, 12), trials=PARAM)
class SharedConvolutionBias(nn.Module):
    """The same for a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(128, 16, 3, 3)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight, self.bias.expand(128))


@TABLE.trap((128, 64), trials=PARAM)
class Toeplitz(nn.Module):
    """A number of the parameter stands on a whole diagonal of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.band = nn.Parameter(torch.zeros(64 + 256 - 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.band.unfold(0, 64, 1))


@TABLE.trap((128, 64), trials=PARAM)
class Expanded(nn.Module):
    """A number of the parameter stands in a whole column of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(1, 64))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.row.expand(256, 64))


@TABLE.trap((128, 64), trials=PARAM)
class OtherDtype(nn.Module):
    """Two integers of a buffer are one number of the weight."""

    raw: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("raw", (numbers(256 * 64) * 0.3).view(torch.int16).clone())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.raw.view(torch.float32).view(256, 64))


@TABLE.trap((128, 64), trials=PARAM)
class Plain(nn.Module):
    """An ordinary layer, which blocks are for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.fixture(autouse=True)
def always_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """BlockwiseOperation are used wherever their bits agree, whatever the clock says."""
    agrees = BlockwiseOperation.agrees

    def wrapper(self: BlockwiseOperation, *args: Any) -> bool:
        agreed = agrees(self, *args)
        self.seconds = 0.0
        return agreed

    monkeypatch.setattr(BlockwiseOperation, "agrees", wrapper)


@pytest.mark.parametrize("name", TABLE)
def test_blocks_give_the_bits_of_the_plain_run(name: str) -> None:
    found, engine = TABLE[name].spring()
    found.check()
    assert found.changed >= found.trials / 3
    assert found.corrupted == found.sites
    assert not engine.fallback_reasons
    (replayer,) = engine.replayers
    assert replayer is not None
    assert candidates(replayer.tape), "the trap has no operation that could go in blocks"
