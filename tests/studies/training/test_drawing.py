"""Where faulty training runs are corrupted: from the number of a trial alone, by the weights that were asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from campaigns.faulty_loop import running, write_loop
from unsilent.basics.errors import UsageError
from unsilent.campaigns.spec import TrialId
from unsilent.faults import Region
from unsilent.faults.hardware.description_file import load_accelerator
from unsilent.faults.hardware.presets import PRESETS
from unsilent.studies.training.fault_sampler import FaultSampler
from unsilent.studies.training.spec import EarlyEndRule, TrainingSpec

STEPS, DRAWS = 24, 3000
LEAST = 1e-3
"""P value of a test with a fixed seed below which the law is not the one that was asked for."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    with running(TrainingSpec(write_loop(tmp_path_factory.mktemp("drawing")))) as found:
        yield found


@pytest.fixture(scope="module")
def sampler(runner):
    """``drawing(faults=…, …)``: of the same step, for another question."""
    names = [name for name, _ in runner.golden.state_before_step(0).model.named_parameters()]
    parts = {"trunk": ["conv.*", "norm.*"], "head": ["fc.*"]}

    def make(steps=STEPS, more=(), **changed):
        return FaultSampler(replace(runner.spec, **changed), [*runner.sampler.regions, *more], names, parts, steps)

    return make


def trial(k, target="random"):
    return TrialId(target, None, k)


def draws(of, count=DRAWS, target="random", campaign="c"):
    return [of.draw(campaign, trial(k, target)) for k in range(count)]


def check(counts, shares):
    """The counts are of a law with these shares."""
    assert set(counts) <= {name for name, share in shares.items() if share}
    seen = np.array([counts[name] for name, share in shares.items() if share])
    expected = np.array([share for share in shares.values() if share])
    assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > LEAST


# -- operations ---------------------------------------------------------------------------------------------------------


def test_products_in_all_their_phases_are_the_places(runner):
    """A convolution that reads the data has no gradient of its input."""
    assert {(p.operation, p.phase, p.layer) for p in runner.sampler.places} == {
        ("conv#convolution.0", "fwd", "conv"),
        ("conv#convolution.0", "grad_wt", "conv"),
        *(("fc#addmm.0", phase, "fc") for phase in ("fwd", "grad_in", "grad_wt")),
    }
    assert runner.sampler.notes == []
    assert [kind.name for kind in runner.sampler.kinds] == list(PRESETS)
    assert [target.name for target in runner.sampler.targets] == ["random"]


def test_steps_fault_models_and_places_are_uniform_where_nothing_is_said(sampler):
    found = [one.injection for one in draws(sampler())]
    check(Counter(s.step for s in found), dict.fromkeys(range(STEPS), 1 / STEPS))
    check(Counter(s.model for s in found), dict.fromkeys(PRESETS, 1 / len(PRESETS)))
    places = sampler().places
    check(
        Counter((s.site.split("/")[0], s.phase) for s in found),
        {(f"op:{p.operation}", p.phase): 1 / len(places) for p in places},
    )
    assert {s.step for s in found} == set(range(STEPS))


def test_fault_models_come_by_their_weight(sampler):
    weights = {"RD": 5.0, "WT_16": 1.0, "bitflip:bits=30": 2.0, "ZERO": 0.5}
    one = sampler(faults=tuple(weights.items()))
    assert sum(kind.weight for kind in one.kinds) == pytest.approx(1)
    found = [d.injection for d in draws(one)]
    whole = sum(weights.values())
    check(Counter(s.model for s in found), {name: weight / whole for name, weight in weights.items()})
    for model in weights:  # whatever the fault model, places are alike
        own = Counter((s.layer, s.phase) for s in found if s.model == model)
        check(own, {(p.layer, p.phase): 1.0 for p in one.places})


