"""An error inside the monitor is logged once, and the training goes on with the same bits."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from unsilent.monitor import Monitor
from unsilent.monitor.signals import collector
from unsilent.monitor.signals.state_watch import StateWatch

PLACES = [
    (StateWatch, "compare"),
    (StateWatch, "take"),
    (StateWatch, "updates"),
    (collector.SignalCollector, "take_row"),
    (collector, "norms_and_largest"),
    (Monitor, "_judge"),
    (Monitor, "_conclude"),
]


def losses(monitored, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    result = []
    with Monitor(model, optimizers, sampling="fixed:1", **options) if monitored else contextlib.nullcontext():
        for _ in range(12):
            loss = model(torch.randn(5, 4)).square().mean()
            model.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            result.append(loss.item())
    return result


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda value: getattr(value, "__name__", value))
def test_the_training_goes_on(monkeypatch, caplog, owner, name):
    golden, plain, calls = losses(monitored=False), getattr(owner, name), []

    def raises_in_the_end(*given, **named):
        calls.append(1)
        if len(calls) > 5:
            raise ZeroDivisionError("planted")
        return plain(*given, **named)

    monkeypatch.setattr(owner, name, raises_in_the_end)
    assert losses(monitored=True) == golden
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert ["planted" in record.message for record in errors] == [True]
    assert len(calls) == 6
    calls.clear()
    with pytest.raises(ZeroDivisionError):
        losses(monitored=True, strict=True)
