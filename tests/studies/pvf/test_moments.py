"""When faults in values of a run begin: the batches that trials evaluate, counted by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.campaigns.export import canonical_lines
from unsilent.engine import make_engine
from unsilent.faults import fault_model
from unsilent.outcomes.base import Outcome
from unsilent.studies.pvf.kind import PvfStore

SIZES = (3, 5, 5, 2)


def workload():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    return unsilent.Workload(model, [torch.randn(n, 4) for n in SIZES], judge="top1", name="four batches")


def trials(path):
    """Of each trial, the batches with a fault, and those that were evaluated."""
    with PvfStore(path) as store:
        for row in store.rows():
            parts = torch.tensor(list(row.outcome_codes)).split(SIZES)
            evaluated = [i for i, part in enumerate(parts) if not bool((part == Outcome.SPARED).all())]
            yield sorted({fault["step"] for fault in json.loads(row.faults)}), evaluated


@pytest.mark.parametrize(
    ("fault", "at", "begun", "length"),
    [
        ("random:from=2", "op:*", {2}, 1),
        ("random:from=1..2", "op:*", {1, 2}, 1),
        ("random:from=0..1", "input:*", {0, 1}, 1),
        ("random:from=1..2,lasts=2", "op:1#relu.0", {1, 2}, 2),
        ("random:from=1,lasts=end", "op:1#relu.0", {1}, 3),
        ("1*random:from=3 + 1*bitflip:count=1,from=3", "op:*", {3}, 1),
    ],
)
def test_trials_begin_where_they_are_asked_to(fault, at, begun, length, tmp_path):
    lines = []
    for engine in ("auto", "plain"):
        path = tmp_path / f"{engine}.sqlite"
        unsilent.pvf(workload(), trials=30, fault=fault, at=at, engine=engine, store=path)
        with PvfStore(path) as store:
            lines.append(list(canonical_lines(store)))
    assert lines[0] == lines[1]
    seen = set()
    for batches, evaluated in trials(tmp_path / "auto.sqlite"):
        same_shape = [
            b for b in range(batches[0], batches[0] + length) if b < len(SIZES) and SIZES[b] == SIZES[batches[0]]
        ]
        assert batches == evaluated == same_shape
        seen.add(batches[0])
    assert seen == begun


def test_every_fault_of_one_batch(tmp_path):
    unsilent.pvf(
        workload(), trials="all", fault="bitflip:bits=31,from=3", at="op:1#relu.0", store=tmp_path / "s.sqlite"
    )
    found = list(trials(tmp_path / "s.sqlite"))
    assert len(found) == 2 * 6
    assert {tuple(batches) for batches, _ in found} == {(3,)}


def test_every_fault_lasts_as_long_as_asked(tmp_path):
    unsilent.pvf(
        workload(), trials="all", fault="bitflip:bits=31,from=1,lasts=2", at="op:1#relu.0", store=tmp_path / "s.sqlite"
    )
    found = list(trials(tmp_path / "s.sqlite"))
    assert len(found) == 5 * 6
    assert {tuple(batches) for batches, _ in found} == {(1, 2)}


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            {"fault": "random:from=4"},
            "from=4 of --fault goes beyond the last batch: the workload has 4 batches, counted from 0",
        ),
        ({"fault": "random:from=2..9"}, "from=2..9 of --fault goes beyond the last batch"),
        ({"fault": "random:from=1", "at": "param:*"}, "in all batches of its trial; leave out from"),
        ({"fault": "1*random:from=1 + 1*zero"}, "the parts of a mixture begin in different batches"),
    ],
)
def test_moments_that_there_are_not(asked, why):
    with pytest.raises(UsageError, match=why.replace("--fault", "(--fault|fault=)").replace("..", r"\.\.")):
        unsilent.pvf(workload(), **{"trials": 2, "at": "op:*", **asked})


def test_operations_of_a_later_call_have_later_numbers():
    """How one token of a generation is chosen: k of an address counts over all calls of its module."""

    def three_calls(model, batch):
        for _ in range(3):
            batch = torch.cat([batch[:, 1:], model(batch).argmax(1, keepdim=True).float()], 1)
        return batch[:, -3:].long()

    one = workload()
    generating = unsilent.Workload(one.model(), one.batches(), run=three_calls, judge="exact-sequence", name="calls")
    engine = make_engine(generating, engine="plain")
    changed = set()
    for call in range(3):
        (region,) = (r for r in engine.select_regions([f"op:1#relu.{call}"]) if r.step == 1)
        for fault in (fault_model("set:value=1e3").draw([region], np.random.default_rng(k)) for k in range(20)):
            different = (engine.output(1, fault) != engine.golden[1]).any(0)
            assert not different[:call].any()
            changed.update((call, token) for token in different.nonzero().flatten().tolist())
    assert {(0, 0), (1, 1), (2, 2)} <= changed
