"""One hit, in every way to run a step that changes how its operations are met; and what lies beside a first-order backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unsilent.errors import InjectionError
from unsilent.faults import fault_model
from unsilent.faults.drawn import Draw
from unsilent.sites.training.step import Step

SWITCHES = ("autocast", "checkpoint", "accumulate", "tied", "frozen", "compiled")
CASES = ["fwd/out", "fwd/first", "fwd/second", "grad_in/out", "grad_in/first", "grad_in/second",
         "grad_wt/out", "grad_wt/first", "grad_wt/second"]  # fmt: skip
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Entry, a body that may be checkpointed, an exit that may be tied to the entry."""

    def __init__(self, on):
        super().__init__()
        torch.manual_seed(1)
        self.on = on
        self.entry, self.mid, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.exit = nn.Linear(8, 8)
        if "tied" in on:
            self.exit.weight = self.entry.weight
        if "frozen" in on:
            self.entry.requires_grad_("tied" in on)

    def body(self, x):
        return x + torch.tanh(self.mid(self.norm(x)))

    def forward(self, x):
        x = self.entry(x)
        x = checkpoint(self.body, x, use_reentrant=False) if "checkpoint" in self.on else self.body(x)
        return self.exit(x)


def gradients(on, *faults):
    model = Net(on)
    run = torch.compile(model, backend="eager") if "compiled" in on else model
    with Step(model, faults) as step:
        for i in range(2 if "accumulate" in on else 1):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in on):
                out = run(X + i)
            out.float().square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, step


ALL = [frozenset(c) for r in range(len(SWITCHES)) for c in itertools.combinations(SWITCHES, r + 1)]


@pytest.mark.parametrize("on", [frozenset(), *ALL], ids=lambda on: "+".join(sorted(on)) or "plain")
def test_one_hit_whatever_is_switched_on(on):
    """All 64 combinations of switches, all nine places of one product; weight gradients leave all others as they are."""
    golden, step = gradients(on)
    (product,) = [
        n for n in step.names["fwd"] if n.startswith("mid#") and n.split("#")[1].split(".")[0] in ("addmm", "mm")
    ]
    step_of = {"micro_step": 1} if "accumulate" in on else {}
    for case in CASES:
        draw = Draw(f"op:{product}/{case}", fault_model("bitflip:bits=exponent_msb"), seed=4, **step_of)
        found, step = gradients(on, draw)
        assert len(step.hits) == 1
        changed = {n for n in golden if not torch.equal(golden[n], found[n])}
        if case.startswith("grad_wt"):
            assert changed == {"mid.weight"}, case
        else:
            assert changed
            assert "exit.bias" not in changed or case.startswith("fwd")


def test_a_backward_that_builds_a_graph_is_struck_once():
    """Its operations are forward ones of a further backward, too."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def penalty(*faults):
        with Step(nn.Module(), faults) as step:
            (g,) = torch.autograd.grad((x @ w).square().sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(g.square().sum(), w)
        return g.detach(), second, step

    g, second, _ = penalty()
    struck_g, struck_second, step = penalty(Draw("op:(run)#mm.0/grad_in/out", fault_model("set:value=5")))
    assert len(step.hits) == 1
    assert (g != struck_g).sum() == 1
    assert not torch.equal(second, struck_second)
    with pytest.raises(InjectionError, match="builds a graph"):
        penalty(Draw("op:(run)#mm.0/grad_in/second", fault_model("set:value=5")))


def test_a_graph_that_is_run_twice_is_struck_the_first_time():
    x = torch.randn(4, 3, requires_grad=True)
    with Step(nn.Module(), [Draw("op:(run)#tanh.0/grad_in/out", fault_model("set:value=9"))]) as step:
        y = torch.tanh(x).sum()
        (one,) = torch.autograd.grad(y, x, retain_graph=True)
        (two,) = torch.autograd.grad(y, x)
    assert len(step.hits) == 1
    assert (one == 9).sum() == 1
    assert not (two == 9).any()


def test_sparse_gradients_cannot_be_struck_and_say_so():
    table = nn.Embedding(5, 3, sparse=True)
    with (
        pytest.raises(InjectionError, match="without memory of its own"),
        Step(table, [Draw("op:(root)#embedding.0/grad_wt/out", fault_model("bitflip"))]),
    ):
        table(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_have_sites(make):
    """Every operation of the layer, forward and backward, wherever it makes something."""
    layer = make(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))

    def run(*faults):
        layer.zero_grad()
        with Step(layer, faults) as step:
            layer(x)[0].square().sum().backward()
        return {n: p.grad.clone() for n, p in layer.named_parameters()}, step

    golden, step = run()
    products = [n for n in step.names["fwd"] if any(k in n for k in ("addmm", "#mm", "rnn_layer", "matmul"))]
    assert products
    for site in (products[0], products[-1]):
        for case in ("fwd/out", "grad_wt/out"):
            found, struck = run(Draw(f"op:{site}/{case}", fault_model("set:value=3")))
            assert len(struck.hits) == 1
            assert any(not torch.equal(golden[n], found[n]) for n in golden)


def test_a_loss_scaler_sees_the_fault():
    """An infinite gradient is found by the scaler: it skips the update and lowers its scale."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.weight.detach().clone()
    with Step(model, [Draw("op:(root)/grad_wt/out", fault_model("set:value=inf"))], [optimizer]) as step:
        scaler.scale(model(torch.ones(4, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(step.hits) == 1
    assert torch.equal(before, model.weight)
    assert scaler.get_scale() == 4.0


def test_two_faults_in_one_step_land_both():
    golden, _ = gradients(frozenset())
    draws = [
        Draw("op:mid/grad_wt/out", fault_model("bitflip:bits=30"), seed=1),
        Draw("op:exit/grad_wt/first", fault_model("bitflip:bits=30"), seed=2),
        Draw("op:mid/grad_wt/out", fault_model("bitflip:bits=30"), seed=3),
    ]
    found, step = gradients(frozenset(), *draws)
    assert len(step.hits) == 3
    assert {n for n in golden if not torch.equal(golden[n], found[n])} == {"mid.weight", "exit.weight"}
