"""How long values of an evaluation are needed, against readings written down by hand."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from unsilent.sites.lifetimes import LifetimeObserver, seconds, windows


class Residual(nn.Module):
    """A value that is read at once and again at the end, through a view, and one that is overwritten in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        y = x * 2
        z = self.inner(y).relu_()
        z += y
        return z.reshape(-1)


def observed(model, *tensors):
    held = [("param:" + name, p) for name, p in model.named_parameters()]
    held += [(f"input:{i}", tensor) for i, tensor in enumerate(tensors)]
    observer = LifetimeObserver(model, held, 0)
    with torch.no_grad(), observer:
        output = model(*tensors)
    observer.finish(output)
    return observer


def spans(observer, site):
    return [
        (w.begin, w.end, w.operand.site if w.operand is not None else None, w.part)
        for w in windows(observer.values[site, None])
    ]


def test_values_are_needed_from_their_writing_to_their_last_reading():
    """Operations: 0 mul, 1 mm, 2 relu_, 3 add_; the view of the weight and the reshape move nothing."""
    found = observed(Residual(), torch.randn(3, 4))
    assert len(found.moved) == 4
    assert spans(found, "input:0") == [(-1, 0, None, 1.0)]
    assert spans(found, "param:inner.weight") == [(-1, 1, None, 1.0)]
    product = "op:(root)#mul.0/fwd/out"
    # After the product was read, a fault in it reaches the addition alone.
    assert spans(found, product) == [(0, 1, None, 1.0), (1, 3, "op:(root)#add.0/fwd/second", 1.0)]
    assert spans(found, "op:inner#mm.0/fwd/out") == [(1, 2, None, 1.0)]
    assert spans(found, "op:(root)#relu.0/fwd/out") == [(2, 3, None, 1.0)]
    assert spans(found, "op:(root)#add.0/fwd/out") == [(3, 3, None, 1.0)]  # the call ends with it


class Parts(nn.Module):
    """Two halves of a value that are read one after the other, and a value that nothing reads."""

    def forward(self, x):
        y = x * 2
        _ = x * 3
        first, second = y.chunk(2)
        return (first + 1).sum() + second.sum()


def test_parts_of_a_value_are_needed_until_each_is_read():
    """Operations: 0 mul, 1 mul, 2 add, 3 sum, 4 sum, 5 add."""
    found = observed(Parts(), torch.randn(4, 2))
    product = "op:(root)#mul.0/fwd/out"
    assert spans(found, product) == [(0, 2, None, 1.0), (2, 4, "op:(root)#sum.1/fwd/first", 1.0)]
    assert spans(found, "op:(root)#mul.1/fwd/out") == []
    assert found.values[product, None].reads[1].elements == 4


class Columns(nn.Module):
    """Two parts of a value that are not contiguous, read one after the other, and one that is read many times over."""

    def forward(self, x):
        y = x * 2
        first = y[:, :2] + 1
        return first * y[:, 2:], y[:1].expand(3, 4) - 1


def test_a_fault_in_a_strided_part_of_a_value_reaches_its_readers_alone():
    """Operations: 0 mul, 1 add, 2 mul, 3 sub; what was read before is not corrupted any more."""
    found = observed(Columns(), torch.randn(2, 4))
    product = "op:(root)#mul.0/fwd/out"
    assert spans(found, product) == [
        (0, 1, None, 1.0), (1, 2, "op:(root)#mul.1/fwd/second", 1.0), (1, 3, "op:(root)#sub.0/fwd/first", 1.0),
    ]  # fmt: skip
    _, second, third = windows(found.values[product, None])
    assert (second.operand.eligible_count, third.operand.eligible_count) == (4, 4)  # each element of memory once


def test_an_operation_takes_the_time_to_move_what_it_reads_and_writes():
    found = observed(Residual(), torch.randn(3, 4))
    per_byte = {"param:inner.weight": 10.0}
    ends = found.ends(lambda value: per_byte.get(value.site, 1.0))
    sizes = [48 + 48, 48 + 48 + 10 * 64, 48 + 48, 48 + 48 + 48]
    np.testing.assert_allclose(ends, np.cumsum([0, *sizes]))
    (first, second) = windows(found.values["op:(root)#mul.0/fwd/out", None])
    assert seconds(ends, first) == sizes[1]
    assert seconds(ends, second) == sizes[2] + sizes[3]
