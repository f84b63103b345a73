"""Faults injected in several threads at once, each with a model of its own: none notices the others."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import unsilent

THREADS, ROUNDS = 3, 4


def step_with_fault(address, seed, meet=lambda: None):
    """The parameters after one step with a fault, and what landed; ``meet`` is called between its parts."""
    generator = torch.Generator().manual_seed(seed)  # the global ones are those of all threads
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    x = torch.randn(4, 8, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    meet()
    with unsilent.inject(model, address, bit=20, optimizers=[optimizer]) as step:
        meet()
        loss = nn.functional.cross_entropy(model(x), torch.arange(4))
        meet()
        loss.backward()
        meet()
        optimizer.step()
        meet()
    meet()
    landed = [(one.fault.site, one.fault.elements.tolist()) for one in step.applied_faults]
    return torch.cat([p.detach().flatten() for p in model.parameters()]), landed


@pytest.mark.parametrize(
    "addresses",
    [("op:2/fwd/out",) * THREADS, ("op:2/grad_wt/out", "op:0/fwd/out", "op:2.weight#add.0/optim/out")],
)
def test_each_thread_has_the_step_that_it_has_alone(addresses):
    alone = [step_with_fault(address, number) for number, address in enumerate(addresses)]
    early_stop = torch.utils.checkpoint._enable_checkpoint_early_stop
    barrier, results, errors = threading.Barrier(THREADS, timeout=60), {}, []

    def work(number):
        try:
            for again in range(ROUNDS):
                results[number, again] = step_with_fault(addresses[number], number, barrier.wait)
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(results) == THREADS * ROUNDS
    for (number, _), (parameters, landed) in results.items():
        assert landed == alone[number][1]
        assert torch.equal(parameters, alone[number][0])
    assert torch.utils.checkpoint._enable_checkpoint_early_stop is early_stop
