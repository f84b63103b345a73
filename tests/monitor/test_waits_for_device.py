"""Nothing that reads a step waits for the device. No GPU is needed: on torch's device ``meta`` the same operations run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unsilent.monitor.sampling import SampleIntervals
from unsilent.monitor.signals import row
from unsilent.monitor.signals.collector import SignalCollector

TO_HOST = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "unique", "_unique2", "is_nonzero")


class HostWaits(TorchDispatchMode):
    """Collects operations in which the host waits for a device: blocking copies between devices, and numbers for the host.

    A list as an index waits on a GPU as well, but is not seen here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)]
        name, devices = function.overloadpacket.__name__, {one.device.type for one in tensors}
        if len(devices) > 1:
            is_blocking = name in ("_to_copy", "copy_") and not (kwargs.get("non_blocking") or True in args[2:])
            takes_host_tensor = name in ("index", "index_put_", "where", "index_add", "scatter_reduce")
            if is_blocking or takes_host_tensor:
                self.found.append(name)
        elif name in TO_HOST and devices == {"meta"}:
            self.found.append(name)
        return result


class NoCopy:
    """Stands for the copy to the host, which does not wait."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_meta


def test_what_waits_is_found():
    on_device, index = torch.ones(4, device="meta"), torch.tensor([0, 2])
    with HostWaits() as waits:
        on_device + 1
        index.to("meta", non_blocking=True)
        assert waits.found == []
        index.to("meta")
        on_device[index]
    assert waits.found == ["_to_copy", "index"]


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("most_parts", [1, 256])
def test_no_step_waits_for_the_device(monkeypatch, interval, most_parts):
    monkeypatch.setattr(row, "HostCopy", NoCopy)
    monkeypatch.setattr(row, "MOST_PARTS", most_parts)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64)).to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    inputs = torch.zeros(4, 8, device="meta")

    def step() -> None:
        loss = model(inputs).square().sum()
        loss.backward()
        optimizer.step()
        collector.take_row()

    with SignalCollector(model, [optimizer], values=["2:output", "2:gradient"]) as collector:
        collector.intervals = SampleIntervals(interval, interval, interval)
        step()
        with HostWaits() as waits:
            for _ in range(3):
                step()
    assert waits.found == []


def test_a_scaled_loss_does_not_wait():
    model = nn.Linear(2, 2, device="meta")
    loss = torch.ones((), device="meta")
    with SignalCollector(model, [torch.optim.SGD(model.parameters())]) as collector, HostWaits() as waits:
        collector.before_backward([loss], torch.ones((), device="meta"))
    assert waits.found == []
