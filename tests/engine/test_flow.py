"""What every operation of a step reads and gives: named as faults name it, whatever the order of elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unsilent.engine.digests import digest_unordered
from unsilent.engine.tracing.flow import DataflowRecorder


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 3, 3)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(12, 2)

    def forward(self, x):
        return self.fc(self.drop(self.conv(x).relu_()).flatten(1))


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def watched(foreach):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
    x = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    flow = DataflowRecorder(model)
    torch.manual_seed(7)
    with flow:
        step(model, optimizer, x)
    return model, x, flow.recorded_operations


@pytest.mark.parametrize("foreach", [False, True])
def test_operations_are_named_and_values_lead_from_one_to_the_next(foreach):
    model, x, met = watched(foreach)
    named = {(m.key.name, m.key.phase): m for m in met if m.key is not None}
    conv = named["conv#convolution.0", "fwd"]
    assert conv.reads[0] == digest_unordered(x)
    assert not conv.draws
    assert ("conv#convolution.0", "bwd") in named
    bernoulli = next(m for m in met if m.draws)
    assert bernoulli.key.name.startswith("drop#")
    made = {value for m in met for value in m.gives}
    assert {digest_unordered(p) for p in model.parameters()} <= made
    # Whatever an operation reads was there before, or was made by one.
    given = {digest_unordered(t) for t in (x, *Net().parameters())}
    computed = [m for m in met if m.key is not None and m.key.phase == "bwd"]
    assert computed
    assert all(value in made | given for m in computed for value in m.reads)


def test_attention_draws_only_with_dropout():
    def drawn(p):
        layer = nn.MultiheadAttention(8, 2, dropout=p, batch_first=True)
        x = torch.randn(2, 5, 8)
        with (flow := DataflowRecorder(layer)):
            layer(x, x, x, need_weights=False)[0].sum().backward()
        return any(m.draws for m in flow.recorded_operations)

    assert not drawn(0.0)
    assert drawn(0.3)


def test_it_changes_nothing_and_leaves_nothing():
    model, x, _ = watched(True)
    other = Net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(7)
    step(other, optimizer, x)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@given(st.lists(st.floats(width=32), min_size=1, max_size=30), st.randoms())
def test_the_order_of_elements_does_not_matter_and_their_bits_do(values, random):
    tensor = torch.tensor(values, dtype=torch.float32)
    shuffled = list(range(len(values)))
    random.shuffle(shuffled)
    assert digest_unordered(tensor[shuffled].reshape(1, -1).t()) == digest_unordered(tensor)
    words = tensor.view(torch.int32).clone()
    words[random.randrange(len(values))] ^= 1 << random.randrange(32)
    assert digest_unordered(words.view(torch.float32)) != digest_unordered(tensor)


def test_elements_that_add_up_to_the_same_are_told_apart():
    one, other = (torch.from_numpy(np.array(v, np.uint8)) for v in ([1, 3], [2, 2]))
    assert digest_unordered(one) != digest_unordered(other)
    assert digest_unordered(torch.zeros(3)) != digest_unordered(torch.zeros(4))
    assert digest_unordered(torch.tensor([0.0])) != digest_unordered(torch.tensor([-0.0]))
