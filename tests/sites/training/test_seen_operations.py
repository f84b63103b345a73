"""A step in which few operations are seen ends with the bits of one in which all are, and faults land in the same places."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from conftest import few
from unsilent.basics.errors import InjectionError, UsageError
from unsilent.faults import fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites.training.step import StepInjection
from unsilent.workloads import load_training
from unsilent.workloads.trainings.base import Seeds

PHASES = ("fwd/out", "fwd/first", "grad_in/out", "grad_wt/out", "grad_wt/first", "grad_in/second")
TRAININGS = ("train-resnet", "train-vit", "train-chargpt", "train-dlrm")


def end_of_step(name: str, faults: Any, whole_step: bool) -> tuple[dict[str, Tensor], list[Any], StepInjection]:
    """All tensors of a training after its third step, which has the faults."""
    training = load_training(name, {"steps": "5"})
    state = training.start(Seeds.same_for_all(0))
    for _ in range(2):
        training.step(state)
    with StepInjection(state.model, faults, state.optimizers, whole_step=whole_step) as step:
        training.step(state)
    tensors = {n: t.detach() for n, t in state.model.state_dict().items()}
    tensors |= {f"{n}/grad": p.grad for n, p in state.model.named_parameters() if p.grad is not None}
    for i, optimizer in enumerate(state.optimizers):
        for j, table in enumerate(optimizer.state.values()):
            tensors |= {f"{i}/{j}/{k}": v for k, v in table.items() if isinstance(v, Tensor)}
    return tensors, step.applied_faults, step


def products(name: str) -> list[str]:
    """Operations with two factors, each the first one of its module."""
    _, _, step = end_of_step(name, (), True)
    return [n for n in step.names["fwd"] if n.split("#")[1] in ("convolution.0", "addmm.0", "mm.0")]


@pytest.mark.parametrize("name", few(TRAININGS, "train-resnet", "train-chargpt"))
def test_few_operations_seen_give_the_bits_of_all(name: str) -> None:
    operations = products(name)
    updated = next(n for n in end_of_step(name, (), True)[2].names["optim"] if "addc" in n)
    parameter = updated.partition("#")[0]
    sites = [f"op:{operations[i * (len(operations) - 1) // 5]}/{phase}" for i, phase in enumerate(PHASES)]
    sites += [f"saved:{operations[1]}/first", f"op:{updated}/optim/out", f"param:{parameter}", f"gradient:{parameter}"]
    for site in sites:
        ends = []
        for whole_step in (True, False):
            fault = UnresolvedFault(site, fault_model("bitflip:bits=exponent_msb"), seed=3)
            ends.append(end_of_step(name, fault, whole_step))
        (all_seen, landed, _), (few_seen, landed_too, step) = ends
        assert all_seen.keys() == few_seen.keys()
        assert all(
            torch.equal(*pair) or same_nan(*pair) for pair in zip(all_seen.values(), few_seen.values(), strict=True)
        )
        assert [(h.fault.site, h.before.tolist(), h.after.tolist()) for h in landed] == [
            (h.fault.site, h.before.tolist(), h.after.tolist()) for h in landed_too
        ]
        assert len(landed) == 1
        assert len(step.names["fwd"]) < 8, "only the module's own"


def same_nan(one: Tensor, other: Tensor) -> bool:
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[one.element_size()]
    return torch.equal(one.view(words), other.view(words))


class Blocks(nn.Module):
    """A block that may be checkpointed, and one module that is called twice."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry, self.mid, self.exit = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mid(torch.relu(self.mid(x))))

    def forward(self, x: Tensor) -> Tensor:
        y = self.entry(x)
        y = self.body(y) if self.reentrant is None else checkpoint(self.body, y, use_reentrant=self.reentrant)
        return self.exit(y)


