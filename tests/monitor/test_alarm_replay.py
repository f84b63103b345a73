"""Steps that are executed again after an alarm to be compared: what is found, and that the training is not changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from monitor.unreachable import Unreachable
from unsilent.checkpoints.verified_saving import verified_load, verified_save
from unsilent.monitor import Monitor, alarm_replay
from unsilent.recovery import fault_verdict, step_replay
from unsilent.recovery.evidence import SAME_DEVICE

FAULTY, BATCHES = 30, 40


class Counts(Unreachable):
    """What is counted in the loop; nothing leads to it."""

    def __init__(self):
        self.calls, self.evidence = 0, []


@pytest.fixture
def counts(monkeypatch):
    result = Counts()

    def judge(evidence):
        result.evidence.append(evidence)
        return replace(fault_verdict.judge(evidence), exit_code=0)  # the training goes on

    monkeypatch.setattr(alarm_replay, "judge", judge)
    monkeypatch.setattr(step_replay, "SECONDS", 0.0)  # three executions
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


def same_device(evidence):
    return [one for one in evidence.executions if one.place == SAME_DEVICE and not one.dtype]


def in_float64(evidence):
    (result,) = [one for one in evidence.executions if one.dtype]
    return result


def test_a_batch_that_is_not_finite_comes_again_and_is_named(counts):
    batches = torch.randn(BATCHES, 8, 6)
    batches[FAULTY, 3, 2] = float("nan")
    train_plain(counts, nn.Linear(6, 2), batches)
    evidence = counts.evidence[0]
    assert evidence.batch_problem == "element [3, 2] of tensor 1 of the batch is nan"
    assert [(one.is_equal, one.has_alarm) for one in same_device(evidence)] == [(True, True)] * 3
    wide = in_float64(evidence)
    assert (wide.has_alarm, wide.overflowed, wide.is_equal) == (True, "", None)


class Half(nn.Module):
    def forward(self, x):
        return x.half().float()


def test_a_range_that_overflows_is_named_with_its_operation(counts):
    batches = torch.randn(BATCHES, 8, 6)
    batches[FAULTY] *= 1e6
    train_plain(counts, nn.Sequential(nn.Linear(6, 4), Half(), nn.Linear(4, 2)), batches)
    evidence = counts.evidence[0]
    assert [(one.is_equal, one.has_alarm) for one in same_device(evidence)] == [(True, True)] * 3
    wide = in_float64(evidence)
    assert (wide.has_alarm, wide.overflowed, wide.is_equal) == (False, "1#_to_copy.0", None)
    assert "times that of the" in evidence.batch_problem


class Doubled(nn.Module):
    """In the backward pass a gradient of float16 overflows."""

    def forward(self, x):
        return x.half().mul(6e4).float() / 6e4


def test_an_operation_of_the_backward_pass_is_named(counts):
    batches = torch.randn(BATCHES, 8, 6) / 100
    scale = [1.0] * BATCHES
    scale[FAULTY] = 1e9

    train_plain(counts, nn.Sequential(nn.Linear(6, 4), Doubled(), nn.Linear(4, 2)), batches, scale)
    wide = in_float64(counts.evidence[0])
    assert wide.overflowed.endswith("/grad")
    assert wide.overflowed.startswith("1#")


class Device(TorchDispatchMode):
    """A device on which products have a wrong element from one step on; ``same``: each time the same one."""

    def __init__(self, counts, same):
        super().__init__()
        self._counts, self._same, self._draws = counts, same, np.random.default_rng(0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default and self._counts.calls == FAULTY + 1:
            result.view(-1)[0] += 1e6 if self._same else 1e6 * (1 + self._draws.random())
        return result


@pytest.mark.parametrize("same", [True, False])
def test_a_device_that_always_fails(counts, same):
    with Device(counts, same):
        train_plain(counts, nn.Linear(6, 2), torch.randn(BATCHES, 8, 6), is_step_kept=True)
    evidence = counts.evidence[0]
    assert [(one.is_equal, one.has_alarm) for one in same_device(evidence)] == [(same, True)] * 3
    assert len({one.digest for one in same_device(evidence)}) == (1 if same else 3)
    wide = in_float64(evidence)
    assert (wide.has_alarm, wide.overflowed, wide.is_equal) == (True, "", None if same else False)
    assert evidence.tolerance == 0


def test_executions_that_differ_by_rounding_give_the_tolerance(counts):
    def rounding(number, x):
        return transient(number, x) * (1 + 1e-6 * (number % 97))

    train(counts, rounding)
    evidence = counts.evidence[0]
    assert 0 < evidence.tolerance < 1e-3
    assert [(one.is_equal, one.has_alarm) for one in same_device(evidence)] == [(False, False)] * 3


def test_what_comes_again_but_for_rounding_is_equal(counts):
    batches = torch.randn(BATCHES, 8, 6)
    batches[FAULTY] *= 1e6
    train_plain(counts, nn.Sequential(nn.Linear(6, 2), Rounding(counts)), batches)
    evidence = counts.evidence[0]
    assert 0 < evidence.tolerance < 1e-3
    assert [(one.is_equal, one.has_alarm) for one in same_device(evidence)] == [(True, True)] * 3


class Rounding(nn.Module):
    """Nothing leads to what it counts with, as with the order of threads on a device."""

    __slots__ = ("counts",)

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def forward(self, x):
        return x * (1 + 1e-6 * (self.counts.calls % 97))


def train_plain(counts, model, batches, scale=None, is_step_kept=False, **options):
    """A training of small steps; ``is_step_kept``: executions again count as the same step."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer, on_alarm="replay", sampling="fixed:1", **options) as monitor:
        for number, x in monitor.iterate(list(enumerate(batches))):
            counts.calls = number + 1 if is_step_kept else counts.calls + 1
            optimizer.zero_grad()
            loss = model(x).square().mean()
            (loss * scale[number] if scale else loss).backward()
            optimizer.step()


