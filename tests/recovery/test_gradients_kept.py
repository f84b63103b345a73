"""Gradients of a state in the ring: copied where a training writes to them, held as they are where it replaces them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unsilent.monitor import Guard, RepeatabilityWarning
from unsilent.recovery.ring import CERTAIN, Ring

LAST = 4 * (CERTAIN + 4)
X = torch.linspace(-1, 1, 32).reshape(8, 4)


def training():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def backward(model):
    model(X).square().mean().backward()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_come_back_whether_they_are_copied_or_not(to_none):
    model, optimizer = training()
    ring = Ring(model, [optimizer])
    for _ in range(CERTAIN + 3):
        held = ring.keep()
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad(set_to_none=to_none)
        backward(model)
        optimizer.step()
    size = sum(t.numel() * 4 for t in model.parameters())
    assert held.nbytes == size * (3 if to_none else 4) + 8  # parameters, two moments, gradients; two counts of steps
    ring.back(1)
    assert ring.whole
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_gradients_that_are_written_to_after_all_are_reported_and_copied_from_then_on():
    model, optimizer = training()
    ring = Ring(model, [optimizer])
    for _ in range(CERTAIN + 2):
        ring.keep()
        optimizer.zero_grad()
        backward(model)
    for whole in (False, True, True):
        before = [p.grad.clone() for p in model.parameters()]
        ring.keep()
        backward(model)
        ring.keep()
        ring.back(2)
        assert ring.whole == whole
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True)) == whole


@pytest.mark.parametrize(
    ("zeroed", "whole"), [(lambda n: n < LAST, False), (lambda n: n % 3 == 0, True), (lambda n: True, True)]
)
def test_a_guard_says_where_gradients_were_lost(zeroed, whole):
    """A loop that stops zeroing gradients at some step, one that adds up three gradients, and one that zeroes always."""
    ends = []
    for faulty in (False, True):
        model, optimizer = training()
        pending = {LAST + 5} if faulty else set()

        def steps(batches, model=model, optimizer=optimizer, pending=pending):
            for number, x in batches:
                if zeroed(number):
                    optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if number in pending:
                    pending.clear()
                    optimizer.state[model.weight]["exp_avg"][0, 0] = 1e9

        if not faulty:
            steps(enumerate([X] * (LAST + 12)))
        else:
            guard = Guard(model, optimizer, strict=True)
            if whole:
                steps(guard.over(enumerate([X] * (LAST + 12))))
            else:
                guard.close()
                guard = Guard(model, optimizer)
                with pytest.warns(RepeatabilityWarning, match="added to gradients that it used to replace"):
                    steps(guard.over(enumerate([X] * (LAST + 12))))
            assert guard.recoveries == 1
            guard.close()
        ends.append([p.detach().clone() for p in model.parameters()])
    if whole:
        assert all(map(torch.equal, *ends))
