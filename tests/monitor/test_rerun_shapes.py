"""Loops of every shape: after an alarm they end with the bits of a fault-free one, or are not executed again, which is logged."""

from __future__ import annotations

import copy
import itertools
import types
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from monitor.unreachable import Unreachable
from unsilent.launch.rerun_loops import RerunLoops
from unsilent.monitor import Monitor

FAULTY, BATCHES = 30, 48
COUNTED = 0


class Update(Unreachable):
    """One step; in one of them the loss is far too large, once. What it counts is no part of the loop: nothing leads to it."""

    def __init__(self, model, optimizer, fault):
        self.model, self.optimizer, self.fault, self.calls = model, optimizer, fault, 0

    def __call__(self, x, y):
        self.calls += 1
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        (loss * 1e5 if self.fault == self.calls else loss).backward()
        self.optimizer.step()
        return loss.detach()


def plain(update, loader, model):
    for x, y in loader:
        update(x, y)


def epochs(update, loader, model):
    for _ in range(2):
        for x, y in loader:
            update(x, y)


def counted_epochs(update, loader, model):
    epoch = 0
    while epoch < 2:
        for x, y in loader:
            update(x, y)
        epoch += 1
    return epoch


def inner_loops_and_temporary_values(update, loader, model):
    for x, y in loader:
        total = 0.0
        for part in range(2):
            total += float(update(x[part::2], y[part::2]))
        mean = total / 2
    return mean


def some_batches_left_out(update, loader, model):
    for x, y in loader:
        if y[0] == 0:
            continue
        if x.sum() > 1e9:
            break
        for part in itertools.count():
            if part == 1:
                break
            update(x, y)


def average_in_place(update, loader, model):
    average = [p.detach().clone() for p in model.parameters()]
    for x, y in loader:
        update(x, y)
        for old, new in zip(average, model.parameters(), strict=True):
            old.mul_(0.9).add_(new.detach(), alpha=0.1)
    return average


def counter_ends_it(update, loader, model):
    step = 0
    while step < 40:
        for x, y in loader:
            if step > 39:
                break
            update(x, y)
            step += 1
    return step


def taken_by_next(update, loader, model):
    batches, step = iter(loader), 0
    while step < 40:
        update(*next(batches))
        step += 1
    return step


def range_and_next(update, loader, model):
    batches = iter(loader)
    for _ in range(40):
        update(*next(batches))


def enumerated(update, loader, model):
    for number, (x, y) in enumerate(loader):
        if number % 3:
            update(x, y)
    return number


def zipped(update, loader, model):
    for (x, y), sign in zip(loader, itertools.cycle([1, -1])):
        update(x * sign, y)


def cycled(update, loader, model):
    for x, y in itertools.islice(itertools.cycle(loader), 60):
        update(x, y)


def generator(update, loader, model):
    def batches():
        yield from enumerate(loader)

    for number, (x, y) in batches():
        update(x * (1 if number % 2 else -1), y)


def generator_that_loops(update, loader, model):
    def batches():
        for x, y in loader:
            yield x + 1, y

    for number, (x, y) in enumerate(batches()):
        update(x * (1 if number % 2 else -1), y)


def comprehension(update, loader, model):
    return [float(update(x, y)) for x, y in loader]


def attribute(update, loader, model):
    state = types.SimpleNamespace(step=0)
    for x, y in loader:
        state.step += 1
        update(x * (1 + state.step % 2), y)
    return state.step


class Owner:
    counted = 0

    def __init__(self):
        self.step = 0

    def work(self, update, x, y):
        self.step += 1
        update(x * (1 + self.step % 2), y)

    def work_for_all(self, update, x, y):
        type(self).counted += 1
        update(x * (1 + self.counted % 2), y)


def attribute_in_a_method(update, loader, model):
    owner = Owner()
    for x, y in loader:
        owner.work(update, x, y)
    return owner.step


def attribute_of_a_class(update, loader, model):
    Owner.counted = 0
    owner = Owner()
    for x, y in loader:
        owner.work_for_all(update, x, y)
    return Owner.counted


def count_globally():
    global COUNTED
    COUNTED += 1
    return COUNTED


def global_variable(update, loader, model):
    global COUNTED
    COUNTED = 0
    for x, y in loader:
        update(x * (1 + count_globally() % 2), y)
    return COUNTED


def closure(update, loader, model):
    step = 0

    def work(x, y):
        nonlocal step
        step += 1
        update(x * (1 + step % 2), y)

    for x, y in loader:
        work(x, y)
    return step


def dictionary(update, loader, model):
    counts = {"step": 0}
    for x, y in loader:
        counts["step"] += 1
        update(x * (1 + counts["step"] % 2), y)
    return counts


def list_of_losses(update, loader, model):
    losses = []
    for x, y in loader:
        losses.append(float(update(x, y)))
    return losses


def last_losses(update, loader, model):
    losses = deque([0.0] * 3, maxlen=3)
    for x, y in loader:
        losses.append(float(update(x, y)))
    return list(losses)


