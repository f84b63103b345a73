"""Faults in operations that are no products, against formulas in float64: norms, attention, elementwise, recurrent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sites.training.products import array
from unsilent.basics.errors import InjectionError, UsageError
from unsilent.faults import fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites.training.step import StepInjection

VALUE = 2.5
GRADS = (
    "grad_in/out",
    "grad_in/first",
    "grad_in/second",
    "grad_wt/out",
    "grad_wt/first",
    "grad_wt/second",
    "grad_wt/out.1",
)


def draw(site, value=VALUE, seed=5, **moment):
    return UnresolvedFault(f"op:{site}", fault_model(f"set:value={value}"), seed=seed, **moment)


def corrupted(array_, hit, is_it=True):
    if not is_it:
        return array_
    found = array_.copy()
    found.reshape(-1)[hit.fault.elements] = VALUE
    return found


def leaf(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def batch(x, g, b):
    return F.batch_norm(x, None, None, g, b, training=True)


def layer(x, g, b):
    return F.layer_norm(x, (x.shape[-1],), g, b)


def group(x, g, b):
    return F.group_norm(x, 2, g, b)


NORMS = {
    "batch": (batch, "native_batch_norm", (4, 6, 3), (0, 2), (1, 6, 1)),
    "layer": (layer, "native_layer_norm", (4, 3, 6), (2,), (1, 1, 6)),
    "group": (group, "native_group_norm", (4, 6, 3), None, (1, 6, 1)),
}


@pytest.mark.parametrize("case", GRADS)
@pytest.mark.parametrize("name", NORMS)
def test_the_backward_of_norms(name, case):
    call, operation, shape, over, wide = NORMS[name]
    x, g, b, c = leaf(*shape), leaf(6, seed=1), leaf(6, seed=2), leaf(*shape, seed=3).detach()
    with StepInjection(nn.Module(), [draw(f"(run)#{operation}.0/{case}")]) as step:
        (call(x, g, b) * c).sum().backward()
    (hit,) = step.applied_faults
    phase = case.split("/")[0]
    dy = corrupted(array(c), hit, case in ("grad_in/first", "grad_wt/second"))
    gamma = corrupted(array(g), hit, case == "grad_in/second").reshape(wide)
    read = corrupted(array(x), hit, case == "grad_wt/first")

    def statistics(of):
        folded = of.reshape(4, 2, -1) if over is None else of
        axes = (2,) if over is None else over
        mean, variance = folded.mean(axes, keepdims=True), folded.var(axes, keepdims=True)
        return [np.broadcast_to(v, folded.shape).reshape(of.shape) for v in (mean, 1 / np.sqrt(variance + 1e-5))]

    def folded_mean(of):
        return statistics(of)[0]

    mean, scale = statistics(array(x))
    normed = (array(x) - mean) * scale
    dn = (array(c) if phase == "grad_wt" else dy) * gamma
    want_x = scale * (dn - folded_mean(dn) - normed * folded_mean(dn * normed))
    axes = tuple(i for i, n in enumerate(wide) if n == 1)
    want_g = ((array(c) if phase == "grad_in" else dy) * (read - mean) * scale).sum(axes)
    want_b = array(c).sum(axes)
    if case == "grad_in/out":
        want_x = corrupted(want_x, hit)
    want_g = corrupted(want_g, hit, case == "grad_wt/out")
    want_b = corrupted(want_b, hit, case == "grad_wt/out.1")
    for found, want in ((x.grad, want_x), (g.grad, want_g), (b.grad, want_b)):
        np.testing.assert_allclose(array(found), want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", ["fwd/out", "fwd/first", "fwd/second", "grad_in/out", "grad_in/first", "grad_in/second",
                                  "grad_wt/out", "grad_wt/first", "grad_wt/second", "grad_wt/out.1"])  # fmt: skip
def test_attention(case):
    q, k, v, c = (leaf(2, 3, 5, 4, seed=i) for i in range(4))
    with StepInjection(nn.Module(), [draw(f"(run)#_scaled_dot_product_flash_attention_for_cpu.0/{case}")]) as step:
        out = F.scaled_dot_product_attention(q, k, v)
        (out * c.detach()).sum().backward()
    (hit,) = step.applied_faults
    nq, nk, nv, dy = array(q), array(k), array(v), array(c)

    def logits(q, k):
        return np.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(4)

    def attended(q, k, v):
        e = np.exp(logits(q, k))
        return np.einsum("bhij,bhjd->bhid", e / e.sum(-1, keepdims=True), v)

    read_q, read_k = (
        corrupted(nq, hit, case in ("fwd/first", "grad_wt/first")),
        corrupted(nk, hit, case in ("fwd/second", "grad_in/second")),
    )
    forward = attended(read_q, read_k, nv) if case.startswith("fwd") else attended(nq, nk, nv)
    forward = corrupted(forward, hit, case == "fwd/out")
    np.testing.assert_allclose(array(out), forward, rtol=1e-9)
    # the kernel keeps the logarithm of the sums and the output, of what it had in the forward pass
    first, second = (read_q, read_k) if case.startswith("fwd") else (nq, nk)
    sums = np.log(np.exp(logits(first, second)).sum(-1, keepdims=True))

    def back(q, k, dy):
        p = np.exp(logits(q, k) - sums)
        row = (dy * forward).sum(-1, keepdims=True)
        ds = p * (np.einsum("bhid,bhjd->bhij", dy, nv) - row) / math.sqrt(4)
        return (
            np.einsum("bhij,bhjd->bhid", ds, k),
            np.einsum("bhij,bhid->bhjd", ds, q),
            np.einsum("bhij,bhid->bhjd", p, dy),
        )

    bad = corrupted(dy, hit, case in ("grad_in/first", "grad_wt/second"))
    phase = case.split("/")[0]
    want_q = back(nq, read_k if phase == "grad_in" else nk, bad if phase == "grad_in" else dy)[0]
    want_k = back(read_q if phase == "grad_wt" else nq, nk, bad if phase == "grad_wt" else dy)[1]
    want_v = back(nq, nk, dy)[2]
    want_q = corrupted(want_q, hit, case == "grad_in/out")
    want_k, want_v = corrupted(want_k, hit, case == "grad_wt/out"), corrupted(want_v, hit, case == "grad_wt/out.1")
    for found, want in ((q, want_q), (k, want_k), (v, want_v)):
        np.testing.assert_allclose(array(found.grad), want, rtol=1e-8, atol=1e-10)


def test_what_an_operation_gives_is_what_it_saves():
    """tanh keeps its own output: a corrupted one decides about the gradient."""
    x = leaf(4)
    with StepInjection(nn.Module(), [draw("(run)#tanh.0/fwd/out", value=0.5)]) as step:
        y = torch.tanh(x)
        y.sum().backward()
    want = 1 - np.tanh(array(x)) ** 2
    want[step.applied_faults[0].fault.elements] = 0.75
    np.testing.assert_allclose(array(x.grad), want)


ELEMENTWISE = {
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "div": lambda a, b: a / b,
    "maximum": torch.maximum,
}


@pytest.mark.parametrize("phase", ["grad_in", "grad_wt"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_residual_gives_each_branch_a_gradient_of_its_own(name, phase):
    """Both branches of a sum are handed one tensor: a fault in one must not be in the other."""
    grads = []
    for faults in (
        [],
        [draw(f"(run)#{name}.0/{phase}/out")],
        [draw(f"(run)#{name}.0/{phase}/{'first' if phase == 'grad_in' else 'second'}")],
    ):
        a, b = leaf(3, 4), leaf(3, 4, seed=1)
        with StepInjection(nn.Module(), faults) as step:
            (ELEMENTWISE[name](a, b) * leaf(3, 4, seed=2).detach()).sum().backward()
        grads.append((array(a.grad), array(b.grad), step))
    mine, other = (0, 1) if phase == "grad_in" else (1, 0)
    for found in grads[1:]:
        (hit,) = found[2].applied_faults
        assert np.array_equal(found[other], grads[0][other])
        changed = np.flatnonzero(found[mine] != grads[0][mine])
        assert set(changed) <= set(hit.fault.elements.tolist())
    assert grads[1][mine].reshape(-1)[grads[1][2].applied_faults[0].fault.elements] == VALUE


def test_a_recurrent_layer():
    """One kernel for all steps: each of its gradients alone, and its operands in the forward."""
    lstm = nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))

    def run(*faults):
        lstm.zero_grad()
        with StepInjection(lstm, faults) as step:
            out, _ = lstm(x)
            out.square().sum().backward()
        return out.detach().clone(), {n: p.grad.clone() for n, p in lstm.named_parameters()}, step

    golden, grads, step = run()
    (operation,) = [n for n in step.names["fwd"] if "rnn" in n]
    for number, name in enumerate(("weight_ih_l0", "weight_hh_l0")):
        operand = "out" if number == 0 else f"out.{number}"
        out, found, _ = run(draw(f"{operation}/grad_wt/{operand}"))
        assert torch.equal(out, golden)
        assert [n for n in grads if not torch.equal(grads[n], found[n])] == [name]
    for operand in ("first", "second", "third", "out"):
        out, _, step = run(draw(f"{operation}/fwd/{operand}"))
        assert not torch.equal(out, golden)
        assert len(step.applied_faults) == 1
    out, found, _ = run(draw(f"{operation}/grad_wt/first"))
    assert torch.equal(out, golden)
    assert [n for n in grads if not torch.equal(grads[n], found[n])] == ["weight_ih_l0"]


def test_rms_norm_is_corrupted_in_its_parts():
    """It is decomposed; its last product has both gradients."""
    norm = nn.RMSNorm(6).double()
    x = leaf(4, 6)

    def run(*faults):
        norm.zero_grad()
        x.grad = None
        with StepInjection(norm, faults) as step:
            norm(x).square().sum().backward()
        return array(norm.weight.grad), array(x.grad), step

    weight, gradient, step = run()
    operation = [n for n in step.names["fwd"] if "mul" in n][-1]
    found, same, _ = run(draw(f"{operation}/grad_wt/out"))
    assert (found != weight).sum() == 1
    assert np.array_equal(same, gradient)


ABSENT = {
    "0#addmm.0/grad_wt/out": "no gradient",
    "0#addmm.0/grad_in/out": "no gradient",
    "1#tanh.0/fwd/second": "no second tensor operand",
    "2#addmm.0/grad_in/out.1": "grad_in has only one gradient",
    "2#addmm.0/grad_wt/out.7": "no gradient is computed for this operand",
    "2#addmm.1/fwd/out": "unknown operation '2#addmm.1'; did you mean '2#addmm.0'",
    "2#addmm.0/grad_wt/third": "not computed from a third operand",
}


@pytest.mark.parametrize("site", ABSENT)
def test_what_is_not_there_is_said(site):
    with pytest.raises((InjectionError, UsageError), match=ABSENT[site]) as error:
        go([draw(site)])
    assert "\n" not in str(error.value)


def test_a_fault_of_another_shape_is_said():
    fault = draw("2#addmm.0/fwd/out").resolve_for_tensor("float32", (9,))[0]
    with pytest.raises(InjectionError, match=r"the fault is for float32\[9\], found float32\[5, 2\]"):
        go([fault])


def go(faults):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    with StepInjection(model, faults):
        model(torch.randn(5, 3)).sum().backward()


@pytest.mark.parametrize("case", ["grad_in/out", "grad_in/first", "grad_wt/second"])
def test_one_element_of_an_expanded_gradient(case):
    """The gradient of a sum is one number for all; one corrupted element is one."""
    x, w = leaf(4, 3), leaf(3, 5, seed=1)
    with StepInjection(nn.Module(), [draw(f"(run)#mm.0/{case}")]) as step:
        (x @ w).sum().backward()
    (hit,) = step.applied_faults
    ones = np.ones((4, 5))
    bad = corrupted(ones, hit, not case.endswith("out"))
    want = (bad if case == "grad_in/first" else ones) @ array(w).T
    np.testing.assert_allclose(array(x.grad), corrupted(want, hit, case == "grad_in/out"))
    np.testing.assert_allclose(array(w.grad), array(x).T @ (bad if case == "grad_wt/second" else ones))
