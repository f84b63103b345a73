"""Faults in operand registers that some outputs alone see, against the products of float64 loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from conftest import few
from sites.training.products import PRODUCTS, array, gradients
from unsilent.basics.errors import InjectionError
from unsilent.faults import Fault, fault_model
from unsilent.faults.hardware.output_window import OutputWindow
from unsilent.faults.hardware.presets import PRESETS, preset
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites.training.step import StepInjection

LINEAR = [name for name, product in PRODUCTS.items() if not product.integer]
CASES = [f"{phase}/{operand}" for phase in ("fwd", "grad_in", "grad_wt") for operand in ("first", "second")]


def parts(product, seed=0):
    """Operands as leaves, and a gradient for the output."""
    make = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(s, generator=make, dtype=torch.float64, requires_grad=True) for s in (product.x, product.w))
    dy = torch.randn(product.call(x, w).shape, generator=make, dtype=torch.float64)
    return x, w, dy


def run(product, fault, seed=0):
    """Output and both gradients of one corrupted product."""
    x, w, dy = parts(product, seed)
    with StepInjection(nn.Module(), [fault]) as step:
        y = product.call(x, w)
        y.backward(dy)
    return array(y), array(x.grad), array(w.grad), step


def expected(product, case, fault, seed=0):
    """The same by loops: golden, but for the outputs in reach, which see the corrupted operand."""
    x, w, dy = (array(t) for t in parts(product, seed))
    phase, operand = case.split("/")
    names = {"fwd": ("x", "w"), "grad_in": ("dy", "w"), "grad_wt": ("x", "dy")}[phase]
    corrupted = names[("first", "second").index(operand)]

    def of(values):
        made = product.loops(values["x"], values["w"])
        return made, *gradients(product.loops, values["x"], values["w"], values["dy"])

    golden = {"x": x, "w": w, "dy": dy}
    values = {k: v.copy() for k, v in golden.items()}
    view = np.swapaxes(values["w"], -1, -2) if fault.shape != values[corrupted].shape else values[corrupted]
    view[np.unravel_index(fault.elements, fault.shape)] = fault.codec.decode(fault.operands)
    results, wrong = list(of(golden)), of(values)
    number = ("fwd", "grad_in", "grad_wt").index(phase)
    splice = results[number] = results[number].copy()
    splice.flat[fault.reach] = wrong[number].flat[fault.reach]
    return results


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", few(LINEAR, "conv", "bmm"))
def test_those_in_the_window_see_the_fault(name, case):
    product = PRODUCTS[name]
    site = f"op:(run)#{product.site}.0/{case}"
    window = OutputWindow(channels=2, positions=1) if case.endswith("first") else OutputWindow(channels=1, positions=2)
    fault = UnresolvedFault(site, fault_model("set:value=5"), seed=3, window=window)
    *found, step = run(product, fault)
    (hit,) = step.applied_faults
    assert hit.fault.reach is not None
    assert 1 <= hit.fault.reach.size <= 2
    for one, other in zip(found, expected(product, case, hit.fault), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
    golden = run(product, fault_at_nothing(hit.fault))
    number = ("fwd", "grad_in", "grad_wt").index(case.split("/")[0])
    assert set(np.flatnonzero(found[number] != golden[number])) <= set(hit.fault.reach.tolist())
    replayed = run(product, Fault.from_json(hit.fault.to_json()))
    assert all(np.array_equal(a, b) for a, b in zip(found, replayed[:3], strict=True))


def fault_at_nothing(fault):
    """The same fault, seen by no output."""
    record = fault.to_json() | {"reach": [0]}
    return Fault.from_json(record | {"operation": "xor", "operands": ["0x" + "0" * 16] * len(fault)})


def users(product, case, element):
    """Which outputs use one element of an operand, by loops: those that a unit vector there reaches."""
    x, w, dy = (np.zeros_like(array(t)) for t in parts(product))
    phase, operand = case.split("/")
    names = {"fwd": ("x", "w"), "grad_in": ("dy", "w"), "grad_wt": ("x", "dy")}[phase]
    values = {"x": x + 1, "w": w + 1, "dy": dy + 1}
    values[names[("first", "second").index(operand)]][...] = 0
    values[names[("first", "second").index(operand)]].flat[element] = 1
    made = (
        product.loops(values["x"], values["w"]),
        *gradients(product.loops, values["x"], values["w"], values["dy"]),
    )
    return set(np.flatnonzero(made[("fwd", "grad_in", "grad_wt").index(phase)]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "name", few(["conv", "conv, stride and padding", "conv, groups", "conv, depthwise, dilation", "bmm"], "conv", "bmm")
)
def test_a_wide_window_has_all_that_use_the_operand(name, case):
    product = PRODUCTS[name]
    fault = UnresolvedFault(
        f"op:(run)#{product.site}.0/{case}", fault_model("set:value=5"), seed=1, window=OutputWindow(None, None)
    )
    *_, step = run(product, fault)
    (hit,) = step.applied_faults
    reach, using = set(hit.fault.reach.tolist()), users(product, case, int(hit.fault.elements[0]))
    if "padding" not in name and "groups" not in name:
        assert reach == using
    else:  # the zeros of the padding are multiplied, too
        shape = gradients(product.loops, *(array(t) for t in parts(product)))[1].shape if case[5:7] == "wt" else None
        assert using <= reach
        assert shape is None or {u // np.prod(shape[1:]) for u in using} == {r // np.prod(shape[1:]) for r in reach}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("phase", ["fwd", "grad_in", "grad_wt"])
def test_every_preset_lands_in_every_phase(name, phase):
    model = nn.Conv2d(32, 32, 3, padding=1)
    x = torch.randn(2, 32, 6, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with StepInjection(model, [preset(name).fault_at_operation("op:(root)", phase=phase, seed=5)]) as step:
        model(x).sum().backward()
    (hit,) = step.applied_faults
    n = {"N16": 16, "N64": 64}.get(name.partition("_")[0], 1)
    if name.endswith("GLB"):
        assert len(hit.fault) % 16 == 0
    else:
        assert len(hit.fault) == n
    if "16" in name.split("_")[-1]:
        assert hit.fault.reach is not None
        assert 1 <= hit.fault.reach.size <= 16
    if len(hit.fault) > 1:  # runs go along the channels
        shape = hit.fault.shape
        axis = 0 if shape[2:] == (3, 3) else 1
        channels = np.unravel_index(hit.fault.elements, shape)[axis]
        assert len(set(channels.tolist())) == min(len(hit.fault), 32)


def test_what_has_no_reach_says_so():
    x = torch.randn(4, 4)
    draw = UnresolvedFault("op:(run)#relu.0/fwd/first", fault_model("zero"), window=OutputWindow(1, 1))
    with pytest.raises(InjectionError, match="inputs of a matrix product"), StepInjection(nn.Module(), [draw]):
        x.relu_()
    indices = UnresolvedFault("op:(run)#embedding.0/fwd/first", fault_model("set:value=1"), window=OutputWindow(1, 1))
    with pytest.raises(InjectionError, match="inputs of a matrix product"), StepInjection(nn.Module(), [indices]):
        torch.nn.functional.embedding(torch.tensor([0, 2]), x)


def test_norms_have_no_operand_registers():
    """Their kernels write statistics without saying so: running one twice would change the model."""
    norm = nn.BatchNorm2d(3)
    before = norm.running_mean.clone()
    norm.eval()
    draw = preset("INPUT_16").fault_at_operation("op:(root)#native_batch_norm.0")
    with pytest.raises(InjectionError, match="inputs of a matrix product"), StepInjection(norm, draw):
        norm(torch.randn(4, 3, 5, 5))
    assert torch.equal(norm.running_mean, before)


def test_an_element_that_no_output_uses_is_hit_and_seen_by_none():
    model = nn.Conv2d(1, 1, 1, stride=2, bias=False)
    x = torch.randn(1, 1, 4, 4)
    golden = model(x)
    with StepInjection(
        model, UnresolvedFault("op:(root)/fwd/first", "set:value=9", index="0,0,1,1", window=OutputWindow(16, 1))
    ) as step:
        assert torch.equal(model(x), golden)
    (hit,) = step.applied_faults
    assert hit.fault.reach.size == 0
    with StepInjection(model, Fault.from_json(hit.fault.to_json())) as again:
        assert torch.equal(model(x), golden)
    assert len(again.applied_faults) == 1
