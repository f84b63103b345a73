"""Loops of several kinds under a guard: a fault in one gradient leaves no trace, or the guard is refused in one line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.guard import Guard

STEPS, FAULTY = 40, 30
INPUTS, TARGETS = (torch.randn(STEPS, 16, n, generator=torch.Generator().manual_seed(n)) for n in (8, 2))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


class SharpnessAware(torch.optim.Optimizer):
    """Climbs, then makes the step of its base from where it was; remembers nothing of gradients itself."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad, alpha=0.05 / float(norm))

    @torch.no_grad()
    def back(self):
        for p, table in self.state.items():
            p.copy_(table["old"])
        self.base.step()


def loss_of(model, i):
    return nn.functional.mse_loss(model(INPUTS[i]), TARGETS[i])


def sharpness_aware():
    model = net()
    optimizer = SharpnessAware(model.parameters())

    def step(i, corrupt):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.climb()
        optimizer.zero_grad()
        loss_of(model, i).backward()
        corrupt(model)
        optimizer.back()

    return (model, optimizer), step


def sharpness_aware_with_its_base():
    (model, optimizer), step = sharpness_aware()
    return (model, optimizer, optimizer.base), step


def adversarial():
    model, judge = net(), net(1)
    one, other = (torch.optim.Adam(m.parameters(), 1e-2) for m in (model, judge))

    def step(i, corrupt):
        for _ in range(2):
            other.zero_grad()
            nn.functional.mse_loss(judge(INPUTS[i]), model(INPUTS[i]).detach()).backward()
            other.step()
        if i % 3 == 0:
            one.zero_grad()
            (loss_of(model, i) - 0.1 * nn.functional.mse_loss(judge(INPUTS[i]), model(INPUTS[i]))).backward()
            corrupt(model)
            one.step()

    return (model, one, other, judge), step


def accumulated_without_nan():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step(i, corrupt):
        loss = loss_of(model, i) * (torch.nan if i % 10 == 7 else 0.25)
        if not torch.isfinite(loss):
            optimizer.zero_grad()
            return
        loss.backward()
        corrupt(model)
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()

    return (model, optimizer), step


def trained(make, faulty=None):
    """The final parameters, and the guard if there is a fault."""
    parts, step = make()
    guard = None if faulty is None else Guard(*parts, strict=True)

    def corrupt(model):
        if guard is not None and i == faulty and not guard.alarms:
            model[0].weight.grad[0, 0] = 1e9

    for i in guard.iterate(range(STEPS)) if guard else range(STEPS):
        step(i, corrupt)
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return torch.cat([p.detach().flatten() for m in modules for p in m.parameters()]), guard


@pytest.mark.parametrize("make", [sharpness_aware, sharpness_aware_with_its_base, adversarial, accumulated_without_nan])
def test_a_fault_leaves_no_trace(make):
    clean, _ = trained(make)
    recovered, guard = trained(make, FAULTY)
    assert len(guard.alarms) == 1
    assert torch.equal(clean, recovered)


def test_an_optimizer_that_remembers_no_gradients_is_refused_in_one_line():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    with pytest.raises(UsageError, match="LBFGS keeps no momentum or moments") as refused:
        Guard(model, optimizer).step(optimizer.step, closure)
    assert "\n" not in str(refused.value)
