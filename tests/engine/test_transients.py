"""Faults in what one evaluation computes, through the engine: which batch they act in, and how trials end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from sites.subjects import generate, gpt, seeded
from unsilent.basics.errors import InjectionError, UsageError
from unsilent.engine import PlainEngine
from unsilent.faults import Fault, fault_model
from unsilent.outcomes import Outcome
from unsilent.sites import Parameters


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, ids):
        return self.last(self.table(ids).sum(1).tanh())


def batches():
    return [torch.randint(0, 10, (n, 5), generator=seeded(n)) for n in (4, 2, 3)]


@pytest.fixture
def engine():
    return PlainEngine(unsilent.Workload(Net(), batches()))


def draw(regions, text="bitflip", seed=0):
    return fault_model(text).draw(regions, np.random.default_rng(seed))


def region(engine, address, step):
    (found,) = [r for r in engine.select_regions([address]) if r.step == step]
    return found


@pytest.mark.parametrize("step", [0, 1, 2])
def test_only_the_batch_that_is_corrupted_runs_and_counts(engine, step, monkeypatch):
    faults = draw([region(engine, "op:last", step)], "set:value=1e30")
    ran = []
    monkeypatch.setattr(engine, "_run", lambda batch, run=engine._run: ran.append(len(batch)) or run(batch))
    outcome = engine.trial(faults)
    assert ran == [(4, 2, 3)[step]]
    for i, batch in enumerate(outcome.batches):
        assert (batch.codes == Outcome.SPARED).all() == (i != step)
        assert not batch.severity[batch.codes == Outcome.SPARED].any()
    assert (outcome.batches[step].codes != Outcome.SPARED).all()


def test_the_output_is_that_of_a_run_by_hand(engine):
    model, ids = engine.model, engine.batches[1]
    with torch.no_grad():
        hidden = model.table(ids).sum(1).tanh()
        hidden[1, 2] = 5.0
        expected = model.last(hidden)
    corrupted = region(engine, "op:(root)#tanh.0", 1)
    (fault,) = draw([unsilent_region(corrupted, 6)], "set:value=5")
    assert torch.equal(engine.output(1, [fault]), expected)
    assert torch.equal(engine.output(0, [fault]), engine.golden[0])
    engine.check_intact()


def unsilent_region(region, element):
    from dataclasses import replace

    return replace(region, elements=np.array([element]))


def test_a_token_outside_of_the_table_is_an_exception_of_its_batch(engine):
    faults = draw([region(engine, "input:0", 2)], "set:value=11")
    outcome = engine.trial(faults)
    assert outcome.error.startswith("IndexError: index out of range")
    assert [Outcome(c).name for c in outcome.codes] == ["SPARED"] * 6 + ["EXCEPTION"] * 3
    assert outcome.severity == float("inf")
    engine.check_intact()


def test_a_fault_that_reaches_no_output_is_masked_and_one_that_is_golden_is_not_classified(engine, monkeypatch):
    faults = draw([region(engine, "op:last", 1)], "stuck:at=0,bits=0")  # the lowest bit of some output is 0 already
    monkeypatch.setattr(engine, "_evaluate", lambda batch, faults: engine.golden[batch])
    monkeypatch.setattr(engine, "judge", None)
    outcome = engine.trial(faults)
    assert [Outcome(c).name for c in outcome.codes] == ["SPARED"] * 4 + ["MASKED"] * 2 + ["SPARED"] * 3
    assert outcome.severity == 0


def test_memory_and_run_can_be_corrupted_together_by_hand(engine):
    memory = draw(engine.select_regions(["last.bias"]), "set:value=7")
    fault = draw([region(engine, "op:last", 1)], "set:value=-7")
    with torch.no_grad():
        engine.model.last.bias[int(memory[0].elements[0])], kept = 7.0, engine.model.last.bias.clone()
        expected = engine.model(engine.batches[1])
        expected.view(-1)[int(fault[0].elements[0])] = -7.0
        engine.model.last.bias.copy_(kept)
    assert torch.equal(engine.output(1, [*memory, *fault]), expected)
    assert (engine.trial([*memory, *fault]).codes != Outcome.SPARED).all()
    gone = moved(fault[0], site="op:last#addmm.1/fwd/out")
    with pytest.raises(InjectionError, match="is not in batch 1"):
        engine.trial([*memory, gone])


def moved(fault, **changes):
    from dataclasses import replace

    return replace(fault, **changes)


def test_a_fault_that_does_not_land_ends_the_trial_with_its_site(engine):
    (fault,) = draw([region(engine, "op:last", 1)])
    for wrong, why in (
        (moved(fault, site="op:last#addmm.4/fwd/out"), "no operation with the name of the site ran"),
        (moved(fault, step=0), r"the fault is for float32\[2, 3\], found float32\[4, 3\]"),
        (moved(fault, step=3), "acts in batch 3, but the workload has 3 batches"),
        (moved(fault, dtype="float64"), "the fault is for float64"),
        (moved(fault, site="input:1"), "no such input"),
    ):
        with pytest.raises(InjectionError, match=why):
            engine.trial([wrong])
    engine.check_intact()


class Branching(nn.Module):
    """Takes another way when its first value is large."""

    def forward(self, x):
        y = x * 2
        if float(y.reshape(-1)[0]) > 100:
            return y.exp()
        return (y - 1).tanh()


def test_a_way_that_an_earlier_fault_has_closed_is_no_error_but_one_that_never_was_is():
    engine = PlainEngine(unsilent.Workload(Branching(), [torch.ones(2, 3)]))
    first = unsilent_region(region(engine, "op:(root)#mul.0", 0), 0)
    (cause,) = draw([first], "set:value=1000")
    (lost,) = draw([region(engine, "op:(root)#tanh.0", 0)])
    assert torch.isinf(engine.output(0, [cause, lost])[0, 0])
    never = moved(lost, site="op:(root)#exp.0/fwd/out")  # golden has no such operation, the faulty run has
    assert engine.trial([cause, never]).codes.size == 2
    with pytest.raises(InjectionError, match="no operation with the name of the site ran"):
        engine.trial([never])
    with pytest.raises(InjectionError, match="no operation with the name of the site ran"):
        engine.trial([cause, moved(lost, site="op:(root)#sin.0/fwd/out")])


def test_a_generation_is_corrupted_in_its_cache():
    engine = PlainEngine(
        unsilent.Workload(
            gpt(), [torch.randint(0, 39, (2, 4), generator=seeded(2))], run=generate, judge="exact-sequence"
        )
    )
    found = engine.select_regions(["kv:1"])
    assert {(r.site, r.occurrence) for r in found} == {(f"kv:1/{e}", t) for e in ("key", "value") for t in (1, 2)}
    faults = draw([found[0]], "set:value=nan")
    assert (engine.trial(faults).codes >= Outcome.BENIGN).any()
    with pytest.raises(InjectionError, match="call 9 did not happen"):
        engine.trial([moved(faults[0], occurrence=9)])
    engine.check_intact()


def test_parameters_and_runs_do_not_mix_in_one_selection(engine):
    with pytest.raises(UsageError, match="run two campaigns"):
        engine.select_regions(["op:*", "last.*"])
    with pytest.raises(UsageError, match="exists only while the model runs"):
        Parameters(engine.model).select("op:last")
    with pytest.raises(UsageError, match="give a param: fault"):
        Parameters(engine.model).inject(draw([region(engine, "op:last", 0)]))


def test_a_run_whose_bits_change_when_it_is_watched_is_refused():
    from torch.utils._python_dispatch import _len_torch_dispatch_stack

    def run(model, batch):
        return model(batch) + _len_torch_dispatch_stack()

    engine = PlainEngine(unsilent.Workload(Net(), batches(), run=run))
    with pytest.raises(UsageError, match="observing operations changes the bits of the output"):
        engine.select_regions(["op:*"])


def test_random_draws_are_those_of_the_golden_run():
    engine = PlainEngine(unsilent.Workload(Net(), batches(), run=lambda m, b: m(b) + torch.randn(b.shape[0], 3) * 0.1))
    (fault,) = draw([region(engine, "op:last", 0)], "bitflip:bits=31")
    got, golden = engine.output(0, [fault]), engine.golden[0]
    assert int((got != golden).sum()) == 1


def test_a_fault_without_a_batch_acts_in_all_of_them(engine):
    mask = np.array([1 << 31], np.uint32)
    fault = Fault("op:(root)#tanh.0/fwd/out", "float32", (4, 4), np.array([0]), "xor", mask)
    with pytest.raises(InjectionError, match=r"found float32\[2, 4\]"):
        engine.trial([fault])