def test_an_accelerator_says_the_weights(sampler):
    for name in ("nvdla", "systolic", "tensor-core"):
        entries = load_accelerator(name).weighted_presets
        one = sampler(accelerator=name)
        shares = Counter()
        for entry in entries:
            shares[f"{entry.group}/{entry.preset.name}"] += entry.weight
        fitting = {kind.name for kind, places in one._fitting if places}
        found = draws(one, 1000)
        check(Counter(d.injection.model for d in found), {n: w for n, w in shares.items() if n in fitting})
        held = {f"{e.group}/{e.preset.name}": (e.held, e.preset.operand) for e in entries}
        for d in found[:300]:
            (fault,) = d.faults
            assert (fault.held, fault.site.rpartition("/")[2]) == held[d.injection.model]


def test_what_is_corrupted_is_where_the_row_says(sampler):
    one = sampler(faults=(("RD", 1.0), ("WT", 1.0), ("INPUT_16", 1.0), ("bitflip", 1.0)), value=None)
    for d in draws(one, 300):
        (fault,) = d.faults
        assert fault.site == d.injection.site
        assert fault.site.startswith(f"op:{d.injection.layer}#")
        assert fault.site.split("/")[1] == d.injection.phase
        operand = PRESETS[d.injection.model].operand if d.injection.model in PRESETS else "out"
        assert fault.site.split("/")[2] == operand
        assert (fault.window is not None) == (d.injection.model == "INPUT_16")


def test_a_value_takes_the_place_of_each_models_own(sampler):
    for d in draws(sampler(faults=(("N16_RD", 1.0),), value="set:value=7"), 20):
        (fault,) = d.faults
        assert fault.model.text == "set:value=7,block=16"


def test_layers_and_phases_are_those_asked_for(sampler):
    only = [d.injection for d in draws(sampler(layers=("f*",), phases=("grad_in", "grad_wt")), 200)]
    assert {(s.layer, s.phase) for s in only} == {("fc", "grad_in"), ("fc", "grad_wt")}


@pytest.fixture
def crowded(runner):
    """A product with four outputs, beside those of the training."""
    return [Region(f"op:small#mm.0/{phase}/{o}", "float32", (2, 2)) for phase in ("fwd",) for o in ("out", "first")]


def test_fault_models_that_do_not_fit_are_told_and_not_drawn(sampler, crowded):
    one = sampler(more=crowded, faults=(("zero:count=16", 1.0), ("WT", 1.0), ("RBFLIP", 1.0)))
    # There are no 16 outputs, and no region is its weight.
    assert one.notes == [
        "zero:count=16 can be applied in 5 of 6 pairs of operation and phase.",
        "WT can be applied in 5 of 6 pairs of operation and phase.",
    ]
    found = [d.injection for d in draws(one)]
    assert {s.model for s in found if s.layer == "small"} == {"RBFLIP"}
    check(Counter(s.model for s in found), dict.fromkeys(("zero:count=16", "WT", "RBFLIP"), 1 / 3))
    own = Counter((s.layer, s.phase) for s in found if s.model == "RBFLIP")
    check(own, {(p.layer, p.phase): 1.0 for p in one.places})
    only = sampler(more=crowded, layers=("small",), faults=(("zero:count=16", 9.0), ("RBFLIP", 1.0)))
    assert only.notes == ["zero:count=16 cannot be applied to any of the operations and is not drawn."]
    assert {d.injection.model for d in draws(only, 100)} == {"RBFLIP"}
    with pytest.raises(
        UsageError, match=r"none of the fault models \(zero:count=16\) can be applied .* choose others with --fault"
    ):
        sampler(more=crowded, layers=("small",), faults=(("zero:count=16", 1.0),))


# -- memory -------------------------------------------------------------------------------------------------------------

SIZES = {"conv.weight": 36, "conv.bias": 4, "norm.weight": 4, "norm.bias": 4, "fc.weight": 432, "fc.bias": 3}


