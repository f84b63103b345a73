"""What the engine demands of a golden run, and what it gives back."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError, UserCodeError
from unsilent.engine import PlainEngine
from unsilent.engine.embedding_lookups import EmbeddingLookupCounter
from unsilent.outcomes import Outcome


def batches(n=3):
    return [torch.randn(4, 5, generator=torch.Generator().manual_seed(i)) for i in range(n)]


def engine(run=None, model=None, data=None, **kwargs):
    workload = unsilent.Workload(model or nn.Linear(5, 3), data or batches(), run=run or (lambda m, b: m(b)), **kwargs)
    return PlainEngine(workload)


def test_a_golden_run_that_is_not_finite_names_the_batch():
    data = batches()
    data[1][2, 3] = float("nan")
    with pytest.raises(UsageError, match="golden run, batch 1: the output holds NaN"):
        engine(data=data)


def test_a_golden_run_that_is_not_repeatable_names_the_batch():
    calls = itertools.count()

    def run(model, batch):
        return model(batch) + (next(calls) * 1e-3 if batch is data[2] else 0)

    data = batches()
    with pytest.raises(UsageError, match="golden run, batch 2: two fault-free runs differ"):
        engine(run, data=data)


def test_torch_randomness_is_seeded_so_that_runs_agree():
    made = engine(lambda m, b: m(b) + torch.randn(4, 3) * 0.1)
    assert made.seeded
    faults = unsilent.fault_model("set:value=1").draw(made.parameters.select("weight[0]"), rng(), "per-element")
    assert made.trial(faults).codes.shape == (12,)
    zero = unsilent.fault_model("bitflip:bits=0").draw(made.parameters.select("weight"), rng())
    assert (made.trial(zero).codes <= Outcome.BENIGN).all()


def test_a_model_that_changes_its_buffers_is_refused():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x):
            self.calls += 1
            return self.linear(x)

    with pytest.raises(UsageError, match="changes its own parameters or buffers"):
        engine(model=Counting())


def test_an_output_without_tensors_is_refused():
    with pytest.raises(UsageError, match="expected at least one tensor in it"):
        engine(lambda m, b: "text")


def test_a_judge_that_does_not_fit_is_refused_before_any_trial():
    with pytest.raises(UsageError, match="one score per sample"):
        engine(judge="threshold")


def rng():
    import numpy as np

    return np.random.default_rng(0)


def test_outputs_that_are_reused_memory_are_kept_apart():
    """A model may return the same buffer at every call; golden must not be overwritten by it."""
    memory = torch.zeros(4, 3)

    def run(model, batch):
        memory.copy_(model(batch))
        return memory

    made = engine(run)
    faults = unsilent.fault_model("set:value=1e9,count=5").draw(made.parameters.select("weight"), rng())
    assert (made.trial(faults).codes != Outcome.MASKED).any()


def test_outcome_of_exceptions_is_per_batch():
    def run(model, batch):
        if batch[0, 0] == data[1][0, 0] and model.weight.abs().max() > 1e6:
            raise ValueError("too large")
        return model(batch)

    data = batches()
    made = engine(run, data=data)
    faults = unsilent.fault_model("set:value=1e9").draw(made.parameters.select("weight"), rng())
    outcome = made.trial(faults)
    assert outcome.error == "ValueError: too large"
    assert (outcome.codes[4:8] == Outcome.EXCEPTION).all()
    assert (outcome.codes[:4] != Outcome.EXCEPTION).all()
    made.check_intact()


def test_dtype_changes_model_and_inputs():
    workload = unsilent.Workload(nn.Linear(5, 3), batches())
    made = PlainEngine(workload, dtype="bfloat16")
    assert made.golden[0].dtype == torch.bfloat16
    assert made.parameters.sites["weight"].memory.codec.name == "bfloat16"


@pytest.mark.parametrize("bag", [False, True])
def test_lookups_are_counted_by_row(bag):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.EmbeddingBag(6, 3, mode="sum") if bag else nn.Embedding(6, 3)

        def forward(self, ids):
            return self.table(ids) if bag else self.table(ids).sum(1)

    ids = torch.tensor([[0, 0, 5], [1, 5, 5]])
    made = engine(model=Model(), data=[ids])
    with EmbeddingLookupCounter(made.parameters) as lookups:
        made.workload.run(made.model, ids)
    assert lookups.counts["table.weight"].tolist() == [2, 1, 0, 0, 0, 3]


def test_golden_time_is_measured():
    made = engine(lambda m, b: (time.sleep(0.01), m(b))[1])
    assert made.golden_seconds > 0.03


def test_what_the_users_code_raises_in_the_second_golden_run_is_called_theirs():
    calls = []

    def run(model, batch):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("second call fails")
        return model(batch)

    work = unsilent.Workload(nn.Linear(2, 2), [torch.ones(1, 2)], run=run, name="twice")
    with pytest.raises(UserCodeError, match="twice .golden run, batch 0.' raised RuntimeError: second call fails"):
        PlainEngine(work)
