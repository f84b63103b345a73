"""Faults in products, in every phase and operand, against loops in float64; and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from conftest import few
from sites.training.products import PRODUCTS, Product, array, gradients
from unsilent.faults import fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites.training.step import StepInjection

VALUE = 7.5
FAST = ("conv", "linear", "bmm", "embedding")
CASES = [f"{phase}/{operand}" for phase in ("fwd", "grad_in", "grad_wt") for operand in ("out", "first", "second")]


class Model(nn.Module):
    """A product between two multiplications, so that what goes up and down stream is seen: loss = <c, f(a x, b w)>."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.product = product
        x = torch.randn(product.x, generator=generator, dtype=torch.float64)
        self.x = nn.Parameter(x)
        self.indices = torch.randint(product.integer, product.x, generator=generator) if product.integer else None
        self.w = nn.Parameter(torch.randn(product.w, generator=generator, dtype=torch.float64))
        self.weigh = torch.randn(self.forward()[0].shape, generator=generator, dtype=torch.float64)

    def forward(self):
        x, w = (self.x * 2 if self.indices is None else self.indices), self.w * 3
        return self.product.call(x, w), x, w

    def step(self):
        self.zero_grad()
        y, x, w = self()
        (y * self.weigh).sum().backward()
        return y, x, w


def with_value(of, hit):
    found = of.copy()
    found.reshape(-1)[hit.fault.elements] = 1 if of.dtype.kind == "i" else VALUE
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", few(PRODUCTS, *FAST))
def test_it_is_what_loops_give(name, case):
    product = PRODUCTS[name]
    phase = case.split("/")[0]
    looked = bool(product.integer)
    if looked and phase == "grad_in":
        pytest.skip("indices have no gradient")
    model = Model(product)
    value = 1 if looked and case in ("fwd/first", "grad_wt/first") else VALUE
    fault = UnresolvedFault(f"op:(root)#{product.site}.0/{case}", fault_model(f"set:value={value}"), seed=5)
    with StepInjection(model, [fault]) as step:
        y, x, w = model.step()
    (hit,) = step.applied_faults
    x, w, y, dy = array(x), array(w), array(y), array(model.weigh)
    golden = product.loops(x, w)
    want_y, (want_x, want_w) = (
        golden,
        gradients(product.loops, x, w, dy) if not looked else (None, _table(product, x, w, dy)),
    )
    if case == "fwd/out":
        want_y = with_value(golden, hit)
    elif case == "fwd/first":
        want_y = product.loops(with_value(x, hit), w)
    elif case == "fwd/second":
        want_y = product.loops(x, with_value(w, hit))
    elif case == "grad_in/out":
        want_x = with_value(want_x, hit)
    elif case == "grad_in/first":
        want_x = gradients(product.loops, x, w, with_value(dy, hit))[0]
    elif case == "grad_in/second":
        want_x = gradients(product.loops, x, with_value(w, hit), dy)[0]
    elif case == "grad_wt/out":
        want_w = with_value(want_w, hit)
    elif case == "grad_wt/first":
        corrupted = with_value(x, hit)
        want_w = _table(product, corrupted, w, dy) if looked else gradients(product.loops, corrupted, w, dy)[1]
    elif looked:
        want_w = _table(product, x, w, with_value(dy, hit))
    else:
        want_w = gradients(product.loops, x, w, with_value(dy, hit))[1]
    np.testing.assert_allclose(y, want_y, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(array(model.w.grad), 3 * want_w, rtol=1e-10, atol=1e-12)
    if not looked:
        np.testing.assert_allclose(array(model.x.grad), 2 * want_x, rtol=1e-10, atol=1e-12)
    assert len(hit.fault) == 1
    assert hit.changed_bits > 0


def _table(product, indices, w, dy):
    found = np.zeros_like(w)
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            unit = np.zeros_like(w)
            unit[i, j] = 1
            found[i, j] = (dy * product.loops(indices, unit)).sum()
    return found


@pytest.mark.parametrize("name", PRODUCTS)
def test_without_a_fault_every_bit_is_the_same(name):
    model = Model(PRODUCTS[name])
    model.step()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with StepInjection(model):
        model.step()
    assert all(
        torch.equal(a, p.grad)
        for a, p in zip(plain, [p for p in model.parameters() if p.grad is not None], strict=True)
    )