def gradients(reentrant: bool | None, site: str, whole_step: bool, penalty: bool, **more: Any) -> list[Tensor]:
    model, x = Blocks(reentrant), torch.ones(3, 4)
    fault = UnresolvedFault(site, fault_model("bitflip:bits=exponent_msb"), seed=1, **more)
    with StepInjection(model, fault, whole_step=whole_step) as step:
        for i in range(2):
            loss = model(x + i).square().mean()
            if penalty:
                grads = torch.autograd.grad(loss, [model.exit.weight], create_graph=True)
                loss = loss + grads[0].square().sum()
            loss.backward()
    assert len(step.applied_faults) == 1
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("micro_step", [0, 1])
@pytest.mark.parametrize(
    "site", ["op:mid#addmm.1/fwd/out", "op:entry#addmm.0/grad_wt/first", "op:exit#addmm.0/grad_in/out"]
)
def test_what_runs_again_or_builds_graphs_is_named_as_ever(
    reentrant: bool | None, penalty: bool, micro_step: int, site: str
) -> None:
    if reentrant and penalty:
        pytest.skip("torch refuses it")
    ends = []
    for whole_step in (True, False):
        try:
            ends.append(gradients(reentrant, site, whole_step, penalty, micro_step=micro_step))
        except Exception as error:
            ends.append(str(error))
    if isinstance(ends[0], str):
        assert ends[0] == ends[1]
    else:
        assert all(map(torch.equal, *ends))


class Rounding(TorchDispatchMode):
    """A mode of the user's: products lose their low bits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        product = func._schema.name in ("aten::mm", "aten::addmm")
        return out.bfloat16().float() if product else out


class Net(nn.Module):
    """``kind``: what is unusual about it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.kind = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if self.kind == "module in a gradient hook":
            h.register_hook(lambda g: self.b(g))
        elif self.kind == "gradient inside":
            z = h.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.b(z).pow(2).sum(), z)
            h = self.b(h - g)
        elif self.kind == "mode inside":
            with Rounding():
                h = self.b(h)
            h = h @ h.T @ h
        elif self.kind == "checkpoint":
            h = checkpoint(self.b, h, use_reentrant=False)
        elif self.kind == "selective checkpoint":
            policy = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
            h = checkpoint(self.b, h, use_reentrant=False, context_fn=policy)
        else:
            h = self.b(h)
        return self.c(h)


def step_of(kind: str, site: str, whole_step: bool) -> list[Tensor]:
    model, x, w = Net(kind), torch.ones(4, 6), torch.ones(3, 3)
    fault = UnresolvedFault(site, fault_model("bitflip:bits=exponent_msb"), seed=1)
    with StepInjection(model, fault, whole_step=whole_step) as step:
        with Rounding() if kind == "mode around" else nullcontext():
            y = model(x)
        loss = (y @ w).pow(2).sum()
        with Rounding() if kind == "mode in backward" else nullcontext():
            if kind == "engine":
                Variable._execution_engine.run_backward((loss,), (torch.ones(()),), False, False, (), True, True)
            else:
                loss.backward()
        model(x).sum().backward()
    assert len(step.applied_faults) == 1
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


KINDS = ("module in a gradient hook", "gradient inside", "mode inside", "mode around", "mode in backward", "checkpoint",
         "selective checkpoint", "engine")  # fmt: skip
SITES = ("op:a#addmm.0/fwd/out", "op:b#addmm.0/fwd/out", "op:c#addmm.0/grad_wt/first", "op:(root)#relu.0/fwd/out")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("site", SITES)
def test_unusual_steps_end_with_the_same_bits_and_leave_torch_as_it_was(kind: str, site: str) -> None:
    ends: list[Any] = []
    for whole_step in (True, False):
        try:
            ends.append(step_of(kind, site, whole_step))
        except (UsageError, InjectionError) as error:
            ends.append(str(error))
        assert not _get_current_dispatch_mode_stack()
        model = nn.Linear(2, 2)
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None
    if isinstance(ends[0], str) or isinstance(ends[1], str):
        assert ends[0] == ends[1]
    else:
        assert all(map(same_nan, *ends))


def test_two_injections_into_one_model_both_land() -> None:
    model, flip = Net("mode inside"), fault_model("bitflip:bits=exponent_msb")
    sites = ("op:b#addmm.0/fwd/out", "op:(root)#relu.0/fwd/out")
    for first, second in (sites, sites[::-1]):
        one, other = (UnresolvedFault(site, flip, seed=1) for site in (first, second))
        with StepInjection(model, one) as outer, StepInjection(model, other) as inner:
            model(torch.ones(4, 6)).sum().backward()
        assert len(outer.applied_faults) == len(inner.applied_faults) == 1


@pytest.mark.parametrize(
    "site", ["op:nowhere#addmm.0/fwd/out", "op:mid#addmm.7/fwd/out", "op:mid#convolution.0/grad_wt/out"]
)
def test_a_site_that_is_not_there_is_answered_as_ever(site: str) -> None:
    said = []
    for whole_step in (True, False):
        with pytest.raises(UsageError) as caught:
            gradients(None, site, whole_step, False)
        said.append(str(caught.value))
    assert said[0] == said[1]
