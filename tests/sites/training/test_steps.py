"""Whole training steps with a fault in them: checkpointing, accumulation, autocast, updates, memory. One hit; nothing left."""

from __future__ import annotations

import contextlib
import gc
import importlib
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from unsilent.basics.errors import InjectionError, UsageError
from unsilent.faults import fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites.training.step import StepInjection


def draw(site, value=7.0, **moment):
    return UnresolvedFault(site, fault_model(f"set:value={value}"), **moment)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three blocks of which two are one; ``reentrant``: how they are checkpointed, None: not at all."""

    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(1)
        self.reentrant = reentrant
        self.entry, self.twice, self.once, self.exit = nn.Linear(6, 6), Block(), Block(), nn.Linear(6, 3)

    def forward(self, x):
        x = self.entry(x)
        for block in (self.twice, self.once, self.twice):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.exit(x)


optimizers = importlib.import_module("torch.optim.optimizer")
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))


def backward(model, *faults, times=1, loss=lambda model: model(X).square().sum()):
    """Gradients by parameter, and the step; every step leaves nothing behind."""
    model.zero_grad()
    with StepInjection(model, faults) as step:
        for _ in range(times):
            loss(model).backward()
    nothing_left(model)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, step


def nothing_left(model):
    assert not _get_current_dispatch_mode_stack()
    assert not module_hooks._global_forward_hooks
    assert not module_hooks._global_forward_pre_hooks
    assert not optimizers._global_optimizer_pre_hooks
    assert not optimizers._global_optimizer_post_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def other(one, two):
    return [n for n in one if not torch.equal(one[n], two[n])]


SITES = {
    "op:once.up#addmm.0/grad_wt/out": {"once.up.weight"},
    "op:once.up#addmm.0/grad_wt/first": {"once.up.weight"},
    "op:twice.up#addmm.0/grad_wt/out": {"twice.up.weight"},
    "op:twice.up#addmm.1/grad_wt/second": {"twice.up.weight"},
    "op:once.up#addmm.0/grad_in/second": {"entry.*", "twice.*"},
    "op:twice.up#addmm.1/grad_in/first": {"entry.*", "twice.*", "once.*"},
    "op:twice.down#addmm.1/fwd/out": {"*"},
    "op:twice.down#addmm.0/fwd/first": {"*"},
}


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_checkpointing_changes_neither_names_nor_bits(reentrant):
    """The same module twice, checkpointed in both ways: each fault lands once, in the call it names."""
    plain, model = Net(), Net(reentrant)
    golden, _ = backward(plain)
    assert not other(golden, backward(model)[0])
    for site, globs in SITES.items():
        want, _ = backward(plain, draw(site))
        found, step = backward(model, draw(site))
        assert len(step.applied_faults) == 1
        assert not other(want, found), site
        changed = other(golden, found)
        assert changed
        assert all(
            any(n == g or g == "*" or (g.endswith("*") and n.startswith(g[:-1])) for g in globs) for n in changed
        )


def test_what_is_run_again_can_be_corrupted_alone():
    """The first run feeds the loss, the second the gradients."""
    model = Net(False)
    golden, _ = backward(model)
    found, step = backward(model, draw("op:once.up#addmm.0/fwd/out", occurrence=1))
    assert len(step.applied_faults) == 1
    assert set(other(golden, found)) <= {n for n in golden if n.startswith(("once", "entry", "twice"))}
    assert "once.down.weight" in other(golden, found)
    with pytest.raises(InjectionError, match="no call 1"):
        backward(Net(), draw("op:once.up#addmm.0/fwd/out", occurrence=1))


def test_micro_steps_are_told_apart():
    model = Net()
    batches = iter([X, X + 1, X + 2] * 9)

    def loss(model):
        return model(next(batches)).square().sum()

    golden, _ = backward(model, times=3, loss=loss)
    seen = []
    for k in range(3):
        found, step = backward(model, draw("op:once.up#addmm.0/grad_wt/out", micro_step=k), times=3, loss=loss)
        assert other(golden, found) == ["once.up.weight"]
        seen.append(float((found["once.up.weight"] - golden["once.up.weight"]).abs().max()))
        assert len(step.applied_faults) == 1
    assert len(set(seen)) == 3
    with pytest.raises(InjectionError, match="the step had micro-steps 0 to 2"):
        backward(model, draw("op:once.up#addmm.0/grad_wt/out", micro_step=3), times=3, loss=loss)


@pytest.mark.parametrize("case", ["fwd/first", "fwd/second", "grad_in/second", "grad_wt/first", "grad_wt/out"])
def test_under_autocast_the_cast_operands_are_corrupted(case):
    model = Net()

    def loss(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(X).float().square().sum()

    golden, _ = backward(model, loss=loss)
    found, step = backward(model, draw(f"op:once.up#addmm.0/{case}"), loss=loss)
    assert step.applied_faults[0].fault.dtype == "bfloat16"
    changed = other(golden, found)
    assert changed == ["once.up.weight"] if case.startswith("grad_wt") else len(changed) > 1


class Square(nn.Module):
    """A product of one tensor with itself: nothing but the graph tells its two gradients apart."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
        self.c = torch.arange(16.0, dtype=torch.float64).view(4, 4)

    def forward(self, x):
        return (self.w @ self.w) * self.c


