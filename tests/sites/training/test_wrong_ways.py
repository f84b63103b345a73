"""Other ways to put a fault into an operation, each with what it gets wrong, and that ours does not.

Every test first shows the defect with torch's own means, then the same fault through `Step` against a float64 reference.
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unsilent.faults import Fault, fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites.training.step import StepInjection

VALUE = 7.25


def wanted(site, element, shape, value=VALUE):
    """Set one element, exactly."""
    word = np.array([value]).view(np.uint64)
    return Fault(site, "float64", shape, np.array([element]), "set", word)


def leaf(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def linear(seed=0):
    """x [4,3] @ w.T, w [2,3], as a module, and its input."""
    layer = nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(leaf(2, 3, seed=seed + 1))
    return layer, leaf(4, 3, seed=seed)


def test_a_forward_pre_hook_corrupts_the_weight_gradient():
    layer, x = linear()

    def hook(module, args):
        bad = args[0].clone()
        bad.data[0, 0] = VALUE
        return (bad,)

    handle = layer.register_forward_pre_hook(hook)
    layer(x).sum().backward()
    handle.remove()
    by_hook, layer.weight.grad, x.grad = layer.weight.grad, None, None
    clean = x.detach().sum(0).expand(2, 3)
    assert not torch.allclose(by_hook, clean)  # the corrupted copy was saved for the backward
    with StepInjection(layer, [wanted("op:(root)#mm.0/fwd/first", 0, (4, 3))]):
        y = layer(x)
        y.sum().backward()
    torch.testing.assert_close(layer.weight.grad, clean)
    bad = x.detach().clone()
    bad[0, 0] = VALUE
    torch.testing.assert_close(y.detach(), bad @ layer.weight.detach().t())


def test_index_assignment_in_a_forward_hook_zeroes_the_victims_gradient():
    layer, x = linear()

    def hook(module, args, out):
        out = out.clone()
        out[0, 0] = VALUE
        return out

    handle = layer.register_forward_hook(hook)
    layer(x).sum().backward()
    handle.remove()
    by_hook, layer.weight.grad, x.grad = x.grad, None, None
    clean = layer.weight.detach().sum(0).expand(4, 3)
    assert not torch.allclose(by_hook[0], clean[0])
    with StepInjection(layer, [wanted("op:(root)#mm.0/fwd/out", 0, (4, 2))]):
        layer(x).sum().backward()
    torch.testing.assert_close(x.grad, clean)


@pytest.mark.parametrize("function", [torch.tanh, torch.sigmoid, torch.relu, lambda x: torch.softmax(x, 0)])
def test_a_detached_delta_leaves_the_saved_output_golden(function):
    """What an operation saves of its own output has to be the corrupted one."""
    x, weight = leaf(3), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    out = function(x)
    delta = torch.zeros_like(out)
    delta[0] = 0.9 - out.detach()[0]
    ((out + delta.detach()) * weight).sum().backward()
    by_delta, x.grad = x.grad, None
    with StepInjection(
        nn.Module(), [UnresolvedFault("op:(run)/fwd/out", fault_model("set:value=0.9"), index="0")]
    ) as step:
        y = function(x)
        y.backward(weight)
    step_out = y.detach()
    assert step_out[0] == 0.9
    s = step_out
    by_hand = {
        "tanh": weight * (1 - s**2),
        "sigmoid": weight * s * (1 - s),
        "relu": weight * (s > 0),
        "_softmax": s * (weight - (weight * s).sum()),
    }[next(iter(step.names["fwd"])).partition("#")[2].partition(".")[0]]
    torch.testing.assert_close(x.grad, by_hand)
    assert not torch.allclose(by_delta, by_hand) or function is torch.relu


def test_writing_through_data_in_a_hook_is_the_same_as_ours():
    layer, x = linear()
    model = nn.Sequential(layer, nn.Tanh())

    def hook(module, args, out):
        out.data[0, 0] = VALUE

    handle = layer.register_forward_hook(hook)
    model(x).sum().backward()
    handle.remove()
    by_hook = x.grad.clone(), layer.weight.grad.clone()
    x.grad = layer.weight.grad = None
    with StepInjection(model, [wanted("op:0#mm.0/fwd/out", 0, (4, 2))]):
        model(x).sum().backward()
    assert torch.equal(by_hook[0], x.grad)
    assert torch.equal(by_hook[1], layer.weight.grad)


def test_full_backward_hooks_see_no_weight_gradient_and_no_first_input():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)).double()
    seen = {}
    handles = [
        m.register_full_backward_hook(lambda m, given, out, i=i: seen.update({i: given})) for i, m in enumerate(model)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.tensor([0, 3, 3])).sum().backward()
    for handle in handles:
        handle.remove()
    assert seen[0] == (None,)  # nothing to corrupt for the table
    assert all(g is None or g.shape != model[1].weight.shape for g in seen[1])
    for site in ("op:0#embedding.0/grad_wt/out", "op:1#addmm.0/grad_wt/out"):
        model.zero_grad()
        with StepInjection(model, [UnresolvedFault(site, fault_model(f"set:value={VALUE}"))]) as step:
            model(torch.tensor([0, 3, 3])).sum().backward()
        assert len(step.applied_faults) == 1
        assert sum(int((p.grad == VALUE).sum()) for p in model.parameters()) == 1


def test_a_parameter_hook_sees_one_sum_for_a_shared_weight():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = linear()[0]
            self.back = nn.Linear(2, 3, bias=False).double()

        def forward(self, x):
            return self.shared(torch.tanh(self.back(self.shared(x))))

    model, x = Twice(), leaf(4, 3).detach()
    fired = []
    handle = model.shared.weight.register_hook(lambda g: fired.append(g.clone()))
    model(x).sum().backward()
    handle.remove()
    assert len(fired) == 1
    total, found = model.shared.weight.grad.clone(), []
    for call in range(2):
        model.zero_grad()
        with StepInjection(model, [wanted(f"op:shared#mm.{call}/grad_wt/out", 0, (3, 2))]) as step:
            model(x).sum().backward()
        before = step.applied_faults[0].before.view(np.float64)[0]
        assert model.shared.weight.grad[0, 0] == pytest.approx(float(total[0, 0]) - before + VALUE)
        found.append(before)
    assert found[0] != found[1]
    assert sum(found) == pytest.approx(float(total[0, 0]))


class Own(torch.autograd.Function):
    """A product of the user's own, with a backward of the user's own."""

    @staticmethod
    def forward(context, x, w):
        context.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(context, dy):
        x, w = context.saved_tensors
        return dy @ w, dy.t() @ x


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = linear()[0].weight

    def forward(self, x):
        return Own.apply(x, self.weight)


def test_an_own_function_needs_no_wrapper():
    """What it runs forward is corrupted; what its backward hands back, at the operation whose node that is."""
    model, x = Custom(), leaf(4, 3)
    with StepInjection(model, [wanted("op:(root)#mm.0/fwd/out", 0, (4, 2))]):
        y = model(x)
        y.sum().backward()
    assert y[0, 0] == VALUE
    torch.testing.assert_close(x.grad, model.weight.detach().sum(0).expand(4, 3))


def test_saved_tensor_hooks_are_another_fault():
    """A stored activation that goes wrong leaves the forward pass alone; ours is ``saved:``."""
    model, x = nn.Sequential(linear()[0], nn.Tanh(), nn.Linear(2, 2).double()), leaf(4, 3)
    y = model(x)
    golden = y.detach().clone()
    y.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with StepInjection(model, [UnresolvedFault("saved:2#addmm.0/first", fault_model(f"set:value={VALUE}"))]) as step:
        y = model(x)
        y.sum().backward()
    assert torch.equal(golden, y)
    assert len(step.applied_faults) == 1
    assert not torch.equal(grads[1], model[2].weight.grad)


@pytest.mark.parametrize("again", [None, 1])
def test_checkpointing_runs_the_forward_twice_and_one_is_meant(again):
    layer, x = linear()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(lambda v: torch.tanh(self.layer(v)), x, use_reentrant=False)

    seen = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name == "aten::mm":
                seen.append(torch._C._current_autograd_node() is not None and torch.is_grad_enabled())
            return func(*args, **(kwargs or {}))

    model = Outer()
    with Count():
        model(x).sum().backward()
    assert seen[:2] == [False, True]  # the forward's product is met again in the backward pass
    with StepInjection(
        model, [UnresolvedFault("op:layer#mm.0/fwd/out", fault_model("set:value=1.5"), occurrence=again)]
    ) as step:
        y = model(x)
        y.sum().backward()
    assert len(step.applied_faults) == 1
    assert bool(torch.isclose(y, torch.tensor(np.tanh(1.5))).any()) == (again is None)


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", ["mm", "addmm", "bmm"])
def test_the_order_of_kernels_says_nothing(name, first, second):
    """addmm makes dX first, mm and bmm the second gradient first, with a frozen side one alone."""
    shapes = ((2, 4, 3), (2, 3, 5)) if name == "bmm" else ((4, 3), (3, 5))
    x, w = (leaf(*s, seed=i) for i, s in enumerate(shapes))
    x.requires_grad_(first)
    w.requires_grad_(second)
    bias = torch.zeros(5, dtype=torch.float64)
    for phase, has in (("grad_in", first), ("grad_wt", second)):
        if not has:
            continue
        x.grad = w.grad = None
        with StepInjection(
            nn.Module(), [UnresolvedFault(f"op:(run)#{name}.0/{phase}/out", fault_model(f"set:value={VALUE}"))]
        ) as step:
            y = {"mm": lambda: x @ w, "addmm": lambda: torch.addmm(bias, x, w), "bmm": lambda: torch.bmm(x, w)}[name]()
            y.sum().backward()
        mine, other = (x, w) if phase == "grad_in" else (w, x)
        assert (mine.grad == VALUE).sum() == 1
        assert other.grad is None or not (other.grad == VALUE).any()
        assert step.applied_faults[0].fault.shape == tuple(mine.shape)


# -- defects of the published artifact -------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", [np.inf, -np.inf, np.nan])
def test_assignment_survives_infinities_that_mask_and_delta_turn_into_nan(golden):
    x, w = leaf(2, 2).detach(), torch.eye(2, dtype=torch.float64)
    x[0, 0] = golden
    mask = torch.ones(2, 2, dtype=torch.float64)
    mask[0, 0] = 0
    assert torch.isnan(x * mask + (1 - mask) * VALUE)[0, 0]
    with StepInjection(nn.Module(), [wanted("op:(run)#relu.0/fwd/out", 0, (2, 2))]):
        assert torch.relu(x)[0, 0] == VALUE
    with StepInjection(nn.Module(), [wanted("op:(run)#mm.0/fwd/first", 0, (2, 2))]):
        assert (x @ w)[0, 0] == VALUE


def test_the_stem_can_be_corrupted_and_a_fault_that_misses_is_an_error():
    model = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = torch.randn(1, 3, 12, 12)
    for phase in ("fwd", "grad_wt"):
        with StepInjection(model, [UnresolvedFault(f"op:0/{phase}/out", fault_model("random"))]) as step:
            model(x).sum().backward()
        assert len(step.applied_faults) == 1
    with (
        pytest.raises(Exception, match="no gradient"),
        StepInjection(model, [UnresolvedFault("op:0/grad_in/out", fault_model("random"))]),
    ):
        model(x).sum().backward()


def test_all_layers_and_gradients_can_be_drawn_not_convolutions_alone():
    """Dense layers, norms, activations, updates: each has a site."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 2)
    )
    optimizer = torch.optim.Adam(model.parameters())
    names = ("0#convolution.0", "1#native_batch_norm.0", "2#relu.0", "3#max_pool2d_with_indices.0", "5#addmm.0")
    sites = [f"op:{n}/{p}/out" for n, p in itertools.product(names, ("fwd", "grad_in", "grad_wt"))]
    absent = {"op:0#convolution.0/grad_in/out", "op:2#relu.0/grad_wt/out", "op:3#max_pool2d_with_indices.0/grad_wt/out"}
    for site in [s for s in sites if s not in absent] + ["op:5.weight#lerp.0/optim/out"]:
        with StepInjection(model, [UnresolvedFault(site, fault_model("random"))], [optimizer]) as step:
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(6, 3, 6, 6)), torch.zeros(6, dtype=torch.int64)).backward()
            optimizer.step()
        assert len(step.applied_faults) == 1, site
