"""Traces of one batch of an inference workload, for faults of every kind that a campaign draws; the engine is as before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sites.subjects import subjects
from unsilent.basics.errors import InjectionError
from unsilent.basics.fault_trace import BEFORE_FIRST_ROW
from unsilent.engine import PlainEngine, trace_batch
from unsilent.faults import Fault, fault_model
from unsilent.workloads import Workload


def engine_of(name):
    model, batch, run = subjects()[name]
    # A generated prompt is the input itself, which no operation makes: what follows it is judged.
    judged = (lambda m, b: run(m, b)[:, b.shape[1] :]) if name == "gpt" else run
    return PlainEngine(Workload(model, [batch, batch.clone()], run=judged, name=name))


@pytest.fixture(scope="module")
def cnn():
    return engine_of("cnn")


def drawn(engine, address, step=None, model="bitflip:bits=30", seed=1):
    """One fault at an address, in batch ``step``."""
    regions = [r for r in engine.select_regions([address]) if r.step == step]
    return fault_model(model).draw(regions, np.random.default_rng(seed))


def changed(found):
    return [found.rows[i].label for i in found.changed_rows]


SITES = {
    "param:conv.weight": ("conv#convolution.0", BEFORE_FIRST_ROW),
    "input:0": ("conv#convolution.0", BEFORE_FIRST_ROW),
    "op:conv#convolution.0/fwd/out": ("conv#convolution.0", 0),
    "op:norm#native_batch_norm.0/fwd/first": ("norm#native_batch_norm.0", 1),
    "op:head#addmm.0/fwd/second": ("head#addmm.0", None),
}


@pytest.mark.parametrize("site", SITES)
def test_every_kind_of_fault_is_traced(cnn, site):
    first, place = SITES[site]
    before = cnn.fingerprint()
    faults = drawn(cnn, site, None if site.startswith("param") else 1)
    found = trace_batch(cnn, 1, faults)
    assert changed(found)[0] == first
    (fault,) = found.faults
    assert fault.row == place if place is not None else found.rows[fault.row].label == first
    # The last row is what the batch gives: that must differ where the plain run differs, by as many elements.
    output = cnn.output(1, faults)
    assert found.rows[-1].change.changed == int((output.view(torch.int32) != cnn.golden[1].view(torch.int32)).sum())
    cnn.check_intact()
    assert cnn.fingerprint() == before


def test_operations_have_the_names_of_the_survey(cnn):
    names = {r.site.removeprefix("op:").removesuffix("/fwd/out") for r in cnn.select_regions(["op:*"])}
    assert {row.name for row in trace_batch(cnn, 0, []).rows} == names


def test_no_fault_changes_nothing(cnn):
    found = trace_batch(cnn, 0, [])
    assert len(found.rows) > 5
    assert (changed(found), found.faults, found.divergence, found.runs) == ([], (), None, 3)


def test_a_fault_of_another_batch_is_not_there(cnn):
    found = trace_batch(cnn, 0, drawn(cnn, "op:conv", 1))
    assert (changed(found), found.faults) == ([], ())


def test_a_fault_that_does_not_fit_is_an_error(cnn):
    (fault,) = drawn(cnn, "op:conv", 0)
    wrong = Fault(fault.site.replace("conv#", "cnov#"), fault.dtype, fault.shape, fault.elements, "xor", fault.operands)
    with pytest.raises(InjectionError, match="was not hit"):
        trace_batch(cnn, 0, [wrong])


@pytest.mark.parametrize("at", ["key", "value"])
def test_the_cache_of_a_generation(at):
    engine = engine_of("gpt")
    faults = drawn(engine, f"kv:0/{at}", 0, model="bitflip:bits=22", seed=3)
    found = trace_batch(engine, 0, faults)
    assert changed(found)
    assert found.faults[0].row is None
    before = {row.label for row in found.rows[: next(found.changed_rows)]}
    assert any("transformer.h.0" in label for label in before)  # the calls before that one are golden
    engine.check_intact()


def test_a_workload_that_draws_random_numbers():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(x + torch.randn(x.shape))

    torch.manual_seed(1)
    engine = PlainEngine(Workload(Noisy().eval(), [torch.ones(2, 4)], name="noisy"))
    found = trace_batch(engine, 0, drawn(engine, "fc.bias"))
    assert changed(found) == ["fc#addmm.0"]


def test_a_run_that_raises():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            y = self.fc(x)
            if y.abs().max() > 1e6:
                raise ArithmeticError("too large")
            return y * 2

    torch.manual_seed(1)
    engine = PlainEngine(Workload(Picky().eval(), [torch.ones(2, 4)], name="picky"))
    found = trace_batch(engine, 0, drawn(engine, "fc.bias", model="set:value=1e9"))
    assert found.divergence.error == "ArithmeticError: too large"
    assert found.divergence.golden == "(root)#mul.0"
    assert changed(found)[0] == "fc#addmm.0"
    engine.check_intact()
