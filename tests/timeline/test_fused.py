"""What compiling a part of a model is worth, measured."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.timeline.fused import measure_fused


class Slow(nn.Module):
    """Sleeps in its forward pass, and counts its calls in a buffer."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        time.sleep(self.seconds)
        self.calls += 1
        return nn.functional.dropout(self.linear(x)), {"more": x.detach()}


def test_the_factor_is_that_of_compiled_to_plain_times(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module: (setattr(module, "seconds", 0.02), module)[1])
    module, x = Slow(0.08), torch.ones(2, 4)
    state = torch.get_rng_state()
    assert 0.2 < measure_fused(module, x, repeats=5) < 0.7
    assert module.seconds == 0.08
    assert module.calls == 0
    assert all(one.grad is None for one in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_passes_without_gradients_are_measured_too(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module: module)
    assert measure_fused(nn.GELU(), torch.ones(100, 100), repeats=2) > 0


def test_too_few_repeats_are_refused():
    with pytest.raises(UsageError, match="repeats is 0"):
        measure_fused(nn.GELU(), torch.ones(2), repeats=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch itself
def test_a_region_is_compiled_and_measured():
    region = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))
    assert 0 < measure_fused(region, torch.randn(64, 32), repeats=3) < 100
