"""One hit, in every way to run a step that changes how its operations are met; and what lies beside a first-order backward."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import few
from unsilent.basics.errors import InjectionError, UsageError
from unsilent.faults import fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites.training.step import StepInjection
from unsilent.sites.training.step_survey import StepSurvey

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
    with StepInjection(model, faults) as step:
        for i in range(2 if "accumulate" in on else 1):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in on):
                out = run(X + i)
            out.float().square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, step


ALL = [frozenset(c) for r in range(len(SWITCHES)) for c in itertools.combinations(SWITCHES, r + 1)]


@pytest.mark.parametrize(
    "on", few([frozenset(), *ALL], frozenset(), *ALL[::3]), ids=lambda on: "+".join(sorted(on)) or "plain"
)
def test_one_hit_whatever_is_switched_on(on):
    """All 64 combinations of switches, all nine places of one product; weight gradients leave all others as they are."""
    golden, step = gradients(on)
    (product,) = [
        n for n in step.names["fwd"] if n.startswith("mid#") and n.split("#")[1].split(".")[0] in ("addmm", "mm")
    ]
    step_of = {"micro_step": 1} if "accumulate" in on else {}
    for case in CASES:
        draw = UnresolvedFault(f"op:{product}/{case}", fault_model("bitflip:bits=exponent_msb"), seed=4, **step_of)
        found, step = gradients(on, draw)
        assert len(step.applied_faults) == 1
        changed = {n for n in golden if not torch.equal(golden[n], found[n])}
        if case.startswith("grad_wt"):
            assert changed == {"mid.weight"}, case
        else:
            assert changed
            assert "exit.bias" not in changed or case.startswith("fwd")


def test_a_backward_that_builds_a_graph_is_corrupted_once():
    """Its operations are forward ones of a further backward, too."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def penalty(*faults):
        with StepInjection(nn.Module(), faults) as step:
            (g,) = torch.autograd.grad((x @ w).square().sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(g.square().sum(), w)
        return g.detach(), second, step

    g, second, _ = penalty()
    corrupted_g, corrupted_second, step = penalty(
        UnresolvedFault("op:(run)#mm.0/grad_in/out", fault_model("set:value=5"))
    )
    assert len(step.applied_faults) == 1
    assert (g != corrupted_g).sum() == 1
    assert not torch.equal(second, corrupted_second)
    with pytest.raises(InjectionError, match="builds a graph"):
        penalty(UnresolvedFault("op:(run)#mm.0/grad_in/second", fault_model("set:value=5")))


def test_a_graph_that_is_run_twice_is_corrupted_the_first_time():
    x = torch.randn(4, 3, requires_grad=True)
    with StepInjection(
        nn.Module(), [UnresolvedFault("op:(run)#tanh.0/grad_in/out", fault_model("set:value=9"))]
    ) as step:
        y = torch.tanh(x).sum()
        (one,) = torch.autograd.grad(y, x, retain_graph=True)
        (two,) = torch.autograd.grad(y, x)
    assert len(step.applied_faults) == 1
    assert (one == 9).sum() == 1
    assert not (two == 9).any()


def test_sparse_gradients_cannot_be_corrupted_and_say_so():
    table = nn.Embedding(5, 3, sparse=True)
    with (
        pytest.raises(InjectionError, match="has no memory of its own"),
        StepInjection(table, [UnresolvedFault("op:(root)#embedding.0/grad_wt/out", fault_model("bitflip"))]),
    ):
        table(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_have_sites(make):
    """Every operation of the layer, forward and backward, wherever it makes something."""
    layer = make(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))

    def run(*faults):
        layer.zero_grad()
        with StepInjection(layer, faults) as step:
            layer(x)[0].square().sum().backward()
        return {n: p.grad.clone() for n, p in layer.named_parameters()}, step

    golden, step = run()
    products = [n for n in step.names["fwd"] if any(k in n for k in ("addmm", "#mm", "rnn_layer", "matmul"))]
    assert products
    for site in (products[0], products[-1]):
        for case in ("fwd/out", "grad_wt/out"):
            found, corrupted = run(UnresolvedFault(f"op:{site}/{case}", fault_model("set:value=3")))
            assert len(corrupted.applied_faults) == 1
            assert any(not torch.equal(golden[n], found[n]) for n in golden)


def test_a_loss_scaler_sees_the_fault():
    """An infinite gradient is found by the scaler: it skips the update and lowers its scale."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.weight.detach().clone()
    with StepInjection(
        model, [UnresolvedFault("op:(root)/grad_wt/out", fault_model("set:value=inf"))], [optimizer]
    ) as step:
        scaler.scale(model(torch.ones(4, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(step.applied_faults) == 1
    assert torch.equal(before, model.weight)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Conv1d(4, 3, 2)], ids=["linear", "convolution"])
@pytest.mark.parametrize("site", ["fwd/out", "fwd/second", "grad_wt/out", "grad_in/out"])
def test_a_module_alone_means_its_product_under_autocast(layer, site):
    """Autocast copies the operands to bfloat16 inside the module's call; these copies are not what its name means."""
    model = nn.Sequential(layer)
    x = torch.randn(4, 6).requires_grad_()

    def run(name: str) -> tuple[StepInjection, list[torch.Tensor]]:
        fault = UnresolvedFault(f"op:{name}/{site}", fault_model("bitflip"), seed=3)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), StepInjection(model, fault) as step:
            loss = model(x).float().square().sum()
            gradients = torch.autograd.grad(loss, [x, *model.parameters()])
        return step, [loss.detach(), *gradients]

    step, found = run("0")
    (product,) = {name for name in step.names["fwd"] if "addmm" in name or "convolution" in name}
    assert {name.partition("#")[2].partition(".")[0] for name in step.names["fwd"]} > {"_to_copy"}
    full, expected = run(product)
    (hit,), (same,) = step.applied_faults, full.applied_faults
    assert hit.fault.site == same.fault.site == f"op:{product}/{site}"
    assert hit.fault.dtype == "bfloat16"
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), StepSurvey(model) as survey:
        model(x).float().square().sum().backward()
    assert [region.site for region in survey.select_regions(f"op:0/{site}")] == [f"op:{product}/{site}"]


