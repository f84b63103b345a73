"""Faults in the zeros that accelerators stuff between and around the gradient of a strided convolution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from unsilent.basics.errors import InjectionError
from unsilent.faults import Fault
from unsilent.sites.training.step import StepInjection

GEOMETRIES = [(1, 1, 3, 1), (2, 0, 1, 1), (2, 1, 3, 1), (2, 0, 3, 2), (3, 1, 2, 1)]


def stuffed(dy, size, stride, padding, kernel, dilation):
    """Obvious: element by element."""
    n, o, h, w = dy.shape
    reach = (kernel - 1) * dilation
    made = np.zeros((n, o, size + reach, size + reach))
    for p, q in itertools.product(range(h), range(w)):
        made[:, :, reach - padding + stride * p, reach - padding + stride * q] = dy[:, :, p, q]
    return made


def input_gradient(made, w, size, kernel, dilation):
    """A convolution of stride 1 with the kernel turned around."""
    dx = np.zeros((made.shape[0], w.shape[1], size, size))
    for p, q, u, v in itertools.product(range(size), range(size), range(kernel), range(kernel)):
        seen = made[:, :, p + (kernel - 1 - u) * dilation, q + (kernel - 1 - v) * dilation]
        dx[:, :, p, q] += seen @ w[:, :, u, v]
    return dx


@pytest.mark.parametrize(("stride", "padding", "kernel", "dilation"), GEOMETRIES)
def test_any_element_of_the_stuffed_gradient_can_be_corrupted(stride, padding, kernel, dilation):
    make, size = torch.Generator().manual_seed(0), 5
    x = torch.randn(2, 3, size, size, generator=make, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 3, kernel, kernel, generator=make, dtype=torch.float64, requires_grad=True)
    y = F.conv2d(x, w, None, stride, padding, dilation)
    dy = torch.randn(y.shape, generator=make, dtype=torch.float64)
    y.backward(dy)
    golden, golden_w = x.grad.clone(), w.grad.clone()
    plain = stuffed(dy.numpy(), size, stride, padding, kernel, dilation)
    np.testing.assert_allclose(input_gradient(plain, w.detach().numpy(), size, kernel, dilation), golden, atol=1e-12)
    for element in range(0, plain.size, 7):
        operand = np.array([9e9]).view(np.uint64)
        site = "op:(run)#convolution.0/grad_in/first"
        fault = Fault(site, "float64", plain.shape, np.array([element]), "set", operand, layout="stuffed")
        x.grad = w.grad = None
        with StepInjection(torch.nn.Module(), [fault]) as step:
            F.conv2d(x, w, None, stride, padding, dilation).backward(dy)
        corrupted = plain.copy()
        corrupted.flat[element] = 9e9
        want = input_gradient(corrupted, w.detach().numpy(), size, kernel, dilation)
        np.testing.assert_allclose(x.grad, want, rtol=1e-9, atol=1e-5)
        assert torch.equal(w.grad, golden_w)
        where = np.where(corrupted != plain, 1.0, 0.0)
        untouched = torch.from_numpy(input_gradient(where, np.ones(w.shape), size, kernel, dilation) == 0)
        assert torch.equal(x.grad[untouched], golden[untouched])
        assert step.applied_faults[0].before[0] == plain.reshape(-1).view(np.uint64)[element]


def test_other_operations_have_no_stuffed_operand():
    operand = np.zeros(1, np.uint32)
    for site in ("op:(run)#mm.0/grad_in/first", "op:(run)#mm.0/grad_wt/first"):
        fault = Fault(site, "float32", (4, 4), np.array([0]), "set", operand, layout="stuffed")
        x = torch.randn(4, 4, requires_grad=True)
        with pytest.raises(InjectionError, match="stuffed operand"), StepInjection(torch.nn.Module(), [fault]):
            (x @ x.detach().clone().requires_grad_()).sum().backward()