def seen_before(update, loader, model):
    seen = set()
    for x, y in loader:
        if (key := round(float(x[0, 0]), 2)) not in seen:
            update(x, y)
        seen.add(key)
    return len(seen)


def array_of_counts(update, loader, model):
    counts = np.zeros(3, int)
    for x, y in loader:
        counts[int(y[0])] += 1
        update(x * (1 + int(counts[0]) % 2), y)
    return counts.tolist()


def best_so_far(update, loader, model):
    best = float("inf")
    for x, y in loader:
        best = min(best, float(update(x, y)))
    return best


def previous_batch(update, loader, model):
    before = None
    for x, y in loader:
        if before is not None:
            update(*before)
        before = x, y


def running_average(update, loader, model):
    average = torch.zeros(())
    for x, y in loader:
        average = 0.9 * average + 0.1 * update(x, y)
    return average


def replaced_in_a_dictionary(update, loader, model):
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for x, y in loader:
        update(x, y)
        for name, p in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * p.detach()
    return list(average.values())


def iterator_of_its_own(update, loader, model):
    signs = iter([1, -1] * 1000)
    for x, y in loader:
        update(x * next(signs), y)


def counter_object(update, loader, model):
    numbers = itertools.count()
    for x, y in loader:
        update(x * (1 + next(numbers) % 2), y)


def generator_of_numbers(update, loader, model):
    numbers = (number % 2 for number in range(10**6))
    for x, y in loader:
        update(x * (1 + next(numbers)), y)


def second_loader(update, loader, model):
    others = iter(DataLoader(TensorDataset(torch.arange(1000.0)), 1))
    for x, y in loader:
        update(x * (1 + next(others)[0] % 2), y)


def model_copied(update, loader, model):
    for x, y in loader:
        update(x, y)
        copy.deepcopy(model)(x)


def hook_after_a_large_gradient(update, loader, model):
    for x, y in loader:
        update(x, y)
        if model[0].weight.grad.abs().max() > 1e3:
            model[1].register_forward_hook(lambda module, inputs, output: output * 0.9)


def spikes(update, loader, model):
    seen = {}
    for x, y in loader:
        update(x, y)
        if model[0].weight.grad.abs().max() > 1e3:
            seen["large"] = 1
    return [len(seen)]


def average_from_a_step_on(update, loader, model):
    average = None
    for x, y in loader:
        update(x, y)
        if update.optimizer.state[model[0].weight]["step"] < FAULTY - 1:
            continue
        average = [p.detach().clone() for p in model.parameters()] if average is None else average
        with torch.no_grad():
            for old, new in zip(average, model.parameters(), strict=True):
                old.lerp_(new, 0.1)
    return average


EXACT = [
    plain, epochs, counted_epochs, inner_loops_and_temporary_values, some_batches_left_out, average_in_place,
    model_copied,
]  # fmt: skip
REFUSED = [
    counter_ends_it, taken_by_next, range_and_next, enumerated, zipped, cycled, generator, generator_that_loops, comprehension,
    attribute, attribute_in_a_method, attribute_of_a_class, global_variable, closure, dictionary, list_of_losses, last_losses,
    seen_before, array_of_counts, previous_batch, running_average, replaced_in_a_dictionary, iterator_of_its_own,
    counter_object, generator_of_numbers, second_loader, hook_after_a_large_gradient, spikes, average_from_a_step_on,
]  # fmt: skip


def trained(loop, fault=None, monitored=True):
    """All that a training leaves, as tensors, and its verdicts."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4 * BATCHES, 6), torch.randint(3, (4 * BATCHES,)))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    monitor = Monitor(model, optimizer, on_alarm="rerun", sampling="fixed:1") if monitored else None
    loops = RerunLoops(lambda: monitor)
    loops.start()
    try:
        result = loop(Update(model, optimizer, fault), loader, model)
    finally:
        loops.stop()
        if monitor is not None:
            monitor.close()
    left = [*model.parameters(), *(t for table in optimizer.state.values() for t in table.values())]
    result = [] if result is None else result if isinstance(result, list) else [result]
    left += [torch.as_tensor(list(one.values()) if isinstance(one, dict) else one) for one in result]
    return left, monitor.verdicts if monitor else []


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


EITHER = [best_so_far]
"""By whether the variable has changed in the steps to be executed again."""


@pytest.mark.parametrize("loop", [*EXACT, *REFUSED, *EITHER])
def test_a_loop_is_exact_or_refused(loop, caplog):
    clean, faulty = trained(loop, monitored=False)[0], trained(loop, FAULTY, monitored=False)[0]
    assert not same(clean, faulty)
    recovered, (verdict, *_) = trained(loop, FAULTY)
    if verdict.outcome == "the last steps are executed again":
        assert loop not in REFUSED
        assert same(recovered, clean)
    else:
        assert loop not in EXACT
        assert verdict.outcome.startswith("steps cannot be executed again: ")
        assert "steps cannot be executed again: " in caplog.text
        assert same(recovered, faulty)