def test_parameters_and_their_state_are_the_targets(sampler):
    tensors = {t.name: t for t in sampler(per="tensor").targets}
    assert set(tensors) == {f"{what}:{name}" for what in ("param", "optim") for name in SIZES}
    for name, size in SIZES.items():
        assert tensors[f"param:{name}"].elements == size
        assert tensors[f"optim:{name}"].elements == 2 * size + 1  # two moments and a counter
    layers = {t.name: t for t in sampler(per="layer").targets}
    assert {name: t.elements for name, t in layers.items() if t.memory_kind == "param"} == {
        "param:conv": 40, "param:norm": 8, "param:fc": 435,
    }  # fmt: skip
    parts = {t.name: t for t in sampler(per="component").targets}
    assert {name: t.elements for name, t in parts.items()} == {
        "param:trunk": 48, "param:head": 435, "optim:trunk": 100, "optim:head": 872,
    }  # fmt: skip
    assert [t.name for t in sampler(per="layer", layers=("c*",)).targets] == ["param:conv", "optim:conv"]


@pytest.mark.parametrize("target", ["param:trunk", "optim:trunk"])
def test_tensors_are_corrupted_by_their_size(sampler, target):
    one = sampler(per="component", faults=(("bitflip:bits=30", 1.0),))
    found = [d.injection for d in draws(one, target=target)]
    regions = {
        r.site: r.eligible_count
        for r in one.regions
        if r.site.startswith(target[:5]) and r.site.partition(":")[2].partition("/")[0] in SIZES and "fc" not in r.site
    }
    check(Counter(s.site for s in found), regions)
    assert {s.phase for s in found} == {target.partition(":")[0]}
    assert {s.layer for s in found} == {"conv", "norm"}
    # What optimizers remember is there after the first step only.
    first = 0 if target.startswith("param") else 1
    check(Counter(s.step for s in found), dict.fromkeys(range(first, STEPS), 1.0))


def test_a_flip_is_the_fault_in_memory_where_none_is_named(sampler):
    assert {d.faults[0].model.text for d in draws(sampler(per="layer"), 20, "param:fc")} == {"bitflip"}


# -- randomness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("per", "target"), [(None, "random"), ("layer", "optim:fc")])
def test_a_trial_has_its_faults_in_any_order(sampler, per, target):
    there, back = sampler(per=per), sampler(per=per)
    forward = draws(there, 60, target)
    backward = [back.draw("c", trial(k, target)) for k in reversed(range(60))]
    assert forward == backward[::-1]
    assert len({(d.injection, d.faults[0].seed) for d in forward}) == 60


def test_trials_campaigns_and_seeds_have_faults_of_their_own(sampler):
    first = draws(sampler(), 30)
    assert first != draws(sampler(), 30, campaign="d")
    assert first != draws(sampler(seed=1), 30)
    assert first == draws(sampler(seed=0), 30)


def test_a_horizon_changes_no_fault(runner, tmp_path):
    horizon = EarlyEndRule(5, 4, (1.0,) * 6, 1.0)
    with running(replace(runner.spec, horizon=horizon)) as other:
        assert other.campaign != runner.campaign
        assert [other.draw(trial(k)) for k in range(50)] == [runner.draw(trial(k)) for k in range(50)]


def test_a_guarded_trial_has_the_faults_of_the_trial_itself(runner):
    for k in range(20):
        assert runner.draw(trial(k, "guarded:random")) == runner.draw(trial(k))


