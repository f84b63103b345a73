"""Gradients of the inputs of norm layers are those through the layer alone, and reading them changes no bit of a training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unsilent.monitor.signals import layers
from unsilent.monitor.signals.collector import SignalCollector
from unsilent.monitor.signals.layers import Reader, hook_input_gradient


class ComposedNorm(nn.Module):
    """As models write it: several operations."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


NORMS = {
    "layer": lambda: nn.LayerNorm(8),
    "rms": lambda: nn.RMSNorm(8),
    "group": lambda: nn.GroupNorm(2, 8),
    "batch": lambda: nn.BatchNorm1d(8),
    "composed": lambda: ComposedNorm(8),
}


class Block(nn.Module):
    def __init__(self, make, stored):
        super().__init__()
        self.before, self.norm, self.after, self.stored = nn.Linear(8, 8), make(), nn.Linear(8, 8), stored

    def forward(self, x):
        x = self.before(x)
        self.input = x
        inner = checkpoint(self.norm, x, use_reentrant=False) if self.stored == "checkpoint" else self.norm(x)
        return x + x.tanh() + self.after(inner)


def reader(reported):
    return Reader(lambda: True, reported.append, lambda *parts: reported.append(sum(parts)), lambda hook: hook)


def gradients(make, stored, hooked, dtype):
    torch.manual_seed(0)
    model, reported = Block(make, stored).to(dtype), []
    if hooked:
        hook_input_gradient(model.norm, reader(reported))
    model(torch.randn(16, 8, dtype=dtype)).square().sum().backward()
    return [p.grad for p in model.parameters()], reported


def expected(make, dtype):
    """By a view that is the input of the layer alone."""
    torch.manual_seed(0)
    model = Block(make, "").to(dtype)
    x = model.before(torch.randn(16, 8, dtype=dtype))
    view = x.detach().requires_grad_()
    inner = model.norm(view)
    (x + x.tanh() + model.after(inner)).square().sum().backward()
    return view.grad


@pytest.mark.parametrize("stored", ["", "checkpoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", NORMS)
def test_the_gradient_through_the_layer_alone(kind, dtype, stored):
    plain, _ = gradients(NORMS[kind], stored, False, dtype)
    hooked, reported = gradients(NORMS[kind], stored, True, dtype)
    assert all(torch.equal(a, b) for a, b in zip(plain, hooked, strict=True))
    (gradient,) = reported
    torch.testing.assert_close(
        gradient, expected(NORMS[kind], dtype), rtol=3e-2, atol=3e-2 if dtype == torch.bfloat16 else 1e-4
    )


def test_an_input_without_gradient_and_a_layer_that_leaves_the_graph():
    reported = []
    norm = nn.LayerNorm(4)
    hook_input_gradient(norm, reader(reported))
    norm(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        norm(torch.ones(2, 4, requires_grad=True))
    assert reported == []
    leaf = torch.randn(2, 4, requires_grad=True)
    norm(leaf).square().sum().backward()
    assert torch.equal(reported[0], leaf.grad)


def test_an_error_in_adding_up_a_gradient_is_no_error_of_the_backward_pass(monkeypatch):
    model, errors = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)), []

    def unequal(layer_input, others, outputs, report):
        outputs[0].register_hook(lambda gradient: report(torch.ones(3), torch.ones(4)))

    monkeypatch.setattr(layers, "read_input_gradient", unequal)
    with SignalCollector(model, [torch.optim.SGD(model.parameters())], on_error=errors.append):
        model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None
    assert [type(error) for error in errors] == [RuntimeError]
