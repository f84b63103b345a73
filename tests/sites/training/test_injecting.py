"""One line for one fault in a step, and what a step has to offer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import InjectionError, UsageError
from unsilent.faults import fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault, faults_in_step
from unsilent.sites.training.step import StepInjection
from unsilent.sites.training.step_survey import StepSurvey


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    return model, torch.optim.AdamW(model.parameters())


def stepped(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    optimizer.step()
    return {n: t.clone() for n, t in model.state_dict().items()}


LINES = {
    ("op:0", "bitflip"): "op:0#convolution.0/fwd/out",
    ("op:0/grad_wt", None): "op:0#convolution.0/grad_wt/out",
    ("op:4/grad_in/second", "random"): "op:4#addmm.0/grad_in/second",
    ("op:4#addmm.0/fwd/third", "zero"): "op:4#addmm.0/fwd/third",
    ("op:0/grad_wt", "N16_RD"): "op:0#convolution.0/grad_wt/out",
    ("op:0/grad_wt", "INPUT_16"): "op:0#convolution.0/grad_wt/first",
    ("op:4/grad_in", "WT"): "op:4#addmm.0/grad_in/second",
    ("saved:4", "random"): "saved:4#addmm.0/first",
    ("optim:4.bias/exp_avg", "zero"): "optim:4.bias/exp_avg",
    ("op:4.bias#lerp.0/optim", "random"): "op:4.bias#lerp.0/optim/out",
}


@pytest.mark.parametrize("line", LINES)
def test_one_line(line):
    address, fault = line
    model, optimizer = made()
    stepped(model, optimizer)
    with unsilent.inject(model, address, fault, seed=3, optimizers=[optimizer]) as step:
        stepped(model, optimizer)
    assert [hit.fault.site for hit in step.applied_faults] == [LINES[line]]
    assert step.receipt.verified_elements == step.receipt.requested_elements > 0


def test_every_addressed_element_has_its_bit_flipped():
    model, optimizer = made()
    with unsilent.inject(model, "op:0/grad_wt[1,...]", bit=31) as step:
        stepped(model, optimizer)
    (hit,) = step.applied_faults
    assert np.array_equal(hit.fault.elements, np.arange(27, 54))
    assert (hit.before ^ hit.after == 1 << 31).all()


def test_an_evaluation_is_corrupted_too_and_a_resolved_fault_replays():
    model, _ = made()
    model.eval()
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        golden = model(x)
        with unsilent.inject(model, "op:0", "set:value=100") as step:
            corrupted = model(x)
        with unsilent.inject(model, step.applied_faults[0].fault) as again:
            assert torch.equal(model(x), corrupted)
        assert torch.equal(model(x), golden)
    assert not torch.equal(golden, corrupted)
    assert again.receipt.verified_elements == 1


@pytest.mark.parametrize(
    ("address", "fault", "said"),
    [
        ("op:1", None, r"2 operations of '1' can be corrupted; name one: op:1#add.0, op:1#native_batch_norm.0"),
        ("op:9", None, "unknown module with operations in this step '9'"),
        ("op:4/backward", None, "cannot read site"),
        ("op:4/grad_in/out", "N16_RD", "already chooses the operand"),
        ("op:4", "N17_RD", "unknown fault model or preset 'N17_RD'; did you mean 'N16_RD'"),
        ("op:0/grad_in/out", None, "no gradient is computed"),
        ("op:4/fwd/third", "INPUT_99", "unknown fault model or preset"),
        ("kv:0/key", None, "does not corrupt kv: sites"),
        ("comm:all_reduce.0", None, "unknown collective 'all_reduce.0'"),
        ("op:1/fwd", "INPUT_16", r"2 operations of '1' can be corrupted"),
        ("op:4.weight/optim", None, r"1\d operations update '4.weight'; name one: op:4.weight#"),
        ("op:9.weight/optim", None, "unknown parameter with an update in this step"),
        ("saved:4", "N16_RD", "corrupts a forward or backward operation"),
        ("op:4.weight#lerp.0/optim", "RD", "corrupts a forward or backward operation"),
        ("op:4/grad_wt[0,0,0]", None, r"index \[0,0,0\] is outside"),
    ],
)
def test_lines_that_cannot_be(address, fault, said):
    model, optimizer = made()
    with (
        pytest.raises((UsageError, InjectionError), match=said) as error,
        unsilent.inject(model, address, fault, optimizers=[optimizer]),
    ):
        stepped(model, optimizer)
    assert "\n" not in str(error.value)


def test_a_rank_that_is_not_there_is_an_error_not_a_silent_miss():
    with pytest.raises(UsageError, match="is for rank 3; expected 0 to 0"):
        unsilent.inject(made()[0], "op:0", rank=3)


def test_a_survey_changes_no_bit_and_every_site_that_it_tells_can_be_corrupted():
    model, optimizer = made()
    plain, other = made()
    stepped(model, optimizer)
    stepped(plain, other)
    with StepSurvey(model, [optimizer]) as survey:
        found = stepped(model, optimizer)
    assert all(torch.equal(v, found[k]) for k, v in stepped(plain, other).items())
    regions = survey.select_regions("op:*/*/*", "optim:*", "saved:*")
    names = {r.site for r in regions}
    assert {"op:0#convolution.0/grad_wt/first", "op:4#addmm.0/grad_in/second", "optim:0.weight/exp_avg_sq"} <= names
    biases = ("0#convolution.0", "4#addmm.0", "1#native_batch_norm.0")
    assert {f"op:{name}/grad_wt/out.1" for name in biases} <= names
    assert "op:0#convolution.0/grad_in/out" not in names  # images need no gradient
    missed = []
    for region in regions:
        with StepInjection(model, [UnresolvedFault(region.site, fault_model("bitflip"), seed=1)], [optimizer]) as step:
            try:
                stepped(model, optimizer)
            finally:
                landed = step.applied_faults and step.applied_faults[0].fault
        if not landed or (landed.dtype, landed.shape) != (region.dtype, region.shape):
            missed.append(region.site)
    assert not missed


def test_a_module_alone_means_the_operation_that_has_a_gradient():
    """Batch norm counts its batches, too, but only its normalisation goes back."""
    model, optimizer = made()
    with unsilent.inject(model, "op:1/grad_wt", "random", optimizers=optimizer) as step:
        stepped(model, optimizer)
    assert step.applied_faults[0].fault.site == "op:1#native_batch_norm.0/grad_wt/out"


def test_moments_that_a_site_does_not_have_are_refused():
    model, optimizer = made()
    for site, moment, said in (
        ("op:4/grad_wt/out", {"occurrence": 1}, "only forward operations have one"),
        ("optim:4.bias/exp_avg", {"micro_step": 1}, "only once in a step"),
        ("op:4/fwd/out", {"step": 3, "first_step": 1}, "leave out first_step"),
        ("op:4/fwd/out", {"first_step": 3, "last_step": 2}, "before first_step=3"),
    ):
        with pytest.raises(UsageError, match=said):
            StepInjection(model, [UnresolvedFault(site, "bitflip", **moment)], [optimizer])
    for draw, said in (
        (UnresolvedFault("op:4/grad_wt/out", "bitflip", micro_step=2), "micro-step 2; the step had only micro-step 0"),
        (UnresolvedFault("op:4/fwd/out", "bitflip", occurrence=1), "no call 1"),
    ):
        with pytest.raises(InjectionError, match=said), StepInjection(model, draw, optimizer):
            stepped(model, optimizer)
    with (
        pytest.raises(InjectionError, match="no backward pass ran"),
        StepInjection(model, UnresolvedFault("op:4/grad_wt/out", "bitflip")),
    ):
        model(torch.randn(5, 3, 6, 6))
    with (
        pytest.raises(UsageError, match="no optimizer was given"),
        StepInjection(model, UnresolvedFault("optim:4.bias/exp_avg", "zero")),
    ):
        pass


def test_a_window_among_nans_is_refused_not_a_silent_miss():
    model, x = nn.Conv2d(3, 4, 3), torch.full((1, 3, 6, 6), float("nan"))
    with pytest.raises(InjectionError, match="contains NaN"), unsilent.inject(model, "op:(root)", "INPUT_16"):
        model(x)


def test_a_parameter_before_a_step_of_an_optimizer():
    model, optimizer = made()
    with unsilent.inject(model, "param:4.weight[1,2]", bit=30, optimizers=optimizer) as step:
        stepped(model, optimizer)
    assert step.receipt.changed_bits == 1


def test_a_survey_selects_by_address():
    model, optimizer = made()
    with StepSurvey(model, [optimizer]) as survey:
        stepped(model, optimizer)
    assert [r.site for r in survey.select_regions("op:*/grad_wt/out")] == [
        "op:4#addmm.0/grad_wt/out",
        "op:1#native_batch_norm.0/grad_wt/out",
        "op:0#convolution.0/grad_wt/out",
    ]
    assert len(survey.select_regions("op:0.*")) < len(survey.select_regions())
    fault = fault_model("random").draw(survey.select_regions("op:*/grad_*/out"), np.random.default_rng(0), "per-tensor")
    with StepInjection(model, fault, [optimizer]) as step:
        stepped(model, optimizer)
    assert len(step.applied_faults) == 1
    with pytest.raises(UsageError, match="unknown"):
        survey.select_regions("op:7/grad_wt/out")


def test_persistence_over_steps():
    """One step, some steps, always; a fault that stays corrupts the same elements."""
    draws = {
        "once": UnresolvedFault("op:0/grad_wt/out", fault_model("random"), step=2),
        "a while": UnresolvedFault("op:0/grad_wt/out", fault_model("random"), first_step=1, last_step=3),
        "for ever": UnresolvedFault("op:0/grad_wt/out", fault_model("random"), first_step=3),
        "always": UnresolvedFault("op:0/grad_wt/out", fault_model("random")),
    }
    want = {"once": [2], "a while": [1, 2, 3], "for ever": [3, 4], "always": [0, 1, 2, 3, 4]}
    for name, draw in draws.items():
        model, optimizer = made()
        seen, where = [], set()
        for number in range(5):
            with StepInjection(model, [draw], [optimizer], number) as step:
                stepped(model, optimizer)
            seen += [number] * len(step.applied_faults)
            where |= {(*h.fault.elements.tolist(), *h.fault.operands.tolist()) for h in step.applied_faults}
        assert seen == want[name] == [n for n in range(5) if faults_in_step([draw], n)]
        assert len(where) == 1