class Cast(nn.Module):
    def forward(self, x):
        return x.to(torch.bfloat16)


def test_a_module_that_only_casts_is_named_in_full():
    model = nn.Sequential(nn.Linear(6, 5), Cast())
    with (
        pytest.raises(UsageError, match=r"the only operations in '1' itself are casts; name one: op:1#_to_copy.0"),
        StepInjection(model, UnresolvedFault("op:1/fwd/out", fault_model("bitflip"))),
    ):
        model(torch.randn(4, 6))
    with StepInjection(model, UnresolvedFault("op:1#_to_copy.0/fwd/out", fault_model("bitflip"))) as step:
        model(torch.randn(4, 6))
    assert len(step.applied_faults) == 1


def test_two_faults_in_one_step_land_both():
    golden, _ = gradients(frozenset())
    draws = [
        UnresolvedFault("op:mid/grad_wt/out", fault_model("bitflip:bits=30"), seed=1),
        UnresolvedFault("op:exit/grad_wt/first", fault_model("bitflip:bits=30"), seed=2),
        UnresolvedFault("op:mid/grad_wt/out", fault_model("bitflip:bits=30"), seed=3),
    ]
    found, step = gradients(frozenset(), *draws)
    assert len(step.applied_faults) == 3
    assert {n for n in golden if not torch.equal(golden[n], found[n])} == {"mid.weight", "exit.weight"}


# -- found by others: each went wrong before ----------------------------------------------------------------------------


