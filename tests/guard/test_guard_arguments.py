"""What Guard, Monitor and inject are given is checked before anything is made of it: one line says what was expected."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.guard import Guard
from unsilent.monitor import Monitor

NAN = math.nan


def training():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return model, torch.optim.Adam(model.parameters())


NO_COUNTS = (-1, 0, 1.5, NAN, True, "a", None)
WRONG = [
    *[({name: value}, name) for name in ("snapshot_interval", "snapshot_count", "spread") for value in NO_COUNTS[:-1]],
    *[({"factor": value}, "factor") for value in (*NO_COUNTS, 1, math.inf) if value != 1.5],
    *[
        ({"bounds": {name: value}}, "bounds")
        for name in ("0.weight", "0.weight/exp_avg")
        for value in (-1, NAN, "a", 0)
    ],
    ({"bounds": {"zz": 1.0}}, "unknown watched tensor 'zz'"),
    ({"bounds": {"0.weight/zz": 1.0}}, "unknown watched tensor '0.weight/zz'"),
    ({"bounds": "abc"}, "bounds"),
    ({"bounds": 3.0}, "bounds"),
    ({"on_alarm": "stop"}, "on_alarm"),
    ({"ranks": 3}, "ranks"),
    ({"check": 3}, "check"),
    ({"snapshot_location": 3}, "snapshot_location"),
]


@pytest.mark.parametrize(("options", "named"), WRONG)
def test_an_option_of_a_guard_that_makes_no_sense_is_named(options, named):
    with pytest.raises(UsageError, match=named) as refused:
        Guard(*training(), **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", [Guard, Monitor])
def test_what_is_no_training_is_refused(kind):
    model, optimizer = training()
    _, other = training()
    name = kind.__name__
    for parts in (
        ("m", optimizer),
        (model, None),
        (model, "o"),
        (model, []),
        (model, [optimizer, None]),
        (None, optimizer),
    ):
        with pytest.raises(UsageError, match=rf"{name}\(.*\) was given; expected a module and a torch optimizer"):
            kind(*parts)
    with pytest.raises(UsageError, match="no parameter of Adam belongs to this Sequential"):
        kind(model, other)


@pytest.mark.parametrize("location", ["device", "host", "file"])
def test_states_that_cannot_fit_are_refused_before_any_is_kept(location):
    with pytest.raises(UsageError, match=r"the snapshots need .* is free"):
        Guard(*training(), snapshot_count=10**12, snapshot_location=location)
    assert Guard(*training(), snapshot_count=10**4).nbytes == 0  # as many as fit, made one by one


@pytest.mark.parametrize("sinks", ["abc", print, [3], None])
def test_what_is_no_sink_is_refused(sinks):
    with pytest.raises(UsageError, match="expected functions that are called with each event"):
        Monitor(*training(), sinks=sinks)


@pytest.mark.parametrize("address", ["param:0.weight", "op:0"])
@pytest.mark.parametrize("seed", [-1, 1.5, NAN, "a", None, True])
def test_a_seed_is_a_whole_number(address, seed):
    with pytest.raises(UsageError, match="seed is .*; expected (a whole number, )?0 or more"):
        unsilent.inject(training()[0], address, seed=seed)