def test_steps_since_a_checkpoint_was_loaded_are_counted(counts, tmp_path):
    verified_save({"x": torch.zeros(1)}, tmp_path / "a.pt")

    def load(number, x):
        if number == FAULTY - 3:
            verified_load(tmp_path / "a.pt")
        return transient(number, x)

    train(counts, load)
    assert counts.evidence[0].steps_since_load == 4  # the step that loads, and three more


def train_with_a_counter(faulty_batch=None, on_alarm="replay", faulty=FAULTY):
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = torch.randn(BATCHES, 8, 6)
    if faulty_batch is not None:
        batches[FAULTY - 1, 3, 2] = faulty_batch
    number = 0
    with Monitor(model, optimizer, on_alarm=on_alarm, sampling="fixed:1") as monitor:
        for x in monitor.iterate(batches):
            number += 1
            optimizer.zero_grad()
            loss = model(x).square().mean()
            (loss * 1e6 if number == faulty else loss).backward()
            optimizer.step()


def test_a_loop_that_cannot_be_executed_again_is_said_with_the_alarm(counts):
    train_with_a_counter()
    (evidence,) = counts.evidence
    assert evidence.problem == "the loop changes what cannot be put back: number"
    assert evidence.executions == ()
    assert evidence.batch_problem == ""


@pytest.mark.parametrize(
    ("bad", "problem"),
    [(float("nan"), "element [3, 2] of tensor 0 of the batch is nan"), (1e9, "times that of the")],
)
def test_a_wrong_batch_is_named_where_its_step_cannot_be_executed_again(counts, bad, problem):
    train_with_a_counter(bad, faulty=None)
    evidence = counts.evidence[0]
    assert evidence.problem == "the loop changes what cannot be put back: number"
    assert problem in evidence.batch_problem
    assert fault_verdict.judge(evidence).code == "UNSILENT-S01"


@pytest.mark.parametrize(
    ("on_alarm", "consequence"),
    [("rerun", "an alarm is only logged"), ("replay", "an alarm ends the job without executing its step again")],
)
def test_a_loop_with_a_counter_is_warned_of_once_before_any_alarm(counts, caplog, on_alarm, consequence):
    train_with_a_counter(on_alarm=on_alarm, faulty=None)
    (line,) = [record.getMessage() for record in caplog.records if "executed again" in record.getMessage()]
    assert line == (
        "steps cannot be executed again: the loop changes what cannot be put back: number; as long as it does, "
        + consequence
    )


def test_a_loop_with_a_running_mean_in_slots_is_not_executed_again(counts):
    @dataclass(slots=True)
    class Scale:
        mean: float = 1.0

    scale = Scale()

    def spoil(number, x):
        scale.mean = 0.9 * scale.mean + 0.1 * float(x.detach().abs().mean())
        return transient(number, x / scale.mean)

    plain, _, _ = train(counts, spoil, on_alarm="log")
    counts.calls, scale.mean = 0, 1.0
    replayed, _, _ = train(counts, spoil)
    assert counts.evidence[0].problem == "the loop changes what cannot be put back: spoil: scale.mean"
    assert all(map(torch.equal, plain, replayed))


def test_an_error_of_a_replay_is_logged_and_the_training_goes_on_as_it_was(counts, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no digest")

    plain = train(counts, transient, on_alarm="log")
    counts.calls = 0
    monkeypatch.setattr(step_replay, "digest_text", fail)
    replayed = train(counts, transient)
    assert counts.evidence[0].problem == "the step could not be executed again: RuntimeError: no digest"
    assert "no digest" in caplog.text
    for one, other in zip(plain[0], replayed[0], strict=True):
        assert torch.equal(one, other)