# -- mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layers": ("fcc",)}, r"unknown layer .* 'fcc'; did you mean 'fc'\? Known: conv, fc"),
        ({"layers": ("conv", "nothing.*")}, r"unknown layer .* 'nothing.\*'"),
        ({"phases": ("gradwt",)}, r"unknown phase 'gradwt'; did you mean 'grad_wt'\? Known: fwd, grad_in, grad_wt"),
        ({"phases": ("grad_in",), "layers": ("conv",)}, "no convolution or matrix product of conv has phase grad_in in a"),
        ({"faults": (("RDD", 1.0),)}, r"unknown fault model 'RDD'"),
        ({"faults": (("bitflip:bit=3", 1.0),)}, r"bitflip.* 'bit'"),
        ({"faults": (("RD", 1.0),), "accelerator": "nvdla"}, "--accelerator and --fault both choose the fault models"),
        ({"accelerator": "nvdia"}, r"unknown accelerator 'nvdia'; did you mean 'nvdla'"),
        ({"faults": (("bitflip", 1.0),), "value": "set:value=1"}, "--value and --fault bitflip both set what elements become"),
        ({"faults": (("RD", 1.0),), "value": "set:value=1,block=3"}, "chooses elements, but RD already does"),
        ({"faults": (("RD", 1.0),), "value": "sett"}, r"unknown fault model 'sett'; did you mean 'set'"),
        ({"per": "module"}, "unknown --per 'module'. Known: component, kind, layer, tensor"),
        ({"per": "bit"}, "unknown --per 'bit'"),
        ({"per": "layer", "faults": (("zero", 1.0), ("bitflip", 1.0))}, "one fault model; give one --fault"),
        ({"per": "layer", "accelerator": "nvdla"}, "--accelerator and --value apply to operations"),
        ({"per": "layer", "value": "set:value=1"}, "--accelerator and --value apply to operations"),
        ({"per": "layer", "layers": ("nothing",)}, r"unknown layer with parameters 'nothing'. Known: conv, fc, norm"),
        ({"per": "layer", "layers": ("conv", "norms")}, r"unknown layer with parameters 'norms'; did you mean 'norm'"),
        ({"per": "layer", "faults": (("bitflip:bits=40", 1.0),)}, "cannot be applied to any parameter of .*widen --layer"),
        ({"per": "layer", "faults": (("RD", 1.0),)}, r"unknown fault model 'RD'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(sampler, changed, said):
    with pytest.raises(UsageError, match=said) as raised:
        sampler(**changed)
    assert "\n" not in str(raised.value)


def test_a_target_that_is_not_there(sampler):
    with pytest.raises(UsageError, match="unknown target 'param:fcc'; did you mean 'param:fc'"):
        sampler(per="layer").draw("c", trial(0, "param:fcc"))
    with pytest.raises(UsageError, match="unknown target 'param:fc'. Known: random"):
        sampler().draw("c", trial(0, "param:fc"))
    with pytest.raises(UsageError, match="unknown target 'random'"):
        sampler(per="layer").draw("c", trial(0))


# -- moments ------------------------------------------------------------------------------------------------------------


def test_faults_begin_in_the_steps_that_are_asked(sampler):
    faults = (("RD:from=5", 1.0), ("zero:from=2..4", 1.0), ("bitflip", 1.0))
    steps = {}
    for one in draws(sampler(faults=faults)):
        steps.setdefault(one.injection.model, Counter())[one.injection.step] += 1
    assert set(steps["RD:from=5"]) == {5}
    check(steps["zero:from=2..4"], dict.fromkeys(range(2, 5), 1 / 3))
    check(steps["bitflip"], dict.fromkeys(range(STEPS), 1 / STEPS))


def test_faults_in_memory_begin_in_the_steps_that_are_asked(sampler):
    of = sampler(faults=(("bitflip:from=0..2", 1.0),), per="component")
    for target, first in (("param:head", 0), ("optim:head", 1)):
        steps = Counter(one.injection.step for one in draws(of, target=target))
        check(steps, dict.fromkeys(range(first, 3), 1 / (3 - first)))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"faults": (("RD:from=24", 1.0),)}, "from=24 of --fault goes beyond the last step: a run has 24 steps"),
        ({"faults": (("zero:from=3..30", 1.0),)}, "goes beyond the last step"),
        ({"faults": (("zero:from=0", 1.0),), "per": "component"}, "before the optimizer has state"),
    ],
)
def test_steps_that_there_are_not(sampler, changed, why):
    with pytest.raises(UsageError, match=why):
        sampler(**changed)
