"""Analytic bounds: partial sums counted in one step, the rule named in the alarm, what it does not cover calibrated."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.guard import AnalyticBounds, Guard, GuardStop

BATCH, SIDE = 16, 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1)  # 3 x 3 positions
        self.norm = nn.BatchNorm2d(4)
        self.back = nn.ConvTranspose2d(4, 3, 2, stride=2)  # 6 x 6 positions
        self.fc = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.scale * self.fc(self.back(self.norm(self.conv(x)).relu()).flatten(2).transpose(1, 2))


def train(optimizer_of, steps=15, bounds=None, fault=None, model=None):
    torch.manual_seed(0)
    model = model or Net()
    optimizer = optimizer_of(model.parameters())
    with contextlib.closing(Guard(model, optimizer, bounds=bounds)) as guard:
        for number in range(steps):
            x = torch.randn(BATCH, 2, SIDE, SIDE)

            def step(x=x, number=number, hit=[]):  # noqa: B006
                optimizer.zero_grad()
                model(x).square().mean((1, 2)).mean().backward()
                if fault and number == fault[0] and not hit:
                    hit.append(model.get_parameter(fault[1]).grad.view(-1)[0].fill_(fault[2]))
                optimizer.step()

            guard.step(step)
    return guard


def bounds_of(guard):
    return guard._check_steps.bounds._fixed_by_name


def test_partial_sums_of_every_layer():
    adam = bounds_of(train(torch.optim.Adam, 1, AnalyticBounds()))
    sums = {"conv.weight": 9, "conv.bias": 9, "norm.weight": 9, "norm.bias": 9, "back.weight": 36, "fc.weight": 36, "fc.bias": 36,
            "back.bias": 36}  # fmt: skip
    wanted = {f"{name}/exp_avg": 20 * (n / BATCH) ** 0.5 for name, n in sums.items()}
    wanted |= {f"{name}/exp_avg_sq": 400 * n / BATCH for name, n in sums.items()}
    assert adam == pytest.approx(wanted)
    sgd = bounds_of(train(lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9), 1, AnalyticBounds(loss_terms=BATCH * 36)))
    assert sgd["fc.weight/momentum_buffer"] == pytest.approx(10 * 20 / (BATCH * 36) ** 0.5)
    # A buffer of scaled gradients is no sum of gradients.
    rms = bounds_of(train(lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9), 1, AnalyticBounds()))
    assert {name.rpartition("/")[2] for name in rms} == {"square_avg"}


def test_micro_batches_count_together_and_tied_weights_too():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.out = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.out.weight = self.emb.weight

        def forward(self, x):
            return self.out(self.emb(x))

    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    with contextlib.closing(Guard(model, optimizer, bounds=AnalyticBounds())) as guard:

        def step():
            for _ in range(2):
                (model(torch.randint(10, (8, 5))).square().mean() / 2).backward()
            optimizer.step()

        guard.step(step)
        model.eval()
        model(torch.zeros(3, 5, dtype=torch.int64))
    # 2 micro-batches of 8 x 5 tokens, in the embedding and in the output.
    assert bounds_of(guard)["emb.weight/exp_avg"] == pytest.approx(20 * 160**0.5 / 16)


def test_the_alarm_names_the_rule():
    early = (3, "conv.weight", 1e6)  # calibrated bounds do not hold yet
    with pytest.raises(GuardStop, match="step 10"):  # by now it is too late to undo
        train(torch.optim.Adam, fault=early)
    guard = train(torch.optim.Adam, bounds=AnalyticBounds(), fault=early)
    (alarm,) = guard.alarms
    assert (alarm.rule, alarm.step, alarm.tensor) == ("analytic", 3, "conv.weight/exp_avg")
    assert alarm.baseline == pytest.approx(15)
    assert alarm.summary.endswith("baseline 15 (analytic)")
    (alarm,) = train(torch.optim.Adam, bounds=AnalyticBounds(), fault=(13, "scale", 1e6)).alarms
    assert (alarm.rule, alarm.tensor) == ("calibrated", "scale/exp_avg")
    (alarm,) = train(torch.optim.Adam, bounds=AnalyticBounds(), fault=(3, "scale", float("nan"))).alarms
    assert alarm.rule == "not finite"
    (alarm,) = train(torch.optim.Adam, bounds={"scale/exp_avg": 5.0}, fault=(3, "scale", 1e3)).alarms
    assert alarm.rule == "fixed"


def test_what_cannot_be_measured_is_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return (x.mean((1, 2, 3))[:, None, None] * self.w).expand(-1, 3, 2)

    with pytest.raises(UsageError, match="but none ran"):
        train(torch.optim.Adam, 1, AnalyticBounds(), model=Own())
    with pytest.raises(UsageError, match="loss_terms is 0"):
        AnalyticBounds(0)
