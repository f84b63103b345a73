"""Steps that are executed again after an alarm to be compared: what is found, and that the training is not changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unsilent.monitor import Monitor, alarm_replay
from unsilent.monitor import monitor as monitor_module
from unsilent.recovery.evidence import SAME_DEVICE

FAULTY, BATCHES = 30, 40


class Counts:
    """What is counted in the loop; nothing leads to it."""

    __slots__ = ("calls", "evidence")

    def __init__(self):
        self.calls, self.evidence = 0, []


@pytest.fixture
def counts(monkeypatch):
    result = Counts()

    def judge(evidence):
        result.evidence.append(evidence)
        return alarm_replay.judge(evidence)

    monkeypatch.setattr(monitor_module, "judge", judge)
    return result


def state_of(model, optimizer):
    moments = [t for table in optimizer.state.values() for t in table.values()]
    gradients = [p.grad for p in model.parameters()]
    return [t.clone() for t in (*model.parameters(), *model.buffers(), *moments, *gradients)]


def train(counts, spoil=lambda number, x: x, dropout=0.1, uses="iterate", **options):
    """A training with dropout and moving statistics; ``spoil`` gets the number of each forward pass and its output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(BATCHES * 8, 6), torch.randint(0, 3, (BATCHES * 8,))), 8
    )

    def step(x, y):
        counts.calls += 1
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(spoil(counts.calls, model(x)), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    with Monitor(model, optimizer, **{"on_alarm": "replay", "sampling": "fixed:1", **options}) as monitor:
        if monitor.settings.on_alarm != "replay":
            for x, y in batches:
                step(x, y)
        elif uses == "iterate":
            for x, y in monitor.iterate(batches):
                step(x, y)
        else:
            for x, y in batches:
                monitor.step(step, x, y)
    return state_of(model, optimizer), torch.get_rng_state(), monitor


def transient(number, x):
    """Only the gradient is wrong, once."""
    if number == FAULTY:
        x.register_hook(lambda g: g * 1e6)
    return x


@pytest.mark.parametrize("uses", ["iterate", "step"])
def test_a_training_with_replays_ends_with_the_bits_of_one_without(counts, uses):
    plain = train(counts, transient, uses=uses, on_alarm="log")
    calls, counts.calls = counts.calls, 0
    replayed = train(counts, transient, uses=uses)
    assert counts.calls > calls
    assert [one.problem for one in counts.evidence] == [""] * len(counts.evidence)
    assert counts.evidence
    for one, other in zip(plain[0], replayed[0], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain[1], replayed[1])
    assert [(a.step, a.tensor, a.rule) for a in plain[2].alarms] == [
        (a.step, a.tensor, a.rule) for a in replayed[2].alarms
    ]


def test_a_transient_fault_does_not_come_again(counts):
    train(counts, transient)
    evidence = counts.evidence[0]
    assert (evidence.step, evidence.rank, evidence.world_size, evidence.problem) == (FAULTY - 1, 0, 1, "")
    same = [one for one in evidence.executions if one.place == SAME_DEVICE and not one.dtype]
    assert [(one.is_equal, one.has_alarm) for one in same] == [(False, False)] * 3
    assert len({one.digest for one in same}) == 1
    (wide,) = [one for one in evidence.executions if one.dtype]
    assert (wide.has_alarm, wide.overflowed, wide.is_equal) == (False, "", None)
    assert evidence.tolerance == 0
