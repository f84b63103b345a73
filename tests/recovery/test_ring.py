"""States put back bit for bit, for every kind of optimizer; memory is used again."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.recovery.ring import SnapshotRing, StagedCopy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(4 * 36, 3)

    def forward(self, x):
        return self.fc(self.drop(self.norm(self.conv(x)).relu()).flatten(1))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


def training(name, layout=torch.contiguous_format):
    torch.manual_seed(0)
    model = Net().to(memory_format=layout)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=50) if name == "sgd" else (
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    )  # fmt: skip
    return model, optimizer, scheduler


def step(model, optimizer, scheduler):
    x = torch.randn(6, 1, 8, 8) + random.random() + np.random.rand()

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    scheduler.step()


def bits(model, optimizer, scheduler):
    """All that a training consists of, as bytes and texts."""
    found = [t.detach().numpy().tobytes() for t in (*model.parameters(), *model.buffers())]
    found += [b"" if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()]
    found += [
        repr(optimizer.state_dict()),
        repr(scheduler.state_dict()),
        torch.random.get_rng_state().numpy().tobytes(),
    ]
    return [*found, repr(np.random.get_state()), repr(random.getstate())]


@pytest.mark.parametrize("where", ["device", "host", "file"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_come_back_bit_for_bit(name, where):
    parts = training(name)
    model, optimizer, scheduler = parts
    torch.set_printoptions(precision=20, threshold=10**6)
    ring = SnapshotRing(model, [optimizer], [scheduler], snapshot_location=where)
    seen = []
    for _ in range(4):
        ring.keep()
        seen.append(bits(*parts))
        step(*parts)
    tensors = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 7)
    ring.restore_snapshot(2)
    assert bits(*parts) == seen[2]
    assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
    step(*parts)
    assert bits(*parts) == seen[3]
    assert len(ring) == 0
    torch.set_printoptions(profile="default")


def test_the_first_state_comes_back_without_optimizer_state_and_gradients():
    parts = training("adam")
    ring = SnapshotRing(parts[0], [parts[1]])
    ring.keep()
    step(*parts)
    ring.restore_snapshot()
    assert not parts[1].state
    assert all(p.grad is None for p in parts[0].parameters())


def test_channels_last_weights_keep_their_layout():
    parts = training("adam", torch.channels_last)
    ring = SnapshotRing(parts[0], [parts[1]])
    ring.keep()
    before, strides = bits(*parts)[:4], [p.stride() for p in parts[0].parameters()]
    step(*parts)
    ring.restore_snapshot()
    assert bits(*parts)[:4] == before
    assert [p.stride() for p in parts[0].parameters()] == strides


def test_memory_is_used_again():
    parts = training("adam")
    ring = SnapshotRing(parts[0], [parts[1]])
    for _ in range(4):
        step(*parts)
        ring.keep()
    places = {t.data_ptr() for slot in ring._slots for t in slot._buffers}
    size = ring.nbytes
    for _ in range(3):
        step(*parts)
        ring.keep()
    assert {t.data_ptr() for slot in ring._slots for t in slot._buffers} == places
    assert ring.nbytes == size
    # Parameters, gradients and three moments (amsgrad), twice; counters and buffers are small.
    parameters = sum(p.numel() * 4 for p in parts[0].parameters())
    assert 2 * 5 * parameters < size < 2 * 5 * parameters + 2000


def test_what_cannot_be_is_refused(monkeypatch):
    model, optimizer, scheduler = training("adam")
    with pytest.raises(UsageError, match="Known: device, file, host"):
        SnapshotRing(model, [optimizer], snapshot_location="tape")
    with pytest.raises(UsageError, match="list has no state_dict"):
        SnapshotRing(model, [optimizer], [[scheduler]])
    ring = SnapshotRing(model, [optimizer])
    with pytest.raises(UsageError, match="the ring holds 0 snapshots"):
        ring.restore_snapshot()
    size = sum(p.numel() * 4 for p in model.parameters())
    # Room for one state, which is not enough.
    monkeypatch.setattr("unsilent.recovery.ring.available_memory_bytes", lambda: size + 1000)
    with pytest.raises(
        UsageError,
        match=r"the snapshots need .* on cpu \(2 x .*\), but .* is free; "
        r"keep the snapshots in a file \(snapshot_location='file'\)",
    ):
        ring.keep()
    SnapshotRing(model, [optimizer], snapshot_count=1).keep()
    SnapshotRing(model, [optimizer], snapshot_location="file").keep()


class LazyCopy(StagedCopy):
    """The host gets its copy only when it waits for it, or when the copy on the device is needed again."""

    def _wait_on_device(self, event):
        event.synchronize()

    def _begin_copy_to_host(self, host):
        class Event:
            done = False

            def synchronize(event):
                if not event.done:
                    torch._foreach_copy_(list(host), self._buffers)
                    event.done = True

        return Event()


def test_states_on_the_host_are_copied_while_the_training_goes_on(monkeypatch):
    """With a double of the second stream: what the training changes meanwhile does not get into a state."""
    monkeypatch.setattr("unsilent.recovery.ring._Slot._find_staged", lambda slot, tensors: shared)
    shared = LazyCopy(torch.device("cpu"))
    model, optimizer, scheduler = training("adam")
    ring = SnapshotRing(model, [optimizer], [scheduler], snapshot_count=3, snapshot_location="host")
    seen = []
    for _ in range(7):
        ring.keep()
        seen.append([p.detach().clone() for p in model.parameters()])
        step(model, optimizer, scheduler)
    for back in (2, 1):
        ring.restore_snapshot(back)
        kept = seen[-back]
        assert all(map(torch.equal, model.parameters(), kept))
        del seen[-back:]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adam", "sgd", "fused"])
def test_states_of_a_device_come_back_from_the_host(name):
    model, optimizer, _ = training(name)
    model.cuda()
    optimizer = OPTIMIZERS[name](list(model.parameters()))

    def one():
        optimizer.zero_grad()
        model(torch.randn(6, 1, 8, 8, device="cuda")).square().mean().backward()
        optimizer.step()

    ring, seen = SnapshotRing(model, [optimizer], snapshot_count=3, snapshot_location="host"), []
    for _ in range(7):
        ring.keep()
        seen.append([p.detach().clone() for p in model.parameters()])
        one()
    assert all(slot._staged is not None for slot in ring._slots)
    for back in (2, 1):
        ring.restore_snapshot(back)
        assert all(map(torch.equal, model.parameters(), seen[-back]))
        del seen[-back:]


def test_an_attribute_that_has_become_none_is_put_back():
    """A module may keep a tensor for later and let it go: it is there again, as it was when the state was kept."""
    model, optimizer, scheduler = training("adam")
    model.cache, model.steps = torch.ones(3), 4
    ring = SnapshotRing(model, [optimizer], [scheduler])
    ring.keep()
    kept = model.cache
    model.cache, model.steps, model.new = None, 5, 6
    ring.restore_snapshot()
    assert model.cache is kept
    assert model.steps == 4
    assert not hasattr(model, "new")


def test_a_buffer_that_repeats_its_memory_is_put_back():
    model, optimizer, scheduler = training("adam")
    model.register_buffer("mask", torch.ones(1, 4).expand(8, 4))
    ring = SnapshotRing(model, [optimizer], [scheduler])
    ring.keep()
    model.mask[:1].fill_(3.0)
    ring.restore_snapshot()
    assert model.mask.tolist() == [[1.0] * 4] * 8
