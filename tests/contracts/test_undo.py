"""Undo proof for every fault model x dtype x kind of parameter, also when the model raises in the middle.

A new fault model joins with one row in ``FAULTS``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.faults import CODECS, FAULT_MODELS, Fault, fault_model
from unsilent.sites import Parameters

FAULTS = [
    "bitflip",
    "bitflip:count=8",
    "bitflip:bits=sign",
    "bitflip:rate=0.02",
    "bitflip:run=3",
    "burst:length=2",
    "multibit:flips=3",
    "multibit:tile=2x3",
    "stuck:at=1",
    "stuck:at=0",
    "set:value=1",
    "zero:count=3",
    "zero:count=2,stride=2",
    "random:count=2",
    "random:block=4,cycles=any",
    "uniform:low=-2,high=9",
    "scale:factor=2",
    "copy:count=2",
    "zero:whole=channel",
    "bitflip:heads=1",
]


class Holder(nn.Module):
    """Parameters and buffers of one dtype: dense, transposed, strided, 1-d, 0-d, tied."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()

        def values(*shape: int) -> torch.Tensor:
            random = torch.randint(0, 120, shape, generator=torch.Generator().manual_seed(len(shape)))
            return random.to(torch.float32).to(dtype)

        def keep(name: str, tensor: torch.Tensor) -> None:
            if dtype.is_floating_point:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor)

        keep("dense", values(4, 6))
        keep("turned", values(5, 4).t())
        keep("strided", values(20)[::2])
        keep("vector", values(7))
        keep("scalar", values().reshape(()))
        self.register_buffer("buffer", values(3, 3))
        self.again = self.dense

    def forward(self) -> torch.Tensor:
        raise RuntimeError("the model itself raises")


KINDS = ["dense", "turned", "strided", "vector", "scalar", "buffer", "*"]
IMPOSSIBLE = {("bitflip:bits=sign", "uint8")}
"""Fault models that have nothing to corrupt in a dtype at all."""


def snapshot(model: nn.Module) -> dict[str, bytes]:
    """All bytes of all tensors, read without any code of the package."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {n: t.detach().clone().contiguous().flatten().view(torch.uint8).numpy().tobytes() for n, t in named}


def draws(parameters: Parameters, text: str) -> Iterator[tuple[Fault, ...]]:
    """One draw on each kind of parameter that is large enough for the fault model."""
    fault = fault_model(text)
    for number, kind in enumerate(KINDS):
        try:
            yield fault.draw(parameters.select(kind), np.random.default_rng(number))
        except UsageError:  # too small: a copy of one element, three flips in a scalar's neighbours
            assert kind in ("scalar", "vector", "strided") or (text, dtype_of(parameters)) in IMPOSSIBLE


def dtype_of(parameters: Parameters) -> str:
    return parameters.sites["dense"].memory.codec.name


@pytest.mark.parametrize("dtype", sorted(CODECS))
@pytest.mark.parametrize("text", FAULTS)
def test_bits_are_as_before(text: str, dtype: str) -> None:
    model = Holder(getattr(torch, dtype))
    before = snapshot(model)
    parameters = Parameters(model)
    corrupted: set[str] = set()
    for faults in draws(parameters, text):
        corrupted |= {f.site for f in faults}
        with parameters.inject(faults) as receipt:
            assert receipt.verified_elements == receipt.requested_elements == sum(len(f) for f in faults)
            during = snapshot(model)
            untouched = {n for n in before if f"param:{n}" not in {f.site for f in faults}} - {"again"}
            assert all(during[n] == before[n] for n in untouched), "memory was changed that no fault names"
            assert receipt.changed_bits or not text.startswith(("bitflip", "burst", "multibit")) or not faults
            assert (during != before) == (receipt.changed_bits > 0)
        assert snapshot(model) == before
        with pytest.raises(RuntimeError, match="itself raises"), parameters.inject(faults):
            model()
        assert snapshot(model) == before
    assert "param:dense" in corrupted or (text, dtype) in IMPOSSIBLE
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_every_fault_model_has_a_row() -> None:
    assert {text.partition(":")[0] for text in FAULTS} == set(FAULT_MODELS)