@pytest.mark.parametrize("case", [f"{p}/{o}" for p in ("grad_in", "grad_wt") for o in ("out", "first", "second")])
def test_both_gradients_of_a_square(case):
    model = Square()
    found, step = backward(model, draw(f"op:(root)#mm.0/{case}"), loss=lambda m: m(X).sum())
    c, w = model.c.numpy(), model.w.detach().numpy()

    def bad(of, is_it):
        return (
            np.where(np.arange(16).reshape(4, 4) == step.applied_faults[0].fault.elements[0], 7.0, of) if is_it else of
        )

    first = bad(bad(c, case == "grad_in/first") @ bad(w, case == "grad_in/second").T, case == "grad_in/out")
    second = bad(bad(w, case == "grad_wt/first").T @ bad(c, case == "grad_wt/second"), case == "grad_wt/out")
    np.testing.assert_allclose(found["w"].numpy(), first + second)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
}


def trained(make, *faults, steps=3, at=1):
    """Parameters and optimizer state after some steps, one of them with faults in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer, corrupted = make(model.parameters()), None
    for i in range(steps):
        step = StepInjection(model, faults, [optimizer]) if i == at else contextlib.nullcontext()
        with step:
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()
        corrupted = step if i == at else corrupted
    nothing_left(model)
    found = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}/{k}": v.clone() for k, v in optimizer.state[p].items() if torch.is_tensor(v)}
    return found, corrupted


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_goes_wrong_for_one_parameter(name):
    make = OPTIMIZERS[name]
    golden, step = trained(make, steps=2)
    plain, _ = trained(make, steps=2, at=-1)
    assert not other(plain, golden)
    sites = [n for n in step.names["optim"] if n.startswith("0.weight#") and "local_scalar" not in n]
    assert sites
    for site in sites:
        for operand in ("out", "first"):
            found, corrupted = trained(make, draw(f"op:{site}/optim/{operand}"), steps=2)
            assert len(corrupted.applied_faults) == 1
            assert {n.partition("/")[0] for n in other(golden, found)} == {"0.weight"}, (site, operand)


@pytest.mark.parametrize(
    ("site", "first"),
    [("optim:0.weight/exp_avg", {"0.weight"}), ("optim:2.bias/step", {"2.bias"}), ("param:2.bias", None)],
)
def test_memory_between_steps(site, first):
    golden, _ = trained(OPTIMIZERS["adamw"], steps=2)
    found, step = trained(OPTIMIZERS["adamw"], draw(site), steps=2)
    assert str(step.receipt).startswith("1 of 1 hit")
    changed = {n.partition("/")[0] for n in other(golden, found)}
    assert changed == (first or {"0.weight", "0.bias", "2.weight", "2.bias"})


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("optim:0.weight/momentum", "unknown state of an optimizer '0.weight/momentum'"),
        ("param:0.wait", "unknown parameter '0.wait'; did you mean '0.weight'"),
        ("op:0.weight#lerp.4/optim/out", "unknown operation of the update"),
        ("comm:all_reduce.0/in", "unknown collective 'all_reduce.0'"),
        ("saved:0#addmm.9/first", "unknown operation '0#addmm.9'"),
    ],
)
def test_memory_and_updates_that_are_not_there(site, said):
    with pytest.raises(UsageError, match=said):
        trained(OPTIMIZERS["adamw"], draw(site))


def test_kept_activations_are_corrupted_between_the_passes():
    """The loss is the golden one; every node that kept that memory computes with the corruption."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    losses = []

    def loss(model):
        losses.append(model(X).square().sum())
        return losses[-1]

    golden, _ = backward(model, loss=loss)
    found, step = backward(model, draw("saved:2#addmm.0/first"), loss=loss)
    assert losses[0] == losses[1]
    assert set(other(golden, found)) == {"2.weight", "0.weight", "0.bias"}  # tanh keeps the same memory as its output
    _, column = np.unravel_index(step.applied_faults[0].fault.elements[0], (5, 8))
    changed = (golden["2.weight"] != found["2.weight"]).nonzero()[:, 1].unique().tolist()
    assert changed == [column]
    with pytest.raises(InjectionError, match="it is not saved for"):
        backward(Net(False), draw("saved:once.down#addmm.0/first"))


def test_a_compiled_model_is_corrupted_as_if_it_were_not():
    model = Net()
    compiled = torch.compile(model, backend="eager")
    golden, _ = backward(model)
    compiled(X).sum()
    found, _ = backward(model, draw("op:once.down#addmm.0/grad_wt/out"), loss=lambda _: compiled(X).square().sum())
    assert other(golden, found) == ["once.down.weight"]


def test_nothing_keeps_a_model_alive():
    model = Net(False)
    with contextlib.suppress(RuntimeError), StepInjection(model, [draw("op:once.up#addmm.0/grad_wt/first")]) as step:
        model(X).sum().backward(retain_graph=True)
        raise RuntimeError("a loop that fails in the faulty step")
    assert len(step.applied_faults) == 1
    nothing_left(model)
    known = weakref.ref(model)
    del model, step
    gc.collect()
    assert known() is None


def test_an_index_says_which_elements():
    model = Net()
    golden, _ = backward(model)
    found, step = backward(model, draw("op:once.up#addmm.0/grad_wt/out", index="2,5"))
    assert step.applied_faults[0].fault.elements.tolist() == [2 * 8 + 5]
    assert (golden["once.up.weight"] != found["once.up.weight"]).nonzero().tolist() == [
        [5, 2]
    ]  # addmm has it transposed
    with pytest.raises(UsageError, match=r"index \[9,9\] is outside"):
        backward(model, draw("op:once.up#addmm.0/grad_wt/out", index="9,9"))
