"""Samples that see each other, or kernels that heed where a sample lies: rows must not be used, or give the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from exactness.faults import Trial
from exactness.here import ALL, OPS, Base, Directed, Table, at, seeded
from unsilent.engine.plain import PlainEngine
from unsilent.faults import Fault, fault_model

pytestmark = pytest.mark.slow

TABLE = Table()
FEW = ((2, 16), (3, 16), (4, 16))
"""Batches in which a sample has hardly any other to be compared with."""


@TABLE.trap(*FEW, trials=OPS)
class SoftmaxOverBatch(Base):
    """With two samples, one that is replaced changes the other."""

    def between(self, y: Tensor) -> Tensor:
        return y.softmax(0)


@TABLE.trap(*FEW, trials=OPS)
class BatchStatistics(Base):
    """Batch norm in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64, track_running_stats=False)

    def between(self, y: Tensor) -> Tensor:
        return self.norm(y)


class Matrix(Base):
    """With a matrix over the samples."""

    matrix: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)


@TABLE.trap((8, 16), trials=OPS)
class ZeroMix(Matrix):
    """Samples are mixed, but golden values are all zero there: no mixing shows until a fault makes one large."""

    def __init__(self) -> None:
        super().__init__(torch.rand(8, 8, generator=torch.Generator().manual_seed(1)))

    def between(self, y: Tensor) -> Tensor:
        return y + self.matrix @ functional.relu(y - 60)


@TABLE.trap((8, 16), trials=OPS)
class ZeroCumsum(Base):
    """The same for a running sum."""

    def between(self, y: Tensor) -> Tensor:
        return y - functional.relu(y - 60).cumsum(0)


@TABLE.trap((8, 16), trials=OPS)
class MaskCumsum(Base):
    """The same for an integer count."""

    def between(self, y: Tensor) -> Tensor:
        return y * 0.5 ** ((y.abs() > 60).to(torch.int64).cumsum(0))


@TABLE.trap((8, 16), trials=OPS)
class ZeroSort(Base):
    """The same for sorting."""

    def between(self, y: Tensor) -> Tensor:
        return y + functional.relu(y - 60).sort(0).values


@TABLE.trap((8, 16), trials=OPS)
class Identity(Matrix):
    """Finite samples stay apart; infinity times zero is NaN in all others."""

    def __init__(self) -> None:
        super().__init__(torch.eye(8))

    def between(self, y: Tensor) -> Tensor:
        return self.matrix @ y