class Twice(nn.Module):
    """One activation, called twice in a checkpointed region."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first, self.second, self.relu = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU()

    def forward(self, x):
        return checkpoint(lambda v: self.second(self.relu(self.first(self.relu(v)))), x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("call", [0, 1])
def test_what_is_run_again_keeps_its_name_where_a_module_is_called_twice(reentrant, call):
    model = Twice(reentrant)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.no_grad():
        seen = [torch.relu(x), torch.relu(model.first(torch.relu(x)))]
    with StepInjection(
        model, UnresolvedFault(f"op:relu#relu.{call}/fwd/out", "set:value=9", seed=2, occurrence=1)
    ) as step:
        model(x).sum().backward()
    (hit,) = step.applied_faults
    assert hit.before.view("f4")[0] == seen[call].flatten()[hit.fault.elements[0]]


def test_an_own_optimizer_that_frees_memory_names_its_operations_right():
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                noise = torch.ones(36).mul_(0.5)
                p.add_(p.grad * noise.sum(), alpha=-0.1)

    names = set()
    for _ in range(12):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        optimizer = Own(model.parameters())
        with StepInjection(model, (), optimizer) as step:
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
        names.add(tuple(step.names["optim"]))
    assert len(names) == 1
    assert not any("#sum" in name for name in next(iter(names)))  # works for nobody: made of nothing of a parameter's


def test_an_operand_of_a_view_is_refused():
    a = torch.zeros(4)
    with (
        pytest.raises(InjectionError, match="returns a view"),
        StepInjection(nn.Module(), UnresolvedFault("op:(run)#slice.0/fwd/first", "scale:factor=1")),
    ):
        a[:2].add_(1.0)
    assert a.tolist() == [1, 1, 0, 0]


def test_an_element_of_an_expanded_operand_is_a_cell_of_memory():
    a, b = torch.ones(4, 3), torch.ones(1, 3)
    with StepInjection(nn.Module(), UnresolvedFault("op:(run)#mul.0/fwd/second", "random:count=3")) as step:
        y = a * b.expand(4, 3)
    assert step.receipt.verified_elements == 3
    assert (y == y[0]).all()


def test_faults_of_one_gradient_are_made_in_order_or_refused_with_the_reason():
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    out, first = (UnresolvedFault(f"op:(run)#mm.0/grad_wt/{o}", "set:value=7", seed=3) for o in ("out", "first"))
    found = []
    for faults in ([out, first], [first, out]):
        x.grad = w.grad = None
        with StepInjection(nn.Module(), faults) as step:
            (x @ w).sum().backward()
        assert len(step.applied_faults) == 2
        found.append(w.grad.clone())
    assert torch.equal(*found)
    assert (found[0] == 7).any()
    both = [first, UnresolvedFault("op:(run)#mm.0/grad_wt/second", "set:value=7")]
    with pytest.raises(InjectionError, match="one operand of a gradient"), StepInjection(nn.Module(), both):
        (x @ w).sum().backward()
    with pytest.raises(UsageError, match="given twice"):
        StepInjection(nn.Module(), [out, out])


def test_a_gradient_fault_keeps_no_activation_alive():
    x = torch.randn(4, requires_grad=True)
    faults = [
        UnresolvedFault("op:(run)#add.0/grad_in/out", "set:value=7"),
        UnresolvedFault("saved:(run)#add.0/first", "set:value=7"),
    ]
    with pytest.raises(InjectionError, match="it is not saved for"), StepInjection(nn.Module(), faults):
        ((x * 2) + 1).sum().backward()


def test_the_last_product_of_a_checkpointed_region_can_be_corrupted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(5, 4, requires_grad=True)
    with StepInjection(model, UnresolvedFault("op:2/grad_wt/first", "set:value=7")) as step:
        (checkpoint(model, x, use_reentrant=False) + x).square().sum().backward()
    assert len(step.applied_faults) == 1


def test_a_backward_for_some_inputs_leaves_the_fault_for_the_next():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    with StepInjection(model, UnresolvedFault("op:2/grad_wt/out", "set:value=7")) as step:
        loss = model(torch.randn(5, 4)).sum()
        loss.backward(inputs=[model[0].weight], retain_graph=True)
        loss.backward()
    assert len(step.applied_faults) == 1


def test_a_closure_of_an_optimizer_is_a_forward_and_a_backward():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    x = torch.randn(5, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    for site in ("op:(root)#addmm.0/fwd/out", "op:(root)#addmm.0/grad_wt/out"):
        with StepInjection(model, UnresolvedFault(site, "set:value=7"), optimizer) as step:
            optimizer.step(closure)
        assert len(step.applied_faults) == 1


def test_modules_of_other_threads_are_left_alone():
    model, other = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)
    stop, errors = threading.Event(), []

    def run():
        try:
            while not stop.is_set():
                other(torch.ones(2, 4))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(20):
            with StepInjection(model) as step:
                model(torch.ones(2, 4)).sum().backward()
            assert {n.partition("#")[0] for n in step.names["fwd"]} == {"0", "1", "(run)"}
    finally:
        stop.set()
        thread.join()
    assert not errors


def test_a_step_is_entered_once_at_a_time():
    step = StepInjection(nn.Linear(2, 2))
    with step, pytest.raises(InjectionError, match="already active"):
        step.__enter__()
    with step:
        pass
    assert torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"