@TABLE.trap((8, 16), trials=ALL)
class Ternary(nn.Module):
    """Weights of -1, 0 and 1 on signs: golden sums are exact in any order, corrupted ones are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 256), nn.Linear(256, 256), nn.Linear(256, 32)

    def prepare(self) -> None:
        for layer in (self.middle, self.last):
            layer.weight.copy_((layer.weight * 3).round().clamp(-1, 1))
            layer.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.sign(self.first(x))))


ODD = (13, 5)
"""65 elements: what vector instructions leave over is computed by others."""


def last_elements(engine: PlainEngine) -> Sequence[Trial]:
    """Infinity, a NaN with a payload, a huge number and one beyond 2^23 at elements of an odd number of them."""
    values = (0x7F800000, 0x7FC00001, 0x7F000000, 0x4B000001)
    places = (0, 31, *range(56, 65))
    return [
        at(Fault("input:0", "float32", ODD, np.array([i]), "set", np.array([v], np.uint32), step=0))
        for v in values
        for i in places
    ]


class Divides(nn.Module):
    """One operation on the elements of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.rest(x)
        return y, self.last(y)

    def rest(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@TABLE.trap(ODD, trials={}, directed=last_elements)
class Remainder(Divides):
    """``remainder`` gives other NaNs by vector instructions than by scalar ones."""

    def rest(self, x: Tensor) -> Tensor:
        return torch.remainder(x, 0.7)


@TABLE.trap(ODD, trials={}, directed=last_elements)
class Fmod(Divides):
    """``fmod`` does, too."""

    def rest(self, x: Tensor) -> Tensor:
        return torch.fmod(x, 0.7)


def odd_nans(engine: PlainEngine) -> Sequence[Trial]:
    """A NaN with a payload, of either sign, at every operation."""
    rng = np.random.default_rng(2)
    models = [fault_model(text) for text in ("set:value=0x7fc1", "set:value=0xff85", "set:value=0x7f81,count=4")]
    return [
        Trial(str(m), m.draw((r,), rng)) for r in engine.select_regions(["op:*"]) for m in models if m.capacity((r,))
    ]


@TABLE.trap((8, 16), (3, 16), trials=OPS, directed=odd_nans, dtype=torch.bfloat16)
class Narrow(nn.Module):
    """bfloat16, in which kernels treat a NaN otherwise by vector instructions than by scalar ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.gelu(self.middle(functional.gelu(self.first(x)))))


def last_nans(dtype: str, *patterns: int) -> Directed:
    """NaNs by their bits at the first, a middle and the last elements of each batch."""

    def directed(engine: PlainEngine) -> Sequence[Trial]:
        found = []
        for step, batch in enumerate(engine.batches):
            n, shape = batch.numel(), tuple(batch.shape)
            for place in (0, n // 2, *range(n - 5, n)):
                for bits in patterns:
                    where, value = np.array([place]), np.array([bits], np.uint16)
                    found.append(at(Fault("input:0", dtype, shape, where, "set", value, step=step)))
        return found

    return directed


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": functional.silu,
    "add": lambda x: x + 1,
    "mul": lambda x: x * 0.5,
    "clamp": lambda x: x.clamp(-6, 6),
    "neg": torch.neg,
    "abs": torch.abs,
}
"""In these a NaN keeps its payload or loses it, and turns quiet or does not, as its place in memory has it."""
NANS = {
    torch.bfloat16: last_nans("bfloat16", 0x7FC1, 0xFF85, 0x7F81, 0xFFC0, 0x7F80),
    torch.float16: last_nans("float16", 0x7E01, 0xFE05, 0x7C01, 0x7C00),
}


class Elements(nn.Module):
    """One operation on the elements of the input."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.last, self.operation = nn.Linear(24, 3), operation

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.operation(x)
        return y, self.last(y)


def elements(name: str, dtype: torch.dtype) -> None:
    """Put one operation in one dtype into the table."""

    def make() -> nn.Module:
        return seeded(Elements(ELEMENTWISE[name])).to(dtype)

    make.__name__ = f"{name}_{str(dtype).removeprefix('torch.')}"
    TABLE.trap((5, 24), (3, 24), trials={}, directed=NANS[dtype], dtype=dtype)(make)


for _dtype in NANS:
    for _name in ELEMENTWISE:
        elements(_name, _dtype)


@TABLE.trap((32, 16), trials=OPS)
class Normed(nn.Sequential):
    """An ordinary model, which rows are for."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))


NEVER_REFUSED = tuple(TABLE)


@TABLE.trap((8, 16))
def quantised() -> nn.Module:
    """The scale of activations is found at run time from the whole batch."""
    layers = (nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to move this elsewhere
        return torch.ao.quantization.quantize_dynamic(seeded(nn.Sequential(*layers)), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("name", TABLE)
def test_rows_give_the_bits_of_the_plain_run(name: str) -> None:
    found, engine = TABLE[name].spring()
    found.check()
    assert found.changed >= found.trials / (3 * len(engine.batches))
    if name in NEVER_REFUSED:
        assert not engine.fallback_reasons
        assert found.shared > found.trials / 3


def test_a_layer_norm_runs_on_rows() -> None:
    found, engine = TABLE["normed"].spring()
    found.check()
    (replayer,) = engine.replayers
    assert replayer is not None
    sizes = {n.name.partition("#")[2]: replayer.row_plan.sizes.get(n.index) for n in replayer.tape.nodes}
    assert sizes["native_layer_norm.0"]
    assert sizes["gelu.0"]
    assert sizes["addmm.0"]
